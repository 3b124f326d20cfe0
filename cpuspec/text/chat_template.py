"""Renders chat templates. A template is a program in the Jinja language that came with a model file, so it is not trusted.

This module knows messages and text. The tokenizer decides which parts of that text are control tokens. Jinja itself renders, in its
sandbox, in a process that has no files, little memory and a limit of time (`template_worker.py`). One such process serves all
templates, and a new one is started after a template has exceeded a limit.
"""

import json
import os
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from cpuspec.errors import TokenizerError, in_one_line
from cpuspec.platform import SYSTEM

__all__ = ["ROLES", "ChatTemplate"]

_SWITCHES = ("enable_thinking", "thinking")

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

_MAX_TEMPLATE_CHARS = 1 << 17
_MAX_DEPTH = 64  # of messages and tools; deeper ones exhaust the stack of the process that reads them
_WORKER_BYTES = 1 << 30
# Processor time of a rendering. Real templates take milliseconds. A machine under load gets ten times as long by the clock.
_SECONDS_AT_LEAST = 5.0
_CHARS_PER_SECOND = 100_000
_CLOCK_OVER_PROCESSOR = 10


class ChatTemplate:
    """A template, which may use the additions of transformers: tojson, raise_exception, strftime_now, break, continue, generation.

    It never changes, so threads may share it. Raises TokenizerError for a source that is too long.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """variables: texts that the template may name, as bos_token and eos_token."""
        if len(source) > _MAX_TEMPLATE_CHARS:
            raise TokenizerError(f"the chat template has {len(source)} characters; at most {_MAX_TEMPLATE_CHARS} are read")
        self.source = source
        self._variables = dict(variables)

    @property
    def can_switch_thinking(self) -> bool:
        """Whether the template reads a variable that switches reasoning on or off."""
        return any(re.search(rf"\b{name}\b", self.source) for name in _SWITCHES)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any] | None = None
    ) -> str:
        """The conversation as text. Raises TokenizerError if the template is invalid, refuses it, fails, or exceeds a limit.

        messages: texts, numbers, booleans and None in dicts and lists, as JSON has them. variables: more of these by name, as
        `tools`; they replace none of the template's own. `enable_thinking`, the switch of Qwen's and Nemotron's templates, is
        `thinking` in Granite's and DeepSeek's: each of the names sets both.
        """
        _check_depth([messages, variables], _MAX_DEPTH)
        given = dict(variables or {})
        for name, other in (_SWITCHES, _SWITCHES[::-1]):
            if name in given:
                given.setdefault(other, given[name])
        known = {**given, **self._variables, "messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            text = json.dumps({"source": self.source, "variables": known})
        except (TypeError, ValueError) as error:
            raise TokenizerError(f"the messages hold what JSON cannot say: {in_one_line(str(error), 300)}") from None
        seconds = _SECONDS_AT_LEAST + len(text) / _CHARS_PER_SECOND
        answer = _worker(os.getpid()).ask(f'{{"seconds": {seconds}, {text[1:]}\n'.encode(), seconds * _CLOCK_OVER_PROCESSOR)
        if answer is None:
            raise TokenizerError(f"the chat template takes over {seconds:.0f} seconds or too much memory; use --raw instead")
        if "error" in answer:
            # The template chooses the words of its errors, so they are made safe to show.
            raise TokenizerError(f"the chat template {answer['kind']}: {in_one_line(answer['error'], 300)}; --raw does without it")
        return str(answer["text"])


class _Worker:
    """The process that renders. Threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, line: bytes, seconds: float) -> dict[str, Any] | None:
        """The answer to a request, or None if the process ended or took longer than `seconds`."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = _start()
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            watchdog = threading.Timer(seconds, process.kill)
            watchdog.daemon = True
            answered = False
            try:
                watchdog.start()
                process.stdin.write(line)
                process.stdin.flush()
                answer = json.loads(process.stdout.readline())
                answered = True
            except (OSError, ValueError):  # its pipe is closed, or its last line is cut
                return None
            finally:
                watchdog.cancel()
                if not answered:  # an interrupt, too, leaves a request half done
                    self._process = None
                    process.kill()
                    process.communicate()
            assert isinstance(answer, dict)
            return answer


@lru_cache(1)
def _worker(process_id: int) -> _Worker:
    """The worker of this process; a forked child must not write into its parent's pipes."""
    return _Worker()


def _start() -> subprocess.Popen[bytes]:
    import jinja2
    import markupsafe

    directories = {str(Path(str(module.__file__)).parents[1]) for module in (jinja2, markupsafe)}
    script = ["-I", "-S", str(Path(__file__).with_name("template_worker.py")), *directories]
    try:
        worker = SYSTEM.start_helper(script, None, _WORKER_BYTES, subprocess.PIPE, subprocess.DEVNULL)  # ends when stdin is closed
        assert worker.stdout is not None
        worker.stdout.readline()  # it is ready, so the time of a request is not that of the start
        return worker
    except OSError as error:
        raise TokenizerError(f"the process that renders chat templates cannot be started: {error}; use --raw instead") from error


def _check_depth(value: Any, depth: int) -> None:
    if depth == 0:
        raise TokenizerError(f"the messages are nested deeper than {_MAX_DEPTH}")
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_depth(item, depth - 1)
