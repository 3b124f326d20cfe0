"""A pass of a linear layer: some tiles times some rows, and the end that all passes have in common."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from cpuspec.kernels.ops import Ops, Value
from cpuspec.kernels.products import BLOCK_ROWS
from cpuspec.kernels.simd import emitted


class Operands(NamedTuple):
    """The operands of a kernel of `linear` besides the tiles: int64 addresses, byte counts and numbers."""

    matrix: Any
    tile_bytes: Any
    in_features: Any
    acts: Any
    row_bytes: Any  # of activations
    rows: Any
    bias: Any  # 0 for none
    residual: Any  # 0 for none
    out: Any
    stride: Any  # from a row of out and of residual to the next


@dataclass(frozen=True)
class Pass:
    """Tiles and rows that are multiplied together: `num_tiles` tiles, `apart` tiles from each other, and `rows` rows."""

    o: Ops
    operands: Operands
    tile: Value  # the first
    num_tiles: Value
    apart: Value
    row: Value  # the first
    rows: Value

    @property
    def weights(self) -> Value:
        """The address of the first tile."""
        return self.operands.matrix + self.tile * self.operands.tile_bytes

    @property
    def bytes_apart(self) -> Value:
        """The bytes from a tile to the next."""
        return self.apart * self.operands.tile_bytes

    @property
    def acts(self) -> Value:
        """The address of the activations of the first row, which begins a block."""
        return self.operands.acts + self.row * self.operands.row_bytes

    def finish(self, number: Value, row: Value | int, values: Value) -> None:
        """`finish_rows` for one row."""
        self.finish_rows(number, [(row, values)])

    def finish_rows(self, number: Value, rows: list[tuple[Value | int, Value]]) -> None:
        """Store the 16 outputs of rows, counted from the first, and of the `number`-th of the tiles: products + bias + residual."""
        operands, tile = self.operands, (self.tile + number * self.apart) * 64
        totals = [((self.row + row) * operands.stride + tile, self.o.variable(values)) for row, values in rows]
        with self.o.when(operands.bias.differs(0)):
            for _, total in totals:
                total.set(total.get() + (operands.bias + tile).f32())
        with self.o.when(operands.residual.differs(0)):
            for place, total in totals:
                total.set(total.get() + (operands.residual + place).f32())
        for place, total in totals:
            (operands.out + place).store(total.get())


def pass_of(emit: Callable[[Pass], None]) -> Any:
    """A Numba function of (Operands, first tile, number of tiles, tiles apart, first row, rows), whose body `emit` appends."""
    return emitted(lambda o, operands, *numbers: emit(Pass(o, operands, *numbers)))


def block_of(p: Pass, input_bytes: int) -> tuple[Value, Value]:
    """The address of the activations of the first row, wherever in its block it is, and the rows of that block.

    input_bytes: from what the block has of a row to what it has of the next.
    """
    inside = p.row & (BLOCK_ROWS - 1)
    start = p.row - inside
    here = p.operands.acts + start * p.operands.row_bytes + inside * input_bytes
    return here, (p.operands.rows - start).smaller(BLOCK_ROWS)
