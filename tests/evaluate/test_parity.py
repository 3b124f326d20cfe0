"""Parity figures against their definitions; records that say the same as what they were made from; and files that nobody wrote."""

import copy
import json
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer import BadParameter

from cpuspec.backends import BACKENDS
from cpuspec.cli.parity import read_side
from cpuspec.errors import BackendError, ConfigError
from cpuspec.evaluate import quality
from cpuspec.evaluate.parity import (
    GreedyAnswer,
    LogitRow,
    ModelIdentity,
    ParityLimits,
    Question,
    compare_sides,
    open_side,
    record,
    row_difference,
)
from cpuspec.evaluate.parity_file import read_recording, write_recording
from cpuspec.settings import EngineConfig, SpecConfig
from tests.backends.models import SMALL, tiny

RNG = np.random.default_rng(0)
QUESTIONS = [Question([5, 9, 7, 5, 9, 8, 5, 9], 12), Question([300, 2, 11], 12), Question(RNG.integers(0, 300, 20).tolist(), 0)]
NGRAM = SpecConfig.parse("ngram")
TOP = 16


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A model and a much coarser copy of it."""
    return [tiny(tmp_path_factory, weight_format=name, tied=False, **SMALL) for name in ("f32", "q4_0")]


@contextmanager
def sides(*wanted, questions=QUESTIONS, spec=None):
    """Live sides, a (backend, checkpoint) each."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(open_side(name, checkpoint, questions, spec, EngineConfig(threads=1, kv_format="f32")))
            for name, checkpoint in wanted
        ]


@pytest.fixture(scope="module")
def two(checkpoints):
    """The model and its coarse copy, live."""
    with sides(*(("numpy", one) for one in checkpoints)) as opened:
        yield opened


@pytest.fixture(scope="module")
def live(two):
    return compare_sides(*two, QUESTIONS)


@pytest.fixture(scope="module")
def saved(two, checkpoints, tmp_path_factory):
    """A record of the model, and what is in its file: the JSON object, and the arrays."""
    path = tmp_path_factory.mktemp("records") / "run.safetensors"
    write_recording(record(two[0], ModelIdentity.from_checkpoint(checkpoints[0]), QUESTIONS, top=TOP, whole_rows=3), path)
    arrays = load_file(path)
    return path, json.loads(arrays.pop("record").tobytes()), arrays


def whole_text(side, number):
    return QUESTIONS[number].ids + side.answer(number).ids


# ----------------------------------------------------------------------------------------------------------------------- rows


def rows(vocab_size=500, rng=RNG):
    return [LogitRow.whole(rng.normal(0, 4, vocab_size).astype(np.float32)) for _ in range(2)]


def test_whole_rows_are_compared_as_the_definitions_say():
    a, b = rows()
    p, q = (np.exp(row.logits.astype(float)) / np.exp(row.logits.astype(float)).sum() for row in (a, b))
    found = row_difference(a, b)
    assert found.kl == pytest.approx((p * np.log(p / q)).sum())
    assert found.max_abs == pytest.approx(np.abs(a.logits - b.logits).max())
    assert (found.covered, found.whole, found.same_top) == (pytest.approx(1), True, p.argmax() == q.argmax())


@pytest.mark.parametrize("shortened", [(True, False), (False, True), (True, True)])
def test_what_short_rows_say_is_a_lower_bound_that_more_ids_make_no_worse(shortened):
    rng = np.random.default_rng(3)  # of its own: which tests ran before in a process is no matter
    for _ in range(20):
        a, b = rows(rng=rng)
        exact, bounds = row_difference(a, b), []
        for top in (1, 4, 16, 64, 256, 499):
            short = [row.likeliest(top) if cut else row for row, cut in zip((a, b), shortened, strict=True)]
            found = row_difference(*short)
            assert 0 <= found.kl <= exact.kl * (1 + 1e-6)
            assert found.max_abs <= exact.max_abs
            assert (found.same_top, found.whole) == (exact.same_top, False)
            bounds.append(found)
        assert all(before.kl <= after.kl * (1 + 1e-6) for before, after in pairwise(bounds))
        assert bounds[-1].kl == pytest.approx(exact.kl, rel=1e-2)


