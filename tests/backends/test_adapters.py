"""LoRA adapters beside the products: PEFT's logits, and each row's own adapters alone."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuspec.backends import Backend, adapted, make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.adapters import Adapter, AdapterSet, open_adapter
from cpuspec.errors import BackendError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.model.batch import ForwardBatch
from cpuspec.model.cache import KVCache
from cpuspec.quantize.job import Job, quantize
from cpuspec.settings import EngineConfig
from tests.backends.models import DEPTHS, PARENTS, PATHS, RECURRENT, TOKENS, TREE, every_backend
from tests.checkpoints.test_adapters import write_peft
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf

APPLYING = ("numba", "numpy", "torch")
SHAPES = {
    "llama": {"qkv_bias": True, "o_bias": True, "num_kv_heads": 4},
    "qwen2": {"hidden_size": 96, "intermediate_size": 1100},  # more inputs than a chunk has
    "qwen3": {"head_dim": 32},
    "phi3": {"tied": False},
    "gemma3": {},
}
CHANGES = {"llama": {"use_rslora": True}, "qwen3": {"alpha_pattern": {"down_proj": 3, "o_proj": 3}}}


def _backend(checkpoint: Checkpoint, name: str = "numba", threads: int = 1) -> Backend:
    return make_backend(name, checkpoint, EngineConfig(threads=threads, max_rows=160, kv_format="f32", keep_packed=False))


def _rows(backend: Backend, cache: KVCache, parts: list[tuple[int, list[int], AdapterSet]]) -> list[np.ndarray]:
    """The logits of tokens that go to slots, with adapters, in one forward."""
    tokens = [token for _, some, _ in parts for token in some]
    starts = np.cumsum([0, *(len(some) for _, some, _ in parts)]).tolist()
    positions = [cache.lengths[slot] + at for slot, some, _ in parts for at in range(len(some))]
    batch = ForwardBatch(tokens, positions, [slot for slot, _, _ in parts], starts, adapters=[one for _, _, one in parts])
    logits = backend.forward(batch, cache).logits.copy()
    return [logits[start:end] for start, end in pairwise(starts)]


def _alone(backend: Backend, tokens: list[int], adapters: AdapterSet) -> np.ndarray:
    return _rows(backend, backend.new_cache(1, 200), [(0, tokens, adapters)])[0]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Adapter, Adapter]:
    """A q4_0 model, and adapters of two ranks for it."""
    home = tmp_path_factory.mktemp("adapters")
    shape = {"hidden_size": 64, "intermediate_size": 1088, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
    checkpoint = open_checkpoint(make_tiny_gguf(home / "model.gguf", weight_format="q4_0", **shape))
    model = make_tiny_hf(home / "model", **shape)
    return checkpoint, *(_written(home / str(rank), model, checkpoint, rank) for rank in (3, 20))


def _written(path: Path, model: Path, checkpoint: Checkpoint, rank: int) -> Adapter:
    write_peft(path, model, rank=rank)
    return open_adapter(path, checkpoint.config, "tiny")


@pytest.mark.parametrize("architecture", SHAPES)
@every_backend(APPLYING)
def test_logits_are_those_of_peft(tmp_path: Path, architecture: str, name: str) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = make_tiny_hf(tmp_path / "model", architecture, **SHAPES[architecture])
    write_peft(tmp_path / "lora", model, CHANGES.get(architecture))
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype="float32"), tmp_path / "lora").eval()
    with torch.inference_mode():
        wanted = adapted(torch.tensor([TOKENS])).logits[0].numpy()
    checkpoint = open_checkpoint(model)
    backend = _backend(checkpoint, name)
    adapters = ((open_adapter(tmp_path / "lora", checkpoint.config, "tiny"), 1.0),)
    assert np.abs(_alone(backend, TOKENS, adapters) - wanted).max() < 1e-4
    assert np.abs(_alone(backend, TOKENS, ()) - wanted).max() > 1e-2, "else the adapter changes nothing"
    backend.close()


@every_backend(APPLYING)
def test_an_adapter_of_a_recurrent_model_computes_what_the_merged_model_does(tmp_path: Path, name: str) -> None:
    checkpoint = open_checkpoint(make_tiny_hf(tmp_path / "model", **RECURRENT["lfm2"]))
    write_peft(tmp_path / "lora", tmp_path / "model")
    adapter, backend = open_adapter(tmp_path / "lora", checkpoint.config, "tiny"), _backend(checkpoint, name)
    quantize(
        checkpoint,
        tmp_path / "merged.gguf",
        Job("f32"),
        1,
        adapters=[open_adapter(tmp_path / "lora", checkpoint.config, "tiny", 0.5)],
    )
    wanted = _alone(_backend(open_checkpoint(tmp_path / "merged.gguf"), name), TOKENS, ())
    assert np.abs(_alone(backend, TOKENS, ((adapter, 0.5),)) - wanted).max() < 1e-3
    assert np.abs(_alone(backend, TOKENS, ()) - wanted).max() > 1e-2


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_of_one_forward_have_the_bits_that_each_adapter_alone_gives(
    quantized: tuple[Checkpoint, Adapter, Adapter], threads: int
) -> None:
    """Sequences of several lengths, cut at other rows than blocks have, with no, one and both adapters, in two orders of rows."""
    checkpoint, one, two = quantized
    sets: list[AdapterSet] = [(), ((one, 1.0),), ((two, 1.0),), ((one, 1.0), (two, -0.5)), ((one, 0.25),)]
    texts = [TOKENS[:5], TOKENS[3:20], TOKENS[:33], TOKENS[7:8], TOKENS[:45]]
    backend = _backend(checkpoint, threads=1)
    wanted = [_alone(backend, text, adapters) for text, adapters in zip(texts, sets, strict=True)]
    assert all(not np.array_equal(wanted[4], _alone(backend, texts[4], other)) for other in sets[:4]), "else nothing is compared"
    backend.close()
    backend = _backend(checkpoint, threads=threads)
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        together = _rows(backend, backend.new_cache(5, 64), [(slot, texts[slot], sets[slot]) for slot in order])
        for slot, got in zip(order, together, strict=True):
            assert np.array_equal(got, wanted[slot])
    cache = backend.new_cache(5, 64)
    stepwise: list[list[np.ndarray]] = [[] for _ in texts]
    while parts := [(slot, text[len(stepwise[slot]) :][:1], sets[slot]) for slot, text in enumerate(texts)]:
        if not (parts := [part for part in parts if part[1]]):
            break
        for (slot, _, _), got in zip(parts, _rows(backend, cache, parts), strict=True):
            stepwise[slot].append(got[0])
    assert all(np.array_equal(np.stack(rows), whole) for rows, whole in zip(stepwise, wanted, strict=True))
    backend.close()


def test_a_tree_of_drafts_has_the_bits_of_its_paths(quantized: tuple[Checkpoint, Adapter, Adapter]) -> None:
    checkpoint, one, _ = quantized
    backend, adapters = _backend(checkpoint), ((one, 1.0),)
    cache = backend.new_cache(1, 64)
    _rows(backend, cache, [(0, TOKENS[:9], adapters)])
    depths = (9 + DEPTHS).tolist()
    tree = backend.forward(ForwardBatch(TREE, depths, [0], [0, len(TREE)], PARENTS, adapters=[adapters]), cache).logits.copy()
    for path in PATHS:
        chain = _alone(backend, [*TOKENS[:9], *(TREE[node] for node in path)], adapters)
        assert np.array_equal(tree[path], chain[9:])
    backend.close()


def test_inputs_in_an_order_of_their_own_meet_their_columns(quantized: tuple[Checkpoint, Adapter, Adapter]) -> None:
    """Of a matrix whose bytes hold its inputs in another order, as GPTQ with act-order does."""
    checkpoint, one, _ = quantized
    order = np.random.default_rng(1).permutation(64).astype(np.int32)
    tensors = dict(checkpoint.tensors)
    for name in ("layers.0.q", "layers.1.gate", "layers.1.up"):
        values = tensors[name].dequantize()
        tensors[name] = replace(QuantTensor.encode(get_format("q8_0"), values[:, order]), order=order)
    changed = replace(checkpoint, tensors=tensors)
    numba, numpy = _backend(changed), _backend(changed, "numpy")
    adapters = ((one, 1.0),)
    alone = _alone(numba, TOKENS, adapters), _alone(numpy, TOKENS, adapters)
    without = _alone(numba, TOKENS, ()), _alone(numpy, TOKENS, ())
    rounding = 3 * np.abs(without[0] - without[1]).mean()
    assert np.abs(alone[0] - alone[1]).mean() < rounding < np.abs(alone[0] - without[0]).mean() / 3
    numba.close()


@every_backend(("onnxruntime", "openvino"))
def test_a_backend_without_adapters_says_what_to_use(quantized: tuple[Checkpoint, Adapter, Adapter], name: str) -> None:
    checkpoint, one, _ = quantized
    backend = _backend(checkpoint, name)
    with pytest.raises(BackendError, match="use numba, numpy or torch, or `cpuspec quantize --lora`"):
        _alone(backend, TOKENS, ((one, 1.0),))


def test_a_batch_names_adapters_for_each_sequence(quantized: tuple[Checkpoint, Adapter, Adapter]) -> None:
    checkpoint, one, _ = quantized
    backend = _backend(checkpoint)
    with pytest.raises(BackendError, match="for each of 2 sequences or for none, got 1"):
        backend.forward(ForwardBatch([1, 2], [0, 0], [0, 1], [0, 1, 2], adapters=[((one, 1.0),)]), backend.new_cache(2, 16))
    backend.close()


def test_an_adapter_is_packed_once_for_prompts_and_answers(
    quantized: tuple[Checkpoint, Adapter, Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, adapter, _ = quantized
    made, pack = list[Adapter](), adapted.PackedAdapter.__init__

    def watched(self: adapted.PackedAdapter, one: Adapter, *rest: Any) -> None:
        made.append(one)
        pack(self, one, *rest)

    monkeypatch.setattr(adapted.PackedAdapter, "__init__", watched)
    backend = _backend(checkpoint)
    cache = backend.new_cache(1, 64)
    for position, of_prompts in enumerate((True, False)):
        batch = ForwardBatch([5], [position], [0], [0, 1], adapters=[((adapter, 1.0),)], of_prompts=of_prompts)
        backend.forward(batch, cache)
    assert made == [adapter]
    backend.close()
