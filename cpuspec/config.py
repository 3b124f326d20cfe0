"""The frozen settings that travel through the package: model, sampling, speculation, engine.

Plain data and its validation; nothing here knows arrays, files or kernels.
"""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from cpuspec.errors import ConfigError

ARCHITECTURES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    kind: "linear", "llama3", "yarn", or "factors" (explicit divisors, one per frequency, as GGUF's `rope_freqs`).
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3", "yarn", "factors"):
            raise ConfigError(f"rope scaling {self.kind!r} is not supported; wanted linear, llama3, yarn or factors")
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ConfigError(f"rope scaling factor must be a positive number, got {self.factor}")
        if self.kind in ("llama3", "yarn") and self.original_context_length <= 0:
            raise ConfigError(f"rope scaling {self.kind} needs original_context_length, got {self.original_context_length}")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                "rope scaling llama3 wants 0 < low_freq_factor < high_freq_factor, "
                f"got {self.low_freq_factor} and {self.high_freq_factor}"
            )
        if self.kind == "factors" and not all(math.isfinite(f) and f > 0 for f in self.factors):
            raise ConfigError("rope factors must be positive numbers")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and flags of one decoder-only transformer: everything `forward` needs besides the weights."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(f"architecture {self.architecture!r} is not supported; wanted one of {', '.join(ARCHITECTURES)}")
        limits = {
            "vocab_size": 1 << 24,
            "hidden_size": 1 << 17,
            "intermediate_size": 1 << 20,
            "num_layers": 1 << 12,
            "num_heads": 1 << 12,
            "num_kv_heads": 1 << 12,
            "head_dim": 1 << 10,
            "context_length": 1 << 26,
        }
        for name, limit in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value <= limit:
                raise ConfigError(f"{name} must be an integer from 1 to {limit}, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if not 0 <= self.norm_eps < 1:
            raise ConfigError(f"norm_eps must be in [0, 1), got {self.norm_eps}")
        if not (math.isfinite(self.rope_base) and self.rope_base > 0):
            raise ConfigError(f"rope_base must be a positive number, got {self.rope_base}")
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "factors" and len(scaling.factors) != self.head_dim // 2:
            raise ConfigError(f"rope factors must be head_dim / 2 = {self.head_dim // 2} numbers, got {len(scaling.factors)}")


_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True)
class SamplingParams:
    """How one request turns logits into tokens, and when it ends. The default is greedy.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and penalties at their defaults are off.
    logprobs: None, or how many alternatives to report beside each chosen token (0 = the chosen token alone).
    max_draft_tokens: at most so many drafted tokens a round for this request, 0 = none; None = what the model was loaded with.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int = 256
    logprobs: int | None = None
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, ok, wanted in (
            ("temperature", _real(self.temperature) and self.temperature >= 0, "a number >= 0"),
            ("top_k", _whole(self.top_k) and self.top_k >= 0, "an integer >= 0 (0 = off)"),
            ("top_p", _real(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("min_p", _real(self.min_p) and 0 <= self.min_p <= 1, "a number in [0, 1]"),
            ("repetition_penalty", _real(self.repetition_penalty) and self.repetition_penalty > 0, "a number > 0"),
            ("presence_penalty", _real(self.presence_penalty), "a finite number"),
            ("frequency_penalty", _real(self.frequency_penalty), "a finite number"),
            ("seed", self.seed is None or (_whole(self.seed) and self.seed >= 0), "None or an integer >= 0"),
            ("max_tokens", _whole(self.max_tokens) and self.max_tokens >= 1, "an integer >= 1"),
            ("logprobs", self.logprobs is None or (_whole(self.logprobs) and self.logprobs >= 0), "None or an integer >= 0"),
            (
                "max_draft_tokens",
                self.max_draft_tokens is None or (_whole(self.max_draft_tokens) and self.max_draft_tokens >= 0),
                "None or an integer >= 0",
            ),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings"),
            ("stop_token_ids", all(_whole(t) for t in self.stop_token_ids), "integers"),
            (
                "logit_bias",
                all(_whole(t) and t >= 0 and (_real(b) or b == -math.inf) for t, b in self.logit_bias.items()),
                "a mapping from token id to a number (-inf forbids)",
            ),
        ):
            if not ok:
                raise ConfigError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

    @property
    def greedy(self) -> bool:
        """Whether the next token is the argmax of the processed logits."""
        return self.temperature == 0

    @cached_property
    def keeps_order(self) -> bool:
        """Whether the processed logits are the raw logits, so that their argmax needs no history."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return not self.logit_bias and penalties == (1, 0, 0)


