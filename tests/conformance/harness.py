"""One harness for what may change no answer: drafts, threads, batches, chunks of prompts, preemption and kept prefixes."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Any

import pytest

from cpuspec import LLM
from cpuspec.checkpoints import Checkpoint
from cpuspec.engine.llm import Completion
from cpuspec.sequence import Sequence
from cpuspec.settings import EngineConfig, SamplingParams
from cpuspec.speculation import round as round_module
from cpuspec.speculation.constrained import SOURCE
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.proposer import DraftModel
from cpuspec.speculation.verify import Verdict

SETTINGS = EngineConfig(threads=1, max_rows=64, kv_format="f32", keep_packed=False, prompt_rows=4)
SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_layers": 4, "vocab_size": 320}
PROMPTS = [[7, 8, 9], [5, 6, 7, 8, 9, 10] * 6, [11, 5, 6, 7, 5, 6]]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = replace(PARAMS, temperature=1.0, seed=5)
EACH = [replace(one, logprobs=0) for one in (PARAMS, SAMPLED, replace(PARAMS, frequency_penalty=0.7)) for _ in PROMPTS]

Way = tuple[str, Mapping[str, Any]]  # a spec, and settings that replace the usual ones


def shown(answers: list[Completion]) -> list[tuple[list[int], Any]]:
    """Tokens and log-probabilities, in which any bit that differs is seen."""
    return [(answer.token_ids, answer.logprobs) for answer in answers]


def llm_over(target: Checkpoint, spec: str, backend: str = "numba", **settings: Any) -> LLM:
    return LLM(target, spec, backend, settings=replace(SETTINGS, **settings))


def num_drafted(llm: LLM) -> int:
    return sum(level.num_draft_tokens for name, level in llm.levels.items() if name != SOURCE)


def check_ways(
    target: Checkpoint,
    ways: Iterable[Way],
    prompts: Several[Any] = PROMPTS * 3,
    params: Several[SamplingParams] = EACH,
    usual: EngineConfig = SETTINGS,
    backend: str = "numba",
    least: int = 1,
) -> int:
    """Answers in each way are those of plain decoding, one prompt after the other on one thread: with their log-probabilities
    where the backend's rows are invariant. Returns how many were compared.

    least: how many tokens each way drafts, unless it is `none` or chooses itself.
    """
    prompts, params = list(prompts), list(params)
    with LLM(target, "none", backend, settings=replace(usual, threads=1, max_sequences=1, prefix_cache_gb=0)) as llm:
        told = shown if llm.row_invariant else lambda answers: [answer.token_ids for answer in answers]
        wanted = told(llm.generate(prompts, params))
    assert len({repr(one) for one in wanted}) > len(prompts) // 2
    ways = list(ways)
    for spec, settings in ways:
        with LLM(target, spec, backend, settings=replace(usual, **settings)) as llm:
            assert told(llm.generate(prompts, params)) == wanted, (spec, settings)
            assert spec.startswith(("none", "auto")) or num_drafted(llm) >= least, (spec, settings)
    return len(ways) * len(wanted)


class Noted:
    """The drafts of the cheapest model of an LLM: the tokens before each, how many were allowed, and the draft."""

    def __init__(self, llm: LLM) -> None:
        model: DraftModel = llm.drafts[0]
        self.drafts: list[tuple[list[int], int, Draft]] = []
        self._propose = model.propose
        model.propose = self.propose  # type: ignore[method-assign]

    def propose(self, seqs: list[Sequence], limits: list[int], *floors: Any) -> list[Draft]:
        found = self._propose(seqs, limits, *floors)
        asked = zip(seqs, limits, found, strict=True)
        self.drafts += [(seq.tokens[:], limit, draft) for seq, limit, draft in asked if len(draft)]
        return found


def noted_drafts(target: Checkpoint, spec: str) -> list[tuple[list[int], int, Draft]]:
    """As in `Noted`, of a head or a model whose numbers are those of its file."""
    with llm_over(target, spec, "numpy", draft_format="file") as llm:
        notes = Noted(llm)
        llm.generate(PROMPTS, PARAMS)
        llm.generate([[12, 5, 6]], PARAMS)
    return notes.drafts


def let_drafts_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put out the first token of a draft that the right verification rejects."""
    right = round_module.verify

    def wrong(seq: Sequence, draft: Draft, *rows: Any) -> Verdict:
        verdict = right(seq, draft, *rows)
        return verdict if verdict.path or not len(draft) else Verdict([int(draft.tokens[0])], [])

    monkeypatch.setattr(round_module, "verify", wrong)
