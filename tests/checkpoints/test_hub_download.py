"""Fetching from the hub: huggingface_hub, against a stand-in of the hub on this machine."""

import errno
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpuspec.checkpoints.download import fetch, find_fetched, find_model, resolve_model
from cpuspec.checkpoints.hub import HubModel, find_cached, revision_of
from cpuspec.checkpoints.recipes import Recipe, recipe_of
from cpuspec.errors import CheckpointError, ConfigError, DownloadError
from tests.stand_in_hub import COMMIT, Repository, StandInHub, running

CONTENT = hashlib.shake_256(b"a model").digest(300_000)
OTHER = hashlib.shake_256(b"another model").digest(300_000)
NEWER = "f" * 40
NAME = "someone/tiny-GGUF"
FILES = {"README.md": b"# tiny", "tiny-Q4_K_M.gguf": CONTENT, "tiny-Q8_0.gguf": OTHER, "mmproj-Q4_K_M.gguf": b"eyes"}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    **{"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 260},
    **{"max_position_embeddings": 128, "head_dim": 16, "num_key_value_heads": 1},
}
SAFETENSORS = {
    "config.json": json.dumps(CONFIG).encode(),
    **{
        "generation_config.json": b"{}",
        "tokenizer.json": b"{ }",
        "tokenizer_config.json": b"{  }",
        "chat_template.jinja": b"{{ x }}",
    },
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {f"t{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}}
    ).encode(),
    **{f"model-0000{n}-of-00002.safetensors": CONTENT[: 1000 * n] for n in (1, 2)},
    # What is never fetched: pickles, other frameworks', other copies, code.
    **{"pytorch_model.bin": b"pickle", "tf_model.h5": b"h5", "flax_model.msgpack": b"m", "original/consolidated.00.pth": b"p"},
    **{"onnx/model.onnx": b"o", "modeling_tiny.py": b"raise SystemExit", "README.md": b"#"},
}


