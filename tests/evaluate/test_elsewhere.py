"""Results of other engines, in the shapes that they write, become one form with prices."""

import json
from pathlib import Path
from typing import Any

import pytest

from cpuspec.errors import ConfigError
from cpuspec.evaluate.elsewhere import Run, read_runs

LLAMA_BENCH = [
    {
        **{"build_number": 11434, "cpu_info": "AMD EPYC", "gpu_info": "", "backends": "CPU"},
        **{"model_filename": "/models/qwen.gguf", "n_prompt": 512, "n_gen": 0, "avg_ns": 1, "avg_ts": 80.5, "stddev_ts": 1},
    },
    {
        **{"build_number": 11434, "cpu_info": "AMD EPYC", "gpu_info": "", "model_filename": "x", "n_prompt": 0},
        **{"n_gen": 128, "avg_ts": 20.0},
    },
]
BENCH_SERVE = {
    **{"date": "20261122-120000", "backend": "vllm", "model_id": "Qwen/Qwen2.5-Coder-1.5B", "num_prompts": 100},
    **{"request_rate": "inf", "duration": 10.0, "completed": 100, "output_throughput": 1280.0, "mean_ttft_ms": 99.0},
    **{"median_ttft_ms": 50.0, "median_tpot_ms": 10.0},
    "spec_decode_acceptance_rate": 60.0,  # accepted / drafted * 100 (vllm/benchmarks/serve.py)
}
COST = {
    **{"num_draft_tokens": 40, "num_accepted_tokens": 30, "duration_s": 20.0, "tokens_per_s": 12.5},
    **{"decode_tokens_per_s": 14.0, "ttft_s": {"p50": 0.25}, "tpot_s": {"p50": 0.07}},
}
TASK = {
    **{"benchmark": "task", "task": "humaneval", "form": "raw", "backend": "numba", "model": "m", "processor": "p"},
    **{"draft": "auto", "num_passed": 4, "pass@1": 0.4, "cost": COST},
}


def read(tmp_path: Path, value: Any, price: float | None = None) -> list[Run]:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(value), "utf-8")
    return read_runs(path, price)


def test_llama_bench_has_prefill_and_decode(tmp_path: Path) -> None:
    (run,) = read(tmp_path, LLAMA_BENCH, 0.72)
    assert (run.engine, run.model, run.machine, run.what) == ("llama.cpp 11434", "qwen.gguf", "AMD EPYC", "pp512, tg128")
    assert (run.prefill_tokens_per_s, run.decode_tokens_per_s, run.tokens_per_s) == (80.5, 20.0, None)
    assert run.price_per_million == pytest.approx(0.72 / 3600 / 20 * 1e6)
    (on_gpu,) = read(tmp_path, [LLAMA_BENCH[1] | {"gpu_info": "H200"}])
    assert (on_gpu.machine, on_gpu.prefill_tokens_per_s) == ("H200", None)


def test_vllm_bench_serve_has_latencies_throughput_and_acceptance(tmp_path: Path) -> None:
    (run,) = read(tmp_path, BENCH_SERVE, 2.5)
    assert (run.engine, run.model, run.tokens_per_s) == ("vllm", "Qwen/Qwen2.5-Coder-1.5B", 1280.0)
    assert (run.ttft_s, run.tpot_s, run.decode_tokens_per_s, run.acceptance) == (0.05, 0.01, 100.0, 0.6)
    assert run.price_per_million == pytest.approx(2.5 / 3600 / 1280 * 1e6)
    (ours,) = read(tmp_path, BENCH_SERVE | {"total_draft_tokens": 10, "total_accepted_draft_tokens": 9, "median_ttft_ms": None})
    assert ours.acceptance == 0.9
    assert ours.ttft_s is None


def test_a_task_of_ours_has_quality_and_the_price_of_a_right_answer(tmp_path: Path) -> None:
    (run,) = read(tmp_path, TASK, 0.36)
    assert (run.engine, run.quality, run.acceptance, run.seconds_per_answer) == ("cpuspec numba", 0.4, 0.75, 5.0)
    assert run.price_per_answer == pytest.approx(0.36 / 3600 * 5)
    (none_right,) = read(tmp_path, TASK | {"num_passed": 0}, 0.36)
    assert none_right.price_per_answer is None


def test_arms_are_runs_of_their_own(tmp_path: Path) -> None:
    task = {"task": "gsm8k", "form": "chat", "num_passed": 1, "pass@1": 0.1, "cost": COST}
    arms = [{"arm": arm, "draft": "none", "tasks": [task]} for arm in ("baseline", "quantized")]
    runs = read(tmp_path, {"benchmark": "arms", "backend": "numba", "model": "m", "processor": "p", "arms": arms})
    assert [run.what for run in runs] == ["gsm8k, chat, baseline, drafts none", "gsm8k, chat, quantized, drafts none"]


def test_plain_figures_are_taken_as_they_are(tmp_path: Path) -> None:
    (run,) = read(tmp_path, {"engine": "transformers", "model": "m", "machine": "A100", "decode_tokens_per_s": 30, "ttft_s": 0.1})
    assert (run.engine, run.machine, run.decode_tokens_per_s, run.ttft_s, run.quality) == ("transformers", "A100", 30.0, 0.1, None)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "no result that is known"),
        ({}, "no result that is known"),
        ({"engine": "x"}, "no result that is known"),
        ([{"avg_ts": "fast", "n_prompt": 0, "n_gen": 1}], "shape"),
        (BENCH_SERVE | {"output_throughput": None}, "shape"),
        ({"benchmark": "task"}, "shape"),
        ({"engine": "x", "ttft_s": "soon"}, "shape"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, value)
    with pytest.raises(ConfigError, match="not exist"):
        read_runs(tmp_path / "gone.json")
