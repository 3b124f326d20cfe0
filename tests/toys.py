"""Toys: models whose every logit is known, tokenizers of a few tokens, a drafter that draws, and plain decoding over them, written
the slow way."""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cpuspec.config import ModelConfig
from cpuspec.model.batch import ForwardBatch, ForwardOutput, ForwardStoppedError
from cpuspec.model.cache import BlockAccess, KVCache, StateAccess
from cpuspec.sampling import Noise, Row, TokenHistory, dense, distribution
from cpuspec.settings import SamplingParams
from cpuspec.speculation.draft import Draft
from tests.oracles.exact import ExactRng, ExactUniform


class ToyBackend:
    """A row-invariant model over a few tokens: a row's logits are table look-ups by its last two tokens and by its
    whole history with positions, which the cache holds as a running hash. `memory` weighs the second: at 0 the
    model loops, so that drafts are accepted; above, a single wrong row in the cache changes what follows.
    """

    name = "toy"
    row_invariant = True
    survives_fork = True
    threads = 1
    weight_bytes, shared_bytes, bytes_per_token = 1000, 0, 16

    def __init__(
        self, seed: int, vocab_size: int = 8, memory: float = 0.5, max_rows: int = 7, context_length: int = 64, block_size: int = 0
    ) -> None:
        """block_size: cache indices of a block, in steps of 2; 0 for a cache without blocks."""
        rng = np.random.default_rng(seed)
        self.config = ModelConfig("llama", vocab_size, 4, 4, 2, 1, 1, 4, context_length)
        self.max_rows = max_rows
        self.block_size = block_size
        self.num_forwards = 0
        self.num_rows = 0
        self.closed = False
        self.while_running: Callable[[], object] = lambda: None  # is called in the middle of each forward
        self._stop = False
        self._recent = rng.normal(size=(53, vocab_size)).astype(np.float32)
        self._whole = np.float32(memory) * rng.normal(size=(97, vocab_size)).astype(np.float32)

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        def copy_rows(storage: np.ndarray, rows: np.ndarray, first: int) -> None:
            storage[first : first + len(rows)] = storage[rows]

        def copy_prefix(source: np.ndarray, storage: np.ndarray, length: int) -> None:
            storage[:length] = source[:length]

        def views(storage: np.ndarray, number: int) -> tuple[np.ndarray]:
            return (storage[number * self.block_size : (number + 1) * self.block_size].view(np.uint8).reshape(1, -1),)

        blocks = BlockAccess(self.block_size, 2, views) if self.block_size else None
        new_storage = partial(np.full, (capacity + self.block_size, 2), -1, np.int64)
        return KVCache(num_slots, capacity, new_storage, copy_rows, copy_prefix, 16, blocks, f"toy {self._recent[0, 0]}")

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        c = self.config
        batch.check(c, cache, self.max_rows)
        self.num_forwards += 1
        self.num_rows += len(batch.tokens)
        logits = np.empty((len(batch.tokens), c.vocab_size), np.float32)
        hidden = np.empty((len(batch.tokens), c.hidden_size), np.float32)
        for b, slot in enumerate(batch.slots):
            rows = cache.storage(slot)  # [capacity, 2]: token, hash of everything up to it
            for t in range(batch.q_start[b], batch.q_start[b + 1]):
                first = cache.lengths[slot]
                index = first + t - batch.q_start[b]
                parent = index - 1
                if batch.parents is not None:
                    parent = first - 1 if batch.parents[t] < 0 else first + batch.parents[t] - batch.q_start[b]
                before, hashed = rows[parent] if parent >= 0 else (0, 1)
                token = int(batch.tokens[t])
                rows[index] = token, (int(hashed) * 31 + token * 7 + int(batch.positions[t]) * 13 + 3) % 1_000_003
                logits[t] = self._recent[(token * 11 + int(before)) % 53] + self._whole[rows[index, 1] % 97]
                hidden[t] = token, batch.positions[t], rows[index, 1] % 997, 0
        self._stop = False
        self.while_running()
        if self._stop and batch.stops_early:
            raise ForwardStoppedError
        cache.advance(batch)
        scored = logits if batch.logit_rows is None else logits[batch.logit_rows]
        return ForwardOutput(scored, tuple(hidden + np.float32(layer) for layer in batch.hidden_layers))

    def stop(self) -> None:
        self._stop = True

    def close(self) -> None:
        self.closed = True

    def row(self, tokens: list[int]) -> np.ndarray:
        """Logits [V] after `tokens`, from scratch and one token at a time."""
        cache = self.new_cache(1, len(tokens))
        for position, token in enumerate(tokens):
            one = [np.array(x, np.int32) for x in ([token], [position], [0], [0, 1])]
            output = self.forward(ForwardBatch(*one), cache)
        return output.logits[0]


