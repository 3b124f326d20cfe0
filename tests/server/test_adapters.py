"""LoRA adapters over HTTP: by the model's name, by llama.cpp's ids, and loaded by vLLM's endpoints where that is allowed."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.server.server import Loader
from tests.checkpoints.test_adapters import write_peft
from tests.conformance.test_protocols import PROTOCOLS
from tests.server.running import SMALL, Running, load, serving
from tools.make_tiny_model import make_tiny_hf

BODY = {"prompt": "the cat", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the adapters `one` and `two`, one of another model, and what leads out of it."""
    home = tmp_path_factory.mktemp("adapters")
    model, other = make_tiny_hf(home / "hf", **SMALL), make_tiny_hf(home / "other hf", **SMALL | {"hidden_size": 96})
    (directory := home / "loras").mkdir()
    for seed, (name, base) in enumerate({"one": model, "two": model, "other": other}.items()):
        write_peft(directory / name, base, seed=seed)
    write_peft(home / "outside", model, seed=9)
    (directory / "link").symlink_to(home / "outside")
    (directory / "empty").mkdir()
    return directory


@pytest.fixture(scope="module")
def running(path: Path, adapters: Path) -> Iterator[Running]:
    with serving(lambda: load(path, lora_modules=(f"one={adapters / 'one'}",)), lora_dir=str(adapters)) as found:
        yield found


@pytest.fixture(scope="module")
def texts(path: Path, adapters: Path) -> dict[str, str]:
    """The answer with each adapter, and with none."""
    with load(path, spec="none", lora_modules=tuple(f"{name}={adapters / name}" for name in ("one", "two"))) as llm:
        found = {name or "tiny": llm.generate("the cat", PARAMS, lora_request=name)[0].text for name in (None, "one", "two")}
    assert len(set(found.values())) == 3
    return found


def text(running: Running, path: str = "/v1/completions", **more: Any) -> str:
    reply = running.post(path, json=BODY | more)
    assert reply.status_code == 200, reply.text
    told = reply.json()
    return told["choices"][0]["text"] if "choices" in told else told["content"]


def test_requests_name_an_adapter_as_a_model_or_behind_the_models_name(running: Running, texts: dict[str, str]) -> None:
    for name, answer in {"tiny": "tiny", "one": "one", "tiny:one": "one"}.items():
        assert text(running, model=name) == texts[answer]
        assert running.post("/v1/completions", json=BODY | {"model": name}).json()["model"] == answer
        assert text(running, "/completion", model=name, n_predict=6) == texts[answer]
    assert running.post("/v1/completions", json=BODY | {"model": "tiny:two"}).status_code == 404
    assert running.post("/v1/completions", json=BODY | {"model": "two"}).status_code == 404


@pytest.mark.parametrize("name", ["chat completions", "messages", "responses", "Ollama's chat"])
def test_every_protocol_answers_with_the_adapter_that_the_model_names(running: Running, name: str) -> None:
    protocol = PROTOCOLS[name]
    bodies = [protocol.body("the cat", temperature=0, max_tokens=12) | {"model": model} for model in ("tiny", "one", "tiny:one")]
    without, *with_adapter = [protocol.read(running.post(protocol.path, json=body).json()) for body in bodies]
    assert with_adapter[0] == with_adapter[1] != without


def test_scores_of_a_prompt_are_the_adapters(running: Running) -> None:
    body = BODY | {"echo": True, "logprobs": 0, "max_tokens": 0}
    scores = [
        running.post("/v1/completions", json=body | {"model": name}).json()["choices"][0]["logprobs"]["token_logprobs"]
        for name in ("tiny", "one", "tiny:one")
    ]
    assert scores[1] == scores[2] != scores[0]


def test_models_list_adapters_beside_their_model(running: Running) -> None:
    rows = {row["id"]: row for row in running.get("/v1/models").json()["data"]}
    assert rows["one"]["parent"] == "tiny"
    assert rows["one"]["root"] == "one", "and not its directory"
    assert running.get("/v1/models/one").json()["parent"] == running.get("/v1/models/tiny:one").json()["parent"] == "tiny"
    assert running.get("/v1/models/two").status_code == 404
    assert {"tiny", "one"} <= {row["model"] for row in running.get("/api/tags").json()["models"]}


