"""One run from a model's file to a draft for it: answers, their states, training, and a chain that `generate` and `serve` take.

    OUT/answers.jsonl, OUT/states    the target's answers, and for heads its hidden states over them
    OUT/first, OUT/draft             a head that learned one token, and the same one with more; or a small model
    OUT/NAME.toml                    the chain of the target and its draft
    OUT/progress.json                which stages are done, what they took and what came out

Every stage continues by itself where it was interrupted, and a finished one is not begun again. So a run that was interrupted ends
with the same numbers as one that was not, where no stage ends by the clock.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch

from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.checkpoint import HfTokenizerFiles
from cpuspec.checkpoints.fields import read_json_object
from cpuspec.checkpoints.gguf_parts import file_identity
from cpuspec.checkpoints.heads import find_reader
from cpuspec.engine.llm import LLM, load_target
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.files import write_file
from cpuspec.formats import get_format
from cpuspec.metrics import now_s
from cpuspec.platform import SYSTEM
from cpuspec.quantize.head_output import write_head
from cpuspec.settings import EngineConfig, LevelSpec, SamplingParams, SpecConfig
from cpuspec.speculation.drafters.vocab import same_tokens
from cpuspec.text import make_tokenizer
from cpuspec.train.answers import AnswerFiles, AnswerPlan, AnswersSummary, make_answers
from cpuspec.train.chains import ChainLoss
from cpuspec.train.distill import read_answers
from cpuspec.train.extract import Extractor, ExtractSummary, extract, read_texts, usual_layers
from cpuspec.train.job import STARTS, ModelJob, TrainingJob, train_head, train_model
from cpuspec.train.layout import read_head
from cpuspec.train.loop import Measured, OnMeasured, OnStep, Schedule
from cpuspec.train.model_files import GGUF_NAME, ModelWeights
from cpuspec.train.samples import FINAL, Extraction, open_samples
from cpuspec.train.start import HeadShape, start_from
from cpuspec.train.states import AnswerStates
from cpuspec.train.weights import HeadWeights

PROGRESS = "progress.json"
_MOST_BYTES = 1 << 24
_NOTED_EVERY_S = 10.0
_OF_ANSWERS, _LEAST_OF_TRAINING = 0.5, 0.1  # of the hours
_TOP = 32  # likeliest tokens that samples keep
_LENGTH = 1024  # tokens of a sample
_DRAFTED = 4  # tokens that a small model is measured with
_TRIED, _TRIED_TOKENS, _TRIED_SHARE = 8, 96, 0.05  # prompts of held-back answers that the draft is tried on
_HEAD_FORMAT = "iq4_nl"


@dataclass(frozen=True)
class AutoPlan:
    """What a run makes and how long it may take.

    answers, max_tokens: the prompts, and of all answers the tokens. given: files of answers instead of these. source: a head, or
    a small model, to go on with; None for a new head. beside: other drafts that the chain names. hours: of all stages together,
    of which answers take up to half and training the rest; 0 for no limit. vocab_size, intermediate_size: of a new head. epochs:
    of each training.
    """

    answers: AnswerPlan
    max_tokens: int = 500_000
    source: Path | None = None
    beside: tuple[LevelSpec, ...] = ()
    hours: float = 8.0
    vocab_size: int = 8192
    intermediate_size: int = 0
    epochs: int = 3
    bf16: bool = False
    given: tuple[Path, ...] = ()


class Listener(NamedTuple):
    """Who is told what a run does."""

    on_answers: Callable[[AnswersSummary], None]
    on_states: Callable[[ExtractSummary], None]
    on_step: OnStep
    on_measured: OnMeasured


class _Progress:
    """The stages of a run that are done, and the seconds of each, on the disk."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Raises CheckpointError for a run of other settings."""
        self._path, self._settings = path, json.loads(json.dumps(settings, default=str))
        self.seconds: dict[str, float] = {}
        self.done: dict[str, Any] = {}
        if not path.exists():
            return
        whole = read_json_object(path, _MOST_BYTES)
        for name in ("settings", "seconds", "done"):
            if not isinstance(whole.get(name), dict):
                raise CheckpointError(f"{path} is damaged: {name} is not an object; remove it, and the run continues")
        before: dict[str, Any] = whole["settings"]  # type: ignore[assignment]
        others = [name for name, value in self._settings.items() if before.get(name) != value]
        if others:
            raise CheckpointError(
                f"{path.parent} is a run with another {others[0]}: {str(before.get(others[0]))[:100]}, and this one has "
                f"{str(self._settings[others[0]])[:100]}; use the same, or name another directory"
            )
        self.seconds, self.done = whole["seconds"], whole["done"]  # type: ignore[assignment]

    def note(self, stage: str, seconds: float) -> None:
        """Keep the seconds of a stage."""
        self.seconds[stage] = round(seconds, 1)
        whole = {"settings": self._settings, "seconds": self.seconds, "done": self.done}
        write_file(self._path, json.dumps(whole, indent=1) + "\n")

    def finish(self, stage: str, seconds: float, facts: object) -> None:
        """A stage is done."""
        self.done[stage] = json.loads(json.dumps(facts))
        self.note(stage, seconds)


