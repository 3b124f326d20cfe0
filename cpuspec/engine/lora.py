"""The LoRA adapters that an LLM has, by name, and which of them a request uses."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, cast

from cpuspec.backends import Backend, HeadBackend
from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.adapters import Adapter, AdapterSet, checked_scale, open_adapter, read_scaled
from cpuspec.config import ModelConfig
from cpuspec.errors import BackendError, ConfigError
from cpuspec.model.batch import ForwardBatch, ForwardOutput
from cpuspec.model.cache import KVCache
from cpuspec.settings import EngineConfig

_MOST = 256  # adapters at once: a client that loads them must not fill the memory by their number


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a request, in vLLM's spelling. lora_path: where it is, if it is not loaded yet."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


class _Named(Protocol):
    """A LoRARequest, ours or vLLM's."""

    @property
    def lora_name(self) -> str: ...

    @property
    def lora_path(self) -> str: ...


Lora = str | Mapping[str, float] | _Named | None  # a name, scales by name, {} for no adapter, None for what the LLM applies itself


@dataclass(frozen=True)
class LoadedAdapter:
    """id: a number that no other adapter gets. scale: for requests that name no adapters; 0 leaves it out."""

    id: int
    name: str
    adapter: Adapter
    scale: float


class AdaptedBackend:
    """A backend that applies adapters to batches without any, for `bench` and `eval`. `Context` gives those of requests."""

    def __init__(self, backend: Backend, adapters: AdapterSet) -> None:
        self._backend, self._adapters = backend, adapters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        """As the backend's."""
        batch.adapters = batch.adapters or [self._adapters] * len(batch.lists.slots)
        return self._backend.forward(batch, cache)


def with_adapters(backend: HeadBackend, checkpoint: Checkpoint, settings: EngineConfig) -> HeadBackend:
    """A checkpoint's backend, with the adapters of the settings. Raises as `LoadedAdapters` and `check_adapts` do."""
    loaded = LoadedAdapters(checkpoint.config, checkpoint.name, settings.lora, beside=checkpoint.adapters)
    if not loaded.names:
        return backend
    check_adapts(backend)
    return cast(HeadBackend, AdaptedBackend(backend, loaded.default))


def check_adapts(backend: Backend) -> None:
    """Raise BackendError for a backend that applies no adapters."""
    if not getattr(backend, "adapts", False):
        raise BackendError(
            f"the {backend.name} backend applies no adapters; use numba, numpy or torch, or merge them: cpuspec quantize --lora"
        )


class LoadedAdapters:
    """The adapters of a model. Any thread may call it at any time. A request keeps the adapters that it began with."""

    def __init__(
        self,
        config: ModelConfig,
        model: str,
        applied: Iterable[str] = (),
        named: Iterable[str] = (),
        beside: Iterable[Path] = (),
    ) -> None:
        """applied: FILE[=SCALE] of adapters for requests that name none. named: NAME=FILE of adapters that requests name.

        beside: adapters that belong to the model, for requests that name none; they are called adapter1 and so on.
        Raises ConfigError, or CheckpointError for an adapter of another model.
        """
        self._config, self._model, self._lock = config, model, Lock()
        self._loaded: dict[str, LoadedAdapter] = {}
        self._next_id = 0
        for number, path in enumerate(beside, 1):
            self.load(path, f"adapter{number}", 1.0)
        for path, scale in map(read_scaled, applied):
            self.load(path, scale=scale)
        for text in named:
            name, equals, file = text.partition("=")
            if not (name and equals and file):
                raise ConfigError(f"an adapter for requests that name it is NAME=FILE; got {text!r}")
            self.load(Path(file), name)

    def __iter__(self) -> Iterator[LoadedAdapter]:
        return iter(list(self._loaded.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._loaded

    @property
    def names(self) -> list[str]:
        """The names of the adapters, in the order of loading."""
        return list(self._loaded)

    @property
    def default(self) -> AdapterSet:
        """The adapters of a request that names none, each with its scale."""
        return tuple((one.adapter, one.scale) for one in self if one.scale)

    def load(self, path: Path, name: str = "", scale: float = 0.0, replaces: bool = False) -> LoadedAdapter:
        """Read an adapter. name: by default that of its file. scale: for requests that name no adapters.

        replaces: whether it replaces an adapter of the same name, which otherwise raises ConfigError.
        """
        name = name or (path.stem if path.is_file() else path.resolve().name)
        self._check_new(name, replaces)
        adapter = open_adapter(path.expanduser(), self._config, self._model)
        assert adapter.identity, "hashed here, and not in a step of the engine"
        with self._lock:
            self._check_new(name, replaces)
            loaded = LoadedAdapter(self._next_id, name, adapter, checked_scale(scale))
            self._next_id += 1
            self._loaded = {**self._loaded, name: loaded}
        return loaded

    def _check_new(self, name: str, replaces: bool) -> None:
        if name in self._loaded and not replaces:
            raise ConfigError(f"an adapter is called {name!r} already; give this one another name, or unload that one")
        if name not in self._loaded and len(self._loaded) >= _MOST:
            raise ConfigError(f"{_MOST} adapters are loaded, and no more are taken; unload one")

    def unload(self, name: str) -> None:
        """Forget an adapter. Requests that use it go on. Raises ConfigError for an unknown one."""
        with self._lock:
            self._named(name)
            self._loaded = {key: one for key, one in self._loaded.items() if key != name}

    def rescale(self, scales: Mapping[int, float]) -> None:
        """Set the scales, by id, for requests that name no adapters. An adapter that is left out gets 0. Raises ConfigError."""
        with self._lock:
            self._check_ids(scales)
            self._loaded = {name: replace(one, scale=checked_scale(scales.get(one.id, 0.0))) for name, one in self._loaded.items()}

    def of_ids(self, scales: Mapping[int, float]) -> AdapterSet:
        """The adapters with these scales, by id. Raises ConfigError."""
        self._check_ids(scales)
        return tuple((one.adapter, checked_scale(scales[one.id])) for one in self if scales.get(one.id))

    def chosen(self, wanted: Lora) -> AdapterSet | None:
        """The adapters that a request names; None if it names none. The adapter of a LoRARequest is loaded if need be.

        Raises ConfigError, and CheckpointError as `load` does.
        """
        if wanted is None:
            return None
        if isinstance(wanted, str):
            return ((self._named(wanted).adapter, 1.0),)
        if isinstance(wanted, Mapping):
            for name in wanted:
                self._named(name)
            return tuple((one.adapter, checked_scale(wanted[one.name])) for one in self if wanted.get(one.name))
        named, path = getattr(wanted, "lora_name", None), getattr(wanted, "lora_path", "")
        if not isinstance(named, str) or not named:
            raise ConfigError(f"an adapter is a name, scales by name, or a LoRARequest; got {repr(wanted)[:80]}")
        if named not in self._loaded and path:
            self.load(Path(path), named)
        return ((self._named(named).adapter, 1.0),)

    def _named(self, name: str) -> LoadedAdapter:
        if name not in self._loaded:
            there = f"there is {', '.join(map(repr, self._loaded))}" if self._loaded else "none is loaded"
            raise ConfigError(f"no adapter is called {str(name)[:200]!r}; {there}")
        return self._loaded[name]

    def _check_ids(self, scales: Mapping[int, float]) -> None:
        if unknown := sorted(scales.keys() - {one.id for one in self}):
            raise ConfigError(f"no adapter has the id {unknown[0]}; GET /lora-adapters lists them")
