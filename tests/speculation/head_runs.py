"""What tests of every kind of head do with an LLM that drafts by one: same prompts, same settings, drafts noted."""

from collections.abc import Sequence as Several
from dataclasses import replace

from cpuspec import LLM
from cpuspec.checkpoints import Checkpoint
from cpuspec.sequence import Sequence
from cpuspec.settings import EngineConfig, SamplingParams
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.heads import HeadProposer

SETTINGS = EngineConfig(threads=1, max_rows=64, kv_format="f32", keep_packed=False, prompt_rows=4)
SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_layers": 4, "vocab_size": 320}
PROMPTS = [[7, 8, 9], [5, 6, 7, 8, 9, 10] * 6, [11, 5, 6, 7, 5, 6]]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=5)


def llm_over(target: Checkpoint, spec: str, backend: str = "numba", **settings: object) -> LLM:
    return LLM(target, spec, backend, settings=replace(SETTINGS, **settings))  # type: ignore[arg-type]


def check_answers(target: Checkpoint, backend: str, specs: Several[str], drafts: bool = True, **settings: object) -> None:
    """Answers with these drafts are those of plain decoding, greedy or sampled. drafts: all must draft, `auto` as it likes."""
    params = [PARAMS, SAMPLED, replace(PARAMS, frequency_penalty=0.7)]
    with llm_over(target, "none", backend) as plain:
        wanted = [plain.generate(PROMPTS, one) for one in params]
    for spec in specs:
        with llm_over(target, spec, backend, **settings) as llm:
            for one, answers in zip(params, wanted, strict=True):
                got = [answer.token_ids for answer in llm.generate(PROMPTS, one)]
                assert got == [answer.token_ids for answer in answers], spec
            if drafts and not spec.startswith("auto"):
                assert sum(level.num_draft_tokens for level in llm.levels.values()) > 20, spec


def check_company(target: Checkpoint, spec: str) -> None:
    """What is drafted for a sequence does not depend on those beside it."""
    together, alone = [], []
    for prompts, drafts in ((PROMPTS, together), (PROMPTS[1:2], alone)):
        with llm_over(target, spec) as llm:
            notes = recorded(llm)
            llm.generate(prompts, PARAMS)
            drafts += [(tokens, draft.tokens.tolist()) for tokens, draft in notes.drafts if tokens[:2] == PROMPTS[1][:2]]
    of_tokens = {tuple(tokens): drafted for tokens, drafted in alone}
    compared = [drafted == of_tokens[tuple(tokens)] for tokens, drafted in together if drafted and tuple(tokens) in of_tokens]
    assert len(compared) > 10
    assert all(compared)


class StandIn:
    """What tests that give a head's rows themselves need of its context besides `score`: every sequence can be drafted for."""

    capacity = 1 << 20

    def begin(self, seq: Sequence, num_cached: int) -> None: ...

    def learn(self, seq: Sequence, hidden: object) -> None: ...

    def end(self, seq: Sequence) -> None: ...

    def can_draft(self, seq: Sequence) -> bool:
        return True

    def read(self, seqs: Several[Sequence]) -> list[bool]:
        return [True] * len(seqs)


class Recorded:
    """A head's proposer that notes its drafts, and the tokens that they followed."""

    def __init__(self, proposer: HeadProposer) -> None:
        self.drafts: list[tuple[list[int], Draft]] = []
        self._propose = proposer.propose
        proposer.propose = self.propose  # type: ignore[method-assign]

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        found = self._propose(seqs, limits)
        self.drafts += [(seq.tokens[:], draft) for seq, draft in zip(seqs, found, strict=True)]
        return found


def recorded(llm: LLM) -> Recorded:
    (level,) = llm.drafts
    assert isinstance(level, HeadProposer)
    return Recorded(level)
