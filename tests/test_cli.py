"""The command line as a user and a script meet it, with a small random model."""

import csv
import ctypes
import hashlib
import io
import json
import logging
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

import cpuspec
from cpuspec import LLM, SamplingParams, environment, kernels, metrics
from cpuspec.backends import BACKENDS, packed
from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.recipes import DEFAULT_RECIPE
from cpuspec.cli import machine, models
from cpuspec.cli.answer import StreamedAnswer, stream_answer
from cpuspec.cli.app import COMMANDS, whole_command
from cpuspec.cli.brief import EXAMPLES
from cpuspec.cli.chat import _COMMANDS, Chat, converse
from cpuspec.cli.console import deliver_again, emit_generated, note, print_table, size
from cpuspec.engine.draft_spec import LOOKUPS, MODELS
from cpuspec.engine.engine import Output
from cpuspec.errors import ConfigError
from cpuspec.evaluate import speed
from cpuspec.evaluate.certify import Arm, Certificate, Comparison, Greedy, Sampled
from cpuspec.formats.kv import KV_FORMATS
from cpuspec.kernels import machine_code
from cpuspec.platform import SYSTEM, Core, Memory, Node, Topology
from cpuspec.settings import EngineConfig, SamplingDefaults
from tests.backends.models import missing
from tests.block_heads import make_block_head
from tests.command import SMALL, ok, refused, report_of, run, small_model
from tests.processes import HANG_S, interrupt, interruptible_children, started, wait_for
from tests.stand_in_hub import COMMIT, Repository, StandInHub, running
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf

pytestmark = pytest.mark.usefixtures("offline")
NUMPY = ("--backend", "numpy", "--ignore-eos")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that may talk for long."""
    return small_model(tmp_path_factory.mktemp("model") / "tiny.gguf", context_length=32768)


KERNELS = machine_code.kernel_directory()  # of this machine, before a test has a cache of its own


@pytest.fixture
def kept_kernels(cache: Path) -> None:
    """The kernels that this machine has: half a minute to compile, otherwise."""
    KERNELS.mkdir(parents=True, exist_ok=True)
    (cache / "kernels").mkdir(parents=True)
    try:
        machine_code.kernel_directory().symlink_to(KERNELS)
    except OSError:
        shutil.copytree(KERNELS, machine_code.kernel_directory())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test."""
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def answer_of(*arguments: str) -> Any:
    """What `generate` prints as JSON for the prompt "hello", with the reference backend."""
    return report_of("generate", "hello", *NUMPY, *arguments)


def commands() -> dict[str, Any]:
    """Every command by its name; those of a group by both names, as in "eval kl"."""
    found = {name: whole_command(name) for name in COMMANDS}
    for group, one in list(found.items()):
        found |= {f"{group} {name}": command for name, command in getattr(one, "commands", {}).items()}
    return found


# ------------------------------------------------------------------------------------------------------- what it says of itself


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


# ------------------------------------------------------------------------------------------------------------------- generate


