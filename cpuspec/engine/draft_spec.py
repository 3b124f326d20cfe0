"""Makes one proposer of a draft spec, in two phases: open the models that it names, then build the levels from the bottom up.

Opening checks all that can be checked before gigabytes of weights are loaded. Building loads them beside the target's.

A new drafter is a name in MODELS if it runs a model, else a row of LOOKUPS. The factory in such a row
- gets no tokenizer,
- must be cheap, because it is called just to check a spec, too,
- is exposed to HTTP clients, because any request may name it.
A drafter that needs resources is a class in a file of its own, `FILE.py:CLASS`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import numpy as np

from cpuspec.backends import BACKENDS, Backend, check_backend, make_backend, memory_limit, settings_on
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.download import fetch, find_model
from cpuspec.checkpoints.gguf import checkpoint_of
from cpuspec.checkpoints.gguf_file import GgufFile
from cpuspec.checkpoints.heads import Head, HeadFiles, own_mtp, reader_of
from cpuspec.checkpoints.heads.head import I64
from cpuspec.checkpoints.recipes import ChainRecipe, Recipe, find_named, read_frequent_tokens, recipe_of
from cpuspec.config import ModelConfig
from cpuspec.engine.heads import draft_casts, model_of_frequent_tokens, of_frequent_tokens, open_head
from cpuspec.engine.own_weights import read_skipped, skip_layers
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.formats import Format, get_format
from cpuspec.formats.kv import get_kv_format
from cpuspec.settings import AUTO, BACKEND_SETTINGS, EngineConfig, LevelSpec, SpecConfig, read_backend
from cpuspec.speculation.chain import DEFAULT_NUM_TOKENS, ChainProposer
from cpuspec.speculation.combine import Combined, Rule, first_hit, one_after_another
from cpuspec.speculation.context import Context
from cpuspec.speculation.drafters import masks
from cpuspec.speculation.drafters.heads import RULES, TREE_RULES, HeadProposer
from cpuspec.speculation.drafters.lookups import NUM_TOKENS, make_lookup
from cpuspec.speculation.drafters.translate import TranslatedProposer
from cpuspec.speculation.drafters.user import UserProposer, is_import_path
from cpuspec.speculation.drafters.vocab import SharedTokens, same_tokens
from cpuspec.speculation.head_context import HeadContext
from cpuspec.speculation.planner.known import MAX_TOKENS
from cpuspec.speculation.planner.planner import plan
from cpuspec.speculation.proposer import DraftModel, NullProposer, Proposer
from cpuspec.speculation.stage_context import StageContext
from cpuspec.text import Tokenizer, make_tokenizer

_Part = TypeVar("_Part")

Weights = tuple[Checkpoint, Mapping[str, Format]]  # a model, and its matrices that are cast to another format at load


@dataclass(frozen=True)
class Target:
    """The properties of the target that drafters may use before its weights are loaded."""

    checkpoint: Checkpoint | None  # None if the target is a backend of the user's own
    config: ModelConfig
    tokenizer: Tokenizer
    backend: str  # of drafters that name none
    context_length: int  # the most tokens of a sequence
    settings: EngineConfig


def _cast_weights(target: Checkpoint, format_name: str) -> Weights:
    from cpuspec.quantize.cast import casts  # imports numba

    return target, casts(target, get_format(format_name))


# Drafters without a model. They look drafts up in text and verify none, so they come first in a spec.
LOOKUPS: Mapping[str, Callable[[LevelSpec], Proposer]] = dict.fromkeys(NUM_TOKENS, make_lookup)

# How a head drafts, if not a chain of its likeliest tokens: a tree of the likeliest, or a chain of tokens that it draws.
HEAD_STYLES = ("tree", "draw")

# Drafters made of the target's own weights, and drafters of another vocabulary that are translated by text.
OWN_WEIGHTS: Mapping[str, Callable[[Checkpoint, str], Weights]] = {
    "self": _cast_weights,
    "skip": lambda target, skipped: (skip_layers(target, read_skipped(skipped, target)), {}),
}
BY_TEXT = "text"
MODELS = (*OWN_WEIGHTS, BY_TEXT, *HEAD_STYLES)

# The target's own layer for multi-token prediction, in its files or beside them. Plain `auto` uses it, too.
MTP = "mtp"

_PLANNED = AUTO.levels[0].name
# The lookup of `auto` if the spec names none; the second for targets with recurrent layers, which verify no trees.
_PLANNED_LOOKUP, _PLANNED_CHAIN = LevelSpec("suffix:tree", 24, 0.05), LevelSpec("suffix", 24, 0.05)
_LONGEST_CHOICE = 200  # characters of a spec that a request names
_MOST_TOKENS_FOR_ONE = 4  # a text has at most this many times as many tokens in another vocabulary
_BACKEND = re.compile(rf"(?P<backend>(?:{'|'.join(BACKENDS)})(?::{BACKEND_SETTINGS})?):(?P<drafter>.+)")


class _Drafter(NamedTuple):
    """The parts of a drafter's name in a spec."""

    name: str  # a row of LOOKUPS or MODELS; "" for a plain model and for a user's class
    argument: str  # after the colon
    backend: str  # with settings; "" for the target's
    is_lookup: bool  # whether it drafts without a model
    model: str  # name or path of a model from elsewhere, or ""
    shown: str  # its name in reports, with the last part of a model's path


