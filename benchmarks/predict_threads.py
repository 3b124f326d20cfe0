"""Simulates how teams of threads on other machines share out a forward, and the speed that follows.

    python benchmarks/predict_threads.py qwen2.5-coder-1.5b-instruct --cores 8 --cores 6+8x0.45 --cores 64 --bandwidth 300

The rules are the kernels' own (`cpuspec/kernels/sharing.py`); the speed of a core is this machine's, measured. Cores are given by
their speeds beside one of this machine's: 6+8x0.45 are six like it and eight that read less than half as fast. What is assumed: a
core takes LINE_S to change a number that others change, too, one after the other, and reads weights at a steady speed.
"""

import heapq
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from record import Rounds, record, save

from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.checkpoint import tensor_shapes
from cpuspec.checkpoints.download import resolve_model
from cpuspec.config import ModelConfig
from cpuspec.errors import CpuspecError
from cpuspec.formats.packing import TILE, tile_bytes
from cpuspec.formats.tensor import Format
from cpuspec.kernels import sharing
from cpuspec.model.transformer import decode

# Contended atomic operations take 50 to 150 ns on servers, more across sockets (David, Guerraoui and Trigonakis, "Everything you
# always wanted to know about synchronization but were afraid to ask", SOSP 2013, tables 2 and 3).
LINE_S = 100e-9
LOOK_S = 15e-9  # to read such a number, where several reads are under way at once
NUMBER_S = 1e-9  # to prepare or rotate one number of a row

_SPEEDS = re.compile(r"(\d{1,4})(?:x(\d*\.?\d+))?")


