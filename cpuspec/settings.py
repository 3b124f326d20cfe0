"""What a user may set: sampling, engine, server, drafts. Each setting is declared once, with its check and its help.

Plain data and its validation; nothing here knows arrays, files or kernels.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field, fields, replace
from functools import cached_property, partial
from numbers import Real
from typing import Any, NamedTuple, NoReturn, TypeVar

from cpuspec.config import fits, number, shown, whole
from cpuspec.errors import ConfigError

_T = TypeVar("_T")


class _Kind(NamedTuple):
    """A kind of setting: the function that checks and normalises a value (ValueError), and what it takes, for errors.

    low, high: the bounds of a number.
    """

    read: Callable[[object], object]
    wanted: str
    low: float | None = None
    high: float | None = None


def _setting(
    default: object, kind: _Kind, help: str, metavar: str = "", of_backend: bool = False, option: str = "", short: str = ""
) -> Any:
    """A field of settings: everything that Python, the command line and a backend's spelling need to know of it.

    help, metavar, option: of its option; by default its name, without the plural's s. short: the letter that llama.cpp gives it.
    of_backend: whether `read_backend` takes it.
    """
    told = {"kind": kind, "help": help, "metavar": metavar, "of_backend": of_backend, "option": option, "short": short}
    return field(default=default, metadata=told)


_of_backend = partial(_setting, of_backend=True)


def _read_settings(settings: Any) -> None:
    """Check and normalise every value by its field's function. Raises ConfigError."""
    for one in fields(settings):
        value, kind = getattr(settings, one.name), one.metadata["kind"]
        try:
            object.__setattr__(settings, one.name, kind.read(value))
        except (ValueError, TypeError, OverflowError):
            raise ConfigError(f"{one.name} must be {kind.wanted}, got {shown(value)}") from None


