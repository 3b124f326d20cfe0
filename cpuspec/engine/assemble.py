"""The drafters by name, and how a draft spec becomes one proposer. A new drafter is one row of SOURCES or of MODELS."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

from cpuspec.backends import BACKENDS, Backend, check_backend, make_backend, settings_on
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.download import find_model, resolve_model
from cpuspec.checkpoints.recipes import ChainRecipe, find_named
from cpuspec.config import AUTO, EngineConfig, LevelSpec, SpecConfig
from cpuspec.errors import ConfigError
from cpuspec.formats import get_format
from cpuspec.speculation.chain import DEFAULT_NUM_TOKENS, ChainProposer
from cpuspec.speculation.combine import Combined, Rule, first_hit, one_after_another
from cpuspec.speculation.context import Context
from cpuspec.speculation.drafters.ngram import make_ngram
from cpuspec.speculation.drafters.suffix import make_suffix
from cpuspec.speculation.drafters.translate import TranslatedProposer
from cpuspec.speculation.drafters.user import UserProposer, is_import_path
from cpuspec.speculation.drafters.vocab import SharedTokens, same_tokens
from cpuspec.speculation.planner.planner import MAX_TOKENS, Model, plan
from cpuspec.speculation.proposer import NullProposer, Proposer
from cpuspec.tokenizer import Tokenizer, make_tokenizer


@dataclass(frozen=True)
class Host:
    """What a level may know of the target before its weights are loaded."""

    checkpoint: Checkpoint | None  # None where the target is a backend of the user's own
    tokenizer: Tokenizer
    backend: str  # of drafts that name none
    vocab_size: int
    context_length: int  # tokens that a sequence may hold
    settings: EngineConfig

    def on(self, backend: str) -> "Host":
        """The same for a draft on a certain backend; another one than the target's has none of the settings that are its own."""
        return self if backend == self.backend else replace(self, backend=backend, settings=settings_on(backend, self.settings))


@dataclass(frozen=True)
class DraftModel:
    """A draft model before its weights are loaded. load: from the target's backend to the draft's."""

    tokenizer: Tokenizer
    load: Callable[[Backend], Backend]


def _self_cast(level: LevelSpec, host: Host) -> DraftModel:
    from cpuspec.engine.own_weights import make_self_draft
    from cpuspec.quantize.cast import casts  # imports numba

    checkpoint = _weights_of(host, level)
    casts(checkpoint, get_format(level.argument))  # raises where the format does not fit
    return DraftModel(
        host.tokenizer, lambda target: make_self_draft(target, checkpoint, level.argument, host.settings, host.backend)
    )


def _layer_skip(level: LevelSpec, host: Host) -> DraftModel:
    from cpuspec.engine.own_weights import make_skip_draft, read_skipped  # imports numba

    checkpoint = _weights_of(host, level)
    read_skipped(level.argument, checkpoint)
    return DraftModel(
        host.tokenizer, lambda target: make_skip_draft(target, checkpoint, level.argument, host.settings, host.backend)
    )


def _weights_of(host: Host, level: LevelSpec) -> Checkpoint:
    if host.checkpoint is None:
        raise ConfigError(f"{level.drafter} drafts with the target's own weights, and this target is no checkpoint; name a model")
    return host.checkpoint


def _matched_by_text(level: LevelSpec, host: Host) -> DraftModel:
    return _other_model(level.argument, host)


def _other_model(model: str, host: Host) -> DraftModel:
    checkpoint = open_checkpoint(resolve_model(model), host.settings.mmap)
    return DraftModel(make_tokenizer(checkpoint), lambda target: make_backend(host.backend, checkpoint, host.settings, target))


# Token sources: no model, so they stand at the bottom. The maker takes the level and raises ConfigError for what it cannot be.
SOURCES: Mapping[str, Callable[[LevelSpec], Proposer]] = {"ngram": make_ngram, "suffix": make_suffix}

# Models: verified by the levels above and verifying those below. The maker checks all it can and returns what loads the weights.
MODELS: Mapping[str, Callable[[LevelSpec, Host], DraftModel]] = {
    "self": _self_cast,
    "skip": _layer_skip,
    "match": _matched_by_text,
}
_PLANNED = AUTO.levels[0].name
_BY_TEXT = "match"  # whose tokens come back through their text

_MOST_TOKENS_FOR_ONE = 4  # a text may be so many times as long in the tokens of another vocabulary


