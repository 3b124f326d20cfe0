"""Where a linear layer's time goes: every format's kernel on matrices streamed from memory, over 1 to 64 rows, 1 and 2 threads.

    python benchmarks/kernels.py --formats q4_0,q4_k --rounds 3
    python benchmarks/kernels.py --formats q4_k --threads 1 --rows 1,2,4,8 --readers 1

Beside the speed of a bare read of memory, and of multiply-adds that read nothing: bytes in vector lanes and, where there are
any, in tile registers, and f32 in vector lanes. A kernel cannot be faster than either. Needs no model.
"""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from linear_alone import activations, multiply
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from record import Rounds, read_names, record, save, spread

from cpuspec.cli.options import read_numbers
from cpuspec.formats import FORMATS, QuantTensor, get_format
from cpuspec.formats.packing import PANEL, TILE, PackedTensor, aligned_bytes, pack
from cpuspec.kernels import isa
from cpuspec.kernels.linear import activation_encoding
from cpuspec.kernels.ops import F32X16, I32X16, LANES, Ops, Value, dot_bytes, fma
from cpuspec.metrics import read_bandwidth

# Another process, which reads memory until it is ended.
_READER = """
import numpy as np
values = np.array_split(np.ones(1 << 27, np.float32), 64)
print("reading", flush=True)
while True:
    for part in values:
        part.max()
"""

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
    readers: Annotated[
        int, typer.Option(help="Other processes that read memory meanwhile, so that each core has less of it.", min=0)
    ] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print a table for each format."""
    with _reading(readers):
        _measure(formats, rows, threads, rounds, precise, in_features, megabytes, readers, json_file)


@contextmanager
def _reading(readers: int) -> Iterator[None]:
    """So many processes that read memory."""
    processes = [subprocess.Popen([sys.executable, "-c", _READER], stdout=subprocess.PIPE) for _ in range(readers)]
    try:
        for process in processes:
            assert process.stdout
            process.stdout.readline()
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _measure(
    formats: str, rows: str, threads: str, rounds: int, precise: bool, in_features: int, megabytes: int, readers: int,
    json_file: Path | None,
) -> None:  # fmt: skip
    names, counts, teams = read_names(formats, FORMATS), read_numbers(rows, "--rows"), read_numbers(threads, "--threads")
    if in_features % PANEL:
        raise typer.BadParameter(f"--in-features {in_features}: wanted a multiple of {PANEL}")
    passed = Rounds(rounds * len(names), max(teams))
    reads: dict[int, list[float]] = {team: [] for team in teams}
    peaks: dict[str, dict[int, float]] = {kind: dict.fromkeys(teams, 0.0) for kind in PEAKS}
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
            for kind in PEAKS:
                peaks[kind][team] = max(peaks[kind][team], peak(kind, team))
        for case in cases:
            samples_s[case].append(_seconds(case, matrices))
        if (number + 1) % rounds == 0:
            recent = {team: reads[team][-rounds:] for team in teams}
            kernels += [describe(case, samples_s, recent, matrices) for case in cases]
            print(_table(name, encoding, kernels[-len(cases) :]), flush=True)
    for kind, by_team in peaks.items():
        rates = (f"{value / 1e9:.0f} by {team} thread{'s' * (team > 1)}" for team, value in by_team.items())
        print(f"\nG multiply-adds/s of {kind} at most: {', '.join(rates)}")
    head = record("kernels", f"{OUT_FEATURES} x {in_features}", passed)
    peaks_by_name = {kind: {str(team): value for team, value in by_team.items()} for kind, by_team in peaks.items()}
    save(head | {"peak_multiply_adds_per_s": peaks_by_name, "readers": readers, "kernels": kernels}, json_file)


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

    return _together(work, case.threads)


def _together(work: Callable[[int], None], threads: int) -> float:
    """Seconds until all threads have done their work."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: None, range(threads)))  # threads are there
        start_s = perf_counter()
        list(pool.map(work, range(threads)))
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


# ---------------------------------------------------------------------------------------------------------------- peaks

_CHAINS = 16  # sums that do not wait for each other


def _compiled(append: Callable[[Ops, Value], None]) -> Any:
    """A compiled function of a number of times, whose instructions `append` makes."""

    @intrinsic
    def emit(typingctx, times):
        def codegen(context, builder, signature, arguments):
            o = Ops(builder)
            append(o, o.value(arguments[0]))
            return context.get_dummy_value()

        return types.void(times), codegen

    return njit(nogil=True)(lambda times: emit(times))  # noqa: PLW0108 - Numba compiles functions, not intrinsics


def _chains(o: Ops, times: Value, step: Callable[[Value], Value], typ: Any) -> None:
    """`step` on each of some vectors of `typ`, a number of times."""
    totals = o.variables(_CHAINS, 0, typ)
    with o.loop(times):
        for total in totals:
            total.set(step(total.get()))
    for total in totals:  # used, so not removed; in halves, which every processor has registers for
        for first in (0, LANES // 2):
            half = total.get().shuffled(range(first, first + LANES // 2))
            o.b.asm(ir.FunctionType(ir.VoidType(), [half.type]), "", "x", [half.v], True)


def _byte_chains(o: Ops, times: Value) -> None:
    _chains(o, times, lambda total: dot_bytes(total, total.like(0x01010101), total.like(0x01010101)), I32X16)


def _f32_chains(o: Ops, times: Value) -> None:
    _chains(o, times, lambda total: fma(total, total.like(0.5), total.like(0.5)), F32X16)


def _tile_products(o: Ops, times: Value) -> None:
    """Four products of whole tile registers, a number of times."""
    o.tile_shapes(dict.fromkeys(range(8), (16, 64)))
    for register in range(8):
        o.tile_zero(register)
    with o.loop(times):
        for total in range(4):
            o.tile_dot_signed(total, 4 + total // 2, 6 + total % 2)
    o.tile_release()


# What does nothing but multiply, and the multiply-adds of one of its iterations.
PEAKS: Mapping[str, tuple[Any, int]] = {
    f"bytes, {isa.dot_isa()}": (_compiled(_byte_chains), _CHAINS * 64),
    **({"bytes, amx": (_compiled(_tile_products), 4 * 16 * 16 * 64)} if isa.has_tiles() else {}),
    "f32": (_compiled(_f32_chains), _CHAINS * 16),
}
_PEAK_WORK = 2 * 10**10  # multiply-adds of a thread: milliseconds


def peak(kind: str, threads: int) -> float:
    """Multiply-adds per second of threads that do nothing else."""
    function, multiply_adds = PEAKS[kind]
    function(1)  # compiled
    times = _PEAK_WORK // multiply_adds
    return threads * times * multiply_adds / _together(lambda _: function(times), threads)


if __name__ == "__main__":
    typer.run(main)
