"""A model that learns a target's answers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cpuspec import LLM
from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.adapters import adapter_facts, open_adapter
from cpuspec.errors import ConfigError
from cpuspec.model.batch import ForwardBatch
from cpuspec.text import make_tokenizer
from cpuspec.train.adapter import AdapterWeights, LoraShape
from cpuspec.train.answers import AnswerFiles, header_path
from cpuspec.train.distill import DistillTraining, Texts, read_answers
from cpuspec.train.job import ModelJob, train_model
from cpuspec.train.loop import Schedule
from cpuspec.train.model_files import GGUF_NAME, ModelWeights
from tests.backends.models import tiny
from tests.train.toy import FIRST, SETTINGS, SMALL, WORDS, text
from tools.make_tiny_model import make_tiny_hf

CPU = torch.device("cpu")
SHORT = Schedule(epochs=8, tokens=200, rate=3e-3, held_back=0.2, measured_every=1000)


def nothing(*_: object) -> None:
    """A listener that does not listen."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_hf(tmp_path_factory.mktemp("hf") / "small", tied=True, **SMALL))


@pytest.fixture(scope="module")
def texts() -> Texts:
    rng = np.random.default_rng(2)
    return Texts(Path("answers.jsonl"), [(text(rng, 24 + int(rng.integers(6))).tolist(), 3) for _ in range(40)])


def test_answers_in_other_tokens_are_refused(model: Checkpoint, tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "answers.jsonl", make_tokenizer(model)
    path.write_text(json.dumps({"id": "a@0", "prompt_ids": [1], "answer_ids": [2, 3], "temperature": 0.0, "source": "x"}) + "\n")
    assert len(read_answers([path], AnswerFiles(tokenizer), tokenizer, model.config.vocab_size)) == 1
    about = {"format": "cpuspec-answers", "version": 1, "model": "another", "tokenizer_sha256": "0" * 64}
    header_path(path).write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="answers of another, whose tokens are others"):
        read_answers([path], AnswerFiles(tokenizer), tokenizer, model.config.vocab_size)