# What a planner drafts with where its spec names no source.
_PLANNED_TEXT = LevelSpec("suffix:tree", 24, 0.05)


Make = Callable[[Backend, Proposer], Proposer]  # from the target's backend and what drafts for this level


class Tokens(NamedTuple):
    """What a drafter speaks to its verifier: a vocabulary, the length of rows, and how many tokens a sequence may hold."""

    tokenizer: Tokenizer
    num_rows: int
    context_length: int


def model_and_spec(model: str, spec: str | SpecConfig | None) -> tuple[str, SpecConfig]:
    """The model's name or path, and how to draft for it. A chain's name stands for both; a given `spec` replaces its own.

    Raises ConfigError for a chain or a spec that cannot be read, and for a chain that names Python code: a chain is only data.
    """
    chain = find_named(model)
    if not isinstance(chain, ChainRecipe):
        chain = None
    if spec is None and chain:
        code = [
            part.drafter for level in chain.spec.levels for part in _parts(level) if _is_source(part) and part.name not in SOURCES
        ]
        if code:
            raise ConfigError(
                f"the chain {chain.name} drafts with Python code, {code[0]!r}, which is run from the command line or the API only; "
                f"if you trust it, use the model {chain.target} with --draft {code[0]}"
            )
    if spec is None:
        spec = chain.spec if chain else AUTO
    return chain.target if chain else model, SpecConfig.parse(spec) if isinstance(spec, str) else spec


def check_spec(spec: SpecConfig) -> None:
    """Raise ConfigError for what can be seen before any model is opened: names, arguments, the order of levels.

    Raises BackendError for a level's backend that is not installed.
    """
    below = ""
    for level in _levels(spec):
        for whole in _parts(level):
            part = _checked_backend(whole)
            if part.name == _PLANNED:
                raise ConfigError(
                    f"auto stands alone or before the levels that it may choose from, as in auto,self:mxfp4; got {spec}"
                )
            if part.name in SOURCES:
                SOURCES[part.name](part)
            elif part.name in MODELS and not part.argument:
                raise ConfigError(f"{part.name} takes an argument, as in self:mxfp4, skip:4 and match:MODEL; got {part.drafter!r}")
            elif model := _model_of(part):
                _check_model(model)
        if below and _is_source(level):
            raise ConfigError(f"{level.drafter} has no model to verify what {below} drafts; put it first, or join the two with +")
        if _is_planned(spec) and level.then and not all(map(_is_source, _parts(level))):
            raise ConfigError(f"auto chooses among models and does not join them; write {level} with a comma")
        below = "" if _is_source(level) else level.drafter


def draft_models(spec: SpecConfig) -> list[str]:
    """Names and paths of the models that a spec takes from elsewhere."""
    return [model for level in _levels(spec) for part in _parts(level) if (model := _model_of(part))]


def prepare(spec: SpecConfig, host: Host) -> Callable[[Backend], Proposer]:
    """Open what a spec names and check that it fits the target; returns what loads it beside the target's backend.

    Raises ConfigError, CheckpointError, DownloadError, TokenizerError or FormatError.
    """
    check_spec(spec)
    planned, levels = _is_planned(spec), _levels(spec)
    num_tokens = MAX_TOKENS if planned else DEFAULT_NUM_TOKENS
    tokens = Tokens(host.tokenizer, host.vocab_size, host.context_length)
    models: list[Make] = []
    for level in [level for level in levels if not _is_source(level)][::-1]:
        make, own = _prepare_level(level, host, num_tokens, tokens)
        models.insert(0, make)
        tokens = tokens if planned else own  # those that a planner chooses from all draft for the target
    texts = [level for level in levels if _is_source(level)] or [_PLANNED_TEXT] * planned
    sources = [_prepare_level(level, host, DEFAULT_NUM_TOKENS, tokens)[0] for level in texts]

    def build_planned(target: Backend) -> Proposer:
        # A row whose bits depend on its company may choose another token in a draft's company.
        if not target.row_invariant:
            return NullProposer()
        chains = [make(target, NullProposer()) for make in models]
        assert all(isinstance(chain, Model) for chain in chains), "a model without `then` drafts by itself"
        return plan(target, [make(target, NullProposer()) for make in sources], cast(list[Model], chains))

    def build(target: Backend) -> Proposer:
        drafters = [make(target, NullProposer()) for make in sources]
        proposer = _combine(drafters, first_hit, ",") if drafters else NullProposer()
        for make in models:
            proposer = make(target, proposer)
        return proposer

    return build_planned if planned else build


