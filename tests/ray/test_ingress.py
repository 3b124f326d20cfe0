"""The ingress without a cluster: replicas that die, that are full and that come back, before one client."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from cpuspec.server.gate import NONCE
from cpuspec.settings import ServerConfig
from tests.ray.conftest import WHY
from tests.server.asgi import Application, application, parts, said
from tests.server.running import tiny_model

pytest.importorskip("ray", reason=WHY)
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from cpuspec.ray import serving

PATH = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "the cat sat"}], "max_tokens": 10, "temperature": 1}
STREAM = BODY | {"stream": True}


class Replicas:
    """Stands in for Ray's handle. deaths: after how many messages each replica dies; "full" where there is none with room."""

    def __init__(self, applications: list[Application], deaths: list[int | str]) -> None:
        self.answer = self
        self.scopes: list[dict[str, Any]] = []
        self._applications = applications
        self._deaths = deaths

    def options(self, **_: Any) -> "Replicas":
        return self

    def remote(self, scope: dict[str, Any], body: bytes) -> "Telling":
        number = len(self.scopes)
        self.scopes.append(dict(scope))
        death = self._deaths[number] if number < len(self._deaths) else None
        one: Any = SimpleNamespace(_app=self._applications[number % len(self._applications)].app)
        return Telling(serving.Replica.answer(one, dict(scope), body), death)


class Telling:
    """Stands in for Ray's stream of a replica's messages."""

    def __init__(self, messages: AsyncGenerator[list[Message]], death: int | str | None) -> None:
        self._messages = messages
        self._death = death

    def cancel(self) -> None:
        pass

    async def __aiter__(self) -> AsyncGenerator[list[Message]]:
        if self._death == "full":
            raise BackPressureError(1, 1)
        numbers = count()
        try:
            async for some in self._messages:
                alive = [message for message in some if self._death is None or next(numbers) < int(self._death)]
                yield alive
                if len(alive) < len(some):
                    raise RayActorError
        finally:
            await self._messages.aclose()


@pytest.fixture(scope="module")
def applications(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Application]]:
    """Two replicas, which draft differently."""
    path: Path = tiny_model(tmp_path_factory.mktemp("model"))
    with asyncio.Runner() as loop, application(path, loop) as first, application(path, loop, spec=None) as second:
        yield [first, second]


def told(
    monkeypatch: pytest.MonkeyPatch, applications: list[Application], body: dict[str, Any], *deaths: int | str
) -> tuple[list[Message], Replicas]:
    """What a client gets."""
    monkeypatch.setattr(serving, "_RETRY_S", 0.0)
    monkeypatch.setattr(serving.serve, "get_replica_context", lambda: SimpleNamespace(app_name="tiny"))
    replicas: Any = Replicas(applications, list(deaths))
    ingress = serving.Ingress(replicas, "tiny", ServerConfig(), ())
    front = replace(applications[0], app=ingress.__serve_build_asgi_app__())
    return front.messages(PATH, body, None), replicas


@pytest.mark.parametrize("rest", [[], ["full", 3, "full", "full", 20], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("death", range(12))
def test_a_client_gets_one_answer_whenever_replicas_die(
    monkeypatch: pytest.MonkeyPatch, applications: list[Application], death: int, rest: list[int | str]
) -> None:
    got, replicas = told(monkeypatch, applications, STREAM, death, *rest)
    nonce, _ = replicas.scopes[0][NONCE]
    wanted = [said for _, said in parts(applications[1].messages(PATH, STREAM, nonce))]
    created = replicas.scopes[0][NONCE][1]
    assert [said(message["body"]).replace(str(created), "1700000000") for message in got[1:]] == wanted
    assert not got[-1]["more_body"]
    whole, replicas = told(
        monkeypatch, applications, BODY, min(death, 1), *[min(one, 1) if isinstance(one, int) else one for one in rest]
    )
    assert (whole[0]["status"], len(whole), len(replicas.scopes)) == (200, 2, 2 + len(rest))


def test_what_was_not_taken_on_is_refused_where_every_replica_is_full(
    monkeypatch: pytest.MonkeyPatch, applications: list[Application]
) -> None:
    got, replicas = told(monkeypatch, applications, STREAM, "full")
    assert (got[0]["status"], len(replicas.scopes)) == (429, 1)


def test_an_answer_that_ends_every_replica_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, applications: list[Application]
) -> None:
    got, _ = told(monkeypatch, applications, BODY, *[1] * 5)
    assert got[0]["status"] == 500
    got, replicas = told(monkeypatch, applications, STREAM, *[4] * 5)
    assert (got[0]["status"], len(replicas.scopes)) == (200, 5)
    assert b"5 replicas have ended" in got[-1]["body"]


def test_each_request_has_a_nonce_of_its_own(monkeypatch: pytest.MonkeyPatch, applications: list[Application]) -> None:
    nonces = [told(monkeypatch, applications, STREAM, 3)[1].scopes for _ in range(2)]
    assert all(first[NONCE] == second[NONCE] for first, second in nonces)
    assert nonces[0][0][NONCE] != nonces[1][0][NONCE]
