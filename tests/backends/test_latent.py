"""Latent attention: each backend means what the reference means, of every layout of files."""

import numpy as np
import pytest

from cpuspec.checkpoints import Checkpoint
from cpuspec.errors import BackendError
from tests.backends.models import LATENT, computed, every_backend, reference, tiny


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {name: tiny(tmp_path_factory, weight_format="f32", **options) for name, options in LATENT.items()}


@pytest.mark.parametrize("kv_format", ["f32", "f16", "int4"])
@pytest.mark.parametrize("model", LATENT)
@every_backend(("torch", "onnxruntime", "openvino"))
def test_each_family_means_what_the_reference_means(checkpoints, model: str, name: str, kv_format: str) -> None:  # type: ignore[no-untyped-def]
    checkpoint = checkpoints[model]
    if name in ("onnxruntime", "openvino"):
        with pytest.raises(BackendError, match=r"layer 0 has latent attention, which this graph cannot compute"):
            computed(name, checkpoint)
        return
    wanted = reference(checkpoint, kv_format=kv_format)
    assert np.abs(computed(name, checkpoint, size=7, kv_format=kv_format) - wanted).max() < 1e-4 * max(1, np.abs(wanted).max())
