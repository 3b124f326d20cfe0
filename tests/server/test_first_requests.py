"""A server that is ready has built and imported what its endpoints need: no first request holds up others for that."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conformance.test_protocols import PROTOCOLS, STREAMS
from tests.server.running import templated_model
from tests.server.test_tools import TEMPLATE

REQUESTS: list[tuple[str, dict[str, Any] | None]] = [
    *((path, None) for path in ("/health", "/v1/models", "/props", "/slots", "/metrics", "/", "/api/tags")),
    *((one.path, one.body(max_tokens=2)) for one in (PROTOCOLS | STREAMS).values() if one.path != "/infill"),
    ("/apply-template", {"messages": [{"role": "user", "content": "the cat"}]}),
    ("/tokenize", {"content": "the cat"}),
    ("/openapi.json", None),
]
# Prints what was imported and built after the server was ready. The client has asked another server before, in vain.
SCRIPT = """
import contextlib, json, socket, sys
from pathlib import Path
import fastapi.routing
import httpx
from tests.server.running import load, serving

built, get_dependant = [], fastapi.routing.get_dependant
with serving(lambda: load(Path(sys.argv[1]))) as running:
    with socket.create_server(("127.0.0.1", 0)) as other, contextlib.suppress(httpx.TransportError):
        httpx.post(f"http://127.0.0.1:{other.getsockname()[1]}", json={}, timeout=0.1)
    before = set(sys.modules)
    fastapi.routing.get_dependant = lambda **given: built.append(given["path"]) or get_dependant(**given)
    statuses = [running.request("POST" if body else "GET", path, json=body).status_code for path, body in json.loads(sys.argv[2])]
print(json.dumps([statuses, sorted(set(sys.modules) - before), built]))
"""


def test_a_first_request_imports_and_builds_nothing(tmp_path: Path) -> None:
    path = templated_model(tmp_path, TEMPLATE)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SCRIPT, str(path), json.dumps(REQUESTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    statuses, imported, built = json.loads(done.stdout.splitlines()[-1])
    assert statuses == [200] * len(REQUESTS)
    assert imported == []
    assert built == []
