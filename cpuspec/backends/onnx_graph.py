"""The transformer as an ONNX graph: what `cpuspec export` writes and the graph engines run.

Standard operators and one of ONNX Runtime's, `com.microsoft.MatMulNBits`. Weights are the file's values (`formats.grouped`); an
offset of a group is multiplied with the sum of the group's inputs in a second, much smaller product. One graph for everything, as
the batch is: inputs of a sequence's rows,

  tokens, positions   int64 [rows]
  visible             bool [rows, past + rows]: which cached tokens and rows each row attends to
  logit_rows          int64 [logits]: rows to project to logits
  past_keys.i, past_values.i   f32 [G, past, D] for each layer; of what no row sees, anything finite

and outputs logits f32 [logits, V], the rows' keys.i and values.i f32 [G, rows, D] for whoever keeps the cache, and hidden.i f32
[rows, C], the layers' outputs. Keys and values come rounded as the KV format rounds them.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.backends.weights import WeightTensor, key_centres, weight_tensors
from cpuspec.checkpoints import Checkpoint
from cpuspec.config import SWIGLU_ALPHA, SWIGLU_LIMIT, ModelConfig, Rope
from cpuspec.errors import BackendError
from cpuspec.files import replacing
from cpuspec.formats import Cast, Format, QuantTensor
from cpuspec.formats.grouped import GroupedIntegers, group_integers
from cpuspec.formats.kv import get_kv_format
from cpuspec.layers import Layer
from cpuspec.model.rope import inverse_frequencies, rotary_factors
from cpuspec.model.transformer import decode
from cpuspec.settings import EngineConfig

if TYPE_CHECKING:
    import onnx

Array = NDArray[Any]
Store = Callable[[str, Array, int], "onnx.TensorProto"]  # (name, array, ONNX type) -> the initializer; keeps the bytes somewhere

OPSET, IR_VERSION = 21, 10
_LARGE_BYTES = 4096  # initializers beyond are handed to `Store`
_PAGE = 4096  # of an exported file, at which large tensors begin, so that runtimes can map them

# How exact MatMulNBits computes: its accuracy_level, by what activations become.
_ACCURACY: Mapping[str, int] = MappingProxyType({"auto": 4, "int8": 4, "f32": 1})

KV_FORMATS = ("f32", "f16", "bf16")  # that a cast and a cast back make


def build_graph(
    config: ModelConfig, tensors: Mapping[str, WeightTensor], store: Store, activations: str, kv_format: str
) -> "onnx.ModelProto":
    """The model, its large initializers given to `store` one by one.

    activations: that matrices in groups are multiplied with: int8, blockwise, which is fast and what auto is, or f32.
    Raises BackendError for what a graph cannot do.
    """
    return _Writer(config, tensors, store, activations, kv_format).model()


def export_onnx(
    checkpoint: Checkpoint,
    path: Path,
    activations: str = EngineConfig.activations,
    kv_format: str = EngineConfig.kv_format,
    casts: Mapping[str, Format] = MappingProxyType({}),
) -> int:
    """Write the checkpoint to `path`, and its weights to `path`.data (no protobuf takes 2 GB); returns the bytes of both.

    activations: what ONNX Runtime multiplies matrices in groups with: int8, which is fast and what auto is, or f32.
    casts: matrices that are cast to another format, by name.
    Raises BackendError where a file is there already or cannot be written, or `onnx` is not installed.
    """
    if find_spec("onnx") is None:
        raise BackendError("writing ONNX needs onnx, which is not installed; pip install 'cpuspec[onnx]'")
    if path.suffix != ".onnx":
        raise BackendError(f"an ONNX file's name ends with .onnx, got {path.name!r}")
    data_path = path.with_name(path.name + ".data")
    for taken in (path, data_path):
        if taken.exists():
            raise BackendError(f"{taken} exists; remove it or choose another name")
    try:
        with replacing(path) as graph_file, replacing(data_path) as file:

            def append(name: str, array: NDArray[Any], type: int) -> "onnx.TensorProto":
                file.write(b"\0" * (-file.tell() % _PAGE))
                offset = file.tell()
                file.write(array.data)
                return external_tensor(name, array.shape, type, data_path.name, offset=offset, length=array.nbytes)

            tensors = weight_tensors(checkpoint, casts)
            graph = build_graph(checkpoint.config, tensors, append, activations, get_kv_format(kv_format).name)
            graph_file.write(graph.SerializeToString())
            return graph_file.tell() + file.tell()
    except OSError as error:
        raise BackendError(f"{path} cannot be written: {error.strerror or error}") from None


def external_tensor(name: str, shape: tuple[int, ...], type: int, location: str, **place: int) -> "onnx.TensorProto":
    """An initializer whose bytes are elsewhere: in the file `location` at `offset`, `length` of them, or with the session."""
    import onnx

    tensor = onnx.TensorProto(name=name, dims=shape, data_type=type, data_location=onnx.TensorProto.EXTERNAL)
    for key, value in {"location": location, **place}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def read_bytes(model: "onnx.ModelProto") -> tuple[int, int]:
    """Bytes of large initializers that a run reads, and those without the output matrix, which a run without logits reads.

    An embedding that is not the output matrix counts as none.
    """
    import onnx

    large = [tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    num_bytes: Counter[str] = Counter()  # by the weight's name
    for tensor in large:
        item = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        num_bytes[tensor.name.partition(".")[0]] += math.prod(tensor.dims) * item
    output = num_bytes.pop("embed", 0)
    output = num_bytes.pop("output", output)
    return num_bytes.total() + output, num_bytes.total()


class _Writer:
    """The operations (`Operations` in `model.transformer`) as nodes. A method that appends nodes returns its output's name."""

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, WeightTensor], store: Store, activations: str, kv_format: str
    ) -> None:
        import onnx

        if activations not in _ACCURACY:
            raise BackendError(f"activations {activations!r} are not known; wanted one of {', '.join(_ACCURACY)}")
        if kv_format not in KV_FORMATS:
            raise BackendError(
                f"an ONNX graph cannot round keys and values to {kv_format}; wanted one of {', '.join(KV_FORMATS)} as --kv-format"
            )
        self._onnx, self._types = onnx, onnx.TensorProto
        self._config, self._tensors, self._store = config, tensors, store
        self._accuracy, self._kv_format = _ACCURACY[activations], kv_format
        self._centres = key_centres(config, get_kv_format(kv_format), tensors)
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._matrices: dict[int, _Floats | _Integers] = {}  # by tensor: a tied one is there once
        self._sums: dict[tuple[str, int], str] = {}  # of groups of inputs
        self._gathers: dict[tuple[str, str], str] = {}  # of inputs in another order
        self._constants: dict[tuple[Any, ...], str] = {}
        self._masks: dict[int | None, str] = {}  # by window
        self._tables: dict[Rope, tuple[str, str]] = {}  # cosines and sines
        self._split_lengths = ""

    def model(self) -> "onnx.ModelProto":
        """The graph of one forward."""
        c, helper = self._config, self._onnx.helper
        for name in ("tokens", "positions"):
            self._input(name, self._types.INT64, ["rows"])
        self._input("visible", self._types.BOOL, ["rows", "past + rows"])
        self._input("logit_rows", self._types.INT64, ["logits"])
        if c.takes_hidden:
            self._input("hidden", self._types.FLOAT, ["rows", c.hidden_size])
        for i in range(c.num_layers):
            for kind in ("keys", "values"):
                self._input(f"past_{kind}.{i}", self._types.FLOAT, [c.num_kv_heads, "past", c.head_dim])
        self._output("logits", decode(c, self), ["logits", c.num_logits])
        graph = helper.make_graph(self._nodes, "cpuspec", self._inputs, self._outputs, self._initializers)
        model = helper.make_model(
            graph,
            producer_name="cpuspec",
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)],
        )
        helper.set_model_props(model, {"architecture": c.architecture, "context_length": str(c.context_length)})
        return model

    def embed(self) -> str:
        """The rows of the embedding that `tokens` name; it may be the output matrix, too."""
        m = self._matrix("embed")
        if isinstance(m, _Floats):
            rows = self._to_f32(self._node("Gather", m.values, "tokens", axis=0), m.type)
            return self._scaled(rows, self._config.embedding_scale)
        groups = m.shape[1] // m.group
        codes = self._node("Gather", m.codes, "tokens", axis=0)
        codes = self._nibbles(codes, [groups, m.group]) if m.bits == 4 else self._node("Cast", codes, to=self._types.FLOAT)
        zero = self._number(1 << m.bits - 1)
        if m.zeros:  # of four bits
            zero = self._nibbles(self._node("Gather", m.zeros, "tokens", axis=0), [-1, 1])
            zero = self._node("Slice", zero, self._integers(0), self._integers(groups), self._integers(1))
        steps = self._node("Sub", codes, zero)
        values = self._node("Mul", steps, self._of_groups(m.scales))
        if m.offsets:
            values = self._node("Add", values, self._of_groups(m.offsets))
        return self._scaled(self._node("Reshape", values, self._integers(0, m.shape[1])), self._config.embedding_scale)

    def hidden(self, norm: str | None) -> str:
        return self._norm("hidden", norm)

    def join(self, x: str, norms: tuple[str, str] | None) -> str:
        of_x, of_hidden = norms or (None, None)
        return self._node("Concat", self._norm(x, of_x), self.hidden(of_hidden), axis=1)

    def linears(self, x: str, names: tuple[str, ...], norm: str | None) -> tuple[str, ...]:
        normed = self._norm(x, norm)
        return tuple(self._linear(normed, name) for name in names)

    def layer_inputs(self, x: str) -> str:
        raise AssertionError("`GraphBackend` has refused these models")

    def input_of(self, layer: Layer, inputs: str) -> str:
        return self.layer_inputs(inputs)

    def rotate(self, layer: Layer, q: str, k: str | None) -> tuple[str, str]:
        """Queries and keys, [rows, heads, D]; both are turned at once, for fewer nodes."""
        assert k, "`GraphBackend` has refused models whose layers share keys"
        mixer, norms = layer.attention, (layer.weight("q_norm"), layer.weight("k_norm"))
        if mixer.norm == "row":
            q, k = (self._norm(x, norm) for x, norm in zip((q, k), norms, strict=True))
        q, k = self._heads(q), self._heads(k)
        if mixer.norm == "head" and not mixer.rotates_first:
            q, k = (self._norm(x, norm) for x, norm in zip((q, k), norms, strict=True))
        if mixer.rope is not None:
            q, k = self._rotated(layer, q, k)
        if mixer.query_rope is not None and mixer.query_rope.growth:
            q = self._node("Mul", q, self._growth(mixer.query_rope))
        if mixer.rotates_first:
            q, k = (self._norm(x, norm) for x, norm in zip((q, k), norms, strict=True))
        return q, k

    def _growth(self, rope: Rope) -> str:
        """The factor of the rows' queries by their positions (`model.rope.growth`), [rows, 1, 1]."""
        positions = self._node("Unsqueeze", self._node("Cast", "positions", to=self._types.FLOAT), self._integers(1, 2))
        spans = self._node("Floor", self._node("Div", positions, self._number(rope.growth_length)))
        logs = self._node("Log", self._node("Add", spans, self._number(1)))
        return self._node("Add", self._scaled(logs, rope.growth), self._number(1))

    def _rotated(self, layer: Layer, q: str, k: str) -> tuple[str, str]:
        mixer = layer.attention
        assert mixer.rope is not None, "the layer rotates"
        cos, sin = self._rotations(mixer.rope)
        x = self._node("Concat", q, k, axis=1)
        first, second = self._split(x, self._integers(mixer.dims // 2, mixer.dims // 2), axis=2)
        turned = self._node("Mul", self._node("Concat", second, first, axis=2), sin)
        return self._split(
            self._node("Add", self._node("Mul", x, cos), turned), self._integers(mixer.heads, mixer.kv_heads), axis=1
        )

    def absorb(self, layer: Layer, plain: str, q_rope: str, latent: str, k_rope: str) -> tuple[str, str]:
        raise _refused(layer, "has latent attention")

    def expand(self, layer: Layer, mixed: str) -> str:
        raise AssertionError("`absorb` has refused the layer")

    def attention(self, layer: Layer, q: str, k: str | None, v: str | None) -> str:
        """Attention over the past and the rows, which are not copied together."""
        assert k, "`rotate` has made them"
        assert v, "`absorb` has refused layers without"
        c = self._config
        if layer.attention.sinks:
            raise _refused(layer, "has attention sinks")
        if layer.index in self._centres:
            k = self._node("Sub", k, self._constant(self._centres[layer.index], np.float32))
        keys, values = (self._cached(x, f"{kind}.{layer.index}") for x, kind in ((k, "keys"), (self._heads(v), "values")))
        past_keys, past_values = (f"past_{kind}.{layer.index}" for kind in ("keys", "values"))
        queries = c.num_heads // c.num_kv_heads
        q = self._node("Mul", q, self._number(layer.attention.scale))
        q = self._node("Reshape", q, self._integers(0, c.num_kv_heads, queries, c.head_dim))
        q = self._node("Reshape", self._node("Transpose", q, perm=[1, 2, 0, 3]), self._integers(c.num_kv_heads, -1, c.head_dim))
        parts = [self._node("MatMul", q, self._node("Transpose", part, perm=[0, 2, 1])) for part in (past_keys, keys)]
        scores = self._softcapped(self._node("Concat", *parts, axis=2), c.attention_softcap)
        weights = self._node("Softmax", self._node("Add", scores, self._mask(layer.attention.window)), axis=2)
        of_past, of_rows = self._split(weights, self._lengths(), axis=2)
        out = self._node("Add", self._node("MatMul", of_past, past_values), self._node("MatMul", of_rows, values))
        out = self._node("Reshape", out, self._integers(c.num_kv_heads, queries, -1, c.head_dim))
        return self._node("Reshape", self._node("Transpose", out, perm=[2, 0, 1, 3]), self._integers(-1, c.num_heads * c.head_dim))

    def convolve(self, layer: Layer, x: str) -> str:
        kinds = {"DeltaNet": "a gated delta net", "ShortConv": "a short convolution", "Mamba2": "a state of Mamba-2"}
        raise _refused(layer, f"has {kinds[type(layer.recurrent).__name__]}")

    def delta_net(self, layer: Layer, qkv: str, beta: str, alpha: str) -> str:
        raise AssertionError("`convolve` has refused it")

    def short_conv(self, layer: Layer, b: str, c: str, x: str) -> str:
        return self.convolve(layer, x)

    def mamba2(self, layer: Layer, xbc: str, dt: str, z: str) -> str:
        raise AssertionError("`convolve` has refused it")

    def gate(self, gate: str, up: str | None, activation: str) -> str:
        if activation == "swiglu_oai":
            assert up is not None, "`ModelConfig` has checked it"
            gate = self._node("Min", gate, self._number(SWIGLU_LIMIT))
            active = self._node("Mul", gate, self._node("Sigmoid", self._scaled(gate, SWIGLU_ALPHA)))
            clamped = self._node("Clip", up, self._number(-SWIGLU_LIMIT), self._number(SWIGLU_LIMIT))
            return self._node("Mul", active, self._node("Add", clamped, self._number(1)))
        if activation == "sigmoid":
            active = self._node("Sigmoid", gate)
        elif activation == "silu":
            active = self._node("Mul", gate, self._node("Sigmoid", gate))
        elif activation == "relu2":
            above = self._node("Relu", gate)
            active = self._node("Mul", above, above)
        else:
            assert activation == "gelu_tanh", f"activation {activation} is no choice of `ModelConfig`"
            active = self._node("Gelu", gate, approximate="tanh")
        return active if up is None else self._node("Mul", active, up)

    def add(self, x: str, branch: str, name: str, norm: str | None, factor: str | None = None) -> str:
        assert not factor, "`GraphBackend` has refused these models"
        return self._node("Add", x, self._scaled(self._norm(self._linear(branch, name), norm), self._config.residual_scale))

    def experts(
        self,
        layer: Layer,
        x: str,
        norm: str | None,
        shared: tuple[str, str | None] | None,
        norm_after: str | None,
        factor: str | None,
    ) -> str:
        raise _refused(layer, "is a mixture of experts", "route")

    def keep(self, layer: Layer, x: str) -> None:
        self._output(f"hidden.{layer.index}", x, ["rows", self._config.hidden_size])

    def logits(self, x: str, name: str, norm: str | None) -> str:
        rows = self._norm(self._node("Gather", x, "logit_rows", axis=0), norm)
        return self._softcapped(self._linear(rows, name), self._config.logit_softcap)

    def _node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"{operator}.{len(self._nodes)}"
        self._nodes.append(self._onnx.helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        return name

    def _split(self, x: str, sizes: str, axis: int) -> tuple[str, str]:
        names = [f"Split.{len(self._nodes)}.{part}" for part in range(2)]
        self._nodes.append(self._onnx.helper.make_node("Split", [x, sizes], names, name=names[0], axis=axis))
        return names[0], names[1]

    def _input(self, name: str, type: int, shape: list[int | str]) -> str:
        self._inputs.append(self._onnx.helper.make_tensor_value_info(name, type, shape))
        return name

    def _output(self, name: str, value: str, shape: list[int | str]) -> str:
        self._nodes.append(self._onnx.helper.make_node("Identity", [value], [name], name=name))
        self._outputs.append(self._onnx.helper.make_tensor_value_info(name, self._types.FLOAT, shape))
        return name

    def _initializer(self, name: str, array: Array, type: int | None = None) -> str:
        """type: ONNX's, where numpy has none and the array holds its bits."""
        type = self._onnx.helper.np_dtype_to_tensor_dtype(array.dtype) if type is None else type
        if array.nbytes > _LARGE_BYTES:
            self._initializers.append(self._store(name, np.ascontiguousarray(array), type))
        else:
            self._initializers.append(self._onnx.helper.make_tensor(name, type, array.shape, array.tobytes(), raw=True))
        return name

    def _constant(self, values: Any, dtype: Any) -> str:
        array = np.asarray(values, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self._initializer(f"constant.{len(self._constants)}", array)
        return self._constants[key]

    def _integers(self, *values: int) -> str:
        return self._constant(values, np.int64)

    def _number(self, value: float, dtype: Any = np.float32) -> str:
        return self._constant(value, dtype)

    def _vector(self, name: str) -> str:
        return self._initializer(name, self._tensors[name].dequantize())

    def _scaled(self, x: str, factor: float) -> str:
        return x if factor == 1 else self._node("Mul", x, self._number(factor))

    def _softcapped(self, x: str, cap: float) -> str:
        return self._scaled(self._node("Tanh", self._scaled(x, 1 / cap)), cap) if cap else x

    def _mask(self, window: int | None) -> str:
        """What is added to the scores, [R * rows, past + rows] for the R queries of a key head, made at its first use."""
        if window not in self._masks:
            visible = "visible"
            if window is not None:
                # Columns are in the order of any path: counted from the end, a row's own token is the first that it sees.
                seen = self._node("Cast", visible, to=self._types.INT32)
                count = self._node("CumSum", seen, self._constant(1, np.int64), reverse=1)
                near = self._node("LessOrEqual", count, self._constant(window, np.int32))
                visible = self._node("And", visible, near)
            bias = self._node("Where", visible, self._number(0), self._number(-math.inf))
            queries = self._config.num_heads // self._config.num_kv_heads
            self._masks[window] = bias if queries == 1 else self._node("Tile", bias, self._integers(queries, 1))
        return self._masks[window]

    def _lengths(self) -> str:
        """The vector [past, rows], made at its first use."""
        if not self._split_lengths:
            num_rows = self._node("Shape", "tokens")
            num_past = self._node("Sub", self._node("Shape", "visible", start=1), num_rows)
            self._split_lengths = self._node("Concat", num_past, num_rows, axis=0)
        return self._split_lengths

    def _rotations(self, rope: Rope) -> tuple[str, str]:
        """Cosines and sines of the rows' positions for both halves of a head, [rows, 1, D], made at their first use.

        They are computed in f64 and rounded once. The sines of first halves are negative: a rotated head is
        x * cos + (second half, first half) * sin.
        """
        if rope not in self._tables:
            inverse, factor = inverse_frequencies(rope, self._config.head_dim), rotary_factors(rope, self._config.head_dim)
            positions = self._node("Unsqueeze", self._node("Cast", "positions", to=self._types.DOUBLE), self._integers(1, 2))
            angles = self._node("Mul", positions, self._constant(inverse, np.float64))
            # Runtimes know the sine of doubles, and not their cosine.
            quarter = self._node("Add", angles, self._number(math.pi / 2, np.float64))
            tables = []
            for turned in (quarter, angles):
                table = self._node("Sin", turned)
                if (factor != 1).any():
                    table = self._node("Mul", table, self._constant(factor, np.float64))
                tables.append(self._node("Cast", table, to=self._types.FLOAT))
            cos, sin = tables
            halves = self._node("Concat", cos, cos, axis=2), self._node("Concat", self._node("Neg", sin), sin, axis=2)
            self._tables[rope] = halves
        return self._tables[rope]

    def _heads(self, x: str) -> str:
        return self._node("Reshape", x, self._integers(0, -1, self._config.head_dim))

    def _norm(self, x: str, name: str | None) -> str:
        """RMS norm over the last axis, in the operators that runtimes fuse; or layer norm."""
        if name is None:
            return x
        if self._config.norm_kind == "layer":
            bias = [self._vector(name + "_bias")] if name + "_bias" in self._tensors else []
            return self._node("LayerNormalization", x, self._vector(name), *bias, axis=-1, epsilon=self._config.norm_eps)
        mean = self._node("ReduceMean", self._node("Pow", x, self._number(2)), self._integers(-1), keepdims=1)
        root = self._node("Sqrt", self._node("Add", mean, self._number(self._config.norm_eps)))
        return self._node("Mul", self._node("Div", x, root), self._vector(name))

    def _cached(self, rows: str, output: str) -> str:
        """Keys or values of the rows, [rows, G, D], as the cache keeps them, [G, rows, D]."""
        rows = self._node("Transpose", rows, perm=[1, 0, 2])
        if self._kv_format != "f32":
            to = self._types.FLOAT16 if self._kv_format == "f16" else self._types.BFLOAT16
            rows = self._node("Cast", self._node("Cast", rows, to=to), to=self._types.FLOAT)
        c = self._config
        return self._output(output, rows, [c.num_kv_heads, "rows", c.head_dim])

    def _of_groups(self, numbers: str) -> str:
        return self._node("Unsqueeze", self._node("Gather", numbers, "tokens", axis=0), self._integers(2))

    def _nibbles(self, packed: str, shape: list[int]) -> str:
        """Bytes [rows, ...] as their halves, the low ones first, f32 [rows, *shape]."""
        low = self._node("Cast", self._node("BitwiseAnd", packed, self._number(15, np.uint8)), to=self._types.FLOAT)
        # OpenVINO rounds a shift to the nearest; this is exact anywhere.
        high = self._node("Sub", self._node("Cast", packed, to=self._types.FLOAT), low)
        halves = [low, self._node("Mul", high, self._number(1 / 16))]
        halves = [self._node("Reshape", half, self._integers(0, -1, 1)) for half in halves]
        return self._node("Reshape", self._node("Concat", *halves, axis=2), self._integers(0, *shape))

    def _linear(self, x: str, name: str) -> str:
        m = self._matrix(name)
        bias = self._vector(name + "_bias") if name + "_bias" in self._tensors else ""
        if isinstance(m, _Floats):
            return self._node("Gemm", x, self._to_f32(m.values, m.type), *([bias] if bias else []), transB=1)
        if m.order:
            x = self._gathered(x, m.order)
        inputs = [x, m.codes, m.scales, m.zeros, "", bias]
        while not inputs[-1]:
            inputs.pop()
        rows, columns = m.shape
        size = {"K": columns, "N": rows, "bits": m.bits, "block_size": m.group}
        y = self._node("MatMulNBits", *inputs, domain="com.microsoft", accuracy_level=self._accuracy, **size)
        if not m.offsets:
            return y
        if (x, m.group) not in self._sums:
            groups = self._node("Reshape", x, self._integers(0, columns // m.group, m.group))
            self._sums[x, m.group] = self._node("ReduceSum", groups, self._integers(2), keepdims=0)
        return self._node("Gemm", self._sums[x, m.group], m.offsets, y, transB=1)

    def _gathered(self, x: str, order: str) -> str:
        """The inputs in another order, once for all matrices that have it."""
        if (x, order) not in self._gathers:
            self._gathers[x, order] = self._node("Gather", x, order, axis=1)
        return self._gathers[x, order]

    def _to_f32(self, values: str, type: int) -> str:
        return values if type == self._types.FLOAT else self._node("Cast", values, to=self._types.FLOAT)

    def _matrix(self, name: str) -> "_Floats | _Integers":
        """The initializers of a matrix, made at its first use."""
        tensor = self._tensors[name]
        if id(tensor) not in self._matrices:
            made = tensor.made() if isinstance(tensor, Cast) else tensor
            grouped = group_integers(made)
            self._matrices[id(tensor)] = (
                self._store_floats(name, made) if grouped is None else self._store_integers(name, grouped, made.order)
            )
        return self._matrices[id(tensor)]

    def _store_floats(self, name: str, tensor: QuantTensor) -> "_Floats":
        types = {"f16": (np.float16, self._types.FLOAT16), "bf16": (np.uint16, self._types.BFLOAT16)}
        if tensor.format.name not in types or tensor.order is not None:
            return _Floats(self._initializer(name, tensor.dequantize()), self._types.FLOAT)
        dtype, type = types[tensor.format.name]
        return _Floats(self._initializer(name, tensor.data.view(dtype), type), type)

    def _store_integers(self, name: str, m: GroupedIntegers, order: Array | None) -> "_Integers":
        rows, groups = m.scales.shape
        codes, zeros = m.codes if m.bits == 8 else _pack_nibbles(m.codes), m.zeros
        if zeros is not None:
            assert m.bits == 4, "no format of more than four bits has whole zero points of its own"
            zeros = _pack_nibbles(np.pad(zeros, ((0, 0), (0, groups % 2))))
        return _Integers(
            (rows, m.codes.shape[1]),
            m.bits,
            m.group,
            self._initializer(f"{name}.codes", codes.reshape(rows, groups, -1)),
            self._initializer(f"{name}.scales", m.scales),
            "" if zeros is None else self._initializer(f"{name}.zeros", zeros),
            "" if m.offsets is None else self._initializer(f"{name}.offsets", m.offsets),
            "" if order is None else self._constant(order, np.int32),
        )


def _refused(layer: Layer, what: str, verb: str = "compute") -> BackendError:
    return BackendError(f"layer {layer.index} {what}, which this graph cannot {verb}; use the numba, numpy or torch backend")


@dataclass(frozen=True)
class _Floats:
    """A matrix as one initializer, [N, K]."""

    values: str
    type: int  # ONNX's


@dataclass(frozen=True)
class _Integers:
    """A matrix in groups as the initializers that MatMulNBits takes; "" where there is none."""

    shape: tuple[int, int]  # [N, K]
    bits: int
    group: int
    codes: str  # u8 [N, K / group, bytes of a group]
    scales: str  # f32 [N, K / group]
    zeros: str  # u8 [N, bytes of a row's zero points]
    offsets: str  # f32 [N, K / group]
    order: str  # i32 [K]: the input of each column


def _pack_nibbles(codes: Array) -> Array:
    """Codes [N, n] two to a byte, the first in the low half."""
    return codes[:, 0::2] | codes[:, 1::2] << 4
