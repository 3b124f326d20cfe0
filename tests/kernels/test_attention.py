"""Attention of one head against plain numpy in every KV format, and what its bits may depend on."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from cpuspec.formats.kv import KV_FORMATS, encode_rows, rounded
from cpuspec.formats.packing import aligned_bytes
from cpuspec.kernels import attention, attention_bf16, isa, kv_rows, pointwise
from cpuspec.kernels.layout import MAX_QUERIES, WALK

CAPACITY = 2 * kv_rows.CHUNK + 88

# Queries of a walk: few, and so many that keys and values are widened first, where a processor's kernels do that.
COUNTS = sorted({min(count, attention.QUERIES) for count in (*range(1, 9), 13, 23, 24, 25, 37, attention.QUERIES)})

needs_bf16 = pytest.mark.skipif(not isa.has_bf16_dots(), reason="this processor does not multiply bf16")
KERNELS = {"vectors": attention.attend_kernel, "bf16": attention_bf16.attend_kernel}


@pytest.fixture(params=["vectors", pytest.param("bf16", marks=needs_bf16)])
def kernel(request: pytest.FixtureRequest) -> str:
    return request.param


def _function(address: int, arguments: int) -> Callable[..., None]:
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(address)


class _Head:
    """One head's cache, filled and read through the product's own code."""

    def __init__(self, name: str, dims: int, seed: int = 0, kernel: str = "vectors", value_dims: int = 0) -> None:
        value_dims = value_dims or dims
        rng = np.random.default_rng(seed)
        self.format, self.dims, self.value_dims = KV_FORMATS[name], dims, value_dims
        self.k, self.v = (rng.standard_normal((CAPACITY, size)).astype(np.float32) for size in (dims, value_dims))
        self.query = rng.standard_normal(dims).astype(np.float32)
        # Whatever was in memory before must not show.
        self.cache = aligned_bytes((kv_rows.num_chunks(CAPACITY) * kv_rows.chunk_bytes(name, dims, value_dims),))
        self.cache[:] = 255
        self.size, self.partials = attention.partial_bytes(name, value_dims), attention.partials_offset(name, dims, value_dims)
        self.scratch = aligned_bytes((self.partials + 2 * MAX_QUERIES * self.size,))
        self._append = _function(kv_rows.append_kernel(name), 6)
        self._attend = _function(KERNELS[kernel](name), 8)

    def put(self, index: int, source: int) -> None:
        k, v = self.k[source], self.v[source]
        self._append(self.cache.ctypes.data, self.dims, self.value_dims, index, k.ctypes.data, v.ctypes.data)

    def fill(self, length: int) -> "_Head":
        for position in range(length):
            self.put(position, position)
        return self

    def attend(self, length: int, straight: int | None = None, path: list[int] | None = None) -> np.ndarray:
        return self.attend_all([self.query], [length], straight, path)[0]

    def attend_all(
        self, queries: list[np.ndarray], lengths: list[int], straight: int | None = None, path: list[int] | None = None
    ) -> np.ndarray:
        out = np.full((len(queries), self.value_dims + 1), np.nan, np.float32)
        self.scratch[:] = 255
        walk = self.scratch[: WALK.itemsize].view(WALK)[0]
        scratch, steps = self.scratch.ctypes.data, np.array(path or [0], np.int64)
        merged = [scratch + self.partials + (MAX_QUERIES + number) * self.size for number in range(len(queries))]
        for first in range(0, max(lengths), kv_rows.CHUNK):
            there = [number for number, length in enumerate(lengths) if length > first]
            walked = [scratch + self.partials + place * self.size for place in range(len(there))]
            for place, number in enumerate(there):
                partial = walked[place] if first else merged[number]
                walk["queries"][place], walk["partials"][place] = queries[number].ctypes.data, partial
                walk["lengths"][place] = lengths[number]
            straight_here = max(lengths) if straight is None else straight
            dims = self.dims, self.value_dims
            self._attend(len(there), self.cache.ctypes.data, *dims, first, straight_here, steps.ctypes.data, scratch)
            for place, number in enumerate(there):
                if first:
                    attention.merge(merged[number], walked[place], self.size)
        for partial, row in zip(merged, out, strict=True):
            attention.finish(partial, self.size, self.value_dims, row.ctypes.data, 0)
        assert np.isnan(out[:, -1]).all(), "wrote past the head"
        return out[:, :-1]

    def held(self, index: int) -> tuple[bytes, bytes]:
        """The key and the value at an index, as rows of the format, put together from where the kernels look for them."""
        chunk = self.cache.reshape(kv_rows.num_chunks(CAPACITY), -1)[index // kv_rows.CHUNK]
        keys, values = np.split(chunk, [kv_rows.chunk_bytes(self.format.name, self.dims, 0)])
        values = values.reshape(kv_rows.CHUNK, -1)
        place, lane = divmod(index % kv_rows.CHUNK, 16)
        block = keys.reshape(kv_rows.CHUNK // 16, -1)[place]
        if self.format.block_size == 1:
            return block.reshape(-1, 16, self.format.block_bytes)[:, lane].tobytes(), values[index % kv_rows.CHUNK].tobytes()
        groups = block.reshape(-1, 16 * self.format.block_bytes)
        scales = groups[:, :64].reshape(-1, 2, 16, 2)[:, :, lane].reshape(len(groups), 4)
        codes = groups[:, 64:].reshape(len(groups), -1, 16)[:, :, lane]
        return np.concatenate([scales, codes], axis=1).tobytes(), values[index % kv_rows.CHUNK].tobytes()


@pytest.fixture(params=KV_FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("dims", [2, 18, 32, 64, 80, 128])
def test_the_cache_holds_the_bytes_of_the_format(name: str, dims: int) -> None:
    head = _Head(name, dims)
    strange = [0.0, -0.0, np.inf, -np.inf, 1e-9, 65520.0, 3e38, -1e-42, 1.00390625, 0.33337402, 1e6]
    head.k[20, : len(strange)], head.v[21, : len(strange)] = strange[:dims], strange[:dims]
    head.k[22, 1], head.v[20, 0] = np.nan, np.nan
    head.k[23], head.v[23] = 0, -300.5
    head.k[24] *= np.float32(1e-7)
    for index in (*range(40), 255, 256, CAPACITY - 1):
        head.put(index, index)
    for index in (*range(40), 255, 256, CAPACITY - 1):
        key, value = head.held(index)
        for got, row in ((key, head.k[index]), (value, head.v[index])):
            wanted = encode_rows(head.format, row)
            if np.isfinite(row).all():
                assert got == wanted.tobytes()
            else:  # which nan it is, and what is under a scale that is not finite, is nobody's business
                both = [head.format.decode(data) for data in (np.frombuffer(got, np.uint8), wanted)]
                assert np.array_equal(*both, equal_nan=True)


@pytest.mark.parametrize("dims", [(2, 2), (16, 16), (18, 18), (64, 64), (80, 80), (512, 512), (96, 32), (34, 130)])
def test_attention_is_softmax_over_the_cached_positions(name: str, dims: tuple[int, int], kernel: str) -> None:
    """In bf16 over what is rounded to that."""
    for length in (1, 15, 16, 17, 33, 255, 256, 257, CAPACITY):
        head = _Head(name, dims[0], value_dims=dims[1], kernel=kernel).fill(length)
        of = (head.query, *(rounded(head.format, rows[:length]) for rows in (head.k, head.v)))
        query, keys, values = (rounded(KV_FORMATS["bf16"], x) if kernel == "bf16" else x.astype(np.float64) for x in of)
        scores = keys @ query
        weights = np.exp(scores - scores.max())
        wanted, got = weights / weights.sum() @ values, head.attend(length)
        if kernel == "vectors":
            assert np.allclose(got, wanted, rtol=1e-4, atol=2e-5), length
        else:
            assert np.allclose(got, wanted, atol=2**-8 * np.abs(values).max()), length
            assert length == 1 or not np.array_equal(got, _Head(name, dims[0], value_dims=dims[1]).fill(length).attend(length))


@pytest.mark.parametrize("dims", [18, 64, 80, 128])
def test_a_query_does_not_depend_on_those_it_goes_with(name: str, dims: int, kernel: str) -> None:
    head = _Head(name, dims, kernel=kernel).fill(300)
    for count in COUNTS if kernel == "vectors" else [*COUNTS, 17, MAX_QUERIES]:
        queries = list(np.random.default_rng(1).standard_normal((count, dims)).astype(np.float32))
        for lengths in ([1 + (29 * n + 37) % 60 for n in range(count)], [253 + (n * 3) % 8 for n in range(count)]):
            together = head.attend_all(queries, lengths)
            for query, length, got in zip(queries, lengths, together, strict=True):
                assert np.array_equal(head.attend_all([query], [length])[0], got), count
            several = [got.tobytes() for got, length in zip(together, lengths, strict=True) if length > 1]  # one gives its value
            assert len(set(several)) == len(several) >= count - 3


@pytest.mark.parametrize("dims", [(18, 18), (64, 64), (80, 34)])
def test_rows_are_copied_bit_for_bit(name: str, dims: tuple[int, int]) -> None:
    heads = [_Head(name, dims[0], seed, value_dims=dims[1]).fill(CAPACITY) for seed in range(2)]
    both = np.stack([head.cache for head in heads])
    rows = [254, 255, 256, 300, CAPACITY - 1]
    wanted = [[head.held(index) for index in [*range(251), *rows, *range(256, CAPACITY)]] for head in heads]
    kv_rows.copy_rows(name, *dims, both, np.array(rows, np.int32), 251)
    for head, cache, held in zip(heads, both, wanted, strict=True):
        head.cache = cache
        assert [head.held(index) for index in range(CAPACITY)] == held


@pytest.mark.parametrize("count", [2, attention.QUERIES])
@pytest.mark.parametrize("of", ["k", "v"])
def test_a_nan_shows_in_the_queries_that_see_it_and_in_no_other(name: str, count: int, of: str, kernel: str) -> None:
    head = _Head(name, 64, kernel=kernel)
    alone = head.fill(300).attend(260)
    getattr(head, of)[260, :] = np.nan
    head.fill(300)
    got = head.attend_all([head.query] * count, [260, 261] * (count // 2))
    assert all(np.array_equal(row, alone) for row in got[::2])
    assert np.isnan(got[1::2]).all()


def test_exp_is_within_two_units_in_the_last_place_and_knows_its_ends() -> None:
    x = np.concatenate([np.linspace(-86, 87, 100_000), [0.0, -1e-30, 1e-30]]).astype(np.float32)
    ends = np.array([-100, -np.inf, -3.4e38, np.nan, 200], np.float32)
    got = _exp(np.ascontiguousarray(np.pad(np.concatenate([ends, x]), (0, -(len(x) + 5) % 16))))
    wanted = np.exp(x.astype(np.float64))
    assert (np.abs(got[5 : len(x) + 5] - wanted) <= 2 * np.spacing(wanted.astype(np.float32))).all()
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
