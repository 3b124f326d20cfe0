"""From the tensors of a file to those of `layers`, and back: renamed, split, stacked, rows in our order, with an offset.

`families.Family` holds the differences between families. Only reordered rows and norms with an offset are copied.
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

GGUF, HF = 0, 1  # whose names: the places in a pair of `Family.layer_names`
_EXPERT = r"(0|[1-9][0-9]{0,4})"


class Names:
    """The canonical name of each tensor of a family's files."""

    def __init__(self, family: Family, kind: int) -> None:
        self._globals = {theirs[kind]: ours for ours, theirs in {**GLOBAL_NAMES, **family.global_names}.items()}
        parts = {theirs[kind]: ours for ours, theirs in family.layer_names.items() if theirs[kind]}
        self._parts = {**FUSED, **parts, **family.other_names}
        self._of_experts = {
            re.compile(re.escape(theirs).replace(r"\*", _EXPERT)): ours for theirs, ours in self._parts.items() if "*" in theirs
        }
        self._layer = re.compile(re.escape(_layers_in(family, kind)) + r"\.(0|[1-9][0-9]{0,8})\.(.+)", re.DOTALL)

    def layer_of(self, name: str) -> int:
        """The layer of a tensor by its name in the file; -1 outside of the layers."""
        found = self._layer.fullmatch(name)
        return int(found[1]) if found else -1

    def ours(self, name: str) -> str:
        """The canonical name; parts are joined as in `Family.other_names`, one expert has "@" and its number; "" for none."""
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
    """Tensors of a file by name, each with the canonical names of what it holds, one part after another along the rows.

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
    """One tensor of a file, of those that it holds by canonical name: the inverse of what `arranged` does to them.

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
    """The shape of `joined` tensors of these."""
    first, axis = shapes[0], int(len(shapes[0]) == 3)
    if axis and shapes[0][0] == shapes[1][0] and shapes[0][1] == shapes[1][2]:  # heads' matrices of keys, transposed, and of values
        return first[0] * (first[2] + shapes[1][1]), first[1]
    return (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])


def _by_group(config: ModelConfig, family: Family, kind: int, parts: str) -> I32 | None:
    """For each row of parts that are joined, one after another, its place in a file that has them head by head; None for others."""
    c, delta = config, config.recurrent
    if parts == "q_plain+q_turned" and c.latent:
        heads, sizes = c.num_heads, [c.latent.plain, c.latent.turned]
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
    """The tensors by `Names.ours`, stacked, split, and in our order. wanted: the shapes of canonical tensors.

    Raises CheckpointError where what is joined in a file does not have the sizes of its parts.
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

    for name, tensor in named.items():
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
            add(name, QuantTensor.stack([of_each[i] for i in range(len(of_each))]))
        except FormatError as error:
            raise CheckpointError(f"{what}: {name}: {error}") from error
    return {name: _arranged(config, family, kind, name, tensor, wanted.get(name, ())) for name, tensor in tensors.items()}


def _arranged(config: ModelConfig, family: Family, kind: int, name: str, tensor: QuantTensor, shape: Shape) -> QuantTensor:
    """One canonical tensor in our order, of our shape but for axes of length 1, and with our numbers."""
    alike = [n for n in tensor.shape if n > 1] == [n for n in shape if n > 1] and not tensor.parts
    if shape and (alike or tensor.shape == file_shape(config, kind, name, shape)):
        tensor = _shaped(tensor, shape)
    if name.endswith(("delta_decay", "ssm_a")) and kind == HF:  # whose files have the logarithm of its negative
        tensor = QuantTensor.encode(get_format("f32"), -np.exp(tensor.dequantize()))
    if kind == HF and name.endswith("norm") and not name.endswith("delta_norm"):
        tensor = with_offset(tensor, family.norm_offset)
    return in_our_order(config, family, kind, name, tensor) if tensor.shape == shape else tensor


def file_shape(config: ModelConfig, kind: int, name: str, shape: Shape) -> Shape:
    """The shape that files of a kind give to a canonical tensor of this shape."""
    part, mixer = name.rpartition(".")[2], config.recurrent
    if part.endswith("_conv") and kind == HF:
        return shape[0], 1, shape[1]
    if part in ("ssm_a", "ssm_d") and kind == GGUF:
        return *shape, 1
    if part == "ssm_norm" and kind == GGUF and isinstance(mixer, Mamba2):
        return mixer.key_heads, shape[0] // mixer.key_heads
    return shape


def _shaped(tensor: QuantTensor, shape: Shape) -> QuantTensor:
    return tensor if tensor.shape == shape else QuantTensor(tensor.format, shape, tensor.data.reshape(*shape[:-1], -1))


def _split(what: str, name: str, tensor: QuantTensor, wanted: Mapping[str, Shape]) -> dict[str, QuantTensor]:
    """The parts of a tensor whose name joins theirs, as `Family.other_names` has it, along its rows."""
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
    """The matrices of each head, those of keys transposed, from one that has the rows of both head by head: copies.

    Keys in blocks, whose inputs would lie across them, become f32.
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
    return {
        of_keys: _transposed(what, of_keys, matrices),
        of_values: QuantTensor(tensor.format, (heads, value_dims, rank), values),
    }


