"""The drafters by name, and how a draft spec becomes one proposer. A new drafter is one row of SOURCES or of MODELS."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from cpuspec.backends import Backend, make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.download import find_model, resolve_model
from cpuspec.config import AUTO, EngineConfig, LevelSpec, SpecConfig
from cpuspec.errors import ConfigError
from cpuspec.formats import get_format
from cpuspec.spec.chain import DEFAULT_NUM_TOKENS, ChainProposer
from cpuspec.spec.combine import Combined, Rule, first_hit, one_after_another
from cpuspec.spec.context import Context
from cpuspec.spec.ngram import make_ngram
from cpuspec.spec.planner import MAX_TOKENS, plan
from cpuspec.spec.proposer import NullProposer, Proposer
from cpuspec.spec.suffix import make_suffix
from cpuspec.spec.user import UserProposer, is_import_path
from cpuspec.spec.vocab import check_same_tokens
from cpuspec.tokenizer import Tokenizer, make_tokenizer


@dataclass(frozen=True)
class Host:
    """What a level may know of the target before its weights are loaded."""

    checkpoint: Checkpoint | None  # None where the target is a backend of the user's own
    tokenizer: Tokenizer
    backend: str  # for models of other files
    vocab_size: int
    context_length: int  # tokens that a sequence may hold
    settings: EngineConfig


Load = Callable[[Backend], Backend]  # from the target's backend to the draft model's, its weights loaded


def _self_cast(level: LevelSpec, host: Host) -> Load:
    from cpuspec.quantize.cast import casts  # imports numba
    from cpuspec.spec.own_weights import make_self_draft

    checkpoint = _weights_of(host, level)
    casts(checkpoint, get_format(level.argument))  # raises where the format does not fit
    return lambda target: make_self_draft(target, checkpoint, level.argument, host.settings)


def _layer_skip(level: LevelSpec, host: Host) -> Load:
    from cpuspec.spec.own_weights import make_skip_draft, read_skipped  # imports numba

    checkpoint = _weights_of(host, level)
    read_skipped(level.argument, checkpoint)
    return lambda target: make_skip_draft(target, checkpoint, level.argument, host.settings)


def _weights_of(host: Host, level: LevelSpec) -> Checkpoint:
    if host.checkpoint is None:
        raise ConfigError(f"{level.drafter} drafts with the target's own weights, and this target is no checkpoint; name a model")
    return host.checkpoint


def _draft_model(level: LevelSpec, host: Host) -> Load:
    checkpoint = open_checkpoint(resolve_model(level.drafter))
    check_same_tokens(host.tokenizer, make_tokenizer(checkpoint), level.drafter)
    return lambda target: make_backend(host.backend, checkpoint, host.settings, target)


# Token sources: no model, so they stand at the bottom. The maker takes the level and raises ConfigError for what it cannot be.
SOURCES: Mapping[str, Callable[[LevelSpec], Proposer]] = {"ngram": make_ngram, "suffix": make_suffix}

# Models: verified by the levels above and verifying those below. The maker checks all it can and returns what loads the weights.
MODELS: Mapping[str, Callable[[LevelSpec, Host], Load]] = {"self": _self_cast, "skip": _layer_skip}


# What a planner drafts with where its spec names no source.
_PLANNED_TEXT = LevelSpec("suffix", 24, 0.05)


Make = Callable[[Backend, Proposer], Proposer]  # from the target's backend and what drafts for this level


def check_spec(spec: SpecConfig) -> None:
    """Raise ConfigError for what can be seen before any model is opened: names, arguments, the order of levels."""
    below = ""
    for level in _levels(spec):
        for part in _parts(level):
            if part.name == AUTO:
                raise ConfigError(
                    f"auto stands alone or before the levels that it may choose from, as in auto,self:mxfp4; got {spec}"
                )
            if part.name in SOURCES:
                SOURCES[part.name](part)
            elif part.name in MODELS and not part.argument:
                raise ConfigError(f"{part.name} takes an argument, as in self:mxfp4 and skip:4; got {part.drafter!r}")
            elif part.name not in MODELS and not is_import_path(part.drafter):
                _check_model(part.drafter)
        if below and _is_source(level):
            raise ConfigError(f"{level.drafter} has no model to verify what {below} drafts; put it first, or join the two with +")
        if _is_planned(spec) and level.then and not all(map(_is_source, _parts(level))):
            raise ConfigError(f"auto chooses among models and does not join them; write {level} with a comma")
        below = "" if _is_source(level) else level.drafter


def draft_models(spec: SpecConfig) -> list[str]:
    """Names and paths of the models that a spec takes from elsewhere."""
    return [part.drafter for level in _levels(spec) for part in _parts(level) if not _is_source(part) and part.name not in MODELS]


def prepare(spec: SpecConfig, host: Host) -> Callable[[Backend], Proposer]:
    """Open what a spec names and check that it fits the target; returns what loads it beside the target's backend.

    Raises ConfigError, CheckpointError, DownloadError, TokenizerError or FormatError.
    """
    check_spec(spec)
    planned, levels = _is_planned(spec), _levels(spec)
    texts = [level for level in levels if _is_source(level)] or [_PLANNED_TEXT] * planned
    sources = [_prepare_level(level, host, DEFAULT_NUM_TOKENS) for level in texts]
    num_tokens = MAX_TOKENS if planned else DEFAULT_NUM_TOKENS
    models = [_prepare_level(level, host, num_tokens) for level in levels if not _is_source(level)]

    def build_planned(target: Backend) -> Proposer:
        # A row whose bits depend on its company may choose another token in a draft's company.
        if not target.row_invariant:
            return NullProposer()
        chains = [make(target, NullProposer()) for make in models]
        assert all(isinstance(chain, ChainProposer) for chain in chains), "a model without `then` drafts as a chain"
        return plan(target, [make(target, NullProposer()) for make in sources], cast(list[ChainProposer], chains))

    def build(target: Backend) -> Proposer:
        drafters = [make(target, NullProposer()) for make in sources]
        proposer = _combine(drafters, first_hit, ",") if drafters else NullProposer()
        for make in models:
            proposer = make(target, proposer)
        return proposer

    return build_planned if planned else build


def _prepare_level(level: LevelSpec, host: Host, num_tokens: int) -> Make:
    """The level's drafter and those that continue its tokens. num_tokens: that a model drafts where the spec says nothing."""
    first, *then = [_prepare_drafter(part, host, num_tokens) for part in _parts(level)]
    return lambda target, inner: _combine(
        [first(target, inner), *(make(target, NullProposer()) for make in then)], one_after_another, "+"
    )


