import hashlib
import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from cpuspec import LLM, EngineConfig, SamplingParams
from cpuspec.checkpoints.download import find_model, resolve_model
from cpuspec.checkpoints.hub import HubModel, read_hub_name, revision_of
from cpuspec.checkpoints.local_models import local_models
from cpuspec.errors import CheckpointError, ConfigError, CpuspecError
from tests.command import refused, report_of
from tests.processes import make_pipe
from tools.make_tiny_model import make_tiny_gguf

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DIGEST = "ab" * 32


@pytest.fixture(autouse=True)
def home(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory, which has huggingface_hub's cache as well."""
    monkeypatch.setenv("CPUSPEC_OFFLINE", "1")
    monkeypatch.delenv("HF_HOME")
    return empty_home / "home"


def put(path: Path, content: bytes = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def put_ollama(
    models: Path, place: str = "registry.ollama.ai/library/qwen3/4b", digest: str = DIGEST, kind: str = "model", manifest: str = ""
) -> Path:
    """The blob of a model that Ollama has."""
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": f"sha256:{'00' * 32}", "size": 3},
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}", "size": 4},
    ]
    put(models / "manifests" / place, (manifest or json.dumps({"schemaVersion": 2, "layers": layers})).encode())
    return put(models / "blobs" / f"sha256-{digest}")


def put_snapshot(home: Path, repository: str = "some/one", ref: str = "main", **files: bytes) -> Path:
    """A snapshot of huggingface_hub's cache, with blobs and links to them."""
    directory = home / ".cache" / "huggingface" / "hub" / f"models--{repository.replace('/', '--')}"
    for number, (name, content) in enumerate(files.items()):
        blob = put(directory / "blobs" / str(number), content)
        link = directory / "snapshots" / COMMIT / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    put(directory / "refs" / ref, COMMIT.encode())
    return directory / "snapshots" / COMMIT


def test_nothing_is_found_where_nothing_is() -> None:
    assert local_models() == []


@pytest.mark.parametrize("variable", [False, True])
def test_ollamas_models_have_their_names(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: bool) -> None:
    models = home / ".ollama" / "models"
    if variable:
        models = tmp_path / "elsewhere"
        monkeypatch.setenv("OLLAMA_MODELS", f'"{models}"')
    blob = put_ollama(models)
    put_ollama(models, "registry.ollama.ai/library/qwen3/latest")
    put_ollama(models, "registry.ollama.ai/someone/mine/v1")
    put_ollama(models, "hf.co/some/one-GGUF/Q4_K_M")
    assert [(one.name, one.source, one.path, one.num_bytes) for one in local_models()] == [
        (f"ollama:{name}", "ollama", blob, 4)
        for name in ("hf.co/some/one-GGUF:Q4_K_M", "qwen3:4b", "qwen3:latest", "someone/mine:v1")
    ]
    for name in (
        "qwen3:4b",
        "ollama:qwen3:4b",
        "ollama:qwen3",
        "ollama:library/qwen3:4b",
        "ollama:someone/mine:v1",
        "ollama:hf.co/some/one-GGUF:Q4_K_M",
    ):
        assert resolve_model(name) == blob
    with pytest.raises(ConfigError, match="Ollama has no 'qwen3:8b' here"):
        find_model("ollama:qwen3:8b")
    with pytest.raises(ConfigError, match="no model is called 'qwen3:8b'"):
        find_model("qwen3:8b")


@pytest.mark.parametrize("directory", [".lmstudio", ".cache/lm-studio"])
def test_lm_studios_models_have_owner_repository_and_file(home: Path, directory: str) -> None:
    models = home / directory / "models"
    file = put(models / "some" / "one-GGUF" / "one-Q4_K_M.gguf")
    first = put(models / "some" / "parts" / "x-00001-of-00002.gguf")
    put(models / "some" / "parts" / "x-00002-of-00002.gguf", b"GGUF and more")
    put(models / "some" / "one-GGUF" / "README.md")
    put(models / "a" / "b" / "c" / "d.gguf")
    assert [(one.name, one.source, one.path, one.num_bytes) for one in local_models()] == [
        ("some/one-GGUF/one-Q4_K_M.gguf", "lm studio", file, 4),
        ("some/parts/x-00001-of-00002.gguf", "lm studio", first, 17),
    ]
    assert resolve_model("some/one-GGUF/one-Q4_K_M.gguf") == file


