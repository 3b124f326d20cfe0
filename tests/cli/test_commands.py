"""The command line as a whole: what it says of itself, what it refuses, and how it ends."""

import ctypes
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import typer

import cpuspec
from cpuspec import LLM, SamplingParams, environment
from cpuspec.backends import BACKENDS
from cpuspec.checkpoints.recipes import DEFAULT_RECIPE
from cpuspec.cli.answer import stream_answer
from cpuspec.cli.app import COMMANDS, whole_command
from cpuspec.cli.brief import EXAMPLES
from cpuspec.cli.console import deliver_again, emit_generated, note, print_table
from cpuspec.engine.draft_spec import LOOKUPS, MODELS
from cpuspec.engine.engine import Output
from cpuspec.formats.kv import KV_FORMATS
from tests.command import ENDLESS, ok, refused, run
from tests.processes import HANG_S, interrupt, interruptible_children, started, wait_for
from tools.make_tiny_model import make_tiny_hf

pytestmark = pytest.mark.usefixtures("cache")


def commands() -> dict[str, Any]:
    """Every command by its name; those of a group by both names, as in "eval kl"."""
    found = {name: whole_command(name) for name in COMMANDS}
    for group, one in list(found.items()):
        found |= {f"{group} {name}": command for name, command in getattr(one, "commands", {}).items()}
    return found


@pytest.mark.parametrize("name", commands())
def test_every_command_argument_and_option_is_documented(name: str) -> None:
    command = commands()[name]
    assert command.help
    undocumented = [parameter.name for parameter in command.params if not (parameter.help or "").strip()]
    assert undocumented == []
    shown = ok(*name.split(), "--help" if hasattr(command, "commands") else "--help-all")
    for parameter in command.params:
        if parameter.param_type_name == "option":
            assert parameter.opts[0] in shown


@pytest.mark.parametrize("name", commands())
def test_help_fits_a_screen_and_names_the_way_to_the_rest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = ok(*name.split(), "--help")
    assert len(shown.splitlines()) <= 56
    if name in COMMANDS:
        examples = [line for line in shown.partition("Examples:")[2].splitlines() if line.strip()]
        assert examples
        assert all(line.startswith(f" cpuspec {name} ") or line.strip() == f"cpuspec {name}" for line in examples)
    if len(commands()[name].params) > 20:
        assert "--help-all" in shown
        assert "--prompt-arithmetic" not in shown


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in EXAMPLES.items() for line in lines])
def test_examples_of_help_are_understood(name: str, line: str) -> None:
    program, command, *words = shlex.split(line)
    assert (program, command) == ("cpuspec", name)
    whole = whole_command(name)
    if hasattr(whole, "commands"):
        whole, words = whole.commands[words[0]], words[1:]
    whole.make_context(name, words)


def test_the_spellings_that_scripts_rely_on_exist() -> None:
    wanted = (
        "--file -f --model -m --draft --temperature --top-k --top-p --min-p --repetition-penalty --presence-penalty "
        "--frequency-penalty --logit-bias --stop --stop-token-id --logprobs --max-tokens --seed --threads --backend "
        "--kv-format --context-length --system --raw --ignore-eos --json --verify-exact"
    )
    options = {spelling for parameter in commands()["generate"].params for spelling in parameter.opts}
    assert set(wanted.split()) <= options


def test_help_names_every_backend_proposer_and_kv_format() -> None:
    shown = ok("generate", "--help-all")
    assert all(name in shown for name in (*BACKENDS, *LOOKUPS, *MODELS, *KV_FORMATS))


def test_version() -> None:
    version = ok("--version")
    assert version.startswith(f"cpuspec {cpuspec.__version__} (")
    assert f"Python {platform.python_version()}, {platform.machine()}" in version
    assert environment.commit() in version


