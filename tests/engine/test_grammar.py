"""Answers that keep to a grammar, through the engine: the same whatever is drafted, whole unless a limit cuts them off."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from cpuspec.backends import has_prompt_arithmetic
from cpuspec.engine.engine import Output, RequestedAnswer
from cpuspec.engine.llm import LLM
from cpuspec.errors import ConfigError, CpuspecError
from cpuspec.settings import EngineConfig, SamplingParams
from cpuspec.text import GrammarConstraint
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
SCHEMA = {
    "type": "object",
    "properties": {
        "name_of_the_house": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "has_a_door": {"type": "boolean"},
    },
    "required": ["name_of_the_house", "size", "has_a_door"],
    "additionalProperties": False,
}
ITEMS = r"((the|a) (cat|dog|house) (sat|ran)\. ){2,4}the end"


def is_of_schema(text: str) -> bool:
    found = json.loads(text)
    kinds = [str, int, bool]
    return list(found) == SCHEMA["required"] and [type(one) for one in found.values()] == kinds and 0 <= found["size"] <= 999


SETTINGS: dict[str, tuple[dict[str, Any], Any]] = {  # with a check of the text
    "json_schema": ({"json_schema": SCHEMA}, is_of_schema),
    "regex": ({"regex": ITEMS}, lambda text: re.fullmatch(ITEMS, text)),
    "choices": ({"choices": ["the house", "the cat sat", "a dog"]}, lambda text: text in ("the house", "the cat sat", "a dog")),
    "grammar": (
        {"grammar": 'root ::= "return " word (" + " word){1,3}\nword ::= "true" | "false" | [a-c]{2,5}'},
        lambda text: re.fullmatch(r"return (true|false|[a-c]{2,5})( \+ (true|false|[a-c]{2,5})){1,3}", text),
    ),
}
every_setting = pytest.mark.parametrize("name", SETTINGS)
PROMPT = 'the dog ran to the door. {"name_of_the_house": "the cat", "size": 12, "has_a_door": true} return true + abc'


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "gguf": str(make_tiny_gguf(root / "tiny.gguf", context_length=1024, seed=1, **SMALL)),
        "other": str(make_tiny_gguf(root / "other.gguf", context_length=1024, seed=2, **SMALL)),
        "hf": str(make_tiny_hf(root / "llama", "llama", context_length=1024, **SMALL)),
    }


@pytest.fixture(scope="module")
def plain(files: dict[str, str]) -> Iterator[LLM]:
    with LLM(files["gguf"], "none", settings=EngineConfig(keep_packed=False)) as llm:
        yield llm


# Chains of drafters; tests/conformance/test_drafters.py has each drafter.
SPECS = ("suffix:tree@20", "ngram,skip:1@2,self:mxfp4@4", "suffix@3+self:mxfp4@2", "suffix:tree,{other}@3,self:mxfp4@4:0.3", "auto")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 4},
    "penalised": {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.2, "seed": 5},
}


@pytest.mark.parametrize(  # each draft in one way, and one in all
    ("spec", "how"),
    dict.fromkeys([*zip(SPECS, cycle(WAYS), strict=False), *(("auto", how) for how in WAYS)]),
)
def test_answers_are_the_same_with_and_without_drafts(spec: str, how: str, files: dict[str, str], plain: LLM) -> None:
    """Greedy or of a seed, with and without a grammar, all in one batch."""
    free = SamplingParams(max_tokens=20, **WAYS[how])
    requests = [replace(free, max_tokens=90, **settings) for settings, _ in SETTINGS.values()] + [free]
    expected = [plain.generate(PROMPT, one, max_draft_tokens=0)[0] for one in requests]
    with LLM(files["gguf"], spec.format(**files), settings=EngineConfig(keep_packed=False)) as llm:
        answers = llm.generate([PROMPT] * len(requests), requests)  # in one batch
    for answer, wanted, (_, is_valid) in zip(answers, expected, [*SETTINGS.values(), ({}, str)], strict=True):
        assert answer.token_ids == wanted.token_ids
        assert answer.text == wanted.text
        assert answer.finish_reason == wanted.finish_reason
        assert answer.finish_reason == "length" or is_valid(answer.text)
    assert sum(answer.finish_reason == "stop" for answer in answers) >= 3


@pytest.mark.parametrize("spec", ["ngram:tree", "ngram,skip:1@2,self:mxfp4@4", "text:{other}@6", "auto"])
def test_drafts_change_nothing_where_a_part_of_the_answer_is_free(spec: str, files: dict[str, str], plain: LLM) -> None:
    trigger = plain.tokenizer.token_id("<|im_start|>")
    assert trigger is not None
    for bias, seed in ((3, 1), (6, 2)):
        params = SamplingParams(
            max_tokens=80,
            regex="the (cat|dog) (sat|ran)[.]",
            grammar_trigger="<|im_start|>",
            logit_bias={trigger: bias},
            temperature=0,
            seed=seed,
        )
        (wanted,) = plain.generate(PROMPT, params, max_draft_tokens=0)
        with LLM(files["gguf"], spec.format(**files), settings=EngineConfig(keep_packed=False)) as llm:
            assert llm.generate(PROMPT, params)[0].token_ids == wanted.token_ids


def test_an_answer_has_its_least_tokens(plain: LLM) -> None:
    least = SamplingParams(max_tokens=40, min_tokens=12, logit_bias=dict.fromkeys(plain.tokenizer.eos_ids, 100.0))
    requests = [
        least,
        replace(least, temperature=1.2, seed=3),
        replace(least, logit_bias={}, stop=(" ", "e", "a"), ignore_eos=True),
        replace(least, regex=r"(the cat ){1,9}[.]"),
        replace(least, min_tokens=30, regex="the cat"),  # nothing but the end can follow
    ]
    answers = plain.generate([PROMPT] * len(requests), requests)
    assert [len(one.token_ids) for one in answers[:2]] == [13, 13]
    assert len(answers[2].token_ids) >= 12
    assert len(answers[3].token_ids) >= 12 or answers[3].text.endswith(".")
    assert answers[4].text == "the cat"


@every_setting
@pytest.mark.parametrize("temperature", [0, 1.3])
@pytest.mark.parametrize("vocabulary", ["gguf", "hf"])
def test_every_whole_answer_is_a_text_of_the_grammar(
    vocabulary: str, temperature: float, name: str, files: dict[str, str], plain: LLM
) -> None:
    settings, is_valid = SETTINGS[name]
    with LLM(files[vocabulary], "suffix", settings=EngineConfig(keep_packed=False)) as llm:
        answers = llm.generate([PROMPT] * 4, max_tokens=200, temperature=temperature, seed=1, **settings)
    for answer in answers:
        assert answer.finish_reason == "stop"
        assert is_valid(answer.text)


@every_setting
def test_forced_tokens_save_forwards_and_change_nothing(name: str, plain: LLM) -> None:
    for temperature in (0, 1.0):
        params = SamplingParams(max_tokens=120, temperature=temperature, seed=5, **SETTINGS[name][0])
        (jumps,), (none,) = plain.generate(PROMPT, params), plain.generate(PROMPT, params, max_draft_tokens=0)
        assert jumps.token_ids == none.token_ids
        num_forced = jumps.stats.levels["grammar"].num_accepted_tokens
        # The last forward's own token is behind the end where forced tokens lead there. Those that follow the prompt have a forward
        # of their own where prompts are computed in another arithmetic.
        least = num_forced - 1 - has_prompt_arithmetic(plain.backend)
        assert least <= none.stats.num_forwards - jumps.stats.num_forwards <= num_forced
        assert jumps.stats.num_forwards < none.stats.num_forwards
        assert jumps.stats.levels["grammar"].accepted_per_proposed == 1
        assert (jumps.stats.num_draft_tokens, none.stats.levels) == (0, {})


def test_an_answer_that_is_cut_off_ends_by_length_or_by_its_stop_string(plain: LLM) -> None:
    (cut,) = plain.generate(PROMPT, json_schema=SCHEMA, max_tokens=6)
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 6)
    assert cut.text.startswith('{"name')
    (stopped,) = plain.generate(PROMPT, json_schema=SCHEMA, stop="_of", max_tokens=50)
    assert (stopped.finish_reason, stopped.text) == ("stop", '{"name')


def test_an_answer_ends_where_its_grammar_does_without_another_forward(plain: LLM) -> None:
    (answer,) = plain.generate(PROMPT, choices="the house")
    assert (answer.text, answer.finish_reason) == ("the house", "stop")
    # Tokens behind the prompt have a forward of their own where prompts are computed in another arithmetic.
    assert answer.stats.num_forwards == 1 + has_prompt_arithmetic(plain.backend)
    assert not plain.tokenizer.eos_ids & set(answer.token_ids)


def test_a_grammar_that_cannot_be_used_is_refused_before_anything_runs(plain: LLM) -> None:
    for call in (lambda: plain.generate(["a", "b"], regex="("), lambda: plain.check([5], SamplingParams(regex="("))):
        with pytest.raises(ConfigError, match="the regular expression cannot be compiled"):
            call()
    assert not plain.step()


def test_a_grammar_that_leads_nowhere_ends_its_own_request_alone(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    right = GrammarConstraint.legal

    def at_the_limits(self: GrammarConstraint, path: Any) -> Any:
        return None if len(path) >= 3 else right(self, path)

    outputs: list[Output] = []
    monkeypatch.setattr(GrammarConstraint, "legal", at_the_limits)
    broken = SamplingParams(regex="the cat sat on the mat", max_tokens=30)
    ids = plain.tokenizer.encode(PROMPT)
    plain.submit(RequestedAnswer(ids, broken), outputs.append)
    beside: list[Output] = []
    plain.submit(RequestedAnswer(ids, SamplingParams(max_tokens=12, ignore_eos=True)), beside.append)
    while plain.step():
        pass
    assert (outputs[-1].finish_reason, str(outputs[-1].error)) == (
        "error",
        "the grammar leads nowhere here, or is too complex; simplify it",
    )
    assert (beside[-1].finish_reason, beside[-1].error) == ("length", None)
    for call in (lambda: plain.generate(PROMPT, broken), lambda: list(plain.stream(PROMPT, broken))):
        with pytest.raises(CpuspecError, match="leads nowhere"):
            call()


def test_command_line_options_reach_the_grammar(files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from cpuspec.cli.app import app

    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    (schema := tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (grammar := tmp_path / "list.gbnf").write_text('root ::= "return " [a-c]{2,5}')

    def run(*options: str) -> Any:
        return CliRunner().invoke(app, ["generate", PROMPT, "-m", files["gguf"], "--raw", *options])

    assert is_of_schema(run("--json-schema", str(schema)).stdout)
    assert re.fullmatch("return [a-c]{2,5}\n?", run("--grammar", str(grammar)).stdout)
    assert re.fullmatch(f"{ITEMS}\n?", run("--regex", ITEMS).stdout)
    assert run("--choice", "a dog", "--choice", "the cat").stdout.strip() in ("a dog", "the cat")
    for options, message in (
        (("--regex", "("), "cannot be compiled"),
        (("--regex", "a", "--choice", "b"), "one grammar"),
        (("--json-schema", str(tmp_path / "none")), "cannot be read"),
    ):
        result = run(*options)
        assert result.exit_code
        assert message in result.output.replace("\n", " ")
        assert "Traceback" not in result.output
