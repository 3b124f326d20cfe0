"""`cpuspec train` and `cpuspec extract`: from prompts to samples, heads, models and adapters, and what wrong usage says."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.gguf_file import read_gguf
from cpuspec.cli.app import app
from cpuspec.train.loop import read_log
from cpuspec.train.samples import SampleSet, open_samples
from tests.backends.models import tiny as backends_tiny
from tests.heads import make_eagle3
from tests.processes import interrupt, started
from tests.train.models import tiny
from tests.train.toy import SMALL, make_samples

QUICK = ("--threads", "1")
ASKED = ("--temperatures", "0.9,1", "--max-answer-tokens", "16", *QUICK)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny(tmp_path_factory.mktemp("model")).path)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    texts = [f"the {number} of the {7 * number} things that they have" for number in range(9)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUSPEC_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments: str | Path) -> Any:
    return invoke(list(map(str, arguments)))


def invoke(arguments: list[str]) -> Any:
    return CliRunner().invoke(app, arguments, prog_name="cpuspec")


def test_states_are_kept_while_a_model_answers(prompts: str, tmp_path: Path) -> None:
    model, out, states = tiny(tmp_path, num_layers=7).path, tmp_path / "answers.jsonl", tmp_path / "states"
    asked = ("train", "answers", model, prompts, out, "--states", states, "--top", "3", *ASKED)
    assert run(*asked).exit_code == 0
    kept = open_samples(states)
    assert (kept.about.layers, kept.about.top, len(kept)) == ((1, 2, 3), 3, len(out.read_text().splitlines()))
    again = json.loads(run("extract", model, out, states, "--layers", "1,2,3", "--top", "3", "--json", *QUICK).stdout)
    assert (again["num_kept"], again["num_new_tokens"]) == (len(kept), 0)
    result = run(*asked[:-2], "--top", "4", *QUICK)
    assert result.exit_code == 1
    assert "has samples with top 3, and this run has 4" in result.stderr


def test_prompts_become_samples(model: str, prompts: str, tmp_path: Path) -> None:
    out, tasks, samples = (tmp_path / name for name in ("answers.jsonl", "tasks.jsonl", "samples"))
    tasks.write_text(json.dumps({"prompt": "the 3 of the 21 things that they have"}) + "\n")
    asked = ("train", "answers", model, prompts, out, "--self-made", "4", "--exclude", tasks, *ASKED)
    result = run(*asked)
    assert result.exit_code == 0, result.output
    assert "compared with tasks.jsonl (1 texts, 1 runs of words): 1 refused" in result.stderr
    assert "refused prompts.jsonl:4 (prompt): tasks.jsonl has 'the 3 of the 21 things that they have'" in result.stderr
    content = out.read_bytes()
    report = json.loads(run(*asked, "--json").stdout)
    assert out.read_bytes() == content
    assert report["num_kept"] > 0
    assert [one["id"] for one in report["refused"]] == ["prompts.jsonl:4"]
    assert report["num_answer_tokens"] == sum(len(json.loads(line)["answer_ids"]) for line in content.splitlines())

    asked = ("extract", model, out, samples, "--layers", "0,last,final", "--top", "3", *QUICK)
    result = run(*asked)
    assert result.exit_code == 0, result.output
    found = open_samples(samples)
    assert (found.about.layers, found.about.top, found.about.dtype) == ((0, 2, "final"), 3, "bf16")
    assert len(found) == len(content.splitlines())
    assert found.num_answer_tokens == report["num_answer_tokens"]
    again = json.loads(run(*asked, "--json").stdout)
    assert (again["num_kept"], again["num_samples"], again["num_new_tokens"]) == (len(found), len(found), 0)


def test_ctrl_c_ends_a_run_with_whole_lines(model: str, tmp_path: Path) -> None:
    prompts, out, waited = tmp_path / "many.jsonl", tmp_path / "answers.jsonl", threading.Event()
    prompts.write_text("".join(json.dumps({"ids": [5 + number % 300, 7, number // 300 + 5]}) + "\n" for number in range(50_000)))
    with started("train", "answers", model, str(prompts), str(out), *ASKED) as process:
        while process.poll() is None and not (out.exists() and out.stat().st_size):
            waited.wait(0.05)
        interrupt(process)
        told = process.communicate()[1].decode()
    assert (process.returncode, "interrupted: the same command continues from here" in told) == (130, True), told
    content = out.read_bytes()
    assert content.endswith(b"\n")
    assert all(json.loads(line)["answer_ids"] for line in content.splitlines())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("train", "answers", "MODEL", "OUT"), 2, "nothing to answer"),
        (("train", "answers", "MODEL", "nowhere.jsonl", "OUT"), 2, "nowhere.jsonl is not a file"),
        (("train", "answers", "MODEL", "PROMPTS", "OUT", "--exclude", "nowhere.jsonl"), 2, "nowhere.jsonl is not a file"),
        (("train", "answers", "MODEL", "PROMPTS", "OUT", "--temperatures", "hot"), 2, "numbers with commas"),
        (("train", "answers", "MODEL", "PROMPTS", "OUT", "--part", "2"), 2, "--part takes I/N"),
        (("train", "answers", "MODEL", "PROMPTS", "OUT", "--part", "3/2"), 2, "no part 3 of 2"),
        (("train", "auto", "MODEL", "OUT", "--answers", "nowhere.jsonl"), 2, "nowhere.jsonl is not a file"),
        (("train", "auto", "MODEL", "OUT", "--answers", "PROMPTS", "--prompts", "PROMPTS"), 2, "--answers are there already"),
        (("train", "answers", "MODEL", "PROMPTS", "OUT", "--temperatures", "1,1"), 2, "different numbers"),
        (("train", "answers", "MODEL", "PROMPTS", "OUT", "--max-prompt-tokens", "100000"), 1, "at most 1024"),
        (("train", "answers", "MODEL", "OUT", "--functions", "no_such_package"), 1, "no installed package"),
        (("train", "answers", "no-such-model", "PROMPTS", "OUT"), 1, "no-such-model"),
        (("extract", "MODEL", "PROMPTS", "OUT", "--layers", "3"), 2, "there is no layer '3'"),
        (("extract", "MODEL", "PROMPTS", "OUT", "--dtype", "f64"), 2, "bf16, f32, int8"),
        (("extract", "MODEL", "nowhere.txt", "OUT"), 2, "nowhere.txt is not a file"),
        (("extract", "MODEL", "PROMPTS", "OUT", "--max-length", "100000"), 1, "1024 tokens, the model's context"),
        (("extract", "MODEL", "PROMPTS", "OUT", "--top", "1000000"), 1, "got 1000000"),
        (("extract", "no-such-model", "PROMPTS", "OUT"), 1, "no-such-model"),
        (("extract", "MODEL", "OUT"), 2, "Missing argument"),
        (("train", "export", "MODEL", "HEAD", "out.safetensors"), 2, "does not end with .gguf"),
        (("train", "export", "MODEL", "HEAD", "out.gguf", "--type", "q9"), 2, "there is no --type 'q9'"),
        (("train", "export", "MODEL", "EMPTY", "out.gguf"), 2, "is not a draft head"),
        (("train", "export", "MODEL", "MISSING", "out.gguf"), 2, "MISSING"),
        (("train", "eagle3", "MODEL", "EMPTY", "OUT", "--layers", "one"), 2, "numbers with commas"),
        (("train", "eagle3", "MODEL", "EMPTY", "OUT", "--held-back", "1"), 2, "below 1"),
        (("train", "eagle3", "MODEL", "EMPTY", "OUT", "--dtype", "int3"), 2, "bf16"),
        (("train", "eagle3", "MODEL", "EMPTY", "OUT", "--device", "tpu"), 2, "auto, cpu, cuda"),
        (("train", "eagle3", "MODEL", "EMPTY", "OUT"), 1, "extract.json"),
    ],
)
def test_wrong_usage_says_what_is_wanted(
    model: str, prompts: str, tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    stand_for = {"MODEL": model, "PROMPTS": prompts, **{name: str(tmp_path / name) for name in ("OUT", "EMPTY", "HEAD")}}
    (tmp_path / "EMPTY").mkdir()
    if "HEAD" in arguments:
        make_eagle3(tmp_path / "HEAD", open_checkpoint(model).config)
    result = run(*(stand_for.get(one, one) for one in arguments))
    told = "".join(result.output.replace("│", " ").split())  # a line may end within a path
    assert (result.exit_code, said.replace(" ", "") in told) == (code, True), result.output
    assert "Traceback" not in result.output


# ------------------------------------------------------------------------------------------------------- heads, models and adapters


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return backends_tiny(tmp_path_factory, weight_format="f32", **SMALL)


@pytest.fixture(scope="module")
def samples(target: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return make_samples(tmp_path_factory.mktemp("samples"), target, 12, top=4)


SMALL_RUN = ("--vocab", "64", "--epochs", "1", "--batch-tokens", "128", "--held-back", "0.2", "--threads", "1")


@pytest.mark.parametrize("command", [["eagle3", "--steps", "2"], ["mtp", "--steps", "2"]])
def test_a_head_is_trained_and_reported(target: Checkpoint, samples: SampleSet, tmp_path: Path, command: list[str]) -> None:
    out = tmp_path / "head"
    arguments = ["train", command[0], str(target.path), str(samples.path), str(out), *command[1:], *SMALL_RUN]
    done = invoke([*arguments, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["log"] == [line._asdict() for line in read_log(out)]
    assert told["best"]["mean_length"] == max(line["mean_length"] for line in told["log"])
    assert (out / "config.json").exists()
    assert "tokens a forward on held-back samples" in done.stderr
    again = invoke(arguments)
    assert again.exit_code == 0, "a finished run is told again"
    other = invoke([*arguments, "--lr", "1"])
    assert other.exit_code == 1
    assert "other settings" in other.stderr


@pytest.mark.parametrize("more", [[], ["--no-tokenizer"]])
def test_a_head_is_exported_as_gguf_and_drafts(target: Checkpoint, tmp_path: Path, more: list[str]) -> None:
    made, out = make_eagle3(tmp_path / "head", target.config), tmp_path / "head.gguf"
    done = invoke(["train", "export", str(target.path), str(made.path), str(out), "--type", "bf16", *more])
    assert done.exit_code == 0, done.output
    assert "head.gguf has" in done.stderr
    assert (b"tokenizer.ggml.tokens" in out.read_bytes()) == (not more)
    drafted = invoke(["generate", "-m", str(target.path), "--draft", str(out), "--max-tokens", "4", "--raw", "text"])
    assert drafted.exit_code == 0, drafted.output
    again = invoke(["train", "export", str(target.path), str(out), str(tmp_path / "again.gguf")])
    assert again.exit_code == 0, again.output
    first, second = read_gguf(out).tensors, read_gguf(tmp_path / "again.gguf").tensors
    assert first.keys() == second.keys()
    assert all(one.format == second[name].format and (one.data == second[name].data).all() for name, one in first.items())
    assert b"tokenizer.ggml.tokens" in (tmp_path / "again.gguf").read_bytes(), "which llama.cpp wants"


def test_a_model_is_distilled_from_a_file_of_answers(target: Checkpoint, tmp_path: Path) -> None:
    lines = [
        {
            "id": str(i),
            "source": "s",
            "temperature": 0.0,
            "prompt_ids": [300, 301],
            "answer_ids": [30 + (i + j) % 9 for j in range(20)],
        }
        for i in range(8)
    ]
    answers, out = tmp_path / "answers.jsonl", tmp_path / "out"
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["train", "distill", str(target.path), str(answers), str(out), "--epochs", "1", "--threads", "1", "--json"]
    done = invoke(arguments)
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["best"]["accepted"]) == 4
    assert (out / "model.gguf").exists()
    lora = tmp_path / "lora"
    adapter = [*arguments[:4], str(lora), *arguments[5:], "--lora", "2", "--lora-alpha", "8", "--lora-targets", "q_proj,v_proj"]
    done = invoke(adapter)
    assert done.exit_code == 0, done.output
    config = json.loads((lora / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 8.0, ["q_proj", "v_proj"])
    generate = ["generate", "-m", str(target.path), "--lora", str(lora), "--max-tokens", "4", "--raw", "text"]
    assert invoke(generate).exit_code == 0
    merged = invoke(["quantize", str(target.path), str(tmp_path / "merged.gguf"), "--type", "f32", "--lora", str(lora)])
    assert merged.exit_code == 0, merged.output
    done = invoke([*arguments, "--lora-targets", "q_proj"])
    assert done.exit_code == 2
    assert "--lora-targets are of an adapter" in " ".join(done.stderr.replace("│", " ").split())
    answers.write_text("")
    done = invoke(arguments)
    assert done.exit_code == 1
    assert "has no answers" in done.stderr