def _read(part: LevelSpec) -> _Drafter:
    found = _BACKEND.fullmatch(part.drafter)
    backend, drafter = (found["backend"], found["drafter"]) if found else ("", part.drafter)
    name, _, argument = drafter.partition(":")
    if drafter == MTP or (name in HEAD_STYLES and argument == MTP):
        return _Drafter(name, MTP, backend, False, "", part.drafter)
    if name in LOOKUPS or (name not in (*MODELS, *BACKENDS) and is_import_path(drafter)):
        return _Drafter(name if name in LOOKUPS else "", argument, backend, True, "", part.drafter)
    model = argument if name in (BY_TEXT, *HEAD_STYLES) else "" if name in OWN_WEIGHTS else drafter
    shown = part.drafter.removesuffix(model) + Path(model).name if model else part.drafter
    return _Drafter(name if name in MODELS else "", argument, backend, False, model, shown)


def model_and_spec(model: str, spec: str | SpecConfig | None) -> tuple[str, SpecConfig]:
    """The model's name or path, and its spec. `model` may also name a chain or a head's recipe, which have both.

    A given `spec` replaces that of the chain or the recipe. Raises ConfigError for a chain or a spec that cannot be read, and for a
    chain that names Python code, because chains are only data.
    """
    chain = find_named(model)
    if isinstance(chain, Recipe) and chain.head:
        return chain.head.target, SpecConfig((*AUTO.levels, LevelSpec(model))) if spec is None else SpecConfig.read(spec)
    if not isinstance(chain, ChainRecipe):
        return model, AUTO if spec is None else SpecConfig.read(spec)
    if spec is not None:
        return chain.target, SpecConfig.read(spec)
    for part in _parts(chain.spec):
        drafter = _read(part)
        if drafter.is_lookup and not drafter.name:
            raise ConfigError(
                f"the chain {chain.name} drafts with Python code, {part.drafter!r}, which is run from the command line or the API "
                f"only; if you trust it, use the model {chain.target} with --draft {part.drafter}"
            )
    return chain.target, chain.spec


def check_spec(spec: SpecConfig) -> None:
    """Check names, arguments and the order of levels, before any model is opened. Raises ConfigError.

    Raises BackendError if a level's backend is not installed or does not have the level's settings.
    """
    if spec.proposer is not None and spec.levels:
        raise ConfigError(f"a proposer drafts instead of levels, and the spec has {spec.levels[0]} beside it; leave out one")
    below = ""
    for level in _levels(spec):
        for part in (level, *level.then):
            _check(part, spec)
        is_lookup = _read(level).is_lookup
        if below and is_lookup:
            raise ConfigError(f"{level.drafter} has no model to verify what {below} drafts; put it first, or join the two with +")
        if _is_planned(spec) and level.then and not all(_read(part).is_lookup for part in (level, *level.then)):
            raise ConfigError(f"auto chooses among models and does not join them; write {level} with a comma")
        below = "" if is_lookup else level.drafter


