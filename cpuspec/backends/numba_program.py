"""Writes a forward as a program for the kernels: `decode` calls a `ProgramWriter` as if that computed, and it writes operations.

It knows the model and where operands lie. The kernels (`kernels/operations.py`) know the operations and no model.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.backends.kv_memory import KVPlaces
from cpuspec.backends.recurrent_memory import RecurrentLayers, inputs_kept
from cpuspec.backends.stored import LayerExperts, Router, StoredTensor
from cpuspec.config import DeltaNet, Experts, Mamba2, ModelConfig, Rope
from cpuspec.errors import BackendError
from cpuspec.formats import Format, QuantTensor
from cpuspec.formats.kv import hadamard_size
from cpuspec.formats.packing import GROUP, TILE, U8, PackedTensor, aligned_bytes, paged_bytes, round_up, unpack
from cpuspec.kernels import (
    adapters,
    attention,
    attention_bf16,
    attention_plan,
    embed,
    isa,
    kv_rows,
    latent,
    layout,
    linear,
    pointwise,
    products,
)  # fmt: skip
from cpuspec.kernels.layout import MAX_QUERIES
from cpuspec.kernels.machine_code import first_sound
from cpuspec.layers import Layer
from cpuspec.model.batch import F32, I32
from cpuspec.model.recurrence import LENGTH_EPS

_SMALL = 768  # hidden size under which a model is small
_RESULTS = ("out", "stride", "num_tiles")  # fields of a matrix whose products adapters add to

# Of each thread, for partial results where threads share the attention of a sequence. Pages become memory as they are written. Rows
# whose results do not fit are not split (`attention_plan`): 64 queries of a key head fit up to 131,072 tokens, and 128, as AVX-512
# BF16 has them, up to half of that.
_PARTIALS_BYTES = 32 << 20


class Plans:
    """How the attention of layers is shared out: the memory of plans, one for all layers that are alike (`layout.PLAN`)."""

    def __init__(self, layers: Sequence[Layer], max_rows: int, threads: int, kv_format: str) -> None:
        self.scratch_bytes, sizes = 0, dict[tuple[int, int, int], int]()  # largest partials by plan
        for layer in layers:
            mixer = layer.attention
            size = attention.partial_bytes(kv_format, mixer.mixed_dims)
            queries = MAX_QUERIES + max(attention_plan.TASK_QUERIES, mixer.heads // mixer.kv_heads)
            partials = attention.partials_offset(kv_format, mixer.dims, mixer.mixed_dims)
            self.scratch_bytes = max(self.scratch_bytes, partials + queries * size)
            sizes[self._kind(layer)] = max(size, sizes.get(self._kind(layer), 0))
        if len(sizes) > layout.NUM_PLANS:
            raise BackendError(f"{len(sizes)} kinds of layers by heads and windows; wanted up to {layout.NUM_PLANS}")
        self._kinds = list(sizes)
        num_bytes = (threads > 1) * threads * _PARTIALS_BYTES
        self._partials, self._plans = paged_bytes((num_bytes,)), np.zeros(layout.NUM_PLANS, layout.PLAN)
        self._tasks = np.empty((max(1, len(sizes)), max_rows), layout.TASK)
        self._walked = np.zeros((max_rows, max((kind[1] for kind in sizes), default=1)), np.int64)
        for plan, tasks, ((heads, kv_heads, window), size) in zip(self._plans, self._tasks, sizes.items(), strict=False):
            plan["heads"], plan["kv_heads"], plan["window"] = heads, kv_heads, window
            plan["max_partials"], plan["tasks"] = num_bytes // size, at(tasks)

    def fields(self) -> dict[str, Any]:
        """Fields of a program's state."""
        return {
            "plans": self._plans, "num_plans": len(self._kinds), "partials": at(self._partials), "walked": at(self._walked),
        }  # fmt: skip

    def number(self, layer: Layer) -> int:
        """The number of a layer's plan."""
        return self._kinds.index(self._kind(layer))

    @staticmethod
    def _kind(layer: Layer) -> tuple[int, int, int]:
        return layer.attention.heads, layer.attention.kv_heads, layer.attention.window or 0


