"""The four arms: a model's wide weights and its quantized ones, each plain and with drafts, over the same tasks.

The wide target holds the quantized file's own values, decoded: what is measured is the cost of width, not what quantization lost
when the file was made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from cpuspec.checkpoints import Checkpoint
from cpuspec.engine.llm import LLM
from cpuspec.evaluate.answers import Cost, answer_all
from cpuspec.evaluate.tasks import Problem, Score, Task, judge, score
from cpuspec.formats import get_format
from cpuspec.quantize.cast import dequantized
from cpuspec.settings import EngineConfig, SamplingParams, SpecConfig

OnStep = Callable[[str, int, int], None]

_WARM_UP = SamplingParams(max_tokens=8, ignore_eos=True)


@dataclass(frozen=True)
class AskedTask:
    """A task with its problems, and how they are asked."""

    task: Task
    problems: Sequence[Problem]
    chat: bool
    params: SamplingParams


@dataclass(frozen=True)
class TaskOutcome:
    """An arm's results in one task. answers: token ids, to be compared with another arm's."""

    name: str
    form: str
    score: Score
    cost: Cost
    answers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ArmOutcome:
    """One arm. bits_per_weight: of the target."""

    arm: str
    draft: str
    weights: str
    bits_per_weight: float
    tasks: tuple[TaskOutcome, ...]

    def as_dict(self, price_per_hour: float | None = None) -> dict[str, Any]:
        """Every figure under its name, with prices where the machine has one."""
        tasks = [
            {
                "task": one.name,
                "form": one.form,
                "num_problems": one.score.num_problems,
                "num_passed": one.score.num_passed,
                "pass@1": one.score.pass_at[1],
                "pass@1_error": one.score.errors[1],
                "cost": asdict(one.cost),
                "seconds_per_accepted_answer": one.cost.duration_s / one.score.num_passed if one.score.num_passed else None,
                "price": None if price_per_hour is None else one.cost.price(price_per_hour, one.score.num_passed),
            }
            for one in self.tasks
        ]
        named = {"arm": self.arm, "draft": self.draft, "weights": self.weights, "bits_per_weight": self.bits_per_weight}
        return named | {"tasks": tasks}


def run_arms(
    checkpoint: Checkpoint,
    spec: SpecConfig,
    asked: Sequence[AskedTask],
    wide: str = "bf16",
    backend: str = "numba",
    settings: EngineConfig | None = None,
    isolated: bool = True,
    on_step: OnStep = lambda what, done, total: None,
) -> list[ArmOutcome]:
    """Run baseline, quantized, speculative and both, one after the other. wide: the format of the first and the third.

    Raises what loading and answering raise; ConfigError where programs have no sandbox.
    """
    settings, plain = settings or EngineConfig(max_sequences=1), SpecConfig()
    arms: Mapping[str, tuple[str | None, SpecConfig]] = {
        "baseline": (wide, plain),
        "quantized": (None, plain),
        "speculative": (wide, spec),
        "both": (None, spec),
    }
    wide_checkpoint = dequantized(checkpoint, get_format(wide))
    found = []
    for arm, (format, drafts) in arms.items():
        target = checkpoint if format is None else wide_checkpoint
        with LLM(target, drafts, backend, settings=settings) as llm:
            answer_all(llm, [(asked[0].problems[0].prompt, _WARM_UP)])
            outcomes = []
            for one in asked:
                requests = [(problem.prompt, one.params) for problem in one.problems]
                on_answer = partial(_tell, on_step, f"{arm}, {one.task.name}", len(requests))
                answers, cost = answer_all(llm, requests, on_answer)
                verdicts = judge(one.task, one.problems, [answer.content for answer in answers], one.chat, isolated=isolated)
                ids = tuple(answer.token_ids for answer in answers)
                outcomes.append(TaskOutcome(one.task.name, "chat" if one.chat else "raw", score(verdicts, 1), cost, ids))
        tensors = target.tensors.values()
        bits = 8 * sum(tensor.num_bytes for tensor in tensors) / sum(tensor.num_values for tensor in tensors)
        found.append(ArmOutcome(arm, str(drafts), format or "as in the file", bits, tuple(outcomes)))
    return found


def _tell(on_step: OnStep, what: str, total: int, done: int) -> None:
    on_step(what, done, total)