# Options of `generate` that are wrong usage, and what it says.
WRONG = (
    (("--temperature", "-1"), "temperature must be"),
    (("--temprature", "1"), "--temperature"),
    (("--top-k", "many"), "--top-k"),
    (("--top-p", "0"), "top_p must be"),
    (("--threads", "0"), "threads must be None or an integer from 1 to 1024, got 0"),
    (("--backend", "abacus"), "numba"),
    (("--kv-format", "q4_0"), "f32, f16, bf16, int8"),
    (("--dtype", "f8"), "auto, f32, bf16, f16"),
    (("--weights", "packed"), "auto, values, codes"),
    (("--activations", "int4"), "auto, int8, f32"),
    (("--draft", "telepathy"), "ngram"),
    (("--draft", "ngram:8"), "ngram@8"),
    (("--draft", "ngram@"), "cannot read 'ngram@'"),
    (("--draft", "no-such-model@4"), "no model is called"),
    (("--logit-bias", "x"), "ID=BIAS"),
    (("--logit-bias", "1=1", "--logit-bias", "1=2"), "twice"),
    (("--logit-bias", "1=nan"), "logit_bias must be"),
    (("--logprobs", "2"), "--json"),
    (("--stop", ""), "stop must be"),
    (("--raw", "--system", "x"), "--system"),
)
# Commands that are refused: the arguments, where MODEL is a model's path; stdin; the exit code; what is said.
REFUSED: tuple[tuple[tuple[str, ...], str | bytes | None, int, str], ...] = (
    *((("generate", "hello", "-m", "MODEL", *options), None, 2, wanted) for options, wanted in WRONG),
    (("generate", "-m", "MODEL", "-f", "there-is-no-such-file"), None, 2, "cannot be read"),
    (("generate", "hello", "-f", "x", "-m", "MODEL"), None, 2, "wanted one of them"),
    (("generate", "", "-m", "MODEL"), None, 2, "empty"),
    (("generate", "-m", "MODEL"), "", 2, "empty"),
    (("generate", "-m", "MODEL"), b"a\xff", 2, "not UTF-8"),
    (("generate", "-f", ".", "-m", "MODEL"), None, 2, "cannot be read"),
    (("generate", "bad \udcff", "-m", "MODEL"), None, 2, "not valid UTF-8"),
    *[(("generate", "-f", "/dev/zero", "-m", "MODEL"), None, 2, "more than")] * (os.name == "posix"),
    (("generate", DEFAULT_RECIPE), "hello", 2, "is a model"),
    (("generate", "MODEL"), "hello", 2, "is a model"),
    (("generate", "hello " * 50, "-m", "MODEL", *ENDLESS, "--context-length", "20"), None, 1, "context"),
    (("generate", "hello", "-m", "no-such-model"), None, 1, "no model is called 'no-such-model'"),
    (("generate", "hello", "-m", "no/such.gguf"), None, 1, "no file or directory"),
    (("generate", "hello"), None, 1, "CPUSPEC_OFFLINE"),
    (("chat", "-m", "smollm2-135m-instrct"), None, 1, "did you mean smollm2-135m-instruct?"),
    (("generate", "hello", "-m", "smolm2"), None, 1, "did you mean smollm2-135m-instruct or "),
    (("generate", "x", "-m", "some/one:Q4_K_M"), None, 1, "some/one:Q4_K_M is not in huggingface_hub's cache and CPUSPEC_OFFLINE"),
    (("generate", "hello", "-m", "x" * 5000), None, 1, "no model is called"),
    *(((command, "no-such-model"), None, 1, "no model is called") for command in ("inspect", "bench", "pull")),
    (("pull", "smollm2-135m-instruct"), None, 1, "CPUSPEC_OFFLINE"),
    (("certify", "MODEL", "--draft", "none"), None, 2, "--draft"),
    (("certify", "MODEL", "--draft", "ngram", "--prompts", "x"), None, 1, "FILE:FIELD:COUNT"),
    (("certify", "MODEL", "--draft", "ngram", "--samples", "3"), None, 2, "50"),
    (("bench", "MODEL", "--rows", "1,,2"), None, 2, "--rows takes whole numbers"),
    (("bench", "MODEL", "--rows", "-1"), None, 2, "--rows takes whole numbers"),
    (("bench", "MODEL", "--depth", "deep"), None, 2, "--depth takes whole numbers"),
    (("bench", "MODEL", "--depth", "9" * 5000), None, 2, "--depth takes whole numbers"),
    (("bench", "MODEL", "--sequences", "none"), None, 2, "sequences are empty"),
    (("bench", "MODEL", "-r", "0"), None, 2, "--repetitions"),
    (("bench", "MODEL", "-p", "-1"), None, 2, "--prompt-tokens"),
    (("bench", "MODEL", "-o", "xml"), None, 2, "md, csv, json"),
    (("bench", "MODEL", "-o", "csv", "--json"), None, 2, "--output csv"),
    (("bench", "MODEL", "--depth", "32300"), None, 1, "pp512 @ d32300 needs a context of 32812 tokens, the model has 32768"),
    (("bench", "MODEL", "--sequences", "300"), None, 1, "at most 256 rows, got 300 in sequences"),
)


