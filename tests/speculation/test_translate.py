"""Drafts by models with another vocabulary, against the target's own distribution and the draft model's own rows."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuspec.errors import ConfigError
from cpuspec.model.batch import ForwardOutput
from cpuspec.sampling import SparseRow, TokenHistory, argmax, dense, distribution
from cpuspec.sequence import Sequence
from cpuspec.settings import SamplingParams
from cpuspec.speculation.chain import ChainProposer
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.lookups import LookupProposer
from cpuspec.speculation.drafters.translate import TranslatedProposer
from cpuspec.speculation.drafters.vocab import SharedTokens
from cpuspec.speculation.proposer import NullProposer, Proposer
from tests.speculation.exact import ExactContext, ExactSource, check_draws
from tests.toys import PieceTokenizer, ToyBackend

# ------------------------------------------------------------------------------------------- exactly, over three and three tokens

OURS, THEIRS = PieceTokenizer([b"a", b"b", b"ab"]), PieceTokenizer([b"b", b"ba", b"a"])


def shared_by(ours: PieceTokenizer, theirs: PieceTokenizer) -> SharedTokens:
    return SharedTokens.find(ours, ours.vocab_size, theirs, "other")  # type: ignore[arg-type]


class FloatRows(ExactContext):
    """For a chain that chooses greedily, which looks at logits and draws nothing."""

    def score(self, seqs: list[Sequence], drafts: list[Draft], *of_models: object) -> list[ForwardOutput]:
        return [ForwardOutput(output.logits.astype(np.float32)) for output in super().score(seqs, drafts)]


def translated(by_text: bool, inner: Proposer | None = None) -> TranslatedProposer:
    shared = shared_by(OURS, THEIRS)
    context = FloatRows(0, 3) if by_text else ExactContext(0, 3, shared.partner >= 0)
    chain = ChainProposer(inner or NullProposer(), context, "other", 9)  # type: ignore[arg-type]
    return TranslatedProposer(chain, shared, by_text)


@pytest.mark.usefixtures("exact_rows")
@pytest.mark.parametrize("by_text", [False, True])
def test_another_vocabulary_yields_exactly_the_targets_distribution(by_text: bool) -> None:
    """Alone, over a source that drafts in its vocabulary, and under a model of the target's."""
    check_draws(translated(by_text), 3, 2, 3)
    if not by_text:
        check_draws(translated(by_text, ExactSource(3)), 3, 2, 3)
    middle = ChainProposer(translated(by_text), ExactContext(1, 3), "middle", 9)  # type: ignore[arg-type]
    check_draws(middle, 3, 2, 3)


# ------------------------------------------------------------------------------------------------- what is drafted, and from what

LETTERS = [bytes([97 + i]) for i in range(5)]
TARGET = PieceTokenizer(["<start>", "<end>", *LETTERS, b"ab", b"cd", b" e"], eos_ids={1}, bos_id=0)
DRAFT = PieceTokenizer([*LETTERS[::-1], b"abc", b"dd", b" ", "<|end|>", "<|extra|>", None], eos_ids={8})
PENALISED = SamplingParams(
    temperature=0.9, top_k=6, frequency_penalty=0.6, repetition_penalty=1.2, logit_bias={3: 1.5, 7: 9}, seed=5
)


def drafting(
    params: SamplingParams, by_text: bool = False, inner: Proposer | None = None, prompt: tuple[int, ...] = (0, 7, 4)
) -> tuple[TranslatedProposer, Sequence, ToyBackend]:
    """A model over DRAFT's tokens that drafts for a sequence of TARGET's."""
    model, shared = ToyBackend(3, DRAFT.vocab_size, memory=0.4, max_rows=64), shared_by(TARGET, DRAFT)
    context = Context(model, 2, 64, token_ids=None if by_text else np.sort(shared.draft_ids))
    proposer = TranslatedProposer(ChainProposer(inner or NullProposer(), context, "other", 6), shared, by_text)
    seq = Sequence.new(7, list(prompt), params)
    proposer.begin(seq, 0)
    return proposer, seq, model


