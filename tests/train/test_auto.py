"""`cpuspec train auto`: from a model to a chain that drafts for it, in one go or in many."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cpuspec import LLM
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.cli.app import app
from cpuspec.engine.draft_spec import model_and_spec
from cpuspec.errors import CheckpointError, ConfigError, CpuspecError
from cpuspec.quantize.head_output import write_head
from cpuspec.settings import EngineConfig
from cpuspec.train import answers as answering
from cpuspec.train.answers import AnswerPlan
from cpuspec.train.auto import PROGRESS, AutoPlan, Listener, tune
from cpuspec.train.layout import read_head
from tests.heads import make_eagle3
from tests.train.models import tiny

SETTINGS = EngineConfig(threads=1, max_sequences=4, keep_packed=False)
STAGES = ("answers", "states", "step", "measured")


def nothing(*_: object) -> None:
    """A listener that does not listen."""


QUIET = Listener(nothing, nothing, nothing, nothing)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny(tmp_path_factory.mktemp("model"), num_layers=7)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> AutoPlan:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = [f"the {number} of the {7 * number} things that they have" for number in range(40)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    answers = AnswerPlan((path,), temperatures=(0.9,), max_answer_tokens=24)
    return AutoPlan(answers, max_tokens=400, hours=0.0, vocab_size=128, epochs=2)


def tuned(target: Checkpoint, out: Path, plan: AutoPlan, listener: Listener = QUIET) -> dict[str, Any]:
    return tune(target, str(target.path), out, plan, "numba", SETTINGS, listener)


@pytest.fixture(scope="module")
def whole(target: Checkpoint, plan: AutoPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nothing interrupts."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    tuned(target, out, plan)
    return out


def test_a_run_ends_with_a_chain_that_changes_no_answer(target: Checkpoint, whole: Path, plan: AutoPlan) -> None:
    done = json.loads((whole / PROGRESS).read_text())["done"]
    assert list(done) == ["answers", "states", "draft", "chain"]
    assert 400 <= done["answers"]["num_answer_tokens"] < 400 + 24, "it ends with the answer that brings enough"
    assert done["states"]["num_samples"] == done["answers"]["num_answers"]
    assert done["chain"]["num_identical"] == done["chain"]["num_prompts"] > 0
    name, spec = model_and_spec(done["chain"]["path"], None)
    assert (name, str(spec)) == (str(target.path), f"auto,{whole / 'draft.gguf'}")
    prompt = [[5, 6, 7, 8]]
    with LLM(target, "none", settings=SETTINGS) as plain, LLM(target, spec, settings=SETTINGS) as drafting:
        assert plain.generate(prompt)[0].token_ids == drafting.generate(prompt)[0].token_ids
    before = (whole / "draft.gguf").read_bytes()
    assert tuned(target, whole, replace(plan, hours=9.0)) == done, "a finished run is told again, and its hours may change"
    assert (whole / "draft.gguf").read_bytes() == before


@pytest.fixture(scope="module")
def of_given(target: Checkpoint, whole: Path, plan: AutoPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that is given the answers, so that it reads them again for their states."""
    out = tmp_path_factory.mktemp("runs") / "given"
    done = tuned(target, out, replace(plan, given=(whole / "answers.jsonl",)))
    assert list(done) == ["states", "draft", "chain"]
    return out


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_was_interrupted_ends_with_the_same_draft(
    target: Checkpoint, whole: Path, of_given: Path, plan: AutoPlan, tmp_path: Path, stage: str
) -> None:
    calls, same = itertools.count(), of_given if stage == "states" else whole
    if stage == "states":  # which are kept while it answers, unless it is given answers
        plan = replace(plan, given=(whole / "answers.jsonl",))

    def interrupt(*_: object) -> None:
        if next(calls) == 3 * (stage != "measured"):
            raise KeyboardInterrupt

    listeners = [interrupt if one == stage else nothing for one in STAGES]
    with pytest.raises(KeyboardInterrupt):
        tuned(target, tmp_path / "run", plan, Listener(*listeners))
    assert not list((tmp_path / "run").glob("*.toml"))
    tuned(target, tmp_path / "run", plan)
    for name in ("answers.jsonl", "draft.gguf")[stage == "states" :]:
        assert (tmp_path / "run" / name).read_bytes() == (same / name).read_bytes(), name