def test_a_short_row_has_the_likeliest_ids_the_lower_of_equals_first():
    row = LogitRow.whole(np.array([1, 3, 2, 3, 0], np.float32))
    short = row.likeliest(3)
    assert (short.ids.tolist(), short.logits.tolist(), short.logsumexp) == ([1, 3, 2], [3, 3, 2], row.logsumexp)
    assert (row.best, short.best) == (1, 1)
    assert row.likeliest(99).ids.tolist() == [1, 3, 2, 0, 4]


# ---------------------------------------------------------------------------------------------------------------- live sides


def test_figures_are_those_of_a_text_fed_to_both(two, live):
    for number, one in enumerate(live.prompts):
        text = whole_text(two[0], number)
        wanted = quality.compare_backends(two[0]._backend, two[1]._backend, text)
        assert one.num_rows == len(text)
        assert one.kl_mean == pytest.approx(wanted.kl_mean)
        assert one.same_top == wanted.same_top
        assert one.max_abs_logit_difference == pytest.approx(wanted.max_abs_logit_difference)
    assert live.exact
    assert live.num_rows == sum(one.num_rows for one in live.prompts)
    assert live.kl_mean == pytest.approx(np.average([one.kl_mean for one in live.prompts], weights=[20, 15, 20]))
    assert live.max_abs_logit_difference == max(one.max_abs_logit_difference for one in live.prompts)
    assert live.kl_median < live.kl_p99 <= live.kl_max


def test_the_first_difference_has_its_position_and_both_margins(two, live):
    asked = [(number, one) for number, one in enumerate(live.prompts) if one.num_tokens]
    assert any(one.first_difference for _, one in asked), "these models must differ, or nothing is tested"
    for number, one in asked:
        ours, theirs = (side.answer(number).ids for side in two)
        assert one.greedy_identical == (ours == theirs)
        if not one.greedy_identical:
            first = one.first_difference
            assert ours[: first.position] == theirs[: first.position]
            assert first.tokens == (ours[first.position], theirs[first.position])
            at = len(QUESTIONS[number].ids) + first.position - 1
            for side, (own, other), margin in zip(two, (first.tokens, first.tokens[::-1]), first.margins, strict=True):
                logits = list(side.rows(number, whole_text(two[0], number)))[at].logits
                assert margin == pytest.approx(float(logits[own]) - float(logits[other]))
                assert margin > 0
    assert not live.greedy_identical


# Pairs with the reference, and what makes them differ: the order of f32 sums, or int8 activations on one side.
PAIRS = {
    "numpy": "nothing",
    "torch:cpu": "sums",
    "onnxruntime:activations=f32": "sums",
    "openvino:activations=f32": "sums",
    "numba": "int8",
    "onnxruntime": "int8",
    "openvino": "int8",
}
assert {name.partition(":")[0] for name in PAIRS} == set(BACKENDS)
READ = [Question(np.random.default_rng(1).integers(0, 300, 200).tolist(), 0)]


def compared(checkpoint, name, questions=QUESTIONS, spec=NGRAM, of=None):
    """A side as `cpuspec parity` names it, beside the reference (of the same checkpoint, or of another one)."""
    try:
        wanted = read_side(name, EngineConfig(threads=1, kv_format="f32"))
    except BadParameter as error:
        if "not installed" not in str(error):
            raise
        pytest.skip(str(error))
    with ExitStack() as stack:
        [reference] = stack.enter_context(sides(("numpy", of or checkpoint), questions=questions, spec=spec))
        side = stack.enter_context(open_side(wanted.backend, checkpoint, questions, spec, wanted.settings))
        return compare_sides(reference, side, questions)


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def explained(request, tmp_path_factory):
    """A model, and how far rounding activations to int8 takes the reference itself."""
    checkpoint = tiny(tmp_path_factory, architecture=request.param, weight_format="q4_k", embed_format="q6_k")
    return checkpoint, compared(checkpoint, "numpy:activations=int8", READ, None)