@dataclass
class _Remembered:
    """A slot of a `RecurrentBackend`: its tokens, as if they were keys and values, and states by the number of tokens."""

    tokens: np.ndarray
    states: dict[int, np.ndarray] = field(default_factory=lambda: {0: np.zeros(4)})


class RecurrentBackend:
    """A row-invariant model whose one layer has a state that cannot be truncated: state = tanh(A state + B[token]).

    Logits are of the state and of a sum over all tokens, which the cache holds like keys and values: rows are wrong where either
    is. kept: from the tokens that a slot held before a forward, and after it, to the lengths of which the states are kept.
    """

    name = "recurrent"
    row_invariant = survives_fork = True
    threads = 1
    weight_bytes, shared_bytes, bytes_per_token = 1000, 0, 8

    def __init__(
        self,
        seed: int,
        kept: Callable[[int, int], Iterable[int]],
        vocab_size: int = 8,
        max_rows: int = 7,
        block_size: int = 0,
    ) -> None:
        """block_size: as in `ToyBackend`."""
        rng = np.random.default_rng(seed)
        self.config = ModelConfig("llama", vocab_size, 4, 4, 2, 1, 1, 4, 64)
        self.max_rows = max_rows
        self.block_size = block_size
        self.num_rows = 0
        self._kept = kept
        self._state, self._token = rng.normal(size=(4, 4)), 2 * rng.normal(size=(vocab_size, 4))
        self._output = 3 * rng.normal(size=(vocab_size, 4))

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        def copy_rows(storage: _Remembered, rows: np.ndarray, first: int) -> None:
            storage.tokens[first : first + len(rows)] = storage.tokens[rows]
            moved = {first + i + 1: storage.states.get(row + 1) for i, row in enumerate(rows.tolist())}
            for length, state in moved.items():
                storage.states.pop(length, None)
                if state is not None:
                    storage.states[length] = state

        def copy_prefix(source: _Remembered, storage: _Remembered, length: int) -> None:
            storage.tokens[:length] = source.tokens[:length]

        def reach(storage: _Remembered, length: int) -> int:
            return max(number for number in storage.states if number <= length)

        def take(storage: _Remembered, length: int, states: np.ndarray) -> None:
            states.view(float)[:] = storage.states[length]

        def put(storage: _Remembered, states: np.ndarray, length: int) -> None:
            storage.states = {0: np.zeros(4), length: states.view(float).copy()}

        def views(storage: _Remembered, number: int) -> tuple[np.ndarray]:
            return (storage.tokens[number * self.block_size : (number + 1) * self.block_size].view(np.uint8).reshape(1, -1),)

        blocks, states = BlockAccess(self.block_size, 2, views), StateAccess(32, reach, take, put)
        return KVCache(
            *(num_slots, capacity, lambda: _Remembered(np.full(capacity + self.block_size, -1)), copy_rows, copy_prefix, 8),
            *(blocks if self.block_size else None, f"recurrent {self._state[0, 0]}", states, 4 * 32),
        )

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        batch.check(self.config, cache, self.max_rows)
        self.num_rows += len(batch.tokens)
        states, logits = np.empty((len(batch.tokens), 4)), np.empty((len(batch.tokens), len(self._output)), np.float32)
        for b, slot in enumerate(batch.slots):
            start, end, held = int(batch.q_start[b]), int(batch.q_start[b + 1]), cache.lengths[slot]
            storage = cache.storage(slot)
            storage.states = {number: state for number, state in storage.states.items() if number <= held}
            storage.tokens[held : held + end - start] = batch.tokens[start:end]
            for t in range(start, end):
                parents, path = range(-1, t) if batch.parents is None else batch.parents.tolist(), [t]
                while parents[path[-1]] >= start:
                    path.append(parents[path[-1]])
                before = states[path[1]] if len(path) > 1 else storage.states[held]
                states[t] = np.tanh(self._state @ before + self._token[batch.tokens[t]])
                storage.states[held + t - start + 1] = states[t]
                logits[t] = self._logits(states[t], [*storage.tokens[:held], *(int(batch.tokens[row]) for row in path[::-1])])
            kept = {0, *self._kept(held, held + end - start)}
            storage.states = {length: state for length, state in storage.states.items() if length in kept}
        cache.advance(batch)
        hidden = states.astype(np.float32)
        scored = logits if batch.logit_rows is None else logits[batch.logit_rows]
        return ForwardOutput(scored, tuple(hidden + np.float32(layer) for layer in batch.hidden_layers))

    def _logits(self, state: np.ndarray, tokens: list[int]) -> np.ndarray:
        logits: np.ndarray = self._output @ state + np.cos(
            sum(at * int(token) for at, token in enumerate(tokens, 1)) + np.arange(len(self._output))
        )
        return logits.astype(np.float32)

    def close(self) -> None:
        pass

    def row(self, tokens: list[int]) -> np.ndarray:
        """Logits [V] after `tokens`, from scratch."""
        state = np.zeros(4)
        for token in tokens:
            state = np.tanh(self._state @ state + self._token[token])
        return self._logits(state, tokens)


