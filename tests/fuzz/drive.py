"""Drives fuzz tests: seeded damage to a small valid file, each case in a child process that may neither crash, hang nor bloat.

A case is a function of a module, `case(rng, directory)`. It makes its damaged input from `rng` alone, in an empty directory of its
own, and gives it to a reader. A case that returns counts as answered, one that raises CpuspecError as refused. Everything else is a
fault: another exception, MemoryError under the limit, a signal, an exit, a case that is not done by its deadline.

    def gguf(rng, directory):
        path = directory / "m.gguf"
        path.write_bytes(mutate_bytes(sample(), rng, fields()))
        open_checkpoint(path)

    def test_a_damaged_file_is_read_or_refused():
        check(gguf, 60)

CPUSPEC_FUZZ=10000 in the environment runs as many cases of each kind.

One case again, in this process and with its traceback:

    python -m tests.fuzz.drive tests.fuzz.test_gguf:gguf 4711
"""

import faulthandler
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from cpuspec.errors import CpuspecError

Case = Callable[[random.Random, Path], object]
JSON = str | int | float | bool | None | list["JSON"] | dict[str, "JSON"]

DEADLINE_S = 120.0  # of one case: far above what any takes on a loaded machine, compiling included
MEMORY_BYTES = 1 << 30  # that a case may ask for beyond what the process had before
_MOST_FAULTS = 20  # after which a run ends

_ROOT = Path(__file__).resolve().parents[2]
_EXTREMES = (0, 1, 2, 3, 7, 8, 31, 32, 33, 127, 128, 255, 256, 65535, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32)
_EXTREMES += (1 << 40, 1 << 53, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_NUMBERS = ("0", "-0.0", "1", "-1", "2", "3", "0.5", "1e-320", "1e-300", "1e300", "1e308", "1e400", "-1e400", "NaN", "Infinity")
_NUMBERS += ("2147483647", "2147483648", "4294967296", "9223372036854775807", "18446744073709551616", "9" * 400, "9" * 5000)
_TEXTS = ("", "a", "\0", "\x1b[2J", "../x", "/", "\ud800", "é", "☃" * 3, "x" * 300, "%s%n", "{{", "[", "None", "0", "f32", "NaN")


def check(case: Case, num_cases: int) -> Counter[str]:
    """Run seeds 0 to `num_cases` - 1, or as many as CPUSPEC_FUZZ says; returns how many were answered and how many refused.

    Raises AssertionError that names every fault with its seed and how to see it again.
    """
    num_cases = int(os.environ.get("CPUSPEC_FUZZ") or num_cases)
    target = f"{case.__module__}:{case.__name__}"
    outcomes, faults = run_cases(target, range(num_cases))
    again = f"python -m tests.fuzz.drive {target}"
    assert not faults, "\n\n".join(f"{again} {seed}\n{fault}" for seed, fault in faults.items())
    return outcomes


def run_cases(
    target: str, seeds: Sequence[int], deadline_s: float = DEADLINE_S, memory_bytes: int = MEMORY_BYTES
) -> tuple[Counter[str], dict[int, str]]:
    """Counts of outcomes, and what went wrong by seed. A child that dies is followed by another for the seeds that are left."""
    outcomes: Counter[str] = Counter()
    faults: dict[int, str] = {}
    left = list(seeds)
    while left and len(faults) < _MOST_FAULTS:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
            record = Path(directory) / "record"
            command = [sys.executable, "-m", "tests.fuzz.drive", target, str(left[0]), str(left[-1] + 1)]
            limits = [directory, str(deadline_s), str(memory_bytes)]
            with (Path(directory) / "stderr").open("w+") as stderr:
                done = subprocess.run([*command, *limits], cwd=_ROOT, stdout=stderr, stderr=stderr, check=False)
                stderr.seek(0)
                tail = stderr.read()[-4000:]
            lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        for seed, outcome, detail in lines:
            if outcome == "fault":
                faults[seed] = detail
            elif outcome != "began":
                outcomes[outcome] += 1
        if not lines:
            raise AssertionError(f"{target} could not be started:\n{tail}")
        last_seed, last_outcome, _ = lines[-1]
        if last_outcome == "began":
            faults[last_seed] = f"the process ended with {done.returncode} (negative: of that signal)\n{tail}"
        left = [seed for seed in left if seed > last_seed]
    return outcomes, faults


def mutate_bytes(content: bytes, rng: random.Random, fields: Sequence[tuple[int, int]] = ()) -> bytes:
    """`content` with one to eight damages. fields: (position, bytes) of little-endian integers worth aiming at: lengths, counts,
    offsets, types, dimensions."""
    kinds = ["flip", "byte", "overwrite", "copy", "cut", "insert", "remove", *["field", "near", "swap"] * (2 if fields else 0)]
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3, 8))):
        kind = rng.choice(kinds)
        if not content:
            return content
        at, other = rng.randrange(len(content)), rng.randrange(len(content))
        span = min(rng.choice((1, 2, 4, 8, 16, 64, 256)), len(content) - at)
        position, size = rng.choice(fields) if fields else (at, 1)
        if kind == "flip":
            content = _patched(content, at, bytes([content[at] ^ (1 << rng.randrange(8))]))
        elif kind == "byte":
            content = _patched(content, at, bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF, rng.randrange(256)))]))
        elif kind == "overwrite":
            content = _patched(content, at, rng.choice((bytes(span), b"\xff" * span, rng.randbytes(span))))
        elif kind == "copy":
            content = _patched(content, at, content[other : other + span])
        elif kind == "cut":
            content = content[:at]
        elif kind == "insert":
            content = content[:at] + rng.choice((rng.randbytes(span), content[other : other + span])) + content[at:]
        elif kind == "remove":
            content = content[:at] + content[at + span :]
        else:
            old = int.from_bytes(content[position : position + size], "little")
            if kind == "field":
                value = rng.choice(_EXTREMES)
            elif kind == "near":
                value = old + rng.choice((-64, -32, -2, -1, 1, 2, 32, 64, old))
            else:
                start, length = rng.choice(fields)
                value = int.from_bytes(content[start : start + length], "little")
            content = _patched(content, position, (value % (1 << 8 * size)).to_bytes(size, "little"))
    return content


