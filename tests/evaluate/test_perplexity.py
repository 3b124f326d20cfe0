"""Perplexity by the conventions of llama.cpp and Hugging Face, and llama.cpp's files of logits, read and written."""

import struct
from pathlib import Path

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.backends.numpy_backend import NumpyBackend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.errors import ConfigError
from cpuspec.evaluate.logits_file import LogitsFile, writing
from cpuspec.evaluate.perplexity import compare_with_file, measure_perplexity, side_by_side, sliding
from cpuspec.evaluate.quality import logits_of
from cpuspec.sampling import log_softmax
from cpuspec.settings import EngineConfig
from cpuspec.text import make_tokenizer
from tests.backends.models import SMALL, tiny
from tools.make_tiny_model import make_tiny_gguf

TOKENS = np.random.default_rng(0).integers(0, 300, 50).tolist()
BOS = 7
# `llama-perplexity -f TEXT -c 16 -b 16 --chunks 2 --kl-divergence-base FILE` of llama.cpp b11434 with AVX2, on the f32 model below.
THEIRS = Path(__file__).parent / "llama_perplexity.kld"
THEIR_PERPLEXITY, THEIR_ERROR = 4056.1200, 2137.32402
TEXT = "the cat sat on the mat and the dog ran to the door while the rain was falling on the roof of the house. " * 6


@pytest.fixture(scope="module")
def backends(tmp_path_factory):
    fine, coarse = (tiny(tmp_path_factory, weight_format=name) for name in ("f32", "q4_0"))
    # Keys and values in f32: the last bits of a BLAS product depend on the rows beside it, and rounding to f16 would enlarge that.
    config = EngineConfig(max_rows=7, threads=1, kv_format="f32")
    fast = make_backend("numba", coarse, config)
    yield NumpyBackend(fine, config), NumpyBackend(coarse, config), fast
    fast.close()


@pytest.fixture(scope="module")
def their_model(tmp_path_factory):
    """The model that llama.cpp was given, and the ids of the text."""
    path = make_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", weight_format="f32", **SMALL)
    checkpoint = open_checkpoint(path)
    ids = make_tokenizer(checkpoint).encode(TEXT)
    return NumpyBackend(checkpoint, EngineConfig(kv_format="f32")), ids


def losses(backend: NumpyBackend, window: list[int]) -> list[float]:
    """Of each token of a window but the first."""
    rows = np.concatenate(list(logits_of(backend, window, 7))).astype(np.float64)
    probs = np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True)
    return [-float(np.log(probs[i, token])) for i, token in enumerate(window[1:])]


def test_windows_side_by_side_begin_anew_and_count_their_second_half() -> None:
    windows = side_by_side(TOKENS, 10, BOS)
    assert [one.tokens for one in windows] == [[BOS, *TOKENS[start + 1 : start + 10]] for start in range(0, 50, 10)]
    assert [one.counted for one in windows] == [TOKENS[start + 6 : start + 10] for start in range(0, 50, 10)]
    assert side_by_side(TOKENS, 10, None, 2)[1].tokens == TOKENS[10:20]
    assert len(side_by_side(TOKENS[:29], 10, None)) == 2


@pytest.mark.parametrize(("context", "stride"), [(10, 5), (10, 9), (10, 1), (50, 7), (64, 63), (12, 5)])
def test_sliding_windows_count_every_token_once_in_the_first_window_that_has_it(context: int, stride: int) -> None:
    windows = sliding(TOKENS, context, stride)
    assert [token for one in windows for token in one.counted] == TOKENS[1:]
    # The loop of transformers' documentation, with its labels.
    end_before, wanted = 0, []
    for begin in range(0, len(TOKENS), stride):
        end = min(begin + context, len(TOKENS))
        labels = [-100] * (end_before - begin) + TOKENS[max(begin, end_before) : end]
        wanted.append((TOKENS[begin:end], [label for label in labels[1:] if label != -100]))
        end_before = end
        if end == len(TOKENS):
            break
    assert [(one.tokens, one.counted) for one in windows] == wanted


