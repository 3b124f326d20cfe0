"""The frozen settings that travel through the package: model, sampling, speculation, engine.

Plain data and its validation; nothing here knows arrays, files or kernels.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from numbers import Integral, Real
from typing import Any, NoReturn, TypeVar

from cpuspec.errors import ConfigError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_LONGEST_CONTEXT = 1 << 26


def number(
    value: object, low: float = -math.inf, high: float = math.inf, above: float = -math.inf, below: float = math.inf
) -> float:
    """A finite number in [low, high] and (above, below), as a float; numpy's count, too. Raises ValueError or OverflowError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError("not a number")
    found = float(value)
    if not (math.isfinite(found) and low <= found <= high and above < found < below):
        raise ValueError("out of range")
    return found


def whole(value: object, low: float = -math.inf, high: float = math.inf) -> int:
    """A whole number from low to high as an int; numpy's are whole numbers, too. Raises ValueError for others."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError("not a whole number")
    found = int(value)
    if not low <= found <= high:
        raise ValueError("out of range")
    return found


def _fits(read: Callable[[object], object], value: object) -> bool:
    """Whether a reader takes the value."""
    try:
        read(value)
    except (ValueError, OverflowError):
        return False
    return True


def _shown(value: object) -> str:
    """A value in an error: not so long that it hides the error, whatever a file holds."""
    if isinstance(value, int) and abs(value) > 1 << 80:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:80]


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
        numbers = {"factor": self.factor}
        if self.kind == "llama3":
            numbers |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.kind == "yarn":
            numbers |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
        for name, value in numbers.items():
            self._check(name, value, _fits(partial(number, low=1e-6, high=1e6), value), "a number from 1e-6 to 1e6")
        if self.kind == "llama3":
            ordered = self.low_freq_factor < self.high_freq_factor
            self._check("low_freq_factor", self.low_freq_factor, ordered, f"less than high_freq_factor {self.high_freq_factor}")
        if self.kind == "yarn":
            self._check("beta_slow", self.beta_slow, self.beta_slow < self.beta_fast, f"less than beta_fast {self.beta_fast}")
            # It multiplies every cosine and sine, so that logits of attention grow with its square.
            sound = self.attention_factor is None or _fits(partial(number, low=1e-3, high=100), self.attention_factor)
            self._check("attention_factor", self.attention_factor, sound, "a number from 0.001 to 100")
        if self.kind in ("llama3", "yarn"):
            length = self.original_context_length
            sound = _fits(partial(whole, low=1, high=_LONGEST_CONTEXT), length)
            self._check("original_context_length", length, sound, f"an integer from 1 to {_LONGEST_CONTEXT}")
        for i, value in enumerate(self.factors):
            # Some files give pairs that are not to turn a factor like 1e30.
            self._check(f"factors[{i}]", value, _fits(partial(number, low=1e-6, high=1e38), value), "a number from 1e-6 to 1e38")

    def _check(self, name: str, value: object, sound: bool, wanted: str) -> None:
        if not sound:
            raise ConfigError(f"rope scaling {self.kind}: {name} is {_shown(value)}, wanted {wanted}")


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
            "context_length": _LONGEST_CONTEXT,
        }
        for name, limit in limits.items():
            value = getattr(self, name)
            if not _fits(partial(whole, low=1, high=limit), value):
                raise ConfigError(f"{name} must be an integer from 1 to {limit}, got {_shown(value)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if not _fits(partial(number, low=0, below=1), self.norm_eps):
            raise ConfigError(f"norm_eps must be in [0, 1), got {_shown(self.norm_eps)}")
        if not _fits(partial(number, above=1, high=1e15), self.rope_base):
            raise ConfigError(f"rope_base is {_shown(self.rope_base)}, wanted a number above 1, at most 1e15")
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "factors" and len(scaling.factors) != self.head_dim // 2:
            raise ConfigError(f"rope factors must be head_dim / 2 = {self.head_dim // 2} numbers, got {len(scaling.factors)}")


_T = TypeVar("_T")


def _setting(default: object, read: Callable[[object], object], wanted: str) -> Any:
    """A field of settings: its default, the function that checks and normalises a value (ValueError), and what is wanted."""
    return field(default=default, metadata={"read": read, "wanted": wanted})


def _read_settings(settings: Any) -> None:
    """Replace every value by what its field's function makes of it. Raises ConfigError."""
    for one in fields(settings):
        value = getattr(settings, one.name)
        try:
            object.__setattr__(settings, one.name, one.metadata["read"](value))
        except (ValueError, TypeError, OverflowError):
            raise ConfigError(f"{one.name} must be {one.metadata['wanted']}, got {_shown(value)}") from None


