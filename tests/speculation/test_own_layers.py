"""Mixtures with a layer for multi-token prediction, as converters write them: at default settings the layer drafts."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cpuspec import LLM
from cpuspec.backends import make_backend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.heads import own_mtp
from cpuspec.engine.heads import draft_casts
from cpuspec.model.batch import ForwardBatch
from cpuspec.settings import EngineConfig, SamplingParams
from tests.speculation.test_head_files import OWN, shape_of_own
from tools.make_tiny_model import (
    prediction_weights,
    random_weights,
    tiny_config,
    with_prediction,
    write_gguf,
    write_huggingface,
)

FAMILIES = [family for family, shape in OWN.items() if "expert_size" in shape and family != "qwen35"]
KINDS = ("f16", "q8_0")  # a directory of Hugging Face, and a file of llama-quantize
PROMPTS = [[7, 8, 9], [5, 6, 7, 8, 9, 10] * 6, [11, 5, 6, 7, 5, 6]]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
BRANCHES, OF_HEAD = 0.04, 0.3  # sizes of what layers add: the next token mostly depends on the last alone, which the head knows


def written(directory: Path, family: str, kind: str) -> Path:
    config = with_prediction(tiny_config(**shape_of_own(family) | {"tied": False}))
    weights, others, last = random_weights(config), prediction_weights(config), f"layers.{config.num_layers - 1}."
    for name in weights:
        if name.endswith((".o", "_o", "down")):
            weights[name] *= np.float32(OF_HEAD if name.startswith(last) else BRANCHES)
    eye = np.eye(config.hidden_size)
    others["eh_proj"] = np.concatenate([4 * eye, 0 * eye], axis=1).astype(np.float32)
    others |= {"enorm": np.ones(config.hidden_size, np.float32), "shared_head_norm": weights["norm"]}
    if kind == "q8_0":
        return write_gguf(directory / "model.gguf", config, weights, weight_format=kind, predicting=others)
    return write_huggingface(directory / "model", config, weights, dtype=kind, predicting=others)


def run(path: Path | str, spec: str, **settings: str) -> tuple[list[list[int]], int, int]:
    """The answers, drafted tokens and accepted ones."""
    with LLM(path, spec, settings=EngineConfig(threads=1, **settings)) as llm:  # type: ignore[arg-type]
        answers = [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)]
        levels = llm.levels.values()
        return answers, sum(one.num_draft_tokens for one in levels), sum(one.num_accepted_tokens for one in levels)


def figures(path: Path | str) -> Iterator[tuple[int, int]]:
    """Drafted and accepted tokens of the layer, at defaults and with the matrices as they are in the file."""
    wanted, _, _ = run(path, "none")
    assert run(path, "auto")[0] == wanted
    for settings in ({}, {"draft_format": "file"}):
        answers, *drafted = run(path, "mtp@3", **settings)
        assert answers == wanted
        yield tuple(drafted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixtures_own_layer_drafts_at_defaults(tmp_path: Path, family: str, kind: str) -> None:
    (drafted, accepted), (drafted_of_file, accepted_of_file) = figures(written(tmp_path, family, kind))
    assert drafted > 60
    assert accepted_of_file > drafted_of_file / 3
    # A file of 8 bits is not cast; a cast of 16 bits to 8 may choose another token now and then.
    assert abs(accepted - accepted_of_file) <= (0 if kind == "q8_0" else accepted_of_file / 10)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cast_layer_computes_what_the_layer_of_the_file_does(tmp_path: Path, family: str, format: str) -> None:
    target = open_checkpoint(written(tmp_path, family, "f16"))
    head, rng = own_mtp(target), np.random.default_rng(4)
    casts = draft_casts(head.model, format, target.tensors.values())
    assert not [name for name in casts if name.endswith(("router", "shared_weight"))]
    assert [name for name in casts if "expert_" in name]
    tokens = rng.integers(0, target.config.vocab_size, 24).tolist()
    hidden = rng.standard_normal((24, target.config.hidden_size)).astype(np.float32)
    logits = []
    for own in ({}, casts):
        backend = make_backend("numba", head.model, EngineConfig(threads=1, keep_packed=False), casts=own)
        batch = ForwardBatch(tokens, list(range(24)), [0], [0, 24], None, None, (0,), hidden)
        logits.append(backend.forward(batch, backend.new_cache(1, 64)).logits)
        backend.close()
    assert np.linalg.norm(logits[1] - logits[0]) < {"int8": 0.03, "int4": 0.25}[format] * np.linalg.norm(logits[0])
