"""The parts of the time of rounds, beside the time that `auto` expected of them."""

from collections.abc import Sequence

from cpuspec.metrics import RoundPart, Spent
from cpuspec.speculation.context import Context
from cpuspec.speculation.planner.costs import MEASURED_ROWS, Costs
from cpuspec.speculation.planner.planner import Planner
from cpuspec.speculation.proposer import DraftModel

_MOST_ROWS = MEASURED_ROWS[-1] + 1  # of a draft with the row before it; a forward over more rows read prompts


def round_parts(target: Context, levels: Sequence[DraftModel], planner: Planner | None) -> list[RoundPart]:
    """The parts of the time of all steps so far, model by model. Their seconds add up to those of the steps."""
    spent, parts, drafters = target.spent, list[RoundPart](), {}
    if planner:
        parts = [RoundPart(f"{one.proposer.name}: look-ups", *_all(one.spent, "draft")) for one in planner.lookups]
        drafters = {one.proposer.name: one for one in planner.models}
    for level in levels:
        known = drafters.get(level.name)
        parts += _forwards(level.name, level.context.spent, known.costs if known else None)
        if known:
            own = level.context.spent  # it may verify drafts of levels below it
            between_s = known.spent.of("draft") - own.forwards_s - own.of("draft")
            parts.append(RoundPart(f"{level.name}: between its forwards", known.spent.counts.get("draft", 0), between_s))
    choosing_s = spent.of("draft") - sum(part.seconds for part in parts)
    parts.append(RoundPart("auto" if planner else "drafting otherwise", spent.counts.get("draft", 0), choosing_s))
    parts += _forwards("target", spent, planner.costs if planner else None)
    parts.append(RoundPart("target: batches and logits", spent.counts.get("score", 0), spent.of("score") - spent.forwards_s))
    parts.append(RoundPart("target: verification", *_all(spent, "verify")))
    rest_s = spent.of("step") - spent.of("draft") - spent.of("score") - spent.of("verify")
    return [*parts, RoundPart("scheduling and text", spent.counts.get("step", 0), rest_s)]


def _all(spent: Spent, what: str) -> tuple[int, float]:
    return spent.counts.get(what, 0), spent.of(what)


def _forwards(name: str, spent: Spent, costs: Costs | None) -> list[RoundPart]:
    """A model's time by the number of rows of its forwards. Forwards that read prompts are one part."""
    parts, prompts = list[RoundPart](), [0, 0.0]
    for rows in sorted(what for what in spent.counts if isinstance(what, int)):
        count, seconds = spent.counts[rows], spent.seconds[rows]
        if rows <= _MOST_ROWS:
            expected_s = count * costs.forward_s(rows) if costs else None
            parts.append(RoundPart(f"{name}: forwards over {rows} rows", count, seconds, expected_s))
        else:
            prompts = [prompts[0] + count, prompts[1] + seconds]
    return [*parts, RoundPart(f"{name}: prompts", int(prompts[0]), prompts[1])] if prompts[0] else parts
