"""Forwards that are recorded once and replayed: a GPU runs a small forward in less time than Python launches its kernels."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

Outputs = Sequence[Tensor]
Run = Callable[[Sequence[Tensor]], Outputs]
Record = Callable[[Callable[[], Outputs]], tuple[Outputs, Callable[[], object]]]  # a run -> its outputs, and what runs it again

_MAX_RECORDINGS = 64  # each holds some memory of its own, and costs two forwards


class Recorder:
    """Runs what comes for the first time, records what comes for the second, and then replays it over new inputs.

    A key says all that a run depends on besides the contents of its inputs: shapes, and which memory it reads and writes. The owner
    of such memory calls `clear` before it goes away. Outputs of a replay are valid until the next one.
    seen: keys that came once. recordings: by key the inputs, the outputs, and what runs it again.
    """

    def __init__(self, record: Record) -> None:
        self.num_replays = 0
        self._record = record
        self.seen: OrderedDict[Hashable, None] = OrderedDict()
        self.recordings: OrderedDict[Hashable, tuple[Sequence[Tensor], Outputs, Callable[[], object]]] = OrderedDict()

    def run(self, key: Hashable, inputs: Sequence[Tensor], device: torch.device, run: Run) -> Outputs:
        """What `run` returns for `inputs`, which lie in the host's memory and are brought to the device."""
        recording = self.recordings.get(key)
        if recording is None and key not in self.seen:
            _keep(self.seen, key, None)
            return run([each.to(device) for each in inputs])
        if recording is None:
            own = [each.to(device, copy=True) for each in inputs]
            recording = own, *self._record(lambda: run(own))
            _keep(self.recordings, key, recording)
        held, outputs, replay = recording
        for ours, new in zip(held, inputs, strict=True):
            ours.copy_(new)
        replay()
        self.num_replays += 1
        return outputs

    def clear(self) -> None:
        """Forget all recordings."""
        self.recordings.clear()
        self.seen.clear()


def _keep(kept: OrderedDict, key: Hashable, value: object) -> None:
    """Put the entry in, and the oldest out where there are too many. Kept so simple because `clear` may come at any time."""
    kept[key] = value
    if len(kept) > _MAX_RECORDINGS:
        kept.popitem(last=False)


def record_cuda_graph(run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], object]]:
    """A CUDA graph of `run`, after a run of its own in which libraries reserve memory and Triton compiles."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return outputs, graph.replay
