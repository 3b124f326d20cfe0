"""The transformer on torch tensors, on a CPU or a CUDA device (`pip install cpuspec[torch]`).

What is between the matrices is computed in f32, products with weights in `EngineConfig.dtype`. Products are torch's libraries': a
row's last bits may depend on what it is batched with, so this backend is not row-invariant, and greedy answers with drafts may
leave those without where two tokens are nearly as likely.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cpuspec.backends.torch_cache import KV_LAYOUTS, Storage
from cpuspec.backends.torch_graphs import Outputs, Recorder, record_cuda_graph
from cpuspec.backends.torch_weights import Codes, Matrix, Values, few_rows_kernel
from cpuspec.checkpoints import Checkpoint
from cpuspec.config import EngineConfig
from cpuspec.environment import usable_cores
from cpuspec.errors import BackendError
from cpuspec.formats import Cast, Format, QuantTensor
from cpuspec.formats.kv import get_kv_format
from cpuspec.kernels.encode import recode
from cpuspec.model.batch import ForwardBatch, ForwardOutput, visible
from cpuspec.model.cache import KVCache
from cpuspec.model.rope import rope_table

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16})

# Attention scores that are there at a time, in f32: longer chunks of a prefill go in parts.
_MAX_SCORES = 1 << 24


# Rows up to which forwards are recorded, and the cache indices that a recorded forward looks at: powers of two from this one on.
_RECORDED_ROWS, _SPAN = 32, 256


@dataclass(frozen=True)
class _Part:
    """One sequence's rows of a forward."""

    rows: slice
    storage: Storage
    at: Tensor  # [t] cache indices where its keys and values go
    mask: Tensor  # [t, span] whether a row sees a cache index
    is_padded: bool  # whether there may be indices that no row sees


@dataclass(frozen=True)
class _Step:
    """A forward's inputs."""

    x: Tensor  # [T, C] embedded tokens
    cos: Tensor  # [T, 1, D/2]
    sin: Tensor
    logit_rows: Tensor
    parts: tuple[_Part, ...]
    hidden_layers: tuple[int, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.x, self.cos, self.sin, self.logit_rows, *(t for part in self.parts for t in (part.at, part.mask))]

    def on(self, tensors: Sequence[Tensor]) -> "_Step":
        """The step with other tensors, in the order of `tensors`."""
        x, cos, sin, logit_rows, *rest = tensors
        parts = tuple(replace(part, at=at, mask=mask) for part, at, mask in zip(self.parts, rest[::2], rest[1::2], strict=True))
        return _Step(x, cos, sin, logit_rows, parts, self.hidden_layers)

    @property
    def key(self) -> Hashable:
        """What it is besides the contents of its tensors."""
        places = tuple((part.rows.start, id(part.storage), part.mask.shape) for part in self.parts)
        return len(self.x), len(self.logit_rows), self.hidden_layers, places