def _check(part: LevelSpec, spec: SpecConfig) -> None:
    drafter = _read(part)
    if drafter.backend or part.name in BACKENDS:
        name, settings = read_backend(drafter.backend or part.name, EngineConfig())
        check_backend(name, settings)
        get_kv_format(settings.kv_format)
        if not drafter.backend or drafter.is_lookup or drafter.model.partition(":")[0] in (_PLANNED, *BACKENDS):
            raise ConfigError(f"{name} runs a model, as in {name}:MODEL and {name}:self:mxfp4; got {part.drafter!r}")
    if part.name == _PLANNED:
        raise ConfigError(f"auto stands alone or before the levels that it may choose from, as in auto,self:mxfp4; got {spec}")
    if drafter.name in LOOKUPS:
        LOOKUPS[drafter.name](part)
    elif drafter.name and not drafter.argument:
        raise ConfigError(f"{part.name} takes an argument, as in self:mxfp4, skip:4, text:MODEL, tree:HEAD; got {part.drafter!r}")
    elif drafter.model:
        try:
            find_model(drafter.model)
        except ConfigError as error:
            known = ", ".join((*LOOKUPS, *MODELS))
            raise ConfigError(f"drafter {drafter.model!r} is none of {known} and module:Class, and as a model: {error}") from None


def draft_models(spec: SpecConfig) -> list[str]:
    """Names and paths of the models that a spec takes from elsewhere."""
    return [model for part in _parts(spec) if (model := _read(part).model)]


# -------------------------------------------------------------------------------------------------------------- phase 1: opening


@dataclass(frozen=True)
class Verifier:
    """The properties of a verifying model that its drafter needs."""

    tokenizer: Tokenizer
    num_rows: int  # of its logits
    context_length: int


class _Asked(NamedTuple):
    """A drafter as a spec asks for it, beside its verifier. num_tokens: of a draft, if the drafter knows no number of its own."""

    drafter: _Drafter
    part: LevelSpec
    num_tokens: int
    backend: str
    settings: EngineConfig
    verifier: Verifier


@dataclass(frozen=True)
class OpenedModel:
    """A draft model that fits its verifier. Its weights are not loaded yet.

    translation: from its vocabulary to the verifier's; None if they are the same. token_ids: the only tokens that it drafts,
    rising; None for all.
    """

    asked: _Asked
    weights: Weights
    tokenizer: Tokenizer
    translation: SharedTokens | None
    token_ids: I64 | None = None

    @property
    def mask_id(self) -> int | None:
        """The mask token of a model that drafts in one pass; None if it drafts token by token."""
        return None if self.translation else self.weights[0].mask_id

    @property
    def as_verifier(self) -> Verifier:
        """This model as the verifier of a drafter below it."""
        if self.translation is None:
            return self.asked.verifier
        return Verifier(self.tokenizer, self.tokenizer.vocab_size, _MOST_TOKENS_FOR_ONE * self.asked.verifier.context_length)


@dataclass(frozen=True)
class OpenedHead:
    """A trained head that fits the target. Its weights are not loaded yet."""

    asked: _Asked
    head: Head
    casts: Mapping[str, Format]


OpenedLevel = list[Proposer | OpenedModel | OpenedHead]  # its drafters; each continues the tokens of those before it


@dataclass(frozen=True)
class OpenedSpec:
    """The levels of a spec, opened: lookups, and models, the cheapest first."""

    is_planned: bool
    lookups: list[OpenedLevel]
    models: list[OpenedLevel]


