"""The budget of one rendering: steps of work, room in memory, seconds of the processor. Nothing is given back."""

import time

from cpuspec.errors import TokenizerError

_CHARS_PER_STEP = 256  # characters that are searched or copied in about the time of a step
_STEPS_PER_LOOK = 20_000  # between two looks at the clock

# Room is counted in characters, of at most 4 bytes. Beside their characters values take:
PER_ITEM = 2  # a reference in a list or tuple
PER_VALUE = 20  # an object: the head of a text, list or tuple, a number
PER_ENTRY = 32  # an entry of a dict


class Budget:
    """Raises TokenizerError as soon as more is asked for than is left."""

    def __init__(self, steps: int, room: int, seconds: float) -> None:
        """steps: nodes evaluated, about a microsecond each. room: characters. seconds: of this thread on a processor."""
        self._steps = steps
        self._room = room
        self._chars = room
        self._look_below = steps - _STEPS_PER_LOOK
        # A machine that is busy with other things must not change what a template renders: not the clock on the wall.
        self._deadline = time.thread_time() + seconds

    def spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < self._look_below:
            self._look_below = max(self._steps - _STEPS_PER_LOOK, 0)
            if self._steps < 0 or time.thread_time() > self._deadline:
                raise TokenizerError("the chat template runs too long for these messages; it is broken or hostile, use --raw")

    def scan(self, chars: int) -> None:
        """Pay for looking at characters, before it is done."""
        self.spend(1 + chars // _CHARS_PER_STEP)

    def make(self, room: int) -> None:
        """Pay for the memory of a new value and for filling it, before it is made."""
        self._room -= room
        if self._room < 0:
            raise TokenizerError(f"the chat template builds over {self._chars} characters; it is broken or hostile, use --raw")
        self.spend(1 + room // _CHARS_PER_STEP)