class ToyTokenizer:
    """Id 0 begins, id 1 ends, 2 and 3 are the halves of one character, the rest are letters."""

    bos_id = 0
    eos_ids = frozenset({1})
    has_chat_template = True

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._bytes = [b"", b"", b"\xc3", b"\xa9", *(bytes([97 + i]) for i in range(vocab_size - 4))]

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return [0] * add_special + [self._bytes.index(bytes([b])) for b in text.encode()]

    def encode_prompt(self, text: str, parse_special: bool = True, add_special: bool = True) -> list[int]:
        return self.encode(text, add_special)

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return b"".join(self._bytes[i] for i in ids).decode(errors="replace")

    def stream(self, skip_special: bool = True, shown: Set[int] = frozenset(), after: int | None = None) -> "ToyDecoder":
        return ToyDecoder(self._bytes)

    def chat_template_for(self, variables: Mapping[str, Any]) -> str | None:
        return None

    def turns(self, ids: list[int]) -> tuple[int, ...]:
        return tuple(at for at, token_id in enumerate(ids) if token_id == 0)

    def encode_chat(self, messages: list[dict[str, str]], variables: object = None, **how: bool) -> list[int]:
        return [0, *(t for message in messages for t in self.encode(message["content"], add_special=False))]


class ToyDecoder:
    """Text as soon as its characters are whole."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        return self._decoder.decode(self._table[id])

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class SampledProposer:
    """Draws from rows of its own: a chain, or a tree of the shape `parents`, without replacement.

    independent: with random numbers of its own instead of the request's.
    """

    name = "sampled"
    most_hidden: int | None = None
    levels = ()

    def __init__(
        self,
        vocab_size: int,
        parents: tuple[int, ...] = (-1, 0, 1),
        hidden_layers: tuple[int, ...] = (),
        independent: bool = False,
    ) -> None:
        self.hidden_layers = hidden_layers
        self._rows = np.random.default_rng(5).dirichlet(np.ones(vocab_size), size=vocab_size)
        self._parents = parents
        self._draws = Noise(9) if independent else None

    def begin(self, seq: Any, num_cached: int) -> None:
        pass

    def propose(self, seqs: list[Any], limits: list[int]) -> list[Draft]:
        drafts = []
        for seq, limit in zip(seqs, limits, strict=True):
            tokens: list[int] = []
            depths: list[int] = []
            parents = self._parents[:limit]
            for node, parent in enumerate(parents):
                row = self._rows[tokens[parent] if parent >= 0 else seq.tokens[-1]].copy()
                row[[tokens[other] for other in range(node) if parents[other] == parent]] = 0
                depths.append(1 + depths[parent] if parent >= 0 else 0)
                tokens.append(self._draws.draw(row, len(seq.tokens) + node) if self._draws else seq.draw(row, depths[-1]))
            drafts.append(Draft(np.array(tokens, np.int32), np.array(parents, np.int32), self.name))
        return drafts

    def accept(self, seq: Any, verdict: Any, hidden: Any) -> None:
        pass

    def end(self, seq: Any) -> None:
        pass


def plain_greedy(
    model: ToyBackend | RecurrentBackend, tokenizer: ToyTokenizer, prompt: list[int], params: SamplingParams
) -> dict[str, Any]:
    """What greedy decoding means, one token at a time from scratch, with its own penalties, stops and log-probabilities."""
    tokens, logprobs, reason = list(prompt), [], None
    while reason is None:
        raw = model.row(tokens).astype(np.float64)
        x = raw.copy()
        output = tokens[len(prompt) :]
        for token in range(len(x)):
            x[token] += params.logit_bias.get(token, 0)
            if token in tokens:
                x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
            x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
        best = min(token for token in range(len(x)) if x[token] == max(x))
        tokens.append(best)
        logprobs.append(float(raw[best] - np.log(np.exp(raw).sum())))
        output = tokens[len(prompt) :]
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else tokenizer.eos_ids)
        text = tokenizer.decode(output[:-1] if best in ends else output)
        cut = min((text.find(stop) for stop in params.stop if stop in text), default=-1)
        if best in ends or cut >= 0:
            reason = "stop"
        elif len(output) == params.max_tokens or len(tokens) == model.config.context_length:
            reason = "length"
        text = text[:cut] if cut >= 0 else text
    return {"token_ids": output, "text": text, "finish_reason": reason, "logprobs": logprobs}


def string_probs(model: ToyBackend, prompt: list[int], params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """The target's probability of every continuation of `length` tokens, by walking all of them."""
    probs = {(): 1.0}
    for _ in range(length):
        longer = {}
        for string, prob in probs.items():
            history = TokenHistory(prompt)
            history.extend(string)
            row = dense(distribution(model.row([*prompt, *string]), params, history))
            longer |= {(*string, token): prob * row[token] for token in range(len(row)) if row[token] > 0}
        probs = longer
    return probs