def open_spec(spec: SpecConfig, target: Target) -> OpenedSpec:
    """Open all models that a spec names and check that they fit the target.

    Raises ConfigError, CheckpointError, DownloadError, TokenizerError or FormatError.
    """
    check_spec(spec)
    if spec.proposer is not None:
        return OpenedSpec(False, [[UserProposer(LevelSpec(type(spec.proposer).__name__), spec.proposer)]], [])
    # With a limit of memory, where experts may stay on the disk, only the models that the user named are loaded.
    if spec == AUTO and target.settings.memory == "auto" and _predicts(target):
        spec = SpecConfig((*AUTO.levels, LevelSpec(MTP)))
    is_planned, levels = _is_planned(spec), _levels(spec)
    verified = levels if is_planned or not levels or _read(levels[-1]).is_lookup else levels[-1:]  # by the target itself
    _check_trees(verified, {"this target": target.config})
    num_tokens = MAX_TOKENS if is_planned else DEFAULT_NUM_TOKENS
    verifier = Verifier(target.tokenizer, target.config.vocab_size, target.context_length)
    models: list[OpenedLevel] = []
    for level in [level for level in levels if not _read(level).is_lookup][::-1]:
        opened = _open_level(level, target, verifier, num_tokens)
        heads = [one.asked.drafter.shown for one in opened if isinstance(one, OpenedHead)]
        if heads and models and not is_planned:
            raise ConfigError(f"{heads[0]} drafts for the target alone; write it last, or join it to another drafter with +")
        models.insert(0, opened)
        if is_planned:  # all models that a planner chooses from draft for the target
            continue
        if isinstance(opened[0], OpenedModel) and opened[0].mask_id is None:
            verifier = opened[0].as_verifier
        elif len(levels) > len(models):
            raise ConfigError(f"{level.drafter} verifies no drafts of others; join them with +, as in {levels[0]}+{level}")
    firsts = [level[0] for level in (models if is_planned else models[:1])]
    # The models that verify what lookups draft.
    readers = [one for one in firsts if isinstance(one, OpenedModel) and not (is_planned and one.translation)]
    configs = {one.asked.drafter.shown: one.weights[0].config for one in readers}
    lookups = [level for level in levels if _read(level).is_lookup]
    _check_trees(lookups, configs)
    if is_planned and not lookups:
        reads_paths = any(config.is_recurrent for config in (target.config, *configs.values()))
        lookups = [_PLANNED_CHAIN if reads_paths else _PLANNED_LOOKUP]
    return OpenedSpec(is_planned, [_open_level(level, target, verifier, DEFAULT_NUM_TOKENS) for level in lookups], models)


def within_memory(opened: OpenedSpec, target: Checkpoint, settings: EngineConfig) -> EngineConfig:
    """The target's settings, with its limit of memory reduced by the heads' own weights.

    Raises ConfigError if these leave no memory, and BackendError as the backend does.
    """
    heads = [one for level in opened.models for one in level if isinstance(one, OpenedHead) and one.asked.settings.memory != "auto"]
    theirs = set(map(id, target.tensors.values()))
    own = sum(
        prod(tensor.shape[:-1]) * one.casts.get(name, tensor.format).row_bytes(tensor.shape[-1])
        for one in heads
        for name, tensor in one.head.model.tensors.items()
        if id(tensor) not in theirs
    )
    limit = memory_limit(settings.memory)
    if not own or limit is None:
        return settings
    if own >= limit:
        names = " and ".join(one.asked.drafter.shown for one in heads)
        raise ConfigError(f"memory is limited to {limit / 1e9:.3f} GB, and {names} alone takes {own / 1e9:.3f} GB; allow more")
    return replace(settings, memory=f"{(limit - own) / 1e3:.3f}KB")


def _check_trees(levels: Iterable[LevelSpec], verifiers: Mapping[str, ModelConfig]) -> None:
    """Raise ConfigError if a level drafts trees and one of the models that verify it, by name, has recurrent layers."""
    trees = [str(one) for level in levels for one in (level, *level.then) if "tree" in (_read(one).name, _read(one).argument)]
    recurrent = [name for name, config in verifiers.items() if config.is_recurrent]
    if trees and recurrent:
        raise ConfigError(
            f"{trees[0]} drafts trees, and recurrent layers, as {recurrent[0]} has, read one path alone; leave out tree"
        )