@pytest.mark.parametrize("name", PAIRS)
def test_every_backend_is_as_far_from_the_reference_as_its_arithmetic_explains(explained, name):
    checkpoint, rounded = explained
    found = compared(checkpoint, name, READ, None)
    as_rounded = (2 * rounded.max_abs_logit_difference, 2 * rounded.kl_mean, 1 - 2 * (1 - rounded.same_top))
    difference, kl, same_top = {"nothing": (0, 0, 1), "sums": (1e-3, 1e-7, 0.99), "int8": as_rounded}[PAIRS[name]]
    assert found.max_abs_logit_difference <= difference
    assert found.kl_mean <= kl
    assert found.same_top >= same_top


def test_what_int8_explains_is_much_less_than_what_fewer_bits_of_weights_cost(checkpoints):
    rounded = compared(checkpoints[1], "numpy:activations=int8", READ, None)
    coarser = compared(checkpoints[1], "numpy", READ, None, of=checkpoints[0])
    assert 0 < 10 * rounded.kl_mean < coarser.kl_mean
    assert 0 < 3 * rounded.max_abs_logit_difference < coarser.max_abs_logit_difference


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_break_no_promise_of_any_backend(checkpoints, backend):
    found = compared(checkpoints[1], backend)
    assert found.failures(ParityLimits()) == []
    assert all(side["drafted"]["num_answers"] == 2 for side in found.sides)
    if backend == "numpy":
        assert (found.kl_max, found.max_abs_logit_difference, found.greedy_identical) == (0, 0, True)


def test_limits_that_are_not_kept_are_named(live):
    assert live.failures(ParityLimits()) == []
    assert live.failures(ParityLimits(live.same_top, live.kl_mean, live.max_abs_logit_difference)) == []
    wrong = ParityLimits(live.same_top + 0.01, live.kl_mean * 0.9, live.max_abs_logit_difference * 0.9, identical=True)
    assert [text.split()[0] for text in live.failures(wrong)] == ["same_top", "kl_mean", "max_abs_logit_difference", "greedy"]


@pytest.mark.parametrize("promised", [True, False])
def test_drafts_may_change_answers_only_where_nobody_promised_that_they_do_not(two, promised):
    class Changed:
        about = two[0].about | {"row_invariant": promised}
        answer, text, rows = two[0].answer, two[0].text, two[0].rows

        def drafted(self, number):
            ids = two[0].answer(number).ids
            return GreedyAnswer([*ids[:-1], ids[-1] ^ 1], levels={}) if ids else None

    failures = compare_sides(Changed(), two[1], QUESTIONS).failures(ParityLimits())
    assert len(failures) == promised
    assert all("drafts changed 2 of its answers" in text for text in failures)


def test_logits_that_are_not_finite_are_refused(checkpoints, monkeypatch):
    with sides(("numpy", checkpoints[0])) as [side]:
        forward = side._backend.forward

        def broken(batch, cache):
            output = forward(batch, cache)
            output.logits[-1, 3] = np.nan
            return output

        monkeypatch.setattr(side._backend, "forward", broken)
        with pytest.raises(BackendError, match="not finite after token 19 of prompt 3"):
            list(side.rows(2, QUESTIONS[2].ids))


def test_prompts_that_the_context_cannot_hold_are_refused_before_loading(checkpoints):
    with (
        pytest.raises(ConfigError, match="take 520 tokens, the model holds 512"),
        sides(("numpy", checkpoints[0]), questions=[Question([1] * 510, 10)]),
    ):
        pass


# -------------------------------------------------------------------------------------------------------------------- records