def test_perplexity_and_its_error_are_what_their_definitions_say(backends) -> None:
    fine, _, _ = backends
    found = measure_perplexity(fine, side_by_side(TOKENS, 10, BOS))
    counted = [loss for start in range(0, 50, 10) for loss in losses(fine, [BOS, *TOKENS[start + 1 : start + 10]])[5:]]
    assert found.num_counted == len(counted) == 20
    assert found.perplexity == found.running[-1] == pytest.approx(np.exp(np.mean(counted)))
    assert found.error == pytest.approx(np.exp(np.mean(counted)) * np.std(counted) / np.sqrt(19))
    slid = measure_perplexity(fine, sliding(TOKENS, 50, 49))
    assert slid.perplexity == pytest.approx(np.exp(np.mean(losses(fine, TOKENS))))


def test_rows_before_the_counted_ones_are_not_projected_and_change_nothing(backends) -> None:
    for backend in backends:
        whole = np.concatenate(list(logits_of(backend, TOKENS, 7)))
        for first in (0, 3, 7, 20, 49):
            rows = np.concatenate(list(logits_of(backend, TOKENS, 7, first)))
            assert np.allclose(rows, whole[first:], rtol=0, atol=0 if backend.row_invariant else 1e-4)
            assert rows.shape == whole[first:].shape


def test_perplexity_is_llama_cpps_on_the_same_file(their_model) -> None:
    backend, ids = their_model
    found = measure_perplexity(backend, side_by_side(ids, 16, None, 2))
    assert found.perplexity == pytest.approx(THEIR_PERPLEXITY, rel=2e-4)  # its keys and values have 16 bits
    assert found.error == pytest.approx(THEIR_ERROR, rel=1e-3)


def test_a_file_of_llama_cpp_is_read_and_its_reference_is_the_same_model(their_model) -> None:
    backend, ids = their_model
    file = LogitsFile(THEIRS)
    assert (file.context, file.vocab_size) == (16, backend.config.vocab_size)
    assert file.windows == [ids[:16], ids[16:32]]
    quality = compare_with_file(backend, file, None)
    assert quality.num_tokens == 14
    assert quality.kl_max < 1e-4
    assert quality.same_top == 1
    assert quality.reference_perplexity == pytest.approx(THEIR_PERPLEXITY, rel=1e-4)


def test_a_file_that_is_written_here_is_the_one_that_llama_cpp_writes(their_model, tmp_path: Path) -> None:
    backend, ids = their_model
    windows = side_by_side(ids, 16, None, 2)
    with writing(tmp_path / "ours.kld", [one.tokens for one in windows], backend.config.vocab_size) as writer:
        measure_perplexity(backend, windows, writer=writer)
    ours, theirs = (tmp_path / "ours.kld").read_bytes(), THEIRS.read_bytes()
    head = 20 + 4 * 32
    assert (len(ours), ours[:head]) == (len(theirs), theirs[:head])
    for number in range(2):
        mine, other = (LogitsFile(path).log_probs(number, 0, 7) for path in (tmp_path / "ours.kld", THEIRS))
        assert np.abs(mine - other).max() < 0.02


