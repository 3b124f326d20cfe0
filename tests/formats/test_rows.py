"""A format is one complete row: what it lacks is said when it is made or registered, and its parts give back the file's bytes."""

from dataclasses import replace

import numpy as np
import pytest

from cpuspec.formats import FORMATS, Format, table_of
from cpuspec.formats.format import scales_of
from cpuspec.formats.packing import bits, lanes

Q4_0 = FORMATS["q4_0"]


@pytest.mark.parametrize("name", FORMATS)
def test_taking_blocks_apart_and_joining_them_gives_the_bytes_of_the_file(name: str) -> None:
    row = FORMATS[name]
    data = np.random.default_rng(0).integers(0, 256, (5, row.row_bytes(768)), np.uint8)
    if name == "tq1_0":  # 13 bytes of 256 are second ways to write five digits
        data = row.join(row.split(data))
    parts = row.split(data)
    assert parts["codes"].shape == (5, 768)
    assert np.array_equal(row.join(parts), data)
    changed = data.copy()
    changed[3, 7] ^= 0x10
    assert not np.array_equal(row.join(row.split(changed)), data)


@pytest.mark.parametrize("name", [name for name, row in FORMATS.items() if row.affine])
def test_values_are_the_affine_form_of_the_parts(name: str) -> None:
    """value = d * s * level(code) - base * z * zero, with one factor for each run of codes, in exact arithmetic."""
    row = FORMATS[name]
    rng = np.random.default_rng(1)
    data = row.encode(rng.standard_normal((4, 512)).astype(np.float32))
    parts = row.split(data)
    d, s, base, z = (None if factor is None else np.asarray(factor, np.float64) for factor in scales_of(parts))
    base, z = d if base is None else base, s if z is None else z

    def wide(factor: np.ndarray | None) -> np.ndarray:
        return np.ones((4, 512)) if factor is None else np.repeat(factor, 512 // factor.shape[1], axis=1)

    assert row.affine is not None
    level = parts["codes"] if row.affine.levels is None else np.array(row.affine.levels)[parts["codes"]]
    wanted = wide(d) * wide(s) * level - wide(base) * wide(z) * row.affine.zero
    got = row.rotate(row.decode(data).reshape(-1, row.block_size)).reshape(4, 512)
    assert np.allclose(got, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())
    assert not np.allclose(got, wide(d) * wide(s) * (level + 1) - wide(base) * wide(z) * row.affine.zero, rtol=1e-3)


def test_codes_without_a_meaning_are_refused() -> None:
    with pytest.raises(AssertionError, match="format odd wants either an affine form or decode_numbers"):
        Format("odd", Q4_0.layout, 32, Q4_0.encode_blocks)
    with pytest.raises(AssertionError, match="either"):
        replace(Q4_0, decode_numbers=FORMATS["f32"].decode_numbers)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (replace(Q4_0, planes=()), r"format q4_0: its planes hold 0 of 4\.5 bits"),
        (replace(Q4_0, planes=(bits(4),)), r"its planes hold 4 of 4\.5 bits"),
        (replace(Q4_0, planes=(lanes("d", "<f2", 32),)), r"its planes hold 0\.5 of 4\.5 bits"),
        (replace(Q4_0, reader=""), "format q4_0 names no reader"),
    ],
)
def test_a_row_with_a_hole_cannot_be_registered(row: Format, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        table_of([row])


def test_two_rows_cannot_claim_one_name_or_file_type() -> None:
    with pytest.raises(AssertionError, match="same name"):
        table_of([Q4_0, replace(Q4_0, gguf_type=99)])
    with pytest.raises(AssertionError, match="same gguf_type"):
        table_of([Q4_0, replace(Q4_0, name="other")])
    with pytest.raises(AssertionError, match="same safetensors_dtype"):
        table_of([FORMATS["f32"], replace(FORMATS["f32"], name="other", gguf_type=99)])
    assert list(table_of([Q4_0, FORMATS["f32"]])) == ["q4_0", "f32"]
