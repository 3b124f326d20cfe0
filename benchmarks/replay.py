"""What `auto` makes of recorded answers: the real planner and lookups, on a clock that only forwards and look-ups move.

    python benchmarks/replay.py record qwen2.5-coder-1.5b-instruct benchmarks/conversations.jsonl:text:26:chat TRACE.json \
        --draft qwen2.5-coder-1.5b-eagle3 --draft text:smollm2-135m-instruct
    python benchmarks/replay.py run TRACE.json

A trace has greedy answers and, at each place of each, the draft that each model makes there. So a rule of the planner is compared
with and without on the same texts, without a quiet machine. Costs of forwards are those that are kept for the models on this
machine. Sets are files, or the kinds of text where lines have a `kind`.
"""

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer

from cpuspec.engine.llm import LLM
from cpuspec.evaluate.prompts import prompt_ids, read_prompts
from cpuspec.sequence import Sequence
from cpuspec.settings import LevelSpec, SamplingParams
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.lookups import LookupProposer, make_lookup
from cpuspec.speculation.planner.costs import Costs, find_costs
from cpuspec.speculation.planner.planner import Planner
from cpuspec.speculation.proposer import Floors, Proposer, goes_on
from cpuspec.speculation.verify import verify_tokens

LOOKUP_S = 1e-4  # of a look-up
NUM_DRAFTED = 8  # tokens at each place
app = typer.Typer()


class Clock:
    """Seconds, and the counts that a planner reads of its context."""

    now_s = 0.0
    num_rows = weight_bytes = 0


class TimedLookup(Proposer):
    """The default lookup of `auto`, which takes time."""

    name = "suffix"

    def __init__(self, clock: Clock) -> None:
        self._inner: LookupProposer = make_lookup(LevelSpec("suffix:tree", 24, 0.05))
        self._clock, self.begin, self.end = clock, self._inner.begin, self._inner.end  # type: ignore[method-assign]

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """Look up."""
        self._clock.now_s += LOOKUP_S * len(seqs)
        return self._inner.propose(seqs, limits)


class RecordedModel(Proposer):
    """Drafts what is recorded, and takes the time of the tokens that it must read and of those that it drafts."""

    num_tokens, in_one_pass, context = NUM_DRAFTED, False, None

    def __init__(self, name: str, clock: Clock, costs: Costs, items: list[dict[str, Any]]) -> None:
        self.name, self._clock, self._costs, self._items = name, clock, costs, items
        self._fed = defaultdict[int, int](int)

    def propose(self, seqs: list[Sequence], limits: list[int], floors: list[Floors] | None = None) -> list[Draft]:
        """Recorded drafts, as long as floors allow."""
        drafts = []
        for number, (seq, limit) in enumerate(zip(seqs, limits, strict=True)):
            tokens, sure = self._items[seq.id]["drafts"][self.name][seq.num_output_tokens]
            length = min(limit, 1, len(tokens))
            while 0 < length < min(limit, len(tokens)) and goes_on((floors or [[]])[number], length, math.prod(sure[:length])):
                length += 1
            missed = len(seq.tokens) - 1 - self._fed[seq.id] if limit else 0
            self._fed[seq.id] = len(seq.tokens) if limit else self._fed[seq.id]
            self._clock.now_s += missed * self._costs.row_s + length * self._costs.forward_s(1)
            drafts.append(Draft.chain(tokens[:length], self.name, confidence=sure[:length]))
        return drafts


