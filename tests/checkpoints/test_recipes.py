from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from cpuspec import environment
from cpuspec.checkpoints.download import find_model
from cpuspec.checkpoints.families import FAMILIES
from cpuspec.checkpoints.hub import HubModel
from cpuspec.checkpoints.recipes import (
    DEFAULT_RECIPE,
    BesideSource,
    ChainRecipe,
    HeadOf,
    PackageSource,
    did_you_mean,
    find_named,
    load_all,
    load_recipes,
    recipe_of,
)
from cpuspec.engine.draft_spec import check_spec, draft_models, model_and_spec
from cpuspec.environment import cache_dir
from cpuspec.errors import ConfigError
from cpuspec.files import why_unwritable
from cpuspec.platform import SYSTEM
from cpuspec.settings import LevelSpec, SpecConfig
from tests.processes import make_pipe

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
name = "hf:someone/tiny-GGUF/tiny.gguf"

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
    assert load_all()[2] == []
    for name, recipe in recipes.items():
        assert recipe.name == name
        assert recipe.head.target in recipes if recipe.head else recipe.architecture in FAMILIES
        # The public hub comes first, an index of packages is the second way. What cpuspec trained comes with it.
        assert [type(source) for source in recipe.sources] in ([HubModel, PackageSource], [HubModel], [BesideSource, PackageSource])


def test_a_recipe_says_everything_that_its_file_says(tmp_path: Path) -> None:
    recipe = find_named(str(write(tmp_path / "tiny.toml", GOOD)))
    hub, packages = recipe.sources
    assert (recipe.name, recipe.num_bytes, recipe.parameters, recipe.licence_note) == ("tiny", 30, 10, "")
    assert hub == HubModel("someone/tiny-GGUF", "tiny.gguf")
    assert isinstance(packages, PackageSource)
    assert [(part.package, part.num_bytes) for part in packages.parts] == [("tiny-part1", 20), ("tiny-part2", 10)]
    assert recipe.golden[0].token_ids == (1, 2, 3)
    assert recipe.layer_skip == {1: (7,), 2: (4, 7)}


HEAD = """
name = "tiny-head"
description = "a test"
architecture = "dflash"
licence = "MIT"

[head]
target = "tiny"

[files]
"model.safetensors" = "{}"

[[sources]]
kind = "huggingface"
name = "someone/head@v1:safetensors"

[[sources]]
kind = "beside"
path = "heads/tiny"
""".format("ab" * 32)


def test_a_heads_recipe_says_for_which_model_it_is(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "tiny-head.toml", HEAD)
    recipe = find_named(str(path))
    assert (recipe.head, recipe.parameters) == (HeadOf("tiny"), 0)
    assert recipe.hashes == {"model.safetensors": "ab" * 32}
    assert recipe.sources == (HubModel("someone/head", "", "safetensors", "v1"), BesideSource(tmp_path / "heads" / "tiny"))
    assert model_and_spec(str(path), None) == ("tiny", SpecConfig((LevelSpec("auto"), LevelSpec(str(path)))))
    assert model_and_spec(str(path), "ngram") == ("tiny", SpecConfig.parse("ngram"))
    write(cache / "recipes" / "tiny-head.toml", HEAD)
    target, spec = model_and_spec("tiny-head", None)
    check_spec(spec)
    assert (target, str(spec), draft_models(spec)) == ("tiny", "auto,tiny-head", ["tiny-head"])
    norm = find_named(str(write(path, HEAD.replace('target = "tiny"', f'target = "tiny"\nnorm_sha256 = "{"cd" * 32}"'))))
    assert norm.head == HeadOf("tiny", "cd" * 32)


SHORT = """
name = "tiny"
description = "a test"
architecture = "llama"
parameters = 10
licence = "MIT"

[[sources]]
kind = "huggingface"
name = "someone/tiny-GGUF@v1:Q4_K_M"
"""


