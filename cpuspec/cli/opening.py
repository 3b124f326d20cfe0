"""Opens the models, drafts and LLMs that a command names. Fetches missing files and shows the progress."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cpuspec.backends import Backend, prepare
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.download import find_fetched, find_model, resolve_model
from cpuspec.checkpoints.recipes import ChainRecipe, Recipe, find_named, load_all
from cpuspec.cli import options
from cpuspec.cli.console import note, size
from cpuspec.cli.progress import busy, fetch_progress
from cpuspec.engine.draft_spec import draft_models, model_and_spec
from cpuspec.environment import cache_dir
from cpuspec.errors import ConfigError
from cpuspec.settings import SamplingDefaults, SpecConfig

if TYPE_CHECKING:
    from cpuspec.engine.llm import LLM


def open_model(model: str, mmap: bool = True, adapts: bool = False) -> Checkpoint:
    """The model of that name or path. adapts: whether the command applies adapters that belong to it."""
    checkpoint = open_checkpoint(_fetched(options.checked_text(model, "MODEL")), mmap, adapts)
    for remark in checkpoint.remarks:
        note(f"warning: {remark}")
    return checkpoint


def open_target(model: str, adapts: bool = False) -> Checkpoint:
    """The model of that name or path, or the target of that chain. adapts: as in `open_model`."""
    return open_model(model_and_spec(options.checked_text(model, "MODEL"), None)[0], adapts=adapts)


def open_with_drafts(model: str, draft: str | None, mmap: bool = True, adapts: bool = False) -> tuple[Checkpoint, SpecConfig]:
    """The target that a model's or chain's name stands for, and how to draft for it; draft models are fetched."""
    target, spec = model_and_spec(options.checked_text(model, "MODEL"), draft)
    if draft is None and target == model and sys.stderr.isatty():
        _tell_chain_once(model)
    checkpoint = open_model(target, mmap, adapts)
    for name in draft_models(spec):
        _fetched(name)
    return checkpoint, spec


@contextmanager
def load_llm(model: str, draft: str | None, running: options.Running, max_sequences: int = 1) -> "Iterator[LLM]":
    """An LLM with the drafts that the options name, closed in the end."""
    if not isinstance(find_model(model_and_spec(options.checked_text(model, "MODEL"), draft)[0]), Path):
        prepare(running.backend)  # a model that may have to be fetched first
    checkpoint, spec = open_with_drafts(model, draft, running.settings.mmap, adapts=True)
    with busy(f"loading {model}"):
        from cpuspec.engine.llm import LLM

        llm = LLM(checkpoint, spec, running.backend, settings=running.settings, max_sequences=max_sequences)
    with llm:
        yield llm


@contextmanager
def load_backend(model: str, checkpoint: Checkpoint, running: options.Running) -> Iterator[Backend]:
    """The backend that the options name, with the model and its adapters, closed in the end. model: what the user called it."""
    from cpuspec.engine.llm import load_target
    from cpuspec.engine.lora import with_adapters

    with busy(f"loading {model}"):
        backend = load_target(running.backend, checkpoint, running.settings)
    try:
        yield with_adapters(backend, checkpoint, running.settings)
    finally:
        backend.close()


def sampling_defaults(llm: "LLM") -> SamplingDefaults:
    """The model's defaults. A default in its files that cannot be used is told as a warning."""
    for remark in llm.sampling_defaults.ignored:
        note(f"warning: {remark}")
    return llm.sampling_defaults


def thinking_variables(llm: "LLM", thinking: bool | None) -> dict[str, bool]:
    """The variables of the chat template that switch reasoning on or off. Raises ConfigError where it has no such switch."""
    if thinking is None:
        return {}
    if not llm.tokenizer.can_switch_thinking:
        raise ConfigError("this model's chat template cannot switch reasoning on or off; leave out --thinking and --no-thinking")
    return {"enable_thinking": thinking}


def measured_chains() -> list[ChainRecipe]:
    """The chains of which it is known what they gain."""
    return [chain for chain in load_all()[1].values() if chain.gain]


def about_chain(chain: ChainRecipe) -> str:
    """A line for people who run its target alone: what the chain gains, and what it would fetch."""
    drafts = [one for name in draft_models(chain.spec) if isinstance(one := find_named(name), Recipe)]
    missing = sum(one.about_bytes for one in drafts if find_fetched(one) is None)
    fetches = f"; it fetches {size(missing)} once" if missing else ""
    return f"{chain.name} is {chain.target} with drafts: the same answers, {chain.gain}{fetches}"


def _tell_chain_once(model: str) -> None:
    """Tell of the model's chain, the first time that the model is run by its name."""
    told = cache_dir() / "told" / model
    if not isinstance(find_named(model), Recipe) or told.exists():
        return
    for chain in measured_chains():
        if chain.target == model:
            note(f"note: {about_chain(chain)}")
            with suppress(OSError):
                told.parent.mkdir(parents=True, exist_ok=True)
                told.touch()


def _fetched(model: str) -> Path:
    with fetch_progress(model) as progress:
        return resolve_model(model, progress)
