"""The seam between engines: one whole forward. A backend runs one loaded model and owns its cache storage."""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Protocol

from cpuspec.backends.disk import DiskReads
from cpuspec.checkpoints import Checkpoint
from cpuspec.config import ModelConfig
from cpuspec.errors import BackendError
from cpuspec.formats import Format
from cpuspec.model.batch import F32, ForwardBatch, ForwardOutput
from cpuspec.model.cache import KVCache
from cpuspec.platform import SYSTEM
from cpuspec.settings import EngineConfig, memory_limit_bytes

# The module of each backend, which is imported once the backend is asked for, and its class.
_MAKERS = {
    "numba": ("numba_backend", "NumbaBackend"),
    "numpy": ("numpy_backend", "NumpyBackend"),
    "torch": ("torch_backend", "TorchBackend"),
    "onnxruntime": ("graph_backend", "OnnxruntimeBackend"),
    "openvino": ("graph_backend", "OpenvinoBackend"),
}
BACKENDS = tuple(_MAKERS)
SHARING = ("numba", "numpy", "torch")  # backends of which two share weights; graph engines rearrange weights for themselves

# What a backend needs beyond this package's own dependencies: modules, and the extra that installs them.
_EXTRAS = {
    "torch": (("torch",), "torch"),
    "onnxruntime": (("onnx", "onnxruntime"), "onnx"),
    "openvino": (("onnx", "openvino"), "openvino"),
}

# Settings that only some backends have: what every other one takes, and which have it.
OWN_SETTINGS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {
        "device": (("auto", "cpu"), ("torch",)),
        "dtype": (("auto",), ("torch",)),
        "weights": (("auto",), ("torch",)),
        "activations": (("auto",), ("onnxruntime", "openvino", "numpy", "numba")),
        "prompt_arithmetic": (("auto", "codes"), ("numba",)),
        "memory": (("auto",), ("numba",)),
    }
)
# Values of such a setting that not all of these have, and which have them.
_OWN_VALUES: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {("activations", "f32"): ("onnxruntime", "openvino", "numpy"), ("activations", "int14"): ("numba",)}
)


class Backend(Protocol):
    """One loaded model, as a `Context` runs it."""

    name: str
    config: ModelConfig
    row_invariant: bool  # whether a row's logits are the same bits whatever it is batched with
    survives_fork: bool  # whether a forked child can run it, too: a library that has threads of its own would wait for ever
    max_rows: int  # rows of one forward
    threads: int
    weight_bytes: int  # of all weights; `ForwardOutput.weight_bytes` counts those that a forward read
    shared_bytes: int  # of the weights that it shares with the backend it was made beside

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        """An empty cache for this model."""
        ...

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        """Run the rows, append their keys and values, advance the cache's lengths, return logits and hidden states.

        Raises ForwardStoppedError where the batch `stops_early`, and `stop_forward` was called while it ran.
        """
        ...

    def close(self) -> None:
        """Release threads and memory."""
        ...


class HeadBackend(Backend, Protocol):
    """A backend that can run a draft head. All of ours can."""

    def project(self, rows: F32, name: str) -> F32:
        """The product [T, N] of any number of rows [T, K] with one of the head's matrices [N, K], plus its bias if it has one.

        `encode`, where the head has a `feature_size`, makes hidden states of features.
        """
        ...

    def inject(self, batch: ForwardBatch, cache: KVCache) -> None:
        """Append keys and values of the batch's hidden states to the cache, where the head `injects`; its tokens do not matter."""
        ...


def check_backend(name: str, engine: EngineConfig | None = None) -> None:
    """Raise BackendError unless `name` is an installed backend that has these settings. Call it before gigabytes are loaded."""
    if name not in BACKENDS:
        raise BackendError(f"backend {name!r} does not exist; wanted one of {', '.join(BACKENDS)}")
    if engine:
        for setting, (elsewhere, _) in OWN_SETTINGS.items():
            owners = owners_of(setting, getattr(engine, setting))
            if name not in owners and getattr(engine, setting) not in elsewhere:
                whose = f"{' and '.join(', '.join(owners).rsplit(', ', 1))} backend{'s' * (len(owners) > 1)}"
                raise BackendError(
                    f"{setting} {getattr(engine, setting)} is a setting of the {whose}, and this is {name}; "
                    f"leave it at auto, or use --backend {owners[0]}"
                )
    modules, extra = _EXTRAS.get(name, ((), ""))
    for module in modules:
        if find_spec(module) is None:
            raise BackendError(f"the {name} backend needs {module}, which is not installed; pip install 'cpuspec[{extra}]'")


