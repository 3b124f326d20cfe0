"""What an evaluation set and a training text share is found, and nothing else; near duplicates are told from other texts."""

import json
from pathlib import Path

import pytest

from cpuspec.errors import ConfigError
from cpuspec.train.overlap import NUM_WORDS, Exclusion, Known, runs, words_of

TASK = "Return the number of ways in which a robot that only moves right or down can cross the grid from corner to corner."
SHORT = "Compose a travel blog post about Hawaii, highlighting cultural experiences."


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    lines = [{"task_id": "a/0", "prompt": f"def cross(grid):\n    '''{TASK}'''\n"}, {"turns": [SHORT, "Again, please."]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("text", "is_shared"),
    [
        (TASK, True),
        (f"Please. {TASK.upper()} Thanks.", True),
        (f"# {TASK.replace(' ', '  ').replace('number', '**number**')}", True),
        (" ".join(TASK.split()[:NUM_WORDS]), True),
        (" ".join(TASK.split()[-NUM_WORDS:]), True),
        (" ".join(TASK.split()[: NUM_WORDS - 1]), False),
        (TASK.replace("right", "left"), False),
        (f"Now: {SHORT}", True),
        (SHORT.replace("Hawaii", "Norway"), False),
        ("Again, please.", False),  # too short to be anybody's own
        ("", False),
    ],
)
def test_thirteen_words_in_a_row_are_found_however_they_are_written(tasks: Path, text: str, is_shared: bool) -> None:
    found = Exclusion([tasks]).find(text)
    assert (found is not None) == is_shared
    if found:
        assert found.file == "tasks.jsonl"
        assert found.words in " ".join(words_of(text))


def test_nothing_is_found_where_nothing_is_excluded() -> None:
    assert Exclusion().find(TASK) is None


def test_files_say_what_was_compared(tasks: Path, tmp_path: Path) -> None:
    plain = tmp_path / "set.txt"
    plain.write_text(f"{TASK}\n\nshort\n")
    first, second = Exclusion([tasks, plain]).files
    assert (first.name, first.num_texts) == ("tasks.jsonl", 2)
    assert first.num_runs == len(words_of(f"def cross grid {TASK}")) - NUM_WORDS + 1 + 1
    assert (second.name, second.num_texts, second.num_runs) == ("set.txt", 1, 0)  # every run of it is the first file's
    assert len(first.sha256) == 64


@pytest.mark.parametrize("content", ["", "{}\n", '{"a": "too short"}\n', "{", "[" * 100_000])
def test_a_file_that_excludes_nothing_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"tasks\.jsonl"):
        Exclusion([path])
    with pytest.raises(ConfigError, match="does not exist"):
        Exclusion([tmp_path / "nowhere.jsonl"])


def test_runs_are_every_run() -> None:
    assert list(runs(["a", "b", "c"], 2)) == ["a b", "b c"]
    assert list(runs(["a"], 2)) == []


def test_half_of_the_runs_make_a_duplicate() -> None:
    known = Known()
    listed = [f"word{i}" for i in range(60)]
    known.add(" ".join(listed))
    other = [f"other{i}" for i in range(60)]
    assert not known.is_new(" ".join(listed))
    assert not known.is_new(" ".join(listed).upper().replace(" ", ",\n"))
    assert not known.is_new(" ".join([*listed[:45], *other[:15]]))
    assert known.is_new(" ".join([*listed[:20], *other[:40]]))
    assert known.is_new(" ".join(other))
    assert known.is_new("a few words")
    known.add("a few words")
    assert not known.is_new("A few words!")
    assert known.has("A few words!")
    assert [known.has(" ".join([*listed[:n], *other[n:]])) for n in (45, 20, 0)] == [True, False, False]
    assert not known.has("...")
    assert not Known().has("and so on and so forth " * 20), "repeated, but not known"


def test_a_text_that_goes_round_in_a_loop_is_not_new() -> None:
    assert not Known().is_new("and so on and so forth " * 20)
    assert not Known().is_new("...")
