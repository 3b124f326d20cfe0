"""The manual page has every command with every option, and nothing that roff would take for a request."""

import shutil
import subprocess

import pytest

from cpuspec.cli.app import COMMANDS, whole_command
from tools.make_man_page import page


@pytest.fixture(scope="module")
def text() -> str:
    return page()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_in_the_manual(name: str, text: str) -> None:
    command = whole_command(name)
    for part, one in getattr(command, "commands", {"": command}).items():
        title = " ".join(filter(None, ("cpuspec", name, part))).replace("-", r"\-")
        end = " " if any(parameter.param_type_name == "argument" for parameter in one.params) else "\n"
        section = text[text.index(f"\n.SS {title}{end}") + 1 :].split("\n.S", maxsplit=1)[0]
        for option in one.params:
            if option.param_type_name == "option" and not option.hidden:
                for spelling in option.opts:
                    assert rf"\fB{spelling}\fR".replace("-", r"\-") in section


@pytest.mark.skipif(not shutil.which("groff"), reason="groff reads manual pages")
def test_groff_has_nothing_to_warn_of(text: str) -> None:
    command = ["groff", "-man", "-Tutf8", "-ww", "-K", "utf8"]
    assert subprocess.run(command, input=text, capture_output=True, text=True, check=True).stderr == ""
