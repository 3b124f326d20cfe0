"""Command lines as people write them for llama.cpp, vLLM and Ollama."""

import pytest
import typer

from cpuspec.cli.app import COMMANDS, whole_command
from cpuspec.cli.spellings import OTHER_COMMANDS, SPELLINGS, translated
from tests.command import refused

PROGRAM = {name: whole_command(name) for name in ("generate", "chat", "serve", "batch", "bench")}
LINES = [
    ("generate", "-m a.gguf -p hi -n 8 --temp 0 -ngl 99 -t 2", "-m a.gguf -n 8 --temperature 0 --threads 2 hi"),
    ("generate", "-m a.gguf -p -x --seed -n", "-m a.gguf --seed -n -- -x"),
    ("generate", "a.gguf -c 0 --ctx-size=512 -- -n 5", "a.gguf --context-length 512 -- -n 5"),
    ("generate", "-hf o/n:Q4_K_M -no-cnv --spec-type draft-mtp --stop -r", "--draft mtp --model o/n:Q4_K_M --raw --stop -r"),
    ("generate", "-f file -st", "-f file"),
    ("serve", "a --spec-type draft-eagle3 --spec-draft-model b.gguf --spec-draft-n-max 4", "--draft b.gguf@4 a"),
    ("serve", "a -md b.gguf --draft-p-min 0.75 --threads 2", "--draft b.gguf@:0.75 a --threads 2"),
    ("serve", "a --spec-type ngram-mod,draft-mtp --spec-draft-n-max 3 --draft-p-min 0.0", "--draft auto,ngram,mtp@3 a"),
    ("serve", "a --spec-type ngram-simple --draft-max 9", "--draft ngram@9 a"),
    ("serve", "a --spec-type none -md b.gguf", "--draft none a"),
    ("serve", "a --max-model-len 64 -np 3 -ctk q8_0 -a x", "a --context-length 64 --max-sequences 3 --kv-format int8 --alias x"),
    ("serve", "a --timeout 60 -kvu -ncmoe 4 --rope-scale 2 --cors-origins x", "a --max-request-s 60 --cors x"),
    ("serve", "a --tool-call-parser hermes --trust-remote-code --port 1", "a --port 1"),
    ("bench", "-p 5 -n 4 -r 2 -s 1", "-p 5 -n 4 -r 2 -s 1"),
]


@pytest.mark.parametrize(("command", "typed", "read"), LINES)
def test_options_of_other_programs_are_read(command: str, typed: str, read: str) -> None:
    notes: list[str] = []
    assert translated(typed.split(), PROGRAM[command], notes.append) == read.split()
    left = {name for one in SPELLINGS if one.passes for name in one.names} & set(typed.split())
    assert len(notes) == len(left)


@pytest.mark.parametrize(
    ("command", "typed", "why"),
    [
        ("serve", "a --api-key x", "CPUSPEC_API_KEY"),
        ("chat", "a --image b.png", "models read text only; say in words"),
        ("generate", "a --mirostat 2", "use --temperature"),
        ("serve", "a -p hi", "PROMPT, which this command does not have"),
        ("generate", "a -ctk q4_1", "spelling of --kv-format, which does not take q4_1"),
        ("generate", "a -np 4", "--max-sequences, which this command does not have"),
        ("generate", "a --predict", "which does not take an empty value"),
        ("generate", "a --spec-draft-n-max 8", "name no drafter; wanted a drafter beside it"),
        ("generate", "a --spec-type magic", "name magic; wanted one of"),
        ("generate", "a --spec-type draft-eagle3", "name it with --spec-draft-model"),
    ],
)
def test_what_has_no_counterpart_is_an_error_that_says_what_to_do(command: str, typed: str, why: str) -> None:
    with pytest.raises(typer.BadParameter, match=why):
        translated(typed.split(), PROGRAM[command], lambda _: None)


@pytest.mark.parametrize("command", PROGRAM)
def test_no_spelling_changes_an_option_of_ours(command: str) -> None:
    for param in PROGRAM[command].params:
        for name in (*param.opts, *param.secondary_opts):
            typed = [name] if getattr(param, "is_flag", False) else [name, "--temp"]
            assert not name.startswith("-") or translated(typed, PROGRAM[command], pytest.fail) == typed


def test_every_option_that_is_named_exists() -> None:
    known = {name for command in PROGRAM.values() for param in command.params for name in (*param.opts, *param.secondary_opts)}
    known |= {"PROMPT"}
    for one in SPELLINGS:
        assert one.ours in known or (one.why and not one.ours), one
    assert not COMMANDS.keys() & OTHER_COMMANDS.keys()


def test_a_command_and_an_option_of_another_program_are_told() -> None:
    refused("run", "qwen3", code=2, message="cpuspec chat MODEL")
    refused("serve", "a", "--api-key", "x", code=2, message="CPUSPEC_API_KEY")