@pytest.fixture(autouse=True)
def caches(empty_home: Path) -> Path:
    """huggingface_hub's cache, empty."""
    return empty_home / "hf" / "hub"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    hub = StandInHub({NAME: Repository(dict(FILES))})
    with running(hub) as address:
        monkeypatch.setenv("HF_ENDPOINT", address + "/")
        yield hub


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub waits a second before it tries again: not here. And it writes 10 MB at once: here a kilobyte."""
    from huggingface_hub import constants

    shim = SimpleNamespace(sleep=lambda seconds: None, monotonic=lambda: 0.0, time=lambda: 0.0)
    monkeypatch.setattr("huggingface_hub.file_download.time", shim)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)


def recipe(name: str = f"hf:{NAME}/tiny-Q4_K_M.gguf", sha256: str = "", num_bytes: int | None = None) -> Recipe:
    from cpuspec.checkpoints.hub import read_hub_name

    source = read_hub_name(name)
    assert source is not None
    return Recipe("tiny", "a test", "llama", 1, "MIT", (source,), "tiny.gguf", num_bytes, sha256)


@pytest.mark.parametrize(
    ("text", "file"),
    [
        (f"{NAME}:Q4_K_M", "tiny-Q4_K_M.gguf"),
        (f"{NAME}:q8_0", "tiny-Q8_0.gguf"),
        (NAME, "tiny-Q4_K_M.gguf"),
        (f"hf:{NAME}", "tiny-Q4_K_M.gguf"),
        (f"hf:{NAME}/tiny-Q8_0.gguf", "tiny-Q8_0.gguf"),
        (f"hf://{NAME}@main/tiny-Q8_0.gguf", "tiny-Q8_0.gguf"),
        (f"hf.co/{NAME}:Q8_0", "tiny-Q8_0.gguf"),
        (f"https://huggingface.co/{NAME}/blob/main/tiny-Q8_0.gguf?download=true", "tiny-Q8_0.gguf"),
        (f"{NAME}@{COMMIT}:Q8_0", "tiny-Q8_0.gguf"),
    ],
)
def test_a_hub_name_is_fetched_once_into_huggingface_hubs_cache(
    hub: StandInHub, caches: Path, monkeypatch: pytest.MonkeyPatch, text: str, file: str
) -> None:
    said: list[tuple[int, int, str]] = []
    path = resolve_model(text, lambda done, total, what: said.append((done, total, what)))
    assert path == caches / "models--someone--tiny-GGUF" / "snapshots" / COMMIT / file
    assert path.read_bytes() == FILES[file]
    assert revision_of(path) == COMMIT
    assert hub.fetched() == [file]
    assert said[-1][:2] == (len(FILES[file]), len(FILES[file]))
    assert said[-1][2] == f"hub {NAME} verified: commit {COMMIT}, {file} sha256 {hashlib.sha256(FILES[file]).hexdigest()}"
    assert [done for done, _, _ in said] == sorted(done for done, _, _ in said)
    # From now on nobody is asked.
    hub.asked.clear()
    assert resolve_model(text) == path
    monkeypatch.setenv("CPUSPEC_OFFLINE", "1")
    assert resolve_model(text) == path
    assert hub.asked == []


def test_the_library_and_this_package_find_each_others_files(hub: StandInHub, caches: Path) -> None:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    path = resolve_model(f"{NAME}:Q8_0")
    assert try_to_load_from_cache(NAME, "tiny-Q8_0.gguf", cache_dir=caches) == str(path)
    theirs = hf_hub_download(NAME, "tiny-Q4_K_M.gguf", cache_dir=caches, endpoint=os.environ["HF_ENDPOINT"].rstrip("/"))
    assert find_cached(HubModel(NAME, quantization="Q4_K_M")) == Path(theirs)


def test_the_librarys_own_output_is_not_shown(hub: StandInHub, impatient: None, capfd: pytest.CaptureFixture[str]) -> None:
    hub.break_off_after = [100_500]
    resolve_model(f"{NAME}:Q4_K_M")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("most_bytes", [0, 1, 1000])
def test_a_hub_that_never_sends_more_is_given_up(
    hub: StandInHub, caches: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int, announced: bool
) -> None:
    hub.announces_what_it_sends = announced
    shim = SimpleNamespace(sleep=lambda seconds: None, monotonic=lambda: 0.0, time=lambda: 0.0)
    monkeypatch.setattr("huggingface_hub.file_download.time", shim)
    hub.break_off_after = [most_bytes] * 1000
    with pytest.raises(DownloadError, match=f"hub {NAME}:Q4_K_M: the download broke off"):
        resolve_model(f"{NAME}:Q4_K_M")
    assert len(hub.fetched()) < 20
    assert find_cached(HubModel(NAME, quantization="Q4_K_M")) is None


def test_other_bytes_than_announced_are_thrown_away(hub: StandInHub, caches: Path) -> None:
    hub.repositories[NAME].announced["tiny-Q4_K_M.gguf"] = OTHER
    with pytest.raises(DownloadError, match=r"delivered other bytes of tiny-Q4_K_M\.gguf than it announced"):
        resolve_model(f"{NAME}:Q4_K_M")
    assert [path for path in caches.rglob("*") if path.is_file() and path.stat().st_size == len(CONTENT)] == []
    hub.repositories[NAME].announced.clear()
    assert resolve_model(f"{NAME}:Q4_K_M").read_bytes() == CONTENT


def test_small_files_are_checked_too(hub: StandInHub) -> None:
    hub.repositories["someone/tiny"] = Repository(dict(SAFETENSORS), announced={"tokenizer.json": b"[]"})
    with pytest.raises(DownloadError, match=r"delivered other bytes of tokenizer\.json"):
        resolve_model("someone/tiny")


def test_a_recipes_sha256_is_compared_before_anything_is_fetched(hub: StandInHub) -> None:
    wanted = hashlib.sha256(OTHER).hexdigest()
    with pytest.raises(DownloadError, match=f"no source delivered tiny: hub .*: offers other bytes: sha256 .*, wanted {wanted}"):
        fetch(recipe(sha256=wanted))
    assert hub.fetched() == []
    found = fetch(recipe(sha256=hashlib.sha256(CONTENT).hexdigest(), num_bytes=len(CONTENT)))
    assert found.read_bytes() == CONTENT
    assert find_fetched(recipe(sha256=hashlib.sha256(CONTENT).hexdigest(), num_bytes=len(CONTENT))) == found
    assert find_fetched(recipe(num_bytes=3)) is None


def test_a_file_in_the_hubs_cache_is_known_by_the_recipe_that_names_it(hub: StandInHub, empty_home: Path) -> None:
    named, other = fetch(recipe(f"{NAME}:Q4_K_M")), resolve_model(f"{NAME}:Q8_0")
    path = empty_home / "cache" / "recipes" / "tiny.toml"
    path.parent.mkdir(parents=True)
    text = 'name = "tiny"\ndescription = "a test"\narchitecture = "llama"\nparameters = 1\nlicence = "MIT"\n'
    path.write_text(f'{text}[[sources]]\nkind = "huggingface"\nname = "{NAME}:Q4_K_M"\n')
    found = recipe_of(named)
    assert found is not None
    assert found.name == "tiny"
    assert recipe_of(other) is None
    assert recipe_of(named.with_name("missing")) is None


@pytest.mark.parametrize("variable", ["CPUSPEC_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_asks_nobody(hub: StandInHub, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(DownloadError, match=f"{NAME}:Q4_K_M is not in huggingface_hub's cache and {variable} forbids downloads"):
        resolve_model(f"{NAME}:Q4_K_M")
    assert hub.asked == []


def test_a_name_without_quantization_means_what_the_hub_said_last_and_offline_the_only_one_there(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = resolve_model(f"{NAME}:Q8_0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model(NAME) == path
    monkeypatch.delenv("HF_HUB_OFFLINE")
    default = resolve_model(NAME)
    assert default.name == "tiny-Q4_K_M.gguf"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model(NAME) == default


def test_a_hub_that_is_gone_leaves_what_is_there(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model(f"{NAME}:Q8_0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch(HubModel(NAME, quantization="Q8_0"), refresh=True) == path
    assert resolve_model(NAME) == path


def test_a_refresh_follows_the_branch_and_fetches_only_what_changed(hub: StandInHub) -> None:
    model = HubModel(NAME, quantization="Q4_K_M")
    old = fetch(model)
    hub.asked.clear()
    assert fetch(model, refresh=True) == old
    assert hub.fetched() == []
    hub.repositories[NAME] = Repository({**FILES, "tiny-Q4_K_M.gguf": OTHER}, commit=NEWER)
    assert fetch(model) == old
    new = fetch(model, refresh=True)
    assert (new.read_bytes(), revision_of(new)) == (OTHER, NEWER)
    assert find_cached(model) == new
    assert find_cached(HubModel(NAME, quantization="Q4_K_M", revision=COMMIT)) == old


def test_a_file_cut_short_in_the_cache_is_fetched_again(hub: StandInHub) -> None:
    model = HubModel(NAME, quantization="Q4_K_M")
    fetch(model).resolve().write_bytes(CONTENT[:1000])
    assert fetch(model, refresh=True).read_bytes() == CONTENT


LOGIN = "there is no such repository, or it is private: .*`hf auth login`"
OTHERS = {
    "someone/private": Repository({}, status=401),
    "someone/gated": Repository({}, status=403, error_code="GatedRepo"),
    "someone/forbidden": Repository({}, status=403),
    "someone/broken": Repository({}, status=503),
    "someone/strange": Repository({}, status=999),
    "someone/many": Repository({f"x-Q3_K_{n}.gguf": b"x" * n for n in range(1, 31)}),
    "someone/twice": Repository({"a-Q4_0.gguf": b"x", "b-Q4_0.gguf": b"y"}),
    "someone/halves": Repository({"x-Q4_0-00001-of-00002.gguf": b"x"}),
    "someone/pickles": Repository({"config.json": b"{}", "pytorch_model.bin": b"x"}),
    "someone/nothing": Repository({"README.md": b"x"}),
}


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("nobody/nothing:Q4_K_M", DownloadError, f"hub nobody/nothing:Q4_K_M: {LOGIN}.*HF_TOKEN"),
        ("someone/private", DownloadError, LOGIN),
        (
            "someone/gated",
            DownloadError,
            r"restricted: accept the terms on http.*/someone/gated, then run `hf auth login`.*HF_TOKEN",
        ),
        ("someone/forbidden", DownloadError, "access is restricted"),
        ("someone/broken", DownloadError, "the hub answered 503 Service Unavailable$"),
        ("someone/strange", DownloadError, "the hub answered 999$"),
        (f"{NAME}@v9:Q4_K_M", DownloadError, "there is no revision 'v9'"),
        (f"{NAME}:Q5_K_M", ConfigError, r"has no Q5_K_M; it has Q4_K_M \(0\.00 GB\), Q8_0 \(0\.00 GB\)$"),
        (f"hf:{NAME}/other.gguf", ConfigError, r"has no file 'other\.gguf'; it has Q4_K_M"),
        (
            "someone/many",
            ConfigError,
            r"quantizations; name one, as in someone/many:QUANT: (Q3_K_\d+ \(.*?\)(, )?){20} and 10 more$",
        ),
        ("someone/twice:Q4_0", ConfigError, "files for Q4_0; name one: hf:someone/twice/a-Q4_0.gguf, hf:someone/twice/b-Q4_0.gguf"),
        ("someone/halves:Q4_0", ConfigError, r"lacks part 2 of 2 of x-Q4_0\.gguf"),
        (
            "someone/pickles",
            ConfigError,
            "no whole safetensors model; its weights are pickles, which can run code and are never read",
        ),
        ("someone/nothing", ConfigError, "no GGUF file and no whole safetensors model$"),
    ],
)
def test_what_the_hub_refuses_or_does_not_settle_is_one_line_with_a_remedy_or_the_choices(
    hub: StandInHub, name: str, error: type[Exception], reason: str
) -> None:
    hub.repositories |= OTHERS
    with pytest.raises(error, match=reason) as caught:
        resolve_model(name)
    assert str(caught.value).isprintable()
    assert len(hub.asked) == 1


def test_parts_of_a_gguf_file_come_together_and_the_first_is_opened(hub: StandInHub) -> None:
    parts = {f"Q4_K_M/x-Q4_K_M-0000{n}-of-00003.gguf": CONTENT[: n * 100] for n in (1, 2, 3)}
    # Qwen's repositories have some files whole and in parts.
    hub.repositories["someone/parts"] = Repository(parts | {"y-Q8_0-00001-of-00001.gguf": b"y", "y-Q8_0.gguf": b"y"})
    path = resolve_model("someone/parts:Q4_K_M")
    assert path.name == "x-Q4_K_M-00001-of-00003.gguf"
    assert [part.read_bytes() for part in sorted(path.parent.iterdir())] == list(parts.values())
    assert find_cached(HubModel("someone/parts", quantization="Q4_K_M")) == path
    (path.parent / "x-Q4_K_M-00002-of-00003.gguf").unlink()
    assert find_cached(HubModel("someone/parts", quantization="Q4_K_M")) is None
    assert resolve_model("hf:someone/parts/Q4_K_M/x-Q4_K_M-00002-of-00003.gguf") == path


def test_a_safetensors_repository_is_a_directory_with_the_needed_files_only(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["someone/tiny"] = Repository(dict(SAFETENSORS))
    directory = resolve_model("someone/tiny")
    wanted = [name for name in SAFETENSORS if name.endswith((".json", ".jinja", ".safetensors"))]
    assert sorted(path.name for path in directory.rglob("*")) == sorted(wanted)
    assert revision_of(directory) == COMMIT
    # Weights come last: a directory that has them has everything.
    assert [name.endswith(".safetensors") for name in hub.fetched()] == [False] * 6 + [True] * 2
    hub.asked.clear()
    assert resolve_model("someone/tiny") == resolve_model("someone/tiny:safetensors") == directory
    assert hub.asked == []
    (directory / "model-00002-of-00002.safetensors").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        resolve_model("someone/tiny")


def test_shards_are_those_of_the_index_whatever_their_names(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3.5's are called model.safetensors-00001-of-00002.safetensors."""
    names = [f"model.safetensors-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = json.dumps({"weight_map": {"a": names[0], "b": names[1]}}).encode()
    more = {"hf_quant_config.json": b"{}", "tokenizer.model": b"m", "additional_chat_templates/tool.jinja": b"t"}
    files = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors.index.json": index, **dict.fromkeys(names, b"x" * 50)}
    others = {"consolidated.safetensors": b"c" * 100, "model-00001-of-00001.safetensors": b"o" * 100}
    hub.repositories["someone/odd"] = Repository(files | more | others)
    told: list[tuple[int, int, str]] = []
    directory = resolve_model("someone/odd", lambda done, total, what: told.append((done, total, what)))
    there = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    assert there == files.keys() | more.keys()
    assert told[0][2].startswith("takes about 0.00 GB of memory"), "before a weight is fetched"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model("someone/odd") == directory
    (directory / names[1]).unlink()
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        resolve_model("someone/odd")


@pytest.mark.parametrize("index", [b"{}", b"nonsense", b'{"weight_map": {"a": "../x.safetensors"}}'])
def test_an_index_that_cannot_be_read_is_told_before_weights_are_fetched(hub: StandInHub, index: bytes) -> None:
    hub.repositories["someone/tiny"] = Repository(SAFETENSORS | {"model.safetensors.index.json": index})
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        resolve_model("someone/tiny")
    assert hub.fetched() == ["model.safetensors.index.json"]


def test_a_model_that_is_not_supported_is_told_before_its_weights_are_fetched(hub: StandInHub) -> None:
    config = json.dumps({**CONFIG, "architectures": ["T5Model"]}).encode()
    hub.repositories["someone/tiny"] = Repository(SAFETENSORS | {"config.json": config})
    with pytest.raises(CheckpointError, match="T5Model"):
        resolve_model("someone/tiny")
    assert hub.fetched() == ["model.safetensors.index.json", "config.json"]


@pytest.mark.parametrize("kind", ["Eagle3Speculator", "LlamaForCausalLMEagle3", "DFlashDraftModel", "Qwen3DSparkModel", "medusa"])
def test_a_head_is_fetched_though_it_is_no_model_by_itself(hub: StandInHub, kind: str) -> None:
    config = {**CONFIG, "architectures": [kind]} if kind != "medusa" else {"medusa_num_heads": 5, "medusa_num_layers": 1}
    weights = "model.safetensors" if kind != "medusa" else "medusa_lm_head.safetensors"
    hub.repositories["someone/head"] = Repository({"config.json": json.dumps(config).encode(), weights: b"x" * 100})
    assert {path.name for path in resolve_model("someone/head").iterdir()} == {"config.json", weights}


def test_a_recipe_may_say_the_sha256_of_each_file(hub: StandInHub) -> None:
    weights = b"x" * 100
    files = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": weights}
    hub.repositories["someone/head"] = Repository(files)
    sha256 = hashlib.sha256(weights).hexdigest()
    named = replace(recipe("someone/head:safetensors"), file="", files={"model.safetensors": "0" * 64})
    with pytest.raises(DownloadError, match=rf"other bytes of model\.safetensors: sha256 {sha256}, wanted 0000"):
        fetch(named)
    with pytest.raises(DownloadError, match=r"has no file other\.safetensors, which the recipe names"):
        fetch(replace(named, files={"other.safetensors": sha256}))
    assert hub.fetched() == []
    assert (fetch(replace(named, files={"model.safetensors": sha256})) / "model.safetensors").read_bytes() == weights


def test_a_redirect_to_another_host_is_followed_without_the_token(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    elsewhere = StandInHub(dict(hub.repositories))
    with running(elsewhere) as address:
        hub.files_elsewhere = address.replace("127.0.0.1", "localhost")
        assert resolve_model(f"{NAME}:Q4_K_M").read_bytes() == CONTENT
    assert {token for _, token in hub.tokens} == {"Bearer hf_secret"}
    assert elsewhere.fetched() == ["tiny-Q4_K_M.gguf"]
    assert {token for _, token in elsewhere.tokens} == {None}


def test_ctrl_c_leaves_nothing_half_done(hub: StandInHub, caches: Path, impatient: None) -> None:
    def interrupt(done: int, total: int, what: str) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model(f"{NAME}:Q4_K_M", interrupt)
    assert find_cached(HubModel(NAME, quantization="Q4_K_M")) is None
    assert resolve_model(f"{NAME}:Q4_K_M").read_bytes() == CONTENT


def test_a_full_disk_is_named_and_not_the_hub(hub: StandInHub, caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cpuspec.checkpoints.hub_download as module

    def fail(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "hf_hub_download", fail)
    with pytest.raises(DownloadError, match=re.escape(f"{caches} cannot be written: its disk is full; make room, or set HF_HOME")):
        resolve_model(f"{NAME}:Q4_K_M")


def test_a_model_larger_than_the_disk_is_refused_before_it_is_asked_for(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(DownloadError, match=r"needs .* MB free in .* which has 0 MB"):
        resolve_model(f"{NAME}:Q4_K_M")
    assert hub.fetched() == []


@pytest.mark.parametrize("address", ["ftp://x", "nonsense", "http://", "http://a:b"])
def test_a_strange_hub_address_is_not_opened(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(DownloadError, match="not an http or https address; check HF_ENDPOINT"):
        resolve_model(f"{NAME}:Q4_K_M")


def test_no_hub_is_one_line_and_loads_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "cpuspec.checkpoints.hub_download", raising=False)
    with pytest.raises(DownloadError, match=r"hub someone/tiny-GGUF:Q4_K_M: 127\.0\.0\.1 cannot be reached \(Connection refused\)"):
        resolve_model(f"{NAME}:Q4_K_M")
    assert "cpuspec.checkpoints.hub_download" not in sys.modules


def test_a_hub_that_listens_and_says_nothing_is_left_after_one_question(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuspec.checkpoints.hub_download.HUB_TIMEOUT_S", 0.2)
    hub.hold = threading.Event()
    with pytest.raises(DownloadError, match="the hub did not answer in time"):
        resolve_model(f"{NAME}:Q4_K_M")
    hub.hold.set()
    assert len(hub.asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnull",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b'HTTP/1.1 200 OK\r\nContent-Length: 49\r\n\r\n{"id":"a/b","sha":"../../x","siblings":[{"a":1}]}',
        b'HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n{"id":"a/b","sha":"\\u001b[2J","tags":[]}',
        b"\x1b[2J nonsense \x07\r\n\r\n",
        b"HTTP/1.1 500 \x1b[31mred\r\nX-Error-Message: \x1b[2J\r\nContent-Length: 0\r\n\r\n",
        b"",
    ],
)
def test_nonsense_from_the_hub_is_a_clear_error_without_control_characters(hub: StandInHub, answer: bytes) -> None:
    hub.raw_answer = answer or b"\r\n"
    with pytest.raises(DownloadError) as caught:
        resolve_model(f"{NAME}:Q4_K_M")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_files_with_names_that_lead_away_are_not_there(hub: StandInHub) -> None:
    names = ["../../x-Q4_K_M.gguf", "/etc/x-Q4_K_M.gguf", "a//x-Q4_K_M.gguf", "x\x1b-Q4_K_M.gguf", "..\\x-Q4_K_M.gguf"]
    hub.repositories[NAME] = Repository(dict.fromkeys(names, b"x"))
    with pytest.raises(ConfigError, match="has no Q4_K_M; it has no GGUF file"):
        resolve_model(f"{NAME}:Q4_K_M")


def test_a_path_that_does_not_exist_asks_no_hub(hub: StandInHub) -> None:
    for text in ("nowhere/x.gguf", "a/b/c.gguf", "./a/b", "a/b.safetensors", "../a", "a/b.toml"):
        with pytest.raises(ConfigError, match=r"no file or directory|does not exist"):
            find_model(text)
    assert hub.asked == []
