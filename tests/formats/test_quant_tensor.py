import tracemalloc

import numpy as np
import pytest

from cpuspec.errors import FormatError
from cpuspec.formats import FORMATS, QuantTensor, get_format


def random_values(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_rows_of_the_whole_tensor(name):
    tensor = QuantTensor.encode(get_format(name), random_values(9, 512))
    whole = tensor.dequantize()
    assert whole.shape == tensor.shape == (9, 512)
    assert whole.dtype == np.float32
    assert np.array_equal(tensor.rows([8, 0, 0, 3]), whole[[8, 0, 0, 3]])
    assert tensor.rows([]).shape == (0, 512)
    assert tensor.num_values == 9 * 512
    assert tensor.num_bytes == 9 * get_format(name).row_bytes(512)


@pytest.mark.parametrize("name", FORMATS)
def test_permuting_rows_moves_their_bytes(name):
    tensor = QuantTensor.encode(get_format(name), random_values(6, 256))
    order = [5, 0, 3, 1, 2, 4]
    permuted = tensor.permute_rows(order)
    assert np.array_equal(permuted.data, tensor.data[order])
    assert np.array_equal(permuted.dequantize(), tensor.dequantize()[order])


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_permuting_a_vector_moves_its_values(name):
    tensor = QuantTensor.encode(get_format(name), random_values(1, 6)[0])
    order = [5, 0, 3, 1, 2, 4]
    assert np.array_equal(tensor.permute_rows(order).dequantize(), tensor.dequantize()[order])


def test_a_vector_in_blocks_cannot_be_permuted():
    with pytest.raises(FormatError, match="share scales"):
        QuantTensor.encode(get_format("q8_0"), random_values(1, 32)[0]).permute_rows(np.arange(32))


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], [0, 1, -1], [[0, 1, 2]], [0.0, 1.0, 2.0]])
def test_what_is_no_permutation_is_refused(order):
    with pytest.raises(FormatError, match="row"):
        QuantTensor.encode(get_format("f32"), random_values(3, 4)).permute_rows(order)


@pytest.mark.parametrize("indices", [[3], [-1], [0, 1 << 40]])
def test_a_row_that_is_not_there_is_refused(indices):
    with pytest.raises(FormatError, match="from 0 to 2"):
        QuantTensor.encode(get_format("f32"), random_values(3, 4)).rows(indices)


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ((2, 32), np.zeros((2, 17), np.uint8)),
        ((2, 32), np.zeros((3, 18), np.uint8)),
        ((2, 32), np.zeros(36, np.uint8)),
        ((2, 32), np.zeros((2, 18), np.int8)),
        ((2, 32), np.zeros((2, 36), np.uint8)[:, ::2]),
        ((2, 33), np.zeros((2, 18), np.uint8)),
        ((0, 32), np.zeros((0, 18), np.uint8)),
        ((1, 1, 2, 32), np.zeros((1, 1, 2, 18), np.uint8)),
        ((1, 2, 32), np.zeros((2, 18), np.uint8)),
        ((), np.zeros((), np.uint8)),
    ],
)
def test_bytes_that_do_not_fit_the_shape_are_refused(shape, data):
    with pytest.raises(FormatError):
        QuantTensor(get_format("q4_0"), shape, data)


@pytest.mark.parametrize("name", FORMATS)
def test_dequantizing_allocates_little_besides_the_result(name):
    format = get_format(name)
    tensor = QuantTensor(format, (2048, 2048), np.zeros((2048, format.row_bytes(2048)), np.uint8))
    tracemalloc.start()
    try:
        result = tensor.dequantize()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < result.nbytes + (6 << 20)
