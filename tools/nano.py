"""The idea of cpuspec in one file, with NumPy alone: int4 weights, one decoder, drafts that are checked exactly.

    python tools/nano.py model.gguf "Count from 1 to 30: 1, 2, 3, 4"

Read it from top to bottom. It runs Llama-like GGUF files (SmolLM2, Qwen2.5) and answers with the tokens of the engine, slowly. Each
section ends with the files in which the engine does the same fast. Only the reader of files, the meaning of formats and the
tokenizer come from the package.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.gguf_file import GgufFile, read_gguf
from cpuspec.formats import QuantTensor
from cpuspec.text import make_tokenizer

F32 = NDArray[np.float32]
ZERO, ONE = np.zeros(1, np.float32), np.ones(1, np.float32)

# ---------------------------------------------------------------------------------------------------------------------------------
# 1. A product with quantized weights
#
# A matrix of 4 bits is a table of codes from 0 to 15, and for each group of 32 codes a scale and an offset:
#
#     weight = code * scale - offset
#
# One token needs a product of every matrix with one row of numbers. Its time is the time to read and unpack the matrix. Several
# tokens need the same matrix, so it is unpacked once for all of them: a forward over four tokens takes hardly longer than over one.
# This is what pays for drafts.
#
# The second rule makes drafts exact: a row is multiplied alone, in one order of sums, whoever else is in the batch. So the numbers
# of a token do not depend on the tokens that are computed beside it, to the last bit.
#
# In the engine: formats/format.py (meaning), formats/packing.py (order of bytes), kernels/linear.py (products of integers).

CHUNK = 64  # rows of a matrix that are unpacked at a time: as floats they stay in the processor's cache


class Matrix:
    """A matrix [N, K] of a file: codes [N, groups, size], scales and offsets [N, groups, 1]; or plain numbers, as scales of size 1.

    Here a code takes a byte. The engine keeps two in a byte, as files do, since bytes are what decoding waits for.
    """

    def __init__(self, tensor: QuantTensor) -> None:
        self.shape = tensor.shape
        if tensor.format.affine:
            parts = tensor.format.split(tensor.data)
            scale, offset = tensor.format.grid(parts)
            codes = parts["codes"] if tensor.format.affine.levels is None else tensor.format.values_of(parts["codes"], ONE, ZERO)
            self.codes, self.scales, self.offsets = codes.reshape(*scale.shape, -1), scale[:, :, None], offset[:, :, None]
        else:
            values = tensor.dequantize()
            self.codes, self.scales, self.offsets = values[:, :, None], ONE, ZERO

    def unpack(self, start: int, end: int) -> F32:
        """Rows `start` to `end` as floats, [end - start, K]."""
        if self.scales is ONE:
            return self.codes[start:end, :, 0]
        weights = np.multiply(self.codes[start:end], self.scales[start:end], dtype=np.float32)
        weights -= self.offsets[start:end]
        return weights.reshape(end - start, -1)


def linear(x: F32, matrix: Matrix, bias: F32 | None = None) -> F32:
    """The product of rows `x` [T, K] with a matrix [N, K], plus a bias [N]: [T, N]."""
    y = np.empty((len(x), matrix.shape[0]), np.float32)
    for start in range(0, matrix.shape[0], CHUNK):
        weights = matrix.unpack(start, min(start + CHUNK, matrix.shape[0]))
        for row, result in zip(x, y, strict=True):
            result[start : start + CHUNK] = weights @ row
    return y if bias is None else y + bias


# ---------------------------------------------------------------------------------------------------------------------------------
# 2. A cache that is a length
#
# Attention reads the keys and values of all tokens before. They are written at the token's position. To forget tokens, set the
# length: what lies behind it is overwritten later. A rejected draft costs nothing to undo.
#
# In the engine: model/cache.py, speculation/context.py.


@dataclass
class Cache:
    """keys, values: [layers, tokens, heads, dims]."""

    keys: F32
    values: F32
    length: int = 0


# ---------------------------------------------------------------------------------------------------------------------------------
# 3. The decoder
#
# `forward` takes the tokens that the cache lacks, one or hundreds, and returns a row of logits for each. Reading a prompt, decoding
# a token and checking a draft are the same call.
#
# In the engine: model/transformer.py (the order of operations, for every family), backends/numpy_backend.py (plain),
# backends/numba_program.py and kernels/operations.py (one compiled call).


class Model:
    """A Llama-like model of a GGUF file."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.matrices = {name: Matrix(tensor) for name, tensor in file.tensors.items() if len(tensor.shape) == 2}
        self.vectors = {name: tensor.dequantize() for name, tensor in file.tensors.items() if len(tensor.shape) == 1}
        self.family = str(self.file.metadata["general.architecture"])
        if self.family not in ("llama", "qwen2"):
            sys.exit(f"nano.py runs the families llama and qwen2, got {self.family}; `cpuspec generate` runs it")
        self.layers, self.heads = self.setting("block_count"), self.setting("attention.head_count")
        self.key_heads = self.setting("attention.head_count_kv", self.heads)
        self.width = self.setting("embedding_length")
        self.dims = self.setting("attention.key_length", self.width // self.heads)
        self.eps = np.float32(self.number("attention.layer_norm_rms_epsilon", 1e-5))
        self.turns = self.number("rope.freq_base", 1e4) ** (-np.arange(0, self.dims, 2) / self.dims)  # radians a token

    def number(self, name: str, default: float) -> float:
        return float(self.file.metadata.get(f"{self.family}.{name}", default))  # type: ignore[arg-type]

    def setting(self, name: str, default: int = 0) -> int:
        return int(self.number(name, default))

    def new_cache(self, tokens: int) -> Cache:
        shape = (self.layers, tokens, self.key_heads, self.dims)
        return Cache(np.zeros(shape, np.float32), np.zeros(shape, np.float32))

    def forward(self, tokens: list[int], cache: Cache, num_logits: int) -> F32:
        """Append `tokens` to the cache. Returns the logits after the last `num_logits` of them, [num_logits, V]."""
        embeddings = self.matrices["token_embd.weight"]
        x = np.concatenate([embeddings.unpack(token, token + 1) for token in tokens])
        positions = np.arange(cache.length, cache.length + len(tokens))
        for number in range(self.layers):
            layer = f"blk.{number}."

            def product(rows: F32, name: str, layer: str = layer) -> F32:
                return linear(rows, self.matrices[f"{layer}{name}.weight"], self.vectors.get(f"{layer}{name}.bias"))

            normed = self.norm(x, f"{layer}attn_norm.weight")
            q = self.rotate(product(normed, "attn_q"), positions)
            cache.keys[number, positions] = self.rotate(product(normed, "attn_k"), positions)
            cache.values[number, positions] = product(normed, "attn_v").reshape(len(x), self.key_heads, self.dims)
            mixed = [
                attend(row, cache.keys[number, : position + 1], cache.values[number, : position + 1])
                for row, position in zip(q, positions, strict=True)
            ]
            x = x + product(np.stack(mixed), "attn_output")
            normed = self.norm(x, f"{layer}ffn_norm.weight")
            gate, up = product(normed, "ffn_gate"), product(normed, "ffn_up")
            x = x + product(gate / (1 + np.exp(-gate)) * up, "ffn_down")
        cache.length += len(tokens)
        output = self.matrices.get("output.weight", embeddings)
        return linear(self.norm(x[-num_logits:], "output_norm.weight"), output)

    def norm(self, x: F32, name: str) -> F32:
        """Each row divided by the root of its mean square, times a vector."""
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps) * self.vectors[name]

    def rotate(self, x: F32, positions: NDArray[np.int64]) -> F32:
        """Rotary positions: pairs of numbers turn by an angle that grows with the position. [T, heads * D] -> [T, heads, D]"""
        x = x.reshape(len(x), -1, self.dims)
        angles = (positions[:, None] * self.turns)[:, None, :]
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        half = self.dims // 2
        # Files of Llama have the two numbers of a pair side by side, others half a head apart.
        first, second = (slice(0, None, 2), slice(1, None, 2)) if self.family == "llama" else (slice(half), slice(half, None))
        turned = np.empty_like(x)
        turned[..., first] = x[..., first] * cos - x[..., second] * sin
        turned[..., second] = x[..., first] * sin + x[..., second] * cos
        return turned


