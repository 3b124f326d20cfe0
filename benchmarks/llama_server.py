"""llama.cpp's server on a port of this machine, with one slot, asked with token ids."""

import json
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from llama_cpp_build import Build
from peers_errors import PeerError

_COUNTER = re.compile(r'llamacpp:spec_decode_num_(\w+)_total(?:\{position="(\d+)"\})? (\d+)')


@dataclass(frozen=True)
class Drafts:
    """How many drafts a server verified, of how many tokens, and how many of these it accepted at each position."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()

    def since(self, before: "Drafts") -> "Drafts":
        """What came after `before`, an earlier reading."""
        known = before.num_accepted_tokens_per_pos
        old = (*known, *[0] * (len(self.num_accepted_tokens_per_pos) - len(known)))
        per_pos = (new - one for new, one in zip(self.num_accepted_tokens_per_pos, old, strict=True))
        return Drafts(self.num_drafts - before.num_drafts, self.num_draft_tokens - before.num_draft_tokens, tuple(per_pos))

    def __add__(self, other: "Drafts") -> "Drafts":
        """Both together."""
        mine, theirs = self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos
        length = max(len(mine), len(theirs))
        per_pos = tuple(sum(one[i] for one in (mine, theirs) if i < len(one)) for i in range(length))
        return Drafts(self.num_drafts + other.num_drafts, self.num_draft_tokens + other.num_draft_tokens, per_pos)


class LlamaServer:
    """A server. What its drafts learn stays from answer to answer, as it does with cpuspec's suffix.

    options: further ones of its command line. Raises PeerError where it does not start.
    """

    def __init__(self, build: Build, model: Path, threads: int, context: int, timeout: float, options: Sequence[str] = ()) -> None:
        program = build.find("llama-server")
        if program is None:
            raise PeerError(f"there is no llama-server in {build.programs}; give the directory of llama.cpp's programs")
        self._timeout = timeout
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = int(free.getsockname()[1])
        slot = ("-t", str(threads), "-c", str(context), "-np", "1", "--cache-ram", "0")
        listen = ("--host", "127.0.0.1", "--port", str(self._port))
        command = [str(program), "-m", str(model), *slot, *listen, *options, "--metrics"]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        try:
            self._process = subprocess.Popen(
                command, env=build.environment(), stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
            )
        except OSError as error:
            self._log.close()
            raise PeerError(f"{program.name} does not start: {error}") from error

    def load(self) -> str:
        """Wait until the model is loaded; returns which build it is."""
        end_s = time.monotonic() + self._timeout
        while self._process.poll() is None and time.monotonic() < end_s:
            try:
                if self._ask("GET", "/health")[0] == HTTPStatus.OK:
                    return f"llama.cpp {json.loads(self._ask('GET', '/props')[1])['build_info']}, llama-server"
            except (OSError, HTTPException):
                pass  # it does not listen yet
            time.sleep(0.1)
        raise self._failed("did not load the model")

    def complete(self, ids: Sequence[int], max_tokens: int, **more: Any) -> bytes:
        """Its reply to a request for the greedy continuation; nothing of an earlier prompt is reused. more: of the request."""
        greedy = {"temperature": 0, "top_k": 1, "samplers": ["top_k"]}
        request = {"prompt": list(ids), "n_predict": max_tokens, "cache_prompt": False, "return_tokens": True, **greedy, **more}
        return self._read("POST", "/completion", json.dumps(request))

    def drafts(self) -> Drafts:
        """What its drafts came to so far, of all answers."""
        counts: dict[str, int] = {}
        per_pos: dict[int, int] = {}
        for name, position, value in _COUNTER.findall(self._read("GET", "/metrics").decode(errors="replace")):
            if position:
                per_pos[int(position)] = int(value)
            else:
                counts[name] = int(value)
        accepted = tuple(per_pos.get(i, 0) for i in range(max(per_pos, default=-1) + 1))
        return Drafts(counts.get("drafts", 0), counts.get("draft_tokens", 0), accepted)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _read(self, method: str, path: str, body: str | None = None) -> bytes:
        try:
            return self._ask(method, path, body)[1]
        except (OSError, HTTPException) as error:
            raise self._failed(f"did not answer ({type(error).__name__}: {error})") from error

    def _ask(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=self._timeout)) as connection:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read()

    def _failed(self, what: str) -> PeerError:
        """What happened with the server's last words; it is ended, lest it compute on beside the others."""
        self._process.kill()
        code = self._process.wait()
        self._log.seek(0)
        return PeerError(f"llama-server {what}; it ended with {code}: {self._log.read().decode(errors='replace')[-500:].strip()}")
