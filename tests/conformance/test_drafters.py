"""Every drafter and every kind of head has the same properties. A new one is a row of DRAFTERS."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cpuspec import LLM
from cpuspec.backends import BACKENDS
from cpuspec.checkpoints import Checkpoint
from cpuspec.engine import engine as engine_module
from cpuspec.engine.draft_spec import LOOKUPS, MODELS
from cpuspec.engine.scheduler import Scheduler
from cpuspec.errors import CheckpointError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.settings import SamplingParams
from cpuspec.speculation.drafters.heads import RULES, HeadProposer
from cpuspec.text import make_tokenizer
from tests.backends.models import every_backend, tiny
from tests.block_heads import make_block_head
from tests.conformance.harness import (
    PARAMS,
    PROMPTS,
    SAMPLED,
    SMALL,
    Noted,
    check_ways,
    let_drafts_through,
    llm_over,
    num_drafted,
    shown,
)
from tests.conformance.knowing import Knowing
from tests.heads import make_eagle1, make_eagle3
from tests.stage_heads import make_medusa, make_mlp_speculator
from tools.make_tiny_model import make_tiny_hf


class Row(NamedTuple):
    """A drafter: what makes it beside its target and returns its name in specs, and the specs that it is tried in."""

    make: Callable[[Path, Checkpoint], object]
    forms: tuple[str, ...]


def named(name: str) -> Callable[[Path, Checkpoint], str]:
    return lambda path, target: name


def head(make: Callable[..., Any], *layers: Any, **options: Any) -> Callable[[Path, Checkpoint], Path]:
    return lambda path, target: make(path, target.config, *layers, **options).path


def model(path: Path, target: Checkpoint, **changes: Any) -> Path:
    """A smaller model; by the other keys a PARD."""
    shape = {key: changes.pop(key) for key in ("vocab_size",) if key in changes}
    make_tiny_hf(path, seed=1, context_length=512, **{**SMALL, "num_layers": 2, **shape})
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | changes))
    return path


LOOKED_UP = ("{}@7", "{}:tree@9", "{}@2+{}@3")
OF_MODEL = ("{}@3", "ngram,{}@4", "{}@2+ngram@3", "auto,{}")
IN_ONE_PASS = ("{}@3", "draw:{}@3", "ngram@2+{}@3", "auto,{}")
OF_HEAD = (*IN_ONE_PASS, "{}@2+ngram@3", "tree:{}@8")
DRAFTERS: dict[str, Row] = {
    **{name: Row(named(name), LOOKED_UP) for name in LOOKUPS},
    "self": Row(named("self:mxfp4"), (*OF_MODEL, "skip:1@2,{}@4")),
    "skip": Row(named("skip:1"), OF_MODEL),
    "a model": Row(model, OF_MODEL),
    "other tokens": Row(partial(model, vocab_size=300), OF_MODEL),
    "text": Row(lambda path, target: f"text:{model(path, target, vocab_size=300)}", OF_MODEL),
    "PARD": Row(partial(model, pard_token=7), IN_ONE_PASS),
    "a user's class": Row(named("tests.conformance.knowing:Knowing"), ("{}", "{}@3+ngram@2", "ngram,{}", "{},self:mxfp4@3")),
    "EAGLE-1": Row(head(make_eagle1), OF_HEAD),
    "EAGLE-3": Row(head(make_eagle3, num_drafted=316), OF_HEAD),
    "P-EAGLE": Row(head(make_eagle3, layout="speculators", num_layers=2, mask_id=300, num_drafted=316), IN_ONE_PASS),
    "mtp": Row(named("mtp"), OF_HEAD),
    "DFlash": Row(head(make_block_head), IN_ONE_PASS),
    "DSpark": Row(head(make_block_head, layout="speculators", markov="vanilla", confidence="markov"), IN_ONE_PASS),
    "Medusa": Row(head(make_medusa), OF_HEAD),
    "MLP speculator": Row(head(make_mlp_speculator), OF_HEAD),
}
# Settings under which answers stay. Where `kept` is on the disk, another LLM begins with what the first one left there.
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"max_sequences": 1},
    "together": {"threads": 2, "max_sequences": 9, "prompt_rows": 256},
    "in chunks": {"threads": 3, "max_sequences": 4, "prompt_rows": 1},
    "in small forwards": {"threads": 2, "max_sequences": 5, "max_rows": 9},
    "behind kept prefixes": {"max_sequences": 3, "prefix_cache_gb": 1},
    "behind prefixes on the disk": {"max_sequences": 3, "prefix_cache_gb": 0, "prefix_cache_dir": "kept"},
    "preempted": {"max_sequences": 6},
}
CASES = [(name, form) for name, row in DRAFTERS.items() for form in row.forms]
HEADS = [name for name, row in DRAFTERS.items() if row.forms in (OF_HEAD, IN_ONE_PASS) and name != "PARD"]
MANY = [*PROMPTS, [*PROMPTS[1], 5, 6], [*PROMPTS[2], 9, 9, 9], [30]]
HOW: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.9}, {"temperature": 1.3, "top_p": 0.9, "frequency_penalty": 0.7})
EACH = [
    SamplingParams(max_tokens=16 + i % 5, ignore_eos=True, logprobs=0, seed=i, **HOW[i // len(MANY)]) for i in range(3 * len(MANY))
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model with a layer for multi-token prediction."""
    return tiny(tmp_path_factory, weight_format="f32", predicts=True, **{**SMALL, "num_layers": 5})


