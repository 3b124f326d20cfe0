"""What names of the hub stand for among the files of some hundred published repositories; what is fetched is what is read."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

import cpuspec
from cpuspec.checkpoints.hub import MODEL_FILES, choose, read_hub_name
from cpuspec.errors import ConfigError

USUAL = {
    "@hf": ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"],
    "@bpe": ["vocab.json", "merges.txt"],
}
INDEX = "model.safetensors.index.json"
# Constants of readers that look like files of a directory but are not asked for in repositories: they are GGUF's keys, Ollama's
# layers, OpenVINO's and PEFT's directories, and grids of this package.
NOT_OF_A_REPOSITORY = {"grids.json", "ggml.model", "tokenizer.ggml.model", "adapter_config.json"}


class Listing(NamedTuple):
    name: str
    files: dict[str, int]
    unread: frozenset[str]
    result: str


def expanded(word: str) -> Iterator[str]:
    parts = re.split(r"\{(.*?)\}", word)
    for chosen in product(*(part.split(",") if at % 2 else [part] for at, part in enumerate(parts))):
        yield "".join(chosen)


def listings() -> list[Listing]:
    found = []
    for line in Path(__file__).with_name("listings.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        name, words, result = (part.strip() for part in line[1:].split(" | "))
        files: dict[str, int] = {}
        unread = set()
        for word, _, size in (one.partition("=") for one in words.split()):
            if word[1:].isdigit() and word[0] == "@":
                shards = [f"model-{number:05}-of-{int(word[1:]):05}.safetensors" for number in range(1, int(word[1:]) + 1)]
                files |= dict.fromkeys([INDEX, *shards], 1)
            for one in USUAL.get(word, expanded(word.lstrip("!"))):
                if not word[1:].isdigit():
                    files[one] = round(1e9 * float(size or 0.001))
                    unread |= {one} if word.startswith("!") else set()
        found.append(Listing(name, files, frozenset(unread), result))
    return found


@pytest.mark.parametrize("listing", listings(), ids=lambda listing: listing.name)
def test_a_published_repository_gives_its_model_or_says_why_not(listing: Listing) -> None:
    model = read_hub_name(listing.name)
    assert model is not None
    shards = [name for name in listing.files if name.endswith(".safetensors") and "/" not in name and name not in listing.unread]

    def chosen() -> tuple[str, set[str]]:
        choice = choose(model, listing.files, lambda: shards)
        assert choice.files[-1].endswith((".safetensors", ".gguf")), "weights come last"
        return choice.opened, set(choice.files)

    if listing.result.startswith("?"):
        with pytest.raises(ConfigError, match=re.escape(listing.result[2:])) as caught:
            chosen()
        assert str(caught.value).startswith(model.repository)
    elif listing.result.startswith((".", "-")):
        assert chosen() == ("", listing.files.keys() - listing.unread - {listing.result[1:]})
    else:
        stem = re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", listing.result)
        parts = {
            name
            for name in listing.files
            if name == listing.result or re.fullmatch(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}.gguf", name)
        }
        assert chosen() == (listing.result, parts)


def test_a_shard_that_the_index_names_and_nobody_has_is_told() -> None:
    model = read_hub_name("someone/tiny")
    assert model is not None
    files = {"config.json": 1, INDEX: 1, "model-00001-of-00002.safetensors": 1}
    with pytest.raises(
        ConfigError, match=r"it lacks model-00002-of-00002\.safetensors, which its model\.safetensors\.index\.json names"
    ):
        choose(model, files, lambda: ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])


def test_every_file_that_a_reader_names_is_fetched() -> None:
    """The list of the downloader is what readers of directories ask for: a reader of a new file fails here until it is listed."""
    named = set()
    for path in Path(cpuspec.__file__).parent.glob("*/**/*.py"):
        if path.relative_to(Path(cpuspec.__file__).parent).parts[0] not in ("checkpoints", "text"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= set(re.findall(r"^[A-Za-z0-9_.]+\.(?:json|jinja|model|pt|txt)$", node.value))
    wanted = named - NOT_OF_A_REPOSITORY - {INDEX}
    assert {"config.json", "tokenizer.model", "hf_quant_config.json", "mask_embedding.pt"} <= wanted
    assert [name for name in sorted(wanted) if not any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)] == []
    for name in ("additional_chat_templates/tool_use.jinja", "1_Pooling/config.json"):
        assert any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)