def test_stdout_is_the_text_and_stderr_the_rest(model: str) -> None:
    result = run("generate", "hello", "-m", model, *NUMPY, "--max-tokens", "12")
    assert result.exit_code == 0
    with LLM(model, backend="numpy") as llm:
        answer = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=12, ignore_eos=True))
    assert result.stdout == answer.text + "\n" * (not answer.text.endswith("\n"))
    assert "12 new tokens" in result.stderr
    assert "tokens/s" in result.stderr
    assert "cut off by max tokens 12" in result.stderr
    assert not CONTROL.search(result.stderr)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_that_compiles_says_why_it_takes_longer(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    def load(*_: object, **__: object) -> None:
        if not compiled:
            machine_code.address("missing", 0, lambda: print)
        end_here()

    def end_here(*_: object) -> None:
        raise ConfigError("that was it")

    machine_code._tell_of_compiling.cache_clear()
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(machine_code, "_compile", end_here)
    monkeypatch.setattr(LLM, "__init__", load)
    assert run("generate", "hello", "-m", model).stderr.count("compiling kernels") == (not compiled)


def test_a_warning_is_a_line_on_stderr(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        logging.getLogger("cpuspec.somewhere").warning("beware of %s", "it")
        raise ConfigError("that was it")

    monkeypatch.setattr(LLM, "__init__", load)
    for _ in range(2):
        assert run("generate", "hello", "-m", model).stderr == "warning: beware of it\nerror: that was it\n"


def test_raw_continues_the_prompt_as_it_is(model: str) -> None:
    shown = answer_of("--raw", "-m", model, "-n", "6")
    with LLM(model, backend="numpy") as llm:
        (answer,) = llm.generate("hello", SamplingParams(max_tokens=6, ignore_eos=True))
    assert shown["token_ids"] == answer.token_ids
    assert shown["stats"]["num_prompt_tokens"] == answer.stats.num_prompt_tokens


@pytest.mark.usefixtures("kept_kernels")
def test_explain_tells_what_auto_decided_from(model: str) -> None:
    told = run("generate", "hello", "-m", model, "--max-tokens", "8", "--explain").stderr
    assert "target: a forward by its rows costs 1: 1.00, 2: " in told
    assert "forwards a draft, each judged by its confidences" in told
    assert re.search(r"^target: \d forwards?, [0-9.]+ .B of weights read in each$", told, re.M)
    assert (
        "--explain tells what auto decides from; the draft here is ngram"
        in run("generate", "hello", "-m", model, *NUMPY, "--max-tokens", "2", "--explain", "--draft", "ngram").stderr
    )


def test_json_is_one_object_with_everything(model: str) -> None:
    shown = answer_of("-m", model, "--draft", "ngram", "--logprobs", "2", "--threads", "1", "--max-tokens", "5")
    assert set(shown) == {
        *("model", "backend", "threads", "draft", "text", "token_ids", "finish_reason", "logprobs", "stats", "memory"),
        *("verify_exact", "plan", "reads", "rounds", "revision", "sampling_params"),
    }
    assert (shown["model"], shown["backend"], shown["threads"], shown["draft"]) == (model, "numpy", 1, "ngram")
    assert shown["finish_reason"] == "length"
    assert len(shown["token_ids"]) == shown["stats"]["num_new_tokens"] == 5
    assert [one["token_id"] for one in shown["logprobs"]] == shown["token_ids"]
    assert all(len(one["top"]) == 2 and one["logprob"] <= 0 for one in shown["logprobs"])


def test_a_chain_of_drafts_shows_figures_and_memory_of_every_level(model: str, tmp_path: Path) -> None:
    options = ("generate", "a b a b a b", "-m", model, *NUMPY, "--max-tokens", "24")
    plain, chain = report_of(*options), (*options, "--draft", f"ngram@3,{model}@4")
    found = report_of(*chain)
    stats, reads = found["stats"], found["reads"]
    assert found["token_ids"] == plain["token_ids"]
    assert set(stats["levels"]) <= {"ngram", "tiny.gguf"}
    assert [level["name"] for level in found["memory"]] == [one["name"] for one in reads] == ["tiny.gguf", "target"]
    assert stats["num_forwards_saved"] == 24 - stats["num_forwards"] > 0
    assert reads[1]["num_forwards"] == stats["num_forwards"]
    assert sum(one["weight_bytes"] for one in reads) == stats["weight_bytes"] > 0
    said = run(*chain).stderr
    assert "tiny.gguf: " in said
    assert f"{stats['num_forwards_saved']} forwards saved" in said
    assert re.search(r"^memory: tiny.gguf [0-9.]+ .B of weights.* \| target ", said, re.M)
    recipe = tmp_path / "fast.toml"
    recipe.write_text(f'name = "fast"\ndescription = "x"\ntarget = \'{model}\'\nlevels = ["ngram@2"]\n')
    assert answer_of("-m", str(recipe), "--max-tokens", "2")["draft"] == "ngram@2"


def test_sampling_options_reach_the_sampler(model: str) -> None:
    def token_ids(*options: str) -> list[int]:
        return answer_of("-m", model, "--max-tokens", "16", *options)["token_ids"]

    greedy = token_ids()
    hot = ("--temperature", "1.5")
    assert token_ids(*hot, "--seed", "1") == token_ids(*hot, "--seed", "1") != token_ids(*hot, "--seed", "2")
    assert token_ids(*hot, "--top-k", "1") == token_ids(*hot, "--min-p", "1") == token_ids(*hot, "--top-p", "1e-9") == greedy
    assert greedy[0] not in token_ids("--logit-bias", f"{greedy[0]}=-inf")
    assert set(token_ids("--logit-bias", "5=1000")) == {5}
    assert token_ids("--repetition-penalty", "50") != greedy
    assert len(set(token_ids("--frequency-penalty", "1000"))) == 16
    assert len(set(token_ids("--presence-penalty", "1000"))) == 16
    assert token_ids("--stop-token-id", str(greedy[2])) == greedy[: greedy.index(greedy[2]) + 1]
    assert token_ids("--draft", "ngram") == greedy


@pytest.fixture(scope="module")
def opinionated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose files recommend a way to sample it, and something that cannot be."""
    directory = make_tiny_hf(tmp_path_factory.mktemp("opinionated") / "model", context_length=4096, **SMALL)
    settings = {"do_sample": True, "temperature": 0.9, "top_p": 0.8, "top_k": "many"}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return str(directory)


def used(*options: str) -> dict[str, Any]:
    """The sampling params of an answer, as --json has them."""
    return answer_of("--max-tokens", "2", *options)["sampling_params"]


def test_flags_go_before_the_models_own_sampling_field_by_field(model: str, opinionated: str) -> None:
    def chosen(*options: str) -> list[float]:
        params = used("-m", opinionated, *options)
        return [params[name] for name in ("temperature", "top_p", "top_k", "repetition_penalty")]

    assert chosen() == [0.9, 0.8, 0, 1]
    assert chosen("--top-k", "5") == [0.9, 0.8, 5, 1]
    assert chosen("--temperature", "0.5", "--top-p", "1") == [0.5, 1, 0, 1]
    assert chosen("--temperature", "0") == [0, 1, 0, 1]
    assert chosen("--verify-exact") == [0, 1, 0, 1]
    assert used("-m", model)["temperature"] == 0


def test_a_sampled_answer_says_how_it_can_be_repeated(opinionated: str) -> None:
    options = ("generate", "hello", "-m", opinionated, *NUMPY, "--max-tokens", "12")
    first = report_of(*options)
    seed = first["sampling_params"]["seed"]
    assert isinstance(seed, int)
    for more in ((), ("--draft", "ngram")):
        assert report_of(*options, "--seed", str(seed), *more)["token_ids"] == first["token_ids"]
    said = run(*options, "--seed", "7").stderr
    assert "sampled at temperature 0.9, top-p 0.8 (model's own), seed 7" in said
    assert "temperature 0.5, top-p 0.8 (model's own top-p), seed" in run(*options, "--temperature", "0.5").stderr
    assert "| greedy | cut off" in run(*options, "--temperature", "0").stderr
    assert "| greedy, presence penalty 0.5 | cut off" in run(*options, "--temperature", "0", "--presence-penalty", "0.5").stderr
    assert run(*options).stderr.count("warning: ") == run(*options, "--verify-exact").stderr.count("warning: ") == 1


def test_params_are_json_whatever_they_are(model: str) -> None:
    shown = ok("generate", "hello", "-m", model, *NUMPY, "--max-tokens", "1", "--json", "--logit-bias", "5=-inf", "--stop", "x")
    params = json.loads(shown, parse_constant=pytest.fail)["sampling_params"]
    assert (params["logit_bias"], params["stop"], params["seed"]) == ({"5": "-inf"}, ["x"], None)


def test_a_chat_samples_as_the_model_wants_until_it_is_set(opinionated: str) -> None:
    lines = "/set\n/set temperature 0\n/set temperature default\n/set top-k 3\nhello\n/stats\n"
    said = run("chat", "-m", opinionated, *NUMPY[:2], "--max-tokens", "2", stdin=lines).stderr
    assert "  temperature 0.9 (model's own)\n" in said
    assert "  top_k 0\n" in said
    assert "(temperature is 0.0)" in said
    assert "(temperature is 0.9 (model's own))" in said
    assert "sampled at temperature 0.9, top-k 3, top-p 0.8 (model's own temperature, top-p), seed " in said


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.9")], ids=["greedy", "sampled"])
def test_an_answer_is_verified_without_drafts(model: str, sampling: tuple[str, ...]) -> None:
    options = ("-m", model, *NUMPY, "--draft", "ngram", "--max-tokens", "12", "--verify-exact", *sampling)
    result = run("generate", "hello", *options, "--json")
    wanted = {"identical": True, "greedy": not sampling, "num_tokens": 12, "first_difference": None, "row_invariant": False}
    assert (result.exit_code, json.loads(result.stdout)["verify_exact"]) == (0, wanted)
    assert "identical, 12 tokens" in run("generate", "hello", *options).stderr


@pytest.mark.parametrize(
    ("backend", "temperature", "exit_code", "said"),
    [
        ("numpy", "0", 1, "this backend cannot promise"),
        ("numpy", "0.9", 0, "`cpuspec certify` tests that"),
        ("numba", "0", 1, "and answers must not; please report this"),
        ("numba", "0.9", 1, "and answers of one seed must not; please report this"),
    ],
)
def test_an_answer_that_drafts_changed_fails_but_where_it_is_sampled_and_rows_vary(
    model: str, monkeypatch: pytest.MonkeyPatch, backend: str, temperature: str, exit_code: int, said: str
) -> None:
    def sends_another_token(llm: LLM, *arguments: Any, **more: Any) -> StreamedAnswer:
        answer = stream_answer(llm, *arguments, **more)
        if llm.spec.levels:
            answer.token_ids[3] += 1
        return answer

    monkeypatch.setattr("cpuspec.cli.answer.stream_answer", sends_another_token)
    options = ("--draft", "ngram", "--max-tokens", "6", "--temperature", temperature, "--verify-exact", "--json")
    result = run("generate", "hello", "-m", model, "--backend", backend, *options)
    assert result.exit_code == exit_code
    assert json.loads(result.stdout)["verify_exact"]["first_difference"] == 3
    assert "differs from token 3 on" in result.stderr
    assert said in result.stderr


@pytest.mark.skipif(bool(missing("torch")), reason=missing("torch"))
def test_settings_of_torch_reach_it_and_no_other_backend(model: str) -> None:
    def bytes_read(*options: str) -> int:
        found = report_of("generate", "hello", "-m", model, "--backend", "torch", "--max-tokens", "2", "--draft", "none", *options)
        return int(found["memory"][-1]["weight_bytes"])

    values = bytes_read("--device", "cpu", "--weights", "values")
    assert 1.9 < values / bytes_read("--device", "cpu", "--dtype", "bf16", "--weights", "values") < 2.1
    assert values > 4 * bytes_read("--device", "cpu", "--weights", "codes")
    assert (
        "device 'abacus' is not known" in run("generate", "hello", "-m", model, "--backend", "torch", "--device", "abacus").stderr
    )
    assert "is a setting of the torch backend" in run("generate", "hello", "-m", model, *NUMPY, "--dtype", "bf16").stderr


def test_the_kv_format_reaches_the_cache(model: str) -> None:
    options = ("generate", "hello hello hello", "-m", model, *NUMPY, "--max-tokens", "4", "--logprobs", "0")
    found = [report_of(*options, "--kv-format", name)["logprobs"] for name in KV_FORMATS]
    assert found[1] == report_of(*options)["logprobs"]
    assert len({json.dumps(one) for one in found}) == len(KV_FORMATS)


def test_the_models_end_token_ends_the_answer_unless_it_is_ignored(model: str) -> None:
    options = ("generate", "hello", "-m", model, "--backend", "numpy", "--max-tokens", "3", "--logit-bias", "378=1000")
    found = report_of(*options)
    assert (found["token_ids"], found["text"], found["finish_reason"]) == ([378], "", "stop")
    found = report_of(*options, "--ignore-eos")
    assert (found["token_ids"], found["finish_reason"]) == ([378] * 3, "length")


def test_a_stop_text_ends_the_answer_before_it(model: str) -> None:
    options = ("-m", model, "--max-tokens", "30", "--logit-bias", "33=2")
    whole = answer_of(*options)["text"]
    stop = whole[5:7]
    found = answer_of(*options, "--stop", stop)
    assert (found["text"], found["finish_reason"]) == (whole[: whole.index(stop)], "stop")


def test_the_prompt_comes_from_the_argument_a_file_or_stdin(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"two\nlines\n")
    seen: list[object] = []
    monkeypatch.setattr(LLM, "stream", lambda self, prompt, params, **settings: seen.append(prompt) or iter(()))
    for arguments, stdin in ((("two\nlines",), None), (("-f", str(path)), None), ((), "two\nlines\n"), (("-f", "-"), "two\nlines")):
        run("generate", *arguments, "--raw", "-m", model, *NUMPY, stdin=stdin)
    assert seen == ["two\nlines"] * 4


def test_the_system_message_is_part_of_the_prompt(model: str) -> None:
    def num_prompt_tokens(*options: str) -> int:
        return answer_of("-m", model, "--max-tokens", "1", *options)["stats"]["num_prompt_tokens"]

    assert num_prompt_tokens("--system", "be brief") > num_prompt_tokens()


def test_a_model_without_a_template_asks_for_raw(tmp_path: Path) -> None:
    directory = make_tiny_hf(tmp_path / "base", "llama", **SMALL)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    refused("generate", "hi", "-m", str(directory), *NUMPY, code=1, message="has no chat template; use --raw")
    assert ok("generate", "hi", "--raw", "-m", str(directory), *NUMPY, "--max-tokens", "3")
    refused("chat", "-m", str(directory), *NUMPY[:2], code=1, message="--raw")


# -------------------------------------------------------------------------------------------------------------------- certify


ARM = Arm("ngram", 1, 1, num_identical=1, first_differences={0: 3}, num_draft_tokens=0, num_accepted_tokens=0)
SAMPLED = Sampled(60, 1e-5, (Comparison(1.0, "token 1", 99.0, 3, 1e-9),), 5, 4)


def test_a_certificate_says_what_was_tested_and_how(model: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "one two one two"}\n{"text": "three"}\n', "utf-8")
    options = ("--draft", "ngram", "--prompts", f"{prompts}:text:2", "--tokens", "8", "--samples", "60", "--backend", "numpy")
    result = run("certify", model, *options, "--threads", "1", "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["passed"]
    assert shown["control_rejected"]
    assert (shown["greedy"]["num_prompts"], shown["greedy"]["num_tokens"], shown["spec"]) == (2, 16, "ngram")
    assert [file["sha256"] for file in shown["files"]] == [hashlib.sha256(Path(model).read_bytes()).hexdigest()]
    assert "smallest p-value" in result.stderr


@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        ("torch", {"device": "cpu", "dtype": "bf16", "weights": "codes"}),
        ("onnxruntime", {"activations": "f32", "kv_format": "bf16"}),
    ],
)
def test_a_certificate_is_of_the_settings_that_were_asked_for(
    model: str, monkeypatch: pytest.MonkeyPatch, backend: str, settings: dict[str, str]
) -> None:
    seen: dict[str, Any] = {}
    certificate = Certificate("ngram", 1, Greedy(1, 8, (ARM,)), SAMPLED, SAMPLED)
    monkeypatch.setattr("cpuspec.backends.find_spec", lambda module: module)
    monkeypatch.setattr("cpuspec.cli.certify.certify_drafts", lambda *_, **given: seen.update(given) or certificate)
    options = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", value)]
    result = run("certify", model, "--draft", "ngram", "--backend", backend, "--threads", "1", *options, "--json")
    assert (seen["backend"], seen["settings"]) == (backend, EngineConfig(threads=1, **settings))  # type: ignore[arg-type]
    assert json.loads(result.stdout).items() >= {"backend": backend, **settings}.items()


def test_a_refused_certificate_exits_with_1(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = Certificate("ngram", 1, Greedy(2, 16, (ARM,)), SAMPLED, SAMPLED)
    monkeypatch.setattr("cpuspec.cli.certify.certify_drafts", lambda *_, **__: certificate)
    result = run("certify", model, "--draft", "ngram", "--backend", "numpy")
    assert result.exit_code == 1
    for wanted in ("NOT CERTIFIED", "1 of 2 prompts", "NOTHING WAS DRAFTED", "DOES NOT FOLLOW", "A LIE IS NOT SEEN"):
        assert wanted in result.stdout


# --------------------------------------------------------------------------------------------------------------------- errors


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
    (("generate", "hello " * 50, "-m", "MODEL", *NUMPY, "--context-length", "20"), None, 1, "context"),
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
    (("bench", "MODEL", "--rows", "0"), None, 2, "rows must be at least 1"),
    (("bench", "MODEL", "--rows", "2,2"), None, 2, "rows must differ"),
    (("bench", "MODEL", "--depth", "deep"), None, 2, "--depth takes whole numbers"),
    (("bench", "MODEL", "--depth", "9" * 5000), None, 2, "--depth takes whole numbers"),
    (("bench", "MODEL", "--depth", "none"), None, 2, "depths are empty"),
    (("bench", "MODEL", "--sequences", "none"), None, 2, "sequences are empty"),
    (("bench", "MODEL", "--sequences", "0"), None, 2, "sequences must be at least 1"),
    (("bench", "MODEL", "-r", "0"), None, 2, "--repetitions"),
    (("bench", "MODEL", "-p", "-1"), None, 2, "--prompt-tokens"),
    (("bench", "MODEL", "-o", "xml"), None, 2, "md, csv, json"),
    (("bench", "MODEL", "-o", "csv", "--json"), None, 2, "--output csv"),
    (("bench", "MODEL", "-p", "0", "-n", "0", "--rows", "none"), None, 2, "nothing to measure"),
    (("bench", "MODEL", "--depth", "32300"), None, 1, "pp512 @ d32300 needs a context of 32812 tokens, the model has 32768"),
    (("bench", "MODEL", "--rows", "300"), None, 1, "at most 256 rows, got 300 in rows"),
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
    for command in (("generate", "hi", "-m", str(directory), "--max-tokens", "1", *NUMPY), ("inspect", str(directory))):
        result = run(*command)
        assert result.exit_code == 0
        assert "warning: " in result.stderr
        assert "this version does not know attention_sharpness = 2; ignored" in result.stderr


# ----------------------------------------------------------------------------------------------------- interrupts, broken pipes


def endless(model: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    return started("generate", "hello", "-m", model, *NUMPY, "--max-tokens", "30000")


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
def test_a_full_disk_is_an_error(model: str) -> None:
    options = ("generate", "hello", "-m", model, *NUMPY, "--max-tokens", "3")
    with Path("/dev/full").open("wb") as full, started(*options, stdout=full) as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.decode().startswith("error: the output cannot be written")
    assert b"Traceback" not in errors


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
    result = run("generate", "hello", "-m", model, *NUMPY, "--json")
    assert result.exit_code == 130
    shown = json.loads(result.stdout)
    assert (shown["text"], shown["finish_reason"], shown["stats"]) == ("Hello wor", "aborted", None)


# ----------------------------------------------------------------------------------------------------------------------- chat


def chat(model: str, lines: str, *options: str) -> tuple[str, str]:
    """What a chat of these lines writes to stdout and to stderr. The model's end tokens are forbidden: it always answers."""
    forbidden = ("--logit-bias", "376=-inf", "--logit-bias", "377=-inf", "--logit-bias", "378=-inf")
    result = run("chat", "-m", model, "--backend", "numpy", "--max-tokens", "4", *forbidden, *options, stdin=lines)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def saved_messages(model: str, tmp_path: Path, lines: str, *options: str) -> list[dict[str, str]]:
    path = tmp_path / "saved.json"
    path.unlink(missing_ok=True)
    chat(model, f"{lines}\n/save {path}\n", *options)
    return json.loads(path.read_text("utf-8"))["messages"]


def test_answers_go_to_stdout_and_stay_in_the_conversation(model: str, tmp_path: Path) -> None:
    messages = saved_messages(model, tmp_path, "hello\nand now?", "--system", "be brief")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    shown, _ = chat(model, "hello\nand now?\n", "--system", "be brief")
    assert shown == "".join(message["content"] + "\n" for message in messages if message["role"] == "assistant")


@pytest.mark.parametrize(
    ("lines", "contents"),
    [
        ("one \\\ntwo", ["one \ntwo"]),
        ('"""\none\n\ntwo\n"""', ["one\n\ntwo"]),
        ('"""one\ntwo"""', ["one\ntwo"]),
        ('"""one"""', ["one"]),
        ("\n   \nhello", ["hello"]),
        ("//help", ["/help"]),
        ("one\n/undo\ntwo", ["two"]),
        ("one\ntwo\n/drop", ["two"]),
        ("one\ntwo\nthree\n/drop 2", ["three"]),
        ("one\n/reset\ntwo", ["two"]),
        ("one\n/clear", []),
        ("one\ntwo\n/undo\n/undo\n/undo", []),
        ("one\n/retry", ["one"]),
        ("one\n/exit\ntwo\n", None),
        ("/system be brief\none", ["be brief", "one"]),
        ("/system be brief\n/system none\none", ["one"]),
        ("/nonsense\none", ["one"]),
        ("ünï 你好", ["ünï 你好"]),
    ],
)
def test_lines_and_commands_make_the_conversation(model: str, tmp_path: Path, lines: str, contents: list[str] | None) -> None:
    if contents is None:
        assert chat(model, lines)[0].count("\n") == chat(model, "one\n")[0].count("\n")
        return
    messages = saved_messages(model, tmp_path, lines)
    assert [message["content"] for message in messages if message["role"] != "assistant"] == contents


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ("/help", "/retry"),
        ("/hlep", "did you mean /help?"),
        ("/undo", "nothing to undo"),
        ("/retry", "nothing to answer"),
        ("/stats", "no answer yet"),
        ("one\n/stats", "4 new tokens"),
        ("/set temperature 0.7", "temperature is 0.7"),
        ("/set top-k=3", "top_k is 3"),
        ("/set seed 3\n/set seed none", "seed is None"),
        ('/set stop END "the end"', "stop is 'END' 'the end'"),
        ("/set stop END\n/set stop none", "stop is none"),
        ("/set stop END\n/set stop default", "stop is none"),
        ("/set logit_bias 42=-1.5 7=-inf", "logit_bias is 42=-1.5 7=-inf"),
        ("/set logit_bias 42=1\n/set logit_bias none", "logit_bias is none"),
        ("/set max_tokens default", "max_tokens is 1024"),
        ("/set", "repetition_penalty 1.0"),
        ("/system", "own"),
        ("one", "cut off by max tokens 4"),
    ],
)
def test_commands_say_what_they_did(model: str, lines: str, wanted: str) -> None:
    assert wanted in chat(model, lines + "\n")[1]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("/set warmth 1", "no setting 'warmth'"),
        ("/set temperature hot", "takes a number"),
        ("/set temperature -1", "temperature must be"),
        ("/set stop", "stop takes texts"),
        ('/set stop "a', "No closing quotation"),
        ("/set logit_bias 42", "not ID=BIAS"),
        ("/set logit_bias 1=1 1=2", "twice"),
        ("/save", "file name"),
        ("/drop", "there are 0 exchanges"),
        ("one\n/drop many", "takes a number"),
        ("/save no/such/directory/x", "cannot be written"),
        ("hello " * 30, "context"),
    ],
)
def test_a_failed_line_of_a_script_ends_the_chat_with_an_error(model: str, line: str, wanted: str) -> None:
    result = run("chat", "-m", model, "--backend=numpy", "--context-length=40", stdin=line + "\n")
    assert (result.exit_code, wanted in result.stderr) == (1, True), result.stderr


