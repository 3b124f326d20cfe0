"""Heads that are trained here: they learn, go on as if never interrupted, see no future, and the engine computes the same rows."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.heads import Head, find_reader, own_mtp
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.formats import get_format
from cpuspec.model.batch import ForwardBatch
from cpuspec.quantize.head_output import write_head
from cpuspec.settings import SamplingParams
from cpuspec.train.acceptance import Acceptance, chances
from cpuspec.train.chains import ChainLoss, ChainTraining
from cpuspec.train.job import TrainingJob, train_head
from cpuspec.train.layout import read_head
from cpuspec.train.loop import Measured, Schedule, read_log, step_samples, train_and_held_back
from cpuspec.train.samples import Sample, SampleSet
from cpuspec.train.start import HeadShape
from cpuspec.train.vocabulary import count, drafted_ids
from tests.backends.models import tiny
from tests.block_heads import make_block_head
from tests.conformance.harness import check_ways
from tests.train.toy import FIRST, LAYERS, SETTINGS, SMALL, WORDS, make_samples, text
from tools.make_tiny_model import make_tiny_gguf

CPU = torch.device("cpu")
SHAPE = HeadShape(vocab_size=96)
SHORT = Schedule(epochs=1, tokens=100, rate=3e-3, held_back=0.2, measured_every=1000)
LOSSES = {"eagle3": ChainLoss(steps=3), "mtp": ChainLoss("mtp", steps=3, decay=0.6)}
each_method = pytest.mark.parametrize("method", LOSSES)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny(tmp_path_factory, weight_format="f32", **SMALL)


@pytest.fixture(scope="module")
def samples(target: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return make_samples(tmp_path_factory.mktemp("samples"), target, 15, top=4)


def nothing(*_: object) -> None:
    """A listener that does not listen."""


def trained(target: Checkpoint, samples: SampleSet, out: Path, method: str, **changes: object) -> list[Measured]:
    job = TrainingJob(LOSSES[method], SHAPE, SHORT, device="cpu", dtype="f32", threads=1)._replace(**changes)  # type: ignore[arg-type]
    return train_head(target, samples, out, job, nothing, nothing)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_step_with_a_loss_that_is_not_finite_changes_nothing(
    target: Checkpoint, samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    real, calls = ChainTraining.loss, itertools.count()

    def loss(self: ChainTraining, some: list[Sample], rng: np.random.Generator) -> torch.Tensor | None:
        found = real(self, some, rng)
        return found * wrong if found is not None and next(calls) == 1 else found

    monkeypatch.setattr(ChainTraining, "loss", loss)
    log = trained(target, samples, tmp_path / "out", "eagle3")
    assert next(calls) > 3
    assert all(line.loss is None or np.isfinite(line.loss) for line in log)
    state = torch.load(tmp_path / "out" / "training" / "state.pt", weights_only=True)
    assert all(torch.isfinite(values).all() for values in state["trained"].values())
    assert log[-1].mean_length > log[0].mean_length, "the other steps have taught it"


def test_training_replaces_no_files_of_something_else(target: Checkpoint, samples: SampleSet, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"a model")
    with pytest.raises(ConfigError, match="other files, which training would replace"):
        trained(target, samples, tmp_path, "mtp")
    assert [one.name for one in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_beginning_that_failed_is_made_again(target: Checkpoint, samples: SampleSet, tmp_path: Path) -> None:
    trained(target, samples, tmp_path / "eagle", "eagle3")
    with pytest.raises(CheckpointError):
        trained(target, samples, tmp_path / "head", "mtp", source=tmp_path / "eagle")
    assert trained(target, samples, tmp_path / "head", "mtp")


def opened(directory: Path, target: Checkpoint, samples: SampleSet, method: str) -> ChainTraining:
    ids = drafted_ids(count(samples, range(12)), SHAPE.vocab_size) if method == "mtp" else None
    return ChainTraining(directory, target, samples.about, LOSSES[method], CPU, ids)


@each_method
@pytest.mark.parametrize("top", [0, 4])
def test_a_head_learns_what_follows(target: Checkpoint, tmp_path: Path, method: str, top: int) -> None:
    samples = make_samples(tmp_path / "samples", target, 40, top=top)
    log = trained(target, samples, tmp_path / "head", method, schedule=replace(SHORT, epochs=12, tokens=200))
    assert log[0].step == 0, "the untrained head is measured first"
    assert log[-1].mean_length > log[0].mean_length + 1.2
    assert log[-1].accepted[0] > log[0].accepted[0] + 0.3
    assert read_log(tmp_path / "head") == log
    assert log[-1].loss is not None


@each_method
def test_a_resumed_run_ends_with_the_same_numbers(target: Checkpoint, samples: SampleSet, tmp_path: Path, method: str) -> None:
    whole = trained(target, samples, tmp_path / "whole", method)

    def stop(what: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    job = TrainingJob(LOSSES[method], SHAPE, SHORT, device="cpu", dtype="f32", threads=1)
    out = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        train_head(target, samples, out, job, stop, nothing)
    with pytest.raises(CheckpointError, match="other settings"):
        train_head(target, samples, out, job._replace(schedule=replace(SHORT, rate=1e-3)), nothing, nothing)
    parts = train_head(target, samples, out, job, nothing, nothing)
    assert [line._replace(seconds=0.0) for line in parts] == [line._replace(seconds=0.0) for line in whole]
    one, other = (
        torch.load(tmp_path / name / "training" / "state.pt", weights_only=True)["trained"] for name in ("whole", "parts")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


@each_method
def test_a_served_head_computes_the_rows_that_it_was_trained_with(
    target: Checkpoint, samples: SampleSet, tmp_path: Path, method: str
) -> None:
    trained(target, samples, tmp_path / "head", method)
    training, sample = opened(tmp_path / "head", target, samples, method), samples[14]
    head, at = read_head(tmp_path / "head", target), 9
    backend = make_backend("numpy", head.model, SETTINGS)
    tokens = sample.token_ids.astype(int).tolist()
    layers = ["final"] if method == "mtp" else head.layers
    features = sample.hidden[:, [samples.about.layers.index(layer) for layer in layers]].reshape(len(tokens), -1)
    encoded = features if method == "mtp" else backend.project(features, "encode")
    check_chain(training, head, sample, encoded, at)


def check_chain(training: ChainTraining, head: Head, sample: Sample, given: np.ndarray, at: int) -> None:
    """The head, served, has the logits of training in a chain behind row `at`, of the tokens that came. given: hidden states."""
    chains, tokens, last = training.chains([sample]), sample.token_ids.astype(int).tolist(), head.model.config.num_layers - 1
    assert chains
    backend = make_backend("numpy", head.model, SETTINGS)
    cache = backend.new_cache(1, 64)
    first = ForwardBatch(tokens[1 : at + 2], list(range(at + 1)), [0], [0, at + 1], None, None, (last,), given[: at + 1])
    output, drafted = backend.forward(first, cache), training.weights.drafted(np.arange(head.model.config.vocab_size)) >= 0
    wanted, state = output.logits[-1], output.hidden[0][-1:]
    for step in range(3):
        got = chains.logits[step][at + step].detach().numpy()
        wanted = wanted[drafted] if head.token_ids is None else wanted
        assert np.abs(got - wanted).max() < 1e-4 * np.abs(wanted).max()
        state = head.state_norm.applied(state) if head.state_norm else state
        row = at + step + 1
        output = backend.forward(ForwardBatch([tokens[row + 1]], [row], [0], [0, 1], None, None, (last,), state), cache)
        wanted, state = output.logits[-1], output.hidden[0]


@pytest.mark.parametrize("family", ["qwen35", "lfm2", "gemma3", "qwen2"])
def test_a_layer_for_prediction_is_of_its_targets_family_and_drafts_from_a_file_beside_it(tmp_path: Path, family: str) -> None:
    path = make_tiny_gguf(tmp_path / "model.gguf", family, weight_format="f32", context_length=128, **SMALL)
    target = open_checkpoint(path)
    samples = make_samples(tmp_path / "samples", target, 15, top=4)
    trained(target, samples, tmp_path / "head", "mtp")
    head, training = read_head(tmp_path / "head", target), opened(tmp_path / "head", target, samples, "mtp")
    check_chain(training, head, samples[14], samples[14].hidden[:, -1], 9)
    for tokenizer in (True, False):
        write_head(tmp_path / "mtp-model.gguf", head, target, get_format("f32"), tokenizer)
        beside = own_mtp(open_checkpoint(path))
        assert beside.model.config == head.model.config
        assert beside.model.tensors.keys() == head.model.tensors.keys()
        for name, tensor in head.model.tensors.items():
            assert np.array_equal(beside.model.tensors[name].dequantize(), tensor.dequantize()), name
    check_drafts(open_checkpoint(path), "mtp@3")


def check_drafts(target: Checkpoint, spec: str) -> None:
    prompts, params = [text(np.random.default_rng(3), 12).tolist()], SamplingParams(max_tokens=24, ignore_eos=True)
    check_ways(target, [(spec, {})], prompts, [params], SETTINGS)


@pytest.mark.parametrize(("family", "told"), [("gemma2", "attention_softcap"), ("mixtral", "router"), ("cohere2", "no heads")])
def test_a_target_whose_last_layer_is_not_trained_gets_no_layer_for_prediction(tmp_path: Path, family: str, told: str) -> None:
    target = open_checkpoint(make_tiny_gguf(tmp_path / "model.gguf", family, weight_format="f32", context_length=128, **SMALL))
    samples = make_samples(tmp_path / "samples", target, 4)
    with pytest.raises(ConfigError, match=told):
        trained(target, samples, tmp_path / "head", "mtp")


@each_method
def test_a_chain_sees_no_later_feature(target: Checkpoint, samples: SampleSet, tmp_path: Path, method: str) -> None:
    trained(target, samples, tmp_path / "head", method)
    training = opened(tmp_path / "head", target, samples, method)
    sample, at = samples[14], 9
    hidden = sample.hidden.copy()
    hidden[at + 1 :] += 1
    one, other = training.chains([sample]), training.chains([replace(sample, hidden=hidden)])
    assert one
    assert other
    for step in range(3):  # row at + step of step `step` belongs to the chain behind row `at`
        assert torch.allclose(one.logits[step][at + step], other.logits[step][at + step], atol=1e-4)
        assert not torch.allclose(one.logits[step][at + step + 1], other.logits[step][at + step + 1], atol=1e-2)


@each_method
def test_answers_with_a_trained_head_are_those_without(target: Checkpoint, samples: SampleSet, tmp_path: Path, method: str) -> None:
    trained(target, samples, tmp_path / "head", method, dtype="bf16")
    found = find_reader(tmp_path / "head")
    assert found
    assert found[0].name == {"eagle3": "EAGLE-3", "mtp": "multi-token prediction"}[method]
    check_drafts(target, str(tmp_path / "head"))


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.8])
def test_chances_are_made_to_say_what_is_accepted(factor: float) -> None:
    """Tokens that come as a softmax says, and a drafter whose logits are `factor` times those of it."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(3 * rng.standard_normal((20_000, 8)).astype(np.float32))
    came = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(0))[:, 0]
    right, known = (logits.argmax(-1) == came).numpy()[:, None], np.ones((len(logits), 1), bool)
    found = Acceptance.of(right, known, chances(factor * logits)[..., None])
    assert abs(found.sharpness * factor - 1) < 0.1
    assert abs(found.said_by_position[0] - found.by_position[0]) < 0.01
    as_it_is = float((factor * logits).softmax(-1).amax(-1).mean())
    assert (abs(as_it_is - found.by_position[0]) > 0.05) == (factor != 1), "what is off is told as such before"


