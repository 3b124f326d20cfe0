"""The transformer on torch tensors, on a CPU or a CUDA device (`pip install cpuspec[torch]`).

What is between the matrices is computed in f32, products with weights in `EngineConfig.dtype`. Products are torch's libraries': a
row's last bits may depend on what it is batched with, so this backend is not row-invariant, and greedy answers with drafts may
leave those without where two tokens are nearly as likely.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cpuspec.backends.formulas import Formulas
from cpuspec.backends.torch_cache import KV_LAYOUTS, Storage
from cpuspec.backends.torch_graphs import Outputs, Recorder, record_cuda_graph
from cpuspec.backends.torch_weights import Codes, Matrix, OfExperts, Values, few_rows_kernel
from cpuspec.backends.weights import LoadedWeights, WeightTensor, check_room, drop_embeddings, key_centres, weight_tensors
from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.adapters import Adapter
from cpuspec.checkpoints.checkpoint import is_matrix
from cpuspec.config import SWIGLU_ALPHA, SWIGLU_LIMIT, ModelConfig, Rope
from cpuspec.environment import usable_cores
from cpuspec.errors import BackendError
from cpuspec.formats import Cast, Format, QuantTensor
from cpuspec.formats.format import hadamard
from cpuspec.formats.kv import get_kv_format, hadamard_size
from cpuspec.layers import Layer, attention_layers, keeping_layers
from cpuspec.model.batch import F32, ForwardBatch, ForwardOutput, visible
from cpuspec.model.cache import KVCache
from cpuspec.model.recurrence import RecurrentState, new_state, recurrent_mixers, recurrent_slots
from cpuspec.model.rope import rope_table
from cpuspec.model.transformer import decode, inject
from cpuspec.settings import EngineConfig

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16})

# Attention scores that are there at a time, in f32: longer chunks of a prefill go in parts.
_MAX_SCORES = 1 << 24


# Rows up to which forwards are recorded, and the cache indices that a recorded forward looks at: powers of two from this one on.
_RECORDED_ROWS, _SPAN = 32, 256


_Pairs = dict[str, tuple[Tensor, Tensor]]  # of an adapter, on the device
_Adapted = Sequence[tuple[slice, float, _Pairs]]  # rows, and a scaled adapter of theirs


@dataclass(frozen=True)
class _Part:
    """One sequence's rows of a forward, and where their keys and values are."""

    rows: slice
    storage: Storage
    length: int  # tokens that the slot holds
    span: int  # cache indices that the rows look at


@dataclass(frozen=True)
class _Step:
    """A forward's inputs. Two steps of the same `key` differ only in the contents of their tensors.

    tensors: ("x") F32 [T, C] embedded tokens; ("hidden") F32 [T, C] if the model takes hidden states; ("logit_rows") I64 [n];
    ("cos", rope) and ("sin", rope) F32 [T, 1, D/2]; ("at", part) I64 [t], cache indices where keys and values go;
    ("mask", part, window) [t, span], whether a row sees an index.
    is_padded: a part may look at indices that no row sees.
    """

    parts: tuple[_Part, ...]
    hidden_layers: tuple[int, ...]
    is_padded: bool
    tensors: Mapping[Hashable, Tensor]

    @property
    def key(self) -> Hashable:
        """Everything that a run of the step depends on besides the contents of its tensors."""
        places = tuple((part.rows.start, id(part.storage), part.span) for part in self.parts)
        return len(self.tensors["x"]), len(self.tensors["logit_rows"]), self.hidden_layers, places


