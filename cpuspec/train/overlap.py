"""What texts share, counted in words: an evaluation set in the training data, and texts that are nearly the same.

A text that has 13 words in a row of an evaluation set is refused, as in GPT-3 (arXiv 2005.14165, appendix C, where runs of 8 to 13
words count, by the length of the set's texts); here a text of the set that is shorter, of 8 words or more, counts as a whole. PaLM
(arXiv 2204.02311, section 8) counts which share of a text's runs is known, and so do near duplicates here: half of the runs of 13.
Words are runs of letters, digits and underscores
without regard to case, so that spaces, punctuation and markup make no difference.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuspec.errors import ConfigError, printable
from cpuspec.files import read_file

NUM_WORDS = 13
_LEAST_WORDS = 8  # of a text of an evaluation set: fewer in a row occur anywhere
_KNOWN_SHARE = 0.5
_MAX_BYTES = 1 << 28
_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return _WORD.findall(text.lower())


def runs(listed: list[str], length: int) -> Iterator[str]:
    """Every run of `length` words, with spaces between them; none where there are fewer."""
    return (" ".join(listed[i : i + length]) for i in range(len(listed) - length + 1))


@dataclass(frozen=True)
class ExcludedFile:
    """An evaluation set. num_texts: those of it that are long enough to be found again, num_runs: runs of words of these."""

    name: str
    sha256: str
    num_texts: int
    num_runs: int


@dataclass(frozen=True)
class Shared:
    """Words in a row that a text shares with an evaluation set."""

    file: str
    words: str


class Exclusion:
    """Evaluation sets that no training text may have words of. files: what was read."""

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        """Every text of JSON or JSON-lines files, whatever its field; each paragraph of other files.

        Raises ConfigError for a file that cannot be read, is not UTF-8, or has no text of 8 words.
        """
        self.files: list[ExcludedFile] = []
        self._files_of: dict[int, dict[str, str]] = {}  # by the number of words: run of words -> file
        for path in paths:
            self._add(path)

    def find(self, text: str) -> Shared | None:
        """The first run of words that a text shares with an excluded file; None for none."""
        listed = words_of(text)
        for length, files in self._files_of.items():
            if run := next((run for run in runs(listed, length) if run in files), None):
                return Shared(files[run], run)
        return None

    def _add(self, path: Path) -> None:
        content = read_file(path, _MAX_BYTES, ConfigError)
        try:
            texts = [words_of(text) for text in _texts(content.decode("utf-8"), path.suffix in (".json", ".jsonl"))]
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be excluded: {printable(str(error))[:200]}") from None
        known = [text for text in texts if len(text) >= _LEAST_WORDS]
        num_runs = 0
        for text in known:
            files = self._files_of.setdefault(min(len(text), NUM_WORDS), {})
            for run in runs(text, min(len(text), NUM_WORDS)):
                num_runs += run not in files
                files.setdefault(run, path.name)
        if not known:
            raise ConfigError(f"{path} has no text of {_LEAST_WORDS} words that could be excluded; name the evaluation set itself")
        self.files.append(ExcludedFile(path.name, hashlib.sha256(content).hexdigest(), len(known), num_runs))


def _texts(content: str, is_json: bool) -> Iterator[str]:
    """Every text in a file's values. Raises ValueError for what is no JSON."""
    if not is_json:
        yield from re.split(r"\n\s*\n", content)
        return
    try:
        values = [json.loads(content)]
    except ValueError:
        values = [json.loads(line) for line in content.splitlines() if line.strip()]
    while values:
        value: Any = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value


class Known:
    """The texts that were kept so far, by the runs of words that they have."""

    def __init__(self) -> None:
        self._runs: set[int] = set()

    def is_new(self, text: str) -> bool:
        """Whether a text has words, and fewer than half of its runs of words are known or occur in it before."""
        found = _hashes(text)
        return len(set(found) - self._runs) > (1 - _KNOWN_SHARE) * len(found)

    def has(self, text: str) -> bool:
        """Whether half of a text's runs of words, or more, are known."""
        found = set(_hashes(text))
        return bool(found) and len(found & self._runs) >= _KNOWN_SHARE * len(found)

    def add(self, text: str) -> None:
        """Know a text from now on."""
        self._runs.update(_hashes(text))


def _hashes(text: str) -> list[int]:
    """Of each run of words of a text, or of all its words where they are few."""
    listed = words_of(text)
    return [hash(run) for run in runs(listed, min(len(listed), NUM_WORDS))] if listed else []