@pytest.mark.parametrize("vocab_size", [1, 6, 7])
def test_rows_are_kept_in_sixteen_bits_down_to_sixteen_below_the_largest(tmp_path: Path, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = np.concatenate([rng.normal(0, 9, (3, vocab_size)), np.zeros((1, vocab_size))]).astype(np.float32)
    path = tmp_path / "rows.kld"
    with writing(path, [[0] * 9], vocab_size) as writer:
        writer.write(logits)
    # The layout, read number by number.
    data, at, exact = path.read_bytes(), 20 + 9 * 4, log_softmax(logits)
    for row in exact:
        scale, least = struct.unpack_from("<ff", data, at)
        codes = struct.unpack_from(f"<{vocab_size}H", data, at + 8)
        at += 8 + 2 * (vocab_size + vocab_size % 2)
        for code, value in zip(codes, row, strict=True):
            assert scale * code + least == pytest.approx(max(value, row.max() - 16), abs=2e-4)
    assert at == len(data)


def test_divergence_from_a_file_is_that_from_the_backend_that_wrote_it(backends, tmp_path: Path) -> None:
    fine, coarse, fast = backends
    windows = side_by_side(TOKENS, 20, BOS)
    with writing(tmp_path / "fine.kld", [TOKENS[:20], TOKENS[20:40]], fine.config.vocab_size) as writer:
        reference = measure_perplexity(fine, windows, writer=writer)
    file = LogitsFile(tmp_path / "fine.kld")
    found = compare_with_file(coarse, file, BOS)
    kl, same = [], []
    for window in windows:
        r, o = (log_softmax(np.concatenate(list(logits_of(one, window.tokens, 7))))[window.first : -1] for one in (fine, coarse))
        kl += (np.exp(r) * (r - o)).sum(axis=1).tolist()
        same += (r.argmax(axis=1) == o.argmax(axis=1)).tolist()
    assert found.num_tokens == len(kl) == 18
    assert found.kl_mean == pytest.approx(np.mean(kl), abs=1e-5)
    assert found.kl_mean > 1e-3
    assert found.same_top == np.mean(same)
    assert found.reference_perplexity == pytest.approx(reference.perplexity, rel=1e-4)
    assert found.perplexity == pytest.approx(measure_perplexity(coarse, windows).perplexity)
    # The file keeps log probabilities in 16 bits, of a range of 16 or so: half a step is 1.2e-4, and errors largely cancel.
    assert compare_with_file(fine, file, BOS).kl_max < 5e-5
    assert compare_with_file(fast, file, BOS).kl_mean == pytest.approx(found.kl_mean, rel=0.2)
    assert compare_with_file(coarse, file, BOS, most=1).num_tokens == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"GGUF" + data[4:], "not a file of logits"),
        (lambda data: data[:12], "not a file of logits"),
        (lambda data: data[:-2], "bytes; wanted"),
        (lambda data: data + b"\0\0", "bytes; wanted"),
        (lambda data: data[:16] + struct.pack("<i", -1) + data[20:], "damaged"),
        (lambda data: data[:8] + struct.pack("<i", 1 << 30) + data[12:], "damaged"),
        (lambda data: data[:20] + struct.pack("<i", 1 << 20) + data[24:], "outside"),
        (lambda data: data[:148] + struct.pack("<f", float("nan")) + data[152:], "not a number"),
    ],
)
def test_a_damaged_file_is_refused(their_model, tmp_path: Path, change, message: str) -> None:
    backend, _ = their_model
    path = tmp_path / "damaged.kld"
    path.write_bytes(change(THEIRS.read_bytes()))
    with pytest.raises(ConfigError, match=message):
        compare_with_file(backend, LogitsFile(path), None)


def test_a_file_of_another_vocabulary_is_refused(backends, tmp_path: Path) -> None:
    with writing(tmp_path / "x.kld", [[0] * 8], 5) as writer:
        writer.write(np.zeros((3, 5), np.float32))
    with pytest.raises(ConfigError, match="same vocabulary"):
        compare_with_file(backends[0], LogitsFile(tmp_path / "x.kld"), None)


def test_a_file_that_is_not_finished_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KeyError), writing(tmp_path / "x.kld", [[0] * 8], 5):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: side_by_side(TOKENS, 26, None), "at least 52 tokens"),
        (lambda: side_by_side(TOKENS, 3, None), "at least 4"),
        (lambda: sliding(TOKENS, 10, 10), "from 1 to 9"),
        (lambda: sliding(TOKENS, 10, 0), "from 1 to 9"),
        (lambda: sliding([1], 10, 5), "two tokens"),
    ],
)
def test_texts_and_windows_that_cannot_be_are_refused(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