def test_a_recipe_of_the_hub_alone_needs_neither_file_nor_bytes_nor_hash(tmp_path: Path) -> None:
    recipe = find_named(str(write(tmp_path / "tiny.toml", SHORT)))
    assert recipe.sources == (HubModel("someone/tiny-GGUF", quantization="Q4_K_M", revision="v1"),)
    assert (recipe.file, recipe.num_bytes, recipe.sha256) == ("", None, "")


def test_packages_may_have_another_file_than_the_hub(tmp_path: Path, cache: Path) -> None:
    parts = '{ package = "tiny", version = "1.0", member = "tiny/data.bin", bytes = 30 }'
    own = f'file = "other.gguf"\nsha256 = "{"cd" * 32}"'
    text = SHORT + f'[[sources]]\nkind = "pypi"\n{own}\nparts = [{parts}]\n'
    recipe = find_named(str(write(cache / "recipes" / "tiny.toml", text)))
    hub, packages = recipe.sources
    assert (recipe.sha256, recipe.hashes, recipe.by(hub)) == ("", {}, recipe)  # the hub's own hash counts
    assert (recipe.by(packages).file, recipe.by(packages).num_bytes, recipe.by(packages).sha256) == ("other.gguf", 30, "cd" * 32)
    assert recipe_of(write(tmp_path / "other.gguf", "x" * 30)) == recipe.by(packages)
    for wrong in (own.replace("cd", "CD"), own.replace('"other', '"../other'), own.partition("\n")[2]):
        with pytest.raises(ConfigError, match=r"sources\[1\]: (sha256|file) is"):
            find_named(str(write(tmp_path / "tiny.toml", text.replace(own, wrong))))


def test_a_file_is_known_by_its_name_and_size(tmp_path: Path, cache: Path) -> None:
    write(cache / "recipes" / "tiny.toml", GOOD)
    file = write(tmp_path / "elsewhere" / "tiny.gguf", "x" * 30)
    found = recipe_of(file)
    assert found is not None
    assert found.name == "tiny"
    assert recipe_of(write(tmp_path / "other.gguf", "x" * 30)) is None
    assert recipe_of(write(file, "x" * 31)) is None
    assert recipe_of(tmp_path / "nothing.gguf") is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"name = ", "not TOML"),
        (b"\xff\xfe", "not TOML"),
        (b"\x00", "not TOML"),
        (b"a = " + b"9" * 5000, "not TOML"),
        (b"a = " + b"[" * 20_000, "nested too deep"),
        (b"a = " + b"{a=" * 10_000, "nested too deep"),
        # This one would take a minute.
        (b"a." * 30_000 + b"a = 1", "a line has more than 200 dots"),
        (b"#" * 70_000, "has 70000 bytes; wanted at most 65536"),
    ],
)
def test_what_is_not_a_small_flat_toml_file_is_a_config_error(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "tiny.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        find_named(str(path))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("depth", [10, 100, 150, 200, 250, 300, 400])
def test_levels_nested_too_deep_are_a_config_error(tmp_path: Path, depth: int) -> None:
    levels = '[{drafter="ngram",then=' * depth + "[]" + "}]" * depth
    path = write(tmp_path / "x.toml", f'name = "x"\ndescription = "d"\ntarget = "x"\nlevels = {levels}')

    def outcome() -> str:
        try:
            check_spec(model_and_spec(str(path), None)[1])
        except ConfigError as error:
            return str(error)
        return "read"

    assert outcome() == "read" or "too deep" in outcome()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("smolm2", "smollm2-135m-instruct or smollm2-360m-instruct or smollm2-1.7b-instruct"),
        ("qwen3-4", "qwen3-4b or qwen3-4b-fast"),
        ("qwen3-4b-fats", "qwen3-4b-fast"),
        ("coder", "qwen2.5-coder-7b-instruct"),
        ("mistral", ""),
        ("", ""),
    ],
)
def test_what_is_meant_is_found_by_the_beginning_of_a_name_the_smallest_first(text: str, wanted: str) -> None:
    known = [
        "qwen2.5-coder-7b-instruct",
        "qwen3-4b",
        "qwen3-4b-fast",
        *(f"smollm2-{size}-instruct" for size in ("1.7b", "135m", "360m")),
    ]
    assert did_you_mean(text, known) == (f"; did you mean {wanted}?" if wanted else "")