@dataclass(frozen=True)
class _HeadChanges:
    """What is done to heads around a cache in codes. hadamard: a matrix F32 [D, D] that queries, keys, values and results are
    multiplied with; centres: what is subtracted from the keys of a layer, F32 [G, D] by the layer's index.
    """

    hadamards: Mapping[int, Tensor]
    centres: Mapping[int, Tensor]

    def transformed(self, heads: Tensor) -> Tensor:
        """Heads [..., D] times the matrix of their dimensions, if there is one."""
        hadamard = self.hadamards.get(heads.shape[-1])
        return heads if hadamard is None else heads @ hadamard

    def kept(self, layer: Layer, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Keys F32 [t, G, D] and values [t, G * D], if there are any, as they go to the cache, [t, G, D]."""
        centre = self.centres.get(layer.index)
        v = None if v is None else self.transformed(v.unflatten(1, (-1, layer.attention.value_dims)))
        return self.transformed(k if centre is None else k - centre), v


class TorchBackend:
    """The transformer in torch.

    share: a backend of the same device, dtype and kind of weights whose weights this one uses, for every tensor object that both
    checkpoints hold. casts: matrices that are cast to another format at load, by name.
    Raises BackendError for a device that is not there or has no room for the weights.
    """

    name = "torch"
    row_invariant = False
    survives_fork = False
    adapts = True
    _weights: LoadedWeights[Matrix | Tensor]

    def __init__(
        self,
        checkpoint: Checkpoint,
        engine: EngineConfig,
        share: "TorchBackend | None" = None,
        casts: Mapping[str, Format] = MappingProxyType({}),
    ) -> None:
        self.config = checkpoint.config
        self.max_rows = engine.max_rows
        self.threads: int = engine.threads or usable_cores()
        self.device = find_device(engine.device)
        self._kind = _WeightKind.chosen(engine, self.device)
        # The host decides which experts run and when a state is folded: a forward with these cannot be recorded as a graph.
        recorded = self.device.type == "cuda" and not self.config.experts and not self.config.is_recurrent
        self.recorder = Recorder(record_cuda_graph) if recorded else None
        kv_format = get_kv_format(engine.kv_format)
        self._kv_layout = KV_LAYOUTS[kv_format.name]
        self._embed = checkpoint.tensors["embed"]  # stays where the file is: a forward wants a few rows of it
        layers = attention_layers(self.config)
        mixers = [layer.attention for layer in layers]
        self._ropes = {(rope, mixer.dims) for mixer in mixers for rope in (mixer.rope, mixer.query_rope) if rope}
        self._windows = {layer.attention.window for layer in layers}
        cast: Callable[[QuantTensor, Format], Cast] = Cast
        if casts:
            from cpuspec.kernels.encode import recode  # imports numba

            cast = partial(Cast, recode=recode)
        tensors = weight_tensors(checkpoint, casts, cast)
        self._layer_embed = checkpoint.tensors.get("layer_embed")
        drop_embeddings(tensors)
        sizes = {dims: hadamard_size(kv_format, dims) for mixer in mixers for dims in (mixer.dims, mixer.value_dims)}
        self._heads = _HeadChanges(
            {
                dims: torch.from_numpy(hadamard(np.eye(dims, dtype=np.float32), size)).to(self.device)
                for dims, size in sizes.items()
                if size
            },
            {index: torch.from_numpy(c).to(self.device) for index, c in key_centres(self.config, kv_format, tensors).items()},
        )
        shared = share._weights if share and (share.device, share._kind) == (self.device, self._kind) else None
        try:
            self._weights = LoadedWeights(tensors, self._load, shared)
        except torch.OutOfMemoryError:
            num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
            raise BackendError(
                f"the weights do not fit the memory of {self.device}: in the file they take {num_bytes / 1e9:.1f} GB; "
                "use --weights codes, a dtype of fewer bits, or --device cpu"
            ) from None
        self.weight_bytes, self.shared_bytes = self._weights.num_bytes, self._weights.shared_bytes
        self.matrices = {name: weight for name, weight in self._weights.items() if not isinstance(weight, Tensor)}
        self._vectors = {name: weight for name, weight in self._weights.items() if isinstance(weight, Tensor)}
        self._expert_bytes = 0  # that the latest forward read; none where forwards are recorded
        self._adapters: WeakKeyDictionary[Adapter, _Pairs] = WeakKeyDictionary()

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        """An empty cache for this model, on its device."""
        c, layout, recorder = self.config, self._kv_layout, self.recorder
        zeros, mixers = partial(torch.zeros, device=self.device), recurrent_mixers(c)
        heads = [(mixer.kv_heads, mixer.dims, mixer.value_dims) for mixer in (layer.attention for layer in keeping_layers(c))]

        def new_storage() -> Storage:
            storage = Storage(layout, heads, capacity, self.device)
            storage.states = [new_state(mixer, zeros) for mixer in mixers]
            if recorder:
                finalize(storage, recorder.clear)  # recordings know its memory, and do not hold it
            return storage

        def copy_prefix(source: Storage, storage: Storage, length: int) -> None:
            if storage.provide(length) and recorder:
                recorder.clear()
            source.copy_prefix(storage, length)

        per_token = sum(count * (layout.row_bytes(dims) + layout.row_bytes(value_dims)) for count, dims, value_dims in heads)
        states = recurrent_slots(
            c, np.float32, lambda tensor: tensor.cpu().numpy(), lambda array: torch.from_numpy(array).to(self.device)
        )
        return KVCache(num_slots, capacity, new_storage, Storage.copy_rows, copy_prefix, per_token, **states)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        """Run the rows, append their keys and values to the cache, and return logits, best ids and asked hidden states."""
        batch.check(self.config, cache, self.max_rows)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)  # torch has one number for the whole process
        recorder = self.recorder if len(batch.tokens) <= _RECORDED_ROWS and not batch.adapters else None
        step = self._step(batch, cache, for_recording=recorder is not None)
        tensors, run = list(step.tensors.values()), partial(self._run, step, self._adapted(batch))
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            if recorder:
                logits, best, *hidden = recorder.run(step.key, tensors, self.device, run)
            else:
                logits, best, *hidden = run([each.to(self.device) for each in tensors])
        output = ForwardOutput(logits.cpu().numpy(), tuple(layer.cpu().numpy() for layer in hidden), best.tolist())
        output.weight_bytes = self._weights.read_bytes(len(best), self._expert_bytes)
        cache.advance(batch)
        return output

    @torch.inference_mode()
    def project(self, rows: F32, name: str) -> F32:
        """The product of rows with one of a head's matrices."""
        forward = self._forward(_Step((), (), False, {}), {})
        return forward.linear(torch.from_numpy(rows).to(self.device), name).cpu().numpy()

    @torch.inference_mode()
    def inject(self, batch: ForwardBatch, cache: KVCache) -> None:
        """Append keys and values of hidden states."""
        batch.check(self.config, cache, self.max_rows, injects=True)
        step = self._step(batch, cache, for_recording=False)
        given = {name: tensor.to(self.device) for name, tensor in step.tensors.items()}
        inject(self.config, self._forward(step, given))
        cache.advance(batch)

    def close(self) -> None:
        """Nothing to release: torch keeps memory that nobody holds for its own reuse."""

    def _load(self, tensors: Mapping[str, WeightTensor]) -> dict[str, Matrix | Tensor]:
        if self.device.type == "cpu":
            as_values = 0 if self._kind.as_codes else self._kind.dtype.itemsize
            check_room(sum(max(tensor.num_bytes, as_values * math.prod(tensor.shape)) for tensor in tensors.values()))
        return {name: self._loaded(name, tensor) for name, tensor in tensors.items()}

    def _loaded(self, name: str, tensor: WeightTensor) -> Matrix | Tensor:
        if not is_matrix(name, tensor.shape):
            return torch.from_numpy(tensor.dequantize()).to(self.device)
        if name.endswith(".router"):
            return Values(tensor, torch.float32, self.device)
        if len(tensor.shape) == 3:
            return OfExperts([self._matrix(matrix) for matrix in tensor.matrices])
        return self._matrix(tensor)

    def _matrix(self, tensor: WeightTensor) -> Matrix:
        if self._kind.as_codes and tensor.format.block_size > 1:
            return Codes(tensor.made() if isinstance(tensor, Cast) else tensor, self._kind.dtype, self.device)
        return Values(tensor, self._kind.dtype, self.device)

    def _step(self, batch: ForwardBatch, cache: KVCache, for_recording: bool) -> _Step:
        """Everything that a forward needs to know, in the host's memory."""
        rows = np.arange(len(batch.tokens)) if batch.logit_rows is None else batch.logit_rows
        arrays: dict[Hashable, NDArray[Any]] = {"x": self._embed.rows(batch.tokens), "logit_rows": rows.astype(np.int64)}
        if batch.hidden is not None:
            arrays["hidden"] = batch.hidden
        if self._layer_embed is not None:
            arrays["layer_embed"] = self._layer_embed.rows(batch.tokens)
        for rope, dims in self._ropes:
            tables = rope_table(rope, dims, batch.positions)
            arrays["cos", rope, dims], arrays["sin", rope, dims] = (table[:, None] for table in tables)
        parts = []
        for b, slot in enumerate(batch.slots.tolist()):
            storage, prefix = cache.storage(slot), cache.lengths[slot]
            start, stop = batch.q_start[b : b + 2].tolist()
            end = prefix + stop - start
            if storage.provide(end) and self.recorder:
                self.recorder.clear()
            span = min(storage.size, max(_SPAN, 1 << (end - 1).bit_length())) if for_recording else end
            parts.append(_Part(slice(start, stop), storage, prefix, span))
            arrays["at", b] = np.arange(prefix, end)
            for window in self._windows:
                arrays["mask", b, window] = np.pad(visible(batch, b, prefix, window), ((0, 0), (0, span - end)))
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return _Step(tuple(parts), batch.hidden_layers, for_recording, tensors)

    def _adapted(self, batch: ForwardBatch) -> _Adapted:
        """The adapters of the batch's rows, on the device."""
        starts, adapted = batch.lists.q_start, list[tuple[slice, float, _Pairs]]()
        for start, end, adapters in zip(starts, starts[1:], batch.adapters, strict=False):
            for adapter, scale in adapters:
                if adapter not in self._adapters:
                    pairs = {name: (torch.from_numpy(a), torch.from_numpy(b)) for name, (a, b) in adapter.pairs.items()}
                    self._adapters[adapter] = {name: (a.to(self.device), b.to(self.device)) for name, (a, b) in pairs.items()}
                adapted.append((slice(start, end), scale, self._adapters[adapter]))
        return adapted

    def _forward(self, step: _Step, tensors: Mapping[Hashable, Tensor], adapted: _Adapted = ()) -> "_Forward":
        return _Forward(self.config, self.matrices, self._vectors, self._heads, step, tensors, adapted)

    def _run(self, step: _Step, adapted: _Adapted, tensors: Sequence[Tensor]) -> Outputs:
        """Logits F32 [n, V] of the asked rows, their best ids I64 [n], and hidden states F32 [T, C] of the asked layers."""
        inputs = dict(zip(step.tensors, tensors, strict=True))
        forward = self._forward(step, inputs, adapted)
        logits = decode(self.config, forward)
        self._expert_bytes = forward.expert_bytes
        return logits, best_ids(logits), *(forward.kept[layer] for layer in step.hidden_layers)


class _Forward(Formulas):
    """The operations of one forward (`Operations` in `model.transformer`) on tensors of the device."""

    def __init__(
        self,
        config: ModelConfig,
        matrices: Mapping[str, Matrix],
        vectors: Mapping[str, Tensor],
        heads: _HeadChanges,
        step: _Step,
        tensors: Mapping[Hashable, Tensor],
        adapted: _Adapted,
    ) -> None:
        self.kept: dict[int, Tensor] = {}
        self.expert_bytes, self._adapted = 0, adapted
        self._config, self._matrices, self._vectors, self._step, self._tensors = config, matrices, vectors, step, tensors
        self.xp, self._heads = torch, heads

    def embed(self) -> Tensor:
        return self._tensors["x"] * self._config.embedding_scale

    def hidden(self, norm: str | None) -> Tensor:
        return self.norm(self._tensors["hidden"], norm)

    def _rotation(self, rope: Rope, dims: int) -> tuple[Tensor, Tensor]:
        return self._tensors["cos", rope, dims], self._tensors["sin", rope, dims]

    def _layer_embedding(self) -> Tensor:
        return self._tensors["layer_embed"]

    def _states(self, layer: Layer) -> Iterator[tuple[slice, RecurrentState, int]]:
        for part in self._step.parts:
            yield part.rows, part.storage.states[layer.state_index], part.length

    def _by_head(self, layer: Layer, part: str, x: Tensor, on_inputs: Callable[..., None]) -> Tensor:
        matrix = self._matrices[layer.weight(part)]
        assert isinstance(matrix, OfExperts), "there is one for each head"
        heads = x.unflatten(1, (len(matrix.matrices), -1)).unbind(1)
        return torch.stack([own.times(some) for own, some in zip(matrix.matrices, heads, strict=True)], dim=1)

    def attention(self, layer: Layer, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        latent = layer.attention.latent
        q = self._heads.transformed(q * layer.attention.scale)
        if k is not None:
            self._append(layer, k, v)
        parts = [self._attend(layer, b, q[p.rows]) for b, p in enumerate(self._step.parts)]
        return (torch.cat(parts) if latent is None else torch.cat(parts)[..., latent.value_places]).flatten(1)

    def _append(self, layer: Layer, k: Tensor, v: Tensor | None) -> None:
        if v is not None and layer.attention.value_norm:
            of_heads = v.unflatten(1, (-1, layer.attention.value_dims))
            v = (of_heads * torch.rsqrt(of_heads.square().mean(-1, keepdim=True) + self._config.norm_eps)).flatten(1)
        k, v = self._heads.kept(layer, k, v)
        for b, part in enumerate(self._step.parts):
            values = None if v is None else v[part.rows]
            part.storage.append(layer.state_index, self._tensors["at", b], k[part.rows], values)

    def gate(self, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
        if activation == "sigmoid":
            return gate.sigmoid() if up is None else gate.sigmoid() * up
        if activation == "swiglu_oai":
            assert up is not None, "`ModelConfig` has checked it"
            gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
            return gate * (gate * SWIGLU_ALPHA).sigmoid() * (up + 1)
        if activation == "relu2":
            active = gate.relu().square()
        else:
            active = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
        return active if up is None else active * up

    def keep(self, layer: Layer, x: Tensor) -> None:
        if layer.index in self._step.hidden_layers:
            self.kept[layer.index] = x

    def logits(self, x: Tensor, name: str, norm: str | None) -> Tensor:
        logits = self.linear(self.norm(x[self._tensors["logit_rows"]], norm), name)
        return self._softcapped(logits, self._config.logit_softcap)

    def norm(self, x: Tensor, name: str | None) -> Tensor:
        """RMS norm over the last axis (arXiv 1910.07467), or layer norm (arXiv 1607.06450)."""
        if name is None:
            return x
        if self._config.norm_kind == "layer":
            bias = self._vectors.get(name + "_bias")
            return functional.layer_norm(x, x.shape[-1:], self._vectors[name], bias, self._config.norm_eps)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._config.norm_eps) * self._vectors[name]

    def linear(self, x: Tensor, name: str, expert: int | None = None) -> Tensor:
        """expert: whose matrix of those of all it is."""
        matrix, bias = self._matrices[name], self._vectors.get(name + "_bias")
        if expert is not None:
            assert isinstance(matrix, OfExperts), "the layer has one for each"
            matrix, bias = matrix.matrices[expert], None if bias is None else bias[expert]
            self.expert_bytes += matrix.nbytes
        y = self._with_adapters(matrix.times(x), x, name)
        return y if bias is None else y + bias

    def _attend(self, layer: Layer, b: int, q: Tensor) -> Tensor:
        """One sequence's attention, F32 [t, H, D]. q: scaled queries [t, H, D]."""
        part, mask = self._step.parts[b], self._tensors["mask", b, layer.attention.window]
        keys, values = part.storage.read(layer.state_index, part.span)  # [G, span, D]
        if self._step.is_padded:  # with forgotten values, which may be infinite
            values = torch.where(mask.any(0)[:, None], values, 0)
        t, heads, _ = q.shape
        groups = len(keys)
        q = q.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)  # [G, H/G, t, D]: keys are read once for a group
        out = q.new_empty((t, groups, heads // groups, values.shape[-1]))
        at_once = max(1, _MAX_SCORES // (heads * part.span))
        for start in range(0, t, at_once):
            rows = slice(start, start + at_once)
            some = q[:, :, rows]
            scores = self._softcapped((some.flatten(1, 2) @ keys.mT).view(*some.shape[:3], part.span), layer.attention.softcap)
            scores = scores.masked_fill(~mask[rows], -torch.inf)
            if layer.attention.sinks:
                sinks = self._vectors[layer.weight("sinks")].view(groups, -1, 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat([scores, sinks], -1)
            weights = scores.softmax(-1)[..., : part.span]
            out[rows] = (weights.flatten(1, 2) @ values).view(*some.shape[:3], -1).permute(2, 0, 1, 3)
        return self._heads.transformed(out.flatten(1, 2))


def find_device(name: str) -> torch.device:
    """The device called `name`; "auto" is CUDA's where there is one. Raises BackendError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BackendError(f"device {name!r} is not known; wanted auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise BackendError(f"device {name!r} is not supported; wanted auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise BackendError(f"device {name!r} is not there: torch {torch.__version__} sees {count} CUDA devices; use --device cpu")
    return device


def best_ids(logits: Tensor) -> Tensor:
    """`sampling.argmax` of each row, I64 [n], -1 for what it refuses. A nan is larger than anything, here as in numpy."""
    best = logits.argmax(-1)  # the first of equals
    return torch.where(logits.gather(-1, best[:, None])[:, 0].isfinite(), best, -1)


@dataclass(frozen=True)
class _WeightKind:
    """How weights are kept: what two backends must agree on to share them."""

    dtype: torch.dtype
    as_codes: bool

    @staticmethod
    def chosen(engine: EngineConfig, device: torch.device) -> "_WeightKind":
        """What the settings say, or else: f32 on a CPU and bf16 on a GPU, and codes where there is a kernel for them."""
        dtype = engine.dtype if engine.dtype != "auto" else "bf16" if device.type == "cuda" else "f32"
        as_codes = few_rows_kernel(device) is not None if engine.weights == "auto" else engine.weights == "codes"
        return _WeightKind(DTYPES[dtype], as_codes)