def _key_by_value(of_keys: QuantTensor, of_values: QuantTensor) -> QuantTensor:
    """The inverse of `_by_head`. In f32 where the matrices are not of one kind of plain numbers."""
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
    """Rows first, first + step, and so on, or such numbers of vectors: a copy."""
    units = tensor.data.reshape(*tensor.shape, tensor.format.block_bytes) if axis == -1 else tensor.data
    data = np.ascontiguousarray(units[..., first::step, :])
    shape = (*tensor.shape[:axis], data.shape[-2], *tensor.shape[axis:][1:])
    return QuantTensor(tensor.format, shape, data.reshape(*shape[:-1], -1))


def _transposed(what: str, name: str, tensor: QuantTensor) -> QuantTensor:
    """The matrices of experts with their inputs side by side: a copy."""
    if len(tensor.shape) != 3 or tensor.format.block_size != 1:
        raise CheckpointError(
            f"{what}: {name.partition('^')[0]} is {tensor.format.name} {list(tensor.shape)}, wanted f32, f16 or bf16 of each expert"
        )
    count, columns, rows = tensor.shape
    units = tensor.data.reshape(count, columns, rows, -1).swapaxes(1, 2)
    return QuantTensor(tensor.format, (count, rows, columns), np.ascontiguousarray(units).reshape(count, rows, -1))


def with_offset(tensor: QuantTensor, offset: float) -> QuantTensor:
    """The tensor plus `offset`, in f32, which has the sum of any f16 or bf16 weight near 1 and of 1."""
    return QuantTensor.encode(get_format("f32"), tensor.dequantize() + np.float32(offset)) if offset else tensor


def in_our_order(config: ModelConfig, family: Family, kind: int, name: str, tensor: QuantTensor) -> QuantTensor:
    """A tensor of a file, by its canonical name, with rows of queries and keys, and value heads, in our order."""
    order = _order(config, family, kind, name)
    return tensor if order is None else _permuted(config, name, tensor, order)


def in_file_order(config: ModelConfig, family: Family, kind: int, name: str, tensor: QuantTensor) -> QuantTensor:
    """A tensor by its canonical name as files have it: the inverse of what `arranged` does to its shape, order and values."""
    if name.endswith(("delta_decay", "ssm_a")) and kind == HF:
        return QuantTensor.encode(get_format("f32"), np.log(-tensor.dequantize()))
    order = _order(config, family, kind, name)
    tensor = tensor if order is None else _permuted(config, name, tensor, np.argsort(order))
    return _shaped(tensor, file_shape(config, kind, name, tensor.shape))


def _permuted(config: ModelConfig, name: str, tensor: QuantTensor, order: NDArray[np.integer]) -> QuantTensor:
    """The tensor with its rows in another order; of the matrix that reads value heads, with its columns, by head.

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
    """For each row of queries or keys, or of value heads (for `delta_o` each head), its place in the file. None for our order."""
    part = name.rpartition(".")[2]
    if part.startswith("delta_") and part != "delta_norm" and family.tiles_values and kind == HF:
        delta, keys = config.recurrent, 0
        assert isinstance(delta, DeltaNet), "the layer has one"
        if part in ("delta_qkv", "delta_conv"):
            keys = 2 * delta.key_heads * delta.key_dims
        size = delta.value_dims if part in ("delta_qkv", "delta_conv", "delta_gate") else 1
        rows = keys + np.arange(delta.value_heads * size, dtype=np.int32).reshape(delta.key_heads, -1, size)
        return np.concatenate([np.arange(keys, dtype=np.int32), rows.swapaxes(0, 1).reshape(-1)])
    if part in ("q_turned", "k_turned"):
        assert config.latent, "the layer has it"
        of_head = rotary_order(config.latent.turned, config.latent.turned, neighbours=True)
        heads = config.num_heads if part == "q_turned" else 1
        return (np.arange(heads, dtype=np.int32)[:, None] * len(of_head) + of_head).reshape(-1)
    if part not in ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm"):
        return None
    turned = config.rope_dims or config.head_dim
    neighbours = family.pairs_neighbours if kind == GGUF else family.hf_pairs_neighbours
    if not neighbours and turned == config.head_dim:
        return None
    heads = config.num_heads if part.startswith("q") else config.num_kv_heads
    if part.endswith("norm") and config.norm_spans == "head":
        heads = 1
    of_head = rotary_order(config.head_dim, turned, neighbours)
    return (np.arange(heads, dtype=np.int32)[:, None] * config.head_dim + of_head).reshape(-1)
