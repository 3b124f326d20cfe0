"""Requests to outputs, one step at a time: admit, read prompts, speculate, finish the requests that are complete.

The engine never learns how drafts are made or how a backend computes. Any thread may call `check` and `prepare`. The rest is for
one thread at a time; several threads share an engine through `cpuspec.engine.shared`.
"""

import itertools
from bisect import bisect_right
from collections import abc, defaultdict
from dataclasses import dataclass, field

from cpuspec.backends import stop_forward
from cpuspec.checkpoints.adapters import AdapterSet
from cpuspec.engine.scheduler import Scheduler
from cpuspec.engine.text import StopText
from cpuspec.errors import ConfigError, CpuspecError, fault_of_one
from cpuspec.metrics import LevelCounters, Reads, RequestMeter, RequestStats, now_s
from cpuspec.sampling import TokenLogprobs, logprobs
from cpuspec.sequence import Sequence
from cpuspec.settings import SamplingParams
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Cycle
from cpuspec.speculation.proposer import LevelContext, Proposer
from cpuspec.speculation.round import Round, speculate
from cpuspec.text import Grammars, Tokenizer

_WAIT_S = 0.01  # of a step that has nothing to compute; commands of other threads wait as long

# A sequence begins if memory holds 512 further tokens of it and of each running one. If memory does not hold 64 of each, the latest
# one is preempted. The gap keeps a sequence from being preempted soon after it begins.
_TO_BEGIN, _TO_STAY = 512, 64

_SHARED_TOKENS = 1024  # the models divide memory by their bytes of this many tokens
_KEPT_PARTS = 32  # the limit of prefixes changes in steps of this part of the memory


@dataclass(slots=True)
class Output:
    """The tokens and the text that one step added to one request. The last output of a request has a finish_reason and its stats.

    text excludes the token that ended the request and everything from a stop string on; token_ids include them. token_texts: the
    text that each token added. Text that may begin a stop string, and half a character, come with a later token. token_sources: the
    level that drafted each token, "" for the target's own. cycles: the verifications of each round, the target's last.
    num_read_tokens: how many tokens of the prompt have been read, cached ones included, in outputs without tokens of requests with
    `shows_progress`. stop_reason: the stop string, or the id among `SamplingParams.stop_token_ids`, that ended the request; None
    for the model's own end. error: why a request ended with "error": a fault of its settings, its rows or its drafts.
    """

    request_id: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # one for each token if asked for
    finish_reason: str | None = None  # "stop", "length", "error", "aborted"
    stop_reason: str | int | None = None
    stats: RequestStats | None = None
    num_cached_tokens: int = 0  # prompt tokens that were not computed again; the same in each output of a request
    token_texts: list[str] = field(default_factory=list)
    token_sources: list[str] = field(default_factory=list)
    cycles: list[tuple[Cycle, ...]] = field(default_factory=list)
    num_read_tokens: int | None = None
    error: CpuspecError | None = None


def divide_memory(contexts: abc.Sequence[LevelContext], num_bytes: float) -> list[int]:
    """The part of `num_bytes` for each context, such that all can keep the same number of tokens."""
    sizes = [context.cache.bytes_of(_SHARED_TOKENS) for context in contexts]
    return [int(num_bytes * size / max(sum(sizes), 1)) for size in sizes]


