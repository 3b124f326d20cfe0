"""Quantized files: what is in them, who reads them, and that methods beat rounding at equal bytes."""

import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.checkpoint import is_linear
from cpuspec.checkpoints.families import FAMILIES
from cpuspec.checkpoints.gguf_file import read_gguf
from cpuspec.checkpoints.gguf_writer import entry
from cpuspec.checkpoints.heads import own_mtp
from cpuspec.config import ModelConfig, Rope, RopeScaling
from cpuspec.errors import CheckpointError, ConfigError, FormatError
from cpuspec.evaluate.quality import Quality, compare_backends
from cpuspec.formats import FORMATS, get_format
from cpuspec.kernels.embed import row_decoder
from cpuspec.model.rope import rope_table
from cpuspec.quantize import gptq, store
from cpuspec.quantize.gguf_output import write_model
from cpuspec.quantize.imatrix import Importance, of_matrices, read_importance, write_importance
from cpuspec.quantize.job import Job, measure_importance, quantize
from cpuspec.quantize.mixes import TYPES, Named, choose
from cpuspec.quantize.rounding import encode
from cpuspec.quantize.store import Workspace
from cpuspec.quantize.weights import Weights
from cpuspec.settings import EngineConfig
from cpuspec.text import make_tokenizer
from tests.backends.models import MIXTURES, RECURRENT, in_gguf
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf

