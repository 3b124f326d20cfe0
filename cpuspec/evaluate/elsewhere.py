"""Reads result files of other engines and of cpuspec into one form, so that they can stand beside each other.

Kinds: llama-bench, vLLM's `bench serve` and `bench latency`, cpuspec's `parity --record`, `bench`, `eval task` and `eval arms`, and
plain figures that a user wrote down, as of transformers: an object with `engine` and some of FIGURES.

Sources: llama.cpp, tools/llama-bench (`-o json`: a list with n_prompt, n_gen, avg_ts); vLLM, `vllm bench serve --save-result` and
`vllm bench latency --output-json`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from cpuspec.errors import ConfigError, in_one_line
from cpuspec.evaluate.parity import Recording
from cpuspec.evaluate.parity_file import FORMAT, read_recording
from cpuspec.files import read_file

_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Run:
    """The figures of one engine on one machine; None is unknown. Rates are tokens per second.

    decode_tokens_per_s: of one sequence. tokens_per_s: new tokens of all requests over the time of the whole run. ttft_s, tpot_s:
    medians, or means where the file has no medians. acceptance: accepted share of the drafted tokens. quality: share of right
    answers. seconds_per_answer: of the whole run, over the right answers.
    """

    source: str
    engine: str
    model: str = "not told"
    machine: str = "not told"
    what: str = ""
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    acceptance: float | None = None
    quality: float | None = None
    seconds_per_answer: float | None = None
    price_per_hour: float | None = None

    @property
    def price_per_million(self) -> float | None:
        """The price of a million new tokens: of all requests together, else of one sequence."""
        rate = self.tokens_per_s or self.decode_tokens_per_s
        return self.price_per_hour / 3600 / rate * 1e6 if self.price_per_hour is not None and rate else None

    @property
    def price_per_answer(self) -> float | None:
        """The price of a right answer."""
        known = self.price_per_hour is not None and self.seconds_per_answer is not None
        return self.price_per_hour / 3600 * self.seconds_per_answer if known else None  # type: ignore[operator]


FIGURES = tuple(one.name for one in fields(Run) if one.default is None and one.name != "price_per_hour")


def read_runs(path: Path, price_per_hour: float | None = None) -> list[Run]:
    """The runs of a file. Raises ConfigError for a file of another kind."""
    try:
        value = json.loads(read_file(path, _MOST_BYTES, ConfigError))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {in_one_line(str(error))}") from None
    try:
        found = _runs(value, path)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(f"{path} has not the shape that its engine writes ({type(error).__name__}: {error})") from None
    return [replace(one, price_per_hour=price_per_hour) for one in found]


def _runs(value: Any, path: Path) -> list[Run]:
    match value:
        case [{"avg_ts": _, "n_prompt": _, "n_gen": _}, *_]:
            return [_llama_bench(value, path.name)]
        case {"output_throughput": _, "completed": _}:
            return [_bench_serve(value, path.name)]
        case {"avg_latency": latency}:
            return [Run(path.name, "vLLM", what=f"bench latency: {float(latency):.3f} s a batch")]
        case {"format": kind} if kind == FORMAT:
            return [_parity(read_recording(path))]
        case {"benchmark": "task"}:
            return [_task(value, path.name)]
        case {"benchmark": "arms", "arms": list(arms)}:
            return [_task({**value, **arm, **task}, path.name, arm["arm"]) for arm in arms for task in arm["tasks"]]
        case {"decode": _, "prefill": _, "processor": str()}:
            return [_bench(value, path.name)]
        case {"engine": str(), **rest} if any(name in rest for name in FIGURES):
            return [_plain(value, path.name)]
    raise ConfigError(
        f"{path} is no result that is known; wanted JSON of llama-bench, vllm bench serve or latency, cpuspec parity --record, "
        f"eval or bench --json, or an object with engine and some of {', '.join(FIGURES)}"
    )


def _llama_bench(rows: list[dict[str, Any]], source: str) -> Run:
    prefill = next((row for row in rows if row["n_gen"] == 0), None)
    decode = next((row for row in rows if row["n_prompt"] == 0), None)
    first = rows[0]
    return Run(
        source,
        f"llama.cpp {first.get('build_number', '')}".strip(),
        Path(str(first.get("model_filename", "not told"))).name,
        str(first.get("gpu_info") or first.get("cpu_info") or "not told"),
        ", ".join(f"{test}{row[count]}" for test, count, row in (("pp", "n_prompt", prefill), ("tg", "n_gen", decode)) if row),
        prefill_tokens_per_s=float(prefill["avg_ts"]) if prefill else None,
        decode_tokens_per_s=float(decode["avg_ts"]) if decode else None,
    )


def _bench_serve(value: Mapping[str, Any], source: str) -> Run:
    def seconds(name: str) -> float | None:
        found = value.get(f"median_{name}_ms", value.get(f"mean_{name}_ms"))
        return None if found is None else float(found) / 1e3

    drafted, taken = value.get("total_draft_tokens"), value.get("total_accepted_draft_tokens")
    acceptance = taken / drafted if drafted and taken is not None else value.get("spec_decode_acceptance_rate")
    tpot_s = seconds("tpot")
    return Run(
        source,
        str(value.get("backend", "not told")),
        str(value.get("model_id", "not told")),
        what=f"{value['completed']} requests at {value.get('request_rate', 'inf')} a second",
        decode_tokens_per_s=1 / tpot_s if tpot_s else None,
        tokens_per_s=float(value["output_throughput"]),
        ttft_s=seconds("ttft"),
        tpot_s=tpot_s,
        acceptance=None if acceptance is None else float(acceptance),
    )


def _parity(run: Recording) -> Run:
    answers = [one for one in run.answers if one.decode_s]
    taken_s = sum(one.decode_s for one in answers)
    levels = [counts for one in run.drafts if one is not None for counts in (one.levels or {}).values()]
    drafted = sum(counts.num_draft_tokens for counts in levels)
    device = str(run.about.get("device", "cpu"))
    return Run(
        str(run.about["recorded"]),
        f"cpuspec {run.about['name']}",
        run.model.name,
        device if device != "cpu" else str(run.about.get("processor", "not told")),
        f"{len(answers)} greedy answers, plain",
        decode_tokens_per_s=sum(one.num_decoded for one in answers) / taken_s if taken_s else None,
        acceptance=sum(counts.num_accepted_tokens for counts in levels) / drafted if drafted else None,
    )


def _task(value: Mapping[str, Any], source: str, arm: str = "") -> Run:
    cost = value["cost"]
    drafted = cost["num_draft_tokens"]
    return Run(
        source,
        f"cpuspec {value['backend']}" if "backend" in value else f"server at {value.get('base_url', 'an address')}",
        str(value["model"]),
        str(value.get("processor", "not told")),
        ", ".join(
            [
                f"{value['task']}, {value['form']}",
                *([arm] if arm else []),
                *([f"drafts {value['draft']}"] if "draft" in value else []),
            ]
        ),
        decode_tokens_per_s=cost["decode_tokens_per_s"],
        tokens_per_s=cost["tokens_per_s"],
        ttft_s=cost["ttft_s"].get("p50"),
        tpot_s=cost["tpot_s"].get("p50"),
        acceptance=cost["num_accepted_tokens"] / drafted if drafted else None,
        quality=value["pass@1"],
        seconds_per_answer=cost["duration_s"] / value["num_passed"] if value["num_passed"] else None,
    )


def _bench(value: Mapping[str, Any], source: str) -> Run:
    prefill, decode = value["prefill"], value["decode"]
    return Run(
        source,
        f"cpuspec {value['backend']}",
        str(value["model"]),
        str(value["processor"]),
        "bench",
        prefill_tokens_per_s=prefill and prefill["tokens_per_s"],
        decode_tokens_per_s=decode and decode["tokens_per_s"],
    )


def _plain(value: Mapping[str, Any], source: str) -> Run:
    figures: dict[str, Any] = {name: float(value[name]) for name in FIGURES if value.get(name) is not None}
    texts: dict[str, Any] = {name: str(value[name]) for name in ("model", "machine", "what") if name in value}
    return Run(source, str(value["engine"]), **texts, **figures)