def _real(value: object) -> bool:
    # The comparison is false for NaN, and exact for an integer that no float can hold.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# The fields of SamplingParams that models have an opinion about.
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingDefaults:
    """How a model wants to be sampled, in the fields of `SamplingParams`; None is what it leaves open.

    ignored: what its files say and cannot be used, a sentence each. Raises ConfigError for values that SamplingParams refuses.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        SamplingParams(**self.fields())

    @staticmethod
    def read(where: str, values: Mapping[str, object]) -> "SamplingDefaults":
        """The defaults that a stranger's file, called `where`, has under these fields' names; a value of no use is ignored.

        None is absent, and a top_k of -1 is off, as in vLLM.
        """
        usable: dict[str, Any] = {}
        ignored = []
        for name, value in values.items():
            if value is None:
                continue
            usual = 0 if name == "top_k" and type(value) is int and value == -1 else value
            try:
                SamplingDefaults(**{name: usual})  # type: ignore[arg-type]
            except ConfigError as error:
                ignored.append(f"{where}: {str(error)[:200]}; it is ignored")
            else:
                usable[name] = usual
        return SamplingDefaults(**usable, ignored=tuple(ignored))

    def fields(self) -> dict[str, Any]:
        """What the model has an opinion about, by name."""
        return {name: getattr(self, name) for name in SAMPLING_FIELDS if getattr(self, name) is not None}

    def over(self, others: "SamplingDefaults") -> "SamplingDefaults":
        """These defaults, and those of `others` in the fields that these leave open."""
        return SamplingDefaults(**{**others.fields(), **self.fields()}, ignored=self.ignored + others.ignored)

    def under(self, given: Mapping[str, Any]) -> SamplingParams:
        """The params of a request with these settings, the others by default.

        A given temperature of 0 is plain greedy decoding: none of the model's defaults apply, a penalty as little as top-k.
        Raises ConfigError as SamplingParams does.
        """
        return SamplingParams(**{**({} if given.get("temperature") == 0 else self.fields()), **given})


NO_DEFAULTS = SamplingDefaults()


MAX_DRAFT_TOKENS = 255  # at most a row less than a forward has


@dataclass(frozen=True)
class LevelSpec:
    """One drafter: `name`, or `name:argument` for those that take one, and its settings.

    num_tokens: at most so many a round, None for the drafter's own number. min_confidence: a draft ends where its drafter is less
    sure than this, 0 for the drafter's own bound. then: drafters that continue its tokens within the same verification.
    """

    drafter: str
    num_tokens: int | None = None
    min_confidence: float = 0.0
    then: tuple["LevelSpec", ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.drafter, str) or not self.name or self.name == "none" or self.drafter.endswith(":"):
            raise ConfigError(f"a draft level begins with the name of a drafter, got {self.drafter!r}")
        if self.num_tokens is not None and not (_whole(self.num_tokens) and 1 <= self.num_tokens <= MAX_DRAFT_TOKENS):
            raise ConfigError(f"{self.drafter} drafts 1 to {MAX_DRAFT_TOKENS} tokens a round, got {self.num_tokens!r}")
        if not (_real(self.min_confidence) and 0 <= self.min_confidence < 1):
            raise ConfigError(f"min_confidence of {self.drafter} must be a number in [0, 1), got {self.min_confidence!r}")

    @property
    def name(self) -> str:
        """What stands before the colon."""
        return self.drafter.partition(":")[0]

    @property
    def argument(self) -> str:
        """What stands after the colon."""
        return self.drafter.partition(":")[2]

    def __str__(self) -> str:
        tokens = "" if self.num_tokens is None else str(self.num_tokens)
        confidence = f":{self.min_confidence:g}" if self.min_confidence else ""
        cap = f"@{tokens}{confidence}" if tokens or confidence else ""
        return "+".join([f"{self.drafter}{cap}", *map(str, self.then)])


_LEVEL = re.compile(r"(?P<drafter>.+?)(@(?P<tokens>[0-9]{1,9})?(:(?P<confidence>[0-9]*\.?[0-9]+))?)?")
_GRAMMAR = "wanted none, or levels drafter[:argument][@tokens[:confidence]], cheapest first, separated by commas, or joined by +"


@dataclass(frozen=True)
class SpecConfig:
    """The draft levels, cheapest first; no level is plain decoding."""

    levels: tuple[LevelSpec, ...] = ()

    @staticmethod
    def parse(text: str) -> "SpecConfig":
        """Read what `--draft` takes, as `ngram`, `ngram@8`, `suffix,self:mxfp4@4` or `small-model@6:0.4+ngram`.

        Names are checked where drafters are known (`cpuspec.spec.levels`). Raises ConfigError on bad grammar.
        """
        return SpecConfig() if text.strip() in ("", "none") else SpecConfig.read(text.split(","))

    @staticmethod
    def read(levels: object) -> "SpecConfig":
        """The same from a list, as TOML and JSON have it: each level a text, or a table with the fields of `LevelSpec`.

        In a table a drafter may contain any character. Raises ConfigError.
        """
        if isinstance(levels, str):
            return SpecConfig.parse(levels)
        if not isinstance(levels, list | tuple):
            raise ConfigError(f"draft levels are a text or a list, got {levels!r}")
        return SpecConfig(tuple(_read_level(level) for level in levels))

    def __str__(self) -> str:
        return ",".join(map(str, self.levels)) or "none"


AUTO = SpecConfig((LevelSpec("auto"),))  # drafts where that pays: the default of everything that takes a spec


def _read_level(level: object) -> LevelSpec:
    if isinstance(level, LevelSpec):
        return level
    if isinstance(level, str):
        first, *then = [_read_drafter(part.strip(), level) for part in level.split("+")]
        return replace(first, then=tuple(then))
    if not isinstance(level, dict) or not {"drafter"} <= level.keys() <= {"drafter", "num_tokens", "min_confidence", "then"}:
        raise ConfigError(
            f"cannot read draft level {level!r}; wanted a text or a table with drafter, num_tokens, min_confidence, then"
        )
    return LevelSpec(**{**level, "then": SpecConfig.read(level.get("then", [])).levels})


def _read_drafter(text: str, level: str) -> LevelSpec:
    found = _LEVEL.fullmatch(text)
    if found is None or text.endswith("@"):
        raise ConfigError(f"cannot read {level!r} in a draft spec; {_GRAMMAR}")
    tokens, confidence = found["tokens"], found["confidence"]
    return LevelSpec(found["drafter"], int(tokens) if tokens else None, float(confidence) if confidence else 0.0)


DTYPES = ("auto", "f32", "bf16", "f16")
WEIGHTS = ("auto", "values", "codes")
ACTIVATIONS = ("auto", "int8", "f32")


@dataclass(frozen=True)
class EngineConfig:
    """What an engine reserves: sequences at once, tokens a sequence may hold, rows of one forward, threads, disk, KV format.

    The KV format's name is checked where formats are known (`cpuspec.formats.kv`), the device's where devices are. Device, dtype
    and weights are settings of the torch backend, activations of onnxruntime, openvino and numpy; others take "auto", and "cpu" as
    the device (`cpuspec.backends.check_backend`).
    """

    max_sequences: int = 16
    context_length: int | None = None  # None: what the model was trained for
    max_rows: int = 256  # rows of one forward; longer prefills go in chunks of this
    threads: int | None = None  # None: physical cores that this process may use
    keep_packed: bool = True  # whether weights in the order of the kernels are kept on the disk for the next start
    # Keys and values: f16 halves what f32 reads at depth and costs nothing that can be measured (benchmarks/LOG.md).
    kv_format: str = "f16"
    device: str = "auto"  # auto: cuda where there is one, else cpu; or cpu, cuda, cuda:N
    dtype: str = "auto"  # of products with weights: f32, bf16, f16; auto: f32 on a CPU and bf16 on a GPU
    weights: str = "auto"  # values: dequantized at load; codes: as in the file, unpacked on the device; auto: codes on a GPU
    activations: str = "auto"  # that matrices in codes are multiplied with: int8 or f32; auto: int8, but f32 in the reference

    def __post_init__(self) -> None:
        for name, choices in (("dtype", DTYPES), ("weights", WEIGHTS), ("activations", ACTIVATIONS)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name, limit in (("max_sequences", 4096), ("max_rows", 8192)):
            value = getattr(self, name)
            if not _whole(value) or not 1 <= value <= limit:
                raise ConfigError(f"{name} must be an integer from 1 to {limit}, got {value!r}")
        if self.context_length is not None and not (_whole(self.context_length) and self.context_length >= 1):
            raise ConfigError(f"context_length must be None or an integer >= 1, got {self.context_length!r}")
        if self.threads is not None and not (_whole(self.threads) and 1 <= self.threads <= 1024):
            raise ConfigError(f"threads must be None or an integer from 1 to 1024, got {self.threads!r}")
        if not isinstance(self.keep_packed, bool):
            raise ConfigError(f"keep_packed must be True or False, got {self.keep_packed!r}")