CODED = [name for name, row in FORMATS.items() if row.affine]
SEARCHED = [
    name
    for name in CODED
    if FORMATS[name].code_bits < 8 and "e" not in (FORMATS[name].layout.names or ()) and not FORMATS[name].rotated
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """For tests of each type, of which some take microseconds a value to encode."""
    path = tmp_path_factory.mktemp("small") / "source.gguf"
    return open_checkpoint(make_tiny_gguf(path, weight_format="f16", intermediate_size=256, vocab_size=260))


def compared(source: Checkpoint, again: Checkpoint, tokens: list[int]) -> Quality:
    source_backend, again_backend = (make_backend("numpy", one, EngineConfig(kv_format="f32")) for one in (source, again))
    return compare_backends(source_backend, again_backend, tokens)


@pytest.mark.parametrize("type_name", TYPES)
def test_a_file_of_every_type_holds_what_was_chosen(small: Checkpoint, tmp_path: Path, type_name: str) -> None:
    made = quantize(small, tmp_path / "out.gguf", Job(type_name), threads=1)
    again = open_checkpoint(tmp_path / "out.gguf")
    shapes = {name: tensor.shape for name, tensor in small.tensors.items() if len(tensor.shape) == 2}
    wanted = choose(small.config, shapes, type_name)
    assert {name: again.tensors[name].format for name in wanted} == wanted
    assert again.config == small.config
    assert again.vocabulary == small.vocabulary
    for name, format in wanted.items():
        given = small.tensors[name].dequantize()
        assert np.array_equal(again.tensors[name].data, encode(format, given)), name
    for name in small.tensors.keys() - wanted.keys():
        assert np.array_equal(again.tensors[name].dequantize(), small.tensors[name].dequantize())
    assert made.num_bytes == (tmp_path / "out.gguf").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def test_an_independent_reader_finds_the_same_tensors_and_metadata(source: Checkpoint, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    quantize(source, tmp_path / "out.gguf", Job("q4_k_m"), threads=1)
    before, after = gguf.GGUFReader(source.path), gguf.GGUFReader(tmp_path / "out.gguf")
    changed = {"GGUF.tensor_count", "GGUF.kv_count", "general.file_type", "general.quantization_version"}
    for key, field in before.fields.items():
        if key not in changed:
            assert after.fields[key].contents() == field.contents(), key
            assert after.fields[key].types == field.types, key
    assert after.fields["general.file_type"].contents() == 15
    ours = read_gguf(tmp_path / "out.gguf")
    assert {tensor.name for tensor in after.tensors} == ours.tensors.keys()
    for tensor in after.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(values.reshape(ours.tensors[tensor.name].shape), ours.tensors[tensor.name].dequantize())


HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen35": {"architecture": "qwen35"},
    "qwen3next": {"architecture": "qwen3next", "shared_size": 96, "tied": False},
    **{name: options for name, options in RECURRENT.items() if name != "nemotron_h"},  # whose least step GGUF files do not know
    "granitehybrid without states": {"architecture": "granitehybrid", "mixers": ("attention", "attention")},
    "granitehybrid-moe without states": {
        "architecture": "granitehybrid-moe",
        "shared_size": 128,
        "mixers": ("attention", "attention"),
    },
}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3", *MIXTURES, *HYBRIDS])
def test_a_hugging_face_model_becomes_a_gguf_file_of_the_same_model(tmp_path: Path, name: str) -> None:
    options = in_gguf(name) if name in MIXTURES else HYBRIDS.get(name, {"architecture": name})
    source = open_checkpoint(make_tiny_hf(tmp_path / "hf", dtype="f32", **options))
    quantize(source, tmp_path / "out.gguf", Job("f32"), threads=1)
    again = open_checkpoint(tmp_path / "out.gguf")
    assert set(differing(source.config, again.config)) <= ({"architecture"} if name.endswith("without states") else set())
    ids = np.random.default_rng(0).integers(0, 300, 40).tolist()
    assert compared(source, again, ids).max_abs_logit_difference < 1e-3
    assert again.vocabulary.model == "gpt2"  # type: ignore[union-attr]
    text = "the cat sat on 1234 mats; don't\n\n  return x"
    assert make_tokenizer(again).encode(text) == make_tokenizer(source).encode(text)
    assert make_tokenizer(again).chat_template == make_tokenizer(source).chat_template
    if name.endswith("without states"):  # as llama.cpp names such models
        plain = {"granitehybrid": "granite", "granitehybrid-moe": "granitehybrid"}[options["architecture"]]  # whose mixtures rotate
        assert read_gguf(tmp_path / "out.gguf").metadata["general.architecture"] == plain


def test_a_mixture_of_granite_that_rotates_and_has_no_states_is_one_of_llama_cpps_granitemoe(tmp_path: Path) -> None:
    path = make_tiny_hf(tmp_path / "hf", **HYBRIDS["granitehybrid-moe without states"])
    (path / "config.json").write_text((path / "config.json").read_text().replace('"nope"', '"rope"'))
    source = open_checkpoint(path)
    quantize(source, tmp_path / "out.gguf", Job("f32"), threads=1)
    again = open_checkpoint(tmp_path / "out.gguf")
    assert again.config.architecture == "granitemoe"
    assert compared(source, again, list(range(40))).max_abs_logit_difference < 1e-4


def test_experts_are_quantized_as_the_matrices_that_they_are_and_routers_are_not(tmp_path: Path) -> None:
    source = open_checkpoint(make_tiny_gguf(tmp_path / "in.gguf", "qwen3moe", weight_format="f32", num_layers=2))
    text = np.random.default_rng(0).integers(0, 300, (2, 64)).astype(np.int32)
    for chunks in (None, text):
        out = tmp_path / f"out-{chunks is None}.gguf"
        made = quantize(source, out, Job("q4_k_m"), threads=2, chunks=chunks)
        again = open_checkpoint(out)
        assert again.tensors["layers.0.router"].format.name == "f32"
        assert made.matrices["layers.0.expert_gate"] == again.tensors["layers.0.expert_gate"].format.name == "q4_k"
        for name in ("layers.1.expert_up", "layers.1.expert_down"):
            values, wanted = (one.tensors[name].dequantize() for one in (again, source))
            assert values.shape == wanted.shape
            assert np.abs(values - wanted).mean() < 0.1 * np.abs(wanted).mean()
    with pytest.raises(ConfigError, match="a mixture of experts is rounded only"):
        quantize(source, tmp_path / "gptq.gguf", Job("q4_k_m", ("gptq",)), threads=1, chunks=text)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_written_one_by_one_in_compressed_tensors_and_routers_as_they_are(tmp_path: Path, name: str) -> None:
    options = {"num_layers": 2, **MIXTURES[name]}
    source = open_checkpoint(make_tiny_hf(tmp_path / "hf", dtype="f32", **options))
    if options["architecture"] in ("granitemoe", "mistral4", "gemma4-moe"):
        with pytest.raises(ConfigError, match="is written as a GGUF file only"):
            quantize(source, tmp_path / "out", Job("w8a16"), threads=1)
        return
    quantize(source, tmp_path / "out", Job("w8a16"), threads=1)
    again = open_checkpoint(tmp_path / "out")
    assert again.config == source.config
    layer = source.config.num_layers - 1
    assert again.tensors[f"layers.{layer}.expert_down"].format.affine
    router = f"layers.{layer}.router"
    assert np.array_equal(again.tensors[router].dequantize(), source.tensors[router].dequantize())
    ids = np.random.default_rng(0).integers(0, 300, 20).tolist()
    assert compared(source, again, ids).kl_mean < 0.1
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    theirs = FAMILIES[source.config.architecture].layer_names["router"][1].removesuffix(".weight")
    assert any(re.match(pattern[3:], f"model.layers.0.{theirs}") for pattern in settings["ignore"] if pattern.startswith("re:"))


LLAMA3 = RopeScaling("llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=128)
# A value of each field of ModelConfig that a shape does not fix; several where kinds differ.
FIELDS: dict[str, list[Any]] = {
    "context_length": [777],
    "norm_eps": [3e-5],
    "rope_base": [54321.0],
    "rope_scaling": [
        RopeScaling("linear", 3.0),
        LLAMA3,
        RopeScaling("yarn", 4.0, original_context_length=128, beta_fast=16.0, beta_slow=2.0),
        RopeScaling("yarn", 4.0, original_context_length=128, attention_factor=0.75),
        RopeScaling("yarn", 4.0, original_context_length=128, truncate=False),
        RopeScaling(
            "longrope", 1.0, original_context_length=64, attention_factor=1.25, factors=(2.0,) * 8, short_factors=(1.5,) * 8
        ),
    ],
    **{"query_growth": [0.25], "activation": ["silu", "gelu_tanh"], "embedding_scale": [7.0], "query_scale": [0.3]},
    **{"attention_softcap": [20.0], "logit_softcap": [25.0], "layer_windows": [(9, 0, 9, 9)]},
    "layer_ropes": [("none", "global", "global", "none"), ("local", "global", "local", "global")],
    **{"local_rope_base": [4321.0], "rope_dims": [8], "residual_scale": [0.5], "logit_scale": [0.25]},
}
# By the tensors, or by the family and the tensors; `test_a_hugging_face_model_becomes_a_gguf_file_of_the_same_model` has them.
OF_TENSORS = {
    *("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("qkv_bias", "o_bias", "qk_norm", "tied_embeddings", "norms", "head"),
    *("norm_spans", "experts", "layer_experts", "shared_size", "weighs_shared", "norm_kind", "norm_bias", "gated", "mlp_bias"),
    *("parallel", "rotates_first", "query_growth_length", "sinks", "gated_attention", "recurrent", "layer_recurrent"),
    *("beside", "layer_feeds", "latent", "layer_head_dims", "layer_kv_heads", "value_dim"),
    *("layer_owners", "layer_values", "layer_sizes", "value_norm", "layer_input_size", "scales_layers"),
    "few_logits",  # of a draft model whose output matrix is cut at load, which no file holds
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    root = tmp_path_factory.mktemp("directories")

    @cache
    def make(architecture: str) -> Checkpoint:
        shape = {"num_layers": 4, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "head_dim": 16, "vocab_size": 300}
        return open_checkpoint(make_tiny_hf(root / architecture, architecture, **{**shape, "num_kv_heads": 1}))

    return make


@pytest.mark.parametrize("architecture", FAMILIES)
def test_no_field_of_a_configuration_is_lost_silently(
    directories: Callable[[str], Checkpoint], tmp_path: Path, architecture: str
) -> None:
    source, path = directories(architecture), tmp_path / "out.gguf"
    assert {field.name for field in fields(ModelConfig)} == {*FIELDS, *OF_TENSORS}
    refused = set()
    for name, value in [(name, value) for name, values in FIELDS.items() for value in values]:
        changes = {name: value}
        if name == "rope_scaling" and value.kind == "longrope" and source.config.rope_dims:
            continue  # whose factors are as many as half of the dimensions that turn
        if name in ("rope_dims", "rope_scaling", "query_scale") and source.config.latent:
            continue  # the first is `Latent.rope_dims`, and of a scaling and the factor of scores files tell both at once
        if name in ("layer_windows", "attention_softcap") and source.config.latent:
            continue  # latent attention has neither
        if name in ("rope_scaling", "rope_dims") and FAMILIES[architecture].by_window:
            continue  # which pairs turn is said by factors, of which each family has its own number
        if name.startswith("rope_") and architecture == "mamba2":
            continue  # nothing rotates
        if name == "query_growth" or (name == "rope_scaling" and source.config.query_growth):  # which count by one length
            scaling = value if name == "rope_scaling" else source.config.rope_scaling
            told = scaling.original_context_length if scaling and scaling.kind in ("yarn", "longrope") else 0
            changes["query_growth_length"] = told or source.config.context_length
        config = replace(source.config, **changes)
        if message := refusal(replace(source, config=config), path):
            # Where layers with windows have rotary positions of their own, both change together.
            assert f" {'layer_ropes' if name == 'layer_windows' else name} " in message
            refused.add(name)
        else:
            assert not differing(config, open_checkpoint(path).config), (name, value)
    # What llama.cpp's metadata has no place for in some family.
    scales = {"embedding_scale", "query_scale", "residual_scale", "logit_scale"}
    assert refused <= {"activation", "rope_dims", "query_growth", "layer_ropes", "layer_windows", "local_rope_base"} | scales


def refusal(checkpoint: Checkpoint, path: Path) -> str:
    """Why it has no file, "" if it got one."""
    try:
        write_model(path, checkpoint, checkpoint.tensors, 0, {})
    except ConfigError as error:
        return str(error)
    return ""


def differing(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Fields that are not the same, or that compute something else."""
    scalings = [c.rope_scaling and c.rope_scaling.for_context(c.context_length) for c in (one, other)]
    ropes = [Rope(c.rope_base, scaling, c.rope_dims) for c, scaling in zip((one, other), scalings, strict=True)]
    tables = [np.stack(rope_table(rope, one.head_dim, np.arange(200))) for rope in ropes]
    found = [] if np.allclose(*tables, atol=1e-4) else ["rope_scaling"]
    for name, value in vars(one).items():
        got = getattr(other, name)
        if name == "experts" and value and got:  # GGUF files have 32 bits, and a least sum of their own (`families.LEAST_SUM`)
            scale = value.scale if np.isclose(got.scale, value.scale, rtol=1e-6) else got.scale
            got = replace(got, least_sum=value.least_sum, scale=scale)
        if name == "architecture":  # several families may have one name in files
            got = value if FAMILIES[got].gguf_name == FAMILIES[value].gguf_name else got
        used = name != "rope_scaling" and (name != "local_rope_base" or "local" in one.layer_ropes)
        if used and not (np.isclose(got, value, rtol=1e-6) if isinstance(value, float) and got is not None else got == value):
            found.append(name)
    return found


def test_what_a_directory_says_beside_its_configuration_is_in_the_file(tmp_path: Path) -> None:
    directory = make_tiny_hf(tmp_path / "hf", "qwen3")
    (directory / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True})
    )
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    source = open_checkpoint(directory)
    quantize(source, tmp_path / "out.gguf", Job("q8_0"), threads=1)
    again = open_checkpoint(tmp_path / "out.gguf")
    assert (again.pooling, again.sampling.fields()) == ("last", source.sampling.fields())
    with pytest.raises(ConfigError, match="drafts with a mask, which GGUF files cannot name"):
        quantize(replace(source, mask_id=3), tmp_path / "other.gguf", Job("q8_0"), threads=1)


def test_entries_of_metadata_come_back_as_they_were(source: Checkpoint) -> None:
    file = read_gguf(source.path)
    assert file.entries.keys() == file.metadata.keys()
    for key, value in file.metadata.items():
        assert entry(key, value) == file.entries[key].tobytes()


@pytest.mark.parametrize("name", CODED)
def test_weighing_inputs_never_raises_the_weighted_error(name: str) -> None:
    format, rng = get_format(name), np.random.default_rng(2)
    x = (0.02 * rng.standard_t(4, (64, 512))).astype(np.float32)
    importance = np.exp(rng.normal(0, 1.5, 512)).astype(np.float32)

    def error(data: np.ndarray) -> float:
        return float((np.square(format.decode(data) - x) * importance * np.sqrt(np.square(x).mean(1, keepdims=True) + x * x)).sum())

    assert error(encode(format, x, importance)) <= error(encode(format, x)) * (0.95 if name in SEARCHED else 1)


@pytest.mark.parametrize(
    ("own", "other", "is_weighed"),
    [
        *(
            (*pair, is_weighed)
            for is_weighed in (False, True)
            for pair in (("nl4_g32", "q4_k"), ("nl4_g32", "iq4_nl"), ("nl4_xs", "iq4_xs"))
        ),
        ("nl4_i", "iq4_xs", False),
    ],
)
def test_our_formats_lose_less_than_those_of_as_many_bytes(own: str, other: str, is_weighed: bool) -> None:
    rng = np.random.default_rng(5)
    values = (0.02 * rng.standard_t(8, (64, 1024)) * rng.uniform(0.8, 1.25, 1024)).astype(np.float32)
    importance = rng.lognormal(size=1024).astype(np.float32) if is_weighed else np.ones(1024, np.float32)
    rows = [encode(get_format(name), values, importance if is_weighed else None) for name in (own, other)]
    assert rows[0].shape == rows[1].shape
    ours, theirs = (
        (np.square(get_format(name).decode(row) - values) * importance).sum() for name, row in zip((own, other), rows, strict=True)
    )
    assert ours < 0.97 * theirs


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("name", CODED)
def test_gptq_loses_less_of_the_output_than_rounding(name: str, act_order: bool) -> None:
    format, rng = get_format(name), np.random.default_rng(3)
    w = (0.02 * rng.standard_normal((48, 256))).astype(np.float32)
    mix = rng.normal(size=(256, 256)) / 16 + np.eye(256)
    x = ((rng.normal(size=(2048, 256)) * np.exp(rng.normal(0, 1, 256))) @ mix).astype(np.float32)
    hessian = x.T @ x / np.float32(len(x))

    def error(data: np.ndarray) -> float:
        return float(np.square(x @ (format.decode(data) - w).T).mean())

    found = gptq.quantize(format, w, gptq.factors(hessian.copy(), gptq.GptqSettings(act_order=act_order)), act_order)
    rounded = encode(format, w, hessian.diagonal())
    if format.free_codes:
        assert error(found) < 0.5 * error(rounded)
    else:
        assert np.array_equal(found, rounded)


def test_gptq_survives_inputs_that_are_never_used_or_always_the_same() -> None:
    format = get_format("q4_0")
    w = np.random.default_rng(4).standard_normal((8, 64)).astype(np.float32)
    x = np.ones((10, 64), np.float32)
    x[:, ::2] = 0
    found = gptq.quantize(format, w, gptq.factors(x.T @ x / np.float32(10), gptq.GptqSettings()), True)
    assert np.isfinite(format.decode(found)).all()


@pytest.mark.parametrize("job", [Job("q4_0", pure=True), Job("q2_k", pure=True)], ids=lambda job: job.type_name)
def test_methods_lose_less_than_rounding_at_equal_bytes(source: Checkpoint, chunks: np.ndarray, tmp_path: Path, job: Job) -> None:
    others = (np.random.default_rng(9).zipf(1.3, 64) % source.config.vocab_size).tolist()
    made = [
        quantize(source, tmp_path / "rounded.gguf", job, threads=1),
        quantize(source, tmp_path / "weighed.gguf", job, threads=1, chunks=chunks),
        quantize(source, tmp_path / "gptq.gguf", replace(job, methods=("gptq",)), threads=1, chunks=chunks),
    ]
    assert len({one.bits_per_weight for one in made}) == 1
    rounded, weighed, by_gptq = (compared(source, open_checkpoint(one.path), others).kl_mean for one in made)
    assert weighed < rounded
    assert by_gptq < 0.8 * rounded


def test_an_interrupted_run_goes_on_where_it_was(source: Checkpoint, chunks: np.ndarray, tmp_path: Path) -> None:
    job = Job("q4_0", methods=("gptq",))
    quantize(source, tmp_path / "whole.gguf", job, threads=1, chunks=chunks)

    def stop(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "out.gguf", job, threads=1, chunks=chunks, on_step=stop)
    assert not (tmp_path / "out.gguf").exists()
    made = quantize(source, tmp_path / "out.gguf", job, threads=1, chunks=chunks)
    assert made.num_resumed > 3
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "other.gguf", job, threads=1, chunks=chunks, on_step=stop)
    assert quantize(source, tmp_path / "other.gguf", Job("q8_0"), threads=1).num_resumed == 0


@pytest.mark.parametrize("change", ["weights", "version"])
def test_what_an_interrupted_run_of_another_model_left_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """As after further training that is saved into the same directory: its own size and time stay as they are."""
    directory = make_tiny_hf(tmp_path / "hf")

    def stop(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(open_checkpoint(directory), tmp_path / "out.gguf", Job("q8_0"), threads=1, on_step=stop)
    if change == "weights":
        path = directory / "model.safetensors"
        before = directory.stat()
        other = make_tiny_hf(tmp_path / "other", seed=5) / "model.safetensors"
        content = other.read_bytes()
        assert content != path.read_bytes()
        assert len(content) == path.stat().st_size
        path.write_bytes(content)
        assert (directory.stat().st_size, directory.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    else:
        monkeypatch.setattr("cpuspec.quantize.job._sources_sha256", lambda: "another")
    assert quantize(open_checkpoint(directory), tmp_path / "out.gguf", Job("q8_0"), threads=1).num_resumed == 0
    quantize(open_checkpoint(directory), tmp_path / "whole.gguf", Job("q8_0"), threads=1)
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_a_workspace_that_another_process_has_just_finished_is_not_worked_in(tmp_path: Path) -> None:
    """Whoever opened the lock before it was removed must not think that the directory is its own."""
    first = Workspace(tmp_path / "out", {})
    stale = (tmp_path / "out" / "lock").open("wb")
    first.close(remove=True)
    assert not (tmp_path / "out").exists()
    assert not store._is_there(stale, tmp_path / "out" / "lock")
    stale.close()


def test_two_runs_do_not_write_one_file(source: Checkpoint, tmp_path: Path) -> None:
    other = Workspace(tmp_path / "out.gguf.unfinished", {})
    with pytest.raises(CheckpointError, match="another process"):
        quantize(source, tmp_path / "out.gguf", Job("q4_0"), threads=1)
    other.close(remove=True)
    quantize(source, tmp_path / "out.gguf", Job("q4_0"), threads=1)


@pytest.mark.parametrize("name", ["matrix.dat", "matrix.gguf"])
def test_importance_matrices_survive_both_files(source: Checkpoint, chunks: np.ndarray, tmp_path: Path, name: str) -> None:
    found = replace(measure_importance(Weights(source), chunks, lambda what, done, total: None), dataset="words.txt")
    write_importance(tmp_path / name, found)
    again = read_importance(tmp_path / name)
    assert again.means.keys() == found.means.keys()
    assert again.chunks == len(chunks)
    for key, means in found.means.items():
        np.testing.assert_allclose(again.means[key], means, rtol=1e-5)
    assert found.means.keys() >= {"blk.0.attn_q.weight", "blk.1.ffn_down.weight", "output.weight"}


def test_an_importance_matrix_does_not_depend_on_how_many_chunks_go_together(source: Checkpoint, chunks: np.ndarray) -> None:
    def measured(part: np.ndarray) -> Importance:
        return measure_importance(Weights(source), part, lambda what, done, total: None)

    whole, single = measured(chunks[:2]), [measured(chunks[i : i + 1]) for i in range(2)]
    for key, means in whole.means.items():
        np.testing.assert_allclose(means, (single[0].means[key] + single[1].means[key]) / 2, rtol=1e-4)


@pytest.mark.parametrize(
    "content",
    [
        b"\0\0\0\0",
        b"\1\0\0\0",
        b"\xff\xff\xff\xff",
        b"\1\0\0\0\1\0\0\0a\1\0\0\0\1\0\0\0\0\0\xc0\x7f",
        b"\1\0\0\0\0\0\0\x7f",
    ],
)
def test_damaged_importance_matrices_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(CheckpointError):
        read_importance(tmp_path / "bad")


def test_an_importance_matrix_of_another_model_is_refused(source: Checkpoint) -> None:
    weights = Weights(source)
    with pytest.raises(ConfigError, match="another model"):
        of_matrices(Importance({"nothing": np.ones((1, 4), np.float32)}, {"nothing": np.ones(1, np.float32)}), weights, str)
    with pytest.raises(ConfigError, match="inputs"):
        of_matrices(Importance({"layers.0.q": np.ones((1, 4), np.float32)}, {"layers.0.q": np.ones(1, np.float32)}), weights, str)


def test_an_importance_matrix_that_lacks_matrices_of_few_bits_is_refused_unless_a_text_fills_it(
    small: Checkpoint, chunks: np.ndarray, tmp_path: Path
) -> None:
    found = measure_importance(Weights(small), chunks[:2, :32] % 260, lambda what, done, total: None)
    lacks = replace(found, means={name: means for name, means in found.means.items() if "attn_k" not in name})
    for type_name in ("iq2_xs", "q2_k_s"):
        with pytest.raises(ConfigError, match=r"has no entry for 2 matrices, as blk\.0\.attn_k\.weight, which would become"):
            quantize(small, tmp_path / "out.gguf", Job(type_name, pure=True), threads=1, importance=lacks)
    assert not list(tmp_path.iterdir())
    quantize(small, tmp_path / "q2_k.gguf", Job("q2_k", pure=True), threads=1, importance=lacks)
    quantize(small, tmp_path / "filled.gguf", Job("q2_k_s", pure=True), threads=1, chunks=chunks[:2, :32] % 260, importance=lacks)


@pytest.mark.parametrize(
    ("job", "wanted"),
    [
        (Job("q9_9"), "not known"),
        (Job("q4_0", methods=("gptq",)), "calibration"),
        (Job("q4_0", output="q9"), "not known"),
        (Job("q4_0", tensor_types=(("[", "q8_0"),)), "regular expression"),
    ],
)
def test_what_cannot_be_made_is_refused(source: Checkpoint, tmp_path: Path, job: Job, wanted: str) -> None:
    with pytest.raises((ConfigError, FormatError), match=wanted):
        quantize(source, tmp_path / "out.gguf", job, threads=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "wanted"), [("iq4_xs", "iq4_nl"), ("nl4_xs", "nl4_g32"), ("nl4_i", "nl4_g32"), ("q6_i", "q8_0")])
def test_rows_that_do_not_fill_superblocks_get_the_format_of_smaller_blocks(source: Checkpoint, name: str, wanted: str) -> None:
    found = choose(source.config, {"layers.1.up": (64, 576), "layers.1.o": (64, 1536)}, name)
    assert {part: format.name for part, format in found.items()} == {"layers.1.up": wanted, "layers.1.o": name}


def test_embeddings_of_a_rotated_type_have_rows_that_kernels_decode(source: Checkpoint) -> None:
    found = choose(source.config, {"embed": (64, 256), "output": (64, 256), "layers.0.q": (64, 256)}, "nl4_i")
    assert {name: format.name for name, format in found.items()} == {"embed": "q4_k", "output": "q6_i", "layers.0.q": "nl4_i"}
    assert row_decoder("q4_k") is not None
    assert row_decoder("nl4_i") is None


def test_formats_named_one_by_one_win_over_the_mix(source: Checkpoint) -> None:
    shapes = {name: tensor.shape for name, tensor in source.tensors.items() if len(tensor.shape) == 2}
    found = choose(source.config, shapes, "q4_k_m", Named("q5_0", None, [("ffn_down", "q8_0"), (r"layers\.1\.q$", "f16")]))
    assert found["layers.0.down"].name == "q8_0"
    assert found["layers.1.q"].name == "f16"
    assert found["layers.0.q"].name == "q4_k"
    assert found["embed"].name == "q5_0"  # the model is tied


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    import tracemalloc

    peaks = []
    for layers in (1, 4):
        path = make_tiny_gguf(tmp_path / f"{layers}.gguf", weight_format="f16", num_layers=layers, intermediate_size=512)
        source = open_checkpoint(path)
        chunks = np.random.default_rng(0).integers(0, 300, (4, 64)).astype(np.int32)
        tracemalloc.start()
        quantize(source, tmp_path / f"{layers}-out.gguf", Job("q4_0", methods=("gptq",)), threads=1, chunks=chunks)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.15 * peaks[0]


@pytest.mark.parametrize("source", ["gguf", "hf"])
@pytest.mark.parametrize("family", ["qwen2", "glm4moe", "qwen35moe", "deepseek2"])
def test_a_layer_for_prediction_is_kept_or_left_out(tmp_path: Path, family: str, source: str) -> None:
    options = {**MIXTURES.get(family, {}), "architecture": family, "num_layers": 3}
    if family == "qwen35moe":
        options |= {"num_layers": 5, "shared_size": 128}
    if source == "gguf":
        path = make_tiny_gguf(tmp_path / "source.gguf", weight_format="f16", predicts=True, **options)
    else:
        path = make_tiny_hf(tmp_path / "source", predicts=True, dtype="bf16", **options)
    before = open_checkpoint(path)
    kept, dropped = tmp_path / "kept.gguf", tmp_path / "dropped.gguf"
    assert quantize(before, kept, Job("q8_0"), 1).num_left_out == 0
    assert quantize(before, dropped, Job("q8_0", predicts=False), 1).num_left_out == len(before.prediction_layers)
    wanted, got = own_mtp(before), own_mtp(open_checkpoint(kept))
    assert got.model.tensors.keys() == wanted.model.tensors.keys()
    for name, tensor in wanted.model.tensors.items():
        values, again = tensor.dequantize(), got.model.tensors[name]
        assert np.abs(again.dequantize() - values).max() < 0.01 * np.abs(values).max(), name
        assert again.format.name == ("q8_0" if is_linear(name, tensor.shape) else "f32"), name
    for made, count in ((kept, options["num_layers"]), (dropped, options["num_layers"] - 1)):
        metadata = {key.partition(".")[2]: value for key, value in read_gguf(made).metadata.items() if key.startswith(family)}
        assert (metadata["block_count"], metadata.get("nextn_predict_layers", 0)) == (count, int(made == kept))
        lengths = {key: len(value) for key, value in metadata.items() if isinstance(value, np.ndarray)}
        assert lengths.pop("rope.dimension_sections", 4) == 4
        assert set(lengths.values()) <= {count}
    without = open_checkpoint(dropped)
    assert without.config == open_checkpoint(kept).config
    assert not without.prediction_layers
    with pytest.raises(CheckpointError, match="has no layers for multi-token prediction"):
        own_mtp(without)


def test_a_directory_keeps_a_layer_for_prediction_as_it_is(tmp_path: Path) -> None:
    before = open_checkpoint(make_tiny_hf(tmp_path / "source", predicts=True, dtype="bf16", num_layers=3))
    assert quantize(before, tmp_path / "out", Job("w4a16"), 1).num_left_out == 0
    wanted, got = own_mtp(before).model.tensors, own_mtp(open_checkpoint(tmp_path / "out")).model.tensors
    for name in wanted.keys() - {"embed", "output"}:
        assert np.array_equal(wanted[name].dequantize(), got[name].dequantize()), name
