"""Parity figures against their definitions; records that say the same as what they were made from; and files that nobody wrote."""

import base64
import copy
import json
import zlib
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import numpy as np
import pytest
from typer import BadParameter

from cpuspec.backends import BACKENDS
from cpuspec.cli.parity import read_side
from cpuspec.errors import BackendError, ConfigError
from cpuspec.evaluate import parity_file, quality
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
from tests.model_files import few_bytes

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
    """A record of the model, and what is in its file."""
    path = tmp_path_factory.mktemp("records") / "run.json"
    write_recording(record(two[0], ModelIdentity.from_checkpoint(checkpoints[0]), QUESTIONS, top=TOP, whole_rows=3), path)
    return path, json.loads(path.read_text("utf-8"))


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


def test_drafts_are_counted_on_both_sides_and_compared_with_plain_answers(checkpoints):
    with sides(*(("numpy", one) for one in checkpoints), spec=NGRAM) as both:
        found = compare_sides(*both, QUESTIONS)
    for side in found.sides:
        assert side["tokens_per_s"] > 0
        assert side["drafted"]["tokens_per_s"] > 0
        assert side["drafted"]["num_identical"] == side["drafted"]["num_answers"] == 2
        assert side["drafted"]["levels"]["ngram"]["num_draft_tokens"] > 0


def test_without_drafts_there_is_nothing_of_them(live):
    assert [side["drafted"] for side in live.sides] == [None, None]


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
    write_recording(run, tmp_path / "run.json")
    read = read_recording(tmp_path / "run.json")
    assert (read.model, read.questions, read.texts) == (run.model, run.questions, run.texts)
    assert (read.answers, read.drafts) == (run.answers, run.drafts)
    assert read.about == run.about | {"recorded": "run.json", "versions": {}}
    assert read.whole.keys() == run.whole.keys() == {(0, 0), (1, 7), (2, 19)}
    for mine, theirs in zip(run.kept, read.kept, strict=True):
        for row, other in zip(mine, theirs, strict=True):
            assert (row.ids.tolist(), row.logits.tolist(), row.logsumexp) == (
                other.ids.tolist(),
                other.logits.tolist(),
                other.logsumexp,
            )


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
    assert beside.texts == first.texts
    assert compare_sides(first, beside, QUESTIONS).num_rows == sum(map(len, first.texts))
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


def array(values, dtype):
    return base64.b64encode(zlib.compress(np.asarray(values, dtype).tobytes())).decode()


def numbers(record, key, dtype):
    return np.frombuffer(zlib.decompress(base64.b64decode(record["prompts"][0][key])), dtype).copy()


def _swap_ids(record):
    ids = numbers(record, "top_ids", "<i4")
    ids[1] = ids[0]
    record["prompts"][0]["top_ids"] = array(ids, "<i4")


def _unsorted(record):
    logits = numbers(record, "top_logits", "<f4")
    record["prompts"][0]["top_logits"] = array(logits[::-1], "<f4")


def _too_likely(record):
    record["prompts"][0]["logsumexp"] = array(numbers(record, "logsumexp", "<f8") - 9, "<f8")


def _other_whole_row(record):
    record["prompts"][0]["whole_logits"] = array(numbers(record, "whole_logits", "<f4")[::-1], "<f4")


def _set(*path):
    *where, key, value = path

    def change(record):
        for step in where:
            record = record[step]
        record[key] = value

    return change


