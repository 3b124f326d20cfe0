"""The Python interface: a model by name, prompts or messages in, completions or streams out."""

import logging
import weakref
from collections import abc
from collections.abc import Generator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, overload

import numpy as np

from cpuspec.backends import BACKENDS, Backend, HeadBackend, check_backend, device_of, disk_reads, make_backend, memory_limit
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.adapters import AdapterSet
from cpuspec.checkpoints.download import resolve_model
from cpuspec.checkpoints.heads.head import final_norm
from cpuspec.checkpoints.recipes import recipe_of
from cpuspec.config import ModelConfig
from cpuspec.engine.account import round_parts
from cpuspec.engine.draft_spec import OpenedSpec, Target, build, build_chosen, check_spec, model_and_spec, open_spec, within_memory
from cpuspec.engine.embedding import EmbeddingJob
from cpuspec.engine.engine import Engine, Output, Request, RequestedAnswer, divide_memory
from cpuspec.engine.lora import LoadedAdapters, Lora, check_adapts
from cpuspec.engine.ranking import RankingJob, ranking_weight
from cpuspec.engine.scoring import ScoringJob
from cpuspec.engine.shared import Receiver, SharedEngine
from cpuspec.environment import default_prefix_cache_bytes
from cpuspec.errors import CacheError, ConfigError, CpuspecError
from cpuspec.formats import Format
from cpuspec.formats.kv import get_kv_format
from cpuspec.metrics import LevelCounters, LevelMemory, LevelReads, PrefixStats, RequestStats, RoundPart
from cpuspec.model.batch import F32
from cpuspec.platform import SYSTEM
from cpuspec.sampling import TokenLogprobs
from cpuspec.sequence import salt_of
from cpuspec.settings import AUTO, NO_DEFAULTS, POOLINGS, EngineConfig, SamplingDefaults, SamplingParams, SpecConfig, read_backend
from cpuspec.speculation.chosen import ChosenDrafts
from cpuspec.speculation.context import Context
from cpuspec.speculation.guarded import GuardedProposer
from cpuspec.speculation.planner.planner import PlannedDrafter, Planner
from cpuspec.speculation.prefix_files import PrefixDirectory
from cpuspec.speculation.prefix_queue import PrefixQueue
from cpuspec.speculation.proposer import LevelContext
from cpuspec.text import Tokenizer, make_tokenizer
from cpuspec.text.reasoning import stop_scope

_log = logging.getLogger(__name__)

