"""The command `serve`: it reads the keys, opens the models, and runs a server until a signal ends it."""

import asyncio
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cpuspec.backends import BACKENDS
from cpuspec.checkpoints.recipes import DEFAULT_RECIPE
from cpuspec.cli import options
from cpuspec.cli.console import exit_codes, note
from cpuspec.cli.models import size_of
from cpuspec.cli.opening import open_with_drafts
from cpuspec.cli.options import argument, option
from cpuspec.environment import api_key, cache_dir, default_prefix_cache_bytes
from cpuspec.errors import needing
from cpuspec.files import why_unwritable
from cpuspec.settings import ANY_NAME, ServerConfig

if TYPE_CHECKING:
    from cpuspec.engine.llm import LLM


@exit_codes()
@options.takes_serving()
@options.takes_running(*options.ANSWERING)
def serve(
    models: Annotated[
        list[str] | None,
        argument(
            "MODEL",
            f"{options.MODEL_HELP} By default {DEFAULT_RECIPE}. Of several, the first is loaded at the start, others when "
            "they are first asked for.",
            autocompletion=options.complete_model,
        ),
    ] = None,
    *,
    draft: options.DraftOption = None,
    api_key_file: Annotated[
        Path | None,
        option("FILE", "Take only requests with one of this file's keys, one a line; CPUSPEC_API_KEY may hold a key, too."),
    ] = None,
    running: options.Running,
    serving: ServerConfig,
) -> None:
    """Serve models over HTTP to clients of OpenAI's and Anthropic's APIs. It listens to this machine only, unless --host says more.

    Each request has a line of JSON on stderr, without its texts. SIGTERM or Ctrl-C ends it when running answers are done.
    """
    from cpuspec.engine.llm import LLM

    models = models or [DEFAULT_RECIPE]
    keys = read_keys(api_key_file)
    check_directory("--slot-save-path", serving.slot_save_path)
    check_directory("--lora-dir", serving.lora_dir)
    directory = prefix_directory(running.settings.prefix_cache_dir)
    settings = replace(running.settings, prefix_cache_dir=directory, plain_on_draft_error=True)
    if len(models) > 1:
        if set(serving.aliases) - {ANY_NAME}:
            raise typer.BadParameter("--alias goes with one model; with several, requests use their names")
        if BACKENDS[0] == running.backend:  # the others keep no prefixes by default
            gb = default_prefix_cache_bytes() / 1e9 if settings.prefix_cache_gb is None else settings.prefix_cache_gb
            settings = replace(settings, prefix_cache_gb=gb / len(models))
    loaders = {}
    for model in models:
        checkpoint, spec = open_with_drafts(model, draft, settings.mmap, adapts=True)
        name = checkpoint.name if Path(model).exists() else model
        if name in loaders:
            raise typer.BadParameter(f"there are two models {name!r}")
        loaders[name] = partial(LLM, checkpoint, spec, running.backend, settings=settings), size_of(checkpoint.path)
    run_server(loaders, serving, keys)


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
    """The directory for prefixes that do not fit in memory: the given one, by default one in the cache directory.

    If the default cannot be written, the result is None, with a note. A directory of the user must be usable.
    """
    if given is not None:
        return given
    own = cache_dir() / "prefixes"
    if why := why_unwritable(own, 0o700):
        note(f"warning: {own} cannot be written ({why}), so prefixes stay in memory; name a --prefix-cache-dir, or none")
    return None if why else str(own)


def check_directory(option: str, path: str | None) -> None:
    """Raise BadParameter for an option's path that is no directory."""
    if path is not None and not Path(path).is_dir():
        raise typer.BadParameter(f"{option} {path} is not a directory; make it first")


def run_server(models: "Mapping[str, tuple[Callable[[], LLM], int]]", config: ServerConfig, keys: Sequence[str]) -> None:
    """Serve until SIGTERM or Ctrl-C. models: by name, how each is loaded and the bytes of its file.

    Raises BackendError where the libraries for it are missing, and what loading the first model raises.
    """
    with needing("`cpuspec serve`", "'cpuspec[server]'"):
        from cpuspec.server.app import listen, serve
        from cpuspec.server.server import Loader, Server, socket_path
    loaders = {name: Loader(*how) for name, how in models.items()}
    name = next(iter(loaders))
    server, listener = Server(name, config, keys, loaders), listen(config)
    if path := socket_path(config):
        note(f"listening on the socket {path}, loading {name}")
        asyncio.run(serve(server, loaders[name].load, listener, lambda: note(f"ready: {path}")))
        return
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    note(f"listening on {address}, loading {name}")
    if not (keys or ipaddress.ip_address(host).is_loopback):
        note("warning: everybody who reaches this address can use the model; give a key with --api-key-file")
    said = f"ready: chat at {address}, OpenAI's protocol at {address}/v1"
    asyncio.run(serve(server, loaders[name].load, listener, lambda: note(said)))
