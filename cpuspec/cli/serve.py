"""The command `serve`: keys from where a user keeps them, and a server that runs until it is told to end."""

import asyncio
import ipaddress
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cpuspec.cli.console import note
from cpuspec.config import ServerConfig
from cpuspec.environment import api_key, cache_dir
from cpuspec.errors import BackendError

if TYPE_CHECKING:
    from cpuspec.engine.llm import LLM


def read_keys(file: Path | None) -> list[str]:
    """The keys of CPUSPEC_API_KEY and of a file with one a line. Raises BadParameter for a file without any."""
    keys = [api_key()] if api_key() else []
    if file is None:
        return keys
    try:
        found = [line.strip() for line in file.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--api-key-file {file} cannot be read: {error}") from None
    if not any(found):
        raise typer.BadParameter(f"--api-key-file {file} has no key; write one in each line")
    return [*keys, *filter(None, found)]


def prefix_directory(given: str | None) -> str | None:
    """Where prefixes go that do not fit in memory: the directory that was given, for `none` nowhere, by default one of our own.

    Our own is left out, with a note, where it cannot be written; that of a user must be usable.
    """
    if given is not None:
        return None if given == "none" else given
    own = cache_dir() / "prefixes"
    try:
        own.mkdir(0o700, parents=True, exist_ok=True)
        usable = os.access(own, os.W_OK)
    except OSError:
        usable = False
    if not usable:
        note(f"warning: {own} cannot be written, so prefixes stay in memory; name a --prefix-cache-dir, or none")
    return str(own) if usable else None


def check_directory(path: str | None) -> None:
    """Raise BadParameter for a --slot-save-path that is no directory."""
    if path is not None and not Path(path).is_dir():
        raise typer.BadParameter(f"--slot-save-path {path} is no directory; make it first")


def run_server(models: "Mapping[str, tuple[Callable[[], LLM], int]]", config: ServerConfig, keys: Sequence[str]) -> None:
    """Serve until SIGTERM or Ctrl-C. models: by name, how each is loaded and the bytes of its file.

    Raises BackendError where the libraries for it are missing, and what loading the first model raises.
    """
    try:
        from cpuspec.server.app import listen, serve
        from cpuspec.server.server import Loader, Server
    except ModuleNotFoundError as error:
        raise BackendError(f"`cpuspec serve` needs {error.name}; install it with: pip install 'cpuspec[server]'") from None
    loaders = {name: Loader(*how) for name, how in models.items()}
    name = next(iter(loaders))
    server, listener = Server(name, config, keys, loaders), listen(config.host, config.port)
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    note(f"listening on {address}, loading {name}")
    if not (keys or ipaddress.ip_address(host).is_loopback):
        note("warning: whoever reaches this address can use the model; give a key with --api-key-file")
    said = f"ready: chat at {address}, OpenAI's protocol at {address}/v1"
    asyncio.run(serve(server, loaders[name].load, listener, lambda: note(said)))
