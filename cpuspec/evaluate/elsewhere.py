"""Reads result files of other engines and of cpuspec into one form, so that they can stand beside each other.

Sources: llama.cpp, tools/llama-bench (`-o json`: a list with n_prompt, n_gen, avg_ts); vLLM, `vllm bench serve --save-result` and
`vllm bench latency --output-json`. A user may write figures down, too, as of transformers: an object with `engine` and FIGURES.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from cpuspec.errors import ConfigError, in_one_line
from cpuspec.evaluate.parity import Recording
from cpuspec.evaluate.parity_file import is_recording, read_recording
from cpuspec.files import read_file

_MOST_BYTES = 64 << 20
_UNKNOWN = "not told"


@dataclass(frozen=True)
class Run:
    """The figures of one engine on one machine; None is unknown. Rates are tokens per second.

    decode_tokens_per_s: of one sequence. tokens_per_s: new tokens of all requests over the time of the whole run. ttft_s, tpot_s:
    medians, or means where the file has no medians. acceptance: accepted share of the drafted tokens. quality: share of right
    answers. seconds_per_answer: of the whole run, over the right answers.
    """

    source: str
    engine: str
    model: str = _UNKNOWN
    machine: str = _UNKNOWN
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
        return None if self.price_per_hour is None else _over(self.price_per_hour / 3600 * 1e6, rate)

    @property
    def price_per_answer(self) -> float | None:
        """The price of a right answer."""
        known = self.price_per_hour is not None and self.seconds_per_answer is not None
        return self.price_per_hour / 3600 * self.seconds_per_answer if known else None  # type: ignore[operator]


FIGURES = tuple(one.name for one in fields(Run) if one.default is None and one.name != "price_per_hour")


def read_runs(path: Path, price_per_hour: float | None = None) -> list[Run]:
    """The runs of a file. Raises ConfigError for a file of another kind."""
    if path.is_file() and is_recording(path):
        return [replace(_parity(read_recording(path)), source=path.name, price_per_hour=price_per_hour)]
    try:
        value = json.loads(read_file(path, _MOST_BYTES, ConfigError))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {in_one_line(str(error))}") from None
    try:
        found = _runs(value, path)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(f"{path} has not the shape that its engine writes ({type(error).__name__}: {error})") from None
    return [replace(one, source=path.name, price_per_hour=price_per_hour) for one in found]


def _runs(value: Any, path: Path) -> list[Run]:
    match value:
        case [{"avg_ts": _, "n_prompt": _, "n_gen": _}, *_]:
            return [_llama_bench(value)]
        case {"output_throughput": _, "completed": _}:
            return [_bench_serve(value)]
        case {"avg_latency": latency}:
            return [_run("vLLM", {}, f"bench latency: {float(latency):.3f} s a batch")]
        case {"benchmark": "task"}:
            return [_task(value)]
        case {"benchmark": "arms", "arms": list(arms)}:
            return [_task({**value, **arm, **task}, [arm["arm"]]) for arm in arms for task in arm["tasks"]]
        case {"decode": decode, "prefill": prefill, "processor": str()}:
            rates = {
                f"{name}_tokens_per_s": one and one["tokens_per_s"] for name, one in (("decode", decode), ("prefill", prefill))
            }
            return [_run(f"cpuspec {value['backend']}", value, "bench", **rates)]
        case {"engine": str(engine)} if any(name in value for name in FIGURES):
            return [_run(engine, value, str(value.get("what", "")), **{name: value.get(name) for name in FIGURES})]
    raise ConfigError(
        f"{path} is no result that is known; wanted JSON of llama-bench, vllm bench serve or latency, cpuspec parity --record, "
        f"eval or bench --json, or an object with engine and some of {', '.join(FIGURES)}"
    )


def _run(engine: str, about: Mapping[str, Any], what: str, **figures: Any) -> Run:
    """A run, with the model and the machine that `about` names. Figures are numbers, or None."""
    machine = str(about.get("machine") or about.get("processor") or _UNKNOWN)
    known: dict[str, Any] = {name: None if value is None else float(value) for name, value in figures.items()}
    return Run("", engine, str(about.get("model", _UNKNOWN)), machine, what, **known)


def _over(part: float | None, whole: float | None) -> float | None:
    """A quotient; None of an unknown part, and of an unknown whole or 0."""
    return part / whole if whole and part is not None else None


def _llama_bench(rows: list[dict[str, Any]]) -> Run:
    first, tests = rows[0], (("pp", "n_prompt", "n_gen"), ("tg", "n_gen", "n_prompt"))
    found = {test: (row[count], row["avg_ts"]) for test, count, other in tests for row in rows[::-1] if row[other] == 0}
    about = {
        "model": Path(str(first.get("model_filename", _UNKNOWN))).name,
        "machine": first.get("gpu_info") or first.get("cpu_info"),
    }
    rates = {f"{name}_tokens_per_s": found.get(test, (0, None))[1] for name, test in (("prefill", "pp"), ("decode", "tg"))}
    what = ", ".join(f"{test}{found[test][0]}" for test, *_ in tests if test in found)
    return _run(f"llama.cpp {first.get('build_number', '')}".strip(), about, what, **rates)


def _bench_serve(value: Mapping[str, Any]) -> Run:
    ttft, tpot = (value.get(f"median_{name}_ms", value.get(f"mean_{name}_ms")) for name in ("ttft", "tpot"))
    acceptance = _over(value.get("total_accepted_draft_tokens"), value.get("total_draft_tokens"))
    return _run(
        str(value.get("backend", _UNKNOWN)),
        {"model": value.get("model_id", _UNKNOWN)},
        f"{value['completed']} requests at {value.get('request_rate', 'inf')} a second",
        decode_tokens_per_s=_over(1000, tpot),
        tokens_per_s=float(value["output_throughput"]),
        ttft_s=_over(ttft, 1000),
        tpot_s=_over(tpot, 1000),
        acceptance=_over(value.get("spec_decode_acceptance_rate"), 100) if acceptance is None else acceptance,  # vLLM: per cent
    )


def _parity(run: Recording) -> Run:
    answers = [one.answer for one in run.prompts if one.answer.decode_s]
    levels = [counts for one in run.prompts if one.drafted for counts in (one.drafted.levels or {}).values()]
    device = str(run.about.get("device", "cpu"))
    return _run(
        f"cpuspec {run.about['name']}",
        {"model": run.model.name, "machine": device if device != "cpu" else run.about.get("processor")},
        f"{len(answers)} greedy answers, plain",
        decode_tokens_per_s=_over(sum(one.num_decoded for one in answers), sum(one.decode_s for one in answers)),
        acceptance=_over(sum(one.num_accepted_tokens for one in levels), sum(one.num_draft_tokens for one in levels)),
    )


def _task(value: Mapping[str, Any], arm: list[str] | None = None) -> Run:
    cost = value["cost"]
    drafts = [f"drafts {value['draft']}"] if "draft" in value else []
    return _run(
        f"cpuspec {value['backend']}" if "backend" in value else f"server at {value.get('base_url', 'an address')}",
        value,
        ", ".join([f"{value['task']}, {value['form']}", *(arm or []), *drafts]),
        decode_tokens_per_s=cost["decode_tokens_per_s"],
        tokens_per_s=cost["tokens_per_s"],
        ttft_s=cost["ttft_s"].get("p50"),
        tpot_s=cost["tpot_s"].get("p50"),
        acceptance=_over(cost["num_accepted_tokens"], cost["num_draft_tokens"]),
        quality=value["pass@1"],
        seconds_per_answer=_over(cost["duration_s"], value["num_passed"]),
    )