def _predicts(target: Target) -> bool:
    """Whether the target has a layer for multi-token prediction that can draft, in its files or beside them."""
    try:
        return target.checkpoint is not None and own_mtp(target.checkpoint, target.settings.mmap) is not None
    except CheckpointError:
        return False


def _open_level(level: LevelSpec, target: Target, verifier: Verifier, num_tokens: int) -> OpenedLevel:
    """num_tokens: that a model drafts if the spec names no number."""
    return [_open(part, target, verifier, num_tokens) for part in (level, *level.then)]


def _open(part: LevelSpec, target: Target, verifier: Verifier, num_tokens: int) -> Proposer | OpenedModel | OpenedHead:
    drafter = _read(part)
    if drafter.is_lookup:
        return LOOKUPS.get(drafter.name, UserProposer)(part)
    backend, settings = target.backend, target.settings
    if drafter.backend:
        named, _ = read_backend(drafter.backend, settings)
        backend, settings = read_backend(drafter.backend, settings if named == backend else settings_on(named, settings))
        check_backend(backend, settings)
    asked = _Asked(drafter, part, num_tokens, backend, settings, verifier)
    if drafter.name in (*OWN_WEIGHTS, MTP) or drafter.argument == MTP:
        if target.checkpoint is None:
            raise ConfigError(
                f"{part.drafter} drafts with the target's own weights, and this target is not a checkpoint; name a model"
            )
        if drafter.argument == MTP:
            return _opened_head(own_mtp(target.checkpoint, settings.mmap), asked, target)
        weights, tokenizer = OWN_WEIGHTS[drafter.name](target.checkpoint, drafter.argument), target.tokenizer
    else:
        source = find_model(drafter.model)
        path, made_for = source if isinstance(source, Path) else fetch(source), source.head if isinstance(source, Recipe) else None
        files = HeadFiles.read(path, settings.mmap)
        if files and (reader := reader_of(files)):
            return _opened_head(open_head(reader, files, target.checkpoint, target.tokenizer, made_for), asked, target)
        if made_for:
            raise CheckpointError(f"{path} is not a head of a known kind, and the recipe {drafter.model} says that it is one")
        # Parsing a vocabulary of 150,000 tokens takes a third of a second: once is enough.
        parsed = files.files if files else None
        checkpoint = checkpoint_of(parsed) if isinstance(parsed, GgufFile) else open_checkpoint(path, settings.mmap)
        if drafter.name in HEAD_STYLES and (drafter.name == "tree" or checkpoint.mask_id is None):
            raise ConfigError(f"{part.drafter} drafts with a head that was trained for the target, and {path} is none")
        weights, tokenizer = (checkpoint, {}), make_tokenizer(checkpoint)
        if checkpoint.mask_id is not None:
            asked = asked._replace(num_tokens=max(num_tokens, masks.DEFAULT_NUM_TOKENS))
    by_text, translation = drafter.name == BY_TEXT, None
    if by_text or not same_tokens(verifier.tokenizer, tokenizer):
        translation = SharedTokens.find(verifier.tokenizer, verifier.num_rows, tokenizer, part.drafter)
    token_ids: I64 | None = None
    if drafter.model:
        if checkpoint.mask_id is None:
            known = np.arange(verifier.num_rows) if translation is None else None if by_text else translation.draft_ids
            recipe = source if isinstance(source, Recipe) else recipe_of(path)
            counted = read_frequent_tokens(recipe, checkpoint.config.vocab_size)
            checkpoint, token_ids = model_of_frequent_tokens(checkpoint, settings.draft_vocab, tokenizer, counted, known)
        named = ("int4" if backend == "numba" else "file") if settings.draft_format == "auto" else settings.draft_format
        weights = checkpoint, draft_casts(checkpoint, named)
    return OpenedModel(asked, weights, tokenizer, translation, token_ids)


