"""Adapters of requests over the real kernels: an answer is that of its own adapters, whatever runs beside it or ran before."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cpuspec.engine.llm import LLM
from cpuspec.engine.lora import LoadedAdapters, LoRARequest
from cpuspec.errors import BackendError, CacheError, CheckpointError, ConfigError
from cpuspec.sequence import Sequence
from cpuspec.settings import SamplingParams
from tests.checkpoints.test_adapters import write_peft
from tests.conformance.harness import shown
from tests.engine.conftest import SMALL
from tools.make_tiny_model import make_tiny_hf

PARAMS = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=0)
PROMPTS = [np.random.default_rng(number).integers(3, 300, size).tolist() for number, size in enumerate((90, 41, 7))]


@pytest.fixture(scope="module")
def adapters(models: Path) -> list[Path]:
    """Two adapters of the tiny models."""
    model = make_tiny_hf(models / "hf", num_layers=2, **SMALL)
    found = [models / "one", models / "two"]
    for rank, path in enumerate(found, 3):
        write_peft(path, model, rank=rank, seed=rank)
    return found


@pytest.fixture
def adapted(opened: Callable[..., LLM], adapters: list[Path]) -> Callable[..., LLM]:
    """Opens LLMs that have both adapters, for requests that name them."""
    return lambda *args, **settings: opened(*args, lora_modules=[f"{path.name}={path}" for path in adapters], **settings)


SETS = [None, "one", "two", {"one": 1.0, "two": -0.5}, {"one": 0.5}]


@pytest.mark.parametrize(
    ("spec", "model"), [("none", "plain"), ("auto,self:mxfp4", "plain"), ("suffix", "plain"), ("mtp@3", "predicting")]
)
@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_answers_are_those_of_each_adapter_alone_without_drafts(
    adapted: Callable[..., LLM], spec: str, model: str, how: str
) -> None:
    params = PARAMS if how == "greedy" else SamplingParams(max_tokens=10, ignore_eos=True, logprobs=0, temperature=1.0, seed=3)
    expected = []
    with adapted("none", model, prefix_cache_gb=0) as plain:
        for one in SETS:
            expected += shown(plain.generate([PROMPTS[0]], params, lora_request=one))
    assert len({repr(one) for one in expected}) == len(SETS), "else the adapters change nothing"
    with adapted(spec, model, threads=2, max_sequences=len(SETS)) as llm:
        together = llm.generate([PROMPTS[0]] * len(SETS), params, lora_request=SETS)
        again = [llm.generate([PROMPTS[0]], params, lora_request=one)[0] for one in SETS[::-1]][::-1]
    assert shown(together) == shown(again) == expected


@pytest.mark.parametrize("on_disk", [False, True])
def test_prefixes_of_other_adapters_are_never_taken(adapted: Callable[..., LLM], tmp_path: Path, on_disk: bool) -> None:
    prompt = PROMPTS[0]
    with adapted(prefix_cache_gb=0) as fresh:
        expected = [shown(fresh.generate([prompt], PARAMS, lora_request=one)) for one in SETS]
    where = {"prefix_cache_dir": str(tmp_path / "prefixes")}
    llm = adapted(**where)
    for one, wanted in zip(SETS, expected, strict=True):
        (answer,) = llm.generate([prompt], PARAMS, lora_request=one)
        assert (answer.stats.num_cached_tokens, shown([answer])) == (0, wanted)
    if on_disk:
        llm.close()
        llm = adapted(**where)
    for one, wanted in zip(SETS, expected, strict=True):
        (answer,) = llm.generate([prompt], PARAMS, lora_request=one)
        assert answer.stats.num_cached_tokens > 60, "the same adapters find what they left"
        assert shown([answer]) == wanted
    # A text that a client gives as its salt is no adapter's.
    (answer,) = llm.generate([prompt], PARAMS, cache_salt=_salt(llm, "one"))
    assert (answer.stats.num_cached_tokens, shown([answer])) == (0, expected[0])


def _salt(llm: LLM, name: str) -> str:
    return Sequence.new(0, [1], PARAMS, adapters=llm.adapter_set(name)).salt


def test_prefixes_without_adapters_in_their_key_would_give_wrong_answers(
    adapted: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: it sees what it is to find."""
    with adapted(prefix_cache_gb=0) as fresh:
        expected = shown(fresh.generate([PROMPTS[0]], PARAMS, lora_request="one"))
    monkeypatch.setattr(Sequence, "salt", property(lambda seq: seq.params.cache_salt))
    llm = adapted()
    llm.generate([PROMPTS[0]], PARAMS)
    (answer,) = llm.generate([PROMPTS[0]], PARAMS, lora_request="one")
    assert answer.stats.num_cached_tokens > 60
    assert shown([answer]) != expected