def test_a_record_is_read_as_it_was_written(two, checkpoints, tmp_path):
    run = record(two[0], ModelIdentity.from_checkpoint(checkpoints[0]), QUESTIONS, top=TOP, whole_rows=3)
    write_recording(run, tmp_path / "run.safetensors")
    read = read_recording(tmp_path / "run.safetensors")
    assert (read.model, read.prompts) == (run.model, run.prompts)
    assert read.about == run.about | {"recorded": "run.safetensors"}
    assert read.whole_rows.tolist() == [0, 27, 54]
    for name in ("top_ids", "top_logits", "logsumexp", "whole_rows", "whole_logits"):
        assert np.array_equal(getattr(read, name), getattr(run, name)), name


def test_a_side_agrees_with_its_own_record(two, saved):
    found = compare_sides(read_recording(saved[0]), two[0], QUESTIONS)
    assert (found.kl_max, found.max_abs_logit_difference, found.same_top) == (pytest.approx(0, abs=1e-9), 0, 1)
    assert found.greedy_identical
    assert (found.whole_rows, found.whole_rows_max_abs_logit_difference) == (3, 0)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_record_says_what_it_knows_and_nothing_more(two, live, saved, swapped):
    pair = (read_recording(saved[0]), two[1])
    found = compare_sides(*pair[::-1] if swapped else pair, QUESTIONS)
    assert not found.exact
    assert (found.num_rows, found.whole_rows) == (live.num_rows, 3)
    assert found.same_top == live.same_top
    assert [one.greedy_identical for one in found.prompts] == [one.greedy_identical for one in live.prompts]
    assert found.max_abs_logit_difference <= live.max_abs_logit_difference
    assert found.covered_min < found.covered_mean < 1
    assert "lower bound" in found.as_dict()["computed_from"]["kl"]
    if not swapped:  # the divergence is not symmetric
        assert live.kl_mean / 4 < found.kl_mean < live.kl_mean
        margins = [
            (one.first_difference.margins, other.first_difference.margins)
            for one, other in zip(found.prompts, live.prompts, strict=True)
            if other.first_difference
        ]
        for known, wanted in margins:
            assert known[1] == wanted[1]
            assert known[0] in (wanted[0], None)


def test_a_run_recorded_beside_another_has_rows_of_the_same_tokens(two, checkpoints, saved):
    first = read_recording(saved[0])
    beside = record(two[1], ModelIdentity.from_checkpoint(checkpoints[1]), QUESTIONS, first)
    alone = record(two[1], ModelIdentity.from_checkpoint(checkpoints[1]), QUESTIONS)
    fed = [one.fed for one in first.prompts]
    assert [one.fed for one in beside.prompts] == fed
    assert compare_sides(first, beside, QUESTIONS).num_rows == sum(map(len, fed))
    fewer = compare_sides(first, alone, QUESTIONS)
    asked = [one for one in fewer.prompts if one.first_difference]
    assert asked
    assert all(one.num_rows == one.num_prompt_tokens + one.first_difference.position for one in asked)
    assert fewer.prompts[2].num_rows == 20


def test_another_model_is_refused(checkpoints, tmp_path_factory):
    mine, theirs = map(ModelIdentity.from_checkpoint, checkpoints)
    mine.check_same(mine, "run.json")
    with pytest.raises(ConfigError, match=rf"run.json is of another model: tiny.gguf with sha256 {theirs.files[0]['sha256'][:12]}"):
        mine.check_same(theirs, "run.json")


# ------------------------------------------------------------------------------------------------------------------ bad files


def _of(name, value, *index):
    """A number, a row, or all of an array is another."""
    return lambda head, arrays: arrays[name].__setitem__(index or ..., value)


def _set(*path):
    *where, key, value = path

    def change(head, arrays=None):
        for step in where:
            head = head[step]
        head[key] = value

    return change


