"""Figures that `peers.py` computes from its samples: medians, and ratios round by round."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from record import print_figures, spread

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


def print_report(result: Mapping[str, Any]) -> None:
    """Print the figures of each instruction set, its engines, and those that were left out."""
    for name, part in result["instruction_sets"].items():
        print(f"{name}: {who(part['instructions'])}")
        print_figures({f"{figure}, {'tokens/s' if _is_rate(figure) else 'ms'}": of for figure, of in part["figures"].items()})
        print_figures({f"{figure}, times as fast as": of for figure, of in part["ratios"].items()})
        print_figures({f"{engine}, over 1 row": costs for engine, costs in part["over_one_row"].items()})
        print_figures({"weights read while decoding, of the read bandwidth": part["bandwidth_share"]})
        print_figures({"decoding beside a busy process, of its speed without": part["busy_share"]})
        for engine, told in part["engines"].items():
            print(f"{engine}: {told}")
        for engine, reason in part["failed"].items():
            print(f"{engine} was left out: {reason}")


def _is_rate(figure: str) -> bool:
    return figure.startswith(("decode", "prefill"))


def _shown(figure: str, seconds: float) -> float:
    return 1 / seconds if _is_rate(figure) else seconds * 1e3


def _over(values: Sequence[float], to: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, to, strict=True)]