def _prepare_level(level: LevelSpec, host: Host, num_tokens: int, tokens: Tokens) -> tuple[Make, Tokens]:
    """The level's drafter with those that continue its tokens, and the tokens that what drafts for it is to speak.

    num_tokens: that a model drafts where the spec says nothing. tokens: of the level's verifier.
    """
    (first, own), *then = [_prepare_drafter(part, host, num_tokens, tokens) for part in _parts(level)]

    def make(target: Backend, inner: Proposer) -> Proposer:
        return _combine([first(target, inner), *(make(target, NullProposer()) for make, _ in then)], one_after_another, "+")

    return make, own


def _prepare_drafter(part: LevelSpec, host: Host, num_tokens: int, tokens: Tokens) -> tuple[Make, Tokens]:
    if _is_source(part):
        source = SOURCES.get(part.name, UserProposer)(part)
        return (lambda target, inner: source), tokens
    drafter = _without_backend(part)
    if drafter is not part:
        host = host.on(part.name)
    maker = MODELS.get(drafter.name)
    model = maker(drafter, host) if maker else _other_model(drafter.drafter, host)
    name, by_text = _shown(part), drafter.name == _BY_TEXT
    num_tokens, sequences = part.num_tokens or num_tokens, host.settings.max_sequences

    def make(target: Backend, inner: Proposer) -> Proposer:
        draft = model.load(target)
        capacity = min(tokens.context_length, draft.config.context_length)
        context = Context(draft, sequences, capacity, tokens.num_rows, prompt_rows=host.settings.prompt_rows)
        return ChainProposer(inner, context, name, num_tokens, part.min_confidence)

    if not by_text and same_tokens(tokens.tokenizer, model.tokenizer):
        return make, tokens
    shared = SharedTokens.find(tokens.tokenizer, tokens.num_rows, model.tokenizer, part.drafter)
    own = Tokens(model.tokenizer, model.tokenizer.vocab_size, _MOST_TOKENS_FOR_ONE * tokens.context_length)

    def make_translated(target: Backend, inner: Proposer) -> Proposer:
        draft = model.load(target)
        capacity = min(own.context_length, draft.config.context_length)
        possible = None if by_text else shared.drafted
        context = Context(draft, sequences, capacity, possible=possible, prompt_rows=host.settings.prompt_rows)
        chain = ChainProposer(inner, context, name, num_tokens, part.min_confidence)
        return TranslatedProposer(chain, shared, by_text)

    return make_translated, own


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
    return level.name in SOURCES or (level.name not in (*MODELS, *BACKENDS) and is_import_path(level.drafter))


def _without_backend(part: LevelSpec) -> LevelSpec:
    """The drafter itself where one names the backend that it runs on, as in torch:MODEL and torch:self:mxfp4."""
    return replace(part, drafter=part.argument) if part.name in BACKENDS and part.argument else part


def _checked_backend(part: LevelSpec) -> LevelSpec:
    """The same. Raises BackendError or ConfigError for a backend that is not there, or for what does not run on one."""
    drafter = _without_backend(part)
    if part.name in BACKENDS:
        check_backend(part.name)
        if drafter is part or _is_source(drafter) or drafter.name in (_PLANNED, *BACKENDS):
            raise ConfigError(f"{part.name} runs a model, as in {part.name}:MODEL and {part.name}:self:mxfp4; got {part.drafter!r}")
    return drafter


def _model_of(part: LevelSpec) -> str | None:
    """The model that a drafter takes from elsewhere, by name or path."""
    part = _without_backend(part)
    if part.name == _BY_TEXT:
        return part.argument
    return None if _is_source(part) or part.name in MODELS else part.drafter


def _shown(part: LevelSpec) -> str:
    """A drafter's name in reports: of a model's path the last part."""
    model = _model_of(part)
    return part.drafter.removesuffix(model) + Path(model).name if model else part.drafter


def _check_model(drafter: str) -> None:
    try:
        find_model(drafter)
    except ConfigError as error:
        known = ", ".join((*SOURCES, *MODELS))
        raise ConfigError(f"drafter {drafter!r} is none of {known} and module:Class, and as a model: {error}") from None
