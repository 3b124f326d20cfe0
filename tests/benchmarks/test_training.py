"""What is noted of a training is what its log says."""

import json

import training


def line(step: int, tokens: int, seconds: float, accepted: list[float]) -> dict:
    told = {"step": step, "epoch": step / 10, "tokens": tokens, "seconds": seconds, "rate": 0.1, "loss": None}
    return told | {"accepted": accepted, "said": [], "mean_length": 1 + sum(accepted), "sharpness": 1.0}


def test_what_the_log_says_is_noted(tmp_path, measured):
    log = [line(0, 0, 0.0, [0.0]), line(20, 4000, 90.0, [0.5])]
    (tmp_path / "my-head/training").mkdir(parents=True)
    (tmp_path / "my-head/training/log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in log))
    told, done = measured(training.main, "a-model", tmp_path / "my-head")
    assert "my-head: [0.5] after 4000 tokens, 1.5 minutes" in done.stdout
    assert (told["benchmark"], told["model"]) == ("training", "a-model")
    assert told["trainings"] == {"my-head": {"tokens": 4000, "epochs": 2.0, "minutes": 1.5, "log": log}}
