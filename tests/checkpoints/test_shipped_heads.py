"""Heads that come with the package: small, with the bytes that their recipes name, and whole."""

import hashlib
import tomllib
from pathlib import Path

import pytest

from cpuspec.checkpoints.download import fetch
from cpuspec.checkpoints.heads import find_reader
from cpuspec.checkpoints.recipes import BesideSource, PackageSource, Recipe, find_named, load_recipes
from cpuspec.errors import DownloadError

_MOST_BYTES = 28_000_000
SHIPPED = [recipe for recipe in load_recipes().values() if recipe.head and isinstance(recipe.sources[0], BesideSource)]


def test_a_head_comes_with_the_package() -> None:
    assert SHIPPED


@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda recipe: recipe.name)
def test_a_shipped_head_is_small_whole_and_the_one_that_its_recipe_and_its_card_name(recipe: Recipe) -> None:
    path = fetch(recipe)
    data = path.read_bytes()
    assert len(data) <= _MOST_BYTES
    assert hashlib.sha256(data).hexdigest() == recipe.sha256
    found = find_reader(path)
    assert found
    reader, files = found
    assert reader.recognizes(files)
    card = (path.parent / "README.md").read_text()
    assert path.name in card
    assert recipe.sha256 in card
    assert recipe.head
    assert recipe.head.target in load_recipes()
    assert recipe.head.norm_sha256, "a shipped head says which model it is for"


def test_other_bytes_than_the_recipe_names_are_refused(tmp_path: Path) -> None:
    """What a broken installation has."""
    [recipe, *_] = SHIPPED
    broken = tmp_path / "heads" / fetch(recipe).name
    broken.parent.mkdir()
    broken.write_bytes(fetch(recipe).read_bytes()[:-1] + b"x")
    file = tmp_path / f"{recipe.name}.toml"
    text = (Path(fetch(recipe)).parents[1] / file.name).read_text()
    file.write_text(text[: text.index("# models/heads/pyproject.toml")])
    with pytest.raises(DownloadError, match=r"has other bytes: sha256 .* install again"):
        fetch(find_named(str(file)))


@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda recipe: recipe.name)
def test_the_package_of_heads_holds_each_file_where_its_recipe_looks(recipe: Recipe) -> None:
    package = tomllib.loads((fetch(recipe).parent / "pyproject.toml").read_text())
    [part] = next(source for source in recipe.sources if isinstance(source, PackageSource)).parts
    assert (part.package, part.version) == (package["project"]["name"], package["project"]["version"])
    assert package["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"][recipe.file] == part.member
    assert part.num_bytes == recipe.num_bytes