def test_adapters_of_the_settings_are_for_requests_that_name_none(opened: Callable[..., LLM], adapters: list[Path]) -> None:
    plain, one = opened(), opened(lora=f"{adapters[0]}=0.5")
    texts = [one.generate(PROMPTS[:1], PARAMS, lora_request=lora) for lora in (None, {"one": 0.5}, {})]
    assert shown(texts[0]) == shown(texts[1]) != shown(texts[2]) == shown(plain.generate(PROMPTS[:1], PARAMS))
    assert one.score(PROMPTS[2]) == one.score(PROMPTS[2], lora_request={"one": 0.5}) != plain.score(PROMPTS[2])
    assert one.score(PROMPTS[2], lora_request={}) == plain.score(PROMPTS[2])
    states = [one.embed(PROMPTS[2], "mean", lora_request=lora) for lora in (None, {})]
    assert not np.array_equal(states[0], states[1])
    assert np.array_equal(states[1], plain.embed(PROMPTS[2], "mean"))
    with pytest.raises(CacheError, match="which adapters"):
        one.save_prefix(PROMPTS[0], adapters[0] / "prefix")


def test_a_lora_request_loads_its_adapter_once(opened: Callable[..., LLM], adapters: list[Path]) -> None:
    llm = opened()
    wanted = LoRARequest("mine", 1, str(adapters[0]))
    (first,) = llm.generate(PROMPTS[:1], PARAMS, lora_request=wanted)
    assert llm.adapters.names == ["mine"]
    streamed = [
        token for output in llm.stream(PROMPTS[0], PARAMS, lora_request=LoRARequest("mine", 1)) for token in output.token_ids
    ]
    assert streamed == first.token_ids != llm.generate(PROMPTS[:1], PARAMS)[0].token_ids
    assert llm.chat("hello", PARAMS, lora_request="mine").token_ids != llm.chat("hello", PARAMS).token_ids
    llm.adapters.unload("mine")
    with pytest.raises(ConfigError, match="no adapter is called 'mine'"):
        llm.generate(PROMPTS[:1], PARAMS, lora_request="mine")


def test_a_request_keeps_the_adapter_that_is_unloaded_while_it_runs(opened: Callable[..., LLM], adapters: list[Path]) -> None:
    llm = opened()
    llm.load_adapter(adapters[0])
    (wanted,) = llm.generate(PROMPTS[:1], PARAMS, lora_request="one")
    stream = llm.stream(PROMPTS[0], PARAMS, lora_request="one")
    tokens = [*next(stream).token_ids]
    llm.adapters.unload("one")
    llm.load_adapter(adapters[1], "one")
    assert [*tokens, *(token for output in stream for token in output.token_ids)] == wanted.token_ids


def test_scales_by_id_are_what_requests_without_names_use(opened: Callable[..., LLM], adapters: list[Path]) -> None:
    llm = opened(lora=[str(path) for path in adapters])
    llm.adapters.rescale({1: 0.25})
    assert [(one.id, one.name, one.scale) for one in llm.adapters] == [(0, "one", 0.0), (1, "two", 0.25)]
    assert shown(llm.generate(PROMPTS[:1], PARAMS)) == shown(llm.generate(PROMPTS[:1], PARAMS, lora_request={"two": 0.25}))
    for scales in ({7: 1.0}, {0: float("nan")}):
        with pytest.raises(ConfigError):
            llm.adapters.rescale(scales)


@pytest.mark.parametrize(
    ("lora", "error", "why"),
    [
        ("NOWHERE", CheckpointError, "adapter_config.json"),
        ("ONE=inf", ConfigError, "finite"),
        (["ONE", "ONE"], ConfigError, "called 'one' already"),
        ("MODEL", CheckpointError, "not a LoRA adapter"),
    ],
)
def test_adapters_that_cannot_be_are_refused_before_weights_are_loaded(
    opened: Callable[..., LLM], models: Path, adapters: list[Path], lora: str | list[str], error: type, why: str
) -> None:
    places = {"NOWHERE": models / "nowhere", "ONE": adapters[0], "MODEL": models / "plain.gguf"}
    given = [lora] if isinstance(lora, str) else lora
    with pytest.raises(error, match=why):
        opened(lora=["=".join([str(places[one.partition("=")[0]]), *one.split("=")[1:]]) for one in given])


@pytest.mark.parametrize("wanted", ["unknown", {"unknown": 1.0}, {"one": float("inf")}, LoRARequest("unknown"), 3, ["one", "one"]])
def test_a_request_for_what_is_no_adapter_is_refused(adapted: Callable[..., LLM], wanted: object) -> None:
    with pytest.raises(ConfigError):
        adapted().generate(PROMPTS[:1], PARAMS, lora_request=wanted)


def test_a_backend_without_adapters_refuses_them_at_once(models: Path, adapters: list[Path]) -> None:
    pytest.importorskip("onnxruntime")
    with pytest.raises(BackendError, match="applies no adapters"):
        LLM(models / "plain.gguf", "none", "onnxruntime", lora=str(adapters[0]))


def test_the_number_of_adapters_has_a_limit(adapters: list[Path], models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cpuspec.checkpoints import open_checkpoint

    monkeypatch.setattr("cpuspec.engine.lora._MOST", 1)
    loaded = LoadedAdapters(open_checkpoint(models / "plain.gguf").config, "plain", [str(adapters[0])])
    with pytest.raises(ConfigError, match="unload one"):
        loaded.load(adapters[1])
    loaded.load(adapters[1], "one", replaces=True)
