"""Several models behind one server: loaded when asked for, let go when memory is short, and never under a request."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.errors import CpuspecError
from cpuspec.server.server import Loader
from tests.server.running import PATIENCE_S, SMALL, Running, load, serving
from tools.make_tiny_model import make_tiny_gguf

NAMES = ("tiny", "second", "third")
BODY = {"prompt": "the cat", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny_gguf(directory / f"{name}.gguf", seed=seed, context_length=32768, **SMALL)
        for seed, name in enumerate(NAMES)
    }


@pytest.fixture(scope="module")
def expected(paths: dict[str, Path]) -> dict[str, str]:
    texts = {}
    for name, path in paths.items():
        with load(path) as llm:
            texts[name] = llm.generate("the cat", SamplingParams(max_tokens=6, ignore_eos=True))[0].text
    assert len(set(texts.values())) == len(NAMES)
    return texts


class Loads:
    """Loaders of the models, and how often each was called."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self.paths = paths
        self.loaded: list[str] = []
        self.loaders = {name: Loader(lambda name=name: self.load(name), 1000) for name in paths}  # type: ignore[misc]

    def load(self, name: str) -> LLM:
        self.loaded.append(name)
        return load(self.paths[name])


def ask(running: Running, name: str | None, **changes: Any) -> Any:
    given = {} if name is None else {"model": name}
    return running.post("/v1/completions", json=BODY | given | changes)


def text(running: Running, name: str | None) -> str:
    reply = ask(running, name)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == name or name is None
    found: str = reply.json()["choices"][0]["text"]
    return found


def listed(running: Running) -> dict[str, str]:
    return {row["id"]: row["status"]["value"] for row in running.get("/v1/models").json()["data"]}


def test_each_model_is_loaded_once_when_it_is_asked_for(paths: dict[str, Path], expected: dict[str, str]) -> None:
    loads = Loads(paths)
    with serving(loads.loaders["tiny"].load, loaders=loads.loaders) as running:
        assert loads.loaded == ["tiny"]
        assert listed(running) == {"tiny": "loaded", "second": "unloaded", "third": "unloaded"}
        with ThreadPoolExecutor(4) as pool:
            assert [reply.status_code for reply in pool.map(ask, [running] * 4, ["second"] * 4)] == [200] * 4
        assert loads.loaded == ["tiny", "second"]
        for name in NAMES:
            assert text(running, name) == expected[name]
        assert text(running, None) == expected["third"]  # the one that was asked for last
        assert set(listed(running).values()) == {"loaded"}
        assert ask(running, "fourth").status_code == 404
        metrics = running.get("/metrics").text
        assert running.get("/props?model=second").json()["model"] == "second"
        assert all(f'generation_tokens_total{{model_name="{name}"}}' in metrics for name in NAMES)
        assert metrics.count("# TYPE cpuspec:generation_tokens_total") == 1
        assert len(loads.loaded) == 3


def test_the_model_leaves_that_was_asked_for_longest_ago(paths: dict[str, Path], expected: dict[str, str]) -> None:
    loads = Loads(paths)
    with load(paths["tiny"]) as llm:
        llm.generate("the cat", SamplingParams(max_tokens=6, ignore_eos=True))
        num_bytes = sum(level.weight_bytes + level.kv_bytes for level in llm.memory())
    with serving(loads.loaders["tiny"].load, loaders=loads.loaders, models_gb=2.5 * num_bytes / 1e9) as running:
        for name in ("tiny", "second", "tiny", "third"):
            assert text(running, name) == expected[name]
        assert listed(running) == {"tiny": "loaded", "second": "unloaded", "third": "loaded"}
        assert text(running, "second") == expected["second"]
        assert listed(running) == {"tiny": "unloaded", "second": "loaded", "third": "loaded"}
        assert text(running, "tiny") == expected["tiny"]
        assert loads.loaded == ["tiny", "second", "third", "second", "tiny"]


def test_no_model_leaves_under_a_request(paths: dict[str, Path], expected: dict[str, str]) -> None:
    loads = Loads(paths)
    with serving(loads.loaders["tiny"].load, loaders=loads.loaders, models_gb=0) as running, running.client() as client:
        with client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 30000, "stream": True}) as stream:
            lines = stream.iter_lines()  # closes the stream when it is dropped
            next(lines)
            refused = ask(running, "second")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert text(running, "tiny") == expected["tiny"]
        running.eventually(lambda: ask(running, "second").status_code == 200)
        assert listed(running) == {"tiny": "unloaded", "second": "loaded", "third": "unloaded"}


def test_a_model_that_cannot_be_loaded_fails_its_requests_and_no_other(paths: dict[str, Path], expected: dict[str, str]) -> None:
    def broken() -> LLM:
        raise CpuspecError("no such model")

    loads = Loads(paths)
    loaders = loads.loaders | {"second": Loader(broken, 0)}
    with serving(loads.loaders["tiny"].load, loaders=loaders) as running:
        reply = ask(running, "second")
        assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
        assert text(running, "tiny") == expected["tiny"]


def test_a_star_among_the_aliases_forgives_every_name(paths: dict[str, Path], expected: dict[str, str]) -> None:
    loads = Loads(paths)
    with serving(lambda: loads.load("tiny"), aliases=("*",), loaders=loads.loaders) as running:
        for name, wanted in ((None, "tiny"), ("gpt-4o", "tiny"), ("second", "second"), ("claude", "second"), ("tiny", "tiny")):
            assert ask(running, name).json()["choices"][0]["text"] == expected[wanted], name
        assert [one["id"] for one in running.get("/v1/models").json()["data"]] == list(NAMES)
        assert running.get("/v1/models/gpt-4o").json()["status"]["value"] == "loaded"
    with serving(lambda: load(paths["tiny"]), aliases=("small", "*")) as running:
        assert [one["id"] for one in running.get("/v1/models").json()["data"]] == ["small"]
        assert ask(running, "gpt-4o").json()["model"] == "small"
    with serving(lambda: load(paths["tiny"]), aliases=("small",)) as running:
        assert ask(running, "gpt-4o").status_code == 404


def test_an_idle_model_is_unloaded_and_loaded_anew(paths: dict[str, Path], expected: dict[str, str]) -> None:
    loads = Loads(paths)
    with serving(loads.loaders["tiny"].load, loaders=loads.loaders, sleep_idle_seconds=0) as running:
        for number in range(3):
            assert text(running, "tiny") == expected["tiny"]
            running.eventually(lambda: listed(running)["tiny"] == "unloaded")
            assert running.get("/health").status_code == 200
            assert loads.loaded[number:]  # once for each request, and perhaps before the first one, which may come too late
        num_loaded = len(loads.loaded)
        told = running.get("/props").json()
        assert (told["model"], told["is_sleeping"], told["limits"]["max_new_tokens"]) == ("tiny", True, None)
        assert running.get("/slots", params={"model": "second"}).json() == running.get("/slots").json() == []
        assert running.get("/props", params={"model": "fourth"}).status_code == 404
        assert len(loads.loaded) == num_loaded, "nobody who watches a model wakes it"
        body = BODY | {"stream": True, "max_tokens": 4000}
        with running.client() as client, client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()  # closes the stream when it is dropped
            next(lines)
            loop = running.model.runner._loop
            asyncio.run_coroutine_threadsafe(running.server.unload("tiny"), loop).result(PATIENCE_S)
            assert running.server.models, "no model goes under a request"