def test_llama_cpps_endpoint_and_field_scale_adapters_by_id(path: Path, adapters: Path, texts: dict[str, str]) -> None:
    given = tuple(str(adapters / name) for name in ("one", "two"))
    with serving(lambda: load(path, lora=given)) as running:
        assert [(row["id"], row["path"], row["scale"]) for row in running.get("/lora-adapters").json()] == [
            (0, "one", 1.0),
            (1, "two", 1.0),
        ]
        both = text(running)
        assert both not in texts.values()
        assert text(running, lora=[{"id": 1, "scale": 1.0}]) == texts["two"]
        assert text(running, "/completion", n_predict=6, lora=[{"id": 0, "scale": 1.0}]) == texts["one"]
        assert text(running, lora=[{"id": 0, "scale": 0}]) == texts["tiny"]
        assert text(running, lora=[]) == both
        assert running.post("/lora-adapters", json=[{"id": 1, "scale": 1.0}]).json() == {"success": True}
        assert text(running) == texts["two"]
        assert text(running, model="one") == texts["one"]
        for bad in ([{"id": 5, "scale": 1.0}], [{"id": 0, "scale": 1e999}], [{"id": 0}], [{"id": "x", "scale": 1}]):
            for route, body in (("/lora-adapters", bad), ("/v1/completions", BODY | {"lora": bad})):
                content = json.dumps(body).replace("Infinity", "1e999")
                assert running.post(route, content=content, headers={"content-type": "application/json"}).status_code == 400
        assert running.post("/v1/completions", json=BODY | {"model": "one", "lora": [{"id": 0, "scale": 1}]}).status_code == 400
        assert text(running) == texts["two"]
        refused = running.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": given[0]})
        assert (refused.status_code, "--lora-dir" in refused.text) == (403, True)
        assert running.post("/v1/unload_lora_adapter", json={"lora_name": "one"}).status_code == 403


def test_vllms_endpoints_load_and_unload_an_adapter(running: Running, adapters: Path, texts: dict[str, str]) -> None:
    for given in ("two", str(adapters / "two")):
        added = running.post("/v1/load_lora_adapter", json={"lora_name": "mine", "lora_path": given})
        assert (added.status_code, added.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
        assert text(running, model="mine") == text(running, model="tiny:mine") == texts["two"]
        assert text(running) == texts["tiny"], "which names no adapter"
        assert running.post("/v1/load_lora_adapter", json={"lora_name": "mine", "lora_path": "one"}).status_code == 400
        in_place = {"lora_name": "mine", "lora_path": "one", "load_inplace": True}
        assert running.post("/v1/load_lora_adapter", json=in_place).status_code == 200
        assert text(running, model="mine") == texts["one"]
        removed = running.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
        assert (removed.status_code, removed.text) == (200, "Success: LoRA adapter 'mine' removed successfully.")
        assert running.post("/v1/completions", json=BODY | {"model": "mine"}).status_code == 404
    assert running.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 404


@pytest.mark.parametrize(
    "given",
    ["", ".", "..", "../outside", "one/../../outside", "link", "/etc", "nowhere", "empty", "other", "a\0b", "x" * 5000, "one\n"],
)
def test_nothing_but_this_models_adapters_in_the_directory_is_loaded(running: Running, adapters: Path, given: str) -> None:
    reply = running.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": given})
    assert reply.status_code == 400
    assert str(adapters) not in reply.text
    outside = running.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": str(adapters.parent / "outside")})
    assert outside.status_code == 400
    assert [row["id"] for row in running.get("/v1/models").json()["data"]] == ["tiny", "one"]


def test_an_adapter_takes_no_models_name(running: Running) -> None:
    for name in ("", "tiny"):
        assert running.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": "two"}).status_code == 400


def test_clients_with_keys_of_their_own_do_not_change_each_others_scales(path: Path, adapters: Path) -> None:
    def make() -> LLM:
        return load(path, lora=(str(adapters / "one"),))

    with serving(make, keys=("a", "b")) as running:
        key = {"authorization": "Bearer a"}
        assert running.post("/lora-adapters", json=[{"id": 0, "scale": 0.0}], headers=key).status_code == 403


def test_adapters_stay_while_their_model_is_not_loaded(path: Path, adapters: Path, texts: dict[str, str]) -> None:
    def make() -> LLM:
        return load(path, lora_modules=(f"one={adapters / 'one'}",))

    loaders = {"tiny": Loader(make, 0)}
    with serving(make, loaders=loaders, sleep_idle_seconds=0, lora_dir=str(adapters)) as running:

        def sleep() -> None:
            until = time.monotonic() + 60
            while running.server.models:
                assert time.monotonic() < until, "an idle model is unloaded"
                time.sleep(0.02)

        assert text(running, model="one") == texts["one"]
        assert running.post("/v1/load_lora_adapter", json={"lora_name": "two", "lora_path": "two"}).status_code == 200
        for name in ("one", "two"):
            sleep()
            assert text(running, model=name) == texts[name]
        ids = {one["name"]: one["id"] for one in running.get("/lora-adapters").json()}
        assert running.post("/lora-adapters", json=[{"id": ids["two"], "scale": 1.0}]).status_code == 200
        sleep()
        assert text(running, model="tiny") == texts["two"]
