"""Reads a SentencePiece model (tokenizer.model), a message of Protocol Buffers: its sentencepiece_model.proto names the fields."""

import struct
from collections.abc import Iterator
from pathlib import Path

from cpuspec.checkpoints.checkpoint import GgufVocabulary
from cpuspec.errors import TokenizerError
from cpuspec.files import read_file

_MOST_BYTES = 1 << 26
_UNIGRAM, _BPE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_Field = tuple[int, int | bytes]


def read_sentencepiece(path: Path) -> GgufVocabulary:
    """The vocabulary as a GGUF file of the same model would have it. Raises TokenizerError for any other file."""
    data = read_file(path, _MOST_BYTES, TokenizerError)
    try:
        return _read(data)
    except (ValueError, IndexError, struct.error) as error:
        raise TokenizerError(f"{path} is not a SentencePiece model: {error}") from error


def _read(data: bytes) -> GgufVocabulary:
    tokens, scores, types = [], [], []
    trainer, normalizer = {}, {}
    for number, value in _fields(data):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            piece = dict(_fields(value))
            tokens.append(_bytes(piece.get(1, b"")).decode(errors="surrogateescape"))
            scores.append(struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0])
            types.append(_integer(piece.get(3, 1)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    kind = trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE) or not tokens:
        raise ValueError(f"its model has the kind {kind!r} and {len(tokens)} pieces; wanted Unigram (1) or BPE (2) with pieces")

    def token_id(field: int, default: int) -> int | None:
        found = _integer(trainer.get(field, default)) & (1 << 32) - 1  # negative ones are for no token
        return found if found < len(tokens) else None

    return GgufVocabulary(
        model="llama" if kind == _BPE else "t5",
        pre="default",
        tokens=tuple(tokens),
        token_types=tuple(types),
        scores=tuple(scores),
        unk_id=token_id(40, 0),
        bos_id=token_id(41, 1),
        eos_id=token_id(42, 2),
        pad_id=token_id(43, -1),
        add_space_prefix=bool(normalizer.get(3, 1)),
        merges_spaces=bool(normalizer.get(4, 1)),
        charsmap=_bytes(normalizer.get(2, b"")),
    )


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field has a number instead of bytes")
    return value


def _integer(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a field has bytes instead of a number")
    return value


def _fields(data: bytes) -> Iterator[_Field]:
    """Fields of a message in their order: numbers, and others as bytes. Raises ValueError or IndexError for a damaged one."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            number, at = _varint(data, at)
            yield key >> 3, number
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a field has the wire type {kind}")
        if size > len(data) - at:
            raise ValueError(f"a field of {size} bytes at byte {at} of {len(data)}")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends."""
    number = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise ValueError(f"a number is too long at byte {at}")