def test_of_one_size_the_model_is_offered_before_its_chains_and_heads() -> None:
    with pytest.raises(ConfigError, match=r"did you mean qwen2\.5-coder-1\.5b-instruct or qwen2\.5-coder-1\.5b-edit or "):
        find_model("qwen2.5-coder-1.5")


def test_a_users_recipe_is_found_by_name_by_path_and_before_a_shipped_one(cache: Path, tmp_path: Path) -> None:
    write(cache / "recipes" / "tiny.toml", GOOD)
    assert find_named("tiny").file == "tiny.gguf"
    assert find_named(str(write(tmp_path / "x.toml", GOOD.replace('"tiny"', '"other"')))).name == "other"
    write(cache / "recipes" / f"{DEFAULT_RECIPE}.toml", GOOD.replace('name = "tiny"', f'name = "{DEFAULT_RECIPE}"'))
    assert find_named(DEFAULT_RECIPE).file == "tiny.gguf"


def test_a_recipe_that_cannot_be_read_hurts_only_who_asks_for_it(cache: Path) -> None:
    write(cache / "recipes" / "broken.toml", "name = ")
    write(cache / "recipes" / "other-name.toml", GOOD)
    make_pipe(cache / "recipes" / "pipe.toml")
    write(cache / "recipes" / "Not a name.toml", "")
    recipes, _, problems = load_all()
    assert DEFAULT_RECIPE in recipes
    assert find_named(DEFAULT_RECIPE).name == DEFAULT_RECIPE
    assert [
        any(word in problem for word in ("broken.toml is not TOML", "'tiny'; wanted 'other-name'", "pipe.toml is not a"))
        for problem in problems
    ] == [True] * 3
    for name in ("broken", "other-name", "pipe"):
        with pytest.raises(ConfigError, match=f"{name}.toml"):
            find_named(name)


CHAIN = """
name = "fast"
description = "a test"
target = "tiny"
levels = ["ngram@8", { drafter = "some/model,v2.gguf", num_tokens = 3 }]
"""


def test_every_shipped_chain_has_a_shipped_target_and_shipped_drafts() -> None:
    recipes, chains, _ = load_all()
    assert chains
    for name, chain in chains.items():
        assert name not in recipes
        assert chain.target in recipes
        assert chain.spec.levels
        assert set(draft_models(chain.spec)) <= recipes.keys()
        check_spec(chain.spec)


@pytest.mark.parametrize("level", ["evil.py:Evil", "os:system", "ngram+evil.py:Evil", "./a/b.py:C"])
def test_a_chain_runs_no_code(tmp_path: Path, level: str) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    path = str(write(tmp_path / "x.toml", CHAIN.replace('"ngram@8"', f'"{level}"')))
    with pytest.raises(ConfigError, match=r"the chain fast drafts with Python code.*use the model tiny with --draft "):
        model_and_spec(path, None)
    # What the user asks for is the user's.
    assert str(model_and_spec(path, "evil.py:Evil")[1]) == "evil.py:Evil"


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
    assert isinstance(find_named("fast"), ChainRecipe)