class _FrozenDict(dict[int, float]):
    """A dict that never changes and has a hash."""

    def _refuse(self, *arguments: object, **named: object) -> NoReturn:
        raise TypeError("sampling params do not change; make others with dataclasses.replace(params, logit_bias=...)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[object, ...]:
        return _FrozenDict, (dict(self),)


_MEMORY_LIMIT = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?(?:(%)|([KMGT])(i?)B)", re.IGNORECASE)


def _memory_limit(value: object) -> str:
    if value != "auto":
        memory_limit_bytes(value, 1 << 40)
    return str(value)


def memory_limit_bytes(limit: object, memory_bytes: int) -> int:
    """The bytes that a limit such as 8GB, 8 GiB or 60% names. memory_bytes: what a share is of. Raises ValueError for others."""
    found = _MEMORY_LIMIT.fullmatch(limit) if isinstance(limit, str) else None
    amount = float(found[1]) if found else 0.0
    if found is None or amount == 0 or (found[2] and amount > 100):
        raise ValueError("not a size")
    if found[2]:
        return int(amount / 100 * memory_bytes)
    return int(amount * (1024 if found[4] else 1000) ** ("KMGT".index(found[3].upper()) + 1))


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
    if isinstance(value, tuple) and all(type(one) is int for one in value):
        return value
    return () if value is None else tuple(whole(one) for one in value)  # type: ignore[attr-defined]


def _schema(value: object) -> str:
    """A JSON schema as JSON text, of a text or of what such a text stands for; the order of properties is kept."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("not a schema")
    try:
        return json.dumps(dict(value), allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _biases(value: object) -> _FrozenDict:
    """-inf forbids a token."""
    if value is not None and not isinstance(value, Mapping):
        raise ValueError("not a mapping")
    return _FrozenDict(
        {
            whole(token, 0): -math.inf if isinstance(bias, Real) and bias == -math.inf else number(bias, -1e6, 1e6)
            for token, bias in (value or {}).items()
        }
    )


def _is_minus_one(value: object) -> bool:
    return value == -1 and not isinstance(value, bool)


def _or_none(read: Callable[[object], _T]) -> Callable[[object], _T | None]:
    return lambda value: None if value is None else read(value)


def _choice(choices: tuple[str, ...]) -> _Kind:
    return _Kind(partial(_one_of, choices), f"one of {', '.join(choices)}")


def _whole(low: int, high: int) -> _Kind:
    return _Kind(partial(whole, low=low, high=high), f"an integer from {low} to {high}", low, high)


def _number(low: float, high: float) -> _Kind:
    return _Kind(partial(number, low=low, high=high), f"a number from {low:g} to {high:g}", low, high)


def _optional(kind: _Kind) -> _Kind:
    return kind._replace(read=_or_none(kind.read), wanted=f"None or {kind.wanted}")


_MOST, _MOST_SEED = (1 << 63) - 1, (1 << 128) - 1  # of an integer
_NOT_NEGATIVE = _Kind(partial(number, low=0), "a number >= 0", 0, sys.float_info.max)
_SHARE = _Kind(partial(number, above=0, high=1), "a number in (0, 1]", math.ulp(0.0), 1)
_SHARE_OR_0 = _number(0, 1)
_OFF_BELOW_0 = _Kind(
    _or_none(lambda value: None if number(value) < 0 else _NOT_NEGATIVE.read(value)),
    "a number, or None for never",
    -1e300,
    sys.float_info.max,
)
# Bounds that leave every sum and quotient of logits finite.
_SHIFT, _PENALTY = _number(-1e6, 1e6), _number(1e-3, 1e3)
_FACTOR = _Kind(partial(number, above=0), "a number > 0")
_COUNT, _POSITIVE_COUNT = _whole(0, _MOST), _whole(1, _MOST)
# vLLM and llama.cpp write -1 for "off" and "none".
_TOP_K = _Kind(lambda value: 0 if _is_minus_one(value) else _COUNT.read(value), f"{_COUNT.wanted}, or -1 for off", 0, _MOST)
# Random numbers are made of 64 bits of a seed.
_SEED = _Kind(
    lambda value: None if value is None or _is_minus_one(value) else whole(value, 0, _MOST_SEED) % (1 << 64),
    f"None or an integer from 0 to {_MOST_SEED}",
    0,
    _MOST_SEED,
)
_BOOLEAN, _TEXT = _Kind(_flag, "True or False"), _Kind(_text, "a text")
_TEXTS, _IDS = _Kind(_texts, "a text or several, none of them empty, or None"), _Kind(_ids, "token ids, or None")
_SCHEMA = _Kind(_or_none(_schema), "a JSON schema, as a dict or as JSON text, or None")
_BIASES = _Kind(_biases, "a mapping from token id to a number from -1e6 to 1e6 (-inf forbids), or None")


@dataclass(frozen=True)
class SamplingParams:
    """How one request turns logits into tokens, and when it ends. The default is greedy.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and penalties at their defaults are off.
    n: answers that `LLM.generate` and `LLM.chat` give to the prompt; with a seed, the second has seed + 1, and so on.
    logprobs: None, or the number of alternatives to report beside each chosen token (0 = only the chosen token).
    prompt_logprobs: the same for the prompt's tokens, in `Completion.prompt_logprobs`; streams have none.
    max_draft_tokens: most tokens drafted in a round for this request, 0 = none; None = as the model was loaded.
    json_schema (kept as JSON text), regex, choices, grammar: one of them at most; every token is then chosen among those that can
    still lead to a text of it. The answer ends where nothing can follow, or where the text is whole and the model chooses its end
    token; max_tokens and stop may cut it off before. free_reasoning and grammar_trigger leave parts of the answer free.
    """

    temperature: float = _setting(
        0.0,
        _NOT_NEGATIVE,
        "0 takes the likeliest token, whatever the model's files recommend; higher is more random. This and the next four are "
        "by default what the model's files or its recipe recommend, else greedy.",
        "T",
    )
    top_k: int = _setting(0, _TOP_K, "Sample among the K likeliest tokens; 0 is off.", "K")
    top_p: float = _setting(1.0, _SHARE, "Sample among the likeliest tokens that together have P; 1 is off.", "P")
    min_p: float = _setting(0.0, _SHARE_OR_0, "Drop tokens less likely than P times the likeliest; 0 is off.", "P")
    repetition_penalty: float = _setting(1.0, _PENALTY, "Above 1, tokens of prompt and answer become less likely; 1 is off.", "X")
    presence_penalty: float = _setting(0.0, _SHIFT, "Taken from the logits of tokens of the answer.", "X")
    frequency_penalty: float = _setting(0.0, _SHIFT, "Likewise, once for each time the token was generated.", "X")
    logit_bias: Mapping[int, float] = _setting(
        _FrozenDict(), _BIASES, "Added to a token's logit; -inf forbids it. Repeatable.", "ID=BIAS"
    )
    seed: int | None = _setting(None, _SEED, "Repeats a sampled answer; by default one is drawn, and shown.", "S")
    stop: tuple[str, ...] = _setting((), _TEXTS, "End before this text, which is not shown. Taken literally. Repeatable.", "TEXT")
    stop_token_ids: tuple[int, ...] = _setting((), _IDS, "End with this token, too. Repeatable.", "ID")
    include_stop_str_in_output: bool = _setting(False, _BOOLEAN, "The answer's text ends with the stop text that ended it.")
    skip_special_tokens: bool = _setting(True, _BOOLEAN, "Leave special tokens out of the answer's text.")
    allowed_token_ids: tuple[int, ...] = _setting(
        (), _IDS, "Choose only among these tokens; by default among all. Repeatable.", "ID"
    )
    bad_words: tuple[str, ...] = _setting(
        (), _TEXTS, "The answer never has this text as the tokenizer writes it alone, or after a space. Repeatable.", "TEXT"
    )
    ignore_eos: bool = _setting(False, _BOOLEAN, "Go on when the model ends its answer, up to --max-tokens.")
    max_tokens: int = _setting(1024, _POSITIVE_COUNT, "Tokens that an answer may have at most.", "N", short="n")
    min_tokens: int = _setting(0, _COUNT, "Tokens that an answer has at least: before, no end token is taken, and no --stop.", "N")
    n: int = _setting(1, _POSITIVE_COUNT, "Answers to the prompt.", "N")
    parse_special: bool = _setting(
        True, _BOOLEAN, "Take a text like <|im_end|> in a raw prompt for that token; in a message it is always text."
    )
    logprobs: int | None = _setting(
        None, _optional(_COUNT), "With --json: log-probabilities of each token and of the N likeliest ones in its place.", "N"
    )
    prompt_logprobs: int | None = _setting(
        None, _optional(_COUNT), "Log-probabilities of the prompt's tokens, and of the N likeliest ones in each place.", "N"
    )
    max_draft_tokens: int | None = _setting(None, _optional(_COUNT), "Tokens that are drafted in a round at most.", "N")
    cache_salt: str = _setting(
        "", _TEXT, "Prefixes and past answers are shared only with requests of the same salt, as in vLLM.", "TEXT"
    )
    draft: str | None = _setting(
        None,
        _optional(_TEXT),
        "Drafts for this request, of lookups and of models that are loaded; by default as the model was loaded.",
        "SPEC",
    )
    json_schema: str | Mapping[str, Any] | None = _setting(
        None, _SCHEMA, "The answer is JSON of this schema, written on one line.", "FILE"
    )
    regex: str | None = _setting(None, _optional(_TEXT), "The answer as a whole matches this, in the syntax of Rust's regex.", "R")
    choices: tuple[str, ...] = _setting((), _TEXTS, "The answer is this text, or another that is given so. Repeatable.", "TEXT")
    grammar: str | None = _setting(
        None, _optional(_TEXT), "The answer is a text of this grammar: Lark as llguidance takes it, or llama.cpp's GBNF.", "FILE"
    )
    free_reasoning: bool = _setting(
        False, _BOOLEAN, "A grammar and --bad-words begin after the reasoning where there is any, from <think> to </think>."
    )
    grammar_trigger: str | None = _setting(
        None,
        _optional(_TEXT),
        "A grammar holds after this control token only, or where this regular expression matches, until its text is whole, each "
        "time. The text begins with the expression's group, else behind the match.",
        "TOKEN",
    )

    logits_processors: InitVar[object] = None  # vLLM's; refused

    def __post_init__(self, logits_processors: object) -> None:
        if logits_processors:
            raise ConfigError(
                "logits_processors must be left out: no code of a caller runs between logits and tokens; use logit_bias, "
                "allowed_token_ids, bad_words, regex or grammar"
            )
        _read_settings(self)
        if self.has_grammar:
            self._check_grammar()
        elif self.grammar_trigger is not None:
            raise ConfigError("grammar_trigger says where a grammar begins; give json_schema, regex, choices or grammar, too")

    def _check_grammar(self) -> None:
        given = [name for name in ("json_schema", "regex", "choices", "grammar") if getattr(self, name) not in (None, ())]
        if len(given) > 1:
            raise ConfigError(f"an answer keeps to one grammar; got {' and '.join(given)}")
        if self.ignore_eos:
            raise ConfigError(f"{given[0]} says where the answer ends; leave out ignore_eos")
        if self.allowed_token_ids:
            raise ConfigError(f"{given[0]} says which tokens the answer may have; leave out allowed_token_ids")
        if -math.inf in self.logit_bias.values():
            raise ConfigError(f"a logit_bias of -inf may forbid all that {given[0]} allows; take a finite one, as -100")

    @property
    def has_grammar(self) -> bool:
        """Whether json_schema, regex, choices or grammar restricts the answer."""
        return not (self.json_schema is None and self.regex is None and self.grammar is None and not self.choices)

    @property
    def greedy(self) -> bool:
        """Whether the next token is the argmax of the processed logits."""
        return self.temperature == 0

    @cached_property
    def keeps_order(self) -> bool:
        """Whether the processed logits are the raw logits, so that their argmax needs no history."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return not self.logit_bias and penalties == (1, 0, 0)


# The fields of SamplingParams that models recommend values for.
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingDefaults:
    """The sampling that a model recommends, in the fields of `SamplingParams`; None where it recommends nothing.

    ignored: a sentence for each value of its files that cannot be used. Raises ConfigError for values that SamplingParams refuses.
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
        """Read the defaults from a file, called `where`, that nobody has checked; a value of no use is ignored.

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
        """The recommended values, by name."""
        return {name: getattr(self, name) for name in SAMPLING_FIELDS if getattr(self, name) is not None}

    def over(self, others: "SamplingDefaults") -> "SamplingDefaults":
        """These defaults, completed by those of `others`."""
        return SamplingDefaults(**{**others.fields(), **self.fields()}, ignored=self.ignored + others.ignored)

    def under(self, given: Mapping[str, Any]) -> SamplingParams:
        """The params of a request with these settings, the others by default.

        A given temperature of 0 is plain greedy decoding: none of the model's defaults apply, a penalty as little as top-k.
        Raises ConfigError as SamplingParams does.
        """
        return SamplingParams(**{**({} if given.get("temperature") == 0 else self.fields()), **given})


NO_DEFAULTS = SamplingDefaults()


DTYPES = ("auto", "f32", "bf16", "f16")
WEIGHTS = ("auto", "values", "codes")
ACTIVATIONS = ("auto", "int8", "f32", "int14")
PROMPT_ARITHMETICS = ("auto", "codes", "bf16")
DRAFT_FORMATS = ("auto", "int8", "int4", "file")
POOLINGS = ("last", "mean", "cls")  # of a text's states, for its embedding: the last token's, the mean of all, the first one's


@dataclass(frozen=True)
class EngineConfig:
    """What an engine reserves, and how its backend computes.

    The KV format's name is checked where formats are known (`cpuspec.formats.kv`), the device's where devices are. Device, dtype
    and weights are settings of the torch backend, activations of all but that, the arithmetic of prompts of numba; others take
    "auto", and "cpu" as the device (`cpuspec.backends.check_backend`).
    """

    max_sequences: int = _setting(16, _whole(1, 4096), "Sequences that run at once if memory holds them; others wait.", "N")
    context_length: int | None = _setting(
        None,
        _optional(_Kind(partial(whole, low=2), "an integer >= 2")),
        "Tokens that prompt and answer may have together; by default what the model was trained for.",
        "N",
    )
    max_rows: int = _setting(256, _whole(1, 8192), "Rows of one forward; longer prompts go in chunks.", "N")
    # More rows delay answers, fewer slow down prompts. With AVX2, SmolLM2-135M, two streams and a prompt of 4,000 tokens, 32 rows
    # leave gaps of 151 ms and make the prompt 18 % slower; 16 rows: 101 ms and 31 %; 64 rows: 261 ms and 2 %.
    # See benchmarks/DECISIONS.md#prompt-rows.
    prompt_rows: int = _setting(
        32,
        _whole(1, 8192),
        "Rows of prompts that a step reads beside running answers: more of them read prompts sooner and delay answers.",
        "N",
    )
    prefix_cache_gb: float | None = _setting(
        None,
        _optional(_NOT_NEGATIVE),
        "Gigabytes of keys and values that finished requests leave in memory, so that later prompts that begin alike need not be "
        "computed: by default an eighth of the memory, up to a quarter of what the weights leave, and 0 on backends that do not "
        "promise the same bits.",
        "GB",
    )
    prefix_cache_dir: str | None = _setting(
        None,
        _optional(_TEXT),
        "Directory that gets what does not fit in memory, and at the end the rest, for the next start; `none` is none. It holds "
        "prompts. The server's default is `prefixes` in the cache directory; elsewhere there is none by default.",
        "DIR",
    )
    plain_on_draft_error: bool = _setting(
        False, _BOOLEAN, "Let a request whose drafter fails go on without drafts, instead of raising the error."
    )
    prefix_disk_gb: float = _setting(10.0, _NOT_NEGATIVE, "Gigabytes that this directory may have.", "GB")
    threads: int | None = _of_backend(
        None, _optional(_whole(1, 1024)), "Threads to compute with; by default every usable core.", "N"
    )
    memory: str = _of_backend(
        "auto",
        _Kind(_memory_limit, "a size such as 8GB, a share of the memory such as 60%, or auto"),
        "Memory that weights may take with numba, as 8GB or 60%: experts of a mixture that do not fit stay on the disk and are "
        "read when tokens need them. auto keeps all in memory.",
        "LIMIT",
    )
    keep_packed: bool = _setting(True, _BOOLEAN, "Keep weights in the order of the kernels on the disk, for a quick next start.")
    numa: str = _setting(
        "auto",
        _choice(("auto", "copies", "interleave", "off")),
        "Where weights lie on a machine with several memory nodes: a copy on each, which threads nearby read; spread over them; or "
        "as the system likes. auto makes copies where they take up to half of the memory, and spreads other weights.",
        "HOW",
    )
    mmap: bool = _setting(
        True,
        _BOOLEAN,
        "Map model files; reading them into memory instead is slower to start, and safe from files that are shortened.",
    )
    draft_format: str = _setting(
        "auto",
        _choice(DRAFT_FORMATS),
        "What matrices of heads and draft models are cast to at load: int8, those of 16 bits and more; int4, those of more than 5; "
        "file leaves them. auto is int8 for heads, and on numba int4 for models.",
        "F",
    )
    draft_vocab: int | None = _setting(
        None,
        _optional(_COUNT),
        "A head or model that could draft all tokens drafts the N most frequent, and those that end an answer; 0 is all. Frequent "
        "are those that its recipe counts, and then the lowest numbers. By default 32768 where a recipe counts tokens; also of "
        "models, and of layers for multi-token prediction, where the output matrix is most of them.",
        "N",
    )
    lora: tuple[str, ...] = _setting(
        (),
        _TEXTS,
        "A LoRA adapter for every answer, times SCALE: a directory of PEFT, or a GGUF file of llama.cpp. Repeatable. Drafts are "
        "made without it; `quantize --lora` merges one for good.",
        "FILE[=SCALE]",
        option="lora",
    )
    lora_modules: tuple[str, ...] = _setting(
        (),
        _TEXTS,
        "A LoRA adapter for requests that call the model NAME, or MODEL:NAME. Repeatable.",
        "NAME=FILE",
        option="lora-modules",
    )
    # f16 halves what f32 reads at depth, at no cost that can be measured (benchmarks/DECISIONS.md#kv-f16).
    kv_format: str = _of_backend(
        "f16",
        _TEXT,
        "What keys and values are kept in: f32, f16, bf16, int8 or int4. Fewer bits are faster in a long context.",
        "F",
    )
    quantization: str = _of_backend(
        "file",
        _TEXT,
        "Cast the model's matrices at load to a type of `cpuspec quantize`, as nl4_i, which is made for many sequences at once: "
        "another model then, whose answers differ. The first load takes minutes. file leaves them; `quantize` loses less.",
        "TYPE",
    )
    device: str = _of_backend("auto", _TEXT, "Where torch computes: cpu, cuda, cuda:N, or auto, a GPU where there is one.", "D")
    dtype: str = _of_backend(
        "auto", _choice(DTYPES), "In what torch multiplies with weights: f32, bf16, f16, or auto, f32 on a CPU, bf16 on a GPU.", "T"
    )
    weights: str = _of_backend(
        "auto",
        _choice(WEIGHTS),
        "What torch keeps of weights: values, dequantized at load; codes, as small as in the file; or auto, codes on a GPU.",
        "W",
    )
    activations: str = _of_backend(
        "auto",
        _choice(ACTIVATIONS),
        "What ONNX Runtime and OpenVINO multiply 4- and 8-bit matrices with: int8, fast and what auto is, or f32, exact but for "
        "the order of sums. numpy with int8 shows what that rounding costs. numba: int8, which auto is, or int14, "
        "which rounds inputs of K-quants and IQ4_XS at least ten times less. It needs AVX-512 VNNI; it is made for many rows in "
        "tile registers (AMX).",
        "A",
    )
    prompt_arithmetic: str = _of_backend(
        "auto",
        _choice(PROMPT_ARITHMETICS),
        "How numba multiplies tokens of prompts: codes, like all other tokens; bf16, attention in bf16, and weights dequantized to "
        "bf16 where the processor has tile registers (AMX); or auto, bf16 with such registers.",
        "A",
    )

    def __post_init__(self) -> None:
        _read_settings(self)


ANY_NAME = "*"  # among the names of a model: requests may call it anything


@dataclass(frozen=True)
class ServerConfig:
    """Where `cpuspec serve` listens, whom it answers, and the limits of what it takes on. Secrets are no settings."""

    host: str = _setting("127.0.0.1", _TEXT, "The address to listen on; 0.0.0.0 is every one that this machine has.", "ADDRESS")
    port: int = _setting(8000, _whole(0, 65535), "The port to listen on; 0 takes a free one.", "N")
    uds: str | None = _setting(
        None,
        _optional(_TEXT),
        "Listen on a Unix socket at this path instead, for this user; so does a --host *.sock.",
        "PATH",
    )
    aliases: tuple[str, ...] = _setting(
        (),
        _TEXTS,
        "A name that requests may call the model by; by default MODEL. Repeatable. * forgives every other name, too.",
        "NAME",
        option="alias",
    )
    cors: tuple[str, ...] = _setting(
        (),
        _TEXTS,
        "An origin whose web pages may use the server, as http://localhost:3000; by default none. Repeatable.",
        "ORIGIN",
        option="cors",
    )
    max_waiting: int = _setting(
        64,
        _whole(0, 1 << 16),
        "Answers of a client that may wait for their turn; a request beyond is refused with status 429. All clients together may "
        "have four times as many.",
        "N",
    )
    max_connections: int = _setting(512, _whole(1, 1 << 16), "Connections at once; one beyond gets status 503.", "N")
    max_body_bytes: int = _setting(8 << 20, _whole(1, 1 << 32), "Bytes of a request's body; beyond is status 413.", "N")
    max_prompt_tokens: int | None = _setting(
        None, _optional(_POSITIVE_COUNT), "Tokens that a prompt may have; by default what the context holds.", "N"
    )
    max_new_tokens: int | None = _setting(
        None, _optional(_POSITIVE_COUNT), "Tokens that an answer may have, whatever a request asks for.", "N"
    )
    max_request_s: float = _setting(1800.0, _FACTOR, "Seconds that a request may take, waiting included.", "S")
    models_gb: float | None = _setting(
        None,
        _optional(_NOT_NEGATIVE),
        "Gigabytes that loaded models may take together, where there are several; by default three quarters of the memory.",
        "GB",
    )
    sleep_idle_seconds: float | None = _setting(
        None,
        _OFF_BELOW_0,
        "Unload a model that no request has used for this long; the next one loads it anew. By default, or below 0, never.",
        "S",
    )
    drop_changing_lines: bool = _setting(
        True,
        _BOOLEAN,
        "Take out the lines that some agents change in the system message of each request, so that prompts begin alike.",
    )
    strict_requests: bool = _setting(
        False, _BOOLEAN, "Refuse requests with unknown fields, as OpenAI's API does, instead of ignoring these with a note."
    )
    lora_dir: str | None = _setting(
        None,
        _optional(_TEXT),
        "Directory from which requests may load LoRA adapters, by vLLM's /v1/load_lora_adapter; by default that is refused. "
        "Every client may then load and unload adapters for all.",
        "DIR",
    )
    slot_save_path: str | None = _setting(
        None,
        _optional(_TEXT),
        "Directory that /slots may save prompts to and restore them from; by default that is refused.",
        "DIR",
    )
    pooling: str | None = _setting(
        None,
        _optional(_choice(POOLINGS)),
        "Make embeddings of which states: last, mean or cls; by default as the model's files say.",
        "POOLING",
    )
    drain_s: float = _setting(
        30.0, _NOT_NEGATIVE, "Seconds that running requests have left when the server is told to end (SIGTERM, Ctrl-C).", "S"
    )

    def __post_init__(self) -> None:
        _read_settings(self)


_DEVICE = r"(?:auto|cpu|cuda(?::\d+)?)"
_OF_BACKEND = tuple(one.name for one in fields(EngineConfig) if one.metadata["of_backend"])
_NAMED = rf"(?:device={_DEVICE}|(?:{'|'.join(_OF_BACKEND)})=\w+)"
BACKEND_SETTINGS = rf"(?:{_DEVICE}|{_NAMED})(?:,{_NAMED})*"  # what follows a backend's name and a colon


def read_backend(text: str, settings: EngineConfig) -> tuple[str, EngineConfig]:
    """The name of a backend, and `settings` with those that its spelling sets, as in `torch:cuda,dtype=bf16` or `numba:threads=1`.

    A setting without a name is the device. Names of backends are checked where they are known (`backends.check_backend`).
    Raises ConfigError.
    """
    if not isinstance(text, str):
        raise ConfigError(f"a backend is a text such as 'numba' or 'torch:cuda,dtype=bf16'; got {shown(text)}")
    backend, _, changes = text.partition(":")
    found: dict[str, Any] = {}
    for change in changes.split(",") if changes else ():
        name, _, value = change.rpartition("=")
        name = name or "device"
        if name not in _OF_BACKEND or not value:
            raise ConfigError(
                f"cannot read {change!r} in {text!r}; wanted BACKEND:SETTING=VALUE,... with some of {', '.join(_OF_BACKEND)}"
            )
        if name == "threads" and not (value.isascii() and value.isdigit() and len(value) < 5):
            raise ConfigError(f"threads in {text!r} are a whole number, got {value!r}")
        found[name] = int(value) if name == "threads" else value
    return backend, replace(settings, **found)


MAX_DRAFT_TOKENS = 255  # at most a row less than a forward has
_OLD_NAME = re.compile(rf"\A((?:\w+(?::{BACKEND_SETTINGS})?:)?)match:")  # of text:MODEL, which it still stands for


@dataclass(frozen=True)
class LevelSpec:
    """One drafter: `name`, or `name:argument` for those that take one, and its settings.

    num_tokens: most tokens drafted in a round, None for the drafter's own number. min_confidence: a draft ends where its drafter is
    less sure than this, 0 for the drafter's own bound. then: drafters that continue its tokens within the same verification.
    """

    drafter: str
    num_tokens: int | None = None
    min_confidence: float = 0.0
    then: tuple["LevelSpec", ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.drafter, str) or not self.name or self.name == "none" or self.drafter.endswith(":"):
            raise ConfigError(f"a draft level begins with the name of a drafter, got {self.drafter!r}")
        object.__setattr__(self, "drafter", _OLD_NAME.sub(r"\1text:", self.drafter))
        try:
            object.__setattr__(self, "num_tokens", _or_none(partial(whole, low=1, high=MAX_DRAFT_TOKENS))(self.num_tokens))
        except ValueError:
            got = shown(self.num_tokens)
            raise ConfigError(f"{self.drafter} drafts 1 to {MAX_DRAFT_TOKENS} tokens a round, got {got}") from None
        try:
            object.__setattr__(self, "min_confidence", number(self.min_confidence, low=0, below=1))
        except (ValueError, OverflowError):
            got = shown(self.min_confidence)
            raise ConfigError(f"min_confidence of {self.drafter} must be a number in [0, 1), got {got}") from None

    @property
    def name(self) -> str:
        """The text before the first colon."""
        return self.drafter.partition(":")[0]

    @property
    def argument(self) -> str:
        """The text after the first colon."""
        return self.drafter.partition(":")[2]

    def __str__(self) -> str:
        tokens = "" if self.num_tokens is None else str(self.num_tokens)
        confidence = f":{self.min_confidence:g}" if self.min_confidence else ""
        cap = f"@{tokens}{confidence}" if tokens or confidence else ""
        return "+".join([f"{self.drafter}{cap}", *map(str, self.then)])


_NEXT_LEVEL = re.compile(rf",(?!(?:{'|'.join(_OF_BACKEND)})=)")  # other commas separate the settings of a level's backend
_LEVEL = re.compile(r"(?P<drafter>.+?)(@(?P<tokens>[0-9]{1,9})?(:(?P<confidence>[0-9]+(\.[0-9]+)?|\.[0-9]+))?)?")
_GRAMMAR = "wanted none, or levels drafter[:argument][@tokens[:confidence]], cheapest first, separated by commas, or joined by +"


@dataclass(frozen=True)
class SpecConfig:
    """The draft levels, cheapest first; no level is plain decoding.

    proposer: an object that drafts instead of levels, with the methods of `speculation.proposer.Proposer`.
    """

    levels: tuple[LevelSpec, ...] = ()
    proposer: Any = None

    @staticmethod
    def parse(text: str) -> "SpecConfig":
        """Read the text of `--draft`, as `ngram`, `ngram@8`, `suffix,self:mxfp4@4` or `small-model@6:0.4+ngram`, or vLLM's JSON.

        Names are checked where drafters are known (`cpuspec.engine.draft_spec`). Raises ConfigError on bad grammar.
        """
        if text.lstrip().startswith("{"):
            try:
                return SpecConfig.read(json.loads(text))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"a speculative config is a JSON object; {text[:80]!r} is none: {error}") from None
        return SpecConfig() if text.strip() in ("", "none") else SpecConfig.read(_NEXT_LEVEL.split(text))

    @staticmethod
    def read(levels: object) -> "SpecConfig":
        """The same from a list, as TOML and JSON have it: each level a text, or a table with the fields of `LevelSpec`.

        In a table a drafter may contain any character. A SpecConfig is returned as it is. A mapping is read as vLLM's speculative
        config, as {"method": "eagle3", "model": "path", "num_speculative_tokens": 3}. Raises ConfigError.
        """
        if isinstance(levels, SpecConfig):
            return levels
        if isinstance(levels, str):
            return SpecConfig.parse(levels)
        if isinstance(levels, Mapping) and not levels.keys() & {"drafter"}:
            return SpecConfig((_read_vllm(levels),))
        if not isinstance(levels, list | tuple):
            raise ConfigError(f"draft levels are a text or a list, got {levels!r}")
        return SpecConfig(tuple(_read_level(level) for level in levels))

    def __str__(self) -> str:
        return str(self.proposer.name) if self.proposer is not None else ",".join(map(str, self.levels)) or "none"