@dataclass(frozen=True)
class RequestedAnswer:
    """One answer to compute, for token ids and params that `Engine.check` has passed.

    shown: special tokens whose names are part of the text, such as those that begin a tool call. shows_progress: whether outputs
    without tokens say how much of the prompt has been read (`Output.num_read_tokens`). prediction: token ids that the answer may
    repeat, such as those of a file that it edits. The drafters `ngram` and `suffix` copy from them; no answer depends on them.
    adapters: LoRA adapters that the target applies; None for those of the LLM's settings. apart, within: see `StopText`.
    """

    prompt: abc.Sequence[int]
    params: SamplingParams
    shown: abc.Set[int] = frozenset()
    shows_progress: bool = False
    prediction: abc.Sequence[int] = ()
    adapters: AdapterSet | None = None
    apart: abc.Sequence[tuple[str, str]] = ()
    within: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt with all that the engine needs to run it, made by `Engine.prepare`."""

    seq: Sequence
    text: StopText
    meter: RequestMeter
    end_ids: frozenset[int]
    max_length: int  # the most tokens of prompt and answer
    max_draft_tokens: int
    shows_progress: bool  # whether a step that reads a part of the prompt returns an output
    can_run_extra_steps: bool  # whether a forward may follow another at once: only the likeliest token counts


class Engine:
    """Runs requests over one target context with one proposer.

    A prompt is read in chunks beside the requests that generate (`Scheduler`), so that none of these waits for it.

    Requests run together while their keys, values and states, those of draft models included, fit into `max_bytes`; None for no
    limit. Prefixes of finished requests are dropped for them. If running requests grow beyond the limit, the latest ones are
    preempted: they wait before all others, and their tokens are read again. So the oldest one always goes on.
    most_tokens: of prompt and answer together, so that a single request fits.
    """

    def __init__(self, context: Context, proposer: Proposer, tokenizer: Tokenizer, max_bytes: int | None = None) -> None:
        self.levels: defaultdict[str, LevelCounters] = defaultdict(LevelCounters)  # totals over all ended requests, by proposer
        self._context = context
        context.slots.hidden_layers, context.applies_adapters = proposer.hidden_layers, True
        self._proposer = proposer
        self._contexts = [context, *(level.context for level in proposer.levels)]
        self._max_bytes, self._kept_part = max_bytes, _KEPT_PARTS
        self._hidden_bytes = 4 * len(proposer.hidden_layers) * context.backend.config.hidden_size  # of a token that a head reads
        self._most_hidden = context.capacity if proposer.most_hidden is None else proposer.most_hidden
        self.most_tokens = context.capacity
        if max_bytes is not None:
            self.most_tokens = bisect_right(range(context.capacity + 1), max_bytes, key=self.bytes_of) - 1
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer)
        self._scheduler = Scheduler(context.prompt_rows, context.backend.max_rows)
        self._requests: dict[int, Request] = {}
        self._ready: list[Output] = []  # outputs that a failed step leaves to the next one
        self._ids = itertools.count()
        # A forward that only reads prompts may be stopped by `hasten` for a shorter prompt. The next step then reads only prompts
        # that it can finish, and the next forward that only reads prompts runs to its end.
        self._num_stoppable_rows = 0  # rows of the running forward, if it may be stopped
        self._finishes_prompts = False  # whether the last step's forward was stopped
        self._may_stop = True  # whether the next forward may be stopped
        self._runs_extra_steps = False  # whether several forwards run at once

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._requests or self._ready)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot, for memory or for a prefix, those that were preempted among them. Any thread may ask."""
        return len(self._scheduler.waiting)

    def bytes_of(self, length: int, is_read: bool = False) -> int:
        """Bytes that a sequence of `length` tokens takes in all models.

        is_read: whether its prompt has been read. Until then, hidden states that wait for a draft head count, too.
        """
        waiting = 0 if is_read else min(length, self._most_hidden) * self._hidden_bytes
        return waiting + sum(context.cache.bytes_of(length) for context in self._contexts)

    def add_request(self, prompt: abc.Sequence[int], params: SamplingParams) -> int:
        """Queue a prompt of token ids; returns the request's id. Raises ConfigError like `check`."""
        self.check(prompt, params)
        request = self.prepare(RequestedAnswer(prompt, params))
        self.add(request)
        return request.seq.id

    def prepare(self, wanted: RequestedAnswer) -> Request:
        """Make the request of an answer that `check` has passed. Any thread may call this at any time: it changes nothing."""
        prompt, params = wanted.prompt, wanted.params
        of_drafts, of_answer = (self._grammars.constraint(params, prompt, wanted.within) for _ in range(2))
        seq = Sequence.new(next(self._ids), prompt, params, of_drafts, wanted.prediction, of_answer, wanted.adapters or ())
        seq.turns = self._tokenizer.turns(seq.tokens) if self._context.cache.states else ()
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._tokenizer.eos_ids)
        decoder = self._tokenizer.stream(params.skip_special_tokens, wanted.shown, prompt[-1])
        shows_stop = params.include_stop_str_in_output
        text = StopText(decoder, params.stop, params.min_tokens, shows_stop, wanted.apart, wanted.within)
        caches = [one.cache for one in self._contexts]
        meter = RequestMeter(len(seq.tokens), [one.bytes_per_token for one in caches], [one.state_bytes for one in caches])
        # The context's end limits drafts anyway.
        max_drafted = self._context.capacity if params.max_draft_tokens is None else params.max_draft_tokens
        max_length = min(self.most_tokens, len(seq.tokens) + params.max_tokens)
        can_run_extra_steps = seq.is_plain_greedy and params.logprobs is None and not params.stop
        return Request(seq, text, meter, end_ids, max_length, max_drafted, wanted.shows_progress, can_run_extra_steps)

    def check(self, prompt: abc.Sequence[int], params: SamplingParams) -> None:
        """Raise ConfigError for an empty prompt, ids outside the vocabulary, or a prompt that fills the context.

        Also for a grammar that cannot be compiled. Compiling a grammar that was not used lately may take seconds.
        """
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
        if self._max_bytes is not None and len(prompt) >= self.most_tokens:
            wanted, got = self.bytes_of(len(prompt) + 1) / 1e9, self._max_bytes / 1e9
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens, which take {wanted:.2f} GB with the first of the answer, and there are "
                f"{got:.2f} GB beside the weights, for {self.most_tokens} tokens; shorten the prompt, allow this process more "
                "memory, or draft without a model"
            )
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            ids = list(getattr(params, name))
            if not all(0 <= token < vocab_size for token in ids):
                raise ConfigError(f"{name} ids must be in [0, {vocab_size}), got {min(ids)} to {max(ids)}")
        if sum(bias == float("-inf") for bias in params.logit_bias.values()) == vocab_size:
            raise ConfigError("logit_bias forbids every token of the vocabulary; leave at least one")
        self._grammars.constraint(params, prompt)

    def has_compiled(self, params: SamplingParams) -> bool:
        """Whether the grammar of params is compiled already. Any thread may call this at any time."""
        return self._grammars.has_compiled(params)

    def add(self, request: Request) -> None:
        """Queue a prepared request."""
        self._requests[request.seq.id] = request
        self._scheduler.add(request.seq)

    def hasten(self, request: Request | None = None) -> None:
        """Interrupt a call of several forwards, and a forward that only reads prompts and would delay the request's shorter prompt.

        request: one that waits to be added. The rows of an interrupted prompt are read again, and the next forward that only reads
        prompts is not interrupted. Any thread may call this.
        """
        if self._runs_extra_steps or (request and len(request.seq.tokens) < self._num_stoppable_rows):
            stop_forward(self._context.backend)

    def abort(self, request_id: int) -> Output | None:
        """Abort a request and free its slot; returns its last output, or None if it is unknown or has finished.

        If a failed step has aborted the request, its last output is returned here instead of by the next step.
        """
        request = self._requests.get(request_id)
        if request is None:
            waiting = [one for one in self._ready if one.request_id == request_id and one.finish_reason == "aborted"]
            self._ready = [one for one in self._ready if one not in waiting]
            return waiting[0] if waiting else None
        return self._finish(request, Output(request_id, "", [], []), "aborted")

    def step(self) -> list[Output]:
        """Run one round for every request whose prompt has been read, and read parts of other prompts; returns outputs of requests.

        A step that only reads prompts returns none, unless a request shows its progress. What fails for one request ends that
        one. An exception of what all share, as a forward, and an interrupt abort every request, because a half-done step cannot be
        continued. The engine stays usable, and the next step returns the last outputs of those requests.
        """
        try:
            if not self._ready:
                begin_s = now_s()
                self._step()
                self._context.spent.add("step", now_s() - begin_s)
        except BaseException:
            self.abort_all()
            raise
        outputs, self._ready = self._ready, []
        return outputs

    def abort_all(self) -> None:
        """Abort every request; the next step returns their last outputs."""
        self._ready += [output for request_id in list(self._requests) if (output := self.abort(request_id))]

    def _step(self) -> None:
        if self._max_bytes is not None:
            self._preempt(self._max_bytes)
        self._admit()
        context = self._context
        seqs, chunks = self._scheduler.schedule(context.num_unfed, self._finishes_prompts)
        if not seqs and not chunks:
            if self._scheduler.waiting:
                context.slots.wait(_WAIT_S)
            return
        for one in self._contexts:
            one.slots.num_running = len(self._scheduler.running)
        requests, num_stopped = [self._requests[seq.id] for seq in seqs], context.num_stopped
        if not seqs and self._may_stop:
            self._num_stoppable_rows = sum(chunk.num_tokens for chunk in chunks)
        extra_steps, ends = self._extra_steps(requests, bool(chunks))
        self._runs_extra_steps = extra_steps > 0
        try:
            limits = list(map(self._limit, requests))
            rounds = speculate(context, self._proposer, seqs, limits, chunks, True, extra_steps, ends)
        finally:
            self._num_stoppable_rows, self._runs_extra_steps = 0, False
        self._finishes_prompts = context.num_stopped > num_stopped
        self._may_stop = not self._finishes_prompts if not seqs else self._may_stop
        reads = self.reads()
        for request, done in zip(requests, rounds, strict=True):
            try:
                self._ready.append(self._commit(request, done, reads))
            except BaseException as error:
                self._fail(request, error)
        for request, seq in [(self._requests[chunk.seq.id], chunk.seq) for chunk in chunks]:
            if request.shows_progress and len(seq.tokens) == seq.num_prompt_tokens:  # else it was preempted, and is read again
                num_read = len(seq.tokens) - 1 - context.num_unfed(seq)
                num_cached = request.meter.num_cached_tokens
                self._ready.append(Output(seq.id, "", [], [], num_cached_tokens=num_cached, num_read_tokens=num_read))

    def _admit(self) -> None:
        """Begin waiting requests while there are free slots and memory, first come, first served.

        A request whose prefix is being computed or read from the disk waits for that, and later ones may begin before it. A free
        slot and memory stay reserved for it.
        """
        context, taken = self._context, self._taken(_TO_BEGIN)
        for seq in list(itertools.islice(self._scheduler.waiting.values(), len(context.slots.free))):
            taken += self._bytes_with(seq, _TO_BEGIN)
            if self._max_bytes is not None and taken > self._max_bytes and self._scheduler.running:
                break
            try:
                self._begin(seq)
            except BaseException as error:
                self._fail(self._requests[seq.id], error)
        if self._max_bytes is not None:
            part = max(self._max_bytes - self._taken(_TO_STAY), 0) * _KEPT_PARTS // max(self._max_bytes, 1)
            if part != self._kept_part:
                shares = divide_memory(self._contexts, part / _KEPT_PARTS * self._max_bytes)
                for one, share in zip(self._contexts, shares, strict=True):
                    one.slots.limit(share)
                self._kept_part = part

    def _begin(self, seq: Sequence) -> None:
        """Give a waiting sequence a slot, unless its prefix comes first."""
        slots, meter = self._context.slots, self._requests[seq.id].meter
        if slots.awaits(seq) or slots.poll(seq) or (slots.taken and slots.moves(seq)):
            return
        self._scheduler.admit(seq)
        num_cached = slots.acquire(seq)
        self._proposer.begin(seq, num_cached - slots.taken[seq.id].num_hidden_kept)
        if not meter.has_begun:
            meter.num_cached_tokens = num_cached
            meter.begin(self.reads())

    def _bytes_with(self, seq: Sequence, num_more: int) -> int:
        """Bytes of a sequence with `num_more` further tokens, or with as many as it may have."""
        if self._max_bytes is None:
            return 0
        length = min(len(seq.tokens) + num_more, self._requests[seq.id].max_length)
        return self.bytes_of(length, is_read=not self._hidden_bytes or not self._scheduler.is_reading(seq))

    def _taken(self, num_more: int) -> int:
        """Bytes of all running sequences with `num_more` further tokens each."""
        waiting = sum(context.hidden_bytes for context in self._contexts) if self._hidden_bytes else 0
        return waiting + sum(self._bytes_with(seq, num_more) for seq in self._scheduler.running)

    def _preempt(self, max_bytes: int) -> None:
        """Let the sequences that began last wait until the running ones fit."""
        while len(self._scheduler.running) > 1 and self._taken(_TO_STAY) > max_bytes:
            seq = self._scheduler.running[-1]
            self._scheduler.preempt(seq)
            self._release(seq)

    def _limit(self, request: Request) -> int:
        """How many tokens may be drafted: with the round's own token they must not exceed `max_length`."""
        if len(self._contexts) > 1 and not request.seq.num_output_tokens:
            return 0  # the first token comes sooner if draft models read the prompt after it
        return min(request.max_length - len(request.seq.tokens) - 1, request.max_draft_tokens)

    def _extra_steps(self, requests: list[Request], reads: bool) -> tuple[int, list[int]]:
        """How many forwards may follow the next one in the same call, and the tokens after which none may.

        reads: whether the next one also reads prompts.
        """
        extra_steps = 0 if reads or self._scheduler.waiting else self._context.most_extra_steps(len(requests))
        ends: set[int] = set()
        for request in requests if extra_steps else ():
            if not request.can_run_extra_steps:
                return 0, []
            extra_steps = min(extra_steps, request.max_length - len(request.seq.tokens) - 1)
            ends |= request.end_ids
        return extra_steps, list(ends)

    def reads(self) -> Reads:
        """For each model, the target first: its forwards so far, and the bytes of weights that they read."""
        return [(context.num_forwards, context.weight_bytes) for context in self._contexts]

    def _commit(self, request: Request, done: Round, reads: Reads) -> Output:
        """Commit a round's tokens one by one, as plain decoding would, up to the one that ends the request."""
        seq, new, num_taken, reason, error = request.seq, done.verdict.tokens, 0, None, request.seq.error or done.error
        if error:
            return self._finish(request, Output(seq.id, request.text.finish(), [], []), "error", error)
        texts = [""] * len(new)
        before = len(seq.tokens) - len(new)
        for num_taken, token in enumerate(new, 1):
            if token in request.end_ids:
                reason = "stop"
                break
            texts[num_taken - 1] = request.text.push(token)
            if request.text.found is not None:
                reason = "stop"
                break
            if seq.answer_constraint:
                path = seq.tokens[seq.num_prompt_tokens : before + num_taken]
                if seq.answer_constraint.legal(path) is None:
                    reason = "stop" if seq.answer_constraint.accepts(path) else "error"
                    if reason == "error":
                        why = "the grammar leads nowhere here, or is too complex; simplify it"
                        if seq.params.bad_words or seq.params.allowed_token_ids:
                            why += ", or leave it more tokens than bad_words and allowed_token_ids do"
                        error = ConfigError(why)
                    break
            if before + num_taken == request.max_length:
                reason = "length"
                break
        num_top = seq.params.logprobs
        chosen = [] if num_top is None else [logprobs(done.logits(i), new[i], num_top) for i in range(num_taken)]
        request.meter.record_step(num_taken, reads, done.cycles, done.times)
        if reason and request.text.found is None:
            texts[num_taken - 1] += request.text.finish()
            reason = "stop" if request.text.found is not None else reason
        output = Output(seq.id, "".join(texts[:num_taken]), new[:num_taken], chosen)
        output.num_cached_tokens, output.token_texts = request.meter.num_cached_tokens, texts[:num_taken]
        output.token_sources, output.cycles = done.token_sources[:num_taken], [done.cycles] * done.times
        if reason is None:
            return output
        output.stop_reason = request.text.found
        if reason == "stop" and output.stop_reason is None and (last := new[num_taken - 1]) in seq.params.stop_token_ids:
            output.stop_reason = last if seq.params.ignore_eos or last not in self._tokenizer.eos_ids else None
        seq.finish(before + num_taken - seq.num_prompt_tokens, reason)
        return self._finish(request, output, reason, error)

    def _finish(self, request: Request, output: Output, reason: str, error: CpuspecError | None = None) -> Output:
        """Forget a request and free its slot; returns its last output, completed."""
        request.seq.finish_reason = reason
        self._scheduler.remove(request.seq)
        self._release(request.seq)
        if self._requests.pop(request.seq.id, None):
            for source, counters in request.meter.levels.items():
                self.levels[source] += counters
        output.finish_reason, output.error, output.stats = reason, error, request.meter.stats()
        output.num_cached_tokens = request.meter.num_cached_tokens
        return output

    def _release(self, seq: Sequence) -> None:
        """End a sequence's drafts and free its slot, whatever its drafter raises."""
        try:
            self._proposer.end(seq)
        except BaseException as error:
            fault_of_one(error)
        finally:
            self._context.slots.release(seq)

    def _fail(self, request: Request, error: BaseException) -> None:
        """End one request with what its part of a step raised, and no other. An interrupt is raised again."""
        fault = fault_of_one(error)
        self._ready.append(self._finish(request, Output(request.seq.id, "", [], []), "error", fault))
