"""JSON from strangers, parsed without surprises."""

import json
from collections import Counter
from pathlib import Path
from typing import NoReturn

from cpuspec.errors import CheckpointError
from cpuspec.files import read_file


def parse_json_object(text: bytes, what: str) -> dict[str, object]:
    """The object that `text` holds. Raises CheckpointError, naming `what`, if it is not exactly one sound JSON object.

    Bad syntax is refused, and so are repeated keys, NaN and infinity, nesting too deep to parse, and numbers too long to read.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"the key {repeated[:80]!r} is repeated")
        return fields

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number")

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not sound JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is a JSON {type(value).__name__}, wanted an object")
    return value


def read_json_object(path: Path, max_bytes: int) -> dict[str, object]:
    """The object in a file of at most `max_bytes`. Raises CheckpointError if it is missing, too large or not sound."""
    return parse_json_object(read_file(path, max_bytes, CheckpointError), str(path))
