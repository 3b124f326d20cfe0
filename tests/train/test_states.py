"""States that are kept while a model answers are those which `extract` computes from the answers afterwards."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from cpuspec import LLM
from cpuspec.checkpoints import Checkpoint
from cpuspec.errors import ConfigError
from cpuspec.sequence import Sequence
from cpuspec.settings import EngineConfig, SamplingParams, SpecConfig
from cpuspec.speculation.verify import Verdict
from cpuspec.train import extract as extracting
from cpuspec.train.answers import AnswerFiles, AnswerPlan, make_answers
from cpuspec.train.extract import Extractor, LayerStates, extract, read_texts
from cpuspec.train.samples import FINAL, Extraction, Sample, open_samples, shard_paths
from cpuspec.train.states import AnswerStates, StateRecorder
from tests.train.models import tiny

FILES = ({"name": "tiny.gguf", "bytes": 1, "sha256": "0" * 64},)
SETTINGS = EngineConfig(threads=1, max_sequences=4, keep_packed=False)
TOP, LENGTH = 5, 400


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def plan(tmp_path: Path) -> AnswerPlan:
    """Prompts that begin alike, each answered twice, and some that the model makes up."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"text": "what the {number} of the {number * 7} things does"}}\n' for number in range(9)))
    return AnswerPlan((path,), num_self_made=3, temperatures=(0.0, 1.0), max_answer_tokens=24, max_prompt_tokens=300)


def about(checkpoint: Checkpoint, top: int = TOP) -> Extraction:
    config = checkpoint.config
    return Extraction("tiny", FILES, config.vocab_size, config.hidden_size, config.num_layers, (1, FINAL, 0), "f32", top)


def answered(checkpoint: Checkpoint, plan: AnswerPlan, out: Path, top: int = TOP, num_tokens: int | None = None) -> list[Sample]:
    """The samples in `out / "states"` beside `out / "answers.jsonl"`."""
    states = AnswerStates(checkpoint, about(checkpoint, top), out / "states")
    try:
        with LLM(checkpoint, SpecConfig(proposer=states.recorder), settings=replace(SETTINGS, context_length=LENGTH)) as llm:
            make_answers(llm, list(map(dict, FILES)), plan, out / "answers.jsonl", num_tokens, states=states)
    finally:
        states.close()
    return list(open_samples(out / "states"))


def extracted(checkpoint: Checkpoint, answers: Path, out: Path, top: int = TOP) -> tuple[int, list[Sample]]:
    """How many tokens had to be read again, and all samples."""
    with LLM(checkpoint, "none", settings=SETTINGS) as llm:
        extractor, said = Extractor(llm.backend, checkpoint, about(checkpoint).layers, top, LENGTH), about(checkpoint, top)
        texts = read_texts([answers], AnswerFiles(llm.tokenizer), LENGTH)
        summary = extract(extractor, said, texts, out)
    return summary.num_new_tokens, list(open_samples(out))


def check_equal(got: Sample, wanted: Sample) -> None:
    """Rows but the last are those of a forward over the whole text, within what other arithmetic for prompts may change."""
    assert got.token_ids.tolist() == wanted.token_ids.tolist()
    assert got.answer.tolist() == wanted.answer.tolist()
    scale = np.abs(wanted.hidden).max(axis=(0, 2))[:, None]
    assert (np.abs(got.hidden - wanted.hidden)[:-1] < 0.02 * scale).all()
    assert not got.hidden[-1].any()
    if got.top_ids is not None:
        chances = [np.exp(one.top_logits - one.log_sum[:, None])[:-1] for one in (got, wanted)]  # type: ignore[operator,index]
        np.testing.assert_allclose(*chances, atol=0.02)
        assert (got.top_ids[:-1, 0] == wanted.top_ids[:-1, 0])[chances[0][:, 0] > 0.1].all()  # type: ignore[index]
        assert (chances[0].sum(axis=1) > 0).sum() == got.answer.sum()


@pytest.mark.parametrize("top", [0, TOP])
def test_they_are_those_of_the_answers_read_again(checkpoint: Checkpoint, plan: AnswerPlan, tmp_path: Path, top: int) -> None:
    kept = answered(checkpoint, plan, tmp_path, top)
    _, wanted = extracted(checkpoint, tmp_path / "answers.jsonl", tmp_path / "again", top)
    assert len(kept) == len(wanted) > 12
    for got, sample in zip(kept, wanted, strict=True):
        check_equal(got, sample)
    with pytest.raises(AssertionError):
        check_equal(replace(kept[0], hidden=np.roll(kept[0].hidden, 1, axis=0)), wanted[0])
    num_new, same = extracted(checkpoint, tmp_path / "answers.jsonl", tmp_path / "states", top)
    assert (num_new, len(same)) == (0, len(kept)), "extract has no work"


def test_answers_are_the_same_whether_states_are_kept(checkpoint: Checkpoint, plan: AnswerPlan, tmp_path: Path) -> None:
    answered(checkpoint, plan, tmp_path)
    with LLM(checkpoint, "none", settings=SETTINGS) as llm:
        make_answers(llm, list(map(dict, FILES)), plan, tmp_path / "plain.jsonl")
    assert (tmp_path / "answers.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()


def test_a_sequence_that_was_put_back_keeps_the_states_of_cached_tokens(checkpoint: Checkpoint) -> None:
    recorder, seq = StateRecorder(LayerStates(checkpoint, (0,))), Sequence.new(5, [1, 2, 3], SamplingParams())
    rows = [np.full((1, checkpoint.config.hidden_size), number, np.float32) for number in range(6)]
    recorder.begin(seq, 0)
    recorder.accept(seq, Verdict([4], []), (np.concatenate(rows[:3]),))
    recorder.accept(seq, Verdict([5], []), (rows[3],))
    recorder.begin(seq, 2)
    recorder.accept(seq, Verdict([6], []), (np.concatenate(rows[2:]),))
    assert recorder.take(5)[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("lost", [0, 1, 9])
def test_a_run_that_was_broken_off_reads_what_is_missing(
    checkpoint: Checkpoint, plan: AnswerPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    monkeypatch.setattr(extracting, "_SHARD_BYTES", 4 * 3 * checkpoint.config.hidden_size * 60)  # of sixty tokens
    answered(checkpoint, plan, tmp_path, num_tokens=250)
    for path in shard_paths(tmp_path / "states")[::-1][:lost]:
        path.unlink()
    kept = answered(checkpoint, plan, tmp_path)
    _, wanted = extracted(checkpoint, tmp_path / "answers.jsonl", tmp_path / "again")
    assert [one.token_ids.tolist() for one in kept] == [one.token_ids.tolist() for one in wanted]
    for got, sample in islice(zip(kept[::-1], wanted[::-1], strict=True), 5):
        check_equal(got, sample)


def test_states_of_other_answers_are_refused(checkpoint: Checkpoint, plan: AnswerPlan, tmp_path: Path) -> None:
    answered(checkpoint, plan, tmp_path)
    (tmp_path / "answers.jsonl").unlink()
    with pytest.raises(ConfigError, match="sample 1 is of another text"):
        answered(checkpoint, replace(plan, seed=5), tmp_path)
