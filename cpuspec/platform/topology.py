"""The processors and the memory that this process may use, whatever system told of them."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Core:
    """A physical core. cpus: its logical processors that may be used; speed: its top clock or capacity over the fastest core's.

    kind: on hybrid processors "core" for the fast ones, "atom" for the others, "lowpower" for those beside the memory controller;
    else "".
    """

    cpus: tuple[int, ...]
    speed: float = 1.0
    kind: str = ""


@dataclass(frozen=True)
class Node:
    """A memory node: the logical processors near it that may be used, and its memory, None where that is unknown."""

    number: int
    cpus: tuple[int, ...]
    memory_bytes: int | None


@dataclass(frozen=True)
class Topology:
    """The processors that a process may use. quota: how many processors' time its control groups grant, None for no limit."""

    cores: tuple[Core, ...]
    nodes: tuple[Node, ...] = ()
    quota: float | None = None

    @cached_property
    def usable_cores(self) -> int:
        """The number of threads to compute with by default: one for each physical core, within the quota.

        Second hardware threads of a core add nothing where vector units and memory are the limit. Slow cores take part, because
        threads share work by what each gets done (`kernels.sharing`); cores of low power do not. The quota is rounded down: a group
        that uses more than its quota stands still until the next period.
        """
        cores = sum(core.kind != "lowpower" for core in self.cores) or len(self.cores)
        return max(1, cores if self.quota is None else min(cores, int(self.quota)))


@dataclass(frozen=True)
class Memory:
    """Bytes of the machine's memory, of what programs can get without swapping, and of the limit on this process's group.

    None where the system does not tell, or sets no limit.
    """

    total: int | None = None
    available: int | None = None
    limit: int | None = None

    @property
    def usable(self) -> int | None:
        """Bytes that this process may use; None where unknown."""
        return min((number for number in (self.total, self.limit) if number is not None), default=None)
