"""Drafts that may fail: a request whose drafter raises ends with the error, or goes on without drafts."""

import logging
from collections.abc import Callable

from cpuspec.errors import BackendError, CpuspecError
from cpuspec.model.batch import F32
from cpuspec.sequence import Sequence
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.proposer import NullProposer, Proposer
from cpuspec.speculation.round import check_drafts
from cpuspec.speculation.verify import Verdict

_log = logging.getLogger(__name__)


class GuardedProposer(Proposer):
    """Stands between the engine and a proposer that may raise or break the contract of drafts.

    If a call for several sequences fails, the proposer is called again for each of them, so that no request costs another one its
    drafts. A sequence whose own call fails is restored to its tokens before the call. It goes on without drafts, or ends with the
    error.

    num_failures: sequences that went on without drafts.
    """

    def __init__(self, inner: Proposer, context: Context, plain_on_error: bool = True) -> None:
        """context: of the verifying model. plain_on_error: whether a sequence goes on without drafts."""
        self.name = inner.name
        self.hidden_layers, self.most_hidden = inner.hidden_layers, inner.most_hidden
        self.levels = inner.levels
        self.num_failures = 0
        self._inner = inner
        self._plain_on_error = plain_on_error
        self._context = context
        self._plain: set[int] = set()  # ids of sequences that go on without drafts

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Tell the proposer."""
        self._try([seq], lambda: self._inner.begin(seq, num_cached))

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """The proposer's drafts; empty ones for sequences in which it has failed."""
        drafts = NullProposer().propose(seqs, limits)
        asked = [i for i, seq in enumerate(seqs) if seq.id not in self._plain]
        if asked and not self._ask(asked, seqs, limits, drafts) and len(asked) > 1:
            for i in asked:
                self._ask([i], seqs, limits, drafts)
        return drafts

    def num_idle(self, seqs: list[Sequence]) -> int:
        """As the proposer says; it is no more asked about sequences in which it has failed."""
        asked = [seq for seq in seqs if seq.id not in self._plain]
        return (self._inner if asked else NullProposer()).num_idle(asked)

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Tell the proposer, unless it has failed in this sequence."""
        if seq.id not in self._plain:
            self._try([seq], lambda: self._inner.accept(seq, verdict, hidden))

    def end(self, seq: Sequence) -> None:
        """Tell the proposer, unless it has failed in this sequence and been told then."""
        if seq.id not in self._plain:
            self._end(seq)
        self._plain.discard(seq.id)

    def _ask(self, asked: list[int], seqs: list[Sequence], limits: list[int], drafts: list[Draft]) -> bool:
        """Put the proposer's drafts for the sequences `asked` into `drafts`; returns whether it made them."""
        mine, most = [seqs[i] for i in asked], [limits[i] for i in asked]
        found: list[Draft] = []

        def propose() -> None:
            found.extend(self._inner.propose(mine, most))
            check_drafts(self._inner, found, most, self._context)

        if not self._try(mine, propose):
            return False
        for i, draft in zip(asked, found, strict=True):
            drafts[i] = draft
        return True

    def _try(self, seqs: list[Sequence], call: Callable[[], None]) -> bool:
        """Call the proposer; returns whether that succeeds. If not, the sequences are restored, and a single one falls back."""
        before = [len(seq.tokens) for seq in seqs]
        try:
            call()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a Rust library is no Exception
            for seq, length in zip(seqs, before, strict=True):
                del seq.tokens[length:]
            if len(seqs) == 1:
                self._fall_back(seqs[0], error)
            return False
        return True

    def _fall_back(self, seq: Sequence, error: BaseException) -> None:
        if not self._plain_on_error:
            failed = BackendError(f"drafting with {self.name} failed: {error!r}")
            seq.error = error if isinstance(error, CpuspecError) else failed
        else:
            self.num_failures += 1
            text = "drafting with %s failed, and a request goes on without drafts: %s: %s"
            _log.warning(text, self.name, type(error).__name__, error)
        self._plain.add(seq.id)
        self._end(seq)

    def _end(self, seq: Sequence) -> None:
        try:
            self._inner.end(seq)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            _log.warning("the end of a request failed in %s: %s: %s", self.name, type(error).__name__, error)
