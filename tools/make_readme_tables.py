"""Make the tables and pictures of the READMEs: run it whenever a result, a family, a setting or an option is added or changed.

    python tools/make_readme_tables.py            write them
    python tools/make_readme_tables.py --check    exit 1 if one is not what this makes

Figures come from `benchmarks/results/*.json`, which `benchmarks/record.py` describes. Where two files have the same figure of a
model, the newer one counts. Pictures, the table of families and the page about other programs have modules of their own.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cpuspec.evaluate.statistics import mean_ratio

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "benchmarks" / "README.md"
FRONT = ROOT / "README.md"
START, END = "<!-- made by tools/make_readme_tables.py -->", "<!-- end of what is made -->"

OWN = "cpuspec"
# Benchmarks that time nothing: how busy the machine was is no matter.
_COUNTING = ("identity", "certificates", "served_identity", "quantize")

Result = Mapping[str, Any]
Cell = Callable[[Result], str | None]  # a file's text in a row of the table; None if it has none


def main() -> int:
    """The command line described at the top of this file; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make the tables and pictures of the READMEs.")
    parser.add_argument("--check", action="store_true", help="only say whether they are what this makes")
    arguments = parser.parse_args()
    stale = {path: text for path, text in made().items() if not path.exists() or path.read_text("utf-8") != text}
    for path, text in stale.items():
        print(f"{'not what this makes' if arguments.check else 'written'}: {path.relative_to(ROOT)}", file=sys.stderr)
        if not arguments.check:
            path.write_text(text, "utf-8")
    return bool(stale and arguments.check)


def made() -> dict[Path, str]:
    """The text of every file that is made, or has a part that is."""
    from tools import make_coming_from, make_families_table, make_pictures  # they use this module

    results = read_results(RESULTS)
    texts = {path: path.read_text("utf-8") for path in (README, FRONT, make_families_table.README)}
    return {
        README: with_tables(texts[README], results),
        FRONT: with_headline(texts[FRONT], results),
        make_families_table.README: between(texts[make_families_table.README], make_families_table.families_table()),
        make_coming_from.PAGE: make_coming_from.page(),
        **{RESULTS.parent / "pictures" / f"{name}.svg": text for name, text in make_pictures.pictures(results).items()},
    }


def read_results(directory: Path) -> dict[str, Result]:
    """Every results file by its name, the newest first."""
    results = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(directory.glob("*.json"))}
    return dict(sorted(results.items(), key=lambda item: item[1]["date"], reverse=True))


def with_tables(readme: str, results: Mapping[str, Result]) -> str:
    """The text of benchmarks/README.md with what the results say. Raises ValueError unless it has both markers, once."""
    return between(readme, _tables(results) + _sources(results))


# Kinds of text of the front page's table, by the names that records have for them.
KINDS = {
    "mt_bench:chat": "conversation (MT-bench)",
    "humaneval": "code to complete (HumanEval)",
    "mbpp": "tasks as raw text (MBPP)",
}


