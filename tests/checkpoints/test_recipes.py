from pathlib import Path

import pytest

from cpuspec.checkpoints.recipes import (
    DEFAULT_RECIPE,
    HubSource,
    PackageSource,
    find_recipe,
    load_chains,
    load_recipes,
    model_and_spec,
    read_recipe,
    recipe_of,
)
from cpuspec.config import LevelSpec, SpecConfig
from cpuspec.environment import cache_dir
from cpuspec.errors import ConfigError

GOOD = f"""
name = "tiny"
description = "a test"
architecture = "llama"
parameters = 10
file = "tiny.gguf"
bytes = 30
sha256 = "{"ab" * 32}"
licence = "MIT"

[[sources]]
kind = "huggingface"
repository = "someone/tiny-GGUF"
file = "tiny.gguf"

[[sources]]
kind = "pypi"
parts = [
    {{ package = "tiny-part1", version = "1.0", member = "tiny_part1/data.bin", bytes = 20 }},
    {{ package = "tiny-part2", version = "1.0", member = "tiny_part2/data.bin", bytes = 10 }},
]

[[golden]]
prompt = "Once"
token_ids = [1, 2, 3]

[layer_skip]
1 = [7]
2 = [7, 4]
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_every_shipped_recipe_reads_and_the_default_is_among_them() -> None:
    recipes = load_recipes()
    assert DEFAULT_RECIPE in recipes
    for name, recipe in recipes.items():
        assert recipe.name == name
        # The public hub comes first, an index of packages is the second way.
        assert [type(source) for source in recipe.sources] == [HubSource, PackageSource]


def test_a_recipe_says_everything_that_its_file_says(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path / "tiny.toml", GOOD))
    hub, packages = recipe.sources
    assert (recipe.name, recipe.num_bytes, recipe.parameters, recipe.licence_note) == ("tiny", 30, 10, "")
    assert isinstance(hub, HubSource)
    assert (hub.repository, hub.file, hub.revision) == ("someone/tiny-GGUF", "tiny.gguf", "main")
    assert isinstance(packages, PackageSource)
    assert [(part.package, part.num_bytes) for part in packages.parts] == [("tiny-part1", 20), ("tiny-part2", 10)]
    assert recipe.golden[0].token_ids == (1, 2, 3)
    assert recipe.layer_skip == {1: (7,), 2: (4, 7)}


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('name = "tiny"', 'name = "../tiny"', "name"),
        ('name = "tiny"', "name = 3", "name"),
        ('name = "tiny"', "", "name"),
        ('file = "tiny.gguf"\nbytes', 'file = "../../tiny.gguf"\nbytes', "file"),
        ('file = "tiny.gguf"\nbytes', 'file = ".hidden"\nbytes', "file"),
        ("bytes = 30", "bytes = -1", "bytes"),
        ("bytes = 30", "bytes = true", "bytes"),
        ("bytes = 30", 'bytes = "30"', "bytes"),
        ("bytes = 30", "bytes = 31", "parts"),
        ("bytes = 30", "bytes = 99999999999999999999", "bytes"),
        ("abab", "ABAB", "sha256"),
        ("abab", "ab", "sha256"),
        ('licence = "MIT"', 'licence = "MIT"\nlicense = "MIT"', "license"),
        ('kind = "huggingface"', 'kind = "ftp"', "kind"),
        ('repository = "someone/tiny-GGUF"', 'repository = "tiny"', "repository"),
        ('repository = "someone/tiny-GGUF"', 'repository = "../../x"', "repository"),
        ('package = "tiny-part1"', 'package = "--index-url=x"', "package"),
        ('package = "tiny-part1"', 'package = "tiny @ file:///etc"', "package"),
        ('version = "1.0", member = "tiny_part1', 'version = "1.0 --pre", member = "tiny_part1', "version"),
        ('member = "tiny_part1/data.bin"', 'member = "a/../../data.bin"', "member"),
        ("bytes = 20 }", "bytes = 20, size = 3 }", "size"),
        ("[1, 2, 3]", "[1, -2]", "token_ids"),
        ("[1, 2, 3]", '"1 2"', "token_ids"),
        ("[[golden]]", "[golden]", "golden"),
        ("2 = [7, 4]", "2 = [7]", "layer_skip: 2"),
        ("2 = [7, 4]", "2 = [7, 7]", "layer_skip: 2"),
        ("2 = [7, 4]", "02 = [7, 4]", "layer_skip: 02"),
        ("2 = [7, 4]", "two = [7, 4]", "layer_skip: two"),
        ("2 = [7, 4]", '2 = ["7", "4"]', "layer_skip: 2"),
        ("[layer_skip]", "[[layer_skip]]", "layer_skip"),
        ("[[sources]]", "[[source]]", "sources"),
    ],
)
def test_a_wrong_key_is_named_with_file_and_value(tmp_path: Path, old: str, new: str, named: str) -> None:
    assert old in GOOD
    path = write(tmp_path / "tiny.toml", GOOD.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)


def test_a_file_is_known_by_its_name_and_size(tmp_path: Path, cache: Path) -> None:
    write(cache / "recipes" / "tiny.toml", GOOD)
    file = write(tmp_path / "elsewhere" / "tiny.gguf", "x" * 30)
    found = recipe_of(file)
    assert found is not None
    assert found.name == "tiny"
    assert recipe_of(write(tmp_path / "other.gguf", "x" * 30)) is None
    assert recipe_of(write(file, "x" * 31)) is None
    assert recipe_of(tmp_path / "nothing.gguf") is None


@pytest.mark.parametrize("content", [b"name = ", b"\xff\xfe", b"\x00"])
def test_what_is_not_toml_is_a_config_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tiny.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not TOML"):
        read_recipe(path)


def test_a_missing_recipe_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        find_recipe(str(tmp_path / "nothing.toml"))


def test_names_ignore_case_and_a_misspelt_one_gets_the_nearest() -> None:
    assert find_recipe("SmolLM2-135M-Instruct").name == "smollm2-135m-instruct"
    with pytest.raises(ConfigError, match=r"did you mean smollm2-135m-instruct\?"):
        find_recipe("smollm-135-instruct")
    with pytest.raises(ConfigError, match=r"did you mean qwen2\.5-coder-1\.5b-instruct\?"):
        find_recipe("coder")
    with pytest.raises(ConfigError, match="known: qwen"):
        find_recipe("zzzzzzzz")


def test_a_users_recipe_is_found_by_name_by_path_and_before_a_shipped_one(cache: Path, tmp_path: Path) -> None:
    write(cache / "recipes" / "tiny.toml", GOOD)
    assert find_recipe("tiny").file == "tiny.gguf"
    assert find_recipe(str(write(tmp_path / "x.toml", GOOD.replace('"tiny"', '"other"')))).name == "other"
    write(cache / "recipes" / "mine.toml", GOOD.replace('name = "tiny"', f'name = "{DEFAULT_RECIPE}"'))
    assert find_recipe(DEFAULT_RECIPE).file == "tiny.gguf"


CHAIN = """
name = "fast"
description = "a test"
target = "tiny"
levels = ["ngram@8", { drafter = "some/model,v2.gguf", num_tokens = 3 }]
"""


def test_every_shipped_chain_has_a_shipped_target() -> None:
    recipes, chains = load_recipes(), load_chains()
    assert chains
    assert all(chain.target in recipes and chain.spec.levels and name not in recipes for name, chain in chains.items())


def test_a_chains_name_stands_for_its_target_and_its_drafts(cache: Path, tmp_path: Path) -> None:
    write(cache / "recipes" / "fast.toml", CHAIN)
    spec = SpecConfig((LevelSpec("ngram", 8), LevelSpec("some/model,v2.gguf", 3)))
    path = str(write(tmp_path / "x.toml", CHAIN))
    for name in ("fast", " Fast", path):
        assert model_and_spec(name, None) == ("tiny", spec)
        assert model_and_spec(name, "ngram") == ("tiny", SpecConfig((LevelSpec("ngram"),)))
        assert model_and_spec(name, SpecConfig()) == ("tiny", SpecConfig())
    model = str(write(tmp_path / "tiny.toml", GOOD))
    assert [model_and_spec(name, "ngram")[0] for name in ("tiny", "a/b.gguf", model)] == ["tiny", "a/b.gguf", model]
    assert "fast" not in load_recipes()


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('name = "fast"', 'name = "a b"', "name"),
        ('"ngram@8"', '"ngram@0"', "levels: ngram drafts 1 to 255"),
        ('"ngram@8"', "8", "levels: cannot read draft level 8"),
        ("levels = ", "rungs = ", "levels"),
        ('target = "tiny"', 'target = ""', "target"),
        ('target = "tiny"', 'target = "tiny"\nbytes = 3', "no such key: bytes"),
    ],
)
def test_a_chain_that_cannot_be_read_names_file_and_key(tmp_path: Path, old: str, new: str, named: str) -> None:
    assert old in CHAIN
    path = write(tmp_path / "x.toml", CHAIN.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        model_and_spec(str(path), None)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)


def test_the_cache_follows_its_variables_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("CPUSPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "cpuspec"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir().is_absolute()
    assert "relative" not in str(cache_dir())