def attend(q: F32, keys: F32, values: F32) -> F32:
    """The values that one token's queries [H, D] find among keys and values [n, G, D], each key head for H / G queries: [H * D]."""
    keys, values = keys.swapaxes(0, 1), values.swapaxes(0, 1)
    scores = q.reshape(len(keys), -1, q.shape[1]) @ keys.swapaxes(1, 2) / np.float32(np.sqrt(q.shape[1]))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True) @ values).reshape(-1)


# ---------------------------------------------------------------------------------------------------------------------------------
# 4. Drafts
#
# A drafter guesses the next tokens. It may be wrong, and it may be anything: here it looks for the last tokens in the text before,
# and guesses that what followed there follows again. The engine's drafters are look-ups, small models, the model itself in fewer
# bits, and trained heads; a drafter may have a drafter of its own.
#
# In the engine: speculation/drafters/, speculation/chain.py, and speculation/planner/, which asks only where a guess pays.


def look_up(tokens: list[int], most: int) -> list[int]:
    """At most `most` tokens that followed the last occurrence of the last three tokens, or of the last two."""
    for size in (3, 2):
        ending = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == ending:
                return tokens[start + size : start + size + most]
    return []


# ---------------------------------------------------------------------------------------------------------------------------------
# 5. Verification
#
# One forward computes the logits after the last token and after each drafted one. From left to right: a drafted token stays if it
# is the token that the model chooses there. The first one that differs gives way to the model's choice, and the rest is forgotten.
# So each forward gives at least one token, and never another token than without drafts.
#
# Sampling needs no other rule. The noise of a position depends on the seed and on the position alone, so the model's choice there
# is the same however the position was reached. An empty draft is plain decoding.
#
# In the engine: speculation/verify.py, speculation/round.py, sampling.py (`Noise`).