class ExactDraws:
    """A request's random numbers in one run of an enumeration: one for each position, which draws by inverse CDF."""

    def __init__(self, rng: ExactRng) -> None:
        self._rng = rng
        self._numbers: dict[int, ExactUniform] = {}

    def draw(self, row: Row, position: int) -> int:
        number, cdf = self._numbers.setdefault(position, self._rng.random()), np.cumsum(dense(row))
        return int(np.searchsorted(cdf, number * cdf[-1], side="right"))


class PieceTokenizer:
    """A vocabulary spelled out: bytes, control tokens as texts, None for a row without a token. Text goes to the longest first."""

    def __init__(
        self,
        pieces: Sequence[bytes | str | None],
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        prefix: tuple[int, ...] = (),
    ) -> None:
        self.pieces, self.vocab_size = tuple(pieces), len(pieces)
        self.eos_ids, self.bos_id, self.prefix = frozenset(eos_ids), bos_id, prefix
        self._ids = {piece: i for i, piece in enumerate(pieces) if isinstance(piece, bytes)}
        self.num_encoded_bytes = 0

    def meaning(self, token_id: int) -> bytes | str | None:
        return self.pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return not isinstance(self.pieces[token_id], bytes)

    def token_id(self, text: str) -> int | None:
        return self.pieces.index(text) if text in self.pieces else None

    def token_bytes(self, token_id: int) -> bytes:
        piece = self.pieces[token_id]
        return piece if isinstance(piece, bytes) else b""

    def first_difference(self, other: "PieceTokenizer") -> int | None:
        return next((i for i, (a, b) in enumerate(zip(self.pieces, other.pieces, strict=False)) if a != b), None)

    def parts(self, ids: Sequence[int], continues: bool = False) -> list[bytes | int]:
        return [i if self.is_special(i) else self.token_bytes(i) for i in ids]

    def encode_parts(self, parts: Iterable[bytes | int], continues: bool = False) -> list[int]:
        ids: list[int] = []
        text = b""
        for part in [*parts, -1]:
            if isinstance(part, bytes):
                text += part
                continue
            self.num_encoded_bytes += len(text)
            while text:
                longest = max((piece for piece in self._ids if text.startswith(piece)), key=len, default=b"")
                ids += [self._ids[longest]] if longest else []
                text = text[max(len(longest), 1) :]
            ids += [part] * (part >= 0)
        return ids