def job(**changes: object) -> ModelJob:
    return ModelJob(3, replace(SHORT, **changes), device="cpu", dtype="f32", threads=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change", [{"attention_softcap": 2.0}, {"rotates_first": True}, {"layer_windows": (4, 0)}, {"logit_scale": 0.5}]
)
def test_a_model_that_sets_what_training_does_not_compute_is_refused(model: Checkpoint, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        ModelWeights(replace(model, config=replace(model.config, **change)), CPU)


def test_a_model_learns_answers_and_is_written_as_it_came(model: Checkpoint, texts: Texts, tmp_path: Path) -> None:
    log = train_model(model, texts, tmp_path / "out", job(), nothing, nothing)
    assert log[-1].mean_length > log[0].mean_length + 1
    written = open_checkpoint(tmp_path / "out")
    assert written.config == model.config
    state = torch.load(tmp_path / "out" / "training" / "state.pt", weights_only=True)["trained"]
    best = max(log, key=lambda line: line.mean_length)
    if best == log[-1]:
        state["norm"] *= best.sharpness
        assert all(np.array_equal(written.tensors[name].dequantize(), state[name].numpy()) for name in state)


def test_a_gguf_model_stays_one(texts: Texts, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tiny(tmp_path_factory, weight_format="q4_0", **SMALL)
    log = train_model(target, texts, tmp_path / "out", job(), nothing, nothing)
    assert log[-1].mean_length > log[0].mean_length + 0.5, "rounded to 4 bits, too, it learns"
    path = tmp_path / "out" / GGUF_NAME
    written, weights = open_checkpoint(path), ModelWeights(target, CPU)
    assert written.config == target.config
    state = torch.load(tmp_path / "out" / "training" / "state.pt", weights_only=True)["trained"]
    state["norm"] *= log[-1].sharpness
    weights.trained = {name: values.requires_grad_() for name, values in state.items()}
    for name, values in weights.served().items():
        if log[-1].mean_length == max(line.mean_length for line in log) and name in written.tensors:
            assert np.abs(written.tensors[name].dequantize() - values.detach().numpy()).max() < 1e-6, "what was trained is served"
    assert all(written.tensors[name].format == one.format for name, one in target.tensors.items())
    assert not torch.equal(weights.served()["layers.0.q"], state["layers.0.q"])
    prompt = [FIRST + WORDS, FIRST, FIRST + 1]
    with LLM(target, "none", settings=SETTINGS) as plain, LLM(target, str(path), settings=SETTINGS) as drafting:
        assert plain.generate([prompt])[0].token_ids == drafting.generate([prompt])[0].token_ids


def test_a_model_that_drafts_at_once_stays_one(model: Checkpoint, texts: Texts, tmp_path: Path) -> None:
    pard = tmp_path / "pard"
    shutil.copytree(model.path, pard)
    (pard / "config.json").write_text(json.dumps({**json.loads((pard / "config.json").read_text()), "pard_token": 319}))
    train_model(open_checkpoint(pard), texts, tmp_path / "out", job(epochs=1), nothing, nothing)
    assert open_checkpoint(tmp_path / "out").mask_id == 319


@pytest.mark.parametrize(("architecture", "targets"), [("llama", ()), ("phi3", ("qkv_proj", "down_proj")), ("qwen2", ("q_proj",))])
def test_an_adapter_learns_answers_and_is_what_peft_loads(
    texts: Texts, tmp_path: Path, architecture: str, targets: tuple[str, ...]
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base, out = open_checkpoint(make_tiny_hf(tmp_path / "base", architecture, **SMALL)), tmp_path / "out"
    lora = LoraShape(4, 4.0, targets)
    log = train_model(base, texts, out, job(rate=0.02, epochs=3)._replace(lora=lora), nothing, nothing)
    assert log[-1].step == 15
    facts = adapter_facts(out)
    assert facts is not None
    assert (facts.ranks, facts.scales, facts.base) == ([4], [1.0], str(base.path))
    assert not targets or facts.targets == sorted(targets)
    state = torch.load(out / "training" / "state.pt", weights_only=True)["trained"]
    weights = AdapterWeights(base, lora, 0, CPU)
    assert all(torch.equal(weights.served()[name], torch.from_numpy(one.dequantize())) for name, one in base.tensors.items())

    def loss() -> float:
        with torch.no_grad():
            found = DistillTraining(weights, 3).loss([texts[i] for i in range(8)], np.random.default_rng(0))
        assert found is not None
        return found.item()

    before = loss()
    weights.trained = state
    assert loss() < before - 0.3
    weights.save(out, torch.float32)
    tokens = texts[0].token_ids[:20]
    trained = DistillTraining(weights, 3).logits([replace(texts[0], token_ids=tokens)], weights.served()).numpy()
    backend = make_backend("numpy", base, SETTINGS)
    adapters = [((open_adapter(out, base.config, "tiny"), 1.0),)]
    served = backend.forward(
        ForwardBatch(tokens, list(range(20)), [0], [0, 20], adapters=adapters), backend.new_cache(1, 64)
    ).logits
    model = transformers.AutoModelForCausalLM.from_pretrained(base.path, dtype="float32")
    with torch.inference_mode():
        adapted = peft.PeftModel.from_pretrained(model, out).eval()
        loaded = adapted(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()
    assert np.abs(trained - loaded).max() < 1e-4
    assert np.abs(served - loaded).max() < 1e-4


def test_what_an_adapter_cannot_be_is_refused(model: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="has no module c_attn; wanted some of down_proj"):
        AdapterWeights(model, LoraShape(4, targets=("c_attn",)), 0, CPU)
    with pytest.raises(ConfigError, match="rank of 1 to 1024"):
        LoraShape(4096)
