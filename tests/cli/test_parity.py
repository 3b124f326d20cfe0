"""`cpuspec parity`: what it prints, writes and exits with. What its figures mean is tested with the package that makes them."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import command
from tests.processes import interrupt, started, wait_for

FIGURES = {"max_abs_logit_difference", "kl_mean", "kl_max", "same_top", "greedy_identical", "num_identical", "num_prompts"}


@pytest.fixture(scope="module")
def recorded(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("records") / "there.safetensors"
    result = run("numpy", "-m", model, "--record", str(path), "--tokens", "6", "--top", "16", "--draft", "ngram")
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert "has what numpy said" in result.stderr
    return str(path)


run, shown = partial(command.run, "parity"), partial(command.report_of, "parity")


def test_two_backends_are_compared_over_prompts_and_texts(model: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"text": "one two one two"}\n{"text": "three"}\n', "utf-8")
    (tmp_path / "text.txt").write_text("A text of some length. " * 9, "utf-8")
    options = ("--prompts", f"{tmp_path}/prompts.jsonl:text:2", "--text", f"{tmp_path}/text.txt:40", "--tokens", "8")
    report = shown("numpy", "numpy", "-m", model, *options, "--draft", "ngram", "--identical", "--max-kl", "0")
    assert report.keys() >= FIGURES | {"prompts", "model", "files", "a", "b", "computed_from"}
    assert (report["max_abs_logit_difference"], report["kl_max"], report["same_top"], report["exact"]) == (0, 0, 1, True)
    assert (report["greedy_identical"], report["num_identical"], report["num_prompts"]) == (True, 2, 2)
    assert [(one["num_tokens"], one["num_rows"] - one["num_prompt_tokens"]) for one in report["prompts"]] == [
        (8, 8),
        (8, 8),
        (0, 0),
    ]
    for side in (report["a"], report["b"]):
        assert side["tokens_per_s"] > 0
        assert side["drafted"]["num_identical"] == 2
        assert side["drafted"]["levels"]["ngram"]["num_draft_tokens"] > 0


def test_a_record_stands_for_the_backend_that_made_it(model: str, recorded: str) -> None:
    for pair in ((recorded, "numpy"), ("numpy", recorded)):
        report = shown(*pair, "-m", model)
        assert (report["max_abs_logit_difference"], report["same_top"], report["greedy_identical"]) == (0, 1, True)
        assert not report["exact"]
    assert [side["recorded"] for side in (report["a"], report["b"])] == [None, "there.safetensors"]
    assert report["b"]["drafted"]["num_answers"] == 6
    assert report["a"]["drafted"] is None


def test_people_are_told_what_differs_and_what_it_is_computed_from(model: str, recorded: str, tmp_path: Path) -> None:
    arrays = load_file(recorded)
    value = json.loads(arrays["record"].tobytes())
    value["prompts"][0]["answer"]["ids"][3] ^= 1
    changed = tmp_path / "changed.safetensors"
    save_file({**arrays, "record": np.frombuffer(json.dumps(value).encode(), np.uint8)}, changed)
    result = run(str(changed), "numpy", "-m", model)
    assert result.exit_code == 0
    for wanted in (
        "5 of 6 identical",
        "prompt 1 parts at token 4 of 6",
        "at least",
        "every logit of 2 rows",
        "ngram:",
        "numpy (changed.safetensors) (the reference) and numpy",
        "5 of 6 answers identical to plain ones",
    ):
        assert wanted in result.stdout
    assert run(str(changed), "numpy", "-m", model, "--identical").exit_code == 1


@pytest.mark.parametrize(
    ("options", "failure"),
    [(("--max-kl", "0"), "kl_mean"), (("--max-difference", "0"), "max_abs"), (("--min-same-top", "1"), "same_top")],
)
def test_a_limit_that_is_not_kept_exits_with_1_and_is_named(
    model: str, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], failure: str
) -> None:
    from cpuspec.backends import numpy_backend

    forward, count = numpy_backend.NumpyBackend.forward, iter(range(10**6))

    def noisy(self: Any, batch: Any, cache: Any) -> Any:
        output = forward(self, batch, cache)
        output.logits[:, next(count) % 7] += 9
        return output

    monkeypatch.setattr(numpy_backend.NumpyBackend, "forward", noisy)
    result = run("numpy", "numpy", "-m", model, "--tokens", "4", *options)
    assert result.exit_code == 1
    assert f"NOT KEPT: {failure}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("abacus", "numpy"), "'abacus' does not exist"),
        (("numpy:threads=many", "numpy"), "threads in 'numpy:threads=many'"),
        (("numpy:cuda", "numpy"), "device cuda is a setting of the torch backend"),
        (("numba:activations=f32", "numpy"), "activations f32 is a setting of the onnxruntime, openvino and numpy backends"),
        (("onnxruntime:activations=int4", "numpy"), "activations must be one of auto, int8, f32"),
        (("numpy:speed=9", "numpy"), "SETTING=VALUE"),
        (("numpy:threads=1,", "numpy"), "SETTING=VALUE"),
        (("numpy:kv_format=q4_0", "numpy"), "f32, f16, bf16, int8, int4"),
        (("numpy",), "nothing to compare with"),
        (("RECORD",), "nothing to compare with"),
        (("RECORD", "numpy", "--record", "x.safetensors"), "is a record already"),
        (("RECORD", "numpy", "--tokens", "3"), "the record's own"),
        (("numpy", "numpy", "--record", "no/such/directory/x.safetensors"), "directory that exists"),
        (("numpy", "numpy", "--draft", "telepathy"), "telepathy"),
        (("numpy", "numpy", "--prompts", "x"), "FILE:FIELD:COUNT"),
        (("numpy", "numpy", "--text", "x:many"), "FILE:TOKENS"),
        (("gone.json", "numpy"), "gone.json does not exist"),
        (("MODEL", "numpy"), "not safetensors"),
    ],
)
def test_what_cannot_be_compared_says_why(model: str, recorded: str, arguments: tuple[str, ...], wanted: str) -> None:
    stands_for = {"RECORD": recorded, "MODEL": model}
    given = (stands_for.get(one, one) for one in arguments)
    command.refused("parity", *given, "-m", model, code=(1, 2), message=wanted)


def test_ctrl_c_ends_it_with_130_and_no_half_record(model: str, tmp_path: Path) -> None:
    options = ("numpy", "-m", model, "--record", str(tmp_path / "x.safetensors"), "--tokens", "400")
    with started("parity", *options) as process:
        wait_for(process.stderr, b"recording numpy")
        interrupt(process)
        out, errors = process.communicate()
    assert (process.returncode, out) == (130, b"")
    assert b"interrupted" in errors
    assert b"Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
