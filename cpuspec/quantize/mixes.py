"""Which format each matrix gets: llama-quantize's types and mixes, and formats named one by one.

The rules are those of llama.cpp (src/llama-quant.cpp, llama_tensor_get_type) for dense models: a type's name is lower case here,
q4_k means q4_k_m as there, and rows that do not fill superblocks get the format that it falls back to.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from cpuspec.config import ModelConfig
from cpuspec.errors import ConfigError
from cpuspec.formats import FORMATS, Format, get_format
from cpuspec.formats.format import OWN_GGUF_TYPES
from cpuspec.quantize.weights import layer_parts

# llama.cpp's numbers of file types (llama.h, enum llama_ftype), by type.
FILE_TYPES: Mapping[str, int] = MappingProxyType(
    {
        "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k_s": 11, "q3_k_m": 12,
        "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18, "q2_k_s": 21, "iq4_nl": 25,
        "iq4_xs": 30, "bf16": 32, "mxfp4": 38,
    }
)  # fmt: skip
_ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}
_BASES = {name: name.removesuffix("_s").removesuffix("_m").removesuffix("_l") for name in FILE_TYPES if "_k_" in name}
_FALLBACKS = {
    "q2_k": "iq4_nl", "q3_k": "iq4_nl", "iq4_xs": "iq4_nl", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "nvfp4": "q4_0",
    "nl4_xs": "nl4_g32", "nl4_i": "nl4_g32", "q6_i": "q8_0",
}  # fmt: skip

# The values of --type: formats of files, and mixes.
TYPES: tuple[str, ...] = tuple(
    dict.fromkeys(
        [name for name, row in FORMATS.items() if row.gguf_type is not None]
        + [name for name in FILE_TYPES if _BASES.get(name, name) in FORMATS]
    )
)

# The default candidates of a budget: formats that llama.cpp knows. Those whose points are searched for (iq2, iq3) take
# some microseconds a weight to make; those of ternary models suit no others.
BUDGET_FORMATS: tuple[str, ...] = tuple(
    name
    for name, row in FORMATS.items()
    if row.gguf_type is not None
    and row.gguf_type < OWN_GGUF_TYPES
    and row.affine
    and row.free_codes
    and not name.startswith(("tq", "q2_0"))
)

# The name that llama.cpp gives to a part, for --tensor-type.
_GGUF_PARTS = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
    "expert_gate": "ffn_gate_exps", "expert_up": "ffn_up_exps", "expert_down": "ffn_down_exps",
    "shared_gate": "ffn_gate_shexp", "shared_up": "ffn_up_shexp", "shared_down": "ffn_down_shexp",
}  # fmt: skip


class Named(NamedTuple):
    """Formats that are asked for by name.

    output: of the output matrix, in a tied model the embedding. embed: of the embedding. tensor_types: (pattern, format), the first
    whose pattern is found in the name of a matrix, canonical or llama.cpp's.
    """

    output: str | None = None
    embed: str | None = None
    tensor_types: Sequence[tuple[str, str]] = ()


_NONE = Named()


def choose(
    config: ModelConfig,
    matrices: Mapping[str, tuple[int, ...]],
    type_name: str,
    named: Named = _NONE,
    *,
    has_importance: bool = False,
    pure: bool = False,
) -> dict[str, Format]:
    """The format of each matrix, by canonical name.

    matrices: their shapes. pure: no mixes, every matrix in the type's own format. Raises ConfigError for a name that is not known,
    FormatError where a named format does not fit.
    """
    if type_name not in TYPES:
        raise ConfigError(f"the type {type_name!r} is not known; wanted one of {', '.join(TYPES)}")
    type_name = type_name if pure else _ALIASES.get(type_name, type_name)
    own = get_format(_BASES.get(type_name, type_name))
    chosen = {}
    for name, shape in matrices.items():
        layer, part = layer_parts(name)
        is_output = _is_output(name, matrices)
        asked = _asked(name, shape[1], is_output, named)
        if asked is not None:
            chosen[name] = asked
        elif pure or own.affine is None:
            chosen[name] = fitting_format(own.name, shape[1])
        elif is_output:
            chosen[name] = _output_format(own, type_name, shape[1], tied=name == "embed")
        elif own.rotated and part in ("embed", "layer_embed"):  # rows are looked up, and no kernel turns them back
            chosen[name] = fitting_format("q4_k", shape[1])
        else:
            if type_name == "mxfp4" and config.experts and "expert_" not in part:  # llama.cpp's MXFP4_MOE
                chosen[name] = fitting_format("q8_0", shape[1])
                continue
            gqa = config.num_heads // config.num_kv_heads
            # llama.cpp mixes the matrices of experts as those of a dense layer.
            part = part.removeprefix("expert_").removeprefix("shared_")
            mixed = _mixed(type_name, part, layer, config.num_layers, gqa, has_importance)
            chosen[name] = fitting_format(mixed or own.name, shape[1])
    return chosen


def candidates(
    matrices: Mapping[str, tuple[int, ...]], names: Sequence[str] = (), named: Named = _NONE
) -> dict[str, tuple[Format, ...]]:
    """The formats that each matrix may get: those of `names` that its rows fill, or the one that is asked for.

    names: by default BUDGET_FORMATS. A matrix that none of them fits gets the one that llama-quantize falls back to. Raises
    ConfigError for a format that is not known, or that GGUF files do not hold.
    """
    for name in names:
        if name not in FORMATS or FORMATS[name].gguf_type is None:
            known = ", ".join(other for other, row in FORMATS.items() if row.gguf_type is not None)
            raise ConfigError(f"the candidate {name!r} is not a format of GGUF files; wanted some of {known}")
    found = {}
    for name, shape in matrices.items():
        asked = _asked(name, shape[1], _is_output(name, matrices), named)
        fitting = tuple(FORMATS[one] for one in names or BUDGET_FORMATS if shape[1] % FORMATS[one].block_size == 0)
        found[name] = (asked,) if asked else fitting or (fitting_format("q4_0", shape[1]),)
    return found


def file_type(formats: Mapping[str, Format], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """llama.cpp's number of the type whose own format holds most weights; that of f32 where it has none."""
    weights: Counter[str] = Counter()
    for name, format in formats.items():
        weights[format.name] += math.prod(shapes[name])
    most = weights.most_common(1)[0][0]
    return next((number for name, number in FILE_TYPES.items() if _BASES.get(name, name) == most), 0)