@pytest.fixture(scope="module")
def names(target: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The name of each drafter in a spec."""
    directory = tmp_path_factory.mktemp("drafters")
    return {name: str(row.make(directory / str(i), target)) for i, (name, row) in enumerate(DRAFTERS.items())}


@pytest.fixture(scope="module")
def wanted(target: Checkpoint, prompt_arithmetic: str) -> list[tuple[list[int], Any]]:
    """Answers of plain decoding, one after the other on one thread."""
    with llm_over(target, "none", max_sequences=1, prefix_cache_gb=0) as llm:
        return known(MANY * 3, shown(llm.generate(MANY * 3, EACH)))


def known(prompts: list[list[int]], answers: list[tuple[list[int], Any]]) -> list[tuple[list[int], Any]]:
    """The answers, which the user's class knows from now on: of a prompt the first one."""
    Knowing.added, Knowing.num_moved = None, 0
    Knowing.answers = {tuple(prompt): ids for prompt, (ids, _) in zip(prompts[::-1], answers[::-1], strict=True)}
    return answers


def test_every_registered_drafter_has_a_row(target: Checkpoint, names: dict[str, str]) -> None:
    assert {*LOOKUPS, *MODELS} - {"tree", "draw"} <= DRAFTERS.keys()
    assert all(any(form.startswith(f"{style}:") for _, form in CASES) for style in ("tree", "draw"))
    methods = set()
    for name in HEADS:
        with llm_over(target, names[name]) as llm:
            methods |= {one.context.head.method for one in llm.drafts if isinstance(one, HeadProposer)}
    assert methods == RULES.keys() - {"assistant"}, "whose tests are in speculation/test_assistants.py"


@pytest.mark.parametrize(("drafter", "form", "way"), [(*case, way) for case, way in zip(CASES, cycle(WAYS), strict=False)])
def test_answers_have_the_bits_of_plain_decoding(
    target: Checkpoint,
    names: dict[str, str],
    wanted: list[tuple[list[int], Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
    form: str,
    way: str,
) -> None:
    """Greedy, with a seed and with penalties, in one batch, and again behind what the first answers left."""
    settings = {key: str(tmp_path) if value == "kept" else value for key, value in WAYS[way].items()}
    preempted = list[int]()
    for _ in range(1 + ("prefix_cache_dir" in settings)):
        with llm_over(target, form.format(*[names[drafter]] * 2), **settings) as llm:
            if way == "preempted":
                limit_memory(llm, preempted, monkeypatch)
            for _ in range(2):
                assert shown(llm.generate(MANY * 3, EACH)) == wanted
            assert num_drafted(llm) > 20 or form.startswith("auto")
    assert bool(preempted) == (way == "preempted")


def limit_memory(llm: LLM, preempted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave memory for a few of the sequences, so that some wait in their midst; `preempted` gets the number of each."""
    preempt = Scheduler.preempt
    monkeypatch.setattr(engine_module, "_TO_BEGIN", 2)
    monkeypatch.setattr(engine_module, "_TO_STAY", 1)
    monkeypatch.setattr(Scheduler, "preempt", lambda self, seq: (preempted.append(seq.id), preempt(self, seq)))
    llm.engine._max_bytes = int(1.8 * llm.engine.bytes_of(64, is_read=True))


@every_backend([name for name in BACKENDS if name not in ("numba", "onnxruntime", "openvino")])  # graphs round to steps of 1/127
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_answers_on_other_backends_are_those_of_plain_decoding(
    target: Checkpoint, names: dict[str, str], drafter: str, name: str
) -> None:
    forms = [form for form in DRAFTERS[drafter].forms if form == DRAFTERS[drafter].forms[0] or "tree" in form]
    check_ways(target, [(form.format(*[names[drafter]] * 2), {}) for form in forms], backend=name, least=10)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_answers_of_a_grammar_and_of_a_least_length_are_those_of_plain_decoding(
    target: Checkpoint, names: dict[str, str], drafter: str
) -> None:
    least = {"min_tokens": 12, "logit_bias": dict.fromkeys(make_tokenizer(target).eos_ids, 100.0)}
    shapes: tuple[dict[str, Any], ...] = ({"regex": "([a-e]{1,3} and ){1,9}the end"}, least, {"regex": "([a-e] ){1,9}[.]", **least})
    params = [replace(one, ignore_eos=False, **shapes[i % 3]) for i, one in enumerate(EACH)]
    check_ways(target, [(form.format(*[names[drafter]] * 2), {}) for form in DRAFTERS[drafter].forms], MANY * 3, params)


@every_backend([name for name in BACKENDS if name not in ("onnxruntime", "openvino")])
def test_trees_that_hold_the_answer_are_accepted_along_its_path(target: Checkpoint, name: str) -> None:
    """Greedy, sampled and penalised, on one and two threads, in forwards of few rows, chains and trees in one batch."""
    params = [replace(EACH[i + len(MANY) * (i % 3)], logprobs=None) for i in range(len(MANY))]
    with llm_over(target, "none", name) as llm:
        plain = known(MANY, shown(llm.generate(MANY, params)))
    for settings in ({"max_sequences": 6}, {"max_sequences": 6, "threads": 2, "max_rows": 7}):
        before = Knowing.num_moved
        with llm_over(target, "tests.conformance.knowing:Knowing", name, **settings) as llm:
            assert shown(llm.generate(MANY, params)) == plain
            assert sum(level.num_accepted_tokens for level in llm.levels.values()) > 30
        assert Knowing.num_moved - before > 10


# --------------------------------------------------------------------------------------------------- the distribution of samples

DRAWN, LENGTH, NUM_SAMPLES = (30, 41, 150, 222), 5, 200  # of a few tokens, so that drafts are accepted, rejected and recovered from
SAMPLED_FORMS = [
    (name, form) for name, form in CASES if form.startswith(("draw", "tree")) or (form == "{}@3" and name not in HEADS)
]


@pytest.fixture(scope="module")
def of_seeds(target: Checkpoint, prompt_arithmetic: str) -> list[list[int]]:
    found, _, _ = drawn(target, "none")
    assert len({tuple(answer) for answer in found}) > NUM_SAMPLES // 4
    return found


def drawn(target: Checkpoint, spec: str) -> tuple[list[list[int]], int, int]:
    """An answer of each seed, and the numbers of drafted and of accepted tokens."""
    others = {token: -np.inf for token in range(target.config.vocab_size) if token not in DRAWN}
    params = SamplingParams(temperature=1.3, max_tokens=LENGTH, ignore_eos=True, logit_bias=others)
    with llm_over(target, spec) as llm:
        answers = llm.generate([[7, 8, 9, 7, 8]] * NUM_SAMPLES, [replace(params, seed=seed) for seed in range(NUM_SAMPLES)])
        numbers = (sum(getattr(one, f"num_{what}_tokens") for one in llm.levels.values()) for what in ("draft", "accepted"))
    return [answer.token_ids for answer in answers], *numbers


@pytest.mark.parametrize(("drafter", "form"), SAMPLED_FORMS)
def test_each_seed_draws_what_it_draws_without_drafts(
    target: Checkpoint, names: dict[str, str], of_seeds: list[list[int]], drafter: str, form: str
) -> None:
    """So the answers have the target's distribution: `tests/test_sampling.py` says that seeds draw from rows as these say."""
    answers, num_draft_tokens, num_accepted = drawn(target, form.format(names[drafter]))
    assert answers == of_seeds
    assert num_draft_tokens > NUM_SAMPLES // 2
    assert NUM_SAMPLES // 8 < num_accepted < num_draft_tokens - NUM_SAMPLES // 8 or form.startswith("tree") or "other" in drafter


@pytest.mark.parametrize(("drafter", "form"), SAMPLED_FORMS[::4])
def test_a_verification_that_lets_a_drafted_token_through_would_be_seen(
    target: Checkpoint, names: dict[str, str], of_seeds: list[list[int]], monkeypatch: pytest.MonkeyPatch, drafter: str, form: str
) -> None:
    """The negative control of the test above: the target can draw each of these tokens."""
    let_drafts_through(monkeypatch)
    assert drawn(target, form.format(names[drafter]))[0] != of_seeds


# ----------------------------------------------------------------------------------------------------------- what drafts depend on

WITH_A_MODEL = [case for case in CASES if case[1] in ("{}@3", "tree:{}@8")]


@pytest.mark.parametrize(("drafter", "form"), [case for case in WITH_A_MODEL if case[0] not in ("self", "skip")])  # ever accepted
def test_a_draft_does_not_depend_on_its_batch(target: Checkpoint, names: dict[str, str], drafter: str, form: str) -> None:
    of_tokens = list[dict[tuple[int, ...], list[int]]]()
    for prompts in (PROMPTS, PROMPTS[1:2]):
        with llm_over(target, form.format(names[drafter])) as llm:
            notes = Noted(llm)
            llm.generate(prompts, PARAMS)
        of_tokens.append({tuple(tokens): draft.tokens.tolist() for tokens, _, draft in notes.drafts})
    common = of_tokens[0].keys() & of_tokens[1].keys()
    assert len(common) > 3
    assert all(of_tokens[0][tokens] == of_tokens[1][tokens] for tokens in common)


OF_STAGES = ("Medusa", "MLP speculator")  # which keep no rows


@pytest.mark.parametrize("drafter", [name for name, form in WITH_A_MODEL if form == "{}@3" and name not in OF_STAGES])
def test_a_drafter_keeps_rows_for_their_salt_alone(target: Checkpoint, names: dict[str, str], drafter: str) -> None:
    with llm_over(target, names[drafter], prefix_cache_gb=1) as llm:

        def num_shared(*salts: str) -> int:
            """Rows that the drafter had already for prompts of these salts, at once."""
            before = llm.prefix_stats()[0].num_cached_tokens
            llm.generate([PROMPTS[1]] * len(salts), [replace(PARAMS, cache_salt=salt) for salt in salts])
            return llm.prefix_stats()[0].num_cached_tokens - before

        assert num_shared("mine", "yours") == 0  # which run side by side
        assert num_shared("other") == 0
        assert all(num_shared(salt) >= len(PROMPTS[1]) - 2 for salt in ("mine", "yours", "other"))


def broken(path: Path, copy: Path) -> Path:
    """A copy of a directory whose matrices are not finite."""
    shutil.copytree(path, copy)
    arrays = load_file(path / "model.safetensors")
    save_file({n: np.full_like(a, np.nan) if a.ndim == 2 else a for n, a in arrays.items()}, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize("drafter", ["a model", "other tokens", "PARD", *HEADS])
def test_a_drafter_whose_rows_are_not_finite_changes_no_answer(
    target: Checkpoint, names: dict[str, str], tmp_path: Path, drafter: str
) -> None:
    name = names[drafter]
    if drafter == "mtp":
        nans = {key: np.full(one.shape, np.nan) for key, one in target.prediction_layers.items()}
        layers = {key: QuantTensor.encode(get_format("f32"), values) for key, values in nans.items()}
        target = replace(target, prediction_layers=layers)
    else:
        name = str(broken(Path(name), tmp_path / "broken"))
    ways = [(form.format(name), {"draft_format": "file"}) for form in DRAFTERS[drafter].forms]
    check_ways(target, ways, least=0)


OF_FEW_TOKENS = [("a model", "{}@4"), ("a model", "ngram,{}@4"), ("a model", "auto,{}"), ("EAGLE-1", "{}@4")]


@pytest.mark.parametrize(("drafter", "form"), [*OF_FEW_TOKENS, ("mtp", "{}@4"), ("mtp", "draw:{}"), ("DFlash", "draw:{}")])
def test_a_drafter_of_frequent_tokens_drafts_these_and_changes_no_answer(
    target: Checkpoint, names: dict[str, str], drafter: str, form: str
) -> None:
    with llm_over(target, "none") as plain:
        answers = [plain.generate(PROMPTS, one) for one in (PARAMS, SAMPLED)]
    with llm_over(target, form.format(names[drafter]), draft_vocab=40) as llm:
        notes = Noted(llm)
        for one, answer in zip((PARAMS, SAMPLED), answers, strict=True):
            assert shown(llm.generate(PROMPTS, one)) == shown(answer)
    drafted = {token for _, _, draft in notes.drafts for token in draft.tokens.tolist()}
    assert drafted <= {*range(40), *make_tokenizer(target).eos_ids}
    assert len(drafted) > 4 or form.startswith("auto")


@pytest.mark.parametrize("drafter", [name for name in HEADS if name != "mtp"])
def test_a_head_of_another_tokenizer_is_refused(target: Checkpoint, names: dict[str, str], tmp_path: Path, drafter: str) -> None:
    path = Path(shutil.copytree(names[drafter], tmp_path / "head"))
    own, other = (make_tiny_hf(tmp_path / str(size), **{**SMALL, "vocab_size": size}) for size in (SMALL["vocab_size"], 300))
    shutil.copy(own / "tokenizer.json", path)
    llm_over(target, str(path)).close()
    shutil.copy(other / "tokenizer.json", path)
    with pytest.raises(CheckpointError, match="its tokenizer gives other tokens than that of"):
        llm_over(target, str(path))