@pytest.mark.parametrize("inner", [NullProposer, partial(LookupProposer, "ngram")])
def test_by_tokens_the_model_draws_shared_tokens_with_the_verifiers_random_numbers(inner: Any) -> None:
    proposer, seq, model = drafting(PENALISED, inner=inner())
    shared = shared_by(TARGET, DRAFT)
    partner = dict(zip(shared.draft_ids.tolist(), shared.verifier_ids.tolist(), strict=True))
    bias = {theirs: PENALISED.logit_bias[ours] for theirs, ours in partner.items() if ours in PENALISED.logit_bias}
    assert set(bias) == {3}
    params, prompt = replace(PENALISED, logit_bias=bias), [5]  # "<start>ab" + "c" is "abc" there
    for committed in ([], [2, 7], [5, 5, 4]):
        seq.extend(committed)
        (draft,) = proposer.propose([seq], [6])
        assert len(draft) == 6
        output = shared.text_for_draft(seq.output)
        for place, token in enumerate(draft.tokens.tolist(), seq.num_output_tokens):
            history = TokenHistory(prompt)
            history.extend(output)
            logits = np.where(shared.partner >= 0, model.row([*prompt, *output]), -np.inf).astype(np.float32)
            own, over = distribution(logits, params, history), np.zeros(TARGET.vocab_size)
            over[list(partner.values())] = dense(own)[list(partner)]
            assert token == seq.draws.draw(over, place)
            output.append(next(theirs for theirs, ours in partner.items() if ours == token))


@pytest.mark.parametrize("temperature", [0, 1])
def test_by_text_the_models_own_greedy_text_is_encoded_again(temperature: float) -> None:
    proposer, seq, model = drafting(SamplingParams(temperature=temperature, seed=1), by_text=True)
    for committed in ([], [2, 7], [5, 5, 4]):
        seq.extend(committed)
        (draft,) = proposer.propose([seq], [6])
        path = [5, *shared_by(TARGET, DRAFT).text_for_draft(seq.output)]
        start = len(path)
        while len(path) < start + 6:
            path.append(int(argmax(model.row(path))))
        assert draft.tokens.tolist() == shared_by(TARGET, DRAFT).text_for_verifier(path[start:])[:6]


@pytest.mark.parametrize("by_text", [False, True])
def test_a_limit_holds_and_the_sequence_stays_as_it_was(by_text: bool) -> None:
    proposer, seq, _ = drafting(PENALISED, by_text)
    for limit in (6, 0, 2):
        (draft,) = proposer.propose([seq], [limit])
        assert len(draft) <= limit
        assert seq.tokens == [0, 7, 4]
    assert [level.name for level in proposer.levels] == ["other"]
    proposer.end(seq)
    proposer.end(seq)
    assert len(proposer.context.slots.free) == 2


def test_a_request_that_never_asks_takes_no_slot_and_no_forward() -> None:
    proposer, seq, model = drafting(PENALISED)
    proposer.end(seq)
    assert len(proposer.context.slots.free) == 2
    assert model.num_forwards == 0


@pytest.mark.parametrize("by_text", [False, True])
def test_nothing_is_drafted_where_nothing_could_be(by_text: bool) -> None:
    """Every shared token forbidden, or no token of the prompt's to start from."""
    shared = shared_by(TARGET, DRAFT)
    forbidden = SamplingParams(temperature=1, logit_bias=dict.fromkeys(shared.verifier_ids.tolist(), -np.inf))
    for params, prompt in ((forbidden, (2,)), (SamplingParams(), (0,))):
        proposer, seq, _ = drafting(params, by_text, prompt=prompt)
        assert len(proposer.propose([seq], [4])[0]) == 0


