"""`cpuspec generate` and `certify` as a user and a script meet them, with a small random model."""

import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.cli.answer import StreamedAnswer, stream_answer
from cpuspec.errors import ConfigError
from cpuspec.evaluate.certify import Arm, Certificate, Comparison, Greedy, Sampled
from cpuspec.settings import EngineConfig
from tests.command import CONTROL, ENDLESS, NUMPY, SMALL, ok, refused, report_of, run
from tools.make_tiny_model import make_tiny_hf

pytestmark = pytest.mark.usefixtures("cache")


def answer_of(*arguments: str) -> Any:
    """What `generate` prints as JSON for the prompt "hello", with the reference backend."""
    return report_of("generate", "hello", *ENDLESS, *arguments)


def test_stdout_is_the_text_and_stderr_the_rest(model: str) -> None:
    result = run("generate", "hello", "-m", model, *ENDLESS, "--max-tokens", "12")
    assert result.exit_code == 0
    with LLM(model, backend="numpy") as llm:
        answer = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=12, ignore_eos=True))
    assert result.stdout == answer.text + "\n" * (not answer.text.endswith("\n"))
    assert "12 new tokens" in result.stderr
    assert "tokens/s" in result.stderr
    assert "cut off by max tokens 12" in result.stderr
    assert not CONTROL.search(result.stderr)


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
        in run("generate", "hello", "-m", model, *ENDLESS, "--max-tokens", "2", "--explain", "--draft", "ngram").stderr
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
    options = ("generate", "a b a b a b", "-m", model, *ENDLESS, "--max-tokens", "24")
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
    options = ("generate", "hello", "-m", opinionated, *ENDLESS, "--max-tokens", "12")
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
    shown = ok("generate", "hello", "-m", model, *ENDLESS, "--max-tokens", "1", "--json", "--logit-bias", "5=-inf", "--stop", "x")
    params = json.loads(shown, parse_constant=pytest.fail)["sampling_params"]
    assert (params["logit_bias"], params["stop"], params["seed"]) == ({"5": "-inf"}, ["x"], None)


def test_a_chat_samples_as_the_model_wants_until_it_is_set(opinionated: str) -> None:
    lines = "/set\n/set temperature 0\n/set temperature default\n/set top-k 3\nhello\n/stats\n"
    said = run("chat", "-m", opinionated, *NUMPY, "--max-tokens", "2", stdin=lines).stderr
    assert "  temperature 0.9 (model's own)\n" in said
    assert "  top_k 0\n" in said
    assert "(temperature is 0.0)" in said
    assert "(temperature is 0.9 (model's own))" in said
    assert "sampled at temperature 0.9, top-k 3, top-p 0.8 (model's own temperature, top-p), seed " in said


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.9")], ids=["greedy", "sampled"])
def test_an_answer_is_verified_without_drafts(model: str, sampling: tuple[str, ...]) -> None:
    options = ("-m", model, *ENDLESS, "--draft", "ngram", "--max-tokens", "12", "--verify-exact", *sampling)
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


def test_the_prompt_comes_from_the_argument_a_file_or_stdin(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"two\nlines\n")
    seen: list[object] = []
    monkeypatch.setattr(LLM, "stream", lambda self, prompt, params, **settings: seen.append(prompt) or iter(()))
    for arguments, stdin in ((("two\nlines",), None), (("-f", str(path)), None), ((), "two\nlines\n"), (("-f", "-"), "two\nlines")):
        run("generate", *arguments, "--raw", "-m", model, *ENDLESS, stdin=stdin)
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
    refused("generate", "hi", "-m", str(directory), *ENDLESS, code=1, message="has no chat template; use --raw")
    assert ok("generate", "hi", "--raw", "-m", str(directory), *ENDLESS, "--max-tokens", "3")
    refused("chat", "-m", str(directory), *NUMPY, code=1, message="--raw")


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
