"""Requests to outputs, one step at a time: admit, speculate, end what is done.

The engine never learns how drafts are made or how a backend computes. Single-threaded: one caller at a time.
"""

from collections import defaultdict
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import NamedTuple

from cpuspec.config import SamplingParams
from cpuspec.engine.scheduler import Scheduler, draft_limit
from cpuspec.engine.text import StopText
from cpuspec.errors import ConfigError
from cpuspec.metrics import LevelCounters, RequestMeter, RequestStats
from cpuspec.sampling import TokenLogprobs, logprobs
from cpuspec.sequence import Sequence
from cpuspec.spec.context import Context
from cpuspec.spec.proposer import Proposer, levels_of
from cpuspec.spec.round import Round, speculate
from cpuspec.tokenizer import Tokenizer


class Output(NamedTuple):
    """What one step added to one request. The last output of a request has a finish_reason and its stats.

    text excludes the token that ended the request and everything from a stop string on; token_ids include them.
    """

    request_id: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # one for each token if asked for
    finish_reason: str | None = None  # "stop", "length", "aborted"
    stats: RequestStats | None = None


@dataclass(frozen=True)
class _Request:
    seq: Sequence
    text: StopText
    meter: RequestMeter
    end_ids: frozenset[int]


class Engine:
    """Runs requests over one target context with one proposer."""

    def __init__(self, context: Context, proposer: Proposer, tokenizer: Tokenizer) -> None:
        self.levels: defaultdict[str, LevelCounters] = defaultdict(LevelCounters)  # totals over all requests, by proposer
        self._context = context
        self._proposer = proposer
        self._contexts = [context, *(level.context for level in levels_of(proposer))]
        self._tokenizer = tokenizer
        self._scheduler = Scheduler()
        self._requests: dict[int, _Request] = {}
        self._ready: list[Output] = []  # what a failed step leaves for the next one to return
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._requests or self._ready)

    def add_request(self, prompt: Tokens[int], params: SamplingParams) -> int:
        """Queue a prompt of token ids; returns the request's id.

        Raises ConfigError for an empty prompt, ids outside the vocabulary, or a prompt that leaves no room in the context.
        """
        self._check(prompt, params)
        request_id = self._next_id
        self._next_id += 1
        seq = Sequence.new(request_id, prompt, params)
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._tokenizer.eos_ids)
        text = StopText(self._tokenizer.stream(), params.stop)
        self._requests[request_id] = _Request(seq, text, RequestMeter(len(seq.tokens)), end_ids)
        self._scheduler.add(seq)
        return request_id

    def abort(self, request_id: int) -> Output | None:
        """End a request and free its slot; returns its last output, or None if it is unknown or has finished.

        A request that a failed step aborted has its last output taken back from what the next step would return.
        """
        request = self._requests.get(request_id)
        if request is None:
            waiting = [one for one in self._ready if one.request_id == request_id and one.finish_reason == "aborted"]
            self._ready = [one for one in self._ready if one not in waiting]
            return waiting[0] if waiting else None
        request.seq.finish_reason = "aborted"
        self._remove(request)
        return Output(request_id, "", [], [], "aborted", request.meter.stats())

    def step(self) -> list[Output]:
        """Run one round for every running request; returns what each gained.

        An exception, an interrupt included, aborts every request: a half-done step cannot be taken up again. The engine stays
        usable, and the next step returns the last outputs of those requests.
        """
        try:
            if not self._ready:
                self._step()
        except BaseException:
            self.abort_all()
            raise
        outputs, self._ready = self._ready, []
        return outputs

    def abort_all(self) -> None:
        """End every request; the next step returns their last outputs."""
        self._ready += [output for request_id in list(self._requests) if (output := self.abort(request_id))]

    def _step(self) -> None:
        for seq in self._scheduler.admit(self._context.num_free_slots):
            self._requests[seq.id].meter.num_cached_tokens = self._context.acquire(seq)
            self._proposer.begin(seq)
        seqs = list(self._scheduler.running)
        if not seqs:
            return
        before = [context.num_forwards for context in self._contexts]
        limits = [draft_limit(seq, self._context.capacity, len(self._contexts) > 1) for seq in seqs]
        rounds = speculate(self._context, self._proposer, seqs, limits)
        num_forwards = [context.num_forwards - number for context, number in zip(self._contexts, before, strict=True)]
        for seq, done in zip(seqs, rounds, strict=True):
            self._ready.append(self._commit(self._requests[seq.id], done, num_forwards))

    def _commit(self, request: _Request, done: Round, num_forwards: list[int]) -> Output:
        """Take a round's tokens one by one, as plain decoding would, up to the one that ends the request."""
        seq, params, text = request.seq, request.seq.params, ""
        new = done.verdict.tokens
        before = seq.num_output_tokens - len(new)
        num_taken, reason = 0, None
        while num_taken < len(new) and reason is None:
            token = new[num_taken]
            num_taken += 1
            if token in request.end_ids:
                reason = "stop"
            else:
                text += request.text.push(token)
                num_tokens = seq.num_prompt_tokens + before + num_taken
                if request.text.stopped:
                    reason = "stop"
                elif before + num_taken == params.max_tokens or num_tokens == self._context.capacity:
                    reason = "length"
        chosen = []
        if params.logprobs is not None:
            chosen = [logprobs(done.output.logits[i], new[i], params.logprobs) for i in range(num_taken)]
        self._count(request, done, num_taken, num_forwards)
        if reason is None:
            return Output(seq.id, text, new, chosen)
        if not request.text.stopped:
            text += request.text.finish()
            reason = "stop" if request.text.stopped else reason
        seq.finish(before + num_taken, reason)
        self._remove(request)
        return Output(seq.id, text, new[:num_taken], chosen, reason, request.meter.stats())

    def _count(self, request: _Request, done: Round, num_taken: int, num_forwards: list[int]) -> None:
        """Count a step. num_forwards: of the target, then of each draft model."""
        contexts = zip(num_forwards, self._contexts, strict=True)
        read_bytes = sum(number * context.read_bytes(request.seq) for number, context in contexts)
        request.meter.record_step(num_taken, num_forwards[0], read_bytes)
        for source, *counts in done.cycles:
            request.meter.record_round(source, *counts)
            self.levels[source].record(*counts)

    def _remove(self, request: _Request) -> None:
        self._scheduler.remove(request.seq)
        self._proposer.end(request.seq)
        self._context.release(request.seq)
        self._requests.pop(request.seq.id, None)

    def _check(self, prompt: Tokens[int], params: SamplingParams) -> None:
        vocab_size = self._context.backend.config.vocab_size
        if not len(prompt):
            raise ConfigError("the prompt is empty; give at least one token")
        if not all(0 <= token < vocab_size for token in prompt):
            raise ConfigError(f"prompt token ids must be in [0, {vocab_size}), got {min(prompt)} to {max(prompt)}")
        if len(prompt) >= self._context.capacity:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens and the context holds {self._context.capacity}, "
                "at least one of them generated; shorten the prompt or raise context_length"
            )
        for name, ids in (("logit_bias", list(params.logit_bias)), ("stop_token_ids", list(params.stop_token_ids))):
            if not all(0 <= token < vocab_size for token in ids):
                raise ConfigError(f"{name} ids must be in [0, {vocab_size}), got {min(ids)} to {max(ids)}")
        if sum(bias == float("-inf") for bias in params.logit_bias.values()) == vocab_size:
            raise ConfigError("logit_bias forbids every token of the vocabulary; leave at least one")
