"""The container file and the systemd unit name what exists: files, extras, options, models; and they end a server in peace."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from configparser import RawConfigParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from cpuspec.checkpoints.download import find_model
from cpuspec.checkpoints.recipes import Recipe
from cpuspec.cli.app import whole_command
from cpuspec.server.gate import OPEN_PATHS
from cpuspec.settings import ServerConfig

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "tools" / "cpuspec.service"
DOCKERFILE = (ROOT / "tools" / "Dockerfile").read_text()
INSTRUCTIONS = [
    (name, rest.strip()) for name, rest in re.findall(r"^([A-Z]+) (.*)$", re.sub(r"\\\n", " ", DOCKERFILE), re.MULTILINE)
]


def said(name: str) -> list[str]:
    """The arguments of every instruction of that name."""
    return [rest for one, rest in INSTRUCTIONS if one == name]


def serve_options(arguments: list[str]) -> dict[str, Any]:
    """What `cpuspec serve` understands of a command line; typer raises for what it does not know."""
    program, command, *rest = arguments
    assert (Path(program).name, command) == ("cpuspec", "serve")
    return dict(whole_command("serve").make_context("serve", rest).params)


def unit() -> RawConfigParser:
    parser = RawConfigParser(strict=True, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str
    parser.read(UNIT)
    return parser


# --- the container file


def test_the_image_is_made_of_files_and_extras_that_exist() -> None:
    sources = [path for rest in said("COPY") if not rest.startswith("--from") for path in rest.split()[:-1]]
    assert {"pyproject.toml", "cpuspec", "models"} <= set(sources)
    assert all((ROOT / path).exists() for path in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = project["tool"]["hatch"]["build"]
    assert {*build["targets"]["wheel"]["only-include"], build["hooks"]["custom"]["path"]} <= set(sources)
    assert {project["project"]["readme"], *project["project"]["license-files"]} <= set(sources)
    (extras,) = re.findall(r"\"\.\[([a-z,]+)\]\"", DOCKERFILE)
    wanted = {one for extra in extras.split(",") for one in project["project"]["optional-dependencies"][extra]}
    assert wanted
    assert not any(library in one for one in wanted for library in ("torch", "cuda", "nvidia"))


def test_the_image_serves_a_known_model_without_root_and_keeps_it_in_its_volume() -> None:
    assert all(image == "python:3.13-slim" for image in (rest.split()[0] for rest in said("FROM")))
    command = [*json.loads(said("ENTRYPOINT")[0]), *json.loads(said("CMD")[0])]
    found = serve_options(command)
    assert (found["host"], str(found["port"])) == ("0.0.0.0", said("EXPOSE")[0])
    assert isinstance(find_model(found["models"][0]), Recipe)
    assert said("USER") == ["cpuspec"]
    variables = dict(pair.split("=", 1) for pair in said("ENV")[0].split())
    assert variables["CPUSPEC_CACHE"] == said("VOLUME")[0]
    assert variables["HF_HOME"].startswith(said("VOLUME")[0])
    assert f"--owner={said('USER')[0]} {said('VOLUME')[0]}" in DOCKERFILE
    assert said("STOPSIGNAL") == ["SIGTERM"]


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_tells_whether_requests_are_answered(status: int, code: int) -> None:
    asked = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    _, program, flag, script = [None, *json.loads(said("HEALTHCHECK")[0].partition("CMD ")[2])]
    ast.parse(str(script))
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = f":{said('EXPOSE')[0]}/"
        assert port in str(script)
        script = str(script).replace(port, f":{server.server_port}/").replace("timeout=4", "timeout=100")
        done = subprocess.run([sys.executable, str(flag), script], capture_output=True, check=False)
        server.shutdown()
    assert (program, done.returncode) == ("python", code)
    assert set(asked) <= set(OPEN_PATHS)
    assert asked


# --- the systemd unit


def test_the_unit_starts_a_server_of_a_known_model_that_may_drain() -> None:
    service = unit()["Service"]
    found = serve_options(shlex.split(service["ExecStart"]))
    assert isinstance(find_model(found["models"][0]), Recipe)
    drain_s = ServerConfig().drain_s if found["drain_s"] is None else found["drain_s"]
    assert service["KillSignal"] == "SIGTERM"
    assert int(service["TimeoutStopSec"]) > drain_s
    variables = dict(pair.split("=", 1) for pair in service["Environment"].split())
    assert variables["CPUSPEC_CACHE"] == f"/var/cache/{service['CacheDirectory']}"


def test_systemd_takes_the_unit_and_finds_it_closed(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        service = unit()["Service"]
        closed = {"NoNewPrivileges", "PrivateDevices", "PrivateTmp", "ProtectHome", "ProtectKernelModules", "RestrictSUIDSGID"}
        assert all(service[name] == "yes" for name in closed)
        assert (service["DynamicUser"], service["ProtectSystem"], service["CapabilityBoundingSet"]) == ("yes", "strict", "")
        return
    program = shlex.split(unit()["Service"]["ExecStart"])[0]
    copy = tmp_path / UNIT.name
    for content, passes in ((UNIT.read_text(), True), (UNIT.read_text().replace("ProtectClock=", "ProtectTheClock="), False)):
        copy.write_text(content.replace(program, sys.executable))
        checked = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, check=False)
        assert (checked.returncode == 0 and not checked.stderr) == passes, checked.stderr
    copy.write_text(UNIT.read_text())
    rated = subprocess.run(
        [analyze, "security", "--offline=true", "--threshold=25", str(copy)], capture_output=True, text=True, check=False
    )
    assert rated.returncode == 0, rated.stdout


def test_a_push_and_a_release_run_what_ci_runs() -> None:
    workflows = ROOT / ".github" / "workflows"
    tests, release = ((workflows / f"{name}.yml").read_text("utf-8") for name in ("tests", "release"))
    assert "run: bash .ci/run\n" in tests
    assert all(f"\n  {event}:" in tests for event in ("push", "pull_request", "workflow_call"))
    assert "uses: ./.github/workflows/tests.yml\n" in release
    assert re.search(r"^  build:\n    needs: test\n", release, re.MULTILINE)
