"""The Python interface: a model by name, prompts or messages in, completions or streams out."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from cpuspec.backends import BACKENDS, Backend, check_backend, make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.download import resolve_model
from cpuspec.checkpoints.recipes import model_and_spec, recipe_of
from cpuspec.config import AUTO, NO_DEFAULTS, EngineConfig, ModelConfig, SamplingDefaults, SamplingParams, SpecConfig
from cpuspec.engine.engine import Engine, Output
from cpuspec.errors import ConfigError, CpuspecError
from cpuspec.formats.kv import get_kv_format
from cpuspec.metrics import LevelMemory, RequestStats
from cpuspec.sampling import TokenLogprobs
from cpuspec.spec.context import Context
from cpuspec.spec.levels import Host, check_spec, prepare
from cpuspec.spec.planner import PlannedDrafter, Planner
from cpuspec.spec.proposer import Proposer, levels_of
from cpuspec.tokenizer import Tokenizer, make_tokenizer

Message = dict[str, str]
Prompt = str | Seq[int]
Params = SamplingParams | Seq[SamplingParams] | None


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    finish_reason: "stop" (an end token or a stop string), "length" (max_tokens or the context's end) or "aborted".
    token_ids include the token that ended it, text does not. logprobs: one for each token if asked for, else empty.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs]
    stats: RequestStats


class LLM:
    """A loaded model that answers. Not thread-safe: call it from one thread at a time; streams may be interleaved.

    model: a recipe's or chain's name, a GGUF file, a Hugging Face directory, or an opened Checkpoint.
    spec: how to draft, a text such as "ngram" or a SpecConfig, None for the chain's own or "auto"; no answer depends on it.
    context_length: tokens that one sequence may hold, prompt included; None = what the model was trained for.
    max_sequences: how many run at once; more wait their turn.
    keep_packed: whether weights in the order of the kernels are kept in the cache directory, for a quick next start.
    kv_format: what the cache keeps keys and values in, of `cpuspec.formats.kv.KV_FORMATS`: f32, f16, bf16 or int8.
    device, dtype, weights, activations: of backends that have them, as `EngineConfig` says.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint,
        spec: str | SpecConfig | None = None,
        backend: str = "numba",
        threads: int | None = None,
        *,
        context_length: int | None = None,
        max_sequences: int = 16,
        keep_packed: bool = True,
        kv_format: str = EngineConfig.kv_format,
        device: str = EngineConfig.device,
        dtype: str = EngineConfig.dtype,
        weights: str = EngineConfig.weights,
        activations: str = EngineConfig.activations,
    ) -> None:
        settings = EngineConfig(
            max_sequences,
            context_length,
            threads=threads,
            keep_packed=keep_packed,
            kv_format=kv_format,
            device=device,
            dtype=dtype,
            weights=weights,
            activations=activations,
        )
        self._open(model, spec, backend, settings)

    @classmethod
    def from_settings(
        cls, model: str | Path | Checkpoint, spec: str | SpecConfig | None, backend: str, settings: EngineConfig
    ) -> "LLM":
        """The same, where an EngineConfig has the settings."""
        llm = cls.__new__(cls)
        llm._open(model, spec, backend, settings)
        return llm

    def _open(self, model: str | Path | Checkpoint, spec: str | SpecConfig | None, backend: str, settings: EngineConfig) -> None:
        if isinstance(model, Checkpoint):
            spec = _read_spec(spec)
        else:
            model, spec = model_and_spec(str(model), spec)
        # A bad setting fails before gigabytes are loaded, and so does a draft that does not fit.
        check_spec(spec)
        check_backend(backend, settings)
        get_kv_format(settings.kv_format)
        checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(resolve_model(model))
        tokenizer, context_length = make_tokenizer(checkpoint), _capacity(checkpoint.config, settings)
        build = prepare(spec, Host(checkpoint, tokenizer, backend, checkpoint.config.vocab_size, context_length, settings))
        target = make_backend(backend, checkpoint, settings)
        try:
            self._start(target, tokenizer, spec, settings, build(target), _sampling(checkpoint))
        except BaseException:
            target.close()
            raise

    @classmethod
    def from_backend(
        cls,
        backend: Backend,
        tokenizer: Tokenizer,
        spec: str | SpecConfig | None = None,
        settings: EngineConfig | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> "LLM":
        """An LLM over a backend and a tokenizer that exist already, such as a user's own. `close` closes the backend.

        checkpoint: what the backend was made from, for drafts of the target's own weights and its sampling defaults.
        """
        llm, spec, settings = cls.__new__(cls), _read_spec(spec), settings or EngineConfig()
        name = backend.name if backend.name in BACKENDS else BACKENDS[0]
        context_length = _capacity(backend.config, settings)
        build = prepare(spec, Host(checkpoint, tokenizer, name, backend.config.vocab_size, context_length, settings))
        llm._start(backend, tokenizer, spec, settings, build(backend), _sampling(checkpoint))
        return llm

    def _start(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        spec: SpecConfig,
        settings: EngineConfig,
        proposer: Proposer,
        sampling: SamplingDefaults,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = backend.config
        self.spec = spec
        self.sampling_defaults = sampling  # what the model's files and its recipe say, and what of it was ignored
        self.threads = backend.threads
        self.row_invariant = backend.row_invariant
        self.context_length = _capacity(backend.config, settings)
        self._backend = backend
        self._drafts = levels_of(proposer)
        self._planner = proposer if isinstance(proposer, Planner) else None
        self._context = Context(backend, settings.max_sequences, self.context_length)
        self._engine = Engine(self._context, proposer, tokenizer)
        self.aborted_stats: RequestStats | None = None  # of the request that was aborted last, its stream closed or interrupted
        self._inboxes: dict[int, list[Output]] = {}  # of the requests that somebody is waiting for
        self._closed = False

    @property
    def default_sampling_params(self) -> SamplingParams:
        """How the model's files, or else its recipe, want it to be sampled; greedy where they say nothing.

        Nothing applies it by itself: `generate`, `chat` and `stream` without params are greedy. To change a field of it:
        `dataclasses.replace(llm.default_sampling_params, max_tokens=100)`.
        """
        return self.sampling_defaults.under({})

    def generate(self, prompts: Prompt | Seq[Prompt], params: Params = None) -> list[Completion]:
        """Continue raw prompts, texts or token ids; always a list, in the prompts' order.

        params: for all prompts, or one each; None is greedy. Raises ConfigError for prompts that cannot be run, before running any.
        """
        if not isinstance(prompts, str | list | tuple | np.ndarray):
            raise ConfigError(f"prompts are texts or lists of token ids, one or a list of them; got {type(prompts).__name__}")
        listed: list[Any] = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)
        return self._complete([self._prompt_ids(prompt) for prompt in listed], params)

    @overload
    def chat(self, messages: Seq[Message], params: Params = None) -> Completion: ...

    @overload
    def chat(self, messages: Seq[Seq[Message]], params: Params = None) -> list[Completion]: ...

    def chat(self, messages: Seq[Message] | Seq[Seq[Message]], params: Params = None) -> Completion | list[Completion]:
        """Answer a conversation (a list of messages, each with role and content) through the model's chat template.

        Returns a Completion, or a list of them for a list of conversations. None for params is greedy.
        """
        if _is_conversation(messages):
            return self._complete([self._prompt_ids(messages)], params)[0]
        return self._complete([self._prompt_ids(conversation) for conversation in messages], params)

    def stream(self, prompt: Prompt | Seq[Message], params: SamplingParams | None = None) -> Iterator[Output]:
        """Yield what each step adds; the last output carries finish_reason and stats. None for params is greedy.

        The request starts with the first `next`. Closing the generator, or leaving its loop, frees its slot; what it cost until
        then is in `aborted_stats`.
        """
        self.aborted_stats = None
        return self._stream(self._prompt_ids(prompt), params or SamplingParams())

    def memory(self) -> list[LevelMemory]:
        """What each model holds, draft models first, the cheapest foremost."""
        contexts = [*((draft.name, draft.context) for draft in self._drafts), ("target", self._context)]
        return [
            LevelMemory(name, context.backend.weight_bytes, context.backend.shared_bytes, context.kv_bytes)
            for name, context in contexts
        ]

    def explain(self) -> list[PlannedDrafter]:
        """What "auto" decides from and what came of it so far, one entry for each drafter; empty for other specs."""
        return self._planner.explain() if self._planner else []

    def close(self) -> None:
        """Release the models. Calling it again does nothing; any other use afterwards raises ConfigError."""
        if not self._closed:
            self._closed = True
            for draft in self._drafts:
                draft.context.backend.close()
            self._backend.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _complete(self, prompts: list[list[int]], params: Params) -> list[Completion]:
        params = SamplingParams() if params is None else params
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ConfigError(f"got {len(each)} sampling params for {len(prompts)} prompts; give one for all, or one each")
        request_ids: list[int] = []
        try:
            for prompt, one in zip(prompts, each, strict=True):
                request_ids.append(self._add(prompt, one))
            outputs = [list(self._outputs(request_id)) for request_id in request_ids]
        finally:
            for request_id in request_ids:
                self._drop(request_id)
        return [_completion(parts) for parts in outputs]

    def _stream(self, prompt: list[int], params: SamplingParams) -> Iterator[Output]:
        request_id = self._add(prompt, params)
        try:
            yield from self._outputs(request_id)
        finally:
            self._drop(request_id)

    def _add(self, prompt: list[int], params: SamplingParams) -> int:
        self._check_open()
        request_id = self._engine.add_request(prompt, params)
        self._inboxes[request_id] = []
        return request_id

    def _outputs(self, request_id: int) -> Iterator[Output]:
        """The outputs of one request, running the engine as far as they need; what others gain meanwhile waits for them."""
        inbox = self._inboxes[request_id]
        while True:
            while not inbox:
                self._run()
                if not (inbox or self._engine.has_work):
                    raise CpuspecError("the end of this answer was lost when another call was interrupted; ask again")
            output = inbox.pop(0)
            yield output
            if output.finish_reason is not None:
                return

    def _run(self) -> None:
        """One step of the engine, its outputs handed to whoever waits for them. An interrupt aborts everything that runs."""
        self._check_open()
        try:
            for output in self._engine.step():
                if output.request_id in self._inboxes:
                    self._inboxes[output.request_id].append(output)
        except BaseException:
            self._engine.abort_all()  # an interrupt between step and inboxes may have lost a part of an answer
            raise

    def _drop(self, request_id: int) -> None:
        if output := self._engine.abort(request_id):
            self.aborted_stats = output.stats
        self._inboxes.pop(request_id, None)

    def _prompt_ids(self, prompt: Any) -> list[int]:
        """Token ids of a text, of ids, or of a conversation."""
        self._check_open()
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif _is_conversation(prompt):
            ids = self.tokenizer.encode_chat([dict(message) for message in prompt])
        elif _is_ids(prompt) or (isinstance(prompt, list | tuple) and not prompt):
            ids = [int(token) for token in prompt]
        else:
            raise ConfigError(f"a prompt is a text, a list of token ids, or a list of messages; got {repr(prompt)[:80]}")
        if ids:
            return ids
        if self.tokenizer.bos_id is None:
            raise ConfigError("the prompt is empty and this model has no beginning-of-text token to start from; give some text")
        return [self.tokenizer.bos_id]

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this LLM is closed; make a new one")


def _completion(parts: list[Output]) -> Completion:
    last = parts[-1]
    assert last.finish_reason is not None, "the last output of a request has a finish reason"
    assert last.stats is not None, "the last output of a request has stats"
    return Completion(
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        finish_reason=last.finish_reason,
        logprobs=[one for part in parts for one in part.logprobs],
        stats=last.stats,
    )


def _sampling(checkpoint: Checkpoint | None) -> SamplingDefaults:
    """Sampling defaults of a checkpoint: its own, then its recipe's."""
    if checkpoint is None:
        return NO_DEFAULTS
    recipe = recipe_of(checkpoint.path)
    return checkpoint.sampling.over(recipe.sampling) if recipe else checkpoint.sampling


def _read_spec(spec: str | SpecConfig | None) -> SpecConfig:
    if spec is None:
        return AUTO
    return SpecConfig.parse(spec) if isinstance(spec, str) else spec


def _capacity(config: ModelConfig, settings: EngineConfig) -> int:
    """Tokens that a sequence may hold."""
    wanted = settings.context_length or config.context_length
    if wanted > config.context_length:
        raise ConfigError(f"context_length must be at most {config.context_length}, what this model was trained for; got {wanted}")
    return wanted


def _is_ids(prompt: Any) -> bool:
    listed = isinstance(prompt, list | tuple | np.ndarray) and len(prompt) > 0
    return listed and all(isinstance(token, int | np.integer) and not isinstance(token, bool) for token in prompt)


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and all(isinstance(message, dict) for message in prompt)
