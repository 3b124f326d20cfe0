"""Converts a file's tensors to those that `layers` describes ("canonical" ones), and back.

Tensors are renamed, split, stacked and reordered, and norms get an offset. `families.Family` declares what a family needs. Data
are copied only where rows change their order or values change.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints.families import FUSED, GLOBAL_NAMES, WITHOUT_Q_RANK, Family
from cpuspec.config import DeltaNet, Mamba2, ModelConfig
from cpuspec.errors import CheckpointError, FormatError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.layers import I32, Shape, rotary_order

GGUF, HF = 0, 1  # kinds of files: indices into the pairs of `Family.layer_names`
_EXPERT = r"(0|[1-9][0-9]{0,4})"


class Names:
    """Maps the names of a family's files to canonical names."""

    def __init__(self, family: Family, kind: int) -> None:
        self._globals = {theirs[kind]: ours for ours, theirs in {**GLOBAL_NAMES, **family.global_names}.items()}
        parts = {theirs[kind]: ours for ours, theirs in family.layer_names.items() if theirs[kind]}
        self._parts = {**FUSED, **parts, **family.other_names}
        self._of_experts = {
            re.compile(re.escape(theirs).replace(r"\*", _EXPERT)): ours for theirs, ours in self._parts.items() if "*" in theirs
        }
        self._layer = re.compile(re.escape(_layers_in(family, kind)) + r"\.(0|[1-9][0-9]{0,8})\.(.+)", re.DOTALL)

    def layer_of(self, name: str) -> int:
        """The layer that a tensor of the file belongs to; -1 for none."""
        found = self._layer.fullmatch(name)
        return int(found[1]) if found else -1

    def ours(self, name: str) -> str:
        """The canonical name of a tensor of the file; "" for an unknown one.

        A tensor of several parts has their names joined: "a+b" for one after the other along the rows, "a&b" for alternating rows,
        "a|b" for head by head. "a^T" has the inputs first. "a@3" is the matrix of expert 3.
        """
        layer = self._layer.fullmatch(name)
        if layer is None:
            return self._globals.get(name, "")
        part = self._parts.get(layer[2], "")
        if not part:
            for pattern, ours in self._of_experts.items():
                if found := pattern.fullmatch(layer[2]):
                    part = f"{ours}@{int(found[1])}"
        return f"layers.{layer[1]}.{part}" if part else ""


def _layers_in(family: Family, kind: int) -> str:
    return ("blk", f"{family.hf_root}.layers")[kind]