@settings(max_examples=60)
@given(st.lists(st.tuples(st.lists(st.integers(2, 9), max_size=40), st.lists(st.integers(2, 9), max_size=5)), max_size=12))
def test_the_other_sequence_holds_the_same_text_whatever_was_drafted(steps: list[tuple[list[int], list[int]]]) -> None:
    proposer, seq, _ = drafting(PENALISED)
    text = lambda tokenizer, ids: b"".join(map(tokenizer.token_bytes, ids))  # noqa: E731
    for committed, drafted in steps:
        seq.extend(committed)
        extended = seq.with_drafted(drafted)
        DRAFT.num_encoded_bytes = 0
        other = proposer._follow(extended)
        num_new = len(committed) + len(drafted)
        assert DRAFT.num_encoded_bytes <= 2 * (3 + 40 + num_new), "only what is new and a bounded tail is encoded"
        assert text(DRAFT, other.output) == text(TARGET, extended.output)
        history = TokenHistory(other.tokens[: other.num_prompt_tokens])
        history.extend(other.output)
        assert _counted(history) == _counted(other.history)
    seq.finish(seq.num_output_tokens // 2, "stop")
    assert text(DRAFT, proposer._follow(seq).output) == text(TARGET, seq.output)


def _counted(history: TokenHistory) -> dict[int, int]:
    _, ids, counts = history.counts([])
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def test_a_long_answer_is_cut_before_words_so_that_it_splits_as_a_whole_would() -> None:
    words = PieceTokenizer([b" a", b" b", b"c", b" "])
    whole = PieceTokenizer([b"c", b"cc", b"a", b"b", b" ", b" acc", b" bcc"])
    shared = shared_by(words, whole)
    proposer = TranslatedProposer(ChainProposer(NullProposer(), Context(ToyBackend(1, 7), 1, 500)), shared, False)
    seq = Sequence.new(0, [3], SamplingParams())
    for _ in range(50):
        seq.extend([0, 2, 2, 1, 2, 2])
        other = proposer._follow(seq)
    assert other.output == [5, 6] * 50


# ------------------------------------------------------------------------------------------------------------- vocabularies


def test_tokens_are_paired_by_bytes_and_control_tokens_by_name_or_role() -> None:
    ours = PieceTokenizer([b"x", "<|im_end|>", "<eot>", "<s>", b"y", "<header>", b""], eos_ids={1, 2}, bos_id=3)
    theirs = PieceTokenizer([b"y", "<begin>", "</s>", "<|im_end|>", b"x", b"x", b"", None], eos_ids={2, 3}, bos_id=1, prefix=(1,))
    shared = shared_by(ours, theirs)
    assert dict(zip(shared.verifier_ids.tolist(), shared.draft_ids.tolist(), strict=True)) == {0: 5, 1: 3, 2: 2, 3: 1, 4: 0}
    assert (shared.partner >= 0).tolist() == [True, True, True, True, False, True, False, False]
    assert shared.partner.tolist() == [4, 3, 2, 1, -1, 0, -1, -1]
    assert shared.control == {1: 3, 2: 2, 3: 1}
    assert shared.prompt_for_draft([3, 5, 0, 2]) == shared.prompt_for_draft([0, 5, 2]) == [1, 5, 2]
    assert shared.text_for_verifier([0, 5, 3, 0]) == [4, 0, 1]
    assert shared.text_for_verifier([0, 7, 0]) == [4]
    row = np.array([0.5, 0, 0, 0.25, 0, 0.25, 0, 0])
    for of_draft in (row, SparseRow(np.flatnonzero(row), row[row > 0], 8)):
        moved = shared.row_for_verifier(of_draft)
        assert moved.vocab_size == 7
        assert dense(moved).tolist() == [0.25, 0.25, 0, 0, 0.5, 0, 0]


def test_whatever_ends_a_text_ends_it_in_a_vocabulary_with_one_end() -> None:
    shared = shared_by(PieceTokenizer([b"x", "<1>", "<2>", "<3>"], {1, 2, 3}), PieceTokenizer([b"x", "</s>"], {1}))
    assert shared.control == {1: 1, 2: 1, 3: 1}
    assert shared.partner.tolist() == [0, 1]


def test_an_unfinished_character_waits_for_its_bytes() -> None:
    halves = PieceTokenizer([b"\xc3", b"\xa9", b"x"])
    shared = shared_by(halves, PieceTokenizer([b"x", b"\xc3\xa9", b"\xc3", b"\xa9"]))
    assert shared.text_for_verifier([0, 2]) == [2]
    assert shared.text_for_verifier([0, 2, 3]) == [2, 0, 1]
    assert shared.text_for_verifier([3, 0]) == [1, 2]  # of a character that began before
    assert shared.text_for_draft([0]) == [2]
    assert shared.text_for_draft([0, 1]) == [1]


def test_vocabularies_without_a_common_text_token_are_refused() -> None:
    ours, theirs = PieceTokenizer([b"the", "<|im_end|>"]), PieceTokenizer([b"t", b"h", b"e", "<|im_end|>"])
    with pytest.raises(ConfigError, match="other has none of the 2 tokens of the model that it is to draft for; draft with"):
        shared_by(ours, theirs)
