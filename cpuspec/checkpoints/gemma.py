"""Settings of Gemma 4 in files of both kinds: heads and windows of layers, shared keys and values, inputs of layers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cpuspec.checkpoints.families import each_layer
from cpuspec.checkpoints.fields import Fields
from cpuspec.config import ModelConfig
from cpuspec.formats import QuantTensor

STILL = float(np.float32(1e30))  # a divisor of the frequency of pairs that do not turn, as GGUF files have it


def _owners(slides: Sequence[bool], num_shared: int) -> tuple[int, ...]:
    """For each layer the one whose keys and values it reads: the last ones read those of the last earlier layer of their kind."""
    first = len(slides) - num_shared
    last = {kind: max((i for i in range(first) if slides[i] == kind), default=-1) for kind in (False, True)}
    return tuple(i if i < first else last[slides[i]] for i in range(len(slides))) if num_shared else ()


def _check_shared(fields: Fields, key: str, slides: Sequence[bool]) -> int:
    """How many layers read those of others. Raises CheckpointError."""
    count = fields.integer(key, 0)
    if not 0 <= count < len(slides) or (count and -1 in _owners(slides, count)):
        fields.fail(key, "fewer than the layers, and one of each kind before them")
    return count


def _own_heads(fields: Fields, slides: Sequence[bool]) -> Fields:
    """The settings that only layers without a window have, by the layers' numbers, as transformers 5.24 writes it."""
    layers = fields.object("per_layer_config")
    whole = [str(i) for i, slid in enumerate(slides) if not slid]
    given = {key: layers.value(key) for key in layers.names()}
    if given and (set(given) != set(whole) or any(one != given[whole[0]] for one in given.values())):
        fields.fail("per_layer_config", "one setting for all layers without a window, and none for others")
    return layers.object(whole[0]) if given else layers


def read_hf(fields: Fields, slides: Sequence[bool]) -> dict[str, Any]:
    """The settings in a config.json as arguments of `ModelConfig`. slides: for each layer whether it has a window."""
    if fields.text("use_bidirectional_attention", "vision") == "all":
        fields.fail("use_bidirectional_attention", "null or vision; attention that is not causal is not supported")
    fields.boolean("enable_moe_block", False)  # which the choice of a family has read
    local, heads = fields.integer("head_dim"), fields.integer("num_key_value_heads")
    same, own = fields.boolean("attention_k_eq_v", False), _own_heads(fields, slides)
    whole = own.integer("head_dim", fields.integer("global_head_dim", 512))
    whole_heads = fields.integer("num_global_key_value_heads", heads)
    whole_heads = own.integer("num_key_value_heads", whole_heads if same else heads)  # as transformers does
    shared = _check_shared(fields, "num_kv_shared_layers", slides)
    size, wide = fields.integer("intermediate_size"), fields.boolean("use_double_wide_mlp", False) and shared > 0
    given = fields.integer("hidden_size_per_layer_input", 0)
    if given and fields.integer("vocab_size_per_layer_input") != fields.integer("vocab_size"):
        fields.fail("vocab_size_per_layer_input", "vocab_size")
    return {
        "head_dim": whole, "num_kv_heads": whole_heads,
        "layer_head_dims": tuple(local if slid else whole for slid in slides),
        "layer_kv_heads": tuple(heads if slid else whole_heads for slid in slides),
        "layer_values": tuple(slid or not same for slid in slides) if same else (),
        "layer_owners": _owners(slides, shared),
        "layer_sizes": tuple(size * (1 + (i >= len(slides) - shared)) for i in range(len(slides))) if wide else (),
        "layer_input_size": given, "query_scale": 1.0,
    }  # fmt: skip


def read_gguf(fields: Fields, slides: Sequence[bool], tensors: Mapping[str, QuantTensor]) -> dict[str, Any]:
    """The settings in a GGUF file as arguments of `ModelConfig`. slides: for each layer whether it has a window."""
    count, num_blocks = len(slides), fields.integer("block_count")
    whole = fields.integer("attention.key_length")
    local = fields.integer("attention.key_length_swa", whole)
    for key, dims in (("value_length", whole), ("value_length_swa", local)):
        if fields.integer(f"attention.{key}", dims) != dims:
            fields.fail(f"attention.{key}", f"the length of keys, {dims}")
    for key, dims in (("rope.dimension_count", whole), ("rope.dimension_count_swa", local)):
        if fields.integer(key, dims) != dims:
            fields.fail(key, f"all {dims} dimensions of a head")
    heads = tuple(fields.per_layer("attention.head_count_kv", num_blocks)[:count])
    sizes = tuple(fields.per_layer("feed_forward_length", num_blocks)[:count])
    values = each_layer(count, lambda i: f"layers.{i}.v" in tensors or f"layers.{i}.k" not in tensors)
    full = next((i for i, slid in enumerate(slides) if not slid), 0)
    return {
        "head_dim": whole, "num_kv_heads": heads[full], "intermediate_size": sizes[0],
        "layer_head_dims": tuple(local if slid else whole for slid in slides), "layer_kv_heads": heads,
        "layer_values": () if all(values) else values,
        "layer_owners": _owners(slides, _check_shared(fields, "attention.shared_kv_layers", slides)),
        "layer_sizes": sizes if len(set(sizes)) > 1 else (),
        "layer_input_size": fields.integer("embedding_length_per_layer_input", 0), "query_scale": 1.0,
    }  # fmt: skip


def gguf_entries(config: ModelConfig) -> dict[str, Any]:
    """The metadata of a Gemma 4, by keys without the architecture; none of other models."""
    c = config
    if not c.value_norm:
        return {}
    local = c.layer_head_dims[next((i for i, window in enumerate(c.layer_windows) if window), 0)]
    found: dict[str, Any] = {
        "attention.key_length_swa": local, "attention.value_length_swa": local, "rope.dimension_count_swa": local,
        "attention.head_count_kv": np.array(c.layer_kv_heads, np.int32), "embedding_length_per_layer_input": c.layer_input_size,
        "attention.shared_kv_layers": sum(owner != i for i, owner in enumerate(c.layer_owners)),
    }  # fmt: skip
    if c.layer_sizes:
        found["feed_forward_length"] = np.array(c.layer_sizes, np.int32)
    return found