def _opened_head(head: Head, asked: _Asked, target: Target) -> OpenedHead:
    drafter, settings = asked.drafter, asked.settings
    if drafter.name == "tree" and head.method not in TREE_RULES:
        raise ConfigError(f"{drafter.shown} drafts in one pass, and makes no trees; leave out tree:")
    head = of_frequent_tokens(head, settings.draft_vocab, target.tokenizer)
    theirs = target.checkpoint.tensors.values() if target.checkpoint else ()
    casts = draft_casts(head.model, settings.draft_format.replace("auto", "int8"), theirs)
    # A planner may ask a head for more tokens than its default, unless one pass makes the draft.
    number = max(asked.num_tokens, head.num_tokens) if head.method in TREE_RULES else head.num_tokens
    return OpenedHead(asked._replace(num_tokens=number), head, casts)


# ------------------------------------------------------------------------------------------------------------- phase 2: building


def build(opened: OpenedSpec, context: Context) -> Proposer:
    """Load the opened models beside the target, the cheapest first, and stack them. context: the target's."""
    target = context.backend
    # Without row invariance a row may give another token beside a draft's rows.
    if opened.is_planned and not target.row_invariant:
        return NullProposer()
    load = partial(_load, target=target)
    if opened.is_planned:
        lookups = [_stacked([(True, level)], load) for level in opened.lookups]
        return plan(context, lookups, [cast(DraftModel, _stacked([(False, level)], load)) for level in opened.models])
    return _stacked([*((True, level) for level in opened.lookups), *((False, level) for level in opened.models)], load)


def build_chosen(name: str, default: Proposer, opened: OpenedSpec, target: Context) -> Proposer:
    """The drafters of a spec that a request names: lookups, and models of `default`, which are shared.

    opened: the spec of `default`. Raises ConfigError for a spec that names anything else.
    """
    loaded = _loaded(default, opened, target.vocab_size)
    spec = SpecConfig.parse(name[:_LONGEST_CHOICE])
    seen: list[str] = []

    def drafter(part: LevelSpec, inner: Proposer) -> Proposer:
        if _read(part).is_lookup and _read(part).name:
            return LOOKUPS[part.name](part)
        if part.drafter not in loaded or part.drafter in seen:
            known = ", ".join(map(repr, (*LOOKUPS, *loaded)))
            raise ConfigError(f"a request drafts with {known}, each model once, others are for --draft; got {part.drafter[:40]!r}")
        seen.append(part.drafter)
        context = loaded[part.drafter]
        return ChainProposer(inner, context, part.drafter, part.num_tokens or DEFAULT_NUM_TOKENS, part.min_confidence)

    levels: list[tuple[bool, list[LevelSpec]]] = []
    for level in spec.levels:
        is_lookup = _read(level).is_lookup
        if is_lookup and not all(before for before, _ in levels):
            raise ConfigError(
                f"{level.drafter} has no model to verify what was drafted before; put it first, or join the two with +"
            )
        levels.append((is_lookup, [level, *level.then]))
    proposer = _stacked(levels, drafter)
    first = next((parts[0].drafter for is_lookup, parts in levels if not is_lookup), "this target")  # verifies what lookups draft
    lookups = [part for is_lookup, parts in levels for part in parts if is_lookup]
    _check_trees(lookups, {first: loaded.get(first, target).backend.config})
    return proposer


def _stacked(levels: Iterable[tuple[bool, list[_Part]]], make: Callable[[_Part, Proposer], Proposer]) -> Proposer:
    """One proposer of levels, the cheapest first. Lookups are asked one after the other; each model verifies the level before it.

    levels: for each whether it is a lookup, and its parts, which continue one another. make: makes the drafter of a part, given the
    proposer that drafts for it.
    """
    lookups: list[Proposer] = []
    proposer: Proposer | None = None
    for is_lookup, parts in levels:
        below = NullProposer() if is_lookup else proposer or _combined(lookups, first_hit, ",")
        drafters = [make(part, NullProposer() if number else below) for number, part in enumerate(parts)]
        if is_lookup:
            lookups.append(_combined(drafters, one_after_another, "+"))
        else:
            proposer = _combined(drafters, one_after_another, "+")
    return proposer or _combined(lookups, first_hit, ",")


