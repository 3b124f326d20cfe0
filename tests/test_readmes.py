"""The README files tell the truth where a test can see it: links, commands, options, draft specs."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import cpuspec
from cpuspec.cli.app import whole_command
from cpuspec.engine.draft_spec import check_spec
from cpuspec.settings import SpecConfig
from tools.make_tiny_model import make_tiny_gguf

ROOT = Path(cpuspec.__file__).parents[1]
PACKAGES = sorted(path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "cpuspec").glob("*/README.md"))
DIRECTORIES = (".", "benchmarks", "models", "models/heads", "cpuspec", *PACKAGES)
CONTRIBUTING = Path(".github/CONTRIBUTING.md")
DECISIONS = Path("benchmarks/DECISIONS.md")
COMING_FROM = Path("cpuspec/cli/COMING_FROM.md")
READMES = (
    *(Path(directory, "README.md") for directory in DIRECTORIES),
    CONTRIBUTING,
    Path(".github/CHANGELOG.md"),
    DECISIONS,
    COMING_FROM,
)
TEXTS = {path.as_posix(): (ROOT / path).read_text("utf-8") for path in READMES}


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def anchors(text: str) -> set[str]:
    """What a link to a heading of this text may name, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


def commands() -> Iterator[list[str]]:
    """The cpuspec commands of all examples, without the name."""
    for text in TEXTS.values():
        for line in "\n".join([*fenced(text, "sh"), *fenced(text, "console")]).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for at, word in enumerate(words):
                if word in ("cpuspec", ".venv/bin/cpuspec"):
                    yield words[at + 1 :]


def draft_specs() -> Iterator[str]:
    """The specs of all examples; capitals are places to fill in, and examples of training name what they have made."""
    for name, text in TEXTS.items():
        for spec in re.findall(r"--draft ([^\s`]+)", text):
            if not re.search(r"[A-Z]{2}|@N$", spec) and ".py:" not in spec and name != "cpuspec/train/README.md":
                yield spec
    for line in section(TEXTS["cpuspec/speculation/README.md"], "Specs").splitlines():
        if line.startswith("| `"):
            yield from re.findall(r"`([a-z][^`]*)`", line.split(" | ")[0])


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_to_files_and_headings(name: str) -> None:
    for target in re.findall(r"\]\((?!https:)([^)]+)\)", TEXTS[name]):
        path, _, heading = target.partition("#")
        found = (ROOT / name).parent / path
        assert found.exists(), f"{name} links to {target}"
        if heading:
            assert heading in anchors(found.read_text("utf-8") if path else TEXTS[name]), f"{name} links to {target}"


def test_the_readmes_of_packages_are_short_and_fit_a_terminal() -> None:
    texts = [text for name, text in TEXTS.items() if name.startswith("cpuspec/")]
    assert len(texts) > 15
    assert sum(bool(re.search(r"\w", word)) for text in texts for word in text.split()) <= 13_800, "what repeats docstrings goes"
    assert [line for text in texts for line in text.splitlines() if len(line) >= 200] == []


def test_decisions_are_short_and_every_entry_that_is_named_exists() -> None:
    text = TEXTS[DECISIONS.as_posix()]
    assert len(text.split()) <= 6000, "shorten or merge entries"
    entries = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert len(entries) == len(set(entries))
    assert all(re.fullmatch(r"[a-z0-9_-]+", entry) for entry in entries), "a heading is its own anchor"
    named = {
        (path.relative_to(ROOT).as_posix(), entry)
        for directory in ("cpuspec", "models", "tests", "tools", "benchmarks", ".github")
        for path in (ROOT / directory).rglob("*")
        if path.suffix in {".md", ".py", ".toml", ".cpp"}
        for entry in re.findall(r"DECISIONS\.md#([\w-]+)", path.read_text("utf-8"))
    }
    assert len(named) > 25
    assert {(path, entry) for path, entry in named if entry not in entries} == set()


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_commands_have_the_options_that_examples_use(words: list[str]) -> None:
    command = whole_command(words[0])
    if words[0] in {"eval", "train"}:
        command = command.commands[words[1]]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    used = {word.partition("=")[0] for word in words[1:] if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)}
    assert used <= known


@pytest.mark.parametrize("spec", sorted(set(draft_specs())))
def test_draft_specs_of_examples_are_understood(spec: str) -> None:
    check_spec(SpecConfig.parse(spec))


def test_every_place_that_contributors_are_sent_to_exists() -> None:
    named = re.findall(r"`((?:cpuspec|tests|tools|models|benchmarks|[a-z]+)/[\w/]*(?:\.\w+)?)`", TEXTS[CONTRIBUTING.as_posix()])
    named += re.findall(r"(?<![\w/])tests/[\w/]+(?:\.py)?", TEXTS[CONTRIBUTING.as_posix()])
    assert len(named) > 50
    assert [
        name for name in named if "NAME" not in name and not any((root / name).exists() for root in (ROOT, ROOT / "cpuspec"))
    ] == []


def test_the_front_page_is_short() -> None:
    assert len(TEXTS["README.md"].split()) <= 900


def test_the_python_of_the_front_page_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (source,) = fenced(TEXTS["README.md"], "python")
    made = make_tiny_gguf(tmp_path / "tiny.gguf")
    exec(source.replace("smollm2-135m-instruct", str(made)), {})
    assert capsys.readouterr().out.strip()