def tune(
    target: Checkpoint, model: str, out: Path, plan: AutoPlan, backend: str, settings: EngineConfig, listener: Listener
) -> dict[str, Any]:
    """Run every stage that is left; returns what each gave, by its name, as `progress.json` has it.

    model: what the chain calls the target. backend, settings: of answers, states and the last trial; training takes their threads
    and device. Raises ConfigError for a target or a source that cannot be trained, before anything is computed, and for prompts
    that cannot be read; CheckpointError for an `out` of another run; KeyboardInterrupt and OSError, after which the same call
    goes on.
    """
    run = _Run(target, out, plan, backend, settings, listener)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("wb") as lock:
        if not SYSTEM.try_lock(lock):
            raise ConfigError(f"{out} is in use by another run; wait for it, or name another directory")
        given = [hashlib.sha256(path.read_bytes()).hexdigest() for path in plan.given]
        told = {"model": file_identity(target.path), **asdict(plan), "given": given}
        del told["hours"]
        progress = _Progress(out / PROGRESS, told)
        if "answers" not in progress.done and not plan.given:
            run.answer(progress)
        if run.small is None and "states" not in progress.done:
            run.extract(progress)
        if "draft" not in progress.done:
            run.train(progress)
        if "chain" not in progress.done:
            begin_s = now_s()
            spec = run.spec()
            path = _write_chain(out, model, spec)
            progress.finish("chain", now_s() - begin_s, {"path": str(path)} | run.tried(spec))
    return progress.done