Message = Mapping[str, Any]
Conversation = str | Seq[Message]
Prompt = str | Seq[int]
Params = SamplingParams | Seq[SamplingParams] | None
Variables = Mapping[str, Any] | None  # of a chat template, by name
Spec = str | SpecConfig | Mapping[str, Any] | None
Loras = Lora | Seq[Lora]  # of all prompts, or one each
_Settings = TypeVar("_Settings", EngineConfig, SamplingParams)


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt. Its names are those of vLLM's RequestOutput, and of the CompletionOutput in `outputs`.

    text: all that the model wrote, with reasoning and tool calls; the server's protocols split these (`server/parsing`).
    token_ids: the token that ended the answer included, which text leaves out.
    finish_reason: "stop" (an end token or a stop string), "length" (max_tokens or the context's end), or "error": then `error` says
    why. stop_reason: as `Output.stop_reason`. logprobs: one for each token if asked for, else empty. index: the number of this
    answer among the `n` answers to the prompt. `outputs` of the first one has all of them.
    prompt: its text; None for a prompt of token ids. prompt_logprobs: one for each token of the prompt if asked for, else None. The
    first one is None, as no token stands before it.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs]
    stats: RequestStats
    index: int = 0
    error: str | None = None
    stop_reason: str | int | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    others: tuple["Completion", ...] = ()

    @property
    def outputs(self) -> list["Completion"]:
        """All answers to the prompt."""
        return [self, *self.others]

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log-probabilities; None if they were not asked for."""
        return sum(one.logprob for one in self.logprobs) if self.logprobs else None


class Job(Protocol):
    """Other work than answers, done by steps of one forward each."""

    @property
    def is_done(self) -> bool:
        """Whether no step is left."""

    def step(self, max_rows: int | None = None) -> None:
        """Run one forward of at most `max_rows` tokens; None for as many as the job takes."""


class LLM:
    """A loaded model that answers. Several threads may call it at once: their requests run together, in one batch.

    Other threads change no answer. An interrupt in a step, or a forward that fails, ends the requests of all threads: their streams
    end as "aborted", and `generate` and `chat` raise CpuspecError. A forked child has the model, too, and none of the parent's
    requests. With another backend than numba, any use of it in the child raises BackendError.

    engine, backend, context, drafts: the parts that it is made of, for tools. Their calls are for the thread that runs the steps.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint,
        spec: Spec = None,
        backend: str = "numba",
        threads: int | None = None,
        *,
        settings: EngineConfig | None = None,
        **changes: Any,
    ) -> None:
        """Open and load a model.

        model: a recipe's or chain's name, a hub name as owner/name:QUANT, a GGUF file, a Hugging Face directory, or an opened
            Checkpoint.
        spec: how to draft, a text such as "ngram", a SpecConfig, or vLLM's speculative config as a dict; None for the chain's own
            or "auto". No answer depends on it.
        backend: its name, with settings of its own if need be, as "torch:cuda,dtype=bf16".
        threads: None = every usable core.
        settings, changes: an EngineConfig, and fields that replace its own, as in `LLM(model, context_length=4096)`;
            speculative_config is vLLM's name of spec.

        Raises CpuspecError for wrong settings, models and drafts; where possible before weights are loaded.
        """
        if threads is not None:
            changes["threads"] = threads
        spec = changes.pop("speculative_config", spec)
        backend, settings = read_backend(backend, _changed(settings or EngineConfig(), changes, "setting"))
        if isinstance(model, Checkpoint):
            spec = _read_spec(spec)
        elif isinstance(model, str | Path):
            model, spec = model_and_spec(str(model), None if spec is None else _read_spec(spec))
        else:
            raise ConfigError(f"model is a name, a path or an opened Checkpoint; got {type(model).__name__}")
        # A wrong setting, or a draft that does not fit, fails before gigabytes are loaded.
        check_spec(spec)
        check_backend(backend, settings)
        get_kv_format(settings.kv_format)
        checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(resolve_model(model), settings.mmap, adapts=True)
        tokenizer, context_length = make_tokenizer(checkpoint), _capacity(checkpoint.config, settings)
        opened = open_spec(spec, Target(checkpoint, checkpoint.config, tokenizer, backend, context_length, settings))
        self.name = checkpoint.name
        adapters = LoadedAdapters(checkpoint.config, self.name, settings.lora, settings.lora_modules, checkpoint.adapters)
        target = load_target(backend, checkpoint, within_memory(opened, checkpoint, settings))
        try:
            self._start(target, tokenizer, spec, settings, opened, checkpoint, adapters)
        except BaseException:
            target.close()
            raise

    @classmethod
    def from_backend(
        cls,
        backend: Backend,
        tokenizer: Tokenizer,
        spec: Spec = None,
        settings: EngineConfig | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> "LLM":
        """An LLM over a backend and a tokenizer that exist already, such as a user's own. `close` closes the backend.

        checkpoint: the one that the backend was made from, for drafts of the target's own weights and for sampling defaults.
        """
        llm, spec, settings = cls.__new__(cls), _read_spec(spec), settings or EngineConfig()
        name = backend.name if backend.name in BACKENDS else BACKENDS[0]
        context_length = _capacity(backend.config, settings)
        opened = open_spec(spec, Target(checkpoint, backend.config, tokenizer, name, context_length, settings))
        llm.name = checkpoint.name if checkpoint else backend.name
        beside = checkpoint.adapters if checkpoint else ()
        adapters = LoadedAdapters(backend.config, llm.name, settings.lora, settings.lora_modules, beside)
        llm._start(backend, tokenizer, spec, settings, opened, checkpoint, adapters)
        return llm

    def _start(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        spec: SpecConfig,
        settings: EngineConfig,
        opened: OpenedSpec,
        checkpoint: Checkpoint | None,
        adapters: LoadedAdapters,
    ) -> None:
        self.adapters = adapters
        if adapters.names:
            check_adapts(backend)
        context = Context(backend, settings.max_sequences, _capacity(backend.config, settings), prompt_rows=settings.prompt_rows)
        proposer = build(opened, context)
        self.tokenizer = tokenizer
        self.config = backend.config
        self.spec = spec
        self.sampling_defaults = _sampling(checkpoint)  # of its files and its recipe, with remarks on ignored values
        self.threads = backend.threads
        self.row_invariant = backend.row_invariant
        self.context_length = context.capacity
        self.max_sequences = settings.max_sequences
        self.pooling = checkpoint.pooling if checkpoint else ""  # as `Checkpoint.pooling`
        self.ranker = checkpoint.ranker if checkpoint else None  # as `Checkpoint.ranker`
        self._ranking_weight = cache(partial(ranking_weight, checkpoint, tokenizer))
        self.remarks = checkpoint.remarks if checkpoint else ()  # as `Checkpoint.remarks`
        named = (checkpoint.quantization or checkpoint.main_format.upper()) if checkpoint else ""
        self.quantization = named if settings.quantization == "file" else settings.quantization.upper()  # for people
        self.num_parameters = sum(prod(one.shape) for one in checkpoint.tensors.values()) if checkpoint else 0
        self._final_norm = final_norm(checkpoint) if checkpoint else None
        self.backend = backend
        self.drafts = proposer.levels  # the models that draft, the cheapest first
        self._planner = proposer if isinstance(proposer, Planner) else None
        self.context = context
        self._contexts: list[tuple[str, LevelContext]] = [(draft.name, draft.context) for draft in self.drafts]
        self._contexts.append(("target", context))
        self._choose = partial(build_chosen, default=proposer, opened=opened, target=self.context)
        chosen = ChosenDrafts(proposer, self._choose)
        self._guard = GuardedProposer(chosen, self.context, settings.plain_on_draft_error)
        contexts = [one for _, one in self._contexts]
        max_bytes = _bytes_left(contexts, settings) if device_of(backend) == "cpu" else None  # else keys and values lie elsewhere
        self.engine = Engine(self.context, self._guard, tokenizer, max_bytes)
        if self.engine.most_tokens < self.context_length:
            _warn_of_long_contexts(self.engine, self.context_length, contexts)
        self._prefix_queue = _keep_prefixes(contexts, settings)
        self._shared = SharedEngine(self.engine, all(one.backend.survives_fork for one in contexts))
        # If it is dropped without `close`, or the process exits, no step may outlive the memory that it uses.
        weakref.finalize(self, self._shared.close)

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The sampling that the model's files, or else its recipe, recommend; greedy if they recommend none.

        It is never applied by itself: `generate`, `chat` and `stream` without params are greedy. To change a field:
        `dataclasses.replace(llm.default_sampling_params, max_tokens=100)`.
        """
        return self.sampling_defaults.under({})

    def load_adapter(self, path: str | Path, name: str = "", scale: float = 0.0, replaces: bool = False) -> None:
        """Read a LoRA adapter, a directory of PEFT or a GGUF file of llama.cpp, for requests that name it in `lora_request`.

        name: by default that of its file. scale: for requests that name no adapter; 0 leaves it out of these. replaces: whether it
        replaces an adapter of the same name.
        Raises ConfigError, CheckpointError for an adapter of another model, and BackendError if the backend applies none.
        """
        check_adapts(self.backend)
        self.adapters.load(Path(path), name, scale, replaces)

    def adapter_set(self, lora: Lora = None) -> AdapterSet:
        """The adapters of a request that names `lora`; for None those that this LLM applies by itself."""
        if lora is not None:
            check_adapts(self.backend)
        found = self.adapters.chosen(lora)
        return self.adapters.default if found is None else found

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: Params = None, *, lora_request: Loras = None, **settings: Any
    ) -> list[Completion]:
        """Continue raw prompts, texts or token ids; always a list, one for each prompt, with its `n` answers as `outputs`.

        params: for all prompts, or one for each; None is greedy. settings: fields of `SamplingParams` that replace those of params,
        as in `generate("a", max_tokens=8)`. lora_request: adapters, for all prompts or for each (`cpuspec.engine.lora.Lora`): a
        name, {name: scale}, {} for none, or vLLM's LoRARequest; by default those of the LLM's `lora`. Raises ConfigError for
        prompts that cannot run, before any runs.
        """
        listed = _listed(prompts)
        each = _read_params(params, settings, len(listed))
        ids = [self._prompt_ids(prompt, one.parse_special) for prompt, one in zip(listed, each, strict=True)]
        return self._complete(ids, each, self._adapter_sets(lora_request, len(listed)), [_text_of(prompt) for prompt in listed])

    @overload
    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Seq[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Variables = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
        lora_request: Loras = None,
        **settings: Any,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Seq[Seq[Message]],
        params: Params = None,
        *,
        tools: Seq[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Variables = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
        lora_request: Loras = None,
        **settings: Any,
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Conversation | Seq[Seq[Message]],
        params: Params = None,
        *,
        tools: Seq[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Variables = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
        lora_request: Loras = None,
        **settings: Any,
    ) -> Completion | list[Completion]:
        """Answer a conversation (a list of messages, each with role and content) through the model's chat template.

        A text is a user's message. A content may be a list of parts with texts. Returns a Completion, or a list of them for a list
        of conversations. params, settings, lora_request: as in `generate`. tools: functions in OpenAI's form, for the template; a
        call is part of the answer's text, as the model writes it. chat_template_kwargs: variables of the template, such as
        {"enable_thinking": False}. continue_final_message: whether the answer continues the last message's text. Stop strings count
        in content only, not in reasoning, where the text shows the marks around it.
        """
        variables = dict(chat_template_kwargs or {}) | ({"tools": list(tools)} if tools else {})
        how = {"add_generation_prompt": add_generation_prompt, "continues": continue_final_message}
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if _is_conversation(messages):
            prompt, sets = self._prompt_ids(messages, variables=variables, **how), self._adapter_sets(lora_request, 1)
            return self._complete([prompt], _read_params(params, settings, 1), sets, variables=variables)[0]
        if not isinstance(messages, list | tuple) or not all(map(_is_conversation, messages)):
            raise ConfigError(
                f"messages are a text, a list of messages such as {{'role': 'user', 'content': 'hello'}}, or a list of such lists; "
                f"got {repr(messages)[:80]}"
            )
        prompts = [self._prompt_ids(conversation, variables=variables, **how) for conversation in messages]
        sets = self._adapter_sets(lora_request, len(prompts))
        return self._complete(prompts, _read_params(params, settings, len(prompts)), sets, variables=variables)

    def stream(
        self,
        prompt: Prompt | Seq[Message],
        params: SamplingParams | None = None,
        *,
        shown: abc.Set[int] = frozenset(),
        chat_template_kwargs: Variables = None,
        chat_template: str | None = None,
        lora_request: Lora = None,
        **settings: Any,
    ) -> Generator[Output]:
        """Yield one output a step; the last one has finish_reason and stats.

        Prompt and params are checked at once; the request starts with the first `next`. If the generator is closed, or its loop is
        left, the request is aborted; its figures are then in `aborted_stats`. A stream is for one thread at a time, and for one
        answer. params, settings: as in `generate`. shown: special tokens whose names are part of the text. chat_template_kwargs: as
        in `chat`. chat_template: the template that made token ids; stop strings then count as in `chat`. Raises CpuspecError after
        the last output of a request that ended with an error.
        """
        (one,) = _read_params(params, settings, 1)
        if one.n != 1:
            raise ConfigError(f"a stream gives one answer, and n is {one.n}; begin a stream for each, or call generate")
        if one.prompt_logprobs is not None:
            raise ConfigError("a stream tells nothing of its prompt; leave out prompt_logprobs, or call generate or score")
        self._shared.aborted_stats = None
        ids, adapters = self._prompt_ids(prompt, one.parse_special, chat_template_kwargs), self.adapter_set(lora_request)
        self.check(ids, one)
        if one.stop and _is_conversation(prompt):
            chat_template = self.tokenizer.chat_template_for(chat_template_kwargs or {})
        apart, within = stop_scope(self.tokenizer, chat_template, ids, shown) if chat_template and one.stop else ([], "")
        return self._stream(RequestedAnswer(ids, one, shown, adapters=adapters, apart=apart, within=within))

    def embed(
        self, prompts: Prompt | Seq[Prompt], pooling: str | None = None, dimensions: int | None = None, lora_request: Lora = None
    ) -> F32:
        """Embeddings of texts or token ids, [n, dimensions], each of length one; `embedding_job` says how."""
        job = self.embedding_job(prompts, pooling, dimensions, self.adapter_set(lora_request))
        self._run(job)
        return job.embeddings()

    def score(self, prompts: Prompt | Seq[Prompt], num_top: int = 0, lora_request: Lora = None) -> list[list[TokenLogprobs]]:
        """For each text or token ids the log-probabilities of its tokens without the first; with each the `num_top` likeliest.

        Raises ConfigError for prompts that cannot run.
        """
        job = self.scoring_job(prompts, num_top, self.adapter_set(lora_request))
        self._run(job)
        return job.scores()

    def rank(self, query: str, documents: Seq[str]) -> list[float]:
        """How well each document answers the query; `ranking_job` says how."""
        job = self.ranking_job([(query, one) for one in documents])
        self._run(job)
        return job.scores()

    def _run(self, job: Job) -> None:
        while not job.is_done:
            self.job_step(job)
            if self.engine.has_work:  # of other threads, which would wait until all is read
                self._shared.step()

    def embedding_job(
        self,
        prompts: Prompt | Seq[Prompt],
        pooling: str | None = None,
        dimensions: int | None = None,
        adapters: AdapterSet | None = None,
    ) -> EmbeddingJob:
        """The work of `embed`, for a program that has other work between its steps. `job_step` runs one.

        pooling: "last", "mean" or "cls"; None for that of the model's files. dimensions: how many leading numbers of an embedding
        are kept. Raises ConfigError for prompts that cannot run, and if neither the model nor the caller names a pooling.
        """
        if self._final_norm is None:
            raise ConfigError("this LLM was made of a backend alone, and embeddings need its checkpoint; give it to from_backend")
        if not (pooling := pooling or self.pooling):
            raise ConfigError(
                f"{self.name} was trained to write, and its files name no pooling for embeddings; use a model that makes "
                f"embeddings, such as Qwen3-Embedding, or choose a pooling: {', '.join(POOLINGS)}"
            )
        ids = self._checked_ids(prompts, parse_special=False)
        used = self.adapters.default if adapters is None else adapters
        return EmbeddingJob(self.backend, self._final_norm, ids, pooling, dimensions, self.max_sequences, used)

    def ranking_job(
        self, pairs: Seq[tuple[str, str]], pooling: str | None = None, adapters: AdapterSet | None = None
    ) -> RankingJob:
        """The work of `rank` for pairs of a query and a document, as `embedding_job` is that of `embed`.

        A model that ranks, such as Qwen3-Reranker, gives the probability that the document answers the query. A model that makes
        embeddings gives the cosine of the two (pooling: as in `embedding_job`). Raises ConfigError for other models, and for pairs
        that cannot run.
        """
        if self.ranker is None:
            texts = {text: number for number, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
            ids = [self.tokenizer.encode(text) for text in texts]
            numbers = [(texts[query], texts[document]) for query, document in pairs]
            return RankingJob(self.embedding_job(ids, pooling, None, adapters), ids, numbers, None)
        form = self.ranker.prompt
        ids = [self.tokenizer.encode_filled(form, {"query": query, "document": document}) for query, document in pairs]
        numbers = [(number, number) for number in range(len(pairs))]
        return RankingJob(self.embedding_job(ids, "last", None, adapters), ids, numbers, self._ranking_weight())

    def scoring_job(
        self, prompts: Prompt | Seq[Prompt], num_top: int = 0, adapters: AdapterSet | None = None, cache_salt: str | None = None
    ) -> ScoringJob:
        """The work of `score`, as `embedding_job` is that of `embed`.

        cache_salt: of later requests that may use the texts as cached prefixes; None for no such requests.
        """
        used = self.adapters.default if adapters is None else adapters
        keep = None if cache_salt is None else partial(self.context.slots.insert_rows, salt=salt_of(cache_salt, used))
        return ScoringJob(self.backend, self._checked_ids(prompts), num_top, used, keep)

    def _checked_ids(self, prompts: Prompt | Seq[Prompt], parse_special: bool = True) -> list[list[int]]:
        ids = [self._prompt_ids(prompt, parse_special) for prompt in _listed(prompts)]
        for tokens in ids:
            self.engine.check(tokens, SamplingParams())
        return ids

    def job_step(self, job: Job) -> None:
        """Run one forward of the job between two steps, a short one where answers wait. Raises ConfigError for a closed LLM."""
        with self._shared.exclusive():
            self._shared.check_open()
            job.step(self.context.prompt_rows if self.engine.has_work else None)

    def prepare(self, wanted: RequestedAnswer) -> Request:
        """Check an answer's prompt and params, and make all that it needs to run. Any thread may call this at any time.

        A long prompt, and a grammar that was not used lately, may take seconds. Raises as `check` does.
        """
        self.check(wanted.prompt, wanted.params)
        return self._request(wanted)

    def _request(self, wanted: RequestedAnswer) -> Request:
        return self.engine.prepare(replace(wanted, adapters=self.adapters.default) if wanted.adapters is None else wanted)

    def submit(self, wanted: RequestedAnswer | Request, receiver: Receiver) -> int:
        """Queue an answer for a program with an event loop, whose own thread calls `step`; returns the request's id.

        `check` or `prepare` must have passed the prompt and the params. receiver: called with each output by the thread that runs
        the step. It must neither wait nor raise. Raises ConfigError for a closed LLM.
        """
        return self._shared.submit(wanted if isinstance(wanted, Request) else self._request(wanted), receiver)

    def abort(self, request_id: int) -> None:
        """Abort a request of `submit`, before the next step. Its receiver is not called any more."""
        self._shared.abort(request_id)

    def step(self) -> bool:
        """Run one step for all requests; returns whether there is more to do.

        An exception aborts every running request: their receivers get a last output, "aborted", in the next step.
        """
        return self._shared.step()

    def check(self, prompt: Seq[int], params: SamplingParams) -> None:
        """Raise ConfigError for a prompt or params that this model cannot run, and for a closed LLM.

        A grammar that was not used lately is compiled, which may take seconds. Any thread may call this at any time.
        """
        self._shared.check_open()
        if params.draft is not None:
            self._choose(params.draft)
        self.engine.check(prompt, params)

    @property
    def levels(self) -> dict[str, LevelCounters]:
        """Drafted and accepted tokens of each drafter, over all requests that have ended."""
        return dict(self.engine.levels)

    @property
    def num_draft_failures(self) -> int:
        """Requests that went on without drafts because their drafter failed; 0 unless `plain_on_draft_error` is set."""
        return self._guard.num_failures if self._guard else 0

    @property
    def aborted_stats(self) -> RequestStats | None:
        """The figures of the request that was aborted last, because its stream was closed or interrupted."""
        return self._shared.aborted_stats

    def memory(self) -> list[LevelMemory]:
        """The memory of each model: draft models first, beginning with the cheapest, then the target."""
        with self._shared.exclusive():
            return [
                LevelMemory(name, context.backend.weight_bytes, context.backend.shared_bytes, context.slots.kv_bytes)
                for name, context in self._contexts
            ]

    def reads(self) -> list[LevelReads]:
        """The forwards of each model so far and the weights that they read, in the order of `memory`."""
        return [
            LevelReads(name, context.num_forwards, context.weight_bytes, disk_reads(context.backend))
            for name, context in self._contexts
        ]

    def prefix_stats(self) -> list[PrefixStats]:
        """The figures of each model's prefix cache, in the order of `memory`."""
        with self._shared.exclusive():
            return [context.slots.stats(name) for name, context in self._contexts]

    def save_prefix(self, prompt: Prompt | Seq[Message], path: str | Path, cache_salt: str = "") -> int:
        """Save the cached part of a prompt, the target's keys and values, to a file; returns its number of tokens.

        cache_salt: of the requests that computed it. Raises CacheError if no part is cached, the file cannot be written, or the
        backend's cache cannot be saved.
        """
        tokens = self._prompt_ids(prompt)
        self._check_unadapted()
        with self._shared.exclusive():
            write = self.context.slots.prefix_writer(tokens, Path(path), cache_salt)
        try:
            return write()  # beside steps
        except OSError as error:
            raise CacheError(f"{path} cannot be written: {error.strerror or error}") from error

    def restore_prefix(self, path: str | Path, cache_salt: str = "") -> int:
        """Put a file of `save_prefix` into the prefix cache, for prompts that begin with its tokens; returns how many these are.

        cache_salt: of the requests that may use it. Raises CacheError for a file that is damaged, or of another model, KV format,
        processor or version.
        """
        self._shared.check_open()
        part = self.context.slots.read_prefix(Path(path))  # beside steps
        self._check_unadapted()
        with self._shared.exclusive():
            return self.context.slots.insert_prefix(part, cache_salt)

    def _check_unadapted(self) -> None:
        if self.adapters.default:
            raise CacheError("a file of a prefix does not say which adapters computed it; use prefix_cache_dir, whose files do")

    def forget_prefixes(self, waits: bool = True) -> None:
        """Empty the prefix cache of every model, on the disk, too. waits: whether to wait for the disk, 30 seconds at most."""
        self._shared.check_open()
        with self._shared.exclusive():
            for _, context in self._contexts:
                context.slots.forget()
        if self._prefix_queue and waits:
            self._prefix_queue.flush()

    def explain(self) -> list[PlannedDrafter]:
        """For each drafter the figures from which "auto" decides, and its drafts so far; empty for other specs."""
        if not self._planner:
            return []
        with self._shared.exclusive():
            return self._planner.explain()

    def round_parts(self) -> list[RoundPart]:
        """The parts of the time of all steps so far: reading prompts, drafting, verifying, and the rest."""
        with self._shared.exclusive():
            return round_parts(self.context, self.drafts, self._planner)

    def close(self) -> None:
        """Release the models as soon as no step runs. Further calls do nothing; any other use then raises ConfigError.

        With a `prefix_cache_dir`, the prefixes in memory are written there first, within half a minute.
        """
        try:
            if not self._shared.closed:
                self._shared.close()
                if self._planner:  # no step waits for a disk
                    self._planner.costs.keep()
                for _, context in self._contexts:
                    context.slots.spill()
                if self._prefix_queue:
                    self._prefix_queue.close()
        finally:
            for _, context in self._contexts:
                context.backend.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._shared.closed else ""
        shape = f"{self.config.architecture}, {self.config.num_layers} layers, context_length={self.context_length}"
        return f"<LLM {self.name!r} on {self.backend.name}: {shape}, spec={str(self.spec)!r}, threads={self.threads}{state}>"

    def _adapter_sets(self, wanted: Loras, num_prompts: int) -> list[AdapterSet]:
        """Of each prompt. Raises ConfigError as `adapter_set` does."""
        each = list(wanted) if isinstance(wanted, list | tuple) else [cast(Lora, wanted)] * num_prompts
        if len(each) != num_prompts:
            raise ConfigError(f"got {len(each)} lora_requests for {num_prompts} prompts; give one for all, or one each")
        return [self.adapter_set(one) for one in each]

    def _complete(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        sets: list[AdapterSet],
        texts: Seq[str | None] | None = None,
        variables: Variables = None,
    ) -> list[Completion]:
        """texts: of the prompts; None to make them of the ids. variables: of the chat template that made them."""
        request_ids: list[int] = []
        for prompt, one in zip(prompts, params, strict=True):
            self.check(prompt, one)
        scores = self._prompt_scores(prompts, params, sets)
        try:
            for prompt, one, adapters in zip(prompts, params, sets, strict=True):
                template = self.tokenizer.chat_template_for(variables) if variables is not None and one.stop else None
                apart, within = stop_scope(self.tokenizer, template, prompt) if template else ([], "")
                for answer in answer_params(one):
                    wanted = RequestedAnswer(prompt, answer, adapters=adapters, apart=apart, within=within)
                    request_ids.append(self._shared.submit(self._request(wanted)))
            outputs = [list(self._shared.outputs(request_id)) for request_id in request_ids]
        finally:
            for request_id in request_ids:
                self._shared.abort(request_id)
        errors = [parts[-1].error for parts in outputs]
        if errors and errors[0] is not None and None not in errors:
            raise errors[0]
        found, left = [], iter(outputs)
        for number, (ids, one) in enumerate(zip(prompts, params, strict=True)):
            text = self.tokenizer.decode(ids, skip_special=False) if texts is None else texts[number]
            first, *others = [
                replace(_completion(next(left), index), prompt=text, prompt_token_ids=ids, prompt_logprobs=scores[number])
                for index in range(one.n)
            ]
            found.append(replace(first, others=tuple(others)))
        return found

    def _prompt_scores(
        self, prompts: list[list[int]], params: list[SamplingParams], sets: list[AdapterSet]
    ) -> list[list[TokenLogprobs | None] | None]:
        """`Completion.prompt_logprobs` of each prompt."""
        found: list[list[TokenLogprobs | None] | None] = [None] * len(prompts)
        for number, (prompt, one, adapters) in enumerate(zip(prompts, params, sets, strict=True)):
            if one.prompt_logprobs is not None:
                self._run(job := self.scoring_job([prompt], one.prompt_logprobs, adapters, one.cache_salt))
                found[number] = [None, *job.scores()[0]]
        return found

    def _stream(self, wanted: RequestedAnswer) -> Generator[Output]:
        request_id = self._shared.submit(self._request(wanted))
        try:
            for output in self._shared.outputs(request_id):
                yield output
                if output.error:
                    raise output.error
        finally:
            self._shared.abort(request_id)

    def _prompt_ids(self, prompt: Any, parse_special: bool = True, variables: Variables = None, **how: bool) -> list[int]:
        """Token ids of a text, of ids, or of a conversation. variables, how: of `Tokenizer.encode_chat`."""
        self._shared.check_open()
        if isinstance(prompt, Mapping):  # vLLM's spelling
            prompt = next((prompt[name] for name in ("prompt_token_ids", "prompt") if prompt.get(name) is not None), prompt)
        if isinstance(prompt, str):
            ids = self.tokenizer.encode_prompt(prompt, parse_special)
        elif _is_conversation(prompt):
            ids = self.tokenizer.encode_chat([_as_text(message) for message in prompt], variables=variables, **how)
        elif _is_ids(prompt) or (isinstance(prompt, list | tuple) and not prompt):
            ids = [int(token) for token in prompt]
        else:
            raise ConfigError(f"a prompt is a text, a list of token ids, or a list of messages; got {repr(prompt)[:80]}")
        if ids:
            return ids
        if self.tokenizer.bos_id is None:
            raise ConfigError("the prompt is empty and this model has no beginning-of-text token to start from; give some text")
        return [self.tokenizer.bos_id]


def load_target(backend: str, checkpoint: Checkpoint, settings: EngineConfig) -> HeadBackend:
    """A backend with a target's weights, quantized at load where `EngineConfig.quantization` names a type.

    Raises BackendError for an unknown backend, ConfigError for an unknown type, FormatError where a value does not fit a format.
    """
    casts: Mapping[str, Format] = {}
    if settings.quantization != "file":
        from cpuspec.quantize.cast import quantized  # imports numba

        casts = quantized(checkpoint, settings.quantization)
    return make_backend(backend, checkpoint, settings, casts=casts)


def _listed(prompts: Prompt | Seq[Prompt]) -> list[Any]:
    """A list of prompts, of one prompt or several. Raises ConfigError."""
    if not isinstance(prompts, str | list | tuple | np.ndarray | Mapping):
        raise ConfigError(f"prompts are texts or lists of token ids, one or a list of them; got {type(prompts).__name__}")
    return [prompts] if isinstance(prompts, str | Mapping) or _is_ids(prompts) else list(prompts)


def _text_of(prompt: Any) -> str | None:
    """The text of a prompt, or None if it is no text."""
    given = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return given if isinstance(given, str) else None


def _as_text(message: Message) -> dict[str, Any]:
    """A message with one text as its content. The texts of a list of parts, as in OpenAI's protocol, become lines of it."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    if any(not isinstance(part, Mapping) or not isinstance(part.get("text"), str) for part in content):
        raise ConfigError(
            "a message's content is a text, or a list of parts {'type': 'text', 'text': ...}; this model reads no others"
        )
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _read_params(params: Params, settings: dict[str, Any], num_prompts: int) -> list[SamplingParams]:
    """Params for each prompt. Raises ConfigError for other types than SamplingParams, and for unknown fields."""
    if params is None:
        params = SamplingParams()
    each = list(params) if isinstance(params, list | tuple) else [cast(SamplingParams, params)] * num_prompts
    if wrong := [type(one).__name__ for one in each if not isinstance(one, SamplingParams)]:
        raise ConfigError(
            f"params are SamplingParams, one for all prompts or a list with one for each; got {wrong[0]}. "
            "Fields can be given by name, too, as max_tokens=8"
        )
    if len(each) != num_prompts:
        raise ConfigError(f"got {len(each)} sampling params for {num_prompts} prompts; give one for all, or one each")
    return [_changed(one, settings, "sampling setting") for one in each]


def _changed(settings: _Settings, changes: dict[str, Any], kind: str) -> _Settings:
    """The settings with other values in some fields. Raises ConfigError for unknown fields."""
    known = [field.name for field in fields(settings)]
    if unknown := next((name for name in changes if name not in settings.__dataclass_fields__), None):
        raise ConfigError(f"there is no {kind} {unknown!r}; wanted one of {', '.join(known)}")
    return replace(settings, **changes) if changes else settings


def answer_params(params: SamplingParams) -> list[SamplingParams]:
    """Params for each of the `n` answers. Their seeds count up from the given one."""
    if params.n == 1:
        return [params]
    return [replace(params, n=1, seed=None if params.seed is None else params.seed + index) for index in range(params.n)]


def _completion(parts: list[Output], index: int) -> Completion:
    last = parts[-1]
    assert last.finish_reason is not None, "the last output of a request has a finish reason"
    if last.finish_reason == "aborted":
        raise CpuspecError("this answer was broken off when a call of another thread was interrupted or failed; ask again")
    assert last.stats is not None, "the last output of a request has stats"
    return Completion(
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        finish_reason=last.finish_reason,
        logprobs=[one for part in parts for one in part.logprobs],
        stats=last.stats,
        index=index,
        stop_reason=last.stop_reason,
        error=None if last.error is None else str(last.error),
    )


def _sampling(checkpoint: Checkpoint | None) -> SamplingDefaults:
    """Sampling defaults of a checkpoint: its own before its recipe's."""
    if checkpoint is None:
        return NO_DEFAULTS
    recipe = recipe_of(checkpoint.path)
    return checkpoint.sampling.over(recipe.sampling) if recipe else checkpoint.sampling


def _read_spec(spec: Spec) -> SpecConfig:
    if spec is None:
        return AUTO
    if not isinstance(spec, str | SpecConfig | Mapping):
        raise ConfigError(f"spec is a text such as 'ngram' or 'auto,self:mxfp4', a SpecConfig, or None; got {spec!r}")
    return SpecConfig.read(spec)


def _capacity(config: ModelConfig, settings: EngineConfig) -> int:
    """The most tokens of a sequence."""
    wanted = settings.context_length or config.context_length
    if wanted < 2:
        raise ConfigError(f"context_length must be at least 2, for a token of the prompt and one of the answer; got {wanted}")
    if wanted > config.context_length:
        raise ConfigError(f"context_length must be at most {config.context_length}, what this model was trained for; got {wanted}")
    return wanted


_OWN_BYTES = 250 * 10**6  # about what Python, its libraries and compiled kernels take


def _weight_bytes(contexts: list[LevelContext]) -> int:
    """Bytes of all models' weights; shared ones count once."""
    return sum(context.backend.weight_bytes - context.backend.shared_bytes for context in contexts)


def _bytes_left(contexts: list[LevelContext], settings: EngineConfig) -> int | None:
    """Bytes that sequences may take. None if the memory is unknown, or if weights exceed it and are read again and again."""
    usable, weights, limit = SYSTEM.memory().usable, _weight_bytes(contexts), memory_limit(settings.memory)
    spare = sum(context.cache.bytes_per_slot for context in contexts)  # a forward of many rows also writes states elsewhere
    left = 0 if usable is None else usable - spare - (weights if limit is None else min(weights, limit))
    return max(left - _OWN_BYTES, left // 2) if left > 0 else None


def _warn_of_long_contexts(engine: Engine, length: int, contexts: list[LevelContext]) -> None:
    """Warn that answers end before the context does, because a request that fills it needs more memory than there is."""
    _log.warning(
        "%d tokens, this model's context, take %.2f GB besides %.2f GB of weights, and this process may use %.2f GB: "
        "a prompt and its answer end at %d tokens, as --context-length %d would have it",
        length, engine.bytes_of(length) / 1e9, _weight_bytes(contexts) / 1e9, (SYSTEM.memory().usable or 0) / 1e9,
        engine.most_tokens, engine.most_tokens,
    )  # fmt: skip


def _keep_prefixes(contexts: list[LevelContext], settings: EngineConfig) -> PrefixQueue | None:
    """Divide the memory of the prefix cache among the models; returns the queue of its directory, if there is one."""
    queue = None
    if settings.prefix_cache_dir not in (None, "", "none"):
        queue = PrefixQueue(PrefixDirectory(Path(settings.prefix_cache_dir), int(settings.prefix_disk_gb * 1e9)))
    weights = _weight_bytes(contexts) if settings.memory == "auto" else 0  # else experts stay on the disk
    gb = settings.prefix_cache_gb
    num_bytes = default_prefix_cache_bytes(weights) if gb is None else gb * 1e9
    for context, share in zip(contexts, divide_memory(contexts, num_bytes), strict=True):
        is_kept = gb is not None or context.backend.row_invariant
        context.slots.keep(share if is_kept else 0, queue)
    return queue


def _is_ids(prompt: Any) -> bool:
    listed = isinstance(prompt, list | tuple | np.ndarray) and len(prompt) > 0
    return listed and all(isinstance(token, int | np.integer) and not isinstance(token, bool) for token in prompt)


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and all(isinstance(message, Mapping) for message in prompt)