class _FrozenDict(dict[int, float]):
    """A dict that stays as it is and can be hashed."""

    def _refuse(self, *arguments: object, **named: object) -> NoReturn:
        raise TypeError("sampling params do not change; make others with dataclasses.replace(params, logit_bias=...)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[object, ...]:
        return _FrozenDict, (dict(self),)


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError("not True or False")


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("not a text")


def _one_of(choices: tuple[str, ...], value: object) -> str:
    if value in choices:
        return _text(value)
    raise ValueError("none of them")


def _texts(value: object) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple | set | frozenset) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("not texts")
    return tuple(texts)


def _ids(value: object) -> tuple[int, ...]:
    if isinstance(value, str | bytes | Mapping):
        raise ValueError("not token ids")
    return () if value is None else tuple(whole(one) for one in value)  # type: ignore[attr-defined]


def _biases(value: object) -> _FrozenDict:
    """-inf forbids a token."""
    if value is not None and not isinstance(value, Mapping):
        raise ValueError("not a mapping")
    return _FrozenDict(
        {
            whole(token, 0): -math.inf if isinstance(bias, Real) and bias == -math.inf else number(bias)
            for token, bias in (value or {}).items()
        }
    )


def _or_none(read: Callable[[object], _T]) -> Callable[[object], _T | None]:
    return lambda value: None if value is None else read(value)


