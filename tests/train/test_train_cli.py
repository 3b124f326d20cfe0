"""The commands that train heads."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.gguf_file import read_gguf
from cpuspec.cli.app import app
from cpuspec.train.loop import read_log
from cpuspec.train.samples import SampleSet
from tests.backends.models import tiny
from tests.heads import make_eagle3
from tests.train.toy import SMALL, make_samples

RUN = CliRunner()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny(tmp_path_factory, weight_format="f32", **SMALL)


@pytest.fixture(scope="module")
def samples(target: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return make_samples(tmp_path_factory.mktemp("samples"), target, 12, top=4)


SMALL_RUN = ("--vocab", "64", "--epochs", "1", "--batch-tokens", "128", "--held-back", "0.2", "--threads", "1")


@pytest.mark.parametrize("command", [["eagle3", "--steps", "2"], ["mtp", "--steps", "2"]])
def test_a_head_is_trained_and_reported(target: Checkpoint, samples: SampleSet, tmp_path: Path, command: list[str]) -> None:
    out = tmp_path / "head"
    arguments = ["train", command[0], str(target.path), str(samples.path), str(out), *command[1:], *SMALL_RUN]
    done = RUN.invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["log"] == [line._asdict() for line in read_log(out)]
    assert told["best"]["mean_length"] == max(line["mean_length"] for line in told["log"])
    assert (out / "config.json").exists()
    assert "tokens a forward on held-back samples" in done.stderr
    again = RUN.invoke(app, arguments)
    assert again.exit_code == 0, "a finished run is told again"
    other = RUN.invoke(app, [*arguments, "--lr", "1"])
    assert other.exit_code == 1
    assert "other settings" in other.stderr


@pytest.mark.parametrize("more", [[], ["--no-tokenizer"]])
def test_a_head_is_exported_as_gguf_and_drafts(target: Checkpoint, tmp_path: Path, more: list[str]) -> None:
    made, out = make_eagle3(tmp_path / "head", target.config), tmp_path / "head.gguf"
    done = RUN.invoke(app, ["train", "export", str(target.path), str(made.path), str(out), "--type", "bf16", *more])
    assert done.exit_code == 0, done.output
    assert "head.gguf has" in done.stderr
    assert (b"tokenizer.ggml.tokens" in out.read_bytes()) == (not more)
    drafted = RUN.invoke(app, ["generate", "-m", str(target.path), "--draft", str(out), "--max-tokens", "4", "--raw", "text"])
    assert drafted.exit_code == 0, drafted.output
    again = RUN.invoke(app, ["train", "export", str(target.path), str(out), str(tmp_path / "again.gguf")])
    assert again.exit_code == 0, again.output
    first, second = read_gguf(out).tensors, read_gguf(tmp_path / "again.gguf").tensors
    assert first.keys() == second.keys()
    assert all(one.format == second[name].format and (one.data == second[name].data).all() for name, one in first.items())
    assert b"tokenizer.ggml.tokens" in (tmp_path / "again.gguf").read_bytes(), "which llama.cpp wants"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["HEAD", "out.safetensors"], "does not end with .gguf"),
        (["HEAD", "out.gguf", "--type", "q9"], "there is no --type 'q9'"),
        (["EMPTY", "out.gguf"], "is not a draft head"),
        (["MISSING", "out.gguf"], "MISSING"),
    ],
)
def test_what_cannot_be_exported_is_wrong_usage(target: Checkpoint, tmp_path: Path, arguments: list[str], told: str) -> None:
    (tmp_path / "EMPTY").mkdir()
    make_eagle3(tmp_path / "HEAD", target.config)
    head, out, *options = arguments
    done = RUN.invoke(app, ["train", "export", str(target.path), str(tmp_path / head), str(tmp_path / out), *options])
    assert done.exit_code == 2
    assert told.replace(" ", "") in "".join(done.stderr.replace("│", " ").split()), "a line may end within a path"


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
    done = RUN.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["best"]["accepted"]) == 4
    assert (out / "model.gguf").exists()
    lora = tmp_path / "lora"
    adapter = [*arguments[:4], str(lora), *arguments[5:], "--lora", "2", "--lora-alpha", "8", "--lora-targets", "q_proj,v_proj"]
    done = RUN.invoke(app, adapter)
    assert done.exit_code == 0, done.output
    config = json.loads((lora / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 8.0, ["q_proj", "v_proj"])
    generate = ["generate", "-m", str(target.path), "--lora", str(lora), "--max-tokens", "4", "--raw", "text"]
    assert RUN.invoke(app, generate).exit_code == 0
    merged = RUN.invoke(app, ["quantize", str(target.path), str(tmp_path / "merged.gguf"), "--type", "f32", "--lora", str(lora)])
    assert merged.exit_code == 0, merged.output
    done = RUN.invoke(app, [*arguments, "--lora-targets", "q_proj"])
    assert done.exit_code == 2
    assert "--lora-targets are of an adapter" in " ".join(done.stderr.replace("│", " ").split())
    answers.write_text("")
    done = RUN.invoke(app, arguments)
    assert done.exit_code == 1
    assert "has no answers" in done.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--layers", "one"], "numbers with commas"),
        (["--held-back", "1"], "below 1"),
        (["--dtype", "int3"], "bf16"),
        (["--device", "tpu"], "auto, cpu, cuda"),
    ],
)
def test_options_that_make_no_sense_are_wrong_usage(
    target: Checkpoint, samples: SampleSet, tmp_path: Path, options: list[str], told: str
) -> None:
    done = RUN.invoke(app, ["train", "eagle3", str(target.path), str(samples.path), str(tmp_path / "head"), *options])
    assert done.exit_code == 2
    assert told in done.stderr


def test_a_directory_without_samples_is_told(target: Checkpoint, tmp_path: Path) -> None:
    done = RUN.invoke(app, ["train", "eagle3", str(target.path), str(tmp_path), str(tmp_path / "head")])
    assert done.exit_code == 1
    assert "extract.json" in done.stderr
