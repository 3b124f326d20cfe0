"""Gemma 4's assistants, as transformers makes and saves them: the same drafts as its own loop, in both kinds of files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.families import FAMILIES
from cpuspec.checkpoints.heads import Head, find_reader, own_mtp
from cpuspec.errors import CheckpointError
from cpuspec.model.batch import ForwardBatch
from cpuspec.sequence import Sequence
from cpuspec.settings import EngineConfig, SamplingParams
from cpuspec.speculation.drafters.eagle import draft_from_one_place
from cpuspec.speculation.drafters.head_path import HeadPath
from cpuspec.speculation.head_context import HeadContext
from tests.backends.models import every_backend
from tests.conformance.harness import check_ways
from tests.heads import check_same_head
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf

torch = pytest.importorskip("torch")
# The window is longer than the prompts: transformers' one of an assistant ends elsewhere than that of the target.
SHAPE: dict[str, Any] = {"num_layers": 6, "window": 128, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
TARGETS: dict[str, dict[str, Any]] = {
    "gemma4": {"architecture": "gemma4", **SHAPE},
    "gemma4, E": {"architecture": "gemma4", **SHAPE, "shared_layers": 2, "layer_input_size": 32},
    "gemma4-moe": {"architecture": "gemma4-moe", **SHAPE, "same_values": True},
}
SETTINGS = EngineConfig(threads=1, max_rows=64, kv_format="f32", keep_packed=False, context_length=256, max_sequences=3)


def write_assistant(directory: Path, target: dict[str, Any]) -> Any:
    """A random assistant, saved by transformers."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

    heads = 1 if target.get("same_values") else 2
    text = Gemma4TextConfig(
        vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        num_global_key_value_heads=heads, attention_k_eq_v=heads == 1, head_dim=32, global_head_dim=64, sliding_window=128,
        layer_types=["sliding_attention", "full_attention", "full_attention"], num_kv_shared_layers=3,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=0,
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    )  # fmt: skip
    torch.manual_seed(3)
    model = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=text, backbone_hidden_size=128))
    with torch.no_grad():
        for name, weights in model.named_parameters():
            is_norm = name.endswith("norm.weight") or "layernorm" in name
            weights.copy_(torch.randn(weights.shape) * (0.1 if is_norm else 1 / np.sqrt(weights.shape[-1])) + is_norm)
            if name.endswith("q_norm.weight"):
                weights.mul_(1 / np.sqrt(len(weights)))
        for layer in model.model.layers:
            layer.layer_scalar.fill_(0.8)
    model.eval().save_pretrained(directory)
    return model