def choose(logits: F32, position: int, temperature: float, seed: int) -> int:
    """The likeliest token, or with a temperature a token drawn by its probability (the Gumbel-max trick)."""
    if temperature == 0:
        return int(logits.argmax())
    noise = np.random.default_rng((seed, position)).gumbel(size=len(logits))
    return int((logits / temperature + noise).argmax())


@dataclass
class Answer:
    """tokens: of the prompt and the answer. forwards: of the whole model, the prompt's among them."""

    tokens: list[int]
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0


def generate(
    model: Model, prompt: list[int], max_tokens: int, most_drafted: int, ends: set[int], temperature: float = 0, seed: int = 0
) -> Answer:
    """Answer a prompt of at least one token."""
    answer = Answer(list(prompt))
    tokens, end = answer.tokens, len(prompt) + max_tokens
    cache = model.new_cache(end + most_drafted)
    while len(tokens) < end and not ends & set(tokens[len(prompt) :]):
        draft = look_up(tokens, most_drafted)
        logits = model.forward(tokens[cache.length :] + draft, cache, len(draft) + 1)
        chosen = [choose(row, len(tokens) + i, temperature, seed) for i, row in enumerate(logits)]
        right = next((i for i, token in enumerate(draft) if token != chosen[i]), len(draft))
        tokens += chosen[: right + 1]
        cache.length = len(tokens) - 1  # rejected tokens are forgotten; the last chosen one was not computed yet
        answer.forwards, answer.drafted, answer.accepted = answer.forwards + 1, answer.drafted + len(draft), answer.accepted + right
    del tokens[end:]
    return answer


# ---------------------------------------------------------------------------------------------------------------------------------
# 6. The command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--draft", type=int, default=4, help="tokens that a draft may have; 0 is plain decoding")
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model, tokenizer = Model(read_gguf(options.model)), make_tokenizer(open_checkpoint(options.model))
    prompt, start = tokenizer.encode_prompt(options.prompt), time.perf_counter()
    answer = generate(model, prompt, options.max_tokens, options.draft, set(tokenizer.eos_ids), options.temperature, options.seed)
    print(options.prompt + tokenizer.decode(answer.tokens[len(prompt) :]))
    num_tokens, seconds = len(answer.tokens) - len(prompt), time.perf_counter() - start
    accepted = f"{answer.accepted} of {answer.drafted} drafted tokens accepted"
    print(f"[{num_tokens} tokens in {answer.forwards} forwards and {seconds:.1f} s; {accepted}]", file=sys.stderr)


if __name__ == "__main__":
    main()