@dataclass(frozen=True)
class Work:
    """An operation over one row. tiles: whether its items are shared as tiles of matrices are, or taken one by one."""

    tiles: bool
    items: int
    item_s: float  # on a core of speed 1


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    cores: Annotated[list[str] | None, typer.Option(help="A machine's cores, as in 64 or 6+8x0.45. Repeatable.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="GB/s that its memory gives to all cores together.", min=0.1)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print each machine's tokens/s of plain decoding, and the efficiency: the time of perfect sharing over the simulated one."""
    machines = {one: read_cores(one) for one in cores or ["2", "8", "16", "32", "64", "6+8x0.45"]}
    try:
        checkpoint = open_checkpoint(resolve_model(model))
    except CpuspecError as error:
        raise typer.BadParameter(str(error)) from None
    formats = {name: tensor.format for name, tensor in checkpoint.tensors.items()}
    rounds = Rounds(1, 1)
    list(rounds)
    core_bytes_per_s, predictions = rounds.read_bytes_per_s[0], []
    print("| cores | tokens/s | efficiency |\n|---|---|---|")
    for name, speeds in machines.items():
        rate = min(core_bytes_per_s, 1e9 * bandwidth / sum(speeds)) if bandwidth else core_bytes_per_s
        works = works_of(checkpoint.config, formats.__getitem__, rate, len(speeds))
        seconds = forward_s(works, speeds)
        one = {"cores": name, "tokens_per_s": 1 / seconds, "efficiency": ideal_s(works, speeds) / seconds}
        predictions.append(one)
        print(f"| {name} | {one['tokens_per_s']:.1f} | {one['efficiency']:.2f} |")
    save(record("predict_threads", checkpoint.path.name, rounds) | {"predictions": predictions}, json_file)


def read_cores(text: str) -> tuple[float, ...]:
    """Speeds of a machine's cores, as in 6+8x0.45."""
    speeds: list[float] = []
    for part in text.split("+"):
        match = _SPEEDS.fullmatch(part)
        if not match or not int(match[1]) or not float(match[2] or 1):
            raise typer.BadParameter(f"--cores {text}: wanted numbers of cores and their speeds, as in 64 or 6+8x0.45")
        speeds += [float(match[2] or 1)] * int(match[1])
    return tuple(speeds)


def works_of(config: ModelConfig, format_of: Callable[[str], Format], rate: float, threads: int) -> list[Work]:
    """The operations of a forward over one row, at the start of a context. rate: bytes/s that a core of speed 1 reads."""
    if config.experts or config.is_recurrent:
        raise SystemExit("mixtures of experts and recurrent layers are not predicted: wanted a model of attention and dense layers")
    writer = _Writer(config, format_of, rate, threads)
    decode(config, writer)
    return writer.works


class _Writer:
    """Notes the work of each of `model.transformer`'s operations; what goes from one to the next is the number of features."""

    def __init__(self, config: ModelConfig, format_of: Callable[[str], Format], rate: float, threads: int) -> None:
        self.works: list[Work] = []
        self._config, self._format_of, self._rate, self._threads = config, format_of, rate, threads
        self._shapes = tensor_shapes(config)

    def embed(self) -> int:
        self.works.append(Work(False, 1, NUMBER_S * self._config.hidden_size))
        return self._config.hidden_size

    def hidden(self, norm: str | None) -> int:
        return self._config.hidden_size

    def join(self, x: int, norms: tuple[str, str] | None) -> int:
        return 2 * x

    def features(self) -> int:
        return self._config.head.feature_size if self._config.head else 0

    def linears(self, x: int, names: tuple[str, ...], norm: str | None) -> tuple[int, ...]:
        self._multiply(*names)
        return tuple(self._shapes[name][0] for name in names)

    def rotate(self, layer: object, q: int, k: int) -> tuple[int, int]:
        c = self._config
        self.works.append(Work(False, c.num_heads + c.num_kv_heads, NUMBER_S * c.head_dim))
        return q, k

    def attention(self, layer: object, q: int, k: int, v: int) -> int:
        self.works.append(Work(False, self._config.num_kv_heads, NUMBER_S * q / self._config.num_kv_heads))
        return q

    def gate(self, gate: int, up: int | None, activation: str) -> int:
        return gate

    def add(self, x: int, branch: int, name: str, norm: str | None, factor: str | None = None) -> int:
        self._multiply(name)
        return x

    def keep(self, layer: object, x: int) -> None:
        pass

    def logits(self, x: int, name: str, norm: str | None) -> int:
        self._multiply(name if name in self._shapes else "embed")
        return self._config.num_logits

    def _multiply(self, *names: str) -> None:
        """The preparation of a row, and its products with matrices."""
        features, format = self._shapes[names[0]][1], self._format_of(names[0])
        parts = sharing.parts_of_row.py_func(features, 1, self._threads)
        self.works.append(Work(False, parts, NUMBER_S * features / parts))
        tiles = sum(-(-self._shapes[name][0] // TILE) for name in names)
        self.works.append(Work(True, tiles, tile_bytes(format, features) / self._rate))


def ideal_s(works: Sequence[Work], speeds: Sequence[float]) -> float:
    """Seconds that matrices take if no core ever waits."""
    return sum(one.items * one.item_s for one in works if one.tiles) / sum(speeds)


def forward_s(works: Sequence[Work], speeds: Sequence[float]) -> float:
    """Seconds of a forward as it is shared out."""
    return sum(count * _simulated_s(one, speeds) for one, count in Counter(works).items())


@dataclass
class _Number:
    """A number in memory that threads change one after the other."""

    value: int = 0
    free_s: float = 0.0

    def changed_s(self, now: float) -> float:
        """When a thread that comes now has changed it."""
        self.free_s = max(now, self.free_s) + LINE_S
        return self.free_s


def _simulated_s(work: Work, speeds: Sequence[float]) -> float:
    """Seconds of one operation: `operations.run`, thread by thread in the order of time."""
    threads, done = len(speeds), _Number()
    owners = threads if work.tiles else 1
    counters = [_Number() for _ in range(owners)]
    # When, which thread, how many counters it has seen to their end, how many items it did.
    waiting = [(LOOK_S * thread, thread, 0, 0) for thread in range(threads)]
    end = 0.0
    while waiting:
        now, thread, turn, completed = heapq.heappop(waiting)
        if turn == owners:
            if completed:
                end = max(end, done.changed_s(now))
            continue
        owner = (thread + turn) % owners
        _, items = sharing.share.py_func(work.items, owner, owners)
        first, last = _piece(work.tiles, items, counters[owner].value)
        if first == last:
            heapq.heappush(waiting, (now + LOOK_S, thread, turn + 1, completed))
            continue
        counters[owner].value += 1
        seconds = (last - first) * work.item_s / speeds[thread]
        heapq.heappush(waiting, (counters[owner].changed_s(now) + seconds, thread, turn, completed + last - first))
    return end + LOOK_S


def _piece(tiles: bool, items: int, number: int) -> tuple[int, int]:
    """The items of a piece, from and to."""
    if tiles:
        return sharing.piece.py_func(items, number), sharing.piece.py_func(items, number + 1)
    return min(number, items), min(number + 1, items)


if __name__ == "__main__":
    typer.run(main)