def test_hours_that_are_over_end_answers_and_training(
    target: Checkpoint, plan: AutoPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_of_answers, step_of_training = itertools.count(step=100), itertools.count(step=1000)
    monkeypatch.setattr(answering, "now_s", lambda: float(next(step_of_answers)))
    monkeypatch.setattr("cpuspec.train.loop.now_s", lambda: float(next(step_of_training)))
    longer = replace(plan, hours=1.0, answers=replace(plan.answers, max_answer_tokens=8))
    done = tuned(target, tmp_path / "run", longer)
    assert 2 <= done["answers"]["num_answers"] < 20, "1800 of 3600 seconds, of which four answers took 800"
    assert done["draft"]["best"]["epoch"] < 2
    assert done["chain"]["num_identical"] == done["chain"]["num_prompts"]


def test_a_head_of_a_gguf_file_is_gone_on_with(target: Checkpoint, whole: Path, plan: AutoPlan, tmp_path: Path) -> None:
    """As somebody with a fine-tune does with the published head of its base."""
    published, head = tmp_path / "published.gguf", read_head(whole / "draft", target)
    write_head(published, head, target, has_tokenizer=False)
    done = tuned(target, tmp_path / "run", replace(plan, source=published))
    first = read_head(tmp_path / "run" / "draft" / "training" / "start", target)
    assert (first.layers, first.token_ids.tolist()) == (head.layers, head.token_ids.tolist())
    for name, tensor in head.model.tensors.items():
        assert np.array_equal(first.model.tensors[name].dequantize(), tensor.dequantize()), name
    assert done["chain"]["num_identical"] == done["chain"]["num_prompts"]


def test_a_small_model_is_taught_without_states(target: Checkpoint, plan: AutoPlan, tmp_path: Path) -> None:
    small = tiny(tmp_path, num_layers=1)
    done = tuned(target, tmp_path / "run", replace(plan, source=small.path, epochs=1))
    assert list(done) == ["answers", "draft", "chain"]
    assert open_checkpoint(done["draft"]["path"]).config == small.config
    assert done["chain"]["num_identical"] == done["chain"]["num_prompts"]


def test_answers_that_are_there_are_trained_on(
    target: Checkpoint, whole: Path, of_given: Path, plan: AutoPlan, tmp_path: Path
) -> None:
    halves = [tmp_path / name for name in ("first.jsonl", "second.jsonl")]
    lines = (whole / "answers.jsonl").read_bytes().splitlines(keepends=True)
    halves[0].write_bytes(b"".join(lines[:5]))
    halves[1].write_bytes(b"".join(lines[3:]))
    done = tuned(target, tmp_path / "run", replace(plan, given=tuple(halves)))
    assert list(done) == ["states", "draft", "chain"]
    assert done["states"]["num_samples"] == len(lines)
    assert (tmp_path / "run" / "draft.gguf").read_bytes() == (of_given / "draft.gguf").read_bytes()
    halves[1].write_bytes(b"".join(lines[3:-1]))
    with pytest.raises(CheckpointError, match="with another given"):
        tuned(target, tmp_path / "run", replace(plan, given=tuple(halves)))


def test_what_cannot_be_trained_is_told_before_anything_is_computed(target: Checkpoint, plan: AutoPlan, tmp_path: Path) -> None:
    shallow = tiny(tmp_path, num_layers=3)
    other = make_eagle3(tmp_path / "head", replace(target.config, hidden_size=32))
    for model, changed, told in (
        (shallow, plan, "three layers"),
        (target, replace(plan, source=other.path), "cannot draft"),
        (target, replace(plan, intermediate_size=1 << 20), "numbers inside"),
    ):
        with pytest.raises(CpuspecError, match=told):
            tuned(model, tmp_path / "run", changed)
        assert not (tmp_path / "run").exists()


def test_another_run_in_the_same_directory_is_refused(target: Checkpoint, whole: Path, plan: AutoPlan, tmp_path: Path) -> None:
    for changed, told in ((replace(plan, vocab_size=64), "vocab_size"), (replace(plan, max_tokens=401), "max_tokens")):
        with pytest.raises(CheckpointError, match=f"with another {told}"):
            tuned(target, whole, changed)
    (tmp_path / PROGRESS).write_text('{"settings": 1}')
    with pytest.raises(CheckpointError, match="settings"):
        tuned(target, tmp_path, plan)
    (tmp_path / PROGRESS).unlink()
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(ConfigError, match="samples with an answer"):
        tuned(target, tmp_path / "none", replace(plan, answers=replace(plan.answers, prompts=(empty,))))


def test_the_command_makes_a_chain_that_generate_takes(target: Checkpoint, plan: AutoPlan, tmp_path: Path) -> None:
    prompts, out = str(plan.answers.prompts[0]), tmp_path / "My Draft"
    told = {"prompts": prompts, "max-tokens": 200, "max-answer-tokens": 16, "vocab": 128, "epochs": 1, "threads": 1, "hours": 0}
    options = [text for name, value in told.items() for text in (f"--{name}", str(value))]
    done = CliRunner().invoke(app, ["train", "auto", str(target.path), str(out), *options, "--json"])
    assert done.exit_code == 0, done.output
    chain = json.loads(done.stdout)["chain"]["path"]
    assert Path(chain).name == "my-draft.toml"
    assert f"use it: cpuspec generate {chain}" in done.stderr
    drafted = CliRunner().invoke(app, ["generate", chain, "--raw", "the things", "--max-tokens", "4", "--threads", "1"])
    assert drafted.exit_code == 0, drafted.output
    small = tiny(tmp_path, num_layers=1)
    again = ["train", "auto", chain, str(tmp_path / "more"), *options, "--from", str(small.path), "--json"]
    done = CliRunner().invoke(app, again)
    assert done.exit_code == 0, done.output
    name, spec = model_and_spec(json.loads(done.stdout)["chain"]["path"], None)
    drafters = ["auto", str(out / "draft.gguf"), str(tmp_path / "more" / "draft" / "model.gguf")]
    assert (name, [one.drafter for one in spec.levels]) == (str(target.path), drafters), "a chain keeps what it has"
    wrong = CliRunner().invoke(app, ["train", "auto", str(target.path), str(out), "--from", "no/such.gguf"])
    assert (wrong.exit_code, "no/such.gguf" in wrong.stderr) == (2, True)