def replay(trace: dict[str, Any], names: Iterable[str], num_seqs: int = 1, noise: float = 0.15) -> dict[str, float]:
    """Tokens per second over plain decoding, by set and of all; a step's time is shared by its answers.

    names: of the models that draft beside lookups. num_seqs: answers at once. noise: deviation of a forward's log seconds.
    """
    clock, rng, items = Clock(), random.Random(0), trace["items"]
    truth = Costs(**trace["target"])
    models: Any = [(RecordedModel(name, clock, of, items), of) for name in names for of in [Costs(**trace["models"][name])]]
    context: Any = clock
    planner = Planner(Costs(**trace["target"]), [TimedLookup(clock)], models, context=context, clock=lambda: clock.now_s)
    waiting, running = list(range(len(items)))[::-1], dict[int, Sequence]()
    seconds, plain_s = defaultdict[str, float](float), defaultdict[str, float](float)
    while waiting or running:
        while waiting and len(running) < num_seqs:
            number = waiting.pop()
            params = SamplingParams(max_tokens=len(items[number]["answer"]))
            running[number] = Sequence.new(number, items[number]["prompt"], params)
            planner.begin(running[number], 0)
        seqs, begin_s = list(running.values()), clock.now_s
        drafts = planner.propose(seqs, [seq.num_wanted - 1 for seq in seqs])
        rows = len(seqs) + sum(map(len, drafts))
        clock.num_rows += rows
        clock.now_s += math.exp(rng.gauss(0, noise) - noise**2 / 2) * truth.forward_s(rows)
        for seq, draft in zip(seqs, drafts, strict=True):
            rest, depths = [*items[seq.id]["answer"][seq.num_output_tokens :], -1], [0, *draft.depths.tolist()]
            verdict = verify_tokens(draft, lambda row, rest=rest, depths=depths: rest[min(depths[row], len(rest) - 1)])  # type: ignore[misc]
            seq.extend(verdict.tokens)
            plain_s[items[seq.id]["set"]] += len(verdict.tokens) * truth.forward_s(len(seqs)) / len(seqs)
            planner.accept(seq, verdict, ())
        for seq in seqs:
            seconds[items[seq.id]["set"]] += (clock.now_s - begin_s) / len(seqs)
            if seq.num_wanted <= 0:
                planner.end(running.pop(seq.id))
    return {name: plain_s[name] / seconds[name] for name in seconds} | {"all": sum(plain_s.values()) / sum(seconds.values())}


def _note(proposers: dict[str, Proposer], notes: dict[str, list[Any]], seqs: list[Sequence], limits: list[int]) -> list[Draft]:
    """Note what each model drafts here; the answer is decoded plainly."""
    for name, one in proposers.items():
        found = one.propose(seqs, [NUM_DRAFTED], [[]])[0]
        found = found if len(found) else one.propose(seqs, [NUM_DRAFTED], [[]])[0]  # the prompt was read first
        notes[name].append((found.tokens.tolist(), [] if found.confidence is None else found.confidence.tolist()))
    return [Draft.chain([], "none")]


@app.command()
def record(
    model: str,
    texts: Annotated[list[str], typer.Argument(metavar="FILE:FIELD:COUNT ... TRACE")],
    draft: Annotated[list[str], typer.Option(help="A model that drafts. Repeatable.")],
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Write a trace."""
    *sets, out = texts
    with LLM(model, ",".join(["auto", *draft]), max_sequences=1, threads=threads) as llm:
        assert llm._planner, "auto plans"
        planner, items = llm._planner, list[dict[str, Any]]()
        proposers = {one.proposer.name: one.proposer for one in planner.models}
        for name in sets:
            path, kinds = Path(name.split(".jsonl")[0] + ".jsonl"), list[str]()
            kinds = [json.loads(line).get("kind", path.stem) for line in path.read_text("utf-8").splitlines()]
            for kind, prompt in zip(kinds, read_prompts(name).prompts, strict=False):
                ids = prompt_ids(llm.tokenizer, prompt)
                params = SamplingParams(max_tokens=max_tokens)
                drafts = defaultdict[str, list[Any]](list)
                with patch.object(planner, "propose", partial(_note, proposers, drafts)):
                    [answer] = llm.generate(ids, params)
                items.append({"set": kind, "prompt": ids, "answer": answer.token_ids, "drafts": drafts})
                print(kind, flush=True)
        costs = {"target": planner.costs.as_dict()}
        models = {name: find_costs(one.context.backend).as_dict() for name, one in proposers.items()}
    Path(out).write_text(json.dumps(costs | {"models": models, "items": items}), "utf-8")


@app.command()
def run(path: Path) -> None:
    """Print what `auto` makes of a trace, over plain decoding."""
    trace = json.loads(path.read_text("utf-8"))
    models = list(trace["models"])
    arms = [(), *((name,) for name in models), *([tuple(models)] if len(models) > 1 else [])]
    for names in arms:
        for num_seqs in (1, 4, 16):
            found = [f"{name} {over:.3f}" for name, over in replay(trace, names, num_seqs).items()]
            print(f"lookups{''.join(f', {name}' for name in names)}, {num_seqs} at once:", *found)


if __name__ == "__main__":
    app()
