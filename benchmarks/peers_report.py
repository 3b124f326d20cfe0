"""Figures that `peers.py` computes from its samples: medians, ratios round by round, and the tables that it prints."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from record import spread

OWN = "cpuspec"
PREFILL, DECODE = 512, 128

# Seconds by name of the figure: of a token ("decode", "prefill", "decode @ d4096"), of a forward ("1 row", "4 rows").
Samples = dict[str, float]


@dataclass(frozen=True)
class Figure:
    """What every engine is asked in its turn.

    kind: decode, prefill or forwards. depth: tokens that a context holds before its decoding is timed. busy: beside a process
    that keeps one core busy.
    """

    kind: str
    depth: int = 0
    busy: bool = False

    @property
    def name(self) -> str:
        """What its samples are called; those of forwards have `rows_name`s."""
        return self.kind + (f" @ d{self.depth}" if self.depth else "") + (", busy" if self.busy else "")


QUIET, BUSY = Figure("decode"), Figure("decode", busy=True)


def rows_name(rows: int) -> str:
    """The name of a forward over n rows in samples and tables."""
    return f"{rows} row{'s' * (rows != 1)}"


def summarize(
    samples: Mapping[str, Sequence[Samples]], read_bytes: Mapping[str, int], read_bytes_per_s: Sequence[float]
) -> dict[str, Any]:
    """Figures and ratios by their names:

    figures           {figure: {engine: spread}}; tokens/s of decode and prefill, milliseconds of forwards
    ratios            {figure: {peer: spread, "best": {"peer": name, **spread, "fastest": ratio}}}; a peer's seconds over
                      cpuspec's in the same round, so that more than 1 means that cpuspec is faster. The best peer is the one with
                      the lowest median; "fastest" compares the fastest round of any peer with cpuspec's fastest
    over_one_row      {engine: {rows: spread}}; a forward's seconds over those of one row in the same round
    bandwidth_share   {engine: spread}; bytes of weights that a decoded token reads, over its seconds and the round's bandwidth
    busy_share        {engine: spread}; speed of decoding beside a busy process over that of the same round without

    samples: seconds by engine, round and figure, cpuspec's included. read_bytes: of a token, by those engines of which they are
    known. read_bytes_per_s: the machine's, in each round. Spreads are `record.spread`s.
    """
    names = list(dict.fromkeys(figure for rounds in samples.values() for one in rounds for figure in one))
    seconds = {
        figure: {
            engine: [one[figure] for one in rounds] for engine, rounds in samples.items() if all(figure in one for one in rounds)
        }
        for figure in names
    }
    figures = {
        figure: {engine: spread([_shown(figure, value) for value in values]) for engine, values in by_engine.items()}
        for figure, by_engine in seconds.items()
    }
    ratios: dict[str, Any] = {}
    for figure, by_engine in seconds.items():
        own = by_engine.get(OWN)
        peers = {engine: values for engine, values in by_engine.items() if engine != OWN}
        if own is None or not peers:
            continue
        ratios[figure] = {engine: spread(_over(values, own)) for engine, values in peers.items()}
        best = min(peers, key=lambda engine: statistics.median(peers[engine]))
        fastest = min(min(values) for values in peers.values()) / min(own)
        ratios[figure]["best"] = {"peer": best, **ratios[figure][best], "fastest": round(fastest, 4)}
    one_row = seconds.get(rows_name(1), {})
    several = [figure for figure in seconds if figure.endswith("rows")]
    over_one_row = {
        engine: {figure: spread(_over(seconds[figure][engine], one)) for figure in several if engine in seconds[figure]}
        for engine, one in one_row.items()
    }
    quiet, busy = seconds.get(QUIET.name, {}), seconds.get(BUSY.name, {})
    needed = {engine: [read_bytes[engine] / rate for rate in read_bytes_per_s] for engine in quiet if engine in read_bytes}
    return {
        "figures": figures,
        "ratios": ratios,
        "over_one_row": over_one_row,
        "bandwidth_share": {engine: spread(_over(least, quiet[engine])) for engine, least in needed.items()},
        "busy_share": {engine: spread(_over(quiet[engine], values)) for engine, values in busy.items() if engine in quiet},
    }


def who(instructions: Mapping[str, str]) -> str:
    """Which instruction set and which build of a peer figures are about, from a part's `instructions`."""
    peers = [f"{peer} built for {text}" for peer, text in instructions.items() if peer != OWN]
    return ", ".join([f"{OWN} with {instructions[OWN]}", *peers])


def report(result: Mapping[str, Any]) -> str:
    """The result as Markdown: each instruction set's part, then what was measured and how busy the machine was."""
    lines = [f"{result['model']}, {result['threads']} threads, median of {result['rounds']} rounds (least and most)", ""]
    for name, part in result["instruction_sets"].items():
        lines += [f"**{name}: {who(part['instructions'])}**", "", *_part(part)]
    machine, load, stolen = result["machine"], result["load_average"], result["stolen"]
    read = _cell(result["read_bytes_per_s"], 1, 1e-9)
    lines += [f"- {machine['processor']}, {machine['cores']} cores, {machine['isa']}; memory reads {read} GB/s"]
    lines += [f"- load average as rounds began: {', '.join(map(str, load))}"]
    lines += [f"- processor time that the hypervisor gave to others, by round: {', '.join(f'{share:.0%}' for share in stolen)}"]
    if max(load) > result["threads"] + 1 or max(stolen) > 0.05:
        lines += [
            "- the machine was not quiet: engines that spin suffer most from that; the fastest rounds are closest to a quiet one"
        ]
    return "\n".join(lines)


def _part(part: Mapping[str, Any]) -> list[str]:
    """Figures, ratios and the cost of rows of one instruction set, then its engines and those that were left out."""
    figures, ratios, costs = part["figures"], part["ratios"], part["over_one_row"]
    engines = list(part["engines"])
    peers = [engine for engine in engines if engine != OWN]
    rows = [[_label(figure), *(_cell(by_engine.get(engine), 1) for engine in engines)] for figure, by_engine in figures.items()]
    for label, shares in (
        ("weights read while decoding, % of the read bandwidth", part["bandwidth_share"]),
        ("decoding beside a busy process, % of its speed without", part["busy_share"]),
    ):
        rows += [[label, *(_cell(shares.get(engine), 0, 100) for engine in engines)]] if shares else []
    lines = [*_table(["", *engines], rows), ""]
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
    lines += [f"- {engine}: {about}" for engine, about in part["engines"].items()]
    lines += [f"- {engine} was left out: {reason}" for engine, reason in part["failed"].items()]
    return [*lines, ""]


def _is_rate(figure: str) -> bool:
    return figure.startswith(("decode", "prefill"))


def _shown(figure: str, seconds: float) -> float:
    return 1 / seconds if _is_rate(figure) else seconds * 1e3


def _label(figure: str) -> str:
    return f"{figure}, {'tok/s' if _is_rate(figure) else 'ms'}"


def _over(values: Sequence[float], to: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, to, strict=True)]


def _cell(figures: Mapping[str, Any] | None, digits: int, times: float = 1) -> str:
    if figures is None:
        return "-"
    median, least, most = (f"{figures[name] * times:.{digits}f}" for name in ("median", "min", "max"))
    return f"{median} ({least} to {most})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