WRONG = {
    "another program's file": (_set("format", "benchmark"), "format is 'benchmark', wanted 'cpuspec parity run'"),
    "a later version": (_set("version", 2), "version is 2, wanted 1"),
    "no prompts": (_set("prompts", []), "prompts is .*wanted at least one"),
    "no objects": (_set("prompts", [1]), "prompts is .*wanted objects"),
    "no files": (_set("model", "files", []), "files is .*wanted the name"),
    "no digest": (_set("model", "files", 0, "sha256", "../x"), "sha256 is '../x'"),
    "another vocabulary": (_set("model", "vocab_size", 5), "wanted"),
    "a vocabulary of millions": (_set("model", "vocab_size", 1 << 40), "vocab_size is"),
    "an id beyond the vocabulary": (_set("prompts", 0, "ids", [9999]), "whole numbers from 0 to 383"),
    "no ids": (_set("prompts", 0, "ids", []), "fed is .*wanted token ids that begin with"),
    "ids that are no numbers": (_set("prompts", 0, "answer", "ids", ["1"] * 12), "whole numbers"),
    "too few answers": (_set("prompts", 0, "answer", "ids", [1]), "wanted 12 token ids"),
    "tokens without time": (_set("prompts", 0, "answer", "num_decoded", 99), "num_decoded is 99"),
    "time that runs back": (_set("prompts", 0, "answer", "decode_s", -1), "decode_s is -1"),
    "an array that is no array": (_set("prompts", 0, "top_ids", "@@"), "top_ids is '@@', wanted a deflated array"),
    "an array that is too short": (_set("prompts", 0, "top_logits", array([1.0], "<f4")), r"shape \[20, 16\]"),
    "an array that is a bomb": (_set("prompts", 0, "top_logits", array(np.zeros(1 << 26), "<f4")), r"shape \[20, 16\]"),
    "NaN": (_set("prompts", 0, "top_logits", array([np.nan] * 320, "<f4")), "wanted finite numbers"),
    "no numbers": (_set("prompts", 0, "logsumexp", array([np.nan] * 20, "<f8")), "logsumexp is"),
    "an id twice": (_swap_ids, "each once in a row"),
    "rows in no order": (_unsorted, "the largest of a row first"),
    "more than all probability": (_too_likely, "logsumexp is"),
    "two rows for a position": (_other_whole_row, "whole_logits is"),
    "a row of no position": (_set("prompts", 0, "whole_positions", [20]), "whole numbers from 0 to 19"),
    "a position twice": (_set("prompts", 0, "whole_positions", [0, 0]), "different positions"),
    "terminal codes": (_set("run", "processor", "\x1b[2J"), "printable"),
    "a name of megabytes": (_set("run", "name", "x" * 10**6), "1 to 200 printable characters"),
    "bytes beyond every float": (_set("model", "files", 0, "bytes", 10**400), "wanted a count up to"),
    "threads beyond every float": (_set("run", "threads", 10**400), "wanted a count up to"),
    "no name": (_set("run", "name", None), "name is absent"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "wanted"), WRONG.values(), ids=WRONG)
def test_a_file_that_no_run_wrote_is_refused_with_what_is_wrong(saved, tmp_path, change, wanted):
    value = copy.deepcopy(saved[1])
    change(value)
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(value), "utf-8")
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
    path, errors = tmp_path / "wrong.json", []
    for place in paths(saved[1]):
        value = copy.deepcopy(saved[1])
        _set(*place, instead)(value)
        path.write_text(json.dumps(value), "utf-8")
        try:
            read_recording(path)
        except ConfigError as error:
            errors.append(str(error))
    assert all(str(path) in error for error in errors)
    assert len(errors) > 20


def test_a_file_that_was_cut_short_is_refused(saved, tmp_path):
    text, path = saved[0].read_text("utf-8"), tmp_path / "cut.json"
    for length in (0, 1, 100, len(text) // 2, len(text) - 3):
        path.write_text(text[:length], "utf-8")
        with pytest.raises(ConfigError, match="not sound JSON"):
            read_recording(path)


def test_more_rows_than_memory_should_hold_are_refused_before_they_are_made(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(parity_file, "MAX_ROW_BYTES", 1000)
    with pytest.raises(ConfigError, match="wanted at most 1000"):
        read_recording(saved[0])


def test_a_small_file_cannot_ask_for_much_memory(saved, tmp_path):
    value, num_rows = copy.deepcopy(saved[1]), 1 << 18
    prompt = value["prompts"][0]
    value |= {"top": 384, "prompts": [prompt]}
    prompt["fed"] = prompt["ids"] + [0] * (num_rows - len(prompt["ids"]))
    packed = zlib.compressobj(9)
    deflated = b"".join(packed.compress(bytes(1 << 20)) for _ in range(num_rows * 384 * 4 >> 20)) + packed.flush()
    prompt["top_ids"] = prompt["top_logits"] = base64.b64encode(deflated).decode()
    path = tmp_path / "bomb.json"
    path.write_text(json.dumps(value), "utf-8")
    assert path.stat().st_size < 8 << 20
    del value, prompt, deflated
    wanted = r"its rows would take [0-9]+ bytes, wanted at most [0-9]+ for a file of its size"
    with few_bytes(30 * path.stat().st_size), pytest.raises(ConfigError, match=wanted):
        read_recording(path)


def test_a_file_that_cannot_be_read_or_written_is_named(two, checkpoints, tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.json does not exist"):
        read_recording(tmp_path / "gone.json")
    run = record(two[0], ModelIdentity.from_checkpoint(checkpoints[0]), QUESTIONS[:1], top=1, whole_rows=0)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_recording(run, tmp_path / "no directory" / "run.json")
