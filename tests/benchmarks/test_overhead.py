"""The benchmark of overhead counts what is outside of the compiled forward, and nothing else."""

from types import SimpleNamespace

import overhead

from tools.make_tiny_model import make_tiny_gguf


class Clock:
    """Goes on only when told."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> None:
        self.now_s += seconds


def test_what_is_outside_is_the_step_less_what_is_inside():
    clock = Clock()
    watch = overhead.Stopwatch(clock)
    forward = watch.inside(clock.work)

    def steps():
        for number in range(3):
            clock.work(1)
            forward(10)
            clock.work(2)
            for _ in range(number):  # a draft model's forwards
                forward(100)
                clock.work(0.5)
            yield SimpleNamespace(cycles=[number])
        clock.work(4)
        yield SimpleNamespace(cycles=[3, 4])  # two steps at once

    assert watch.outside_s(steps()) == [3, 3.5, 4, 2, 2]


def test_every_number_of_threads_and_draft_has_its_figure(tmp_path, measured, monkeypatch):
    counted, original = [], overhead.overheads_s
    monkeypatch.setattr(overhead, "overheads_s", lambda llm, *rest: counted.append(rest[0]) or original(llm, *rest))
    model = make_tiny_gguf(tmp_path / "tiny.gguf")
    options = ("--threads", "1", "--threads", "2", "--draft", "none", "--draft", "ngram", "--steps", "5", "--rounds", "3")
    figures = measured(overhead.main, model, *options)[0]["us_per_step"]
    assert list(figures) == ["none, 1 threads", "ngram, 1 threads", "none, 2 threads", "ngram, 2 threads"]
    assert all(len(one["rounds"]) == 3 and one["min"] > 0 for of in figures.values() for one in of.values())
    assert all(list(of) == list(overhead.CLOCKS) for of in figures.values())
    assert counted == [5] * 12 * len(overhead.CLOCKS)