def _loaded(default: Proposer, opened: OpenedSpec, vocab_size: int) -> dict[str, Context]:
    """The loaded models that may draft directly for the target, by name. These, and the models above them, have its vocabulary."""
    models = [one for level in opened.models for one in level if isinstance(one, OpenedModel)]
    same = {
        one.asked.drafter.shown
        for number, one in enumerate(models)
        if all(above.translation is None for above in ([one] if opened.is_planned else models[number:]))
    }
    chains = [level for level in default.levels if isinstance(level, ChainProposer) and level.name in same]
    return {one.name: one.context for one in chains if one.context.vocab_size == vocab_size}


def _load(one: Proposer | OpenedModel | OpenedHead, inner: Proposer, target: Backend) -> Proposer:
    if isinstance(one, OpenedHead):
        return _load_head(one, target)
    return _load_model(one, target, inner) if isinstance(one, OpenedModel) else one


def _load_head(opened: OpenedHead, target: Backend) -> HeadProposer:
    head, asked = opened.head, opened.asked
    settings, style = asked.settings, asked.drafter.name
    rule = (TREE_RULES if style == "tree" else RULES)[head.method]
    backend, capacity = make_backend(asked.backend, head.model, settings, target, opened.casts), asked.verifier.context_length
    context: HeadContext | StageContext = (
        StageContext(head, backend, capacity)
        if head.stages
        else HeadContext(head, backend, settings.max_sequences, capacity, settings.prompt_rows)
    )
    number, least = asked.part.num_tokens or asked.num_tokens, asked.part.min_confidence
    branches = not target.config.is_recurrent
    return HeadProposer(context, rule, asked.verifier.num_rows, asked.drafter.shown, number, least, style == "draw", branches)


def _load_model(model: OpenedModel, target: Backend, inner: Proposer) -> DraftModel:
    (checkpoint, casts), asked = model.weights, model.asked
    settings, name, by_text = asked.settings, asked.drafter.shown, asked.drafter.name == BY_TEXT
    backend = make_backend(asked.backend, checkpoint, settings, target, casts)
    capacity = min(model.as_verifier.context_length, backend.config.context_length)
    num_rows = None if model.translation else asked.verifier.num_rows
    ids = model.token_ids
    if ids is None and model.translation and not by_text:
        ids = np.sort(model.translation.draft_ids)
    context = Context(backend, settings.max_sequences, capacity, num_rows, ids, settings.prompt_rows)
    number, least = asked.part.num_tokens or asked.num_tokens, asked.part.min_confidence
    if (mask_id := model.mask_id) is not None:
        return masks.MaskProposer(context, mask_id, name, number, least, asked.drafter.name == "draw")
    chain = ChainProposer(inner, context, name, number, least)
    return TranslatedProposer(chain, model.translation, by_text) if model.translation else chain


def _combined(drafters: list[Proposer], rule: Rule, sign: str) -> Proposer:
    if not drafters:
        return NullProposer()
    return drafters[0] if len(drafters) == 1 else Combined(tuple(drafters), rule, sign.join(one.name for one in drafters))


def _is_planned(spec: SpecConfig) -> bool:
    return spec.levels[:1] == AUTO.levels


def _levels(spec: SpecConfig) -> tuple[LevelSpec, ...]:
    """The levels of a spec without `auto`, which only says how the others are used."""
    return spec.levels[1:] if _is_planned(spec) else spec.levels


def _parts(spec: SpecConfig) -> list[LevelSpec]:
    return [part for level in _levels(spec) for part in (level, *level.then)]