def test_save_overwrites_only_what_this_chat_wrote(model: str, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    other.write_text("precious")
    chat(model, f"one\n/save {mine}\ntwo\n/save {mine}\n")
    assert len(json.loads(mine.read_text())["messages"]) == 4
    result = run("chat", "-m", model, "--backend", "numpy", stdin=f"/save {other}\n")
    assert result.exit_code == 1
    assert other.read_text() == "precious"


class Terminal(io.StringIO):
    """A stdin at which somebody types lines and presses Ctrl-C."""

    def __init__(self, *events: str | type[BaseException]) -> None:
        super().__init__()
        self.events = list(events)

    def isatty(self) -> bool:
        return True

    def readline(self, *_: Any) -> str:
        event = self.events.pop(0) if self.events else ""
        if isinstance(event, str):
            return event
        raise event


class Scripted:
    """Stands for an LLM that answers each request with the next of its answers, or fails."""

    aborted_stats = None
    sampling_defaults = SamplingDefaults()
    context_length = 100
    tokenizer = SimpleNamespace(
        encode_chat=lambda messages, variables: [0],
        token_id=lambda text: None,
        decode=lambda ids, skip_special: "",
        chat_template=None,
        chat_template_for=lambda variables: Scripted.tokenizer.chat_template,
    )

    def __init__(self, *answers: str | type[BaseException]) -> None:
        self.answers = list(answers)

    def stream(self, prompt: object, params: SamplingParams, **settings: object) -> Iterator[Output]:
        answer = self.answers.pop(0)
        if not isinstance(answer, str):
            raise answer("no")
        yield Output(0, answer, [1], [], "stop", None)


def at_terminal(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[str | type[BaseException], ...], *events: str | type[BaseException]
) -> tuple[list[str], int]:
    """What a conversation holds after these events, and how many of them it left unread."""
    terminal = Terminal(*events)
    monkeypatch.setattr(sys, "stdin", terminal)
    talk = Chat(Scripted(*answers), "scripted")  # type: ignore[arg-type]
    converse(talk)
    return [turn["content"] for turn in talk.turns], len(terminal.events)


def test_at_a_terminal_an_error_ends_the_answer_and_not_the_chat(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    turns, unread = at_terminal(monkeypatch, (ConfigError, "yes"), "one\n", "/set temperature hot\n", "two\n")
    assert (turns, unread) == (["two", "yes"], 0)
    assert capsys.readouterr().out == "yes\n"


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (
            {"chat_template": "<|channel|>analysis"},
            "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Yes.",
        ),
        ({"chat_template": "<think>"}, "<think>\nHm.\n</think>\n\nYes."),
        ({"chat_template": "<think>", "decode": lambda ids, skip_special: "assistant\n<think>\n"}, "Hm.\n</think>\n\nYes."),
    ],
)
def test_reasoning_is_shown_apart_and_not_told_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], template: dict[str, Any], answer: str
) -> None:
    """Harmony's templates refuse messages with marks of channels, and templates leave out the reasoning of earlier turns."""
    for name, value in template.items():
        monkeypatch.setattr(Scripted.tokenizer, name, value)
    assert at_terminal(monkeypatch, (answer,), "one\n") == (["one", "Yes."], 0)
    shown = capsys.readouterr()
    assert (shown.out, "Hm.\n" in shown.err) == ("Yes.\n", True)


