"""The state that all endpoints share: the models, which of them are loaded, whether the server is ready, and the API keys."""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from starlette.requests import Request

from cpuspec.engine.llm import LLM
from cpuspec.engine.lora import LoadedAdapters
from cpuspec.environment import default_models_bytes
from cpuspec.errors import CpuspecError
from cpuspec.metrics import epoch_s
from cpuspec.server.admission import Workers
from cpuspec.server.errors import EngineFailedError, NotFoundError, UnavailableError
from cpuspec.server.model import ServedModel, served
from cpuspec.server.observe import log_event
from cpuspec.server.response_store import ResponseStore
from cpuspec.server.runner import in_own_thread
from cpuspec.settings import ANY_NAME, ServerConfig

_SWEEP_S = 1.0  # how often idle models are looked for


def socket_path(config: ServerConfig) -> str:
    """The path of the Unix socket to listen on, "" for none."""
    return config.uds or (config.host if config.host.endswith(".sock") else "")


class Loader(NamedTuple):
    """How a model is loaded. num_bytes: the size of its file, which estimates the memory that it will take."""

    load: Callable[[], LLM]
    num_bytes: int


class Server:
    """The shared state. state: "loading", "ready" or "draining".

    The first model is loaded at the start, others when a request first names them. If memory is short, unused models are closed,
    the least recently used first.
    """

    def __init__(
        self, name: str, config: ServerConfig, keys: Sequence[str] = (), loaders: Mapping[str, Loader] | None = None
    ) -> None:
        """name: the first model's. loaders: of every model, where there are several."""
        self.name = name
        self.config = config
        self.state = "loading"
        self.created = epoch_s()
        self.models: dict[str, ServedModel] = {}  # the loaded ones, least recently used first
        self.stop: Callable[[], object] = lambda: None  # ends the server as a signal does; any thread may call it
        self._takes_any_name = ANY_NAME in config.aliases
        self._aliases = tuple(name for name in config.aliases if name != ANY_NAME)
        self.responses = ResponseStore()
        self.readers = Workers(2, "cpuspec-reader")  # of long bodies
        self.ignored_fields: set[str] = set()  # names of ignored request fields that are in the log already
        self._loaders = dict(loaders or {})
        self._adapters: dict[str, LoadedAdapters] = {}  # of models that were loaded, also while they are not
        self._loading = asyncio.Lock()
        self._keys = [key.encode() for key in keys]

    @property
    def has_keys(self) -> bool:
        """Whether each client has an API key of its own."""
        return len(self._keys) > 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use; of a single model, the first is the one that answers carry."""
        return self._aliases or tuple(self._loaders) or (self.name,)

    def shown_name(self, name: str) -> str:
        """The name that answers of a model carry. name: its own."""
        return self._aliases[0] if self._aliases else name

    def own_name(self, name: str | None) -> str:
        """The own name of the model that a request names.

        A request without a name, or with an unknown one where any name is taken, gets the loaded model that was used last, else the
        first model. Raises NotFoundError.
        """
        if name and name not in self.names and not self._takes_any_name:
            known = ", ".join(map(repr, self.names))
            raise NotFoundError(f"the model {name[:200]!r} does not exist here; there is {known}")
        if self._aliases:
            return self.name
        return name if name in self.names else self.loaded.name if self.loaded else self.name

    def split_name(self, name: str | None) -> tuple[str | None, str]:
        """The model's name and the adapter's ("" for none) in a request's: MODEL, MODEL:ADAPTER or ADAPTER, once it was read."""
        if not name or name in self.names:
            return name, ""
        own = next((self.shown_name(model) for model, adapters in self._adapters.items() if name in adapters), None)
        if own is not None:
            return own, name
        base, colon, adapter = name.rpartition(":")
        return (base, adapter) if colon and adapter and base in self.names else (name, "")

    @property
    def loaded(self) -> ServedModel | None:
        """The loaded model that was used last."""
        return next(reversed(self.models.values()), None)

    def num_bytes(self, name: str) -> int:
        """Bytes of the file of a model, by its own name; 0 where there is none."""
        return self._loaders[name].num_bytes if name in self._loaders else 0

    def start(self, model: ServedModel) -> None:
        """Take the first model, which is loaded now. From now on requests are answered."""
        self._add(model)
        if self.state == "loading":
            self.state = "ready"

    async def model(self, name: str | None) -> ServedModel:
        """The model that `own_name` finds, loaded if need be. Raises UnavailableError, NotFoundError, EngineFailedError."""
        self.check_ready()
        found = self.own_name(name)
        if found not in self.models:
            async with self._loading:  # one after the other: their memory adds up
                if found not in self.models:
                    await self._load(found)
        self.models[found] = self.models.pop(found)
        return self.models[found]

    def check_ready(self) -> None:
        """Raise UnavailableError while the first model loads, and once the server drains or its engine has died."""
        if self.state == "draining":
            raise UnavailableError("the server is about to end; try again later")
        if self.state == "loading":
            raise UnavailableError("the model is being loaded; try again later")
        if self.has_failed:
            raise UnavailableError("the engine has died, and the server is about to end; its log says why")

    async def _load(self, name: str) -> None:
        loader = self._loaders[name]
        if not await self._free_memory(loader.num_bytes):
            raise UnavailableError(f"there is no memory for {name} while requests use other models; try again later")
        log_event("loading", {"model": name})
        try:
            llm = await in_own_thread(loader.load)
        except CpuspecError as error:
            raise EngineFailedError(f"{name} cannot be loaded: {error}") from error
        llm.adapters = self._adapters.get(name, llm.adapters)
        self._add(await served(name, llm, self.config))
        log_event("ready", {"model": name})
        await self._free_memory(0, name)

    def _add(self, model: ServedModel) -> None:
        self.models[model.name], self._adapters[model.name] = model, model.llm.adapters
        model.on_death = self.stop
        model.has_keys = self.has_keys

    @property
    def has_failed(self) -> bool:
        """Whether the engine of a model answers no more: then the server is about to end."""
        return any(not model.runner.is_alive for model in self.models.values())

    async def _free_memory(self, num_bytes: int, keep: str = "") -> bool:
        """Close idle models until `num_bytes` fit. Returns whether they fit or no model is loaded. keep: a model that stays."""
        gb = self.config.models_gb
        limit = default_models_bytes() if gb is None else int(gb * 1e9)
        while sum([await model.num_bytes() for model in list(self.models.values())]) + num_bytes > limit:
            idle = next((model for model in self.models.values() if not model.num_users and model.name != keep), None)
            if idle is None:
                return not self.models
            await self._close(idle)
        return True

    async def _close(self, model: ServedModel) -> None:
        del self.models[model.name]
        log_event("unloading", {"model": model.name})
        await asyncio.to_thread(model.close)

    async def unload(self, name: str) -> None:
        """Unload a model, by its own name, unless requests use it or it could not be loaded again."""
        async with self._loading:
            found = self.models.get(name)
            if found is not None and not found.num_users and name in self._loaders:
                await self._close(found)

    async def unload_idle(self) -> None:
        """Unload models that no request has used for as long as they stay. Ends when it is cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            for model in [one for one in self.models.values() if one.is_idle]:
                await self.unload(model.name)

    def owner(self, client: str) -> str:
        """The owner of the responses that are stored for a client: the client where keys tell clients apart, else "" for all."""
        return client if self.has_keys else ""

    def client(self, key: str | None, address: str) -> str | None:
        """The client of a request: its key if the server has several keys, else its address. None for a wrong key."""
        if not self._keys:
            return address
        given = (key or "").encode()
        # Every key is compared, so that the time of the comparison reveals nothing.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if not any(matches):
            return None
        return hashlib.sha256(given).hexdigest()[:16] if self.has_keys else address

    @property
    def num_unfinished(self) -> int:
        """Answers, and requests for embeddings or scores, that run or wait."""
        return sum(part.num_running + part.num_waiting for one in self.models.values() for part in (one.admission, one.jobs))


def server_of(request: Request) -> Server:
    """The server that the request's application belongs to."""
    found: Server = request.app.state.server
    return found
