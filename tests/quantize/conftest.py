import numpy as np
import pytest

from cpuspec.checkpoints import Checkpoint, open_checkpoint
from tools.make_tiny_model import make_tiny_gguf


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_gguf(tmp_path_factory.mktemp("source") / "source.gguf", weight_format="f16"))


@pytest.fixture(scope="session")
def chunks(source: Checkpoint) -> np.ndarray:
    # Few kinds of tokens, so that inputs differ in size and go together, as those of real text do.
    return (np.random.default_rng(1).zipf(1.3, (24, 64)) % source.config.vocab_size).astype(np.int32)
