"""Files that we keep, damaged in each way that a file may be: what can be made again is, and all else is refused by its name.

What each kind says of its own fields is tested beside its code.
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from cpuspec.backends import make_backend, packed
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.errors import CpuspecError
from cpuspec.evaluate.logits_file import LogitsFile, writing
from cpuspec.evaluate.parity import ModelIdentity, Question, open_side, record
from cpuspec.evaluate.parity_file import read_recording, write_recording
from cpuspec.kernels.machine_code import address, function, kernel_directory
from cpuspec.model.batch import ForwardBatch
from cpuspec.settings import EngineConfig
from cpuspec.train.answers import AnswerPlan, header_path, make_answers, read_header
from cpuspec.train.chains import ChainLoss
from cpuspec.train.job import TrainingJob, train_head
from cpuspec.train.loop import Schedule
from cpuspec.train.samples import METADATA, open_samples, shard_path
from cpuspec.train.start import HeadShape
from tests.checkpoints.conftest import TINIEST
from tests.model_files import write_anew
from tests.speculation.test_prefixes import A, Requests, keeping, restore_prefix, save_prefix, spill, toy
from tests.train.models import loaded, tiny
from tests.train.toy import SMALL, make_samples
from tools.make_tiny_model import make_tiny_gguf

Made = tuple[Path, Callable[[], object]]  # a file, and what uses it


@pytest.fixture(autouse=True)
def _cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPUSPEC_PACKED_GB", raising=False)
    monkeypatch.setattr(packed, "_SMALLEST_BYTES", 0)


def packed_weights(directory: Path) -> Made:
    model = open_checkpoint(make_tiny_gguf(directory / "tiny.gguf", vocab_size=260, **TINIEST))

    def logits() -> bytes:
        backend = make_backend("numba", model, EngineConfig(threads=1))
        output = backend.forward(ForwardBatch([5, 6, 7], [0, 1, 2], [0], [0, 3]), backend.new_cache(1, 8))
        backend.close()
        return output.logits.tobytes()

    logits()
    [(path, _)] = packed.packed_files()
    return path, logits


def seven_times(number):  # type: ignore[no-untyped-def]
    return 7 * number


def machine_code(directory: Path) -> Made:
    os.environ["CPUSPEC_CACHE"] = str(directory / "kernels of its own")  # which the fixture puts back

    def value() -> int:
        return int(function(address("seven_times", 1, lambda: seven_times, returns=True), 1, returns=True)(6))

    value()
    return kernel_directory() / "seven_times.o", value


def prefix_block(directory: Path) -> Made:
    def rows() -> None:
        """All are compared with the model's own."""
        context = keeping(toy(), 100, directory=directory / "blocks")
        Requests(context).run(*A, 5)
        spill(context)

    rows()
    return max((directory / "blocks").iterdir()), rows


AGAIN: dict[str, Callable[[Path], Made]] = {  # which are made again
    "packed weights": packed_weights,
    "machine code": machine_code,
    "a block of a prefix": prefix_block,
}


def saved_prefix(directory: Path) -> Made:
    context = keeping(toy(), 100)
    Requests(context).run(*A)
    path = directory / "saved"
    save_prefix(context, A, path)
    return path, lambda: restore_prefix(keeping(toy(), 100), path)


def copied(name: str, write: Callable[[Path], object], use: Callable[[Path], object]) -> Callable[[Path], Made]:
    """A file that is made once for all tests."""

    @cache
    def files() -> dict[str, bytes]:
        with TemporaryDirectory() as made:
            write(Path(made))
            every = [path for path in Path(made).rglob("*") if path.is_file()]
            return {str(path.relative_to(made)): path.read_bytes() for path in every}

    def make(directory: Path) -> Made:
        for one, content in files().items():
            (directory / one).parent.mkdir(parents=True, exist_ok=True)
            (directory / one).write_bytes(content)
        return directory / name, lambda: use(directory)

    return make


def write_run(directory: Path) -> None:
    model, question = tiny(directory, num_layers=1), Question([5, 9, 7], 2)
    with open_side("numpy", model, [question], None, EngineConfig(threads=1)) as side:
        run = record(side, ModelIdentity.from_checkpoint(model), [question], top=4, whole_rows=1)
    write_recording(run, directory / "run.safetensors")


