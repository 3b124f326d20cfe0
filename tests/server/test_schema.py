"""Bodies that schemathesis makes of the OpenAPI document, right and wrong: the server answers each, and its loop stays free."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from cpuspec.server.app import make_app
from cpuspec.server.server import Server
from cpuspec.settings import ServerConfig
from tests.server.running import PATIENCE_S, Running, load, serving, tiny_model, with_free_loop

SCHEMA = schemathesis.openapi.from_dict(make_app(Server("tiny", ServerConfig())).openapi())
OPERATIONS = {found.ok().label: found.ok() for found in SCHEMA.get_all_operations()}
CASES = [(label, mode) for label in sorted(OPERATIONS) for mode in GenerationMode if mode.is_positive or label.startswith("POST ")]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path, saved = tiny_model(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("slots")
    options: dict[str, Any] = {"slot_save_path": str(saved), "max_new_tokens": 4, "pooling": "mean"}
    with with_free_loop(), serving(lambda: load(path, context_length=512), **options) as found:
        yield found


@pytest.mark.parametrize(("label", "mode"), CASES, ids=lambda one: one if isinstance(one, str) else one.name.lower())
def test_no_request_makes_the_server_fail(running: Running, label: str, mode: GenerationMode) -> None:
    @given(OPERATIONS[label].as_strategy(generation_mode=mode))
    @settings(max_examples=8, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def ask(case: Any) -> None:
        reply = case.call(base_url=running.url, timeout=PATIENCE_S)
        assert reply.status_code < 500, (reply.status_code, reply.text, case.as_curl_command())

    ask()
