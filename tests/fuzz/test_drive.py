"""The driver sees every kind of fault, names its seed, goes on behind it, and damages the same way again."""

import os
import random
import time
from pathlib import Path

import pytest

from cpuspec.errors import ConfigError
from tests.fuzz.drive import check, mutate_bytes, mutate_json, mutate_text, run_cases


def answers_or_refuses(rng: random.Random, directory: Path) -> None:
    assert not list(directory.iterdir())
    (directory / "left behind").touch()
    if rng.random() < 0.5:
        raise ConfigError("no")


def goes_wrong(rng: random.Random, directory: Path) -> None:
    """Seeds 1 to 5 fail, each in a way of its own."""
    seed = next(seed for seed in range(10) if random.Random(seed).getstate() == rng.getstate())
    if seed == 1:
        raise KeyError("raised")
    if seed == 2:
        os.abort()
    if seed == 3:
        bytearray(8 << 30)
    if seed == 4:
        time.sleep(1000)
    if seed == 5:
        os._exit(7)


def test_answered_and_refused_cases_are_counted(monkeypatch) -> None:
    monkeypatch.delenv("CPUSPEC_FUZZ", raising=False)
    outcomes = check(answers_or_refuses, 40)
    assert outcomes.total() == 40
    assert set(outcomes) == {"answered", "refused"}


def test_every_kind_of_fault_is_found_and_the_cases_behind_it_run() -> None:
    outcomes, faults = run_cases(f"{__name__}:{goes_wrong.__name__}", range(8), deadline_s=2)
    assert outcomes == {"answered": 3}
    assert list(faults) == [1, 2, 3, 4, 5]
    for seed, says in {1: "KeyError: 'raised'", 2: "Abort", 3: "MemoryError", 4: "Timeout", 5: "ended with 7"}.items():
        assert says in faults[seed]


def test_a_fault_is_named_with_the_command_that_shows_it_again(monkeypatch) -> None:
    monkeypatch.setenv("CPUSPEC_FUZZ", "2")
    with pytest.raises(AssertionError, match=r"python -m tests.fuzz.drive \S+test_drive:goes_wrong 1\nTraceback"):
        check(goes_wrong, 1)


def test_damage_is_the_same_for_the_same_seed_and_differs_between_seeds() -> None:
    value = {"a": [1, 2.5, {"b": "text"}], "c": None}

    def damaged(seed: int) -> tuple[bytes, bytes, bytes]:
        rng = random.Random(seed)
        text = mutate_text("<a b='12'>c</a>", rng)
        return mutate_bytes(bytes(range(200)), rng, [(8, 8), (16, 4)]), text, mutate_json(value, rng)

    many = [damaged(seed) for seed in range(200)]
    assert many == [damaged(seed) for seed in range(200)]
    assert all(len({one[kind] for one in many}) > 100 for kind in range(3))
    assert value == {"a": [1, 2.5, {"b": "text"}], "c": None}
