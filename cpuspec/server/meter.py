"""The times of an answer."""

from cpuspec.metrics import now_s


class AnswerMeter:
    """The times of one answer, for `Metrics`. Its clock starts when it is made, before the answer waits for its turn."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_new_tokens = 0
        self.arrival_s = now_s()
        self.start_s: float | None = None
        self.first_s: float | None = None
        self.last_s: float | None = None

    def start(self) -> None:
        """The answer's turn has come."""
        self.start_s = now_s()

    @property
    def running_s(self) -> float:
        """How long ago its turn came."""
        return 0.0 if self.start_s is None else now_s() - self.start_s
