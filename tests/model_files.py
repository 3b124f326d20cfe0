"""Model files of tests, taken apart, changed and written again without any code of the readers."""

import json
import tracemalloc
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Stored = tuple[str, list[int], bytes]  # type, shape and bytes of a tensor


@contextmanager
def few_bytes(most: int) -> Iterator[None]:
    """Fails if Python's allocations within take more than `most` bytes at a time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def write_anew(path: Path, content: bytes) -> Path:
    """Write a file under a new inode: an earlier one of this name may still be mapped."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    return path


# ------------------------------------------------------------------------------------------------------------------ safetensors


def split_safetensors(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header, and the bytes of the tensors."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def join_safetensors(header: bytes | object, payload: bytes) -> bytes:
    """The inverse of `split_safetensors`; header: its text, or what becomes JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def read_tensors(path: Path) -> dict[str, Stored]:
    """The tensors of a file."""
    header, blob = split_safetensors(path.read_bytes())
    header.pop("__metadata__", None)
    return {name: (one["dtype"], one["shape"], blob[slice(*one["data_offsets"])]) for name, one in header.items()}


def write_tensors(path: Path, tensors: Mapping[str, Stored]) -> Path:
    """The inverse of `read_tensors`."""
    header, blob = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    return write_anew(path, join_safetensors(header, blob))


# ------------------------------------------------------------------------------------------------------------------------- GGUF

T = gguf.GGUFValueType


def typed(value: Any) -> tuple[Any, T]:
    """A value of metadata with the type that converters give it."""
    kinds = ((bool, T.BOOL), (int, T.UINT32), (float, T.FLOAT32), (str, T.STRING), (list, T.ARRAY))
    return value, T.INT32 if type(value) is int and value < 0 else next(kind for one, kind in kinds if isinstance(value, one))


def copy_gguf(
    source: Path,
    path: Path,
    *,
    set: Mapping[str, tuple[Any, T]] | Collection = (),
    drop: Collection[str] | None = (),
    tensors: Mapping[str, Any] | Collection = (),
    drop_tensors: Collection[str] = (),
    alignment: int = 0,
) -> Path:
    """A copy of a GGUF file, made by the gguf package, with some metadata and tensors changed.

    set: values with their types by key. drop: None is all of the source's metadata. tensors: f32 arrays by name, or (bytes, type).
    """
    reader, changes, changed = gguf.GGUFReader(source), dict(set), dict(tensors)
    path.unlink(missing_ok=True)
    writer = gguf.GGUFWriter(path, "unused")
    writer.kv_data[0].clear()
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, field in reader.fields.items() if drop is not None else ():
        if not key.startswith("GGUF.") and key not in drop and key not in changes:
            sub_type = field.types[1] if field.types[0] == T.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    for key, (value, kind) in changes.items():
        writer.add_key_value(key, value, kind)
    for tensor in reader.tensors:
        if tensor.name not in drop_tensors and tensor.name not in changed:
            writer.add_tensor(tensor.name, tensor.data.view(np.uint8), raw_dtype=tensor.tensor_type)
    for name, values in changed.items():
        data, kind = values if isinstance(values, tuple) else (values, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
