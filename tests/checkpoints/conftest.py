from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from tools.make_tiny_model import make_tiny_gguf

T = gguf.GGUFValueType


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory) -> Callable[[str], Path]:
    """A one-layer GGUF file of an architecture, written once."""
    directory = tmp_path_factory.mktemp("small")

    def make(architecture: str = "qwen2") -> Path:
        path = directory / f"{architecture}.gguf"
        if not path.exists():
            # So small that a test can open hundreds of copies a second.
            make_tiny_gguf(
                path,
                architecture,
                hidden_size=32,
                intermediate_size=64,
                num_layers=1,
                num_heads=2,
                num_kv_heads=1,
                head_dim=16,
                vocab_size=260,
            )
        return path

    return make


@pytest.fixture
def edited_gguf(tmp_path) -> Callable[..., Path]:
    """A copy of a GGUF file, made by the gguf package, with some metadata and tensors changed."""

    def edit(source: Path, *, set=(), drop=(), tensors=(), drop_tensors=()) -> Path:
        """set: {key: (value, GGUFValueType)}; tensors: {name: F32 array}."""
        reader = gguf.GGUFReader(source)
        path = tmp_path / "edited.gguf"
        path.unlink(missing_ok=True)  # a new file each time: an earlier one may still be mapped
        changes = dict(set)
        writer = gguf.GGUFWriter(path, "unused")
        writer.kv_data[0].clear()
        for key, field in reader.fields.items():
            if key.startswith("GGUF.") or key in drop or key in changes:
                continue
            sub_type = field.types[1] if field.types[0] == T.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
        for key, (value, kind) in changes.items():
            writer.add_key_value(key, value, kind)
        changed = dict(tensors)
        for tensor in reader.tensors:
            if tensor.name not in drop_tensors and tensor.name not in changed:
                data = tensor.data.view(np.uint8)
                writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
        for name, values in changed.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return edit