AUTO = SpecConfig((LevelSpec("auto"),))  # drafts where that pays: the default of everything that takes a spec


# Methods of vLLM's speculative config that name no model, with our drafters; those that end with mtp are the target's own layer.
_VLLM_DRAFTERS: Mapping[str, str] = {"ngram": "ngram", "ngram_gpu": "ngram", "suffix": "suffix"}
# Its keys, with the function that reads a value. Those that _read_vllm does not use say how vLLM drafts; no answer depends on them.
_VLLM_KEYS: Mapping[str, Callable[[Any], object]] = {
    **dict.fromkeys(("method", "model", "quantization", "kv_cache_dtype", "moe_backend", "attention_backend"), _or_none(_text)),
    "num_speculative_tokens": lambda value: value,  # LevelSpec checks it
    **dict.fromkeys(
        ("prompt_lookup_max", "prompt_lookup_min", "max_model_len", "dspark_draft_topk"), _or_none(partial(whole, low=1))
    ),
    **dict.fromkeys(("suffix_decoding_max_tree_depth", "disable_by_batch_size"), _or_none(partial(whole, low=1))),
    "suffix_decoding_max_cached_requests": partial(whole, low=0),
    "suffix_decoding_max_spec_factor": partial(number, low=0),
    "suffix_decoding_min_token_prob": partial(number, low=0, below=1),
    **dict.fromkeys(("parallel_drafting", "use_heterogeneous_vocab", "use_local_argmax_reduction"), _flag),
    **dict.fromkeys(("disable_padded_drafter_batch", "disable_eagle_block_drop", "enable_adaptive_verification"), _flag),
    "enforce_eager": _or_none(_flag),
    "draft_tensor_parallel_size": _or_none(partial(whole, low=1, high=1)),
    "rejection_sample_method": partial(_one_of, ("standard", "block", "strict", "probabilistic")),
    "draft_sample_method": partial(_one_of, ("greedy", "probabilistic")),
}