class TorchBackend:
    """The transformer in torch.

    share: a backend of the same device, dtype and kind of weights whose weights this one uses, for every tensor object that both
    checkpoints hold. casts: matrices that are cast to another format at load, by name.
    Raises BackendError for a device that is not there or has no room for the weights.
    """

    name = "torch"
    row_invariant = False
    survives_fork = False

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
        self._recorder = Recorder(record_cuda_graph) if self.device.type == "cuda" else None
        self._kv_layout = KV_LAYOUTS[get_kv_format(engine.kv_format).name]
        self._embed = checkpoint.tensors["embed"]  # stays where the file is: a forward wants a few rows of it
        tensors = {name: t for name, t in checkpoint.tensors.items() if name != "embed"}
        if self.config.tied_embeddings:
            tensors["output"] = self._embed
        sources: dict[str, QuantTensor | Cast] = {
            name: Cast(t, casts[name], recode) if name in casts else t for name, t in tensors.items()
        }
        shared = share._loaded if share and (share.device, share._kind) == (self.device, self._kind) else {}
        try:
            loaded = {name: shared[t] if t in shared else self._load(t) for name, t in sources.items()}
        except torch.OutOfMemoryError:
            raise BackendError(
                f"the weights do not fit the memory of {self.device}: in the file they take {_gigabytes(tensors.values())}; "
                "use --weights codes, a dtype of fewer bits, or --device cpu"
            ) from None
        self._matrices = {name: w for name, w in loaded.items() if not isinstance(w, Tensor)}
        self._vectors = {name: w for name, w in loaded.items() if isinstance(w, Tensor)}
        self._loaded: WeakKeyDictionary[QuantTensor | Cast, Matrix | Tensor] = WeakKeyDictionary()  # while somebody holds them
        self._loaded.update({t: loaded[name] for name, t in sources.items()})
        self.weight_bytes = sum(map(_num_bytes, loaded.values()))
        self.shared_bytes = sum(_num_bytes(loaded[name]) for name, t in sources.items() if t in shared)

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        """An empty cache for this model, on its device."""
        c, layout, recorder = self.config, self._kv_layout, self._recorder

        def new_storage() -> Storage:
            storage = Storage(layout, c.num_layers, c.num_kv_heads, c.head_dim, capacity, self.device)
            if recorder:
                finalize(storage, recorder.clear)  # recordings know its memory, and do not hold it
            return storage

        def copy_prefix(source: Storage, storage: Storage, length: int) -> None:
            if storage.provide(length) and recorder:
                recorder.clear()
            source.copy_prefix(storage, length)

        per_token = 2 * c.num_layers * c.num_kv_heads * layout.row_bytes(c.head_dim)
        return KVCache(num_slots, capacity, new_storage, Storage.copy_rows, copy_prefix, per_token)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        """Run the rows, append their keys and values to the cache, and return logits, best ids and asked hidden states."""
        batch.check(self.config, cache, self.max_rows)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)  # torch has one number for the whole process
        recorder = self._recorder if len(batch.tokens) <= _RECORDED_ROWS else None
        step = self._step(batch, cache, for_recording=recorder is not None)

        def run(tensors: Sequence[Tensor]) -> Outputs:
            return self._run(step.on(tensors))

        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            if recorder:
                logits, best, *hidden = recorder.run(step.key, step.tensors, self.device, run)
            else:
                logits, best, *hidden = run([each.to(self.device) for each in step.tensors])
        output = ForwardOutput(logits.cpu().numpy(), tuple(layer.cpu().numpy() for layer in hidden), best.tolist())
        cache.advance(batch)
        return output

    def close(self) -> None:
        """Nothing to release: torch keeps memory that nobody holds for its own reuse."""

    def _load(self, tensor: QuantTensor | Cast) -> Matrix | Tensor:
        if len(tensor.shape) == 1:
            return torch.from_numpy(tensor.dequantize()).to(self.device)
        if self._kind.as_codes and tensor.format.block_size > 1:
            return Codes(tensor.made() if isinstance(tensor, Cast) else tensor, self._kind.dtype, self.device)
        return Values(tensor, self._kind.dtype, self.device)

    def _step(self, batch: ForwardBatch, cache: KVCache, for_recording: bool) -> _Step:
        """Everything that a forward needs to know, in the host's memory."""
        cos, sin = rope_table(self.config, batch.positions)
        rows = np.arange(len(batch.tokens)) if batch.logit_rows is None else batch.logit_rows
        return _Step(
            torch.from_numpy(self._embed.rows(batch.tokens)),
            torch.from_numpy(cos[:, None]),
            torch.from_numpy(sin[:, None]),
            torch.from_numpy(rows.astype(np.int64)),
            tuple(self._part(batch, b, cache, for_recording) for b in range(len(batch.slots))),
            batch.hidden_layers,
        )

    def _part(self, batch: ForwardBatch, b: int, cache: KVCache, for_recording: bool) -> _Part:
        slot, rows = int(batch.slots[b]), slice(int(batch.q_start[b]), int(batch.q_start[b + 1]))
        storage, prefix = cache.storage(slot), cache.lengths[slot]
        end = prefix + rows.stop - rows.start
        if storage.provide(end) and self._recorder:
            self._recorder.clear()
        span = min(storage.size, max(_SPAN, 1 << (end - 1).bit_length())) if for_recording else end
        mask = np.zeros((end - prefix, span), np.bool_)
        mask[:, :prefix] = True
        mask[:, prefix:end] = np.tri(end - prefix, dtype=np.bool_) if batch.parents is None else visible(batch, b, 0)
        return _Part(rows, storage, torch.arange(prefix, end), torch.from_numpy(mask), for_recording)

    def _run(self, step: _Step) -> Outputs:
        """Logits F32 [n, V] of the asked rows, their best ids I64 [n], and hidden states F32 [T, C] of the asked layers."""
        c, x, hidden = self.config, step.x, {}
        for i in range(c.num_layers):
            layer = f"layers.{i}."
            h = self._norm(x, layer + "attn_norm")
            q = self._linear(h, layer + "q").unflatten(1, (c.num_heads, c.head_dim))
            k = self._linear(h, layer + "k").unflatten(1, (c.num_kv_heads, c.head_dim))
            v = self._linear(h, layer + "v").unflatten(1, (c.num_kv_heads, c.head_dim))
            if c.qk_norm:
                q, k = self._norm(q, layer + "q_norm"), self._norm(k, layer + "k_norm")
            q, k = _rotate(q, step.cos, step.sin), _rotate(k, step.cos, step.sin)
            attended = torch.cat([_attention(i, q[p.rows], k[p.rows], v[p.rows], p) for p in step.parts])
            x = x + self._linear(attended, layer + "o")
            h = self._norm(x, layer + "mlp_norm")
            gated = functional.silu(self._linear(h, layer + "gate")) * self._linear(h, layer + "up")
            x = x + self._linear(gated, layer + "down")
            if i in step.hidden_layers:
                hidden[i] = x
        logits = self._linear(self._norm(x[step.logit_rows], "norm"), "output")
        return logits, best_ids(logits), *(hidden[i] for i in step.hidden_layers)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm over the last axis (arXiv 1910.07467)."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.norm_eps) * self._vectors[name]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y, bias = self._matrices[name].times(x), self._vectors.get(name + "_bias")
        return y if bias is None else y + bias


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


