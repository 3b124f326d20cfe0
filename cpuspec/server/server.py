"""The state that all endpoints share: which model there is, whether it may be used, and who may ask."""

import hashlib
import hmac
from collections.abc import Callable, Sequence

from starlette.requests import Request

from cpuspec.config import ServerConfig
from cpuspec.server.errors import UnavailableError, UnknownModelError
from cpuspec.server.model import ServedModel


class Server:
    """What the endpoints ask. state: "loading", "ready" or "draining"."""

    def __init__(self, name: str, config: ServerConfig, keys: Sequence[str] = ()) -> None:
        self.name = name
        self.config = config
        self.state = "loading"
        self.loaded: ServedModel | None = None
        self.stop: Callable[[], object] = lambda: None  # ends the server as a signal does; any thread may call it
        self._keys = [key.encode() for key in keys]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may call the model by; the first is the one that answers carry."""
        return self.config.aliases or (self.name,)

    def start(self, model: ServedModel) -> None:
        """The model is loaded: from now on requests are answered."""
        self.loaded = model
        if self.state == "loading":
            self.state = "ready"

    def model(self, name: str | None) -> ServedModel:
        """The model of that name; without one, the only model. Raises UnavailableError, UnknownModelError."""
        if self.state == "draining":
            raise UnavailableError("the server is about to end; try again later")
        if self.loaded is None:
            raise UnavailableError("the model is being loaded; try again later")
        if name and name not in self.names:
            raise UnknownModelError(
                f"the model {name[:200]!r} does not exist here; there is {self.names[0]!r}", "model", "model_not_found"
            )
        return self.loaded

    def client(self, key: str | None, address: str) -> str | None:
        """Whom a request counts for, None if its key is wrong: its key where there are several, else its address."""
        if not self._keys:
            return address
        given = (key or "").encode()
        # Every key is compared, so that the time tells nothing.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if not any(matches):
            return None
        return hashlib.sha256(given).hexdigest()[:16] if len(self._keys) > 1 else address

    @property
    def num_unfinished(self) -> int:
        """Answers that run or wait."""
        return self.loaded.admission.num_running + self.loaded.admission.num_waiting if self.loaded else 0


def server_of(request: Request) -> Server:
    """The server that the request's application belongs to."""
    found: Server = request.app.state.server
    return found
