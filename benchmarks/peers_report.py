"""What `peers.py` makes of its samples: medians, ratios round by round, and the tables it prints."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

OWN = "cpuspec"
PREFILL, DECODE = 512, 128

# Seconds by name of the figure: "decode", "prefill", "1 row", "4 rows".
Samples = dict[str, float]


def rows_name(rows: int) -> str:
    """What a forward over so many rows is called in samples and tables."""
    return f"{rows} row{'s' * (rows != 1)}"


def summarize(samples: Mapping[str, Sequence[Samples]]) -> dict[str, Any]:
    """Figures and ratios, {"figures": {figure: {engine: spread}}, "ratios": ..., "over_one_row": {engine: {rows: spread}}}.

    samples: seconds by engine, round and figure, cpuspec's included. figures: tokens/s of decode and prefill, milliseconds of
    forwards. ratios: {figure: {peer: spread, "best": {"peer": name, **spread, "fastest": ratio}}}, a peer's seconds over
    cpuspec's in the same round, so that more than 1 means that cpuspec is faster; the best peer is the one with the lowest
    median, and "fastest" compares the fastest round of any peer with cpuspec's fastest. over_one_row: a forward's seconds over
    those of one row in the same round. A spread holds median, min, max and the rounds' values.
    """
    names = list(dict.fromkeys(figure for rounds in samples.values() for one in rounds for figure in one))
    seconds = {
        figure: {
            engine: [one[figure] for one in rounds] for engine, rounds in samples.items() if all(figure in one for one in rounds)
        }
        for figure in names
    }
    figures = {
        figure: {engine: _spread([_shown(figure, value) for value in values]) for engine, values in by_engine.items()}
        for figure, by_engine in seconds.items()
    }
    ratios: dict[str, Any] = {}
    for figure, by_engine in seconds.items():
        own = by_engine.get(OWN)
        peers = {engine: values for engine, values in by_engine.items() if engine != OWN}
        if own is None or not peers:
            continue
        ratios[figure] = {engine: _spread(_over(values, own)) for engine, values in peers.items()}
        best = min(peers, key=lambda engine: statistics.median(peers[engine]))
        fastest = min(min(values) for values in peers.values()) / min(own)
        ratios[figure]["best"] = {"peer": best, **ratios[figure][best], "fastest": round(fastest, 4)}
    one_row = seconds.get(rows_name(1), {})
    several = [figure for figure in seconds if figure.endswith("rows")]
    over_one_row = {
        engine: {figure: _spread(_over(seconds[figure][engine], one)) for figure in several if engine in seconds[figure]}
        for engine, one in one_row.items()
    }
    return {"figures": figures, "ratios": ratios, "over_one_row": over_one_row}


def report(result: Mapping[str, Any]) -> str:
    """The result as Markdown: figures, ratios, cost of rows, then what was measured and what could not be."""
    figures, ratios, costs = result["figures"], result["ratios"], result["over_one_row"]
    engines = list(result["engines"])
    peers = [engine for engine in engines if engine != OWN]
    head = f"{result['model']}, {result['threads']} threads, median of {result['rounds']} rounds"
    lines = [f"{head} (least and most)", ""]
    rows = [[_label(figure), *(_cell(by_engine.get(engine), 1) for engine in engines)] for figure, by_engine in figures.items()]
    lines += [*_table(["", *engines], rows), ""]
    if ratios:
        lines += ["Times as fast as each peer, round by round", ""]
        rows = []
        for figure, by_peer in ratios.items():
            best = by_peer["best"]
            cells = [_cell(by_peer.get(peer), 2) for peer in peers]
            rows.append([figure, *cells, f"{best['peer']} {best['median']:.2f}", f"{best['fastest']:.2f}"])
        lines += [*_table([f"{OWN} over", *peers, "best peer", "each at its fastest"], rows), ""]
    if any(costs.values()):
        lines += ["Cost of a forward over that of one row", ""]
        names = list(dict.fromkeys(figure for by_rows in costs.values() for figure in by_rows))
        rows = [[figure, *(_cell(costs.get(engine, {}).get(figure), 2) for engine in engines)] for figure in names]
        lines += [*_table(["", *engines], rows), ""]
    lines += [f"- {engine}: {about}" for engine, about in result["engines"].items()]
    lines += [f"- {engine} was left out: {reason}" for engine, reason in result["failed"].items()]
    load, stolen = result["load_average"], result["stolen"]
    lines += [f"- machine: {result['machine']}; load average as rounds began: {', '.join(map(str, load))}"]
    lines += [f"- processor time that the hypervisor gave to others, by round: {', '.join(f'{share:.0%}' for share in stolen)}"]
    if max(load) > result["threads"] + 1 or max(stolen) > 0.05:
        lines += [
            "- the machine was not quiet: engines that spin suffer most from that; the fastest rounds are closest to a quiet one"
        ]
    return "\n".join(lines)


def _shown(figure: str, seconds: float) -> float:
    tokens = {"decode": DECODE, "prefill": PREFILL}.get(figure)
    return seconds * 1e3 if tokens is None else tokens / seconds


def _label(figure: str) -> str:
    return {"decode": f"decode {DECODE}, tok/s", "prefill": f"prefill {PREFILL}, tok/s"}.get(figure, f"{figure}, ms")


def _over(values: Sequence[float], to: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, to, strict=True)]


def _spread(values: Sequence[float]) -> dict[str, Any]:
    median, least, most = statistics.median(values), min(values), max(values)
    return {"median": round(median, 4), "min": round(least, 4), "max": round(most, 4), "rounds": [round(v, 4) for v in values]}


def _cell(spread: Mapping[str, Any] | None, digits: int) -> str:
    if spread is None:
        return "-"
    return f"{spread['median']:.{digits}f} ({spread['min']:.{digits}f} to {spread['max']:.{digits}f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