def _attention(layer: int, q: Tensor, k: Tensor, v: Tensor, part: _Part) -> Tensor:
    """Append keys and values, then softmax(q k^T / sqrt(D)) v over what the rows see, F32 [t, H * D]."""
    part.storage.append(layer, part.at, k, v)
    span = part.mask.shape[1]
    keys, values = part.storage.read(layer, span)  # [G, span, D]
    if part.is_padded:  # with what was forgotten, which may be infinite
        values = torch.where(part.mask.any(0)[:, None], values, 0)
    t, heads, dims = q.shape
    groups = len(keys)
    q = (q / dims**0.5).unflatten(1, (groups, -1)).permute(1, 2, 0, 3)  # [G, H/G, t, D]: keys are read once for a group
    out = q.new_empty((t, groups, heads // groups, dims))
    at_once = max(1, _MAX_SCORES // (heads * span))
    for start in range(0, t, at_once):
        rows = slice(start, start + at_once)
        some = q[:, :, rows]
        scores = (some.flatten(1, 2) @ keys.mT).view(*some.shape[:3], span)
        weights = scores.masked_fill(~part.mask[rows], -torch.inf).softmax(-1)
        out[rows] = (weights.flatten(1, 2) @ values).view(some.shape).permute(2, 0, 1, 3)
    return out.flatten(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs (i, i + D/2) of every head by the row's position (arXiv 2104.09864, rotate-half layout)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _num_bytes(weight: Matrix | Tensor) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes


def _gigabytes(tensors: Iterable[QuantTensor]) -> str:
    return f"{sum(t.num_bytes for t in tensors) / 1e9:.1f} GB"
