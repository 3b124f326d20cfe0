"""Lines of a batch, answered by workers on the machines of a Ray cluster, in the order of the lines.

A worker is an actor with an LLM of its own. What a dead one has not answered is computed by another, and the caller writes an
answer once, so that nothing is lost or doubled.
"""

import logging
import socket
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from cpuspec.batch.answer import answer_lines
from cpuspec.batch.lines import Line
from cpuspec.engine.llm import LLM
from cpuspec.errors import ConfigError, CpuspecError, in_one_line
from cpuspec.settings import EngineConfig

_CONNECT_S = 10.0
_AT_ONCE = 8  # tasks that a worker has: as some end, the others keep it busy
_AHEAD = 32  # tasks for each worker that may wait for one before them
_MOST_TRIES = 3  # of a task whose workers die
_MOST_DEATHS = 3  # one after the other without an answer, for each worker


@dataclass(frozen=True)
class Work:
    """What a worker loads and how it answers. given: fields of SamplingParams for lines that do not have them."""

    model: str
    draft: str | None
    backend: str
    settings: EngineConfig  # with threads, which are a worker's processors
    given: Mapping[str, Any]

    @property
    def num_cpus(self) -> int:
        """Processors of a worker."""
        return self.settings.threads or 1


class Worker:
    """The actor."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def load(self) -> None:
        """Load the model. Raises what LLM raises."""
        work = self._work
        self._llm = LLM(work.model, work.draft, work.backend, settings=work.settings)

    def answer(self, lines: list[Line]) -> list[dict[str, Any]]:
        """The answers to some lines; other calls run at the same time and share the LLM's batch."""
        return list(answer_lines(self._llm, iter(lines), self._work.given))


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """A connection to the cluster at an address. Without one it goes to RAY_ADDRESS, else to a cluster of this machine only.

    Raises ConfigError where there is no cluster.
    """
    host, _, port = (address or "").rpartition(":")
    try:
        if port.isdigit() and "/" not in host:
            socket.create_connection((host, int(port)), _CONNECT_S).close()  # Ray itself waits for minutes
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise ConfigError(f"there is no Ray cluster at {address}: {in_one_line(str(error))}") from None
    try:
        yield
    finally:
        ray.shutdown()


def most_workers(num_cpus: int) -> int:
    """Workers of `num_cpus` processors each that the cluster's machines have room for, at least 1."""
    return max(1, sum(int(node["Resources"].get("CPU", 0)) // num_cpus for node in ray.nodes() if node["Alive"]))


def answer_on_cluster(lines: Iterator[Line], work: Work, num_workers: int, patience_s: float = 600.0) -> Generator[dict[str, Any]]:
    """Yield the answer of each line, in order. A worker that dies is replaced, as soon as the cluster has room for another.

    patience_s: how long there may be no worker at all. Raises what an LLM raises, CpuspecError where workers die again and again.
    """
    pool = _Pool(work, num_workers, patience_s)
    try:
        yield from pool.answers(lines)
    finally:
        pool.close()


@dataclass(eq=False)
class _Task:
    """Lines that one worker answers. num_deaths: of workers that had this task."""

    lines: list[Line]
    num_deaths: int = 0
    answers: list[dict[str, Any]] | None = None


@dataclass(eq=False)
class _HiredWorker:
    """A worker as the pool sees it. tasks: what it computes, by the reference of the result; None is its model being loaded."""

    actor: Any
    tasks: dict[Any, _Task | None] = field(default_factory=dict)

    @property
    def is_free(self) -> bool:
        """Whether it can take a task."""
        return None not in self.tasks.values() and len(self.tasks) < _AT_ONCE


class _Pool:
    """Workers, and the tasks that they compute."""

    def __init__(self, work: Work, num_workers: int, patience_s: float) -> None:
        self._work = work
        self._patience_s = patience_s
        self._class = ray.remote(
            num_cpus=work.num_cpus, max_concurrency=_AT_ONCE, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD"
        )(Worker)
        self._num_deaths = 0  # since the last answer
        self._todo: deque[_Task] = deque()
        self._workers: list[_HiredWorker] = []
        for _ in range(num_workers):
            self._hire()

    def answers(self, lines: Iterator[Line]) -> Generator[dict[str, Any]]:
        """Yield the answers in the lines' order."""
        size = max(1, 2 * self._work.settings.max_sequences // _AT_ONCE)
        begun: deque[_Task] = deque()
        more = True
        while begun or more:
            while worker := min((one for one in self._workers if one.is_free), key=lambda one: len(one.tasks), default=None):
                if not self._todo and more and len(begun) < _AHEAD * len(self._workers):
                    some = list(islice(lines, size))
                    more = bool(some)
                    if some:
                        begun.append(_Task(some))
                        self._todo.append(begun[-1])
                if not self._todo:
                    break
                task = self._todo.popleft()
                worker.tasks[worker.actor.answer.remote(task.lines)] = task
            if begun or more:
                self._wait()
            while begun and (found := begun[0].answers) is not None:
                begun.popleft()
                yield from found

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            ray.kill(worker.actor)

    def _hire(self) -> None:
        worker = _HiredWorker(self._class.remote(self._work))
        worker.tasks[worker.actor.load.remote()] = None
        self._workers.append(worker)

    def _wait(self) -> None:
        """Wait until something has been computed, or a worker has died."""
        owners = {result: worker for worker in self._workers for result in worker.tasks}
        done, _ = ray.wait(list(owners), timeout=self._patience_s)
        if not done and all(None in worker.tasks.values() for worker in self._workers):
            raise CpuspecError(
                f"the cluster has given no worker with {self._work.num_cpus} processors within {self._patience_s:g} s; "
                "the same command goes on from here"
            )
        for result in done:
            worker = owners[result]
            if worker not in self._workers:
                continue  # another of its results has shown that it is dead
            try:
                answers = ray.get(result)
            except RayTaskError as error:
                raise error.cause from None
            except RayError as error:
                self._replace(worker, error)
                continue
            if task := worker.tasks.pop(result):
                task.answers, self._num_deaths = answers, 0

    def _replace(self, worker: _HiredWorker, error: RayError) -> None:
        """Put another worker in the place of one that has died, and what that had computed at the head of what is to do."""
        ray.kill(worker.actor)
        self._workers.remove(worker)
        self._num_deaths += 1
        tasks = [task for task in worker.tasks.values() if task]
        for task in tasks:
            task.num_deaths += 1
        if self._num_deaths > _MOST_DEATHS * (1 + len(self._workers)) or any(task.num_deaths >= _MOST_TRIES for task in tasks):
            where = f" at line {tasks[0].lines[0].number}" if tasks else ""
            raise CpuspecError(f"workers die again and again{where}: {in_one_line(str(error))}; the same command goes on from here")
        self._todo.extendleft(reversed(tasks))
        self._hire()
