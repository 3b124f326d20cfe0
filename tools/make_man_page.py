"""Writes the manual page cpuspec(1) from the command line's own help.

python -m tools.make_man_page > cpuspec.1
"""

from collections.abc import Iterator
from typing import Any

from cpuspec import __version__
from cpuspec.cli.app import COMMANDS, app, whole_command


def page() -> str:
    """The page, as roff with man's macros."""
    lines = [
        f'.TH CPUSPEC 1 "" "cpuspec {__version__}" "User Commands"',
        *(".SH NAME", rf"cpuspec \- {_roff(app.info.help)}"),
        *(".SH SYNOPSIS", ".B cpuspec", r"\fICOMMAND\fR [\fIOPTIONS\fR] [\fIARGUMENTS\fR]"),
        *(".SH COMMANDS",),
    ]
    for name in COMMANDS:
        lines += _command(f"cpuspec {name}", whole_command(name))
    return "\n".join([*lines, ".SH ENVIRONMENT", *_variables(), ""])


def _command(name: str, command: Any) -> Iterator[str]:
    """A command's help and options; those of each command of a group."""
    if commands := getattr(command, "commands", None):
        for part, one in commands.items():
            yield from _command(f"{name} {part}", one)
        return
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    yield from (f".SS {_roff(' '.join([name, *(one.metavar or one.name.upper() for one in arguments)]))}", _roff(command.help))
    for one in command.params:
        if one.param_type_name == "option" and not one.hidden:
            metavar = "" if one.is_flag else one.metavar or (one.name or "").upper()
            spellings = ", ".join(rf"\fB{_roff(text)}\fR" for text in (*one.opts, *one.secondary_opts))
            yield from (".TP", rf"{spellings} \fI{_roff(metavar)}\fR".removesuffix(r" \fI\fR"), _roff(one.help))


def _variables() -> Iterator[str]:
    """The variables that `cpuspec.environment` explains."""
    import cpuspec.environment as module

    for line in (module.__doc__ or "").splitlines():
        name, _, meaning = line.partition("  ")
        if name.startswith("CPUSPEC_") and meaning:
            yield from (".TP", rf"\fB{name}\fR", _roff(meaning.strip()))


def _roff(text: str | None) -> str:
    """A paragraph of text: nothing in it is a request or an escape."""
    words = " ".join((text or "").split()).replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{words}" if words.startswith((".", "'")) else words


if __name__ == "__main__":
    print(page(), end="")