def _read_vllm(values: Mapping[Any, Any]) -> LevelSpec:
    """The level of vLLM's speculative config: a head's files say what method it has, so other methods need only a model."""
    for key, value in values.items():
        if key not in _VLLM_KEYS:
            known = ", ".join(_VLLM_KEYS)
            raise ConfigError(
                f"a speculative config has no {shown(key)} here; wanted method, model, num_speculative_tokens; of {known}"
            )
        if not fits(_VLLM_KEYS[key], value):
            raise ConfigError(f"cannot read {key} of a speculative config, got {shown(value)}")
    method, model, number = (values.get(key) for key in ("method", "model", "num_speculative_tokens"))
    if (values.get("prompt_lookup_min") or 1) > (values.get("prompt_lookup_max") or math.inf):
        raise ConfigError("a speculative config's prompt_lookup_min is above its prompt_lookup_max")
    if method is None and model in ("ngram", "[ngram]"):
        method = "ngram"
    drafter = "mtp" if method and (method == "mtp" or method.endswith("_mtp")) else _VLLM_DRAFTERS.get(method or "", model)
    if drafter is None:
        raise ConfigError(f"a speculative config with the method {shown(method)} names a model, got none")
    if drafter == "suffix":
        return LevelSpec(drafter, number, values.get("suffix_decoding_min_token_prob", 0.0))
    return LevelSpec(drafter, number)


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
