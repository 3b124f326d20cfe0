"""The result of every reader: a checked model, its tensors under canonical names, and where its vocabulary is."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from cpuspec.config import HeadConfig, ModelConfig
from cpuspec.errors import CheckpointError
from cpuspec.formats import QuantTensor
from cpuspec.layers import layers_of
from cpuspec.settings import NO_DEFAULTS, SamplingDefaults


@dataclass(frozen=True)
class GgufVocabulary:
    """The tokenizer as a GGUF file stores it. Token types: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.

    merges and scores are empty where the file has none. Ids and flags are None where the file names none; the tokenizer has the
    defaults of each model.
    """

    model: str  # "gpt2" (byte-level BPE), "llama" (SentencePiece), "gemma4" (BPE), "t5" (Unigram) or "bert" (WordPiece)
    pre: str  # name of the pre-tokenizer's rules, "" where the file has none
    tokens: tuple[str, ...]  # bytes that are no UTF-8 are lone surrogates ("surrogateescape")
    token_types: tuple[int, ...]
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    sep_id: int | None = None
    end_ids: tuple[int, ...] = ()  # more tokens that end an answer
    add_bos: bool | None = None
    add_eos: bool | None = None
    add_space_prefix: bool | None = None
    merges_spaces: bool = False  # several spaces count as one, and those around a text as none
    charsmap: bytes = b""  # SentencePiece's table of characters to replace
    lowercase: bool | None = None
    strip_accents: bool | None = None
    control_swallows: bool = False  # control tokens swallow the white space after them
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # by name, "default" for the nameless one


@dataclass(frozen=True)
class HfTokenizerFiles:
    """The tokenizer of a Hugging Face directory. `tokenizer_json` may be missing until somebody asks for text."""

    directory: Path
    tokenizer_json: Path


# The prompt of Qwen3-Reranker (its README, and llama.cpp's converter).
RANKING_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


@dataclass(frozen=True, eq=False)
class Ranker:
    """How a model scores whether a document answers a query: by the final hidden state of the last token of `prompt`.

    weight: [k, C]. With two rows the score is the first number of the softmax of both products. With one row it is the sigmoid of
    the product. None: the rows are those of the output matrix for `labels`, and the score is the first one's probability.
    """

    prompt: str = RANKING_PROMPT
    weight: QuantTensor | None = None
    labels: tuple[str, str] = ("yes", "no")


@dataclass(frozen=True)
class Checkpoint:
    """A model whose tensors are exactly those that `config` asks for, with the right shapes; their bytes are still unread.

    tensors: canonical name -> QuantTensor: embed, norm, output (absent when tied) and layers.{i}.{attn_norm, q, k, v, q_bias,
    k_bias, v_bias, o, o_bias, q_norm, k_norm, attn_post_norm, mlp_norm, gate, up, down, mlp_post_norm}; of heads also encode,
    fuse, fuse_bias, embed_norm and hidden_norm, or those of `HeadConfig.tensors`; of mixtures those that `layers.Layer.tensors`
    names. Weights are [out, in], those of experts [experts, out, in], with q and k rows in rotate-half order: the dimensions that
    turn together are halves of a head apart (`layers.rotary_order`); norms and biases are f32, f16 or bf16.
    sampling: the recommendations of its files. mask_id: the token that stands for unknown tokens, in a model that was trained to
    draft in one pass; None for none.
    prediction_layers: tensors of layers for multi-token prediction by their names in the file; `checkpoints.heads.mtp` reads them.
    quantization: the method by which its weights were quantized, for people; "" where the files name none.
    pooling: the hidden states that make its embeddings, one of `POOLINGS`; "" for a model that generates text. ranker: of a model
    that was trained to rank texts, None for others.
    remarks: a sentence for each thing in its files that this version ignores, or reads in another way than they say.
    adapters: files of LoRA adapters that belong to the model, as Ollama keeps them.
    Raises CheckpointError on a missing, unexpected or wrongly shaped tensor.
    """

    path: Path
    name: str
    config: ModelConfig
    tensors: Mapping[str, QuantTensor]
    vocabulary: GgufVocabulary | HfTokenizerFiles
    sampling: SamplingDefaults = NO_DEFAULTS
    prediction_layers: Mapping[str, QuantTensor] = field(default_factory=dict)
    mask_id: int | None = None
    quantization: str = ""
    pooling: str = ""
    remarks: tuple[str, ...] = ()
    ranker: Ranker | None = None
    adapters: tuple[Path, ...] = ()

    @property
    def main_format(self) -> str:
        """The name of the format in which most bytes of its tensors are."""
        num_bytes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            num_bytes[tensor.format.name] += tensor.num_bytes
        return max(num_bytes, key=num_bytes.__getitem__)

    def __post_init__(self) -> None:
        if (
            self.ranker
            and (weight := self.ranker.weight)
            and weight.shape not in ((1, self.config.hidden_size), (2, self.config.hidden_size))
        ):
            raise CheckpointError(
                f"{self.path}: scores are made by a matrix of {list(weight.shape)}, wanted 1 or 2 rows of the hidden size"
            )
        wanted = tensor_shapes(self.config)
        for name, shape in wanted.items():
            tensor = self.tensors.get(name)
            if tensor is None:
                raise CheckpointError(f"{self.path}: tensor {name} {list(shape)} is missing; this is not a whole model")
            if tensor.shape != shape:
                raise CheckpointError(f"{self.path}: tensor {name} has the shape {list(tensor.shape)}, wanted {list(shape)}")
            if not is_matrix(name, shape) and tensor.format.block_size != 1:
                raise CheckpointError(f"{self.path}: tensor {name} is {tensor.format.name}; norms and biases are f32, f16 or bf16")
        unexpected = self.tensors.keys() - wanted.keys()
        if unexpected:
            raise CheckpointError(
                f"{self.path}: tensor {min(unexpected)} has no place in a {self.config.architecture} model with "
                f"{self.config.num_layers} layers; it would be ignored silently, so the model is refused"
            )
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is one matrix, or one of each expert, and neither a norm, biases nor the weights of a convolution."""
    return len(shape) > 1 and not name.endswith(("_bias", "_conv"))


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a matrix that is worth quantizing. Routers and the matrices of a decay are not: they are small, and they
    decide what else is computed.
    """
    return is_matrix(name, shape) and name.rpartition(".")[2] not in ("router", "shared_weight", "delta_beta", "delta_alpha")


def norm_sha256(checkpoint: Checkpoint) -> str:
    """sha256 of the numbers of a model's last norm, as little-endian f32. All quantizations of a model have the same."""
    return hashlib.sha256(checkpoint.tensors["norm"].dequantize().astype("<f4").tobytes()).hexdigest()


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every canonical tensor that a model of this configuration has, with its shape."""
    hidden = config.hidden_size
    if config.head and config.head.fuses == "alone":
        return {"embed": (config.vocab_size, hidden), **dict(config.head.tensors)}
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden)}
    if config.head is None or config.head.final_norm:
        shapes["norm"] = (hidden,)
        if config.norm_bias:
            shapes["norm_bias"] = (hidden,)
    if not config.tied_embeddings:
        shapes["output"] = (config.num_logits, hidden)
    if size := config.num_layers * config.layer_input_size:
        shapes |= {"layer_embed": (config.vocab_size, size), "layer_input": (size, hidden)}
        shapes["layer_input_norm"] = (config.layer_input_size,)
    for layer in layers_of(config):
        shapes |= {layer.weight(part): shape for part, shape in layer.tensors(hidden).items()}
    return _of_head(config, config.head, shapes) if config.head else shapes


def _of_head(config: ModelConfig, head: HeadConfig, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The tensors of a draft head: those of a model of its shape, with the changes that `HeadConfig` names."""
    hidden = config.hidden_size
    if config.takes_hidden and head.input_norms:
        shapes |= {"embed_norm": (hidden,), "hidden_norm": (hidden,)}
    if head.target_size:
        shapes["embed"] = (config.vocab_size, head.target_size)
        shapes["back"] = (head.target_size, hidden)
    if head.fuses == "matrix":
        shapes["fuse"] = (hidden, 2 * config.state_size)
        if head.fuse_bias:
            shapes["fuse_bias"] = (hidden,)
    if head.fuses == "attention":
        shapes |= {f"layers.0.{part}": (shapes[f"layers.0.{part}"][0], 2 * hidden) for part in ("q", "k", "v")}
    if head.fuses == "attention" or not head.first_norm:
        shapes.pop("layers.0.attn_norm", None)
    if head.injects and not head.reads:
        shapes["hidden_norm"] = (hidden,)
    if head.feature_size:
        shapes["encode"] = (hidden, head.feature_size)
    return shapes
