"""Requests that choose their own drafter among the loaded ones. The other requests use the default drafter."""

from collections.abc import Callable

from cpuspec.model.batch import F32
from cpuspec.sequence import Sequence
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.proposer import Proposer
from cpuspec.speculation.verify import Verdict


class ChosenDrafts(Proposer):
    """Asks for each sequence the proposer that its request names in `SamplingParams.draft`, and `default` if it names none.

    Requests that name the same proposer share it. It is forgotten when the last of them ends.
    """

    def __init__(self, default: Proposer, make: Callable[[str], Proposer]) -> None:
        """make: makes the proposer of a checked name. It needs no hidden states, and no levels but those of `default`."""
        self.name = default.name
        self.hidden_layers, self.most_hidden = default.hidden_layers, default.most_hidden
        self.levels = default.levels
        self.default = default
        self._make = make
        self._chosen: dict[str, Proposer] = {}
        self._names: dict[int, str] = {}  # by sequence id, of requests that name a proposer

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Tell the sequence's proposer, which is made if need be."""
        name = seq.params.draft
        if name is not None:
            if name not in self._chosen:
                self._chosen[name] = self._make(name)
            self._names[seq.id] = name
        self._of(seq).begin(seq, num_cached)

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """The drafts of each sequence's proposer. A proposer is asked for all its sequences together."""
        if not self._names:
            return self.default.propose(seqs, limits)
        drafts: dict[int, Draft] = {}
        for name in dict.fromkeys(self._names.get(seq.id) for seq in seqs):
            mine = [i for i, seq in enumerate(seqs) if self._names.get(seq.id) == name]
            found = self._of(seqs[mine[0]]).propose([seqs[i] for i in mine], [limits[i] for i in mine])
            drafts |= zip(mine, found, strict=True)
        return [drafts[i] for i in range(len(seqs))]

    def num_idle(self, seqs: list[Sequence]) -> int:
        """The least of the proposers'."""
        return min(self._of(seq).num_idle([seq]) for seq in seqs) if self._names else self.default.num_idle(seqs)

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Tell the sequence's proposer."""
        self._of(seq).accept(seq, verdict, () if seq.id in self._names else hidden)

    def end(self, seq: Sequence) -> None:
        """Tell the sequence's proposer, and forget it if it has no other sequence."""
        try:
            self._of(seq).end(seq)
        finally:
            name = self._names.pop(seq.id, None)
            if name is not None and name not in self._names.values():
                del self._chosen[name]

    def _of(self, seq: Sequence) -> Proposer:
        return self._chosen[self._names[seq.id]] if seq.id in self._names else self.default
