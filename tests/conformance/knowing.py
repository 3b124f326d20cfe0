"""A drafter as users write it, that knows the answers."""

from typing import Any, ClassVar

import numpy as np

from cpuspec import Draft


class Knowing:
    """Hides answers among wrong tokens in trees, chains and empty drafts of every shape; or drafts them as they are.

    answers: by prompt. added: to each token of an answer, which is hidden nowhere then; None for trees.
    num_moved: accepted nodes of trees that stood elsewhere than in a chain.
    """

    name, hidden_layers = "knowing", ()
    answers: ClassVar[dict[tuple[int, ...], list[int]]] = {}
    added: ClassVar[int | None] = None
    num_moved: ClassVar[int] = 0

    def __init__(self) -> None:
        self._rng = np.random.default_rng(3)

    def propose(self, seqs: list[Any], limits: list[int]) -> list[Draft]:
        return [self._draft(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]

    def accept(self, seq: Any, verdict: Any, hidden: Any) -> None:
        Knowing.num_moved += sum(node != place for place, node in enumerate(verdict.path))

    def _draft(self, seq: Any, limit: int) -> Draft:
        prompt = tuple(seq.tokens[: seq.num_prompt_tokens])
        answer = self.answers.get(prompt, [])[seq.num_output_tokens :]
        if self.added is not None:
            return Draft.chain([(token + self.added) % 384 for token in answer[:limit]], self.name)
        tokens, parents, last, depth = list[int](), list[int](), -1, 0
        is_chain = self._rng.random() < 0.2
        for node in range(min(self._rng.integers(0, 12), limit)):
            parents.append(last if is_chain or self._rng.random() < 0.5 else int(self._rng.integers(-1, node)))
            tokens.append(int(self._rng.integers(0, 300)))
            if parents[-1] == last and depth < len(answer) and self._rng.random() < 0.8:
                tokens[-1], last, depth = answer[depth], node, depth + 1
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), self.name)