WRONG = {
    "another program's file": (_set("format", "benchmark"), "format is 'benchmark': Input should be 'cpuspec parity run'"),
    "an earlier version": (_set("version", 1), "version is 1: Input should be 2"),
    "no prompts": (_set("prompts", []), "prompts is wrong, wanted at least one"),
    "no files": (_set("model", "files", []), "files is wrong, wanted the sha256"),
    "a vocabulary of millions": (_set("model", "vocab_size", 1 << 40), "vocab_size is wrong"),
    "an id beyond the vocabulary": (_set("prompts", 0, "fed", 3, 9999), "wanted ids below 384"),
    "no ids": (_set("prompts", 0, "question", "ids", []), "fed of prompt 0 is wrong, wanted token ids that begin with"),
    "too few answers": (_set("prompts", 0, "answer", "ids", [1]), "wanted 12 token ids"),
    "tokens without time": (_set("prompts", 0, "answer", "num_decoded", 99), "num_decoded of prompt 0 is wrong, wanted at most 12"),
    "time that runs back": (_set("prompts", 0, "answer", "decode_s", -1), "decode_s is -1, wanted a number from 0"),
    "rows of other tokens": (_set("prompts", 2, "fed", [*QUESTIONS[2].ids, 1]), r"top_ids is wrong, wanted I32 \[56, 16\]"),
    "an array of another type": (lambda head, arrays: arrays.update(top_logits=np.zeros((55, 16), "i4")), r"wanted F32 \[55, 16\]"),
    "NaN": (_of("top_logits", np.nan), "the largest of a row first"),
    "no numbers": (_of("logsumexp", np.nan), "logsumexp is wrong"),
    "an id twice": (_of("top_ids", 7, 0), "each once in a row"),
    "rows in no order": (_of("top_logits", np.arange(16), 0), "the largest of a row first"),
    "more than all probability": (_of("logsumexp", -9.0, 4), "logsumexp is wrong"),
    "two rows for a position": (_of("whole_logits", 99.0, 1, 3), "whole_logits is wrong"),
    "a row of no position": (_of("whole_rows", 55, 2), "rising numbers below 55"),
    "terminal codes": (_set("about", "processor", "\x1b[2J"), "printable"),
    "a name of megabytes": (_set("about", "name", "x" * 10**6), "200 printable characters"),
    "bytes beyond every float": (_set("model", "files", 0, "bytes", 10**400), "wanted a number from 0 to"),
    "no name": (_set("about", "name", None), "about is wrong, wanted a name"),
}  # fmt: skip


def write(path, head, arrays):
    save_file({**arrays, "record": np.frombuffer(json.dumps(head).encode(), np.uint8)}, path)


@pytest.mark.parametrize(("change", "wanted"), WRONG.values(), ids=WRONG)
def test_a_file_that_no_run_wrote_is_refused_with_what_is_wrong(saved, tmp_path, change, wanted):
    head, arrays = copy.deepcopy(saved[1:])
    change(head, arrays)
    path = tmp_path / "wrong.safetensors"
    write(path, head, arrays)
    with pytest.raises(ConfigError, match=wanted) as raised:
        read_recording(path)
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < 800


def paths(value, *above):
    """Every place in a JSON value."""
    below = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, one in below:
        yield (*above, key)
        yield from paths(one, *above, key)


@pytest.mark.parametrize("instead", [None, True, -1, 1.5, "", [], {}, [[]], 10**400], ids=repr)
def test_whatever_stands_in_a_fields_place_the_error_is_one_line_or_there_is_none(saved, tmp_path, instead):
    path, errors = tmp_path / "wrong.safetensors", []
    for place in paths(saved[1]):
        value = copy.deepcopy(saved[1])
        _set(*place, instead)(value)
        write(path, value, saved[2])
        try:
            read_recording(path)
        except ConfigError as error:
            errors.append(str(error))
    assert all(str(path) in error for error in errors)
    assert len(errors) > 20


def test_a_file_that_cannot_be_read_or_written_is_named(two, checkpoints, tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.safetensors does not exist"):
        read_recording(tmp_path / "gone.safetensors")
    run = record(two[0], ModelIdentity.from_checkpoint(checkpoints[0]), QUESTIONS[:1], top=1, whole_rows=0)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_recording(run, tmp_path / "no directory" / "run.json")
