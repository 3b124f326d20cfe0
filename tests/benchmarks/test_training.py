"""What is noted of a training is what its log says."""

import json

import pytest
import training
from typer import Typer
from typer.testing import CliRunner

APP = Typer()
APP.command()(training.main)


def measured(step: int, tokens: int, seconds: float, accepted: list[float]) -> dict:
    told = {"step": step, "epoch": step / 10, "tokens": tokens, "seconds": seconds, "rate": 0.1, "loss": None}
    return told | {"accepted": accepted, "said": [], "mean_length": 1 + sum(accepted)}


def test_what_the_log_says_is_noted(tmp_path):
    log = [measured(0, 0, 0.0, [0.0]), measured(20, 4000, 90.0, [0.5])]
    (tmp_path / "my-head/training").mkdir(parents=True)
    (tmp_path / "my-head/training/log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    done = CliRunner().invoke(APP, ["a-model", str(tmp_path / "my-head"), "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    assert "my-head: [0.5] after 4000 tokens, 1.5 minutes" in done.stdout
    told = json.loads((tmp_path / "out.json").read_text())
    assert (told["benchmark"], told["model"]) == ("training", "a-model")
    assert told["trainings"] == {"my-head": {"tokens": 4000, "epochs": 2.0, "minutes": 1.5, "log": log}}


@pytest.mark.parametrize("log", [None, "", "no line of a log\n"])
def test_a_head_without_a_sound_log_is_refused(tmp_path, log):
    (tmp_path / "head/training").mkdir(parents=True)
    if log is not None:
        (tmp_path / "head/training/log.jsonl").write_text(log)
    done = CliRunner().invoke(APP, ["a-model", str(tmp_path / "head")])
    assert done.exit_code == 1
    assert "error: " in done.stderr
