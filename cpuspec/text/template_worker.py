"""A script that renders chat templates within limits of time and memory, so that a hostile one costs its own process only.

Says "ready", then reads one JSON object a line from stdin and answers with one a line on stdout. A request has `source`,
`variables` and `seconds` of processor time; an answer has `text`, or `error` and its `kind`. The arguments are the libraries'
directories. The parent limits the memory. The script imports nothing of the package, so that it starts quickly.
"""

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

_MOST_ERROR_CHARS = 2000
_ROOM_AT_LEAST = 1 << 24  # characters of a rendered text
_GROWTH = 64  # and this many for each character of a request


def main() -> None:
    sys.path += sys.argv[1:]
    # Python's and jinja's late imports come before the limits: files cannot be opened after them.
    import html  # noqa: F401
    import pprint  # noqa: F401
    import textwrap  # noqa: F401

    import jinja2.constants
    import jinja2.debug  # noqa: F401

    render = _make_render()
    render("{{ strftime_now('%c %Z') }}", {})
    set_timer = _make_timer()
    _limit()
    _say(b"ready")
    for line in sys.stdin.buffer:
        request = json.loads(line)
        set_timer(request["seconds"])
        answer = _answer(render, request, _ROOM_AT_LEAST + _GROWTH * len(line))
        set_timer(0)
        _say(answer)


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _make_timer() -> Callable[[float], object]:
    """A function that ends this process after a number of further seconds of processor time; 0 for never."""
    if hasattr(signal, "setitimer"):
        return lambda seconds: signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
    end = [math.inf]  # Windows: a thread looks, between the instructions of Python

    def watch() -> None:
        while time.process_time() < end[0]:
            time.sleep(0.05)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

    def set_timer(seconds: float) -> None:
        end[0] = time.process_time() + seconds if seconds else math.inf

    return set_timer


def _limit() -> None:
    """Take from this process what a template never needs: files, processes, and the environment's variables."""
    for name in set(os.environ) - {"TZ"}:
        del os.environ[name]
    with suppress(ImportError):  # Windows
        import resource

        for kind, most in (("NOFILE", 3), ("NPROC", 0), ("FSIZE", 0), ("CORE", 0)):
            with suppress(ValueError, OSError):
                resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))


def _answer(render: Callable[[str, dict[str, Any]], str], request: dict[str, Any], most_chars: int) -> bytes:
    """The answer to a request, as JSON. Never raises."""
    import jinja2

    try:
        text = render(request["source"], request["variables"])
        if len(text) > most_chars:
            raise MemoryError(f"it builds more than {most_chars} characters")
        return json.dumps({"text": text}).encode()
    except (jinja2.TemplateSyntaxError, jinja2.TemplateAssertionError) as error:
        kind, problem = "does not compile", f"line {error.lineno}: {error.message}"
    except jinja2.TemplateError as error:
        kind, problem = "refuses these messages", str(error)
    except Exception as error:
        kind, problem = "fails on these messages", str(error) or type(error).__name__
    return json.dumps({"kind": kind, "error": problem[:_MOST_ERROR_CHARS]}).encode()


def _make_render() -> Callable[[str, dict[str, Any]], str]:
    """A function that renders a source with variables in the environment that transformers gives chat templates."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's answers for training. Here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def raise_exception(message: Any) -> None:
        raise jinja2.TemplateError(str(message))

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    compiled = lru_cache(8)(environment.from_string)
    return lambda source, variables: compiled(source).render(variables)


if __name__ == "__main__":
    main()