WRONG = {
    "model": (
        GOOD,
        [
            ('name = "tiny"', 'name = "../tiny"', "name"),
            ('file = "tiny.gguf"\nbytes', 'file = "../../tiny.gguf"\nbytes', "file"),
            ('file = "tiny.gguf"\nbytes', 'file = ".hidden"\nbytes', "file"),
            ("bytes = 30", "bytes = -1", "bytes"),
            ("bytes = 30", "bytes = 31", "parts"),
            ("abab", "ABAB", "sha256"),
            ('licence = "MIT"', 'licence = "MIT"\nlicense = "MIT"', "license"),
            ('kind = "huggingface"', 'kind = "ftp"', "kind"),
            ('"hf:someone/tiny-GGUF/tiny.gguf"', '"tiny"', "sources[0]: name is 'tiny'"),
            ('"hf:someone/tiny-GGUF/tiny.gguf"', '"hf:../../x/y.gguf"', "name"),
            # Which file that is would depend on what the repository has.
            (
                '"hf:someone/tiny-GGUF/tiny.gguf"',
                '"someone/tiny-GGUF"',
                "name is 'someone/tiny-GGUF'; wanted owner/name[@revision]:QUANT",
            ),
            # Packages know no hash of their own.
            (f'sha256 = "{"ab" * 32}"', "", "sha256 is missing"),
            ("bytes = 30", "", "bytes is missing"),
            ('"a test"', '"a \\u001b[2J test"', "description is 'a \\x1b[2J test'; wanted printable text"),
            ('licence = "MIT"', 'licence = "MIT"\n"x\\u0007" = 1', "no such key: 'x\\x07'"),
            ('package = "tiny-part1"', 'package = "--index-url=x"', "package"),
            ('package = "tiny-part1"', 'package = "tiny @ file:///etc"', "package"),
            ('version = "1.0", member = "tiny_part1', 'version = "1.0 --pre", member = "tiny_part1', "version"),
            ('member = "tiny_part1/data.bin"', 'member = "a/../../data.bin"', "member"),
            ("bytes = 20 }", "bytes = 20, size = 3 }", "size"),
            ("[1, 2, 3]", "[1, -2]", "token_ids"),
            ("[1, 2, 3]", '"1 2"', "token_ids"),
            ("2 = [7, 4]", "2 = [7]", "layer_skip: 2"),
            ("2 = [7, 4]", "two = [7, 4]", "layer_skip: two"),
            ("2 = [7, 4]", '2 = ["7", "4"]', "layer_skip: 2"),
            ("[[sources]]", "[[source]]", "sources"),
        ],
    ),
    "head": (
        HEAD,
        [
            ('target = "tiny"', "", "head: target is missing"),
            ('target = "tiny"', 'target = "tiny"\nother = 1', "head: no such key: other"),
            ('target = "tiny"', 'target = "tiny"\nnorm_sha256 = "AB"', "head: norm_sha256 is 'AB'"),
            ('"model.safetensors" =', '"../model" =', "files: ../model is"),
            (f'= "{"ab" * 32}"', '= "ab"', "files: model.safetensors is 'ab'"),
            ('path = "heads/tiny"', 'path = "../tiny"', "path is '../tiny'"),
            ('path = "heads/tiny"', 'path = "heads/.."', "path is 'heads/..'"),
            ('path = "heads/tiny"', 'path = "/tiny"', "path is '/tiny'"),
        ],
    ),
    "chain": (
        CHAIN,
        [
            ('name = "fast"', 'name = "a b"', "name"),
            ('"ngram@8"', '"ngram@0"', "levels: ngram drafts 1 to 255"),
            ('"ngram@8"', "8", "levels: cannot read draft level 8"),
            ("levels = ", "rungs = ", "levels"),
            ('target = "tiny"', 'target = ""', "target"),
            ('target = "tiny"', 'target = "tiny"\nbytes = 3', "no such key: bytes"),
        ],
    ),
}


@pytest.mark.parametrize(("kind", "old", "new", "named"), [(kind, *row) for kind, (_, rows) in WRONG.items() for row in rows])
def test_a_wrong_key_is_named_with_file_and_value(tmp_path: Path, kind: str, old: str, new: str, named: str) -> None:
    text = WRONG[kind][0]
    assert old in text
    path = write(tmp_path / "tiny.toml", text.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        find_named(str(path))
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


def test_a_user_without_a_home_directory_has_no_cache_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(variables: Mapping[str, str]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(environment, "SYSTEM", replace(SYSTEM, cache_home=no_home))
    for name in ("CPUSPEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert why_unwritable(cache_dir())
    monkeypatch.setenv("CPUSPEC_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(ConfigError, match="name the directory in full"):
        cache_dir()