def test_a_message_that_was_stopped_before_a_word_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert at_terminal(monkeypatch, (KeyboardInterrupt, "yes"), "one\n", "two\n") == (["two", "yes"], 0)


@pytest.mark.parametrize("failure", [ConfigError, KeyboardInterrupt])
def test_a_failed_retry_keeps_the_old_answer(monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]) -> None:
    assert at_terminal(monkeypatch, ("yes", failure), "one\n", "/retry\n") == (["one", "yes"], 0)
    assert at_terminal(monkeypatch, ("yes", "no"), "one\n", "/retry\n") == (["one", "no"], 0)


TOOLS = '''
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b

def odd(*numbers): ...
'''
CALL = '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>'


def test_a_model_calls_a_function_that_the_user_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "tools.py"
    file.write_text(TOOLS)
    given: list[Any] = []
    monkeypatch.setattr(Scripted.tokenizer, "chat_template", "{% for tool in tools %}<tool_call>{% endfor %}")
    monkeypatch.setattr(Scripted.tokenizer, "encode_chat", lambda messages, variables: given.append(variables) or [0])
    monkeypatch.setattr(
        sys, "stdin", Terminal(f"/tools {file}:odd\n", f"/tools {file}:add\n", "one\n", "/undo\n", "two\n", "/tools none\n")
    )
    scripted = Scripted(CALL % '{"a": 2, "b": 3}', CALL % '{"c": 2}', "Five.", CALL % "{}", "No.")
    talk = Chat(scripted, "scripted")  # type: ignore[arg-type]
    events: list[list[Any]] = []

    def undo(one: Chat, _: str) -> None:
        events.append(one.turns.copy())
        one.turns.clear()

    monkeypatch.setitem(_COMMANDS, "undo", replace(_COMMANDS["undo"], run=undo))  # type: ignore[misc]
    converse(talk)
    assert [turn["role"] for turn in events[0]] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert events[0][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert (events[0][2]["content"], events[0][5]["content"]) == ("5", "Five.")
    assert events[0][4]["content"].startswith("error: TypeError")
    (tool,) = given[0]["tools"]
    assert tool["function"]["parameters"]["required"] == ["a"]
    assert tool["function"]["description"] == "Add two numbers."
    assert [turn["role"] for turn in talk.turns] == ["user", "assistant", "tool", "assistant"]
    assert not talk.tools
    assert "takes numbers, which no call can name" in capsys.readouterr().err


def test_a_history_is_kept_and_goes_on(model: str, tmp_path: Path) -> None:
    kept = tmp_path / "talk.json"
    options = ("chat", "-m", model, "--backend", "numpy", "--max-tokens", "2", "--history", str(kept))
    assert run(*options, "--system", "Be short.", stdin="one\n").exit_code == 0
    first = json.loads(kept.read_text())["messages"]
    assert [one["role"] for one in first] == ["system", "user", "assistant"]
    again = run(*options, stdin="two\n")
    assert "has 1 exchanges, which go on" in again.stderr
    both = json.loads(kept.read_text())["messages"]
    assert both[:3] == first
    assert [one["role"] for one in both[3:]] == ["user", "assistant"]
    assert run(*options, stdin="/reset\n").exit_code == 0
    assert [one["role"] for one in json.loads(kept.read_text())["messages"]] == ["system"]
    for wrong in ("[", '{"messages": [{"role": "assistant", "content": "a"}]}', '{"messages": [{"role": "user", "content": 3}]}'):
        kept.write_text(wrong)
        refused(*options, stdin="two\n", code=2, message="holds no conversation")
        assert kept.read_text() == wrong


LONG = "hello " * 12


def full_context(model: str, monkeypatch: pytest.MonkeyPatch, *events: str) -> Chat:
    """A conversation at a terminal, in a context that has no room for two long messages, after these events."""
    monkeypatch.setattr(sys, "stdin", Terminal(*events))
    with LLM(model, "none", "numpy", context_length=120) as llm:
        talk = Chat(llm, "tiny", {"max_tokens": 2, "logit_bias": dict.fromkeys((376, 377, 378), -math.inf)})
        converse(talk)
    return talk


@pytest.mark.parametrize("agreed", ["y\n", "n\n", ""])
def test_at_a_terminal_a_full_context_asks_whether_the_oldest_may_go(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], agreed: str
) -> None:
    talk = full_context(model, monkeypatch, f"one {LONG}\n", f"two {LONG}\n", agreed)
    assert [turn["content"][:3] for turn in talk.turns[::2]] == (["two"] if agreed == "y\n" else ["one"])
    assert len(talk.turns) == 2
    said = capsys.readouterr().err
    assert "the context holds 120" in said
    assert "Forget the oldest exchange to make room?" in said
    assert ("forgot the oldest exchange; 0 remain" in said) == (agreed == "y\n")
    assert ("/drop 1 forgets" in said) == (agreed != "y\n")