def write_logits(directory: Path) -> None:
    with writing(directory / "their.kld", [[5, 9, 7, 5, 9, 8, 5, 9]], 50) as writer:
        writer.write(np.random.default_rng(6).standard_normal((3, 50), np.float32))


def write_answers(directory: Path) -> None:
    (directory / "prompts.jsonl").write_text('{"text": "the first of the things"}\n')
    plan = AnswerPlan((directory / "prompts.jsonl",), max_answer_tokens=4)
    with loaded(tiny(directory)) as llm:
        make_answers(llm, [{"name": "tiny.gguf", "bytes": 1, "sha256": "0"}], plan, directory / "answers.jsonl")


def target_of_heads(directory: Path) -> Checkpoint:
    return open_checkpoint(make_tiny_gguf(directory / "target.gguf", **SMALL))


def train(directory: Path) -> dict[str, bytes]:
    """The head's files."""
    target, schedule = target_of_heads(directory), Schedule(1, tokens=64, longest=64)
    job = TrainingJob(ChainLoss(steps=1), HeadShape(vocab_size=32), schedule, None, threads=1)
    train_head(target, open_samples(directory / "samples"), directory / "head", job, lambda *_: None, lambda *_: None)
    return {path.name: path.read_bytes() for path in (directory / "head").iterdir() if path.is_file()}


def write_training(directory: Path) -> None:
    make_samples(directory / "samples", target_of_heads(directory), 4)
    train(directory)


REFUSED: dict[str, Callable[[Path], Made]] = {
    "a saved prefix": saved_prefix,
    "a run of parity": copied("run.safetensors", write_run, lambda path: read_recording(path / "run.safetensors")),
    "logits": copied("their.kld", write_logits, lambda path: LogitsFile(path / "their.kld").log_probs(0, 0, 3)),
    "facts of answers": copied(
        header_path(Path("answers.jsonl")).name, write_answers, lambda path: read_header(path / "answers.jsonl")
    ),
    "samples": copied(
        f"samples/{shard_path(Path(), 0).name}",
        lambda path: make_samples(path / "samples", target_of_heads(path), 2),
        lambda path: list(open_samples(path / "samples")),
    ),
    "facts of samples": copied(
        f"samples/{METADATA}",
        lambda path: make_samples(path / "samples", target_of_heads(path), 2),
        lambda path: list(open_samples(path / "samples")),
    ),
    "a state of training": copied("head/training/state.pt", write_training, train),
}


def change(edit: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: write_anew(path, edit(path.read_bytes()))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": change(lambda content: b""),
    "nonsense": change(lambda content: b"nonsense" * 99),
    "a byte": change(lambda content: content[:1]),
    "half": change(lambda content: content[: len(content) // 2]),
    "cut by three bytes": change(lambda content: content[:-3]),
    "longer": change(lambda content: content + bytes(9)),
    "another beginning": change(lambda content: bytes([content[0] ^ 1]) + content[1:]),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a dangling link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "a huge file": lambda path: os.truncate(path, 1 << 40),
}
# An archive ends before what follows it, and training without a state begins anew.
HARMLESS = {("a state of training", "longer"), ("a state of training", "a dangling link")}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", AGAIN)
def test_what_can_be_made_again_is(tmp_path: Path, kind: str, damage: str) -> None:
    path, use = AGAIN[kind](tmp_path)
    wanted, size = use(), path.stat().st_size
    DAMAGE[damage](path)
    before = path.lstat()
    for _ in range(2):
        assert use() == wanted
    if damage != "a directory":
        assert (path.stat().st_ino, path.stat().st_mtime_ns) != (before.st_ino, before.st_mtime_ns), "it was not believed"
        assert path.stat().st_size == pytest.approx(size, abs=9), "names of compiled functions have numbers"


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_made_again_is_refused_by_its_name(tmp_path: Path, kind: str, damage: str) -> None:
    path, use = REFUSED[kind](tmp_path)
    wanted = use()
    DAMAGE[damage](path)
    if (kind, damage) in HARMLESS:
        assert use() == wanted
        return
    with pytest.raises(CpuspecError) as raised:
        use()
    assert path.name in str(raised.value)
    assert len(str(raised.value)) < 800
