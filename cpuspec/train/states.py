"""Hidden states that are kept while a model answers: the samples of `extract`, without reading the answers once more.

The state of an answer's last token is never computed, because nothing follows it: a sample has zeros there, and no likeliest
tokens. Training reads neither, since a head drafts the token after next.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from cpuspec.checkpoints import Checkpoint
from cpuspec.engine.llm import LLM
from cpuspec.errors import CpuspecError
from cpuspec.metrics import now_s
from cpuspec.model.batch import F32, I32
from cpuspec.sequence import Sequence
from cpuspec.speculation.proposer import NullProposer
from cpuspec.speculation.verify import Verdict
from cpuspec.train.answers import AnswerFiles, Likeliest
from cpuspec.train.extract import ABSENT, Extractor, ExtractSummary, LayerStates, ReadText, SampleWriter, read_texts
from cpuspec.train.samples import Extraction, Sample

OnProgress = Callable[[ExtractSummary], None]


class StateRecorder(NullProposer):
    """Drafts nothing, and keeps the target's hidden states of each request until they are taken."""

    def __init__(self, states: LayerStates) -> None:
        self.hidden_layers = states.asked
        self._states = states
        self._parts: dict[int, list[F32]] = {}

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Begin with what is known of the cached tokens: of a sequence that was put back and goes on."""
        known = self._parts.get(seq.id)
        self._parts[seq.id] = [np.concatenate(known)[:num_cached]] if known and num_cached else []

    def num_idle(self, seqs: list[Sequence]) -> int:
        """0, since it is told of every round."""
        return 0

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Keep the states of a round."""
        self._parts[seq.id].append(self._states.of(hidden))

    def take(self, request: int) -> F32:
        """The states [T, L, H] of the tokens that the target has read, and forget them. Raises KeyError."""
        return np.concatenate(self._parts.pop(request))

    def forget(self, request: int) -> None:
        """Drop the states of a request, if there are any."""
        self._parts.pop(request, None)


class AnswerStates:
    """Writes a sample for each line of a file of answers, in its order, from what `recorder` kept while they were generated.

    on_progress: is told of answers that are read again. Raises what `SampleWriter` raises.
    """

    def __init__(
        self, checkpoint: Checkpoint, about: Extraction, out: Path, on_progress: OnProgress = lambda summary: None
    ) -> None:
        self.recorder = StateRecorder(LayerStates(checkpoint, about.layers))
        self.top = about.top
        self._checkpoint, self._about, self._on_progress = checkpoint, about, on_progress
        self._writer = SampleWriter(about, out)

    def catch_up(self, llm: LLM, answers: Path) -> None:
        """Read the answers of earlier runs whose samples are not there. Their states are computed as those of prompts."""
        extractor: Extractor | None = None
        summary, begin_s = self._writer.summary, now_s()
        for text in read_texts([answers], AnswerFiles(llm.tokenizer), llm.context_length):
            if not self._writer.has(text):
                if extractor is None:
                    extractor = Extractor(llm.backend, self._checkpoint, self._about.layers, self.top, llm.context_length)
                self._writer.add(extractor.sample(text))
                summary.num_new_tokens += len(text.token_ids)
                summary.duration_s = now_s() - begin_s
                self._on_progress(summary)

    def add(self, request: int, prompt_ids: list[int], answer_ids: list[int], likeliest: list[Likeliest]) -> None:
        """Write the sample of an answer. likeliest: in the place of each of its tokens; empty if `top` is 0."""
        text = ReadText(prompt_ids + answer_ids, len(prompt_ids))
        hidden = self.recorder.take(request)
        if self._writer.has(text):
            return
        num = len(text.token_ids)
        if len(hidden) != num - 1:
            raise CpuspecError(f"an answer of {num} tokens has {len(hidden)} hidden states; wanted {num - 1}; run it again")
        answer = np.arange(num) >= text.num_prompt
        hidden = np.concatenate([hidden, np.zeros_like(hidden[:1])])
        tops = self._likeliest(num, slice(text.num_prompt - 1, num - 1), likeliest) if self.top else ()
        self._writer.add(Sample(np.array(text.token_ids, np.int32), answer, hidden, *tops))

    def forget(self, request: int) -> None:
        """Drop the states of a request, if there are any."""
        self.recorder.forget(request)

    def _likeliest(self, num: int, rows: slice, likeliest: list[Likeliest]) -> tuple[I32, F32, F32]:
        ids, values, log_sum = np.zeros((num, self.top), np.int32), np.zeros((num, self.top), np.float32), np.full(num, ABSENT)
        ids[rows], values[rows] = map(np.stack, zip(*likeliest, strict=True))
        log_sum[rows] = 0  # the values are logarithms of probabilities
        return ids, values, log_sum

    def close(self) -> None:
        """Write what is held, and let others write."""
        try:
            self._writer.flush()
        finally:
            self._writer.close()
