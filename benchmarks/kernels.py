"""Where a linear layer's time goes: every format's kernel on matrices streamed from memory, over 1 to 64 rows, 1 and 2 threads.

    python benchmarks/kernels.py --formats q4_0,q4_k --rounds 3
    python benchmarks/kernels.py --formats q4_k --threads 1 --rows 1,2,4,8

Beside the speed of a bare read of memory, which no kernel can exceed. Needs no model.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from linear_alone import activations, multiply
from record import Rounds, read_names, record, save, spread

from cpuspec.cli.options import read_numbers
from cpuspec.formats import FORMATS, QuantTensor, get_format
from cpuspec.formats.packing import PANEL, TILE, PackedTensor, aligned_bytes, pack
from cpuspec.kernels.linear import activation_encoding
from cpuspec.metrics import read_bandwidth

OUT_FEATURES = 16384  # outputs of one matrix stay in the caches, as a layer's do


@dataclass(frozen=True)
class Case:
    """One kernel over a number of rows, by a number of threads."""

    format: str
    encoding: str
    rows: int
    threads: int


def main(
    formats: Annotated[str, typer.Option(help="Weight formats.")] = ",".join(FORMATS),
    rows: Annotated[str, typer.Option(help="Rows of activations.")] = "1,2,3,4,5,8,16,32,64",
    threads: Annotated[str, typer.Option(help="Numbers of threads.")] = "1,2",
    rounds: Annotated[int, typer.Option(help="Rounds for each format; medians are quoted.", min=1)] = 5,
    precise: Annotated[bool, typer.Option("--precise", help="16-bit activations where a format reads integers.")] = False,
    in_features: Annotated[int, typer.Option(help="Inputs of a matrix, a multiple of 256.", min=256)] = 2048,
    megabytes: Annotated[int, typer.Option(help="Weights to stream; more than the caches hold by far.", min=1)] = 512,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print a table for each format."""
    names, counts, teams = read_names(formats, FORMATS), read_numbers(rows, "--rows"), read_numbers(threads, "--threads")
    if in_features % PANEL:
        raise typer.BadParameter(f"--in-features {in_features}: wanted a multiple of {PANEL}")
    passed = Rounds(rounds * len(names), max(teams))
    reads: dict[int, list[float]] = {team: [] for team in teams}
    kernels = []
    cases: list[Case] = []
    for number in passed:
        if number % rounds == 0:
            name = names[number // rounds]
            encoding = activation_encoding(name, precise)
            cases = [Case(name, encoding, count, team) for team in teams for count in counts]
            matrices = make_matrices(name, in_features, megabytes << 20)
            samples_s: dict[Case, list[float]] = {case: [] for case in cases}
            for case in cases:
                _seconds(case, matrices[:1])  # compiled and warm
        for team in teams:
            reads[team].append(passed.read_bytes_per_s[-1] if team == passed.threads else read_bandwidth(team))
        for case in cases:
            samples_s[case].append(_seconds(case, matrices))
        if (number + 1) % rounds == 0:
            recent = {team: reads[team][-rounds:] for team in teams}
            kernels += [describe(case, samples_s, recent, matrices) for case in cases]
            print(_table(name, encoding, kernels[-len(cases) :]), flush=True)
    save(record("kernels", f"{OUT_FEATURES} x {in_features}", passed) | {"kernels": kernels}, json_file)


def make_matrices(format_name: str, in_features: int, num_bytes: int) -> list[PackedTensor]:
    """Packed matrices [OUT_FEATURES, in_features] of at least `num_bytes` together, each in memory of its own."""
    format = get_format(format_name)
    values = np.random.default_rng(0).standard_normal((TILE, in_features)).astype(np.float32)
    tile = pack(QuantTensor.encode(format, values))
    matrices = []
    for _ in range(math.ceil(num_bytes / (OUT_FEATURES // TILE * tile.tile_bytes))):
        data = aligned_bytes((OUT_FEATURES // TILE, tile.tile_bytes))
        data[:] = tile.data
        matrices.append(PackedTensor(format, (OUT_FEATURES, in_features), data))
    return matrices


def _seconds(case: Case, matrices: Sequence[PackedTensor]) -> float:
    """What it takes to multiply rows with all matrices, each thread with its share of the tiles of each."""
    features = matrices[0].shape[1]
    x = np.random.default_rng(1).standard_normal((case.rows, features)).astype(np.float32)
    acts, out = activations(x, case.encoding), np.empty((case.rows, OUT_FEATURES), np.float32)
    ends = np.linspace(0, OUT_FEATURES // TILE, case.threads + 1).astype(int).tolist()

    def work(thread: int) -> None:
        for matrix in matrices:
            multiply(matrix, case.encoding, acts, out, tiles=(ends[thread], ends[thread + 1]))

    with ThreadPoolExecutor(case.threads) as pool:
        list(pool.map(lambda _: None, range(case.threads)))  # threads are there
        start_s = perf_counter()
        list(pool.map(work, range(case.threads)))
        return perf_counter() - start_s


def describe(
    case: Case, samples_s: Mapping[Case, Sequence[float]], reads: Mapping[int, Sequence[float]], matrices: Sequence[PackedTensor]
) -> dict[str, Any]:
    """A kernel's figures: bytes of weights and multiply-adds per second, shares and costs round by round."""
    mine_s = samples_s[case]
    one_row_s = samples_s.get(Case(case.format, case.encoding, 1, case.threads))
    num_bytes = sum(matrix.data.nbytes for matrix in matrices)
    multiply_adds = case.rows * len(matrices) * math.prod(matrices[0].shape)
    return {
        "format": case.format,
        "activations": case.encoding,
        "rows": case.rows,
        "threads": case.threads,
        "bytes_per_s": spread([num_bytes / s for s in mine_s]),
        "over_bare_read": spread([num_bytes / s / read for s, read in zip(mine_s, reads[case.threads], strict=True)]),
        "multiply_adds_per_s": spread([multiply_adds / s for s in mine_s]),
        "over_one_row": spread([s / one_s for s, one_s in zip(mine_s, one_row_s, strict=True)]) if one_row_s else None,
    }


def _table(name: str, encoding: str, kernels: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"\n{name}, {encoding} activations\n", "| threads | rows | GB/s | of a bare read | G multiply-adds/s | over 1 row |"]
    lines += ["|--:|--:|--:|--:|--:|--:|"]
    for one in kernels:
        read, share, rate = (one[figure]["median"] for figure in ("bytes_per_s", "over_bare_read", "multiply_adds_per_s"))
        cost = f"{one['over_one_row']['median']:.2f}" if one["over_one_row"] else ""
        lines += [f"| {one['threads']} | {one['rows']} | {read / 1e9:.1f} | {share:.0%} | {rate / 1e9:.0f} | {cost} |"]
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