def with_headline(readme: str, results: Mapping[str, Result]) -> str:
    """The text of README.md with its table: tokens per second of the newest comparison of drafts beside llama.cpp."""
    record = next(r for r in results.values() if r["benchmark"] == "chains" and set(KINDS) <= {*r.get("peers", {}).get("sets", {})})
    lines = [["tokens/s", "llama.cpp, the faster of plain and drafted", f"{OWN}, no drafts", f"{OWN}, best drafts"], ["---"] * 4]
    for kind, label in KINDS.items():
        own, peers = record["sets"][kind], record["peers"]["sets"][kind]
        best = max(own.values(), key=lambda arm: arm["tokens_per_s"])
        low, high = best["over_plain_interval"]
        gain = f"{best['tokens_per_s']:.0f}, {best['over_plain']:.2f}x ({low:.2f} to {high:.2f})"
        peer = max(arm["tokens_per_s"] for arm in peers.values())
        lines.append([label, f"{peer:.0f}", f"{own['none']['tokens_per_s']:.0f}", gain])
    machine = record["machine"]
    place = f"{machine['cores']} cores of an {machine['processor']} ({machine['isa']})"
    head = f"{Path(record['model']).stem} on {place}, greedy. Gains are over cpuspec without drafts, with 95 % intervals:"
    return between(readme, f"{head}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines))


def between(readme: str, text: str) -> str:
    """The README with this text between its markers. Raises ValueError unless it has both, once."""
    if (readme.count(START), readme.count(END)) != (1, 1):
        raise ValueError(f"README needs one line {START} and, after it, one line {END}")
    before, _, rest = readme.partition(START)
    return f"{before}{START}\n{text}\n{END}{rest.partition(END)[2]}"


def _tables(results: Mapping[str, Result]) -> str:
    """Tables by instruction set: beside each build of llama.cpp, of cpuspec by itself, and of figures that depend on none."""
    compared: dict[str, list[Result]] = {}
    alone: dict[str, list[Result]] = {}
    for result in results.values():
        alone.setdefault(f"{OWN} by itself, with {result['machine']['isa']}", []).append(result)
        for part in result.get("instruction_sets", {"": result}).values():
            if OWN in part.get("instructions", {}):
                compared.setdefault(_who(part["instructions"]), []).append(result | part)
    tables = {title: _table(group, _beside_peers(group)) for title, group in compared.items()}
    tables |= {title: _table(group, _by_itself(group)) for title, group in alone.items()}
    tables |= {f"serving, with {title}": _serving_table(group) for title, group in _serving(results.values()).items()}
    tables["any instruction set: the bits are the same"] = _table(list(results.values()), _BITS)
    return "".join(f"**{title}**\n\n{table}\n" for title, table in tables.items() if table)


def _who(instructions: Mapping[str, str]) -> str:
    """Which instruction set and which build of a peer figures are about."""
    peers = [f"{peer} built for {text}" for peer, text in instructions.items() if peer != OWN]
    return ", ".join([f"{OWN} with {instructions[OWN]}", *peers])


def _table(results: Sequence[Result], labels: Sequence[tuple[str, str, Cell]]) -> str:
    """Figures in rows, models in columns; the model with most figures first. "" of no figures."""
    models = list(dict.fromkeys(result["model"] for result in results))
    rows = [
        (
            label,
            {model: _newest(cell, [r for r in results if (r["benchmark"], r["model"]) == (benchmark, model)]) for model in models},
        )
        for benchmark, label, cell in labels
    ]
    rows = [(label, cells) for label, cells in rows if any(cells.values())]
    if not rows:
        return ""
    models = sorted((m for m in models if any(cells[m] for _, cells in rows)), key=lambda m: (-sum(bool(c[m]) for _, c in rows), m))
    lines = [["", *(Path(model).stem for model in models)], ["---"] * (len(models) + 1)]
    lines += [[label, *(cells[model] or "" for model in models)] for label, cells in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# Columns of the table of servers under load: the heading, the name of a figure after "8 clients, ", and a factor.
_LOAD: Sequence[tuple[str, str, float]] = (
    ("tokens/s", "output tokens/s", 1),
    ("first token, s: p50", "p50 ttft, ms", 1e-3),
    ("p95", "p95 ttft, ms", 1e-3),
    ("each next, ms: p50", "p50 tpot, ms", 1),
    ("p95", "p95 tpot, ms", 1),
)


def _serving(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Results of servers under load, by the instruction sets of all engines."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result["benchmark"] == "serving":
            sets = dict.fromkeys([result["machine"]["isa"], *result.get("instructions", {}).values()])
            groups.setdefault(" and ".join(sets), []).append(result)
    return groups


def _serving_table(results: Sequence[Result]) -> str:
    """A row for each engine under each load of a model, medians only; drafts without their settings."""
    lines = [["model", "prompts", "clients", "engine and drafts", *(heading for heading, *_ in _LOAD)], ["---"] * (4 + len(_LOAD))]
    for result in sorted(results, key=lambda result: result["model"]):
        figures = result["figures"]
        prompts = ", ".join(re.split(r"[.:]", one)[0] for one in result["prompts"])
        for clients in sorted({int(name.split()[0]) for name in figures}):
            columns = [(figures.get(f"{clients} clients, {name}", {}), times) for _, name, times in _LOAD]
            for engine in columns[0][0]:
                medians = [_number(column[engine]["median"] * times) if engine in column else "" for column, times in columns]
                lines.append([Path(result["model"]).stem, prompts, str(clients), engine.partition(" --")[0], *medians])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _newest(cell: Cell, results: Sequence[Result]) -> str | None:
    return next((text for text in map(cell, results) if text is not None), None)


def _sources(results: Mapping[str, Result]) -> str:
    """For each machine what it is, when and how busy it was measured, and the commands that do it again."""
    by_machine: dict[str, list[Result]] = {}
    for _, result in sorted(results.items()):
        machine = result["machine"]
        by_machine.setdefault(f"{machine['processor']}, {machine['cores']} cores, {machine['isa']}", []).append(result)
    texts = []
    for machine, group in by_machine.items():
        dates = sorted({result["date"][:10] for result in group})
        timed = [result for result in group if result["benchmark"] not in _COUNTING]
        reads = [result["read_bytes_per_s"]["median"] / 1e9 for result in timed if result["read_bytes_per_s"]]
        loads = [load for result in timed for load in result["load_average"]]
        facts = [
            machine,
            *([f"memory reads {min(reads):.1f} to {max(reads):.1f} GB/s"] if reads else []),
            " to ".join(dict.fromkeys((dates[0], dates[-1]))),
            *([f"load average as rounds began {min(loads)} to {max(loads)}"] if loads else []),
        ]
        commands = dict.fromkeys(result["command"] for result in group)
        texts.append("\n".join([f"{'; '.join(facts)}:", "", "```sh", *commands, "```"]))
    return "\n\n".join(texts)


def _beside_peers(results: Sequence[Result]) -> list[tuple[str, str, Cell]]:
    """(benchmark, label, cell) of each row that compares engines, in the table's order."""
    figures = dict.fromkeys(figure for r in results for figure in r.get("figures", ()))
    depths = sorted({int(figure.removeprefix("decode @ d")) for figure in figures if figure.startswith("decode @ d")})
    return [
        ("peers", "decoding, tokens/s", _own("decode")),
        ("peers", "decoding over llama.cpp on the same file", _over("decode", "llama.cpp")),
        ("peers", "decoding over the best of all peers", _over_best("decode")),
        ("peers", "weights read while decoding, of the read bandwidth measured in the same rounds", _share("bandwidth_share", OWN)),
        ("peers", "the same, llama.cpp", _share("bandwidth_share", "llama.cpp")),
        *(("peers", f"decoding at a depth of {n} tokens, over llama.cpp", _over(f"decode @ d{n}", "llama.cpp")) for n in depths),
        ("peers", "decoding beside one busy process, of the speed without", _share("busy_share", OWN)),
        ("peers", "the same, llama.cpp", _share("busy_share", "llama.cpp")),
        ("peers", "decoding beside one busy process, over llama.cpp", _over("decode, busy", "llama.cpp")),
        ("peers", "prefill of 512 tokens, tokens/s", _own("prefill")),
        ("peers", "prefill over llama.cpp on the same file", _over("prefill", "llama.cpp")),
        ("peers", "prefill over the best of all peers", _over_best("prefill")),
        ("peers", "a forward over 2 / 4 / 8 / 16 rows over one row, all logits", _over_one_row(OWN)),
        ("peers", "the same, llama.cpp", _over_one_row("llama.cpp")),
        *(("peers", f"a forward over {rows} rows over the best of all peers", _over_best(f"{rows} rows")) for rows in (4, 8, 16)),
        *(("chains", label, cell) for label, cell in _over_drafts(results, "llama.cpp")),
    ]  # fmt: skip


def _by_itself(results: Sequence[Result]) -> list[tuple[str, str, Cell]]:
    """(benchmark, label, cell) of each row that is about cpuspec's own time."""
    figures = [(r["benchmark"], figure) for r in results for figure in r.get("figures", ())]
    others = dict.fromkeys((benchmark, figure) for benchmark, figure in figures if benchmark not in ("kernels", "serving"))
    steps = dict.fromkeys(arm for r in results if r["benchmark"] == "overhead" for arm in r["us_per_step"])
    return [
        *(("overhead", f"a step besides the compiled forward, drafts {arm}", _overhead(arm)) for arm in steps),
        *((benchmark, figure, _every_engine(figure)) for benchmark, figure in others),
        *(("chains", label, cell) for label, cell in _gains(results)),
    ]


def _own(figure: str) -> Cell:
    return lambda result: _range(result["figures"].get(figure, {}).get(OWN), 1)


def _over(figure: str, peer: str) -> Cell:
    return lambda result: _range(result["ratios"].get(figure, {}).get(peer), 2, unit="x")


def _over_best(figure: str) -> Cell:
    """Only where there was a choice."""

    def cell(result: Result) -> str | None:
        by_peer = result["ratios"].get(figure, {})
        return f"{_range(by_peer['best'], 2, unit='x')}, {by_peer['best']['peer']}" if len(by_peer) > 2 else None

    return cell


def _share(name: str, engine: str) -> Cell:
    return lambda result: _range(result[name].get(engine), 0, 100, unit=" %")


def _over_one_row(engine: str) -> Cell:
    def cell(result: Result) -> str | None:
        costs = result["over_one_row"].get(engine, {})
        medians = [costs.get(f"{rows} rows", {}).get("median") for rows in (2, 4, 8, 16)]
        return " / ".join(f"{median:.2f}" for median in medians) if all(medians) else None

    return cell


def _every_engine(figure: str) -> Cell:
    """cpuspec's figure, then the others' medians with their names and builds."""

    def cell(result: Result) -> str | None:
        engines = result["figures"].get(figure, {})
        builds = {engine: f" (built for {text})" for engine, text in result.get("instructions", {}).items()}
        others = [
            f"{engine} {_number(spread['median'])}{builds.get(engine, '')}" for engine, spread in engines.items() if engine != OWN
        ]
        own = [_range(engines[OWN])] if OWN in engines else []
        return "; ".join(text for text in (*own, *others) if text) or None

    return cell


def _overhead(arm: str) -> Cell:
    """Microseconds by the clock."""
    return lambda result: _range(result["us_per_step"].get(arm, {}).get("time"), 0, unit=" us")


def _best(arms: Mapping[str, Any]) -> str | None:
    """The fixed drafts that gain most."""
    measured = {spec: one["over_plain"] for spec, one in arms.items() if spec not in ("none", "auto") and one["over_plain"]}
    return max(measured, key=measured.__getitem__, default=None)


_PICKS: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
    "best drafts over plain decoding": _best,
    "auto over plain decoding": lambda arms: "auto" if "auto" in arms else None,
}


def _gains(results: Sequence[Result]) -> list[tuple[str, Cell]]:
    """(label, cell) of each set of prompts, target and pick."""
    chains = [result for result in results if result["benchmark"] == "chains"]
    sets = sorted({(name, result["target_dtype"] or "") for result in chains for name in result["sets"]})
    return [
        (f"{name}{dtype and f', target in {dtype}'}: {what}", _gain(name, dtype, pick))
        for name, dtype in sets
        for what, pick in _PICKS.items()
    ]


def _gain(name: str, dtype: str, pick: Callable[[Mapping[str, Any]], str | None]) -> Cell:
    """The ratio of a set's arm with its interval."""

    def cell(result: Result) -> str | None:
        arms = result["sets"].get(name, {})
        spec = pick(arms) if (result["target_dtype"] or "") == dtype else None
        if spec is None or arms[spec]["over_plain"] is None:
            return None
        low, high = arms[spec]["over_plain_interval"]
        return f"{arms[spec]['over_plain']:.2f}x ({low:.2f} to {high:.2f})" + (f", {spec}" if spec != "auto" else "")

    return cell


def _over_drafts(results: Sequence[Result], engine: str) -> list[tuple[str, Cell]]:
    """(label, cell) of each set of prompts that another engine's drafts were measured on."""
    names = sorted({name for result in results for name in result.get("peers", {}).get("sets", {})})
    return [(f"{name}: fastest arm over {engine}'s fastest", _over_fastest(name, engine)) for name in names]


def _over_fastest(name: str, engine: str) -> Cell:
    """The fastest arm's tokens/s over those of the engine's fastest, prompt by prompt, with the interval and both drafts."""

    def cell(result: Result) -> str | None:
        arms, theirs = result["sets"].get(name, {}), result.get("peers", {}).get("sets", {}).get(name, {})
        theirs = {arm: one for arm, one in theirs.items() if arm.partition(":")[0] == engine}
        best, other = _fastest(arms), _fastest(theirs)
        if best is None or other is None:
            return None
        rows = [row for row in result["prompts"] if row["set"] == name]
        rates = [
            [row.get(part, {}).get(arm, {}).get("tokens_per_s") for row in rows] for part, arm in (("arms", best), ("peers", other))
        ]
        ratio, (low, high) = mean_ratio(*rates)
        return None if ratio is None else f"{ratio:.2f}x ({low:.2f} to {high:.2f}), {best} over {other.split()[1]}"

    return cell


def _fastest(arms: Mapping[str, Any]) -> str | None:
    return max((arm for arm in arms if arms[arm]["tokens_per_s"]), key=lambda arm: arms[arm]["tokens_per_s"], default=None)


def _identical(result: Result) -> str:
    return f"{min(arm['identical_prompts'] for arm in result['arms'])} of {result['prompts']}, {len(result['arms'])} ways"


def _certified(result: Result) -> str:
    certificates = result["certificates"]
    return f"{sum(one['passed'] for one in certificates)} of {len(certificates)}: {'; '.join(one['spec'] for one in certificates)}"


_BITS: Sequence[tuple[str, str, Cell]] = (
    ("quality", "KL divergence from the dequantized model, mean", lambda r: f"{r['kl_mean']:.5f}"),
    ("quality", "same most likely token", lambda r: f"{r['same_top']:.1%}"),
    ("quality", "perplexity over the dequantized model's", lambda r: f"{r['perplexity_ratio']:.4f}"),
    ("identity", "prompts with identical greedy ids whatever drafts, threads, batches, chunks", _identical),
    ("certificates", "drafts certified: the same greedy ids and distribution, and a lie seen", _certified),
)


def _range(spread: Mapping[str, Any] | None, digits: int | None = None, times: float = 1, unit: str = "") -> str | None:
    """The median of a spread and, in brackets, its ends; None of nothing."""
    if spread is None:
        return None
    median, least, most = (_number(spread[name] * times, digits) for name in ("median", "min", "max"))
    return f"{median}{unit}" + (f" ({least} to {most})" if least != most else "")


def _number(value: float, digits: int | None = None) -> str:
    """With `digits` after the point, or with three significant ones."""
    return f"{value:.{digits}f}" if digits is not None else re.sub(r"\.0$", "", f"{float(f'{value:.3g}')}")


if __name__ == "__main__":
    sys.exit(main())
