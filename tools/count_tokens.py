"""Writes the tokens of answers, the most frequent first: the `frequent_tokens` of a draft model's recipe.

    python tools/count_tokens.py models/qwen2.5-coder-0.5b-instruct.ids ANSWERS.jsonl.xz

Answers are files of `cpuspec train answers`, packed or not.
"""

import json
import lzma
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer


def main(out: Path, answers: Annotated[list[Path], typer.Argument(metavar="ANSWERS...")]) -> None:
    """Count the tokens of all answers; of tokens that are as frequent the lowest number comes first."""
    counts = Counter[int]()
    for path in answers:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                counts.update(json.loads(line)["answer_ids"])
    ids = sorted(counts, key=lambda token: (-counts[token], token))
    out.write_text("\n".join(" ".join(map(str, ids[i : i + 20])) for i in range(0, len(ids), 20)) + "\n", "utf-8")
    print(f"{len(ids)} of {counts.total()} tokens are different")


if __name__ == "__main__":
    typer.run(main)