@dataclass(frozen=True)
class SamplingParams:
    """How one request turns logits into tokens, and when it ends. The default is greedy.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and penalties at their defaults are off.
    n: how many answers `LLM.generate` and `LLM.chat` give to the prompt; with a seed, the second has seed + 1, and so on.
    logprobs: None, or how many alternatives to report beside each chosen token (0 = the chosen token alone).
    max_draft_tokens: at most so many drafted tokens a round for this request, 0 = none; None = what the model was loaded with.
    """

    temperature: float = _setting(0.0, partial(number, low=0), "a number >= 0")
    top_k: int = _setting(0, partial(whole, low=0), "an integer >= 0 (0 = off)")
    top_p: float = _setting(1.0, partial(number, above=0, high=1), "a number in (0, 1]")
    min_p: float = _setting(0.0, partial(number, low=0, high=1), "a number in [0, 1]")
    repetition_penalty: float = _setting(1.0, partial(number, above=0), "a number > 0")
    presence_penalty: float = _setting(0.0, number, "a finite number")
    frequency_penalty: float = _setting(0.0, number, "a finite number")
    logit_bias: Mapping[int, float] = _setting(
        _FrozenDict(), _biases, "a mapping from token id to a number (-inf forbids), or None"
    )
    seed: int | None = _setting(None, _or_none(partial(whole, low=0)), "None or an integer >= 0")
    stop: tuple[str, ...] = _setting((), _texts, "a text or several, none of them empty, or None")
    stop_token_ids: tuple[int, ...] = _setting((), _ids, "token ids, or None")
    ignore_eos: bool = _setting(False, _flag, "True or False")
    max_tokens: int = _setting(256, partial(whole, low=1), "an integer >= 1")
    n: int = _setting(1, partial(whole, low=1), "an integer >= 1")
    logprobs: int | None = _setting(None, _or_none(partial(whole, low=0)), "None or an integer >= 0")
    max_draft_tokens: int | None = _setting(None, _or_none(partial(whole, low=0)), "None or an integer >= 0")

    def __post_init__(self) -> None:
        _read_settings(self)

    @property
    def greedy(self) -> bool:
        """Whether the next token is the argmax of the processed logits."""
        return self.temperature == 0

    @cached_property
    def keeps_order(self) -> bool:
        """Whether the processed logits are the raw logits, so that their argmax needs no history."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return not self.logit_bias and penalties == (1, 0, 0)


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
        try:
            object.__setattr__(self, "num_tokens", _or_none(partial(whole, low=1, high=MAX_DRAFT_TOKENS))(self.num_tokens))
        except ValueError:
            raise ConfigError(f"{self.drafter} drafts 1 to {MAX_DRAFT_TOKENS} tokens a round, got {self.num_tokens!r}") from None
        try:
            object.__setattr__(self, "min_confidence", number(self.min_confidence, low=0, below=1))
        except ValueError:
            raise ConfigError(f"min_confidence of {self.drafter} must be a number in [0, 1), got {self.min_confidence!r}") from None

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

        Names are checked where drafters are known (`cpuspec.engine.assemble`). Raises ConfigError on bad grammar.
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

    max_sequences: int = _setting(16, partial(whole, low=1, high=4096), "an integer from 1 to 4096")
    # None: what the model was trained for. At least a token of the prompt and one of the answer.
    context_length: int | None = _setting(None, _or_none(partial(whole, low=2)), "None or an integer >= 2")
    # Rows of one forward; longer prefills go in chunks of this.
    max_rows: int = _setting(256, partial(whole, low=1, high=8192), "an integer from 1 to 8192")
    # Rows of prompts that a step reads beside sequences that generate: the fewest that make a prompt at most 15 % slower. With
    # AVX2, SmolLM2-135M, two streams and 4,000 tokens, 32 rows make it 10 % slower, and a step takes as long as 7 plain ones at the
    # prompt's beginning and as 18 at its end; 16 rows: 19 %, 5 and 9; 64 rows: 4 %, 15 and 41 (benchmarks/LOG.md).
    prompt_rows: int = _setting(32, partial(whole, low=1, high=8192), "an integer from 1 to 8192")
    # None: physical cores that this process may use.
    threads: int | None = _setting(None, _or_none(partial(whole, low=1, high=1024)), "None or an integer from 1 to 1024")
    # Whether weights in the order of the kernels are kept on the disk for the next start.
    keep_packed: bool = _setting(True, _flag, "True or False")
    # Whether model files and kept weights are mapped; if not, they are read into memory.
    mmap: bool = _setting(True, _flag, "True or False")
    # Keys and values: f16 halves what f32 reads at depth and costs nothing that can be measured (benchmarks/LOG.md).
    kv_format: str = _setting("f16", _text, "a text")
    # auto: cuda where there is one, else cpu; or cpu, cuda, cuda:N.
    device: str = _setting("auto", _text, "a text")
    # Of products with weights; auto: f32 on a CPU and bf16 on a GPU.
    dtype: str = _setting("auto", partial(_one_of, DTYPES), f"one of {', '.join(DTYPES)}")
    # values: dequantized at load; codes: as in the file, unpacked on the device; auto: codes on a GPU.
    weights: str = _setting("auto", partial(_one_of, WEIGHTS), f"one of {', '.join(WEIGHTS)}")
    # That matrices in codes are multiplied with; auto: int8, but f32 in the reference.
    activations: str = _setting("auto", partial(_one_of, ACTIVATIONS), f"one of {', '.join(ACTIVATIONS)}")

    def __post_init__(self) -> None:
        _read_settings(self)