def mutate_text(text: str, rng: random.Random) -> bytes:
    """A text such as XML, TOML or a template, encoded, with some numbers, words and brackets damaged, or some bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(text.encode(), rng)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        parts = list(re.finditer(r"-?[0-9]+(\.[0-9]+)?|\w+|[^\w\s]", text))
        if not parts:
            break
        part, other = rng.choice(parts), rng.choice(parts)
        numbers = [one for one in parts if one[0].lstrip("-")[:1].isdigit()]
        kind = rng.choice(("number", "number", "word", "remove", "repeat", "other"))
        if kind == "number" and numbers:
            part, replacement = rng.choice(numbers), rng.choice(_NUMBERS)
        elif kind == "remove":
            replacement = ""
        elif kind == "repeat":
            replacement = part[0] * rng.choice((2, 3, 1000))
        elif kind == "other":
            replacement = other[0]
        else:
            replacement = rng.choice(_TEXTS)
        text = text[: part.start()] + replacement + text[part.end() :]
    return text.encode("utf-8", "surrogatepass")


def mutate_json(value: JSON, rng: random.Random) -> bytes:
    """A JSON value, encoded, with some of its parts replaced by other values, removed, renamed or repeated; or its text damaged."""
    if rng.random() < 0.2:
        return mutate_text(json.dumps(value), rng)
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(value))
        if not places:
            break
        holder, key = rng.choice(places)
        kind = rng.choice(("replace", "replace", "replace", "remove", "rename", "repeat", "swap"))
        if kind == "replace":
            holder[key] = _other_value(holder[key], rng)
        elif kind == "remove":
            del holder[key]
        elif kind == "rename" and isinstance(holder, dict):
            holder[rng.choice(_TEXTS)] = holder.pop(key)
        elif kind == "repeat" and isinstance(holder, list):
            holder[key:key] = [holder[key]] * rng.choice((1, 2, 100))
        else:
            other_holder, other_key = rng.choice(places)
            copied = json.loads(json.dumps(other_holder[other_key]))
            holder[key] = copied
    try:
        text = json.dumps(value)
    except RecursionError:  # deeper than anything that Python writes
        return b"[" * rng.choice((5_000, 1_000_000))
    # What `json.dumps` cannot write: numbers beyond every type, and the same key twice.
    if rng.random() < 0.1 and (numbers := list(re.finditer(r"(?<=[:,\[] )-?[0-9][0-9.e+-]*", text))):
        part = rng.choice(numbers)
        text = text[: part.start()] + rng.choice(_NUMBERS) + text[part.end() :]
    return text.encode("utf-8", "surrogatepass")


def _places(value: JSON) -> "list[tuple]":
    """(object or array, key or index) of every part of a value."""
    places, waiting = [], [value]
    while waiting:
        one = waiting.pop()
        keys = one.keys() if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        places += [(one, key) for key in keys]
        waiting += [one[key] for key in keys]
    return places


def _other_value(old: JSON, rng: random.Random) -> JSON:
    others: list[JSON] = [None, True, False, "", [], {}, 0, -1, 1.5, 1e308, [old], {"a": old}, rng.choice(_TEXTS)]
    if isinstance(old, int | float) and rng.random() < 0.7:
        others = [0, -1, 1, old + 1, old - 1, old * 2, -old, 1e-320, 1e308, 0.5, True, str(old), rng.choice(_EXTREMES)]
    if isinstance(old, str) and rng.random() < 0.5:
        others = [old + "x", old[:-1], old.upper(), old * 2, "\0" + old, *_TEXTS]
    if rng.random() < 0.03:
        deep: JSON = old
        for _ in range(rng.choice((50, 500))):
            deep = [deep]
        return deep
    return rng.choice(others)


def _patched(content: bytes, at: int, part: bytes) -> bytes:
    return content[:at] + part + content[at + len(part) :]


def _find(target: str) -> Case:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _run_child(target: str, first: int, end: int, directory: Path, deadline_s: float, memory_bytes: int) -> None:
    """Run seeds `first` to `end` - 1 and write to `directory`/record what each began and came to."""
    case = _find(target)
    _limit(memory_bytes)
    with (directory / "record").open("w") as record:

        def note(seed: int, outcome: str, detail: str = "") -> None:
            record.write(json.dumps([seed, outcome, detail]) + "\n")
            record.flush()

        for seed in range(first, end):
            room = directory / "case"
            room.mkdir()
            note(seed, "began")
            faulthandler.dump_traceback_later(deadline_s, exit=True)
            try:
                case(random.Random(seed), room)
            except CpuspecError:
                note(seed, "refused")
            except BaseException:
                lines = traceback.format_exc().splitlines()
                note(seed, "fault", "\n".join(line[:300] for line in lines)[-4000:])
            else:
                note(seed, "answered")
            faulthandler.cancel_dump_traceback_later()
            shutil.rmtree(room)


def _limit(num_bytes: int) -> None:
    """Let this process reach no network, tell where it crashes, and ask for `num_bytes` more than it has, where that can be."""
    os.environ["CPUSPEC_OFFLINE"] = "1"
    faulthandler.enable()
    with suppress(ImportError, OSError):
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(arguments: Sequence[str]) -> None:
    """`target seed` runs one case here; with an end, a directory and limits as well, it is the child of `run_cases`."""
    if len(arguments) == 2:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
            case = _find(arguments[0])
            _limit(MEMORY_BYTES)
            case(random.Random(int(arguments[1])), Path(directory))
            print("answered")
    else:
        target, first, end, directory, deadline_s, memory_bytes = arguments
        _run_child(target, int(first), int(end), Path(directory), float(deadline_s), int(memory_bytes))


if __name__ == "__main__":
    main(sys.argv[1:])