def test_the_hubs_cache_has_names_that_find_its_models_without_a_network(home: Path) -> None:
    files = {
        **{"x-Q4_K_M.gguf": b"1", "q/x-Q8_0-00001-of-00002.gguf": b"12", "q/x-Q8_0-00002-of-00002.gguf": b"123"},
        "x-Q5_0.gguf": b"5",
    }
    ggufs = put_snapshot(home, **files, **{"mmproj-Q4_0.gguf": b"", "y-Q5_0.gguf": b"55", "z-Q6_K-00001-of-00002.gguf": b"half"})
    weights = {"config.json": b"{}", "model.safetensors": b"12345"}
    directory = put_snapshot(home, "some/weights", "v1", **weights)
    put_snapshot(
        home, "some/half", **{"config.json": b"{}", "model-00001-of-00002.safetensors": b"", "model.safetensors.index.json": b""}
    )
    found = {one.name: (one.path, one.num_bytes) for one in local_models()}
    assert found == {
        "some/one:Q4_K_M": (ggufs / "x-Q4_K_M.gguf", 1),
        "some/one:Q8_0": (ggufs / "q" / "x-Q8_0-00001-of-00002.gguf", 5),
        "hf:some/one/x-Q5_0.gguf": (ggufs / "x-Q5_0.gguf", 1),
        "hf:some/one/y-Q5_0.gguf": (ggufs / "y-Q5_0.gguf", 2),
        "some/weights@v1:safetensors": (directory, 7),
    }
    for name, (path, _) in found.items():
        assert resolve_model(name) == path
        assert revision_of(path) == COMMIT
    assert revision_of(home / "x.gguf") is None


def test_hostile_content_is_left_out(home: Path, tmp_path: Path) -> None:
    outside = put(tmp_path / "outside.gguf")
    models = home / ".ollama" / "models"
    hostile = {
        **{"huge": '{"layers": [' + " " * (1 << 20) + "]}", "deep": "[" * 100_000, "no-json": "\x00\x01", "list": "[]"},
        "layers": '{"layers": 3}',
        "layer": '{"layers": [3, null, {"mediaType": 3}]}',
        "traversal": '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../../etc/passwd"}]}',
        "missing": json.dumps({"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{'cd' * 32}"}]}),
        "tensors": '{"layers": [{"mediaType": "application/vnd.ollama.image.tensor", "digest": "x"}]}',
    }
    for name, manifest in hostile.items():
        put_ollama(models, f"registry.ollama.ai/library/{name}/x", manifest=manifest)
    put_ollama(models, "registry.ollama.ai/library/adapted/x", "ef" * 32, "adapter")
    if os.name != "nt":  # which has no such names
        put_ollama(models, "registry.ollama.ai/library/bad\x1b[2J/x", "01" * 32)
    (models / "blobs" / f"sha256-{'02' * 32}").symlink_to(outside)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{'02' * 32}"}
    put_ollama(models, "registry.ollama.ai/library/leads-out/x", manifest=json.dumps({"layers": [layer]}))
    make_pipe(models / "manifests" / "registry.ollama.ai" / "library" / "pipe")
    make_pipe(models / "manifests" / "registry.ollama.ai" / "library" / "huge" / "pipe")
    (models / "manifests" / "registry.ollama.ai" / "library" / "loop").symlink_to("loop")
    studio = home / ".lmstudio" / "models"
    put(studio / "a" / "b" / "ok.gguf")
    make_pipe(studio / "a" / "b" / "pipe.gguf")
    (studio / "a" / "b" / "out.gguf").symlink_to(outside)
    (studio / "a" / "b" / "zero.gguf").symlink_to("/dev/zero")
    (studio / "a" / "linked").symlink_to(tmp_path)
    snapshot = put_snapshot(home, **{"x-Q8_0.gguf": b"x"})
    (snapshot / "y-Q4_0.gguf").symlink_to(outside)
    make_pipe(snapshot / "z-Q5_0.gguf")
    put_snapshot(home, "some/huge-ref", "main", **{"x-Q8_0.gguf": b"x"}).parent.parent.joinpath("refs", "big").write_bytes(
        b"0" * 10_000_000
    )
    names = {one.name for one in local_models()}
    assert names == {"a/b/ok.gguf", "some/one:Q8_0", "some/huge-ref:Q8_0"}
    for name in [
        *(f"ollama:{name}:x" for name in (*hostile, "adapted", "leads-out", "loop")),
        "a/b/out.gguf",
        "a/b/pipe.gguf",
        "hf:some/one/y-Q4_0.gguf",
    ]:
        with pytest.raises(CpuspecError) as caught:
            resolve_model(name)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a/b", HubModel("a/b")),
        (" a/b ", HubModel("a/b")),
        ("a/b:Q4_K_M", HubModel("a/b", quantization="Q4_K_M")),
        ("a/b@v1.0:IQ4_XS", HubModel("a/b", quantization="IQ4_XS", revision="v1.0")),
        ("a/b@refs/pr/3", HubModel("a/b", revision="refs/pr/3")),
        ("hf:a/b/c.gguf", HubModel("a/b", "c.gguf")),
        ("hf:a/b@main/c/d e.gguf", HubModel("a/b", "c/d e.gguf")),
        ("hf:a/b.gguf", HubModel("a/b.gguf")),
        ("https://huggingface.co/a/b", HubModel("a/b")),
        ("https://huggingface.co/a/b/tree/v1", HubModel("a/b", revision="v1")),
        ("https://hf.co/a/b/resolve/v1/c.gguf?download=true", HubModel("a/b", "c.gguf", revision="v1")),
        *(
            (text, None)
            for text in ("a", "a/", "/a", "a/b/c", "a/b.gguf", "a/b.safetensors", "./a", "../a/b", "a/../b", "a/b:", "a/b@")
        ),
        *(
            (text, None)
            for text in ("hf:a", "hf:a/b/../../c", "hf:a/b/c.gguf:Q4", "a--b/c", "a/b@../x", "a b/c", "a/b:c d", "a\\b", "a/b.py:C")
        ),
    ],
)
def test_names_of_the_hub(text: str, wanted: HubModel | None) -> None:
    assert read_hub_name(text) == wanted
    if wanted is not None:
        assert read_hub_name(str(wanted) if wanted.file or "." not in wanted.repository else f"hf:{wanted}") == wanted


