"""What `auto` makes of recorded answers: the real planner and lookups, on a clock that only forwards and look-ups move.

    python benchmarks/replay.py record qwen2.5-coder-1.5b-instruct HUMANEVAL.jsonl:prompt:5:complete TRACE.json \
        --draft text:smollm2-135m-instruct
    python benchmarks/replay.py run TRACE.json

A trace has greedy answers and, at each place of each, the draft that a model makes there. So a rule of the planner is compared with
and without on the same texts, without a quiet machine. Costs of forwards are those that are kept for the models on this machine.
"""

import json
import math
import random
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cpuspec.config import LevelSpec, SamplingParams
from cpuspec.engine.llm import LLM
from cpuspec.evaluate.prompts import prompt_ids, read_prompts
from cpuspec.sequence import Sequence
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.suffix import SuffixProposer, make_suffix
from cpuspec.speculation.planner.costs import Costs, find_costs
from cpuspec.speculation.planner.planner import Planner
from cpuspec.speculation.proposer import Floors, Proposer, goes_on
from cpuspec.speculation.verify import verify_tokens

LOOKUP_S = 1e-4  # of a look-up
NUM_DRAFTED = 10  # tokens at each place
app = typer.Typer()


class Clock:
    """Seconds, and the counts that a planner reads of its context."""

    now_s = 0.0
    num_rows = weight_bytes = 0


class TimedLookup(Proposer):
    """The default lookup of `auto`, which takes time."""

    name = "suffix"

    def __init__(self, clock: Clock) -> None:
        self._inner: SuffixProposer = make_suffix(LevelSpec("suffix:tree", 24, 0.05))
        self._clock, self.begin, self.end = clock, self._inner.begin, self._inner.end  # type: ignore[method-assign]

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """Look up."""
        self._clock.now_s += LOOKUP_S * len(seqs)
        return self._inner.propose(seqs, limits)


class RecordedModel(Proposer):
    """Drafts what is recorded, and takes the time of the tokens that it must read and of those that it drafts."""

    name, num_tokens, in_one_pass, context = "model", NUM_DRAFTED, False, None

    def __init__(self, clock: Clock, costs: Costs, items: list[dict[str, Any]]) -> None:
        self._clock, self._costs, self._items, self._fed = clock, costs, items, defaultdict[int, int](int)

    def propose(self, seqs: list[Sequence], limits: list[int], floors: list[Floors] | None = None) -> list[Draft]:
        """Recorded drafts, as long as floors allow."""
        drafts = []
        for number, (seq, limit) in enumerate(zip(seqs, limits, strict=True)):
            tokens, sure = self._items[seq.id]["drafts"][seq.num_output_tokens]
            length = min(limit, 1, len(tokens))
            while 0 < length < min(limit, len(tokens)) and goes_on((floors or [[]])[number], length, math.prod(sure[:length])):
                length += 1
            missed = len(seq.tokens) - 1 - self._fed[seq.id] if limit else 0
            self._fed[seq.id] = len(seq.tokens) if limit else self._fed[seq.id]
            self._clock.now_s += missed * self._costs.row_s + length * self._costs.forward_s(1)
            drafts.append(Draft.chain(tokens[:length], self.name, confidence=sure[:length]))
        return drafts


def replay(trace: dict[str, Any], num_seqs: int = 1, with_model: bool = True, noise: float = 0.15) -> dict[str, float]:
    """Tokens per second over plain decoding, by set and of all; a step's time is shared by its answers.

    num_seqs: answers at once. noise: deviation of a forward's log seconds.
    """
    clock, rng, items = Clock(), random.Random(0), trace["items"]
    truth, of_model = Costs(**trace["target"]), Costs(**trace["draft"])
    models: Any = [(RecordedModel(clock, of_model, items), of_model)] if with_model else []
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


@app.command()
def record(
    model: str,
    texts: Annotated[list[str], typer.Argument(metavar="FILE:FIELD:COUNT ... TRACE")],
    draft: Annotated[str, typer.Option(help="A model that drafts.")] = "text:smollm2-135m-instruct",
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
) -> None:
    """Write a trace."""
    *sets, out = texts
    with LLM(model, f"auto,{draft}", max_sequences=1) as llm:
        assert llm._planner, "auto plans"
        planner, proposer, items = llm._planner, llm._planner.models[0].proposer, list[dict[str, Any]]()
        for name in sets:
            for prompt in read_prompts(name).prompts:
                ids = prompt_ids(llm.tokenizer, prompt)
                [answer] = llm.generate(ids, SamplingParams(max_tokens=max_tokens))
                seq, drafts = Sequence.new(1 << 40 | len(items), ids, SamplingParams(max_tokens=max_tokens)), []
                planner.begin(seq, 0)
                for token in answer.token_ids:
                    found = proposer.propose([seq], [NUM_DRAFTED], [[]])[0]
                    found = found if len(found) else proposer.propose([seq], [NUM_DRAFTED], [[]])[0]  # the prompt was read first
                    drafts.append((found.tokens.tolist(), [] if found.confidence is None else found.confidence.tolist()))
                    seq.extend([token])
                planner.end(seq)
                items.append({"set": Path(name).name, "prompt": ids, "answer": answer.token_ids, "drafts": drafts})
        costs = {"target": planner.costs.as_dict(), "draft": find_costs(proposer.context.backend).as_dict()}
    Path(out).write_text(json.dumps(costs | {"items": items}), "utf-8")


@app.command()
def run(path: Path) -> None:
    """Print what `auto` makes of a trace, over plain decoding."""
    trace = json.loads(path.read_text("utf-8"))
    for with_model in (False, True):
        for num_seqs in (1, 4, 16):
            found = [f"{name} {over:.3f}" for name, over in replay(trace, num_seqs, with_model).items()]
            print(f"{'with the model' if with_model else 'lookups alone'}, {num_seqs} at once:", *found)


if __name__ == "__main__":
    app()