def file_names(family: Family, kind: int, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The tensors of a file: the name of each, with the canonical names of its parts in the order of their rows.

    names: of all tensors, canonical.
    """
    whole, names = {**GLOBAL_NAMES, **family.global_names}, list(names)
    parts = ((ours, theirs[kind], re.split("[+|]", ours)) for ours, theirs in family.layer_names.items() if theirs[kind])
    joined = {part: (ours, theirs) for ours, theirs, split in parts for part in split}
    if family.latent and not any(name.endswith(".q_a") for name in names):
        joined = {part: (ours, WITHOUT_Q_RANK.get(theirs, theirs)) for part, (ours, theirs) in joined.items()}
    found: dict[str, list[str]] = {}
    for name in names:
        if name in whole:
            found[whole[name][kind]] = [name]
            continue
        _, layer, part = name.split(".")
        ours, theirs = joined[part]
        found[f"{_layers_in(family, kind)}.{layer}.{theirs}"] = [f"layers.{layer}.{one}" for one in re.split("[+|]", ours)]
    return {theirs: tuple(ours) for theirs, ours in found.items()}


def joined(config: ModelConfig, family: Family, kind: int, tensors: Mapping[str, QuantTensor]) -> QuantTensor:
    """The tensor of a file that has these canonical tensors as its parts: the inverse of `arranged`.

    Raises FormatError where parts of one tensor have several formats.
    """
    parts = [in_file_order(config, family, kind, name, tensor) for name, tensor in tensors.items()]
    if len(parts) == 1:
        return parts[0]
    if next(iter(tensors)).endswith(".k_b"):
        return _key_by_value(*parts)
    first = parts[0]
    if other := next((part.format.name for part in parts if part.format is not first.format), ""):
        raise FormatError(
            f"{' and '.join(tensors)} are one tensor in the file; wanted one format for them, got {first.format.name} and {other}"
        )
    data = [np.stack([matrix.data for matrix in part.matrices]) if part.parts else part.data for part in parts]
    shape = joined_shape([part.shape for part in parts])
    whole = QuantTensor(first.format, shape, np.concatenate(data, axis=int(len(shape) == 3)), first.order)
    order = _by_group(config, family, kind, "+".join(name.rpartition(".")[2] for name in tensors))
    return whole if order is None else whole.permute_rows(np.argsort(order))


def joined_shape(shapes: Sequence[Shape]) -> Shape:
    """The shape of a tensor that joins parts of these shapes."""
    first, axis = shapes[0], int(len(shapes[0]) == 3)
    return (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])


def _by_group(config: ModelConfig, family: Family, kind: int, parts: str) -> I32 | None:
    """For joined parts that files store head by head: the file's row of each of our rows, part after part. None for others."""
    c, delta = config, config.recurrent
    if parts == "q_plain+q_rope" and c.latent:
        heads, sizes = c.num_heads, [c.latent.plain, c.latent.rope_dims]
    elif parts == "q+q_gate":
        heads, sizes = c.num_heads, [c.head_dim, c.head_dim]
    elif parts in ("q+k+v", "q_bias+k_bias+v_bias") and family.hf_groups_heads and kind == HF:
        heads, sizes = c.num_kv_heads, [c.num_heads // c.num_kv_heads * c.head_dim, c.head_dim, c.head_dim]
    elif parts == "delta_qkv+delta_gate" and isinstance(delta, DeltaNet):
        values = delta.value_heads // delta.key_heads * delta.value_dims
        heads, sizes = delta.key_heads, [delta.key_dims, delta.key_dims, values, values]
    elif parts == "delta_beta+delta_alpha" and isinstance(delta, DeltaNet):
        heads, sizes = delta.key_heads, [delta.value_heads // delta.key_heads] * 2
    else:
        return None
    rows = np.arange(heads * sum(sizes), dtype=np.int32).reshape(heads, -1)
    return np.concatenate([part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)])


def arranged(
    what: str, config: ModelConfig, family: Family, kind: int, named: Mapping[str, QuantTensor], wanted: Mapping[str, Shape]
) -> dict[str, QuantTensor]:
    """The canonical tensors. named: a file's tensors, by the names of `Names.ours`. wanted: the shapes of the canonical ones.

    Layers that borrow the keys and values of others may have matrices for their own in the file. Nothing reads them, so they are
    left out. Raises CheckpointError where a joined tensor does not have the sizes of its parts, or rows cannot be reordered.
    """
    tensors: dict[str, QuantTensor] = {}
    experts: dict[str, dict[int, QuantTensor]] = {}

    def add(name: str, tensor: QuantTensor) -> None:
        order = _by_group(config, family, kind, name.rpartition(".")[2])
        if order is not None and tensor.shape[0] == len(order):
            tensor = tensor.permute_rows(order)
        parts = _split(what, name, tensor, wanted)
        if twice := parts.keys() & tensors.keys():
            raise CheckpointError(f"{what}: tensor {min(twice)} is there twice, alone and as a part of another; wanted it once")
        tensors.update(parts)

    borrowing = [i for i, owner in enumerate(config.layer_owners) if owner != i]
    unread = {f"layers.{i}.{part}" for i in borrowing for part in ("k", "v", "k_norm")}
    for name, tensor in named.items():
        if name in unread:
            continue
        ours, _, expert = name.partition("@")
        if expert:
            experts.setdefault(ours, {})[int(expert)] = tensor
        else:
            add(ours, tensor)
    for name, of_each in experts.items():
        if sorted(of_each) != list(range(len(of_each))):
            raise CheckpointError(
                f"{what}: {name} has {len(of_each)} experts, up to number {max(of_each)}; this is not a whole model"
            )
        try:
            parts = [of_each[i] for i in range(len(of_each))]
            add(name, _rows_of(parts) if len(parts[0].shape) == 1 else QuantTensor.stack(parts))
        except FormatError as error:
            raise CheckpointError(f"{what}: {name}: {error}") from error
    try:
        return {name: _arranged(config, family, kind, name, tensor, wanted.get(name, ())) for name, tensor in tensors.items()}
    except FormatError as error:
        raise CheckpointError(f"{what}: {error}") from error


def _arranged(config: ModelConfig, family: Family, kind: int, name: str, tensor: QuantTensor, shape: Shape) -> QuantTensor:
    """One canonical tensor with its rows in our order, in our shape, and with our values (decays, norms with an offset)."""
    alike = [n for n in tensor.shape if n > 1] == [n for n in shape if n > 1] and not tensor.parts
    if shape and (alike or tensor.shape == file_shape(config, kind, name, shape)):
        tensor = _shaped(tensor, shape)
    if name.endswith(("delta_decay", "ssm_a")) and kind == HF:  # whose files have the logarithm of its negative
        tensor = QuantTensor.encode(get_format("f32"), -np.exp(tensor.dequantize()))
    tensor = with_offset(tensor, _offset(family, kind, name))
    return in_our_order(config, family, kind, name, tensor) if tensor.shape == shape else tensor


def file_shape(config: ModelConfig, kind: int, name: str, shape: Shape) -> Shape:
    """The shape of a canonical tensor in files of a kind. shape: its own."""
    part, mixer = name.rpartition(".")[2], config.recurrent
    if part.endswith("_conv") and kind == HF:
        return shape[0], 1, shape[1]
    if part in ("ssm_a", "ssm_d") and kind == GGUF:
        return *shape, 1
    if part == "ssm_norm" and kind == GGUF and isinstance(mixer, Mamba2):
        return mixer.key_heads, shape[0] // mixer.key_heads
    return shape


def _rows_of(vectors: Sequence[QuantTensor]) -> QuantTensor:
    """The biases of experts as rows of one tensor. Raises FormatError where they differ in size or format."""
    first = vectors[0]
    if other := next((one for one in vectors if one.format is not first.format or one.shape != first.shape), None):
        raise FormatError(
            f"biases of experts have one size and format, got {first.format.name} {list(first.shape)} and "
            f"{other.format.name} {list(other.shape)}"
        )
    return QuantTensor(first.format, (len(vectors), *first.shape), np.stack([one.data for one in vectors]))


def _shaped(tensor: QuantTensor, shape: Shape) -> QuantTensor:
    return tensor if tensor.shape == shape else QuantTensor(tensor.format, shape, tensor.data.reshape(*shape[:-1], -1))


def _split(what: str, name: str, tensor: QuantTensor, wanted: Mapping[str, Shape]) -> dict[str, QuantTensor]:
    """The parts of a tensor by name. name: the parts' names, joined as in `Family.other_names`."""
    start, _, last = name.rpartition(".")
    if last == "k_b|v_b":
        return _by_head(what, name, tensor, wanted)
    last, transposed, _ = last.partition("^T")
    if transposed:
        tensor = _transposed(what, name, tensor)
    parts = [f"{start}.{part}" if start else part for part in re.split("[+&]", last)]
    if len(parts) == 1:
        return {parts[0]: tensor}
    axis = -1 if last.endswith("_bias") or len(tensor.shape) == 1 else -2
    sizes = [wanted[part][axis] if part in wanted else 0 for part in parts]
    if 0 in sizes or sum(sizes) != tensor.shape[axis]:
        raise CheckpointError(f"{what}: {name} has {tensor.shape[axis]} rows, wanted those of its parts, {sizes}")
    if "&" in last:
        return {part: _each(tensor, axis, number, len(parts)) for number, part in enumerate(parts)}
    found, first = {}, 0
    for part, size in zip(parts, sizes, strict=True):
        found[part] = _some(tensor, axis, first, first + size)
        first += size
    return found


def _by_head(what: str, name: str, tensor: QuantTensor, wanted: Mapping[str, Shape]) -> dict[str, QuantTensor]:
    """Copies of the matrices of each head, from one that has the rows of keys and values head by head; keys transposed.

    A transposed matrix cannot keep its blocks, so keys in a block format become f32.
    """
    of_keys, of_values = (name.rpartition(".")[0] + part for part in (".k_b", ".v_b"))
    if of_keys not in wanted:
        raise CheckpointError(f"{what}: {name} is there, and this model has no place for it")
    (heads, rank, plain), (_, value_dims, _) = wanted[of_keys], wanted[of_values]
    if tensor.shape != (heads * (plain + value_dims), rank):
        raise CheckpointError(f"{what}: {name} has the shape {list(tensor.shape)}, wanted {[heads * (plain + value_dims), rank]}")
    if tensor.order is not None:
        tensor = QuantTensor.encode(get_format("f32"), tensor.dequantize())
    rows, f32 = tensor.data.reshape(heads, plain + value_dims, -1), get_format("f32")
    keys, values = np.ascontiguousarray(rows[:, :plain]), np.ascontiguousarray(rows[:, plain:])
    matrices = QuantTensor(tensor.format, (heads, plain, rank), keys)
    if tensor.format.block_size != 1:
        matrices = QuantTensor.encode(f32, matrices.dequantize())
    return {of_keys: _transposed(what, of_keys, matrices), of_values: QuantTensor(tensor.format, (heads, value_dims, rank), values)}


def _key_by_value(of_keys: QuantTensor, of_values: QuantTensor) -> QuantTensor:
    """The inverse of `_by_head`, in f32 unless both matrices have the same format of plain numbers."""
    if of_keys.format is not of_values.format or of_keys.format.block_size != 1:
        of_keys, of_values = (QuantTensor.encode(get_format("f32"), one.dequantize()) for one in (of_keys, of_values))
    of_keys, (heads, _, rank) = _transposed("", "k_b", of_keys), of_values.shape
    rows = np.concatenate([one.data.reshape(heads, -1, one.format.row_bytes(rank)) for one in (of_keys, of_values)], axis=1)
    return QuantTensor(of_values.format, (rows.shape[0] * rows.shape[1], rank), rows.reshape(-1, rows.shape[2]))


def _some(tensor: QuantTensor, axis: int, first: int, last: int) -> QuantTensor:
    if axis == -2:
        return tensor.rows_from(first, last)
    size = tensor.format.block_bytes
    data = np.ascontiguousarray(tensor.data[..., first * size : last * size])
    return QuantTensor(tensor.format, (*tensor.shape[:-1], last - first), data)


def _each(tensor: QuantTensor, axis: int, first: int, step: int) -> QuantTensor:
    """A copy of the rows (of vectors: numbers) first, first + step, and so on."""
    units = tensor.data.reshape(*tensor.shape, tensor.format.block_bytes) if axis == -1 else tensor.data
    if tensor.parts:
        units = np.stack([part.data for part in tensor.parts])
    data = np.ascontiguousarray(units[..., first::step, :])
    shape = (*tensor.shape[:axis], data.shape[-2], *tensor.shape[axis:][1:])
    return QuantTensor(tensor.format, shape, data.reshape(*shape[:-1], -1))


def _transposed(what: str, name: str, tensor: QuantTensor) -> QuantTensor:
    """A copy of experts' matrices, [experts, in, out] in the file, as [experts, out, in]."""
    if len(tensor.shape) != 3 or tensor.format.block_size != 1:
        raise CheckpointError(
            f"{what}: {name.partition('^')[0]} is {tensor.format.name} {list(tensor.shape)}, wanted f32, f16 or bf16 of each expert"
        )
    count, columns, rows = tensor.shape
    units = tensor.data.reshape(count, columns, rows, -1).swapaxes(1, 2)
    return QuantTensor(tensor.format, (count, rows, columns), np.ascontiguousarray(units).reshape(count, rows, -1))


def _offset(family: Family, kind: int, name: str) -> float:
    """The number to add to a tensor of a file: 1 for norms of families whose files hold them less 1."""
    return family.norm_offset if kind == HF and name.endswith("norm") and not name.endswith("delta_norm") else 0.0


def with_offset(tensor: QuantTensor, offset: float) -> QuantTensor:
    """The tensor plus `offset`, in f32: 1 plus a small weight needs more bits than f16 and bf16 have."""
    return QuantTensor.encode(get_format("f32"), tensor.dequantize() + np.float32(offset)) if offset else tensor


def in_our_order(config: ModelConfig, family: Family, kind: int, name: str, tensor: QuantTensor) -> QuantTensor:
    """A canonical tensor of a file with its rows of queries and keys, or its value heads, in our order."""
    order = _order(config, family, kind, name)
    return tensor if order is None else _permuted(config, name, tensor, order)


def in_file_order(config: ModelConfig, family: Family, kind: int, name: str, tensor: QuantTensor) -> QuantTensor:
    """A canonical tensor with a file's shape, order of rows and values: the inverse of `_arranged`."""
    if name.endswith(("delta_decay", "ssm_a")) and kind == HF:
        tensor = QuantTensor.encode(get_format("f32"), np.log(-tensor.dequantize()))
    tensor, order = with_offset(tensor, -_offset(family, kind, name)), _order(config, family, kind, name)
    tensor = tensor if order is None else _permuted(config, name, tensor, np.argsort(order))
    return _shaped(tensor, file_shape(config, kind, name, tensor.shape))


def _permuted(config: ModelConfig, name: str, tensor: QuantTensor, order: NDArray[np.integer]) -> QuantTensor:
    """The tensor with its rows in another order. `delta_o` reads value heads, so there the heads of its columns are reordered.

    Raises FormatError where heads are no whole blocks.
    """
    if not name.endswith("delta_o"):
        return tensor.permute_rows(order.astype(np.int32))
    assert isinstance(config.recurrent, DeltaNet), "the layer has one"
    if config.recurrent.value_dims % tensor.format.block_size or tensor.order is not None:
        raise FormatError(f"{name} is {tensor.format.name}, whose blocks are longer than a head of {config.recurrent.value_dims}")
    heads = tensor.data.reshape(tensor.shape[0], len(order), -1)
    return QuantTensor(tensor.format, tensor.shape, np.ascontiguousarray(heads[:, order]).reshape(tensor.data.shape))


def _order(config: ModelConfig, family: Family, kind: int, name: str) -> I32 | None:
    """The file's row of each of our rows of queries, keys or value heads (`delta_o`: the file's head). None: the same order."""
    part = name.rpartition(".")[2]
    if part.startswith("delta_") and part != "delta_norm" and family.tiles_values and kind == HF:
        delta, keys = config.recurrent, 0
        assert isinstance(delta, DeltaNet), "the layer has one"
        if part in ("delta_qkv", "delta_conv"):
            keys = 2 * delta.key_heads * delta.key_dims
        size = delta.value_dims if part in ("delta_qkv", "delta_conv", "delta_gate") else 1
        rows = keys + np.arange(delta.value_heads * size, dtype=np.int32).reshape(delta.key_heads, -1, size)
        return np.concatenate([np.arange(keys, dtype=np.int32), rows.swapaxes(0, 1).reshape(-1)])
    if part in ("q_rope", "k_rope"):
        assert config.latent, "the layer has it"
        of_head = rotary_order(config.latent.rope_dims, config.latent.rope_dims, neighbours=True)
        heads = config.num_heads if part == "q_rope" else 1
        return (np.arange(heads, dtype=np.int32)[:, None] * len(of_head) + of_head).reshape(-1)
    if part not in ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm"):
        return None
    rope_dims = config.rope_dims or config.head_dim
    neighbours = family.pairs_neighbours if kind == GGUF else family.hf_pairs_neighbours
    if not neighbours and rope_dims == config.head_dim:
        return None
    heads = config.num_heads if part.startswith("q") else config.num_kv_heads
    if part.endswith("norm") and config.norm_spans == "head":
        heads = 1
    of_head = rotary_order(config.head_dim, rope_dims, neighbours)
    return (np.arange(heads, dtype=np.int32)[:, None] * config.head_dim + of_head).reshape(-1)
