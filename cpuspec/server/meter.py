"""When an answer was asked for, began to run, and brought its tokens."""

from cpuspec.metrics import now_s


class AnswerMeter:
    """The times of one answer, for `Metrics`. It is made when the answer enters the queue."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_new_tokens = 0
        self.arrival_s = now_s()
        self.start_s: float | None = None
        self.first_s: float | None = None
        self.last_s: float | None = None

    def start(self) -> None:
        """Note that the answer begins to run."""
        self.start_s = now_s()

    @property
    def running_s(self) -> float:
        """Seconds since the answer began to run."""
        return 0.0 if self.start_s is None else now_s() - self.start_s
