"""How well documents answer queries: by a model that was trained to rank, or by the angle between two embeddings."""

from collections.abc import Sequence

import numpy as np

from cpuspec.checkpoints import Checkpoint
from cpuspec.engine.embedding import EmbeddingJob
from cpuspec.errors import ConfigError
from cpuspec.model.batch import F32
from cpuspec.text import Tokenizer


class RankingJob:
    """Scores pairs of a query and a document, one forward a `step`."""

    def __init__(
        self, job: EmbeddingJob, prompts: Sequence[list[int]], pairs: Sequence[tuple[int, int]], weight: F32 | None
    ) -> None:
        """job: embeds the prompts. pairs: the numbers of each pair's two prompts, or of one prompt twice if it has both texts.

        weight [C]: of a model that was trained to rank, as `ranking_weight` gives it; None to compare embeddings.
        """
        self.prompts = prompts
        self._job, self._pairs, self._weight = job, pairs, weight

    @property
    def is_done(self) -> bool:
        """Whether every text has been read."""
        return self._job.is_done

    def step(self, max_rows: int | None = None) -> None:
        """Run one forward of at most `max_rows` tokens; None for as many as the backend takes."""
        self._job.step(max_rows)

    def scores(self) -> list[float]:
        """The score of each pair of a finished job: a probability, or the cosine of two embeddings. Raises BackendError."""
        firsts, seconds = np.array(self._pairs, np.int64).reshape(-1, 2).T
        if self._weight is None:
            vectors = self._job.embeddings().astype(np.float64)
            found: list[float] = (vectors[firsts] * vectors[seconds]).sum(axis=1).tolist()
            return found
        # One by one: a matrix product may sum in another order for another number of rows.
        return [float(1 / (1 + np.exp(-(state * self._weight).sum()))) for state in self._job.pooled()[firsts]]


def ranking_weight(checkpoint: Checkpoint | None, tokenizer: Tokenizer) -> F32 | None:
    """The vector [C] whose product with a pooled state is a model's score; None for models that do not rank. Raises ConfigError."""
    if checkpoint is None or (ranker := checkpoint.ranker) is None:
        return None
    if ranker.weight is not None:
        rows = ranker.weight.dequantize()
    else:
        ids = [tokenizer.encode(label, add_special=False) for label in ranker.labels]
        if any(len(one) != 1 for one in ids):
            raise ConfigError(f"{checkpoint.name} ranks by the tokens {ranker.labels}, and its vocabulary has no such tokens")
        output = checkpoint.tensors["embed" if checkpoint.config.tied_embeddings else "output"]
        rows = output.rows(np.array(ids).ravel())
    weight: F32 = rows[0] - rows[1] if len(rows) == 2 else rows[0]
    return weight
