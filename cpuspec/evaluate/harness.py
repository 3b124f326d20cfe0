"""EleutherAI's lm-evaluation-harness on an `LLM`: `pip install 'cpuspec[eval]'`.

Source: lm-eval 0.4.13, lm_eval/api/model.py and docs/model_guide.md. Texts are encoded as
transformers' tokenizers do there: a text like `<|im_end|>` becomes that control token, so rendered conversations work.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from cpuspec.backends import Backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.engine.llm import LLM
from cpuspec.engine.lora import AdaptedBackend
from cpuspec.errors import ConfigError, needing
from cpuspec.evaluate.answers import answer_all, opened
from cpuspec.evaluate.quality import Scorer
from cpuspec.sampling import log_softmax
from cpuspec.settings import EngineConfig, SamplingParams, SpecConfig

with needing("`cpuspec eval harness`", "'cpuspec[eval]'"):
    from lm_eval import evaluator
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table

_ANSWERS_AT_ONCE = 64
_NEW_TOKENS = 256  # of an answer, where the task does not say: the harness's own default


class HarnessLM(TemplateLM):  # the harness takes its subclasses only
    """An LLM as the harness wants models. It scores with the backend, and generates with the LLM and its drafts."""

    def __init__(self, llm: LLM, backend: Backend) -> None:
        """backend: the one that the LLM computes with."""
        super().__init__()
        self.tokenizer = llm.tokenizer
        self.max_length = llm.context_length
        self._llm = llm
        self._scorer = Scorer(backend, llm.context_length, num_prompt=llm.context_length)  # as a server scores an echoed prompt

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness caches requests."""
        return self._llm.name.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        """A token that ends an answer, or begins a text where nothing ends one."""
        ends = sorted(self.tokenizer.eos_ids)
        return ends[0] if ends else self.tokenizer.bos_id or 0

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        return self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, after those that the model's file wants before a text, unless the text has them itself."""
        ids = self.tokenizer.encode(string, add_special=False, parse_special=True)
        prefix = list(self.tokenizer.prefix)
        return ids if add_special_tokens is False or ids[: len(prefix)] == prefix else prefix + ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text."""
        return self.tokenizer.apply_chat_template(chat_history, add_generation_prompt)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log likelihood of whole texts, in windows side by side, each token after as many others as there is room for."""
        found: list[float] = []
        for (text,) in (request.args for request in requests):
            # The windows put the prefix before the text: it is context, and no part of the text is counted before it.
            ids = self.tok_encode(text, add_special_tokens=False)
            ids = ids[ids[:1] == [self.prefix_token_id] :]  # a text may have it itself
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            pairs = [make_disjoint_window(window) for window in windows]
            parts = [(("", ""), list(context), list(continuation)) for context, continuation in pairs]
            found.append(float(sum(loss for loss, _ in self._loglikelihood_tokens(parts))))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answers, many at once; greedy unless the task samples."""
        asked = []
        for context, options in (request.args for request in requests):
            params = _params(options)
            ids = self.tok_encode(context)
            asked.append((ids[-max(1, self.max_length - params.max_tokens) :], params))
        found: list[str] = []
        for begin in range(0, len(asked), _ANSWERS_AT_ONCE):  # so that an interrupted run keeps those that are done
            for answer in answer_all(self._llm, asked[begin : begin + _ANSWERS_AT_ONCE])[0]:
                self.cache_hook.add_partial("generate_until", requests[len(found)].args, answer.text)
                found.append(answer.text)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """The log likelihood of each continuation, and whether it is the greedy one. Requests with one context share its rows."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for number in sorted(range(len(requests)), key=lambda number: requests[number][1] + requests[number][2]):
            texts, context, continuation = requests[number]
            tokens = (context + continuation)[-(self.max_length + 1) :]
            wanted = tokens[len(tokens) - len(continuation) :] if len(continuation) < len(tokens) else tokens[1:]
            loss, greedy, at = 0.0, True, 0
            for logits in self._scorer.logits(tokens[:-1], len(tokens) - 1 - len(wanted)):
                rows, following = log_softmax(logits), wanted[at : at + len(logits)]
                loss += float(rows[np.arange(len(rows)), following].sum())
                greedy = greedy and bool((rows.argmax(axis=1) == following).all())
                at += len(rows)
            found[number] = loss, greedy
            if texts[0] or texts[1]:
                self.cache_hook.add_partial("loglikelihood", texts, found[number])
        return found


@contextmanager
def open_harness(
    checkpoint: Checkpoint, spec: SpecConfig | None = None, backend: str = "numba", settings: EngineConfig | None = None
) -> Iterator[HarnessLM]:
    """Load a model for the harness, and close it in the end."""
    with opened(backend, checkpoint, spec, settings or EngineConfig()) as (llm, loaded):
        adapters = llm.adapters.default
        yield HarnessLM(llm, cast(Backend, AdaptedBackend(loaded, adapters)) if adapters else loaded)


def run_harness(
    lm: HarnessLM,
    tasks: Sequence[str],
    include: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    cache: Path | None = None,
) -> dict[str, Any]:
    """What `lm_eval.simple_evaluate` returns, without the samples. include: a directory with tasks as YAML. cache: the beginning of
    a file's name, which keeps what is answered for later runs of the same model and settings. tasks: names or patterns, as mmlu_*.

    Raises ConfigError for tasks that the harness does not know or cannot load.
    """
    manager = TaskManager(include_path=None if include is None else str(include))
    named = {name: manager.match_tasks([name]) for name in tasks}
    if unknown := [name for name, matching in named.items() if not matching]:
        raise ConfigError(f"lm-eval has no task {unknown[0]!r}; name one of its own, or one of --include-path")
    try:
        found = evaluator.simple_evaluate(
            model=lm,
            tasks=list(dict.fromkeys(name for matching in named.values() for name in matching)),
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=chat,
            task_manager=manager,
            log_samples=False,
            use_cache=None if cache is None else str(cache),
            bootstrap_iters=1000,
        )
    except (OSError, ValueError, KeyError) as error:  # whatever a data set or a task's file may lack
        raise ConfigError(f"lm-eval cannot run {', '.join(tasks)}: {type(error).__name__}: {error}") from error
    return {
        name: found[name] for name in ("results", "versions", "n-shot", "higher_is_better", "n-samples", "configs") if name in found
    }


def harness_table(found: dict[str, Any]) -> str:
    """The results as the harness prints them."""
    return str(make_table(found))


def _params(options: dict[str, Any]) -> SamplingParams:
    """The sampling of a request of `generate_until`."""
    until = options.get("until") or []
    stops = [until] if isinstance(until, str) else until
    sampled = options.get("do_sample", bool(options.get("temperature")))
    params = SamplingParams(
        max_tokens=int(options.get("max_gen_toks", options.get("max_new_tokens", _NEW_TOKENS))),
        temperature=float(options.get("temperature", 1.0)) if sampled else 0.0,
        stop=tuple(text for text in stops if text),
    )
    given = {name: options[name] for name in ("top_p", "top_k", "min_p", "seed") if options.get(name) is not None}
    return replace(params, **given) if sampled else params