def test_a_retry_may_make_room_too(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = full_context(model, monkeypatch, f"one {LONG}\n", f"two {LONG}\n", "n\n", "/drop\n", f"two {LONG}\n", "/retry\n")
    assert [turn["content"][:3] for turn in talk.turns[::2]] == ["two"]


def test_in_a_script_a_full_context_is_an_error_that_names_what_helps(model: str) -> None:
    limits = ("--context-length=120", "--max-tokens=2", "--logit-bias=377=-inf")
    options = ("chat", "-m", model, "--backend=numpy", *limits)
    result = run(*options, stdin=f"one {LONG}\ntwo {LONG}\n")
    assert result.exit_code == 1
    assert all(wanted in result.stderr for wanted in ("the context holds 120", "/drop 1", "/undo", "/reset", "--context-length"))
    assert run(*options, stdin=f"one {LONG}\n/drop\ntwo {LONG}\n").exit_code == 0
    result = run(*options, stdin=f"one {LONG * 9}\n")
    assert (result.exit_code, "this message is too long" in result.stderr) == (1, True)


def test_ctrl_c_twice_at_the_prompt_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    ctrl_c = KeyboardInterrupt
    assert at_terminal(monkeypatch, ("yes",), ctrl_c, "one\n", ctrl_c, ctrl_c, "two\n") == (["one", "yes"], 1)


# ------------------------------------------------------------------------------------------------------ models, pull, inspect


@pytest.fixture
def hub(model: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """A hub on this machine that has the tiny model, and one with less noise for drafts."""
    content = Path(model).read_bytes()
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    caches = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "OLLAMA_MODELS")
    for name in (*proxies, *map(str.upper, proxies), *caches, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "CPUSPEC_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    hub = StandInHub({"some/one": Repository({"tiny-Q8_0.gguf": content, "tiny-Q4_K_M.gguf": content})})
    with running(hub) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield hub


@pytest.fixture
def recipe(model: str, hub: StandInHub, cache: Path, tmp_path: Path) -> SimpleNamespace:
    """A user's recipe for the tiny model."""
    content = Path(model).read_bytes()
    (cache / "recipes").mkdir(parents=True)
    (cache / "recipes" / "tiny.toml").write_text(
        f'name = "tiny"\ndescription = "random"\narchitecture = "qwen2"\nparameters = 1000\nfile = "tiny.gguf"\n'
        f'bytes = {len(content)}\nsha256 = "{hashlib.sha256(content).hexdigest()}"\nlicence = "none"\n'
        f'[[sources]]\nkind = "huggingface"\nname = "some/one:Q8_0"\n'
    )
    return SimpleNamespace(path=snapshot(tmp_path) / "tiny-Q8_0.gguf", content=content)


def snapshot(tmp_path: Path) -> Path:
    return tmp_path / "hf" / "hub" / "models--some--one" / "snapshots" / COMMIT


def test_pull_fetches_once_and_prints_the_path(recipe: SimpleNamespace) -> None:
    first, second = run("pull", "tiny"), run("pull", "tiny")
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert first.stdout == second.stdout == f"{recipe.path}\n"
    assert recipe.path.read_bytes() == recipe.content
    assert "fetching tiny: licence none." in first.stderr
    assert "licence" not in second.stderr
    assert f"revision {COMMIT}" in first.stderr
    assert "already there" in second.stderr
    assert not CONTROL.search(first.stderr)


@pytest.mark.parametrize("name", ["tiny", "some/one:Q8_0"])
def test_pull_as_json_says_what_was_there_and_its_revision(recipe: SimpleNamespace, name: str) -> None:
    wanted = {"name": name, "path": str(recipe.path), "bytes": len(recipe.content), "revision": COMMIT}
    assert report_of("pull", name) == [wanted | {"was_there": False}]
    assert report_of("pull", name) == [wanted | {"was_there": True}]


def test_pull_checks_every_name_before_it_fetches_one(recipe: SimpleNamespace) -> None:
    assert run("pull", "tiny", "no-such-model").exit_code == 1
    assert not recipe.path.exists()


@pytest.mark.posix
def test_pull_of_a_chain_fetches_target_and_drafts(recipe: SimpleNamespace, cache: Path, tmp_path: Path, hub: StandInHub) -> None:
    (cache / "recipes" / "tiny-fast.toml").write_text(
        'name = "tiny-fast"\ndescription = "d"\ntarget = "tiny"\nlevels = ["auto", "match:some/one:Q4_K_M", "some/one:Q8_0"]\n'
    )
    paths = [recipe.path, snapshot(tmp_path) / "tiny-Q4_K_M.gguf", recipe.path]
    assert ok("pull", "tiny-fast", "tiny").split() == [str(path) for path in paths]
    assert hub.fetched() == ["tiny-Q8_0.gguf"]  # the other one has the same bytes


def test_a_heads_recipe_fetches_and_runs_it_with_its_target(
    recipe: SimpleNamespace, model: str, cache: Path, tmp_path: Path, hub: StandInHub
) -> None:
    target = open_checkpoint(model)
    made = make_block_head(tmp_path / "head", target.config, (0,), layout="speculators")
    files = {path.name: path.read_bytes() for path in made.path.iterdir()}
    hub.repositories["some/head"] = Repository(files)
    written = cache / "recipes" / "tiny-head.toml"

    def write(norm_sha256: str) -> None:
        written.write_text(
            f'name = "tiny-head"\ndescription = "d"\narchitecture = "dflash"\nlicence = "MIT"\n'
            f'[head]\ntarget = "tiny"\nnorm_sha256 = "{norm_sha256}"\n'
            f'[files]\n"model.safetensors" = "{hashlib.sha256(files["model.safetensors"]).hexdigest()}"\n'
            f'[[sources]]\nkind = "huggingface"\nname = "some/head:safetensors"\n'
        )

    norm = json.loads(ok("inspect", model, "--json", "--threads", "1"))["norm_sha256"]
    write(norm)
    options = (*NUMPY, "--max-tokens", "12", "--temperature", "0", "--json")
    shown = json.loads(ok("generate", "a b a b", "-m", "tiny-head", *options))
    assert shown["draft"] == "auto,tiny-head"
    assert hub.fetched() == ["tiny-Q8_0.gguf", "config.json", "model.safetensors"]
    drafted = json.loads(ok("generate", "a b a b", "-m", "tiny", "--draft", "tiny-head@3", *options))
    plain = json.loads(ok("generate", "a b a b", "-m", "tiny-head", "--draft", "none", *options))
    assert shown["token_ids"] == drafted["token_ids"] == plain["token_ids"]
    assert drafted["stats"]["levels"]["tiny-head"]["num_draft_tokens"] > 0
    rows = report_of("models")
    (row,) = [row for row in rows if row["name"] == "tiny-head"]
    assert (row["source"], row["target"], row["fetched"]) == ("head", "tiny", True)
    assert "tiny-head" in ok("models")
    write("0" * 64)
    refused = run("generate", "a b a b", "-m", "tiny-head", *options)
    assert refused.exit_code == 1
    assert f"has the sha256 {'0' * 64}, and that of" in " ".join(refused.stderr.split())
    assert norm in refused.stderr


def test_a_hub_name_can_be_generated_with_and_json_has_its_revision(hub: StandInHub) -> None:
    hub.repositories["some/one"].files |= {"mmproj-x-Q8_0.gguf": b"eyes"}
    result = run("generate", "hello", "-m", "some/one:Q8_0", *NUMPY, "--max-tokens", "2", "--json")
    shown = json.loads(result.stdout)
    assert (shown["model"], shown["revision"]) == ("some/one:Q8_0", COMMIT)
    assert hub.fetched() == ["tiny-Q8_0.gguf"]
    assert report_of("inspect", "some/one:Q8_0")["revision"] == COMMIT
    assert COMMIT in ok("inspect", "some/one:Q8_0")


def test_models_lists_recipes_and_whether_they_are_fetched(recipe: SimpleNamespace) -> None:
    assert re.search(r"^tiny .* no ", ok("models"), re.M)
    ok("pull", "tiny")
    assert re.search(r"^tiny .* yes ", ok("models"), re.M)
    rows = {row["name"]: row for row in report_of("models")}
    assert {"smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct", "tiny"} <= set(rows)
    assert rows["qwen2.5-coder-1.5b-edit"]["target"] == "qwen2.5-coder-1.5b-instruct"
    assert "qwen2.5-coder-1.5b-edit" in ok("models")
    assert (rows["tiny"]["fetched"], rows["smollm2-135m-instruct"]["fetched"]) == (True, False)
    assert (rows["tiny"]["path"], rows["smollm2-135m-instruct"]["path"]) == (str(recipe.path), None)
    # The hub's cache is shown, too, under a name that -m takes.
    assert {"source": "huggingface", "path": str(recipe.path)}.items() <= rows["some/one:Q8_0"].items()
    assert re.search(rf"^some/one:Q8_0 .* huggingface +{re.escape(str(recipe.path))}$", ok("models"), re.M)


def test_a_recipe_that_cannot_be_read_costs_a_line_of_models_and_nothing_else(recipe: SimpleNamespace, cache: Path) -> None:
    (cache / "recipes" / "broken.toml").write_text("name = ")
    result = run("models")
    assert result.exit_code == 0
    assert [line for line in result.stderr.splitlines() if "broken.toml is not TOML" in line] == result.stderr.splitlines()
    assert len(result.stderr.splitlines()) == 1
    assert run("pull", "tiny").exit_code == 0
    assert run("pull", "broken").exit_code == 1


@pytest.mark.usefixtures("bandwidth")
@pytest.mark.parametrize("tied", [True, False])
def test_inspect_adds_up(tmp_path: Path, tied: bool) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", "qwen3", weight_format="q4_0", embed_format="q8_0", tied=tied, **SMALL)
    report = json.loads(ok("inspect", str(path), "--json", "--tensors", "--threads", "3"))
    tensors = report["tensors"]
    assert report["bytes"] == sum(t["bytes"] for t in tensors) == sum(f["bytes"] for f in report["formats"].values())
    assert report["num_tensors"] == len(tensors) == sum(f["num_tensors"] for f in report["formats"].values())
    assert report["bits_per_weight"] == pytest.approx(8 * report["bytes"] / report["num_weights"])
    assert report["formats"]["q4_0"]["bits_per_weight"] == 4.5
    embed = next(t["bytes"] for t in tensors if t["name"] == "embed")
    assert report["read_bytes_per_token"] == report["bytes"] - (0 if tied else embed)
    assert report["bound_tokens_per_s"] == pytest.approx(3e9 / report["read_bytes_per_token"])
    assert report["kv_bytes_per_token"] == 2 * 1 * 1 * 32 * 2
    shown = ok("inspect", str(path), "--tensors")
    assert all(text in shown for text in ("qwen3", "q8_0", "layers.0.down", "tokens/s", "4.50"))
    assert "layers.0.down" not in ok("inspect", str(path))


def test_inspect_shows_experts_and_windows(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", "gpt-oss", num_layers=3)
    shown = " ".join(ok("inspect", str(path), "--threads", "1").split())
    assert "experts 8 of 128, 3 for a token windows 8 tokens in 2 layers" in shown


def test_inspect_tells_of_a_layer_for_prediction(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", num_layers=3, predicts=True)
    found = json.loads(ok("inspect", str(path), "--json", "--tensors", "--threads", "1"))
    assert found["prediction"]["bytes"] == sum(tensor["bytes"] for tensor in found["prediction"]["tensors"])
    assert not any("nextn" in tensor["name"] for tensor in found["tensors"])
    shown = " ".join(ok("inspect", str(path), "--tensors", "--threads", "1").split())
    assert "in 16 tensors for multi-token prediction: it drafts by --draft mtp, or where auto chooses it" in shown
    assert "blk.2.nextn.eh_proj.weight" in shown


@pytest.mark.posix
@pytest.mark.usefixtures("bandwidth")
def test_inspect_verifies_the_file_and_packed_weights(recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_SMALLEST_BYTES", 0)
    ok("pull", "tiny")
    checkpoint = open_checkpoint(recipe.path)
    matrices = {name: tensor for name, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}
    packed.packed_matrices(checkpoint.name, matrices, 1)
    [(path, _)] = packed.packed_files()
    verified = report_of("inspect", "tiny", "--verify")["verified"]
    assert verified["files"][0]["sha256"] == verified["recipe_sha256"] == hashlib.sha256(recipe.content).hexdigest()
    assert (verified["recipe"], verified["packed"], verified["passed"]) == ("tiny", [{"path": str(path), "sound": True}], True)
    shown = ok("inspect", "tiny", "--verify")
    assert "as the recipe tiny has it" in shown
    assert "sound: " in shown

    def flip_last_bit(file: Path) -> None:
        status, content = file.stat(), bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    flip_last_bit(path)
    found = run("inspect", "tiny", "--verify")
    assert found.exit_code == 1
    assert "DAMAGED, and removed: the next start packs anew" in found.stdout
    assert not path.exists()
    assert "none are kept" in ok("inspect", "tiny", "--verify")
    flip_last_bit(recipe.path)
    found = run("inspect", "tiny", "--verify")
    assert found.exit_code == 1
    assert "DAMAGED: tiny is " in found.stdout
    assert json.loads(run("inspect", "tiny", "--verify", "--json").stdout)["verified"]["passed"] is False


@pytest.mark.usefixtures("bandwidth")
def test_files_that_no_recipe_knows_have_a_hash_and_no_verdict(model: str) -> None:
    verified = report_of("inspect", model, "--verify")["verified"]
    assert verified["files"][0]["sha256"] == hashlib.sha256(Path(model).read_bytes()).hexdigest()
    assert (verified["recipe"], verified["recipe_sha256"], verified["passed"]) == (None, None, True)
    assert "no recipe knows these files" in ok("inspect", model, "--verify")


def test_bandwidth_is_the_best_pass_over_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.1, 0.6, 0.7, 0.9, 1.5])  # start, then begin and end of two passes, then past the second
    monkeypatch.setattr(metrics, "perf_counter", lambda: next(times))
    assert metrics.read_bandwidth(2, num_bytes=4096) == pytest.approx(4096 / 0.2)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.00 kB"), (46080, "46.1 kB"), (98_362_432, "98.4 MB"), (999_600_000, "1.00 GB")],
)
def test_sizes_are_given_in_decimal_units(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.skipif(bool(missing("onnxruntime")), reason=missing("onnxruntime"))
def test_export_prints_the_file_that_it_wrote(model: str, tmp_path: Path) -> None:
    out = tmp_path / "model.onnx"
    result = run("export", model, str(out))
    assert (result.exit_code, result.stdout) == (0, f"{out}\n")
    assert f"wrote {size(sum(path.stat().st_size for path in tmp_path.glob('model.onnx*')))}" in result.stderr
    again = run("export", model, str(out))
    assert again.exit_code == 1
    assert "exists; remove it" in again.stderr


# ---------------------------------------------------------------------------------------------------------------- bench, info


@pytest.fixture
def bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory whose speed is known without measuring it."""
    for module in (machine, models, speed):
        monkeypatch.setattr(module, "read_bandwidth", lambda threads: 1e9 * threads)


SHORT = ("-p", "9", "-n", "2", "-r", "2", "--rows-depth", "3", "--backend", "numpy")


@pytest.mark.usefixtures("bandwidth")
def test_a_chain_is_inspected_and_measured_as_its_target(model: str, tmp_path: Path) -> None:
    recipe = tmp_path / "fast.toml"
    recipe.write_text(f'name = "fast"\ndescription = "x"\ntarget = \'{model}\'\nlevels = ["ngram@2"]\n')
    chain, target = (json.loads(ok("inspect", one, "--json", "--threads", "1")) for one in (str(recipe), model))
    assert chain["config"] == target["config"]
    assert report_of("bench", str(recipe), *SHORT, "--rows", "1")["rows"][0]["rows"] == 1


@pytest.mark.usefixtures("bandwidth")
def test_bench_as_json_is_what_scripts_rely_on(model: str) -> None:
    options = ("--rows", "1,2,4,8,16", "--depth", "0,5")
    batched = report_of("bench", model, *SHORT, "--rows", "none", "--sequences", "1,3")
    assert [(one["name"], one["tokens"], one["sequences"]) for one in batched["more"]] == [("tg2 x 3", 6, 3)]
    result = run("bench", model, *SHORT, *options, "--json")
    shown = json.loads(result.stdout)
    assert [row["rows"] for row in shown["rows"]] == [1, 2, 4, 8, 16]
    assert all(row["median_s"] > 0 and row["depth"] == 3 for row in shown["rows"])
    assert (shown["prefill"]["tokens"], shown["decode"]["tokens"]) == (9, 2)
    assert {one["weight_bytes"] for one in (shown["decode"], *shown["rows"])} == {shown["weight_bytes"]}
    assert all(shown[name]["tokens_per_s"] == shown[name]["tokens"] / shown[name]["median_s"] for name in ("prefill", "decode"))
    assert [one["name"] for one in shown["more"]] == ["pp9 @ d5", "tg2 @ d5"]
    assert (shown["model"], shown["backend"], shown["threads"], shown["repetitions"]) == (model, "numpy", 1, 2)
    assert shown["read_bytes_per_s"] == 1e9
    assert shown["kv_format"] == "f16"
    assert "round 2 of 2" in result.stderr
    assert not CONTROL.search(result.stderr)
    assert json.loads(ok("bench", model, *SHORT, *options, "-o", "json")).keys() == shown.keys()


@pytest.mark.skipif(bool(missing("torch")), reason=missing("torch"))
@pytest.mark.usefixtures("bandwidth")
def test_bench_measures_a_backend_with_its_settings_and_says_which(model: str) -> None:
    options = (*SHORT, "--rows", "1", "--backend", "torch", "--device", "cpu", "--dtype", "bf16", "--weights", "values")
    shown = report_of("bench", model, *options)
    assert (shown["backend"], shown["device"], shown["dtype"], shown["activations"]) == ("torch", "cpu", "bf16", "auto")
    assert "torch backend with dtype bf16, weights values, " in ok("bench", model, *options).splitlines()[0]
    assert "is a setting of the torch backend" in run("bench", model, *SHORT, "--dtype", "bf16").stderr


@pytest.mark.usefixtures("bandwidth")
def test_bench_prints_markdown_or_csv_of_the_same_workloads(model: str) -> None:
    lines = ok("bench", model, *SHORT, "--rows", "1,3").splitlines()
    tables = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert [cells[0] for cells in tables if not cells[0].startswith("-")] == ["test", "pp9", "tg2", "rows @ d3", "1", "3"]
    assert len({len(line) for line in lines[2:6]}) == 1
    assert " ± " in tables[2][1]
    assert [cells.index("weights read") for cells in (tables[0], tables[4])] == [3, 4]
    shown = list(csv.DictReader(io.StringIO(ok("bench", model, *SHORT, "--rows", "1,3", "-o", "csv"))))
    assert [row["name"] for row in shown] == ["pp9", "tg2", "1 row @ d3", "3 rows @ d3"]
    assert all(float(row["median_s"]) > 0 and row["model"] == model for row in shown)


@pytest.mark.usefixtures("bandwidth")
def test_bench_leaves_out_what_is_not_asked_for(model: str) -> None:
    shown = report_of("bench", model, *SHORT, "-p", "0", "-n", "0", "--rows", "2")
    assert (shown["prefill"], shown["decode"], shown["rows"][0]["over_one_row"]) == (None, None, None)
    assert "tokens/s" not in ok("bench", model, *SHORT, "-p", "0", "-n", "0", "--rows", "2")
    assert report_of("bench", model, *SHORT, "--rows", "none")["rows"] == []
    assert "rows @" not in ok("bench", model, *SHORT, "--rows", "none")


def test_ctrl_c_ends_a_bench_with_130_and_no_half_results(model: str) -> None:
    with started("bench", model, *SHORT, "-r", "1000000") as process:
        wait_for(process.stderr, b"round 1 of")
        interrupt(process)
        shown, errors = process.communicate()
    assert process.returncode == 130
    assert shown == b""
    assert b"interrupted" in errors
    assert b"Traceback" not in errors


def test_info_prints_the_instructions_that_multiply_a_format() -> None:
    one, four = (ok("info", "--kernel", "q4_0", "--rows", rows).splitlines() for rows in ("1", "4"))
    assert ".LBB0_2:" in one  # loops
    assert len(one) + 30 < len(four)
    refused("info", "--kernel", "q4_9", code=1, message="format 'q4_9' is not known")


@pytest.mark.usefixtures("bandwidth")
def test_info_says_what_was_chosen_and_why(cache: Path) -> None:
    shown = report_of("info")
    assert (shown["isa"], shown["lookup_isa"]) == (kernels.isa.dot_isa(), kernels.isa.lookup_isa())
    assert shown["tile_registers"] == kernels.isa.has_tiles()
    assert set(shown["features"]) == kernels.isa.features()
    assert 1 <= shown["default_threads"] == shown["usable_cores"] <= shown["logical_cpus"]
    assert shown["read_bandwidth"] == [{"threads": n, "bytes_per_s": 1e9 * n} for n in sorted({1, shown["usable_cores"]})]
    assert sum(one["count"] for one in shown["cores"]) >= shown["usable_cores"]
    assert shown["versions"]["cpuspec"] == cpuspec.__version__
    assert shown["versions"].keys() - {"commit"} == {"cpuspec", "python", "numpy", "numba", "llvmlite"}
    assert (shown["cache_directory"], shown["kernel_directory"]) == (str(cache), str(kernels.kernel_directory()))
    assert (shown["kernels_compiled"], shown["kernel_bytes"], shown["models"]) == (False, 0, [])
    table = ok("info")
    assert all(str(text) in table for text in (shown["processor"], shown["isa_reason"], shown["kernel_directory"], "not compiled"))


@pytest.mark.usefixtures("bandwidth", "cache")
def test_info_tells_unequal_cores_a_quota_and_where_weights_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = (*(Core((n,), 1.0, "core") for n in range(6)), *(Core((n,), 0.45, "atom") for n in range(6, 14)))
    machine = Topology(cores, (Node(0, tuple(range(6)), 1 << 30), Node(1, tuple(range(6, 14)), None)), 2.5)
    monkeypatch.setattr("cpuspec.cli.machine.SYSTEM", replace(SYSTEM, topology=lambda: machine))
    shown = report_of("info")
    assert shown["cores"] == [{"kind": "core", "speed": 1.0, "count": 6}, {"kind": "atom", "speed": 0.45, "count": 8}]
    assert (shown["cpu_quota"], shown["nodes_in_use"]) == (2.5, [0, 1])
    table = " ".join(ok("info").split())
    fast, slow = "6 cores of kind core, 100% of the top speed", "8 cores of kind atom, 45%"
    assert all(text in table for text in (fast, slow, "a quota of 2.5", "each of 2 memory nodes"))


@pytest.mark.usefixtures("bandwidth")
def test_info_sees_compiled_kernels_and_fetched_models(recipe: SimpleNamespace) -> None:
    made = kernels.kernel_directory() / "run.o"
    made.parent.mkdir(parents=True)
    made.write_bytes(b"12345")
    ok("pull", "tiny")
    shown = report_of("info")
    assert (shown["kernels_compiled"], shown["kernel_bytes"]) == (True, 5)
    assert shown["models"] == [{"name": "tiny", "bytes": len(recipe.content), "path": str(recipe.path)}]
    assert str(recipe.path) in ok("info")


@pytest.mark.usefixtures("bandwidth")
def test_info_lists_packed_weights_and_what_they_may_take(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUSPEC_PACKED_GB", "1.5")
    assert report_of("info")["packed"] == []
    (cache / "packed").mkdir(parents=True)
    (cache / "packed" / "tiny-0.packed").write_bytes(bytes(2000))
    shown = report_of("info")
    assert (shown["packed_directory"], shown["packed_limit_bytes"]) == (str(cache / "packed"), 1_500_000_000)
    assert shown["packed"] == [{"name": "tiny-0.packed", "bytes": 2000}]
    table = ok("info")
    assert "packed (2.00 kB of at most 1.50 GB)" in table
    assert "tiny-0.packed (2.00 kB)" in table


@pytest.mark.parametrize(
    ("isa", "features", "reason"),
    [
        ("avx512_vnni", {"avx512vnni", "avxvnni"}, "this processor has avx512vnni"),
        ("avx_vnni", {"avx2", "avxvnni"}, "this processor has avxvnni and no avx512vnni"),
        ("generic", {"avx2"}, "this processor has no avx512vnni or avxvnni"),
    ],
)
def test_the_choice_of_kernels_has_its_reason(
    monkeypatch: pytest.MonkeyPatch, bandwidth: None, isa: str, features: set[str], reason: str
) -> None:
    monkeypatch.setattr(kernels.isa, "dot_isa", lambda: isa)
    monkeypatch.setattr(kernels.isa, "features", lambda: frozenset(features))
    assert report_of("info")["isa_reason"] == reason
    assert f"{isa}: {reason}" in ok("info")


def test_what_a_machine_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch, bandwidth: None) -> None:
    for module in (machine, environment):
        monkeypatch.setattr(module, "SYSTEM", replace(SYSTEM, memory=Memory))
    shown = report_of("info")
    assert shown["memory_bytes"] is shown["available_memory_bytes"] is shown["memory_limit_bytes"] is None
    assert re.search(r"^memory +unknown$", ok("info"), re.M)