class _Run:
    def __init__(
        self, target: Checkpoint, out: Path, plan: AutoPlan, backend: str, settings: EngineConfig, listener: Listener
    ) -> None:
        self._target, self._out, self._plan = target, out, plan
        self._backend, self._settings, self._listener = backend, settings, listener
        self._answers, self._states = plan.given or (out / "answers.jsonl",), out / "states"
        self.small: Checkpoint | None = None
        self._length = min(_LENGTH, target.config.context_length)  # of a sample
        self._method = "mtp" if target.config.is_recurrent else "eagle3"
        inside = 0 if self._method == "mtp" else plan.intermediate_size
        self._shape = HeadShape(intermediate_size=inside, vocab_size=plan.vocab_size)
        if plan.source is not None:
            if find_reader(plan.source) is None:
                self.small = open_checkpoint(plan.source)
                ModelWeights(self.small, torch.device("cpu"))  # which refuses what is not trained
            else:
                self._method = read_head(plan.source, target).method
        if self.small is None:
            self._check()

    def answer(self, progress: _Progress) -> None:
        """The target's answers, until there are enough or their time is over."""
        plan, before = self._plan, progress.seconds.get("answers", 0.0)
        settings = replace(self._settings, context_length=plan.answers.context_length)
        noted_s = now_s()

        def tell(summary: AnswersSummary) -> None:
            nonlocal noted_s
            if now_s() - noted_s > _NOTED_EVERY_S:
                noted_s = now_s()
                progress.note("answers", before + summary.duration_s)
            self._listener.on_answers(summary)

        most = _OF_ANSWERS * 3600 * plan.hours - before if plan.hours else math.inf
        identity, spec, states = file_identity(self._target.path), SpecConfig(), None
        with ExitStack() as stack:
            if self.small is None and plan.answers.context_length <= self._length:
                states = AnswerStates(self._target, self._about(), self._states, self._listener.on_states)
                stack.callback(states.close)
                spec = SpecConfig(proposer=states.recorder)
            llm = stack.enter_context(LLM(self._target, spec, self._backend, settings=settings))
            summary = make_answers(llm, identity, plan.answers, self._answers[0], plan.max_tokens, tell, most, states)
        progress.note("answers", before + summary.duration_s)
        if summary.interrupted:
            raise KeyboardInterrupt
        facts = {"num_answers": summary.num_kept + summary.num_answers, "num_answer_tokens": summary.num_answer_tokens}
        progress.finish("answers", before + summary.duration_s, facts)

    def extract(self, progress: _Progress) -> None:
        """The target's hidden states over its answers, where they were not kept while it answered."""
        about, length = self._about(), self._length
        backend = load_target(self._backend, self._target, self._settings)
        before = progress.seconds.get("states", 0.0)
        try:
            extractor = Extractor(backend, self._target, about.layers, about.top, length)
            texts = read_texts(self._answers, AnswerFiles(make_tokenizer(self._target)), length)
            summary = extract(extractor, about, texts, self._states, on_progress=self._listener.on_states)
        finally:
            backend.close()
        progress.note("states", before + summary.duration_s)
        if summary.interrupted:
            raise KeyboardInterrupt
        facts = {"num_samples": summary.num_samples, "num_tokens": summary.num_tokens}
        progress.finish("states", before + summary.duration_s, facts)

    def train(self, progress: _Progress) -> None:
        """The draft. A new head learns its first token before it learns chains: that is quicker (README)."""
        plan = self._plan
        steps = (1, 3) if plan.source is None else (3,)
        spent = sum(progress.seconds.get(name, 0.0) for name in ("answers", "states")) / 60
        minutes = max(60 * plan.hours - spent, 60 * plan.hours * _LEAST_OF_TRAINING) / len(steps)
        how = {"device": self._settings.device, "threads": self._settings.threads}
        source, logs = plan.source, []
        for number in steps:
            directory = self._out / ("draft" if number == steps[-1] else "first")
            logs.append(self._trained(directory, source, number, minutes, how))
            source = directory
        best = max(logs[-1], key=lambda line: line.mean_length)
        facts = {"path": str(self._draft()), "before": logs[0][0]._asdict(), "best": best._asdict()}
        progress.finish("draft", sum(log[-1].seconds for log in logs), facts)

    def _trained(self, directory: Path, source: Path | None, steps: int, minutes: float, how: Mapping[str, Any]) -> list[Measured]:
        plan, listener = self._plan, self._listener
        schedule = Schedule(
            plan.epochs, minutes, tokens=1024, longest=_LENGTH, rate=1e-3 if source is None else 6e-4, bf16=plan.bf16
        )
        if self.small is not None:
            files, theirs = AnswerFiles(make_tokenizer(self._target)), make_tokenizer(self.small)
            texts = read_answers(self._answers, files, theirs, self._target.config.vocab_size)
            of_model = ModelJob(_DRAFTED, replace(schedule, rate=1e-4), **how)
            return train_model(self.small, texts, directory, of_model, listener.on_step, listener.on_measured)
        loss = ChainLoss(self._method, steps, 0.6 if self._method == "mtp" else 0.8)
        shape = HeadShape() if source else self._shape
        samples = open_samples(self._states)
        job = TrainingJob(loss, shape, schedule, source, **how)
        return train_head(self._target, samples, directory, job, listener.on_step, listener.on_measured)

    def _draft(self) -> Path:
        """The file that drafts. A head's matrices are rounded to four bits where its kind has a GGUF layout."""
        directory = self._out / "draft"
        if self.small is not None:
            return directory if isinstance(self.small.vocabulary, HfTokenizerFiles) else directory / GGUF_NAME
        path = self._out / "draft.gguf"
        try:
            write_head(path, read_head(directory, self._target), self._target, get_format(_HEAD_FORMAT), has_tokenizer=False)
        except ConfigError:
            return directory
        return path

    def spec(self) -> SpecConfig:
        """Auto, with the draft to choose, and others: heads first, since they cost less."""
        path = str(self._draft().resolve())
        by_text = self.small is not None and not same_tokens(make_tokenizer(self._target), make_tokenizer(self.small))
        own, beside = LevelSpec(f"text:{path}" if by_text else path), self._plan.beside
        return SpecConfig((LevelSpec("auto"), *((own, *beside) if self.small is None else (*beside, own))))

    def tried(self, spec: SpecConfig) -> dict[str, Any]:
        """Tokens a forward, and the speed over plain decoding, on prompts of answers that nothing was trained on."""
        files = AnswerFiles(make_tokenizer(self._target))
        lines = [line for path in self._answers for _, line in files.lines(path)]
        held = lines[-max(1, int(_TRIED_SHARE * len(lines))) :]
        prompts = list({tuple(line["prompt_ids"]): None for line in held})[:_TRIED]
        params, settings = SamplingParams(max_tokens=_TRIED_TOKENS), replace(self._settings, max_sequences=1)
        with ExitStack() as stack:
            llms = [stack.enter_context(LLM(self._target, one, self._backend, settings=settings)) for one in ("none", spec)]
            both = [[llm.generate([list(ids)], params)[0] for llm in llms] for ids in prompts]
        num_new = sum(drafted.stats.num_new_tokens for _, drafted in both)
        seconds = [sum(pair[i].stats.decode_s or 0.0 for pair in both) for i in (0, 1)]
        return {
            "num_prompts": len(both),
            "num_identical": sum(plain.token_ids == drafted.token_ids for plain, drafted in both),
            "tokens_per_forward": round(num_new / (num_new - sum(one.stats.num_forwards_saved for _, one in both)), 3),
            "over_plain": round(seconds[0] / seconds[1], 3) if all(seconds) else None,
        }

    def _about(self) -> Extraction:
        config = self._target.config
        named = usual_layers(config.num_layers) if self._method != "mtp" else (FINAL,)
        if self._plan.source is not None and self._method != "mtp":
            named = (*read_head(self._plan.source, self._target).layers, FINAL)
        top, files = min(_TOP, config.vocab_size), tuple(file_identity(self._target.path))
        return Extraction(self._target.name, files, config.vocab_size, config.hidden_size, config.num_layers, named, "bf16", top)

    def _check(self) -> None:
        """Raise ConfigError for a head that cannot be trained. Where layers cannot begin as the target's, they begin at random."""
        ids = np.arange(self._target.config.vocab_size)
        counts = np.ones_like(ids)
        with TemporaryDirectory() as name:
            first, about = Path(name), self._about()
            if self._plan.source is not None:
                start_from(first, self._plan.source, self._target, counts, None)
                HeadWeights(first, self._target, about, self._method, torch.device("cpu"), ids[:1])
                return
            try:
                STARTS[self._method](first, self._target, about, counts, self._shape, 0)
            except ConfigError:
                self._shape = replace(self._shape, copied=False)
                STARTS[self._method](first, self._target, about, counts, self._shape, 0)


def _write_chain(out: Path, model: str, spec: SpecConfig) -> Path:
    """The chain's file, named after the directory."""
    name = re.sub(r"[^a-z0-9._-]+", "-", out.resolve().name.lower()).strip("-._")[:100] or "tuned"
    plain = [level == LevelSpec(level.drafter) for level in spec.levels]  # as a table, which a path may have any characters in
    told = [
        f"{{drafter = {_quoted(one.drafter)}}}" if is_plain else _quoted(str(one))
        for one, is_plain in zip(spec.levels, plain, strict=True)
    ]
    levels = ", ".join(told)
    lines = [
        "# Made by `cpuspec train auto`: the model and the draft that was trained for it.",
        f"name = {_quoted(name)}",
        f"description = {_quoted(f'{model} with a draft that was trained for it')}",
        f"target = {_quoted(model)}",
        f"levels = [{levels}]",
    ]
    path = out / f"{name}.toml"
    write_file(path, "\n".join(lines) + "\n")
    return path


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