def test_the_tokens_that_answers_use_are_drafted(samples: SampleSet) -> None:
    counts = count(samples, range(len(samples)))
    assert counts.sum() == samples.num_answer_tokens
    ids = drafted_ids(counts, 64)
    assert ids is not None
    assert len(ids) == 64
    assert set(range(FIRST, FIRST + WORDS)) <= set(ids.tolist())
    assert drafted_ids(counts, 320) is None


def test_samples_are_held_back_and_every_epoch_sees_the_others_once(samples: SampleSet) -> None:
    kept, held = train_and_held_back(samples, SHORT)
    assert (kept, held) == (list(range(12)), [12, 13, 14])
    steps = step_samples(samples, kept, replace(SHORT, epochs=2))
    flat = [i for step in steps for i in step]
    assert sorted(flat[:12]) == sorted(flat[12:]) == kept
    assert flat[:12] != flat[12:]
    assert all(sum(samples.lengths[i] for i in step) <= 100 for step in steps)


@pytest.mark.parametrize(
    ("method", "shape", "told"),
    [
        ("eagle3", {"layers": (0, 1, 3)}, "the samples have"),
        ("eagle3", {"intermediate_size": 97}, "at most 96"),
        ("eagle3", {"layers": (1, 2)}, "three layers"),
        ("mtp", {"intermediate_size": 32}, "its target's shape"),
    ],
)
def test_a_shape_that_cannot_be_trained_is_refused(
    target: Checkpoint, samples: SampleSet, tmp_path: Path, method: str, shape: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        trained(target, samples, tmp_path / "head", method, shape=replace(SHAPE, **shape))


def test_samples_of_another_target_are_refused(
    samples: SampleSet, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tiny(tmp_path_factory, weight_format="f32", **{**SMALL, "vocab_size": 384})
    with pytest.raises(CheckpointError, match=r"vocabulary of the samples is 320, and that of .* is 384"):
        trained(other, samples, tmp_path / "head", "eagle3")


@pytest.mark.parametrize("shape", [{"copied": False}, {"intermediate_size": 40}, {"vocab_size": 320}])
def test_heads_of_other_shapes_train_too(target: Checkpoint, samples: SampleSet, tmp_path: Path, shape: dict[str, object]) -> None:
    log = trained(target, samples, tmp_path / "head", "eagle3", shape=replace(SHAPE, **shape))
    assert log[-1].loss is not None
    assert np.isfinite(log[-1].loss)
    head = read_head(tmp_path / "head", target)
    assert (head.token_ids is None) == ("vocab_size" in shape)
    again = trained(target, samples, tmp_path / "again", "eagle3", source=tmp_path / "head")
    assert again[0].mean_length == max(line.mean_length for line in log), "training goes on from the head"


def test_a_head_goes_on_with_other_tokens_to_draft(target: Checkpoint, samples: SampleSet, tmp_path: Path) -> None:
    trained(target, samples, tmp_path / "head", "eagle3")
    before = read_head(tmp_path / "head", target)
    assert before.token_ids is not None
    for size in (len(before.token_ids) // 2, target.config.vocab_size):
        out = tmp_path / str(size)
        trained(target, samples, out, "eagle3", source=tmp_path / "head", source_vocab_size=size)
        after = read_head(out / "training" / "start", target)
        assert after.token_ids is not None
        assert len(after.token_ids) == size != len(before.token_ids)
        wanted = target.tensors["embed" if target.config.tied_embeddings else "output"].rows(after.token_ids)
        assert np.array_equal(after.model.tensors["output"].dequantize(), wanted), "the target's own rows"
        assert np.array_equal(after.model.tensors["layers.0.q"].dequantize(), before.model.tensors["layers.0.q"].dequantize())


def test_a_head_of_another_kind_is_not_gone_on_with(target: Checkpoint, samples: SampleSet, tmp_path: Path) -> None:
    path = make_block_head(tmp_path / "block", target.config).path
    with pytest.raises(ConfigError, match="drafts by block, which is not trained here"):
        trained(target, samples, tmp_path / "head", "eagle3", source=path)


def test_a_copied_layer_sees_the_keys_that_the_target_has(target: Checkpoint, samples: SampleSet, tmp_path: Path) -> None:
    trained(target, samples, tmp_path / "head", "eagle3", schedule=replace(SHORT, minutes=1e-9))
    start = read_head(tmp_path / "head" / "training" / "start", target).model
    rng = np.random.default_rng(0)
    features = rng.standard_normal((5, len(LAYERS) * target.config.hidden_size)).astype(np.float32)
    backend = make_backend("numpy", start, SETTINGS)
    assert np.allclose(backend.project(features, "encode"), features[:, 2 * target.config.hidden_size :], atol=1e-5)
    assert np.allclose(start.tensors["layers.0.k"].dequantize()[:, 64:], target.tensors["layers.3.k"].dequantize())


def test_a_damaged_log_is_told(target: Checkpoint, samples: SampleSet, tmp_path: Path) -> None:
    trained(target, samples, tmp_path / "head", "mtp")
    (tmp_path / "head" / "training" / "log.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(CheckpointError, match="damaged"):
        read_log(tmp_path / "head")
