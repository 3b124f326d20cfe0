"""Mixtures larger than the memory, and heads over families with operations of their own, change no answer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.backends import make_backend
from cpuspec.backends.onnx_graph import export_onnx
from cpuspec.checkpoints import open_checkpoint
from cpuspec.cli.answer import explanation
from cpuspec.config import ModelConfig, RopeScaling
from cpuspec.environment import cache_dir
from cpuspec.errors import BackendError
from cpuspec.settings import EngineConfig
from tests.backends.models import every_backend, in_gguf
from tests.block_heads import make_block_head
from tests.conformance.harness import check_ways
from tests.heads import RandomHead, make_eagle1, make_eagle3
from tests.stage_heads import make_medusa
from tools.make_tiny_model import make_tiny_gguf

PROMPTS = ("the cat sat on the mat and the", "a list of words", "return return the", "x")


FAMILIES: dict[str, dict[str, Any]] = {
    "a mixture": {"architecture": "qwen3moe", "num_experts": 12, "num_used": 3},
    "sinks, windows, biases of experts": {"architecture": "gpt-oss", "weight_format": "mxfp4", "num_experts": 12},
    "layer norms, no gate": {"architecture": "starcoder2"},
    "parallel branches, windows": {"architecture": "cohere2", "num_layers": 3},
    "norms behind a rotation": {"architecture": "hunyuan_v1_dense"},
    "queries that grow": {"architecture": "ministral3", "context_length": 512},
    "LongRoPE of a part of a head": {
        "architecture": "phi3",
        "rope_dims": 48,
        "rope_scaling": RopeScaling(
            "longrope", original_context_length=64, attention_factor=1.2, factors=(3.0,) * 24, short_factors=(1.5,) * 24
        ),
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(make_tiny_gguf(path, **{"weight_format": "q8_0", "num_layers": 2, **FAMILIES[request.param]}))


def plain_answers(model: str, params: SamplingParams) -> list[list[int]]:
    with LLM(model, "none", threads=1) as llm:
        return [llm.generate(prompt, params)[0].token_ids for prompt in PROMPTS]


def check_specs(model: Path | str, specs: Sequence[str]) -> None:
    """Greedy answers with drafts, on one thread and on two in turns, are those of plain decoding."""
    params, usual = SamplingParams(max_tokens=24, ignore_eos=True), EngineConfig()
    ways = [(spec, {"threads": 1 + number % 2}) for number, spec in enumerate(specs)]
    check_ways(open_checkpoint(model), ways, PROMPTS, [params] * len(PROMPTS), usual)


def test_a_draft_that_skips_all_layers_with_experts_changes_no_answer(tmp_path: Path) -> None:
    check_specs(make_tiny_gguf(tmp_path / "tiny.gguf", **{"num_layers": 2, **in_gguf("bailingmoe2")}), ["skip:1@3"])


@pytest.mark.parametrize("model", ["a mixture"], indirect=True)
def test_a_mixture_larger_than_its_memory_gives_the_same_answers(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every kind of draft: none, looked up, some of the model's own layers, and casts that have a limit of their own."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=5)
    wanted = plain_answers(model, params)
    (tmp_path / "kernels").symlink_to(cache_dir() / "kernels")  # that are compiled already
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
    with LLM(model, "none", threads=1) as llm:
        limit = f"{llm.memory()[-1].weight_bytes * 6 // 10 / 1000:.3f}KB"
    for number, spec in enumerate(("none", "suffix:tree@8", "skip:1@3", "ngram,self:q8_0@4", "auto")):
        with LLM(model, spec, threads=1 + number % 2, memory=limit) as llm:
            assert [one.token_ids for one in llm.generate(list(PROMPTS), params)] == wanted, spec
            disk = {one.name: one.disk for one in llm.reads()}
            target = disk.pop("target")
            assert target
            assert 0 < target.num_found < target.num_experts
            assert target.num_bytes > 0
            # What a draft shares with the target counts once.
            assert all((one is not None) == name.startswith("self") for name, one in disk.items())
            text = explanation(llm)
            assert (spec == "auto") == any("time of all steps" in line for line in text)
            assert any("read from the disk" in line and "of the experts needed were in memory" in line for line in text)


HEADS: dict[str, Callable[[Path, ModelConfig], RandomHead]] = {
    "EAGLE-1": make_eagle1,
    "EAGLE-3": lambda path, target: make_eagle3(path, target, (1, 2), own_embedding=True),
    "DFlash": lambda path, target: make_block_head(path, target, (0, 1)),
    "DSpark": lambda path, target: make_block_head(path, target, (0, 1), markov="gated", confidence="state"),
    "Medusa": make_medusa,
}


TWO_OF_FIVE = [(name, head) for i, name in enumerate(FAMILIES) for head in (list(HEADS) * 2)[i % 5 : i % 5 + 2]]


@pytest.mark.parametrize(("model", "head"), TWO_OF_FIVE, indirect=["model"])
def test_heads_over_every_family_draft_and_change_no_answer(model: str, tmp_path: Path, head: str) -> None:
    """Each family under two kinds of heads: in trees, behind lookups, and as `auto` chooses."""
    path = HEADS[head](tmp_path / "head", open_checkpoint(model).config).path
    trees = [f"tree:{path}@6"] if head[:2] in ("EA", "Me") else []
    check_specs(model, [f"{path}@3", f"ngram@2+{path}@2", f"auto,{path}", *trees])


@pytest.mark.parametrize("model", ["a mixture"], indirect=True)
@every_backend(("onnxruntime", "openvino"))
def test_graphs_refuse_a_mixture_and_name_the_layer(model: str, tmp_path: Path, name: str) -> None:
    checkpoint, wanted = open_checkpoint(model), "layer 0 is a mixture of experts.* use the numba, numpy or torch backend"
    with pytest.raises(BackendError, match=wanted):
        make_backend(name, checkpoint, EngineConfig(threads=1))
    with pytest.raises(BackendError, match=wanted):
        export_onnx(checkpoint, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