class Routing:
    """Buffers for a router's choice. Layers take turns in them."""

    def __init__(self, experts: Experts, max_rows: int) -> None:
        self.pairs = max_rows * experts.used
        self.factors = aligned_bytes((max_rows, 4 * round_up(experts.used, TILE)))
        self.segments = np.zeros(experts.count, layout.SEGMENT)
        self._arrays = {
            "chosen": np.zeros(self.pairs, np.int64),
            "pair_of": np.zeros(self.pairs, np.int64),
            "pairs": np.zeros(self.pairs, layout.PAIR),
            "segments": self.segments,
            "of_expert": np.zeros(experts.count, np.int64),
        }

    def addresses(self) -> dict[str, int]:
        """Of the arrays, by their fields in a program's state."""
        return {field: at(array) for field, array in self._arrays.items()}


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of numbers, f32 [max_rows, features padded to groups]; of a gate with an activation, activation(numbers) * `up`."""

    numbers: F32
    up: F32 | None = None
    activation: str = ""


class ProgramWriter:
    """Writes what `model.transformer` calls down as operations of a program, and allocates the buffers of their results.

    A gate is written with the matrix that reads it, and the rotation with the attention, which appends to the cache.
    """

    def __init__(
        self, config: ModelConfig, max_rows: int, matrices: Mapping[str, PackedTensor | StoredTensor], vectors: Mapping[str, F32],
        orders: Mapping[str, I32], embedding: QuantTensor, kv_format: Format, centres: Mapping[int, F32],
        kv_places: KVPlaces, plans: Plans, routing: "Routing | None" = None, recurrent: RecurrentLayers | None = None,
        layer_embedding: QuantTensor | None = None, in_14_bits: bool = False,
    ) -> None:  # fmt: skip
        """orders: of inputs, by the name of the matrix that has them so (`QuantTensor.order`). in_14_bits: whether superblocks are
        multiplied with activations in "int14".
        """
        self.operations: list[tuple[str, dict[str, Any]]] = []
        self.cuts: list[int] = []  # before which operations a forward returns, for experts that stay on the disk
        self.stored: list[tuple[LayerExperts, Router]] = []  # those experts, layer by layer
        self.of_prompts = False  # whether operations are written for tokens of prompts in bf16
        self.adapts = False  # whether they are written with those of adapters
        self.adapted: dict[str, int] = {}  # the numbers of the matrices that adapters may change
        self.num_partials = 0  # the most parts of matrices that one "shrink" makes
        self.ropes: list[tuple[Rope, int]] = []  # with the dimensions that each rotates
        decoder = embed.row_decoder(embedding.format.name)
        # Otherwise `first` is written before a forward.
        self.embeds = decoder is not None and embedding.order is None and not config.takes_hidden
        self._config, self._max_rows, self._kv_format, self._centres = config, max_rows, kv_format, centres
        self._kv_places, self._plans = kv_places, plans
        self._matrices, self._vectors, self._embedding, self._layer_embedding = matrices, vectors, embedding, layer_embedding
        self.input_orders, self._in_14_bits = orders, in_14_bits
        self._orders = {name: np.concatenate([order, _rest(len(order))]) for name, order in orders.items()}
        self.buffers: dict[str, F32] = {}  # by the part of a layer whose result it holds
        self._sizes: dict[str, int] = {}  # by part, the features with which it was first met
        self.first: dict[str, tuple[str | None, ...]] = {}  # buffers written before a forward, with the norms of their parts
        self._routing, self._recurrent = routing, recurrent
        self._inputs_of_heads: dict[str, U8] = {}  # activations of latent attention's heads, by encoding
        self._value_places: I32 | None = None  # of its cached keys
        self._inputs = _new_inputs(max_rows, max(m.shape[-1] for m in matrices.values()))
        widths = [m.shape[-1] for name, m in matrices.items() if ".expert_" in name]  # none where a draft skips these layers
        if routing and widths:  # segments of experts may begin at any row
            self._inputs_of_pairs = _new_inputs(routing.pairs + products.BLOCK_ROWS, max(widths))

    def embed(self) -> _Rows:
        out = self._rows("embed", self._config.hidden_size)
        if self.embeds:
            self._embed(self._embedding, out, self._config.embedding_scale)
        elif not self._config.takes_hidden:
            self.first["embed"] = (None,)
        return _Rows(out)

    def _embed(self, table: QuantTensor, out: F32, scale: float) -> None:
        """Write the tokens' rows of a table, whose format has a decoder."""
        format, features = table.format, table.shape[1]
        operands = {
            "decoder": embed.row_decoder(format.name), "data": at(table.data), "row_bytes": format.row_bytes(features),
            "blocks": features // format.block_size, "features": features, "out": at(out), "stride": out.strides[0],
            "scale": scale,
        }  # fmt: skip
        self.operations.append(("embed", operands))

    def layer_inputs(self, x: _Rows) -> _Rows:
        c, table = self._config, self._layer_embedding
        assert table is not None, "the model has it"
        size, features = c.layer_input_size, table.shape[1]
        out, made = self._rows("layer_embed", features), self._rows("layer_input", features)
        if embed.row_decoder(table.format.name) is None or table.order is not None:
            self.first["layer_embed"] = (None,)
        else:
            self._embed(table, out, math.sqrt(size))
        self._write_linears(x, {"layer_input": made})
        operands = {
            "rows": at(out), "branch": at(made), "stride": 4 * size, "weight": at(self._vectors["layer_input_norm"]),
            "features": size, "parts": features // size, "scale": 1.0, "after": 1 / math.sqrt(2),
            "eps": c.norm_eps * c.hidden_size,  # the norm of what was not divided by the root of hidden_size
        }  # fmt: skip
        self.operations.append(("add", operands))
        return _Rows(out)

    def input_of(self, layer: Layer, inputs: _Rows) -> _Rows:
        return _Rows(inputs.numbers[:, layer.index * layer.input_size :][:, : layer.input_size])

    def hidden(self, norm: str | None) -> _Rows:
        self.first["hidden"] = (norm,)
        return _Rows(self._rows("hidden", self._config.injected_size))

    def join(self, x: _Rows, norms: tuple[str, str] | None) -> _Rows:
        self.first["join"] = norms or (None, None)
        return _Rows(self._rows("join", 2 * self._config.state_size))

    def project(self, name: str) -> None:
        """The product of rows that `NumbaBackend.project` writes, to where the logits of others go."""
        num_inputs = self._matrices[name].shape[1]
        self._write_linears(_Rows(self._rows(f"given {num_inputs}", num_inputs)), {name: None})

    def linears(self, x: _Rows, names: tuple[str, ...], norm: str | None) -> tuple[_Rows, ...]:
        outputs = {name: self._rows(name.rsplit(".", 1)[-1], self._matrices[name].shape[0]) for name in names}
        self._write_linears(x, outputs, norm)
        return tuple(map(_Rows, outputs.values()))

    def rotate(self, layer: Layer, q: _Rows, k: _Rows | None) -> tuple[_Rows, _Rows | None]:
        for rows, part in ((q, "q_norm"), (k, "k_norm")):
            if layer.attention.norm == "row" and rows:
                heads = layer.attention.heads if rows is q else layer.attention.kv_heads
                self._norm(rows.numbers, layer.weight(part), heads * layer.attention.dims)
        return q, k

    def _norm(self, rows: F32, name: str, features: int) -> None:
        """Write an RMS norm in place."""
        operands = {"rows": at(rows), "stride": rows.strides[0], "weight": at(self._vectors[name]), "features": features}
        self.operations.append(("norm", operands | {"eps": self._config.norm_eps}))

    def append(self, layer: Layer, k: _Rows, v: _Rows) -> None:
        self._rotate(layer, None, k, v)

    def _rotate(self, layer: Layer, q: _Rows | None, k: _Rows | None, v: _Rows | None) -> None:
        """Rotate queries, if there are any, and keys, and append keys and values, if the layer keeps some."""
        mixer = layer.attention
        norms = self._vectors if mixer.norm == "head" else {}  # `rotate` has written those of rows
        operands = {
            "heads": mixer.heads if q else 0, "key_dims": mixer.dims, "value_dims": mixer.value_dims,
            **self._kv_places.of(layer)._asdict(), "eps": self._config.norm_eps, "scale": mixer.scale,
            "rotation": self._rotation(mixer.rope, mixer.dims),
            "q_rotation": self._rotation(mixer.query_rope if q else None, mixer.dims),
            "norm_last": mixer.rotates_first,
            "append": kv_rows.append_kernel(self._kv_format.name), "hadamard": hadamard_size(self._kv_format, mixer.dims),
            "v_hadamard": hadamard_size(self._kv_format, mixer.value_dims),
            "centres": at(self._centres.get(layer.index)),
        }  # fmt: skip
        if k:
            copies, values, ones = v is k, v.numbers if v else None, self._rows("ones", mixer.value_dims, 1)
            ones[:] = 1
            if copies:
                values = self._rows("v", mixer.kv_heads * mixer.value_dims)
            operands |= {
                "kv_heads": mixer.kv_heads, "keys": at(k.numbers), "k_stride": k.numbers.strides[0],
                "k_norm": at(norms.get(layer.weight("k_norm"))), "values": at(values),
                "v_stride": 0 if values is None else values.strides[0],
                "v_norm": at(ones) if mixer.value_norm else 0, "copies": copies,
            }  # fmt: skip
        if q:
            operands |= {"queries": at(q.numbers), "q_stride": q.numbers.strides[0]}
            operands["q_norm"] = at(norms.get(layer.weight("q_norm")))
        self.operations.append(("rotate", operands))

    def _rotation(self, rope: Rope | None, dims: int) -> int:
        """The number of a table of cosines and sines."""
        if rope is None:
            return layout.NO_ROTATION
        if (rope, dims) not in self.ropes:
            if len(self.ropes) == layout.NUM_ROTATIONS:
                raise BackendError(
                    f"layers rotate heads in more than {layout.NUM_ROTATIONS} ways (bases, scalings, sizes); use --backend numpy"
                )
            self.ropes.append((rope, dims))
        return self.ropes.index((rope, dims))

    def absorb(self, layer: Layer, plain: _Rows, q_rope: _Rows, latent: _Rows, k_rope: _Rows) -> tuple[_Rows, _Rows]:
        mixer, facts = layer.attention, layer.attention.latent
        assert facts, "the layer has it"
        vectors = self._by_head(layer, "k_b", plain, 4 * facts.plain)
        queries, keys = self._rows("latent queries", mixer.heads * mixer.dims), self._rows("latent keys", mixer.dims)
        rows = {
            "vectors": vectors, "q_rope": q_rope.numbers, "latent": latent.numbers, "k_rope": k_rope.numbers,
            "queries": queries, "keys": keys,
        }  # fmt: skip
        strides = {"queries": "q_stride", "keys": "k_stride"}
        operands: dict[str, float] = {name: at(buffer) for name, buffer in rows.items()}
        operands |= {strides.get(name, f"{name}_stride"): buffer.strides[0] for name, buffer in rows.items()}
        operands |= {"heads": mixer.heads, "rank": facts.rank, "rope_dims": facts.rope_dims, "eps": self._config.norm_eps}
        self.operations.append(("latent", operands | {"weight": at(self._vectors[layer.weight("latent_norm")])}))
        return _Rows(queries), _Rows(keys)

    def expand(self, layer: Layer, mixed: _Rows) -> _Rows:
        facts = layer.attention.latent
        assert facts, "the layer has it"
        if self._value_places is None:
            self._value_places = np.array(facts.value_places, np.int32)
        return _Rows(self._by_head(layer, "v_b", mixed, 4 * facts.dims, self._value_places))

    def _by_head(self, layer: Layer, part: str, x: _Rows, apart: int, order: I32 | None = None) -> F32:
        """The product of each head's numbers, `apart` bytes from those of the next, with its matrix. order: of its inputs there."""
        name = layer.weight(part)
        heads, num_rows, features = self._matrices[name].shape
        out, encoding = self._rows(part, heads * num_rows), self._encoding(name)
        if encoding not in self._inputs_of_heads:
            latent = layer.attention.latent
            assert latent, "the layer has it"
            widest = max(latent.plain, latent.rank)
            self._inputs_of_heads |= _new_inputs(self._max_rows * heads + products.BLOCK_ROWS, widest, [encoding])
        inputs = self._inputs_of_heads[encoding]
        prepare = self._prepare(x, None, features, {encoding: inputs}) | {"heads": heads, "apart": apart, "order": at(order)}
        tensor = self._tensor(name, encoding, inputs, out) | {"apart": 4 * num_rows}
        product = {"num_tensors": 1, "features": features, "heads": heads, "tensors": [tensor]}
        self.operations += [("prepare", prepare), ("linear", product)]
        return out

    def attention(self, layer: Layer, q: _Rows, k: _Rows | None, v: _Rows | None) -> _Rows:
        mixer = layer.attention
        self._rotate(layer, q, k, v)
        value_dims = mixer.mixed_dims
        out, kv_format = self._rows("attention", mixer.heads * value_dims), self._kv_format.name
        facts, rope_dims = (kv_format, mixer.window is not None, mixer.softcap > 0), mixer.latent and mixer.latent.rope_dims
        ways = [lambda: (attention.attend_kernel(*facts), attention.QUERIES)]
        if rope_dims is not None:
            ways = [lambda: (latent.attend_kernel(kv_format, rope_dims), attention.QUERIES)]
        elif self.of_prompts and isa.has_bf16_dots() and mixer.dims % 2 == 0:
            ways.insert(0, lambda: (attention_bf16.attend_kernel(*facts), MAX_QUERIES))
        address, together = first_sound(ways)
        attend = {
            "heads": mixer.heads, "kv_heads": mixer.kv_heads, "key_dims": mixer.dims, "value_dims": value_dims,
            **self._kv_places.of(layer)._asdict(), "plan": self._plans.number(layer),
            "queries": at(q.numbers), "stride": q.numbers.strides[0], "out": at(out), "out_stride": out.strides[0],
            "kernel": address, "together": together,
            "partials_at": attention.partials_offset(kv_format, mixer.dims, value_dims),
            "partial_bytes": attention.partial_bytes(kv_format, value_dims),
            "window": mixer.window or 0, "cap": mixer.softcap, "hadamard": hadamard_size(self._kv_format, value_dims),
            "sinks": at(self._vectors[layer.weight("sinks")]) if mixer.sinks else 0,
        }  # fmt: skip
        self.operations.append(("attend", attend))
        return _Rows(out)

    def convolve(self, layer: Layer, x: _Rows) -> _Rows:
        return self._convolve(layer, x)

    def short_conv(self, layer: Layer, b: _Rows, c: _Rows, x: _Rows) -> _Rows:
        return self._convolve(layer, x, b.numbers, c.numbers)

    def _convolve(self, layer: Layer, x: _Rows, factors: F32 | None = None, outer: F32 | None = None) -> _Rows:
        mixer, recurrent = layer.recurrent, self._recurrent
        assert mixer, "the layer has a state"
        assert recurrent, "and the model has memory for it"
        name, out = layer.weight(mixer.convolution), self._rows("convolved", mixer.channels)
        weights = self._vectors[name]
        operands = {
            "rows": at(x.numbers), "stride": x.numbers.strides[0], "factors": at(factors), "outer": at(outer),
            "weights": at(weights), "bias": at(self._vectors.get(name + "_bias")), "out": at(out), "out_stride": out.strides[0],
            "channels": weights.shape[1], "taps": mixer.taps, "inputs_at": recurrent.inputs_at(layer), "ring": inputs_kept(mixer),
        }  # fmt: skip
        self.operations.append(("convolve", operands))
        return _Rows(out)

    def mamba2(self, layer: Layer, xbc: _Rows, dt: _Rows, z: _Rows) -> _Rows:
        mixer, vectors = layer.recurrent, self._vectors
        assert isinstance(mixer, Mamba2), "the layer has one"
        decays, keys = self._rows("decays", mixer.value_heads), mixer.key_heads * mixer.key_dims
        rates, skip, norm = (vectors.get(layer.weight(f"ssm_{part}")) for part in ("a", "d", "norm"))
        starts = 0, mixer.inner, mixer.inner + keys
        out = self._recur(layer, mixer, xbc.numbers, starts, dt.numbers, decays, dt.numbers, rates, {"least": mixer.least_step})
        finish = {
            "rows": at(out), "stride": out.strides[0], "values": at(xbc.numbers), "values_stride": xbc.numbers.strides[0],
            "gate": at(z.numbers), "gate_stride": z.numbers.strides[0], "skip": at(skip), "weight": at(norm),
            "weight_bytes": 4 * mixer.inner // mixer.key_heads, "features": mixer.inner, "groups": mixer.key_heads,
            "dims": mixer.value_dims, "eps": self._config.norm_eps,
        }  # fmt: skip
        self.operations.append(("finish", finish))
        return _Rows(out)

    def delta_net(self, layer: Layer, qkv: _Rows, beta: _Rows, alpha: _Rows) -> _Rows:
        mixer = layer.mixer
        assert isinstance(mixer, DeltaNet), "the layer is one"
        keys, values = mixer.key_heads * mixer.key_dims, mixer.value_heads * mixer.value_dims
        dt, rates, norm = (self._vectors[layer.weight(f"delta_{part}")] for part in ("dt", "decay", "norm"))
        others = {"dt": at(dt), "corrects": 1, "tiled": mixer.tiled, "length_eps": LENGTH_EPS}
        starts = 2 * keys, keys, 0
        out = self._recur(layer, mixer, qkv.numbers, starts, alpha.numbers, alpha.numbers, beta.numbers, rates, others)
        finish = {
            "rows": at(out), "stride": out.strides[0], "weight": at(norm), "features": values, "groups": mixer.value_heads,
            "eps": self._config.norm_eps,
        }  # fmt: skip
        self.operations.append(("finish", finish))
        return _Rows(out)

    def _recur(
        self, layer: Layer, mixer: DeltaNet | Mamba2, rows: F32, starts: tuple[int, int, int], steps: F32, decays: F32,
        factors: F32, rates: F32 | None, others: dict[str, float],
    ) -> F32:  # fmt: skip
        """starts: of values, keys and queries in `rows`. The other arguments are those of `layout`."""
        assert self._recurrent, "the model has memory for the layer"
        out, (values, keys, queries) = self._rows("recurred", mixer.value_heads * mixer.value_dims), starts
        operands = {
            "values": at(rows) + 4 * values, "keys": at(rows) + 4 * keys, "queries": at(rows) + 4 * queries,
            "stride": rows.strides[0], "steps": at(steps), "steps_stride": steps.strides[0], "decays": at(decays),
            "decays_stride": decays.strides[0], "factors": at(factors), "factors_stride": factors.strides[0],
            "rates": at(rates), "out": at(out), "out_stride": out.strides[0], "key_heads": mixer.key_heads,
            "key_dims": mixer.key_dims, "value_heads": mixer.value_heads, "value_dims": mixer.value_dims,
            **self._recurrent.states_at(layer), **others,
        }  # fmt: skip
        self.operations += [("record", operands), ("recur", operands)]
        return out

    def gate(self, gate: _Rows, up: _Rows | None, activation: str) -> _Rows:
        return _Rows(gate.numbers, None if up is None else up.numbers, activation)

    def add(self, x: _Rows, branch: _Rows, name: str, norm: str | None, factor: str | None = None) -> _Rows:
        scale = self._config.residual_scale
        if norm is None and scale == 1 and factor is None:
            self._write_linears(branch, {name: x.numbers}, residual=True)
            return x
        out = self._rows("branch", self._config.hidden_size)
        self._write_linears(branch, {name: out})
        self._add(x.numbers, out, norm, scale, factor)
        return x

    def _add(self, rows: F32, branch: F32, norm: str | None, scale: float, factor: str | None) -> None:
        """Write rows = `factor` * (rows + scale * norm of branch), where each may be None for none."""
        operands = {
            "rows": at(rows), "branch": at(branch), "stride": branch.strides[0], "scale": scale,
            "weight": 0 if norm is None else at(self._vectors[norm]), "parts": 1,
            "features": self._config.hidden_size, "eps": self._config.norm_eps,
            "after": 1.0 if factor is None else float(self._vectors[factor][0]),
        }  # fmt: skip
        self.operations.append(("add", operands))

    def experts(
        self,
        layer: Layer,
        x: _Rows,
        norm: str | None,
        shared: tuple[_Rows, _Rows | None] | None,
        norm_after: str | None,
        factor: str | None,
    ) -> _Rows:
        c, feed, weight, routing = self._config, layer.feed, layer.weight, self._routing
        assert feed, "the layer has it"
        assert feed.experts, "and experts in it"
        assert routing, "and the model"
        experts, inner = feed.experts, tuple(weight(f"expert_{part}") for part in (("gate", "up") if feed.gated else ("up",)))
        used, hidden, pairs = experts.used, c.hidden_size, routing.pairs
        router, names, down = weight("router"), inner, weight("expert_down")
        encodings = {name: self._encoding(name) for name in (*names, down)}
        # Of each row the scores of experts, as much room for their ranks, and some for those of groups.
        scores = self._rows("router", 4 * round_up(experts.count, GROUP))
        of_router, of_experts = {"f32": self._inputs["f32"]}, {encodings[name]: self._inputs[encodings[name]] for name in names}
        norm_of_router = weight("router_norm") if experts.normed_apart else norm
        prepared = of_router if experts.normed_apart else of_router | of_experts
        self.operations.append(("prepare", self._prepare(x, norm_of_router, hidden, prepared)))
        product = {"num_tensors": 1, "features": hidden}
        tensor = self._tensor(router, "f32", self._inputs["f32"], scores)
        self.operations.append(("linear", product | {"tensors": [tensor]}))
        num_bytes = sum(self._matrices[name].nbytes for name in encodings) // experts.count
        shift = self._vectors.get(weight("router_shift"))
        route = {
            "logits": at(scores), "stride": scores.strides[0], "factors": at(routing.factors), "shift": at(shift),
            "count": experts.count, "used": used, "score": ("softmax", "sigmoid", "chosen").index(experts.score),
            "normalised": experts.normalised, "groups": experts.groups, "groups_used": experts.groups_used, "bytes": num_bytes,
            "scale": experts.scale, "least_sum": experts.least_sum,
            "weights": at(self._vectors.get(weight("router_factors"))),
        }  # fmt: skip
        copies = []
        for encoding in dict.fromkeys(encodings[name] for name in names):
            step, row_bytes = products.step_layout(encoding), products.row_bytes(encoding, hidden)
            steps = hidden if encoding == "f32" else round_up(hidden, GROUP) // step.inputs  # f32 alone is not padded
            copies.append(
                {
                    "source": at(self._inputs[encoding]), "to": at(self._inputs_of_pairs[encoding]), "row_bytes": row_bytes,
                    "steps": steps, "step_bytes": products.ENCODINGS[encoding] * step.inputs // GROUP,
                    "size": step.size, "pieces": step.pieces, "words": step.words,
                }
            )  # fmt: skip
        gather = {"used": used, "num_copies": len(copies), "copies": copies}
        self.operations.append(("route", route))
        if experts.normed_apart:
            self.operations.append(("prepare", self._prepare(x, norm, hidden, of_experts)))
        self.operations.append(("gather", gather))
        stored = self._matrices[down]
        if isinstance(stored, StoredTensor):
            route["table"] = at(stored.table)
            self.cuts.append(len(self.operations))
            if not self.of_prompts and not self.adapts:
                self.stored.append((stored.layer, self._router(layer, x, norm_of_router)))
        outputs = {name: self._rows(name.rsplit(".", 1)[-1], experts.size, pairs) for name in names}
        tensors = [
            self._tensor(name, encodings[name], self._inputs_of_pairs[encodings[name]], out) for name, out in outputs.items()
        ]
        for name, tensor in zip(names, tensors, strict=True):
            tensor["one_row"] = at(self._inputs[encodings[name]])
        self.operations.append(("linear", {"num_tensors": len(names), "features": hidden, "used": used, "tensors": tensors}))
        gate, *up = map(_Rows, outputs.values())
        inside = self.gate(gate, up[0] if up else None, feed.activation)
        of_down = self._inputs_of_pairs[encodings[down]]
        self.operations.append(("prepare", self._prepare(inside, None, experts.size, {encodings[down]: of_down}) | {"used": used}))
        out = self._rows("expert_down", hidden, pairs)
        tensors = [self._tensor(down, encodings[down], of_down, out)]
        self.operations.append(("linear", {"num_tensors": 1, "features": experts.size, "used": used, "tensors": tensors}))
        if isinstance(stored, StoredTensor):
            self.cuts.append(len(self.operations))
        apart, scale = experts.normed_apart or norm_after is not None or factor is not None, c.residual_scale
        total = self._rows("branch", hidden) if apart else x.numbers
        combine = {
            "rows": at(total), "stride": total.strides[0], "features": hidden, "factors": at(routing.factors), "used": used,
            "outputs": at(out), "outputs_stride": out.strides[0], "scale": 1.0 if apart else scale, "adds": not apart,
        }  # fmt: skip
        if shared:
            common = self._rows("shared_down", hidden)
            self._write_linears(shared[0], {weight("shared_down"): common})
            if not experts.normed_apart:
                combine |= {"shared": at(common), "shared_stride": common.strides[0]}
            if shared[1]:
                combine |= {"weights": at(shared[1].numbers), "weights_stride": shared[1].numbers.strides[0]}
        self.operations.append(("combine", combine))
        if experts.normed_apart:
            self._norm(common, weight("shared_post_norm"), hidden)
            self._add(common, total, weight("expert_post_norm"), 1.0, None)
            total = common
        if apart:
            self._add(x.numbers, total, norm_after, scale, factor)
        return x

    def _router(self, layer: Layer, x: _Rows, norm: str | None) -> Router:
        """The parts with which a layer's experts are guessed before its rows are there."""
        experts, matrix = layer.feed and layer.feed.experts, self._matrices[layer.weight("router")]
        assert experts, "the layer has them"
        assert isinstance(matrix, PackedTensor), "a router stays in memory"
        weights = None if norm is None else self._vectors[norm]
        bias, shift = (self._vectors.get(layer.weight(part)) for part in ("router_bias", "router_shift"))
        return Router(experts, x.numbers, weights, self._config.norm_eps, unpack(matrix).dequantize(), bias, shift)

    def keep(self, layer: Layer, x: _Rows) -> None:
        operands = {"rows": at(x.numbers), "stride": x.numbers.strides[0], "layer": layer.index}
        self.operations.append(("keep", operands | {"row_bytes": 4 * self._config.hidden_size}))

    def logits(self, x: _Rows, name: str, norm: str | None) -> _Rows:
        self._write_linears(x, {name: None}, norm, cap=self._config.logit_softcap)
        tiles = self._matrices[name].num_tiles
        self.operations.append(("pick", {"tiles": tiles, "stride": 4 * TILE * tiles}))
        return x

    def _write_linears(
        self, x: _Rows, outputs: Mapping[str, F32 | None], norm: str | None = None, residual: bool = False, cap: float = 0.0
    ) -> None:
        """Prepare rows, once for all matrices whose inputs are in the same order, and multiply them. No output: the logits.
        residual: add to the output. cap: of logits.
        """
        by_order: dict[bytes, dict[str, F32 | None]] = {}
        for name, out in outputs.items():
            order = self._orders.get(name)
            by_order.setdefault(b"" if order is None else order.tobytes(), {})[name] = out
        for some in by_order.values():
            self._write_linears_of_one_order(x, some, norm, residual, cap)

    def _write_linears_of_one_order(
        self, x: _Rows, outputs: Mapping[str, F32 | None], norm: str | None, residual: bool, cap: float
    ) -> None:
        shape, logits = self._matrices[next(iter(outputs))].shape, any(out is None for out in outputs.values())
        encodings = {name: self._encoding(name, logits) for name in outputs}
        adapts = self.adapts and not logits
        wanted = {*encodings.values(), "f32"} if adapts else encodings.values()
        prepare = self._prepare(x, norm, shape[1], {encoding: self._inputs[encoding] for encoding in wanted})
        prepare |= {"order": at(self._orders.get(next(iter(outputs)))), "select": logits}
        tensors = [
            self._tensor(name, encodings[name], self._inputs[encodings[name]], out) | {"residual": at(out) if residual else 0}
            for name, out in outputs.items()
        ]
        product = {"num_tensors": len(tensors), "features": shape[1], "tensors": tensors}
        if logits:
            product |= {"vocab": shape[0], "cap": cap}
        self.operations += [("prepare", prepare), ("linear", product)]
        if adapts:
            changed = [
                {"number": self.adapted.setdefault(name, len(self.adapted)), **{key: tensor[key] for key in _RESULTS}}
                for name, tensor in zip(outputs, tensors, strict=True)
            ]
            of_adapters = {
                "features": shape[1], "inputs": at(self._inputs["f32"]), "row_bytes": products.row_bytes("f32", shape[1]),
                "num_tensors": len(changed), "tensors": changed,
            }  # fmt: skip
            self.num_partials = max(self.num_partials, len(changed) * -(-shape[1] // adapters.PART))
            self.operations += [("shrink", of_adapters), ("expand", of_adapters)]

    def _encoding(self, name: str, logits: bool = False) -> str:
        """The encoding in which a matrix reads its activations. One that needs tile registers has another in reserve."""
        format_name, precise = self._matrices[name].format.name, _is_precise(self._config, name)
        encodings = [linear.activation_encoding(format_name, precise, self._in_14_bits)]
        if self.of_prompts and not logits:
            encodings = [linear.prompt_encoding(format_name, precise)]
        if encodings == ["bf16"]:
            is_paired = "rounded" in linear.encodings(format_name)
            encodings.append("rounded" if is_paired else linear.activation_encoding(format_name, precise))

        def compiled(encoding: str) -> str:
            linear.linear_kernel(format_name, encoding)
            return encoding

        return first_sound([partial(compiled, encoding) for encoding in encodings])

    def _prepare(self, x: _Rows, norm: str | None, features: int, to: Mapping[str, U8]) -> dict[str, Any]:
        """Rows to activations. to: where they go, by their encoding."""
        c, kind, other = self._config, pointwise.PLAIN if norm is None else pointwise.NORM, x.up
        if x.activation:
            kinds = {
                "silu": (pointwise.SILU, pointwise.SILU_ALONE), "gelu_tanh": (pointwise.GELU, pointwise.GELU_ALONE),
                "swiglu_oai": (pointwise.SWIGLU_OAI, pointwise.PLAIN), "sigmoid": (pointwise.SIGMOID, pointwise.PLAIN),
                "relu2": (pointwise.RELU2, pointwise.RELU2_ALONE),
            }  # fmt: skip
            kind = kinds[x.activation][x.up is None]
        elif norm is not None and c.norm_kind == "layer":
            kind = pointwise.LAYER_NORM
            other = self._vectors[norm + "_bias"] if c.norm_bias else self._rows("no bias", features, 1)
        return {
            "kind": kind, "rows": at(x.numbers), "other": at(other), "stride": x.numbers.strides[0], "eps": c.norm_eps,
            "other_stride": 0 if other is None or kind == pointwise.LAYER_NORM else other.strides[0],
            "weight": 0 if norm is None else at(self._vectors[norm]), "features": features,
            **{encoding: at(place) for encoding, place in to.items()},
        }  # fmt: skip

    def _tensor(self, name: str, encoding: str, inputs: U8, out: F32 | None) -> dict[str, Any]:
        """A matrix, or those of experts, of a "linear" operation. out: None for the logits."""
        matrix, bias = self._matrices[name], self._vectors.get(name + "_bias")
        if isinstance(matrix, StoredTensor):
            where = {"table": at(matrix.table)}
        else:
            where = {"tiles": at(matrix.data), "copies_apart": matrix.copies_apart}
        return where | {
            "kernel": linear.linear_kernel(matrix.format.name, encoding), "tile_bytes": matrix.tile_bytes,
            "num_tiles": matrix.num_tiles, "inputs": at(inputs), "row_bytes": products.row_bytes(encoding, matrix.shape[-1]),
            "bias": at(bias), "bias_bytes": 0 if bias is None else bias.strides[0], "out": at(out),
            "stride": 4 * TILE * matrix.num_tiles if out is None else out.strides[0],
        }  # fmt: skip

    def _rows(self, part: str, features: int, num_rows: int = 0) -> F32:
        """A buffer for `max_rows` rows (or `num_rows`) of a part of a layer, zeroed, each padded to whole groups. Layers share it
        if they have the part in one size.
        """
        if self._sizes.setdefault(part, features) != features:
            part = f"{part} of {features}"
        if part not in self.buffers:
            buffer = aligned_bytes((num_rows or self._max_rows, 4 * round_up(features, GROUP))).view(np.float32)
            buffer[:] = 0
            self.buffers[part] = buffer
        return self.buffers[part]


def _is_precise(config: ModelConfig, name: str) -> bool:
    """Whether a matrix reads 16-bit activations: the logits', those that read a target's raw outputs, all of a head without layers,
    those of a recurrent layer's decays and updates, whose errors stay in its state, and in small models the values' and the MLP's
    last, where 8 bits cost most (SmolLM2-135M over 512 tokens: mean KL 0.95e-3 without, 0.52e-3 with them; a larger model needs
    neither).
    """
    if config.head and config.head.fuses == "alone":
        return True
    return (
        name in ("output", "encode", "fuse", "back")
        or name.endswith((".delta_beta", ".delta_alpha"))
        or (config.hidden_size < _SMALL and name.endswith((".v", ".down", "_down")))
    )


def _new_inputs(rows: int, features: int, encodings: Iterable[str] = products.ENCODINGS) -> dict[str, U8]:
    """Memory for activations in each encoding: whole blocks of rows, and whole vectors of the last block."""
    groups = round_up(rows, products.BLOCK_ROWS) * round_up(features, GROUP) // GROUP + 1
    return {encoding: aligned_bytes((groups * products.ENCODINGS[encoding],)) for encoding in encodings}


def at(array: NDArray[np.generic] | None) -> int:
    return 0 if array is None else array.ctypes.data


def _rest(length: int) -> I32:
    """Indices from `length` on that fill up the last group."""
    return np.arange(length, round_up(length, GROUP), dtype=np.int32)