def _prepare_drafter(part: LevelSpec, host: Host, num_tokens: int) -> Make:
    if _is_source(part):
        source = SOURCES.get(part.name, UserProposer)(part)
        return lambda target, inner: source
    load = MODELS.get(part.name, _draft_model)(part, host)
    name = part.drafter if part.name in MODELS else Path(part.drafter).name

    def make(target: Backend, inner: Proposer) -> Proposer:
        draft = load(target)
        capacity = min(host.context_length, draft.config.context_length)
        context = Context(draft, host.settings.max_sequences, capacity, host.vocab_size)
        return ChainProposer(inner, context, name, part.num_tokens or num_tokens, part.min_confidence)

    return make


def _combine(drafters: list[Proposer], rule: Rule, sign: str) -> Proposer:
    return drafters[0] if len(drafters) == 1 else Combined(tuple(drafters), rule, sign.join(one.name for one in drafters))


def _is_planned(spec: SpecConfig) -> bool:
    return spec.levels[:1] == AUTO.levels


def _levels(spec: SpecConfig) -> tuple[LevelSpec, ...]:
    """The levels of a spec, without the word that says how they are used."""
    return spec.levels[1:] if _is_planned(spec) else spec.levels


def _parts(level: LevelSpec) -> tuple[LevelSpec, ...]:
    return (level, *level.then)


def _is_source(level: LevelSpec) -> bool:
    return level.name in SOURCES or (level.name not in MODELS and is_import_path(level.drafter))


def _check_model(drafter: str) -> None:
    try:
        find_model(drafter)
    except ConfigError as error:
        known = ", ".join((*SOURCES, *MODELS))
        raise ConfigError(f"drafter {drafter!r} is none of {known} and module:Class, and as a model: {error}") from None