def owners_of(setting: str, value: str) -> tuple[str, ...]:
    """The backends that have a value of one of OWN_SETTINGS."""
    return _OWN_VALUES.get((setting, value), OWN_SETTINGS[setting][1])


def prepare(name: str) -> None:
    """Begin to compile kernels, so that this goes on while a model is fetched and read."""
    if name == "numba":
        from cpuspec.kernels.isa import check_processor
        from cpuspec.kernels.team import compile_ahead

        check_processor()
        compile_ahead()


def settings_on(name: str, engine: EngineConfig) -> EngineConfig:
    """The same settings for another backend. Settings that it does not have, and values of them, are auto."""
    without: dict[str, Any] = {own: "auto" for own in OWN_SETTINGS if name not in owners_of(own, getattr(engine, own))}
    return replace(engine, **without)


def settings_of(name: str, engine: EngineConfig) -> dict[str, str]:
    """The KV format and the settings of a backend that change its arithmetic."""
    own = (setting for setting, (_, owners) in OWN_SETTINGS.items() if name in owners and setting not in ("device", "memory"))
    return {setting: getattr(engine, setting) for setting in ("kv_format", *own)}


def device_of(backend: Backend) -> str:
    """Where a backend computes, such as "cpu" or "cuda:0"."""
    return str(getattr(backend, "device", "cpu"))  # only some backends have a choice


def disk_reads(backend: Backend) -> DiskReads | None:
    """What reading experts from the disk has cost; None where all weights are in memory, or belong to another backend."""
    store = getattr(backend, "store", None)  # only some backends can leave weights on the disk
    return store.reads() if store else None


def has_prompt_arithmetic(backend: Backend) -> bool:
    """Whether a backend gives a token of a prompt other bits than a generated one (`ForwardBatch.of_prompts`)."""
    return getattr(backend, "prompt_arithmetic", "codes") != "codes"  # only some backends have a choice


def num_of_prompt(backend: Backend, num_prompt_tokens: int, start: int) -> int:
    """How many tokens from number `start` on are computed as a prompt's, in a sequence whose first `num_prompt_tokens` are its
    prompt's: 0 where a backend has one arithmetic for all. Nothing else decides a token's arithmetic.

    A text that is scored for a request is all prompt; a text whose perplexity or divergence is measured is all answer.
    """
    return max(num_prompt_tokens - start, 0) if has_prompt_arithmetic(backend) else 0


def stop_forward(backend: Backend) -> None:
    """End the running forward, if its batch `stops_early` and the backend is able to. Any thread may call this at any time."""
    if stop := getattr(backend, "stop", None):
        stop()


def memory_limit(text: str) -> int | None:
    """The bytes that weights may take, None for no limit. Raises BackendError for a share where the memory's size is unknown."""
    there = SYSTEM.memory().usable
    if text == "auto":
        return None
    if there is None and "%" in text:
        raise BackendError(f"memory {text}: this system does not tell how much memory there is; give a size, such as 8GB")
    return memory_limit_bytes(text, there or 0)


def make_backend(
    name: str,
    checkpoint: Checkpoint,
    engine: EngineConfig,
    share: Backend | None = None,
    casts: Mapping[str, Format] = MappingProxyType({}),
) -> HeadBackend:
    """The backend called `name`, with the checkpoint's weights loaded. Raises BackendError for an unknown name.

    share: a backend that takes turns with this one. If it is of the same kind, the two have one set of threads, and the weights of
    every tensor object that both checkpoints hold are in memory once.
    casts: matrices that are cast to another format at load, by name. Raises FormatError where a value does not fit its format.
    """
    check_backend(name, engine)
    scaling, length = checkpoint.config.rope_scaling, engine.context_length
    if scaling is not None and scaling.kind == "longrope" and length and length < checkpoint.config.context_length:
        # The context length that was asked for chooses LongRoPE's factors (`RopeScaling.for_context`), not the number of tokens.
        checkpoint = replace(checkpoint, config=replace(checkpoint.config, context_length=length))
    module, maker = _MAKERS[name]
    kind = getattr(import_module(f"cpuspec.backends.{module}"), maker)
    shared = {"share": share if isinstance(share, kind) else None} if name in SHARING else {}
    made: HeadBackend = kind(checkpoint, engine, casts=casts, **shared)
    return made