def _is_output(name: str, matrices: Mapping[str, tuple[int, ...]]) -> bool:
    return name == "output" or (name == "embed" and "output" not in matrices)


def _asked(name: str, columns: int, is_output: bool, named: Named) -> Format | None:
    """The format that is asked for by name. Raises FormatError where it does not fit."""
    layer, part = layer_parts(name)
    llama_cpp_name = f"blk.{layer}.{_GGUF_PARTS.get(part, part)}.weight" if layer >= 0 else name
    asked = next((to for pattern, to in named.tensor_types if _found(pattern, name) or _found(pattern, llama_cpp_name)), None)
    asked = asked or (named.output if is_output else named.embed if name == "embed" else None)
    if asked is None:
        return None
    format = get_format(asked)
    format.row_bytes(columns)
    return format


def _found(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error as error:
        raise ConfigError(f"the tensor pattern {pattern!r} is not a regular expression: {error}") from None


def _output_format(own: Format, type_name: str, columns: int, tied: bool) -> Format:
    """The output matrix chooses the tokens: it gets 6 bits, or 8 where its rows do not fill superblocks. tied: whether it is the
    embedding, too, whose rows are no activations to rotate.
    """
    if type_name == "mxfp4" or own.name == "q8_0" or columns % own.block_size:
        return fitting_format("q8_0", columns)
    return fitting_format("q6_i" if own.rotated and not tied else "q6_k", columns)


def fitting_format(name: str, columns: int) -> Format:
    """The format of this name, or the one that stands in for it where rows of `columns` do not fill its blocks."""
    for candidate in (name, _FALLBACKS.get(name, ""), "q4_0", "f16"):
        if candidate in FORMATS and columns % FORMATS[candidate].block_size == 0:
            return FORMATS[candidate]
    raise AssertionError("f16 holds rows of any length")


def _mixed(type_name: str, part: str, layer: int, num_layers: int, gqa: int, has_importance: bool) -> str | None:
    """The format that a mix gives to a part, if it is another than its own. gqa: query heads that share keys and values."""
    eighth = num_layers // 8
    use_more_bits = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    match type_name, part:
        case ("q2_k", "v"):
            return "q4_k" if gqa >= 4 else "q3_k"
        case ("q2_k", "o" | "down"):
            return "q3_k"
        case ("q2_k_s", "v") if gqa >= 4:
            return "q4_k"
        case ("q2_k_s", "down") if layer < eighth:
            return "q4_k"
        case ("q3_k_m", "v"):
            return "q5_k" if layer < 2 else "q4_k"
        case ("q3_k_m", "down"):
            return "q5_k" if layer < num_layers // 16 else "q4_k"
        case ("q3_k_m", "o"):
            return "q4_k"
        case ("q3_k_l", "v" | "o" | "down"):
            return "q5_k"
        case ("q4_k_s", "v") if layer < 4:
            return "q5_k"
        case ("q4_k_s", "down") if layer < eighth:
            return "q5_k"
        case ("q4_k_m" | "q5_k_m", "v" | "down") if use_more_bits:
            return "q6_k"
        case ("iq4_nl" | "iq4_xs", "v") if gqa >= 4:
            return "q5_k"
        case ("iq4_nl" | "iq4_xs", "down") if layer < eighth and not has_importance:
            return "q5_k"
        case ("q4_0" | "q5_0", "down") if layer < eighth and has_importance:
            return {"q4_0": "q4_1", "q5_0": "q5_1"}[type_name]
    return None
