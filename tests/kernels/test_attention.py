"""Attention of one head against plain numpy, and what its bits may depend on."""

import numpy as np
import pytest

from cpuspec.formats.packing import aligned_bytes
from cpuspec.kernels import attention, pointwise

CAPACITY = 96


class _Head:
    """One head's cache, filled through the product's own code."""

    def __init__(self, dims: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.dims, self.padded = dims, -(-dims // 16) * 16
        self.k, self.v = rng.standard_normal((2, CAPACITY, dims)).astype(np.float32)
        self.query = rng.standard_normal(dims).astype(np.float32)
        # Whatever was in memory before must not show.
        self.keys = aligned_bytes((CAPACITY * dims * 4,))
        self.values = aligned_bytes((CAPACITY * self.padded * 4,))
        self.keys[:] = self.values[:] = 255
        self.scratch = aligned_bytes((attention.scratch_bytes(dims, CAPACITY),))

    def put(self, index: int, source: int) -> None:
        k, v = self.k[source], self.v[source]
        attention.append_key_value(
            self.keys.ctypes.data, self.values.ctypes.data, self.dims, self.padded, index, k.ctypes.data, v.ctypes.data
        )

    def attend(self, length: int, straight: int | None = None, path: list[int] | None = None) -> np.ndarray:
        return self.attend_all([self.query], [length], straight, path)[0]

    def attend_all(
        self, queries: list[np.ndarray], lengths: list[int], straight: int | None = None, path: list[int] | None = None
    ) -> np.ndarray:
        out = np.full((len(queries), self.dims + 1), np.nan, np.float32)
        self.scratch[:] = 255
        for number, (query, length) in enumerate(zip(queries, lengths, strict=True)):
            attention.put_query(self.scratch.ctypes.data, number, query.ctypes.data, out[number].ctypes.data, length)
        steps = np.array(path or [0], np.int64)
        attention.attend(
            len(queries), self.keys.ctypes.data, self.values.ctypes.data, self.dims, self.padded,
            max(lengths) if straight is None else straight, steps.ctypes.data, self.scratch.ctypes.data,
        )  # fmt: skip
        assert np.isnan(out[:, -1]).all(), "wrote past the head"
        return out[:, :-1]


@pytest.mark.parametrize("dims", [18, 32, 64, 80, 128])
@pytest.mark.parametrize("count", range(1, attention.QUERIES + 1))
def test_a_query_does_not_depend_on_those_it_goes_with(dims: int, count: int) -> None:
    head = _Head(dims)
    for position in range(60):
        head.put(position, position)
    queries = list(np.random.default_rng(1).standard_normal((count, dims)).astype(np.float32))
    lengths = [1 + (29 * number + 37) % 60 for number in range(count)]
    together = head.attend_all(queries, lengths)
    for query, length, got in zip(queries, lengths, together, strict=True):
        assert np.array_equal(head.attend_all([query], [length])[0], got)
    assert len({got.tobytes() for got in together}) == count


@pytest.mark.parametrize("dims", [2, 16, 18, 64, 80, 128])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 96])
def test_attention_is_softmax_over_the_cached_positions(dims: int, length: int) -> None:
    head = _Head(dims)
    for position in range(length):
        head.put(position, position)
    scores = head.k[:length].astype(np.float64) @ head.query
    weights = np.exp(scores - scores.max())
    wanted = weights / weights.sum() @ head.v[:length].astype(np.float64)
    assert np.allclose(head.attend(length), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dims", [16, 80, 128])
def test_later_positions_do_not_touch_a_rows_bits(dims: int) -> None:
    head = _Head(dims)
    for position in range(40):
        head.put(position, position)
    before = head.attend(37)
    for position in range(37, CAPACITY):
        head.put(position, CAPACITY - 1 - position)
    assert np.array_equal(head.attend(37), before)


@pytest.mark.parametrize("prefix", [0, 5, 16, 30])
def test_a_tree_path_has_the_bits_of_the_same_tokens_in_a_chain(prefix: int) -> None:
    """Ancestors scattered over the cache give what they give as neighbours."""
    chain, tree = _Head(64), _Head(64)
    depth = 7
    for position in range(prefix + depth):
        chain.put(position, position)
    places = [prefix + 2 * i + i % 2 for i in range(depth)]
    for position in range(prefix):
        tree.put(position, position)
    for index in range(prefix, CAPACITY):
        tree.put(index, CAPACITY - 1)
    for i, place in enumerate(places):
        tree.put(place, prefix + i)
    straight = prefix // 16 * 16
    path = [*range(straight, prefix), *places]
    assert np.array_equal(tree.attend(prefix + depth, straight, path), chain.attend(prefix + depth))
    assert not np.array_equal(tree.attend(prefix + depth), chain.attend(prefix + depth))


def test_exp_is_within_two_units_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-86, 87, 100_000), [0.0, -1e-30, 1e-30]]).astype(np.float32)
    x = np.ascontiguousarray(np.pad(x, (0, -len(x) % 16)))
    got = _exp(x)
    wanted = np.exp(x.astype(np.float64))
    assert (np.abs(got - wanted) <= 2 * np.spacing(wanted.astype(np.float32))).all()


def test_exp_at_its_ends_and_of_nan() -> None:
    x = np.zeros(16, np.float32)
    x[:5] = [-100, -np.inf, -3.4e38, np.nan, 200]
    got = _exp(x)
    assert (got[:3] == 0).all()
    assert np.isnan(got[3])
    assert got[4] > 1e38


def _exp(x: np.ndarray) -> np.ndarray:
    from numba import njit

    from cpuspec.kernels import simd

    exp_f32 = pointwise.exp_f32

    @njit
    def each(source: int, target: int, size: int) -> None:
        for at in range(0, size, 64):
            simd.store_f32(target + at, exp_f32(simd.load_f32(source + at)))

    out = np.empty_like(x)
    each(x.ctypes.data, out.ctypes.data, x.nbytes)
    return out