def write_gguf(directory: Path, path: Path) -> Path:
    """The same assistant as llama.cpp's converter names its parts."""
    gguf = pytest.importorskip("gguf")
    settings = json.loads((directory / "config.json").read_text())["text_config"]
    writer = gguf.GGUFWriter(path, "gemma4-assistant")
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_uint32("gemma4-assistant.nextn_predict_layers", settings["num_hidden_layers"])
    writer.add_context_length(512)
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_uint32("gemma4-assistant.embedding_length_out", 128)
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(settings["num_attention_heads"])
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    for key, dims in (("", 2 * settings["head_dim"]), ("_swa", settings["head_dim"])):
        for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            writer.add_uint32(f"gemma4-assistant.{name}{key}", dims)
    writer.add_sliding_window(settings["sliding_window"])
    slides = [kind == "sliding_attention" for kind in settings["layer_types"]]
    writer.add_array("gemma4-assistant.attention.sliding_window_pattern", slides)
    writer.add_uint32("gemma4-assistant.attention.shared_kv_layers", len(slides))
    writer.add_uint32("gemma4-assistant.embedding_length_per_layer_input", 0)
    parts = {theirs: name for name, theirs in FAMILIES["gemma4"].layer_names.values()}
    outside = {
        "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
        "pre_projection.weight": "nextn.pre_projection.weight", "post_projection.weight": "nextn.post_projection.weight",
    }  # fmt: skip
    for name, values in load_file(directory / "model.safetensors").items():
        _, _, number, part = (name.split(".", 3) + [""] * 4)[:4] if name.startswith("model.layers.") else ("", "", "", "")
        writer.add_tensor(f"blk.{number}.{parts[part]}" if part else outside[name], values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=TARGETS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """A target, its assistant, and the assistant as transformers' model."""
    root = tmp_path_factory.mktemp("assistant")
    model = write_assistant(root / "assistant", TARGETS[request.param])
    return make_tiny_hf(root / "target", **TARGETS[request.param]), root / "assistant", model


def drafted_by_transformers(target: Path, assistant: Any, tokens: list[int], count: int) -> list[int]:
    """`count` tokens that the assistant drafts behind `tokens`, by the steps of transformers' own loop."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    found: list[int] = []
    with torch.no_grad():
        seen = model(torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
        state, last = seen.hidden_states[-1][:, -1:], torch.tensor([tokens[-1:]])
        for _ in range(count):
            given = torch.cat([model.get_input_embeddings()(last), state], dim=-1)
            places = torch.tensor([[len(tokens) - 1]])
            out = assistant(inputs_embeds=given, position_ids=places, shared_kv_states=seen.shared_kv_states)
            state, last = out.last_hidden_state, out.logits[:, -1].argmax(-1)[:, None]
            found.append(int(last))
    return found


def read(path: Path, target: Checkpoint) -> Head:
    found = find_reader(path)
    assert found
    return found[0].read(found[1], target)


PROMPTS = [np.random.default_rng(number).integers(0, 300, size).tolist() for number, size in enumerate((40, 9, 3))]


@every_backend(("numba", "numpy", "torch"))
def test_drafts_are_those_of_transformers(written: tuple[Path, Path, Any], name: str) -> None:
    directory, assistant, model = written
    target = open_checkpoint(directory)
    head, backend = read(assistant, target), make_backend(name, target, SETTINGS)
    own = make_backend(name, head.model, SETTINGS, backend)
    assert own.shared_bytes, "the target's matrices of keys are in memory once"
    context = HeadContext(head, own, len(PROMPTS), 128)  # type: ignore[arg-type]
    paths = []
    for number, tokens in enumerate(PROMPTS):
        seq = Sequence.new(number, tokens, SamplingParams(max_tokens=9))
        context.begin(seq, 0)
        rows = ForwardBatch(tokens[:-1], list(range(len(tokens) - 1)), [0], [0, len(tokens) - 1], None, [0], head.layers)
        context.learn(seq, backend.forward(rows, backend.new_cache(1, 64)).hidden)
        context.num_unfed(seq)
        paths.append(HeadPath(None, seq, 5, target.config.vocab_size))
    got = [draft.tokens.tolist() for draft in draft_from_one_place(context, paths, "assistant")]
    wanted = [drafted_by_transformers(directory, model, tokens, 5) for tokens in PROMPTS]
    assert got == wanted
    assert len({tuple(tokens) for tokens in wanted}) == len(PROMPTS)


def test_answers_are_those_without_drafts(written: tuple[Path, Path, Any]) -> None:
    target, assistant, _ = written
    specs = ("{}@1", "{}@5", "ngram@2+{}@3", "draw:{}@3")
    check_ways(open_checkpoint(target), [(spec.format(assistant), {}) for spec in specs], least=20)


def test_a_gguf_file_is_the_same_head_and_is_found_beside_its_target(written: tuple[Path, Path, Any], tmp_path: Path) -> None:
    directory, assistant, _ = written
    target, path = open_checkpoint(directory), write_gguf(assistant, tmp_path / "mtp-tiny.gguf")
    wanted, got = read(assistant, target), read(path, target)
    check_same_head(got, wanted)
    beside = open_checkpoint(make_tiny_gguf(tmp_path / "tiny.gguf", weight_format="f32", **TARGETS["gemma4"]))
    assert own_mtp(beside).method == "assistant"
    check_ways(beside, [("auto", {}), ("mtp@2", {})], least=20)


def test_an_assistant_of_another_model_is_refused(written: tuple[Path, Path, Any], tmp_path: Path) -> None:
    _, assistant, _ = written
    other = make_tiny_gguf(tmp_path / "qwen.gguf", "qwen2")
    with pytest.raises(CheckpointError, match="assistant of a Gemma 4"):
        read(assistant, open_checkpoint(other))
    larger = make_tiny_gguf(tmp_path / "gemma.gguf", "gemma4", num_layers=4)
    with pytest.raises(CheckpointError, match="size of its target's hidden states is 128"):
        read(assistant, open_checkpoint(larger))
