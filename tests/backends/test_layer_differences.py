"""What differs by architecture and by layer: each flag changes something, sinks over several chunks, LongRoPE's factors."""

from dataclasses import replace

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.checkpoints.checkpoint import tensor_shapes
from cpuspec.config import RopeScaling
from cpuspec.settings import EngineConfig
from tests.backends.models import Flagged, computed, every_backend, flagged, in_chunks, reference
from tests.conformance.test_backends import FLAGS, LONGROPE

TOKENS = np.random.default_rng(0).integers(0, 300, 330).tolist()


@pytest.mark.parametrize("name", FLAGS)
def test_each_difference_makes_one(name: str) -> None:
    """The flags reach the forward: without them, logits are others."""
    model = flagged(**FLAGS[name])
    plain = flagged(num_layers=model.config.num_layers, hidden_size=model.config.hidden_size)
    config = replace(plain.config, qk_norm=model.config.qk_norm)
    plain = Flagged(config, {name: (plain.tensors | model.tensors)[name] for name in tensor_shapes(config)})
    assert not np.allclose(computed("numba", model, TOKENS[:30])[-1], computed("numba", plain, TOKENS[:30])[-1], atol=1e-2)


@pytest.mark.parametrize(("kv_format", "most"), [("f32", 1e-4), ("f16", 1e-3), ("int8", 0.05)])
@every_backend(("numba", "torch"))
def test_sinks_over_several_chunks_of_each_cache(kv_format: str, most: float, name: str) -> None:
    """Biases of keys shift all scores of a query, but not its sink."""
    model, tokens = flagged(sinks=True, layer_windows=(300, 0), qkv_bias=True, o_bias=True), TOKENS
    wanted = reference(model, tokens, kv_format)
    together = computed(name, model, tokens, 330, kv_format=kv_format)
    assert np.abs(together - wanted).max() < most * np.abs(wanted).max()
    without = Flagged(replace(model.config, sinks=False), {n: t for n, t in model.tensors.items() if not n.endswith("sinks")})
    assert np.abs(reference(without, tokens, kv_format) - wanted).max() > 4 * most * np.abs(wanted).max()
    for size, threads in ((200, 2), (7, 3)):
        again = computed(name, model, tokens, size, threads=threads, kv_format=kv_format)
        assert np.abs(again - together).max() <= (0 if name == "numba" else 2 * most * np.abs(wanted).max())


@every_backend()
def test_the_context_that_is_asked_for_chooses_the_factors_of_longrope(name: str) -> None:
    """Not the tokens that are there: keys in the cache would have been turned by other factors than new queries."""
    model, settings = flagged(rope_scaling=LONGROPE), EngineConfig(threads=1, kv_format="f32", keep_packed=False)
    for length, factors in ((None, LONGROPE.factors), (257, LONGROPE.factors), (256, LONGROPE.short_factors)):
        plain = RopeScaling("factors", attention_factor=LONGROPE.attention_factor, factors=factors)
        wanted = reference(Flagged(replace(model.config, rope_scaling=plain), model.tensors), TOKENS[:20])
        backend = make_backend(name, model, replace(settings, context_length=length))
        assert np.abs(in_chunks(backend, TOKENS[:20], 20) - wanted).max() < 1e-4 * np.abs(wanted).max()
        backend.close()