@pytest.mark.parametrize(("arguments", "stdin", "code", "message"), REFUSED, ids=[" ".join(one[0])[:60] for one in REFUSED])
def test_what_cannot_be_done_is_said_in_an_error_before_a_model_is_loaded(
    model: str, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], stdin: str | bytes | None, code: int, message: str
) -> None:
    """Wrong usage exits with 2, all else with 1 and one line."""
    monkeypatch.setattr("cpuspec.engine.lora.with_adapters", lambda *_: pytest.fail("loaded"))
    given = [model if one == "MODEL" else one for one in arguments]
    refused(*given, code=code, message=message, stdin=stdin)
    errors = run(*given, stdin=stdin).stderr
    assert code == 2 or (errors.startswith("error: ") and errors.count("\n") == 1)


def test_a_broken_file_is_an_error_without_a_traceback(model: str, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(Path(model).read_bytes()[:5000])
    for command in (("generate", "hi", "-m", str(path)), ("inspect", str(path))):
        result = run(*command)
        assert result.exit_code == 1
        assert re.fullmatch(r"error: .*cut\.gguf.*\n", result.stderr)


def test_what_a_file_says_that_this_version_does_not_know_is_a_warning(tmp_path: Path) -> None:
    directory = make_tiny_hf(tmp_path / "hf", num_layers=1)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_sharpness": 2}))
    for command in (("generate", "hi", "-m", str(directory), "--max-tokens", "1", *ENDLESS), ("inspect", str(directory))):
        result = run(*command)
        assert result.exit_code == 0
        assert "warning: " in result.stderr
        assert "this version does not know attention_sharpness = 2; ignored" in result.stderr


def endless(model: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    return started("generate", "hello", "-m", model, *ENDLESS, "--max-tokens", "30000")


def test_ctrl_c_keeps_the_text_and_exits_with_130(model: str) -> None:
    with endless(model) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        interrupt(process)
        rest, errors = process.communicate()
    assert process.returncode == 130
    assert (first + rest).endswith(b"\n")
    assert re.search(r"interrupted after (\d+) tokens \| \d+ prompt tokens \| \d+ new tokens", errors.decode())
    assert b"Traceback" not in errors


def test_a_reader_that_leaves_ends_it_quietly(model: str) -> None:
    with endless(model) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait() == 141
    assert errors == b""


@pytest.mark.posix
@pytest.mark.parametrize(
    "arguments",
    [("models",), ("models", "--json"), ("--help",), ("--version",), ("generate", "--help"), ("--show-completion", "bash"), ()],
)
def test_output_that_cannot_be_written_is_one_line_whatever_is_printed(arguments: tuple[str, ...]) -> None:
    # Typer asks which shell it was started by, which may be one that it does not know.
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    with Path("/dev/full").open("wb") as full, started(*arguments, stdout=full, env=environment) as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert re.fullmatch(rb"error: the output cannot be written: No space left on device\n", errors)
    with started(*arguments, stdout=None, env=environment, preexec_fn=lambda: os.close(1)) as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert errors == b"error: the output cannot be written: stdout is closed\n"


@pytest.mark.posix
@pytest.mark.parametrize(("arguments", "exit_code"), [(("models",), 0), (("nonsense",), 2), (("bench", "no-such-model"), 1)])
def test_a_stderr_that_is_gone_changes_no_exit_code(arguments: tuple[str, ...], exit_code: int) -> None:
    with Path("/dev/full").open("wb") as full, started(*arguments, stderr=full) as process:
        process.communicate()
    assert process.returncode == exit_code
    with started(*arguments, stderr=None, preexec_fn=lambda: os.close(2)) as process:
        process.communicate()
    assert process.returncode == exit_code


@pytest.mark.parametrize("module", ["cpuspec.errors", "cpuspec.cli.options", "rich.console", "cpuspec.engine.llm", "numba.core"])
def test_ctrl_c_during_the_start_is_quiet(model: str, module: str) -> None:
    with started(
        "generate", "hello", "-m", model, "--max-tokens", "30000", env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    ) as process:
        wait_for(process.stderr, module.encode())
        interrupt(process)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert errors.splitlines()[-1] == b"interrupted"


@pytest.mark.posix
def test_ctrl_c_that_a_callback_swallows_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    def call_and_wait() -> None:
        ctypes.CFUNCTYPE(None)(interrupted)()
        threading.Event().wait(HANG_S)

    monkeypatch.setattr(sys, "unraisablehook", deliver_again)
    with interruptible_children(), pytest.raises(KeyboardInterrupt):
        call_and_wait()


# What a terminal obeys, and how it is written out.
HOSTILE, HARMLESS = "a\x1b[31mb\x9bc\r\u202ed\n\te", r"a\x1b[31mb\x9bc\r\u202ed" + "\n\te"


def test_what_strangers_wrote_does_not_reach_a_terminal_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    note(HOSTILE)
    assert capsys.readouterr().err == HARMLESS + "\n"
    print_table(["name"], [["a\x1b[31mb\u202e"]])
    assert capsys.readouterr().out == "name\n" + r"a\x1b[31mb\u202e" + "\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_generated_text_is_written_out_on_a_terminal_and_left_alone_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    emit_generated(HOSTILE)
    # Right-to-left marks are a part of what some languages write.
    assert capsys.readouterr().out == (HARMLESS.replace(r"\u202e", "\u202e") if terminal else HOSTILE)


def test_a_shell_completes_names_of_models() -> None:
    typed = {"COMP_WORDS": "cpuspec generate -m smollm2-1", "COMP_CWORD": "3"}
    environment = {**os.environ, "_CPUSPEC_COMPLETE": "complete_bash", **typed}
    with started(env=environment) as process:
        shown, _ = process.communicate()
    assert shown.split() == [b"smollm2-1.7b-fast", b"smollm2-1.7b-instruct", b"smollm2-135m-instruct"]


def test_ctrl_c_stops_the_answer_and_not_the_chat(model: str, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    options = ("chat", "-m", model, "--backend", "numpy", "--max-tokens", "30000", "--logit-bias", "377=-inf")
    with started(*options) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        process.stdout.read(1)
        interrupt(process)
        _, errors = process.communicate(f"/save {saved}\n/set max_tokens 2\nand now?\n".encode())
    assert process.returncode == 0
    assert b"stopped" in errors
    assert b"Traceback" not in errors
    user, assistant = json.loads(saved.read_text("utf-8"))["messages"]
    assert user == {"role": "user", "content": "hello"}
    assert assistant["role"] == "assistant"
    assert assistant["content"]


class Interrupted:
    """Stands for an LLM whose user loses patience after the second piece."""

    closed = False
    aborted_stats = None

    def stream(self, prompt: object, params: SamplingParams, **settings: object) -> Iterator[Output]:
        try:
            yield Output(0, "Hello", [1], [])
            yield Output(0, " wor", [2, 3], [])
            raise KeyboardInterrupt
        finally:
            self.closed = True


def test_an_answer_that_cannot_be_shown_is_closed_at_once() -> None:
    def show(text: str) -> None:
        raise typer.Exit(1)

    llm = Interrupted()
    with pytest.raises(typer.Exit) as caught:  # it holds the frames, so that nothing is closed by chance
        stream_answer(llm, "hi", SamplingParams(), show)  # type: ignore[arg-type]
    assert caught.value.exit_code == 1
    assert llm.closed


def test_an_interrupted_answer_is_still_one_json_object(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "stream", Interrupted.stream)
    monkeypatch.setattr(LLM, "closed", False, raising=False)
    result = run("generate", "hello", "-m", model, *ENDLESS, "--json")
    assert result.exit_code == 130
    shown = json.loads(result.stdout)
    assert (shown["text"], shown["finish_reason"], shown["stats"]) == ("Hello wor", "aborted", None)