def test_a_model_of_ollamas_is_what_its_adapter_makes_of_it(home: Path, tmp_path: Path) -> None:
    """With the settings and names of tensors that Ollama writes (ollama/ollama, convert/convert_llama_adapter.go)."""
    plain = make_tiny_gguf(tmp_path / "plain.gguf", "llama", weight_format="f32", hidden_size=64, num_heads=2, head_dim=32)
    writer, rng = gguf.GGUFWriter(tmp_path / "lora", "llama"), np.random.default_rng(3)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_file_type(1)
    writer.add_string("general.version", "v0.2")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for name in ("attn_q", "attn_output"):
        for part, shape in (("a", (4, 64)), ("b", (64, 4))):
            writer.add_tensor(f"blk.0.{name}.weight.lora_{part}", rng.standard_normal(shape).astype(np.float16))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    models = home / ".ollama" / "models"
    layers = []
    for kind, file in (("model", plain), ("adapter", tmp_path / "lora")):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        put(models / "blobs" / f"sha256-{digest}", file.read_bytes())
        layers.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"})
    put(models / "manifests" / "registry.ollama.ai" / "library" / "adapted" / "x", json.dumps({"layers": layers}).encode())

    (listed,) = local_models()
    assert (listed.name, listed.num_bytes) == ("ollama:adapted:x", plain.stat().st_size + (tmp_path / "lora").stat().st_size)
    settings, params = EngineConfig(threads=1, keep_packed=False), SamplingParams(max_tokens=12)
    with LLM(plain, "none", "numpy", settings=settings, lora=(str(tmp_path / "lora"),)) as llm:
        wanted = llm.generate([[1, 2, 3]], params)[0].token_ids
    with LLM("adapted:x", "none", "numpy", settings=settings) as llm:
        assert llm.generate([[1, 2, 3]], params)[0].token_ids == wanted
        assert llm.adapters.names == ["adapter1"]
        assert llm.generate([[1, 2, 3]], params, lora_request={})[0].token_ids != wanted, "else the adapter changes nothing"
    report_of("quantize", "ollama:adapted:x", str(tmp_path / "merged.gguf"), "--type", "f32")
    with LLM(tmp_path / "merged.gguf", "none", "numpy", settings=settings) as llm:
        assert llm.generate([[1, 2, 3]], params)[0].token_ids == wanted
    refused("export", "ollama:adapted:x", str(tmp_path / "out"), code=1, message="an adapter beside its model")
    with pytest.raises(CheckpointError, match="merge both into one file"):
        LLM(plain, "ollama:adapted:x", "numpy", settings=settings)
