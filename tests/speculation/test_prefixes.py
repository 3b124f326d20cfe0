"""Prefixes of finished sequences: used wherever they are, exact, within their bounds, and refused where a file lies."""

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuspec.errors import CacheError, ConfigError
from cpuspec.sequence import Sequence
from cpuspec.settings import SamplingParams
from cpuspec.speculation import slots as slots_module
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.prefix_files import PrefixDirectory, PrefixFiles
from cpuspec.speculation.prefix_queue import PrefixQueue
from tests.processes import make_pipe
from tests.toys import RecurrentBackend, ToyBackend

BLOCK = 4
NO_DRAFT = Draft.chain([], "test")


def toy(seed: int = 1, max_rows: int = 64) -> ToyBackend:
    return ToyBackend(seed, memory=2.0, max_rows=max_rows, block_size=BLOCK)


def recurrent(seed: int = 1, max_rows: int = 64) -> RecurrentBackend:
    return RecurrentBackend(seed, lambda start, end: range(max(start - 1, 0), end + 1), max_rows=max_rows, block_size=BLOCK)


MODELS: dict[str, Callable[..., ToyBackend | RecurrentBackend]] = {"keys and values": toy, "states, too": recurrent}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def small(model: ToyBackend | RecurrentBackend, num_slots: int = 2) -> Context:
    """A context to which two tokens are worth a copy."""
    context = Context(model, num_slots, 64)
    context.slots.min_copied = 2
    return context


def keeping(
    model: ToyBackend | RecurrentBackend,
    num_tokens: int,
    num_slots: int = 2,
    directory: Path | None = None,
    disk_bytes: int = 10**6,
) -> Context:
    context = small(model, num_slots)
    queue = PrefixQueue(PrefixDirectory(directory, disk_bytes)) if directory else None
    context.slots.keep(num_tokens * model.bytes_per_token, queue)
    return context


def save_prefix(context: Context, tokens: list[int], path: Path, salt: str = "") -> int:
    return context.slots.prefix_writer(tokens, path, salt)()


def restore_prefix(context: Context, path: Path, salt: str = "") -> int:
    return context.slots.insert_prefix(context.slots.read_prefix(path), salt)


def written(context: Context) -> Context:
    """The context, when everything that it wants to be written is on the disk."""
    if context.slots.store and context.slots.store.queue:
        assert context.slots.store.queue.flush()
    return context


def spill(context: Context) -> None:
    context.slots.spill()
    written(context)


class Requests:
    """Runs one sequence after the other, checks its rows, and says how many of its tokens were computed."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.num_parts = 0  # that were copied, and more was left
        self._model = context.backend
        self._number = 0

    def begin(self, tokens: list[int], salt: str = "") -> Sequence:
        self._number += 1
        seq = Sequence.new(self._number, tokens, SamplingParams(cache_salt=salt))
        while self.context.slots.poll(seq):
            self.context.slots.wait(1.0)
        while self.context.slots.moves(seq):
            self.num_parts += 1
        self.context.slots.acquire(seq)
        return seq

    def score(self, seq: Sequence) -> int:
        before = self._model.num_rows  # type: ignore[attr-defined]
        (output,) = self.context.score([seq], [NO_DRAFT])
        computed: int = self._model.num_rows - before  # type: ignore[attr-defined]
        np.testing.assert_array_equal(output.logits[0], self._model.row(seq.tokens))  # type: ignore[attr-defined]
        return computed

    def run(self, *tokens: int, salt: str = "") -> int:
        seq = self.begin(list(tokens), salt)
        computed = self.score(seq)
        self.context.slots.release(seq)
        return computed


def counting(first: int, length: int) -> list[int]:
    return [(first + i) % 8 for i in range(length)]


A, B, C = counting(0, 20), counting(3, 20), counting(5, 20)


def test_what_a_slot_is_taken_from_is_still_there_later() -> None:
    requests = Requests(keeping(toy(), 200, num_slots=1))
    for tokens in (A, B, C):
        assert requests.run(*tokens[:19]) == 19
    for tokens in (A, B, C):
        assert requests.run(*tokens, 7) == 1 + (len(tokens) - 19)
    assert requests.run(*A[:13], 1, 1) == 2  # within a block


@pytest.mark.parametrize("num_slots", [1, 3], ids=["in the store", "in slots"])
def test_prefixes_are_used_within_their_salt_alone(tmp_path: Path, num_slots: int) -> None:
    context = keeping(toy(), 1000, num_slots, tmp_path)
    requests, salts = Requests(context), ("", "mine", "yours")
    assert [requests.run(*A, salt=salt) for salt in salts] == [20] * 3
    assert [requests.run(*A, 1, salt=salt) <= 1 for salt in salts] == [True] * 3
    running = requests.begin([*B], "mine")
    requests.score(running)
    if num_slots > 1:
        other = requests.begin([*B, 1], "yours")
        assert (requests.score(other), context.slots.awaits(running)) == (21, False)
        context.slots.release(other)
    context.slots.release(running)
    with pytest.raises(CacheError, match="no prefix of this prompt"):
        save_prefix(context, C, tmp_path / "c", "mine")
    assert requests.run(*C, salt="mine") == 20
    with pytest.raises(CacheError, match="no prefix of this prompt"):
        save_prefix(context, C, tmp_path / "c", "yours")
    assert save_prefix(context, C, tmp_path / "c", "mine") == 20
    spill(context)
    again = keeping(toy(), 1000, num_slots, tmp_path)
    requests = Requests(again)
    assert requests.run(*C, salt="yours") == 20
    assert requests.run(*C, 1, salt="mine") == 1
    again.slots.forget()
    written(again)
    assert restore_prefix(again, tmp_path / "c", "yours") == 20
    assert [requests.run(*C, 1, salt=salt) for salt in ("mine", "yours")] == [21, 1]
    assert not list(tmp_path.glob("*.prefix"))


def test_what_begins_alike_is_kept_once() -> None:
    context = keeping(toy(), 1000, num_slots=1)
    requests = Requests(context)
    for last in range(6):
        requests.run(*A, last, last, last, last)
    context.slots.move_to_store(0)
    assert context.slots.kept_bytes == (20 + 6 * 4) * 16


def test_the_longest_unused_leaves_first_and_the_bound_holds() -> None:
    context = keeping(toy(), 48, num_slots=2)
    requests = Requests(context)
    for tokens in (A, B, A, C):
        requests.run(*tokens)
        assert context.slots.kept_bytes <= 48 * 16
    assert requests.run(*A) == 1
    assert requests.run(*C) == 1
    assert requests.run(*B) > 1
    assert context.slots.stats("").num_evictions


def test_nothing_is_kept_where_the_bound_is_zero() -> None:
    context = keeping(toy(), 0)
    requests = Requests(context)
    assert [requests.run(*A), requests.run(*A), context.slots.kept_bytes] == [20, 20, 0]
    first = requests.begin(A)
    assert requests.score(first) == 20
    assert requests.score(requests.begin([*A, 1])) == 1  # running ones share


@pytest.mark.parametrize("max_bytes", [0, 10**6])
def test_a_backend_without_row_invariance_shares_only_where_that_was_asked_for(max_bytes: int) -> None:
    model = toy()
    model.row_invariant = False
    context = small(model)
    context.slots.keep(max_bytes)
    requests = Requests(context)
    running = requests.begin(A)
    assert context.slots.awaits(Sequence.new(99, A, SamplingParams())) == (max_bytes > 0)
    assert requests.score(running) == 20
    shared = 20 if max_bytes else 0
    assert requests.run(*A, 1) == 21 - shared
    assert requests.run(*A, 1, 2) == 22 - shared - (shared > 0)


def test_a_prefix_that_is_in_the_store_is_not_waited_for() -> None:
    context = keeping(toy(), 100, num_slots=3)
    context.slots.min_copied = 4
    requests = Requests(context)
    requests.run(*A)
    context.slots.move_to_store(0)
    requests.begin(A)
    assert not context.slots.awaits(Sequence.new(99, A, SamplingParams()))
    requests.begin(B)
    assert context.slots.awaits(Sequence.new(99, B, SamplingParams()))


def test_a_cache_without_blocks_keeps_slots_within_the_bound() -> None:
    model = RecurrentBackend(3, lambda start, end: (start, end), max_rows=64)
    context = small(model)
    context.slots.keep(30 * context.cache.bytes_per_token)
    for number, tokens in enumerate((A, B)):
        seq = Sequence.new(number, tokens, SamplingParams())
        context.slots.acquire(seq)
        context.score([seq], [NO_DRAFT])
        context.slots.release(seq)
        assert context.slots.kept_bytes <= 30 * context.cache.bytes_per_token
    with pytest.raises(CacheError, match="the recurrent backend keeps no keys and values outside of running requests"):
        save_prefix(context, A, Path("nowhere"))


@pytest.mark.parametrize("limit", [0, 10, 30, 100])
@pytest.mark.parametrize("disk_bytes", [0, 2500, 10**6])
@every_model
def test_rows_are_those_of_a_run_from_scratch_whatever_is_kept_where(
    tmp_path: Path, limit: int, disk_bytes: int, model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that begin alike, several at once, under tiny bounds; evictions, saved files, and starts over one directory.

    Prefixes are copied at once or block by block, and some copies are left in the middle.
    """
    rng = np.random.default_rng(limit + disk_bytes)
    backend, directory, saved = model(max_rows=7), tmp_path / "blocks" if disk_bytes else None, tmp_path / "saved"

    def start() -> Requests:
        monkeypatch.setattr(slots_module, "_COPIED_BYTES", int(rng.choice([0, 10**6])))
        return Requests(keeping(backend, limit, int(rng.integers(1, 4)), directory, disk_bytes))

    def new_prompt() -> list[int]:
        return [*A[: rng.choice([3, 8, 13])], *B[: rng.integers(0, 9)], *rng.integers(0, 3, rng.integers(1, 6)).tolist()]

    requests, alive = start(), list[Sequence]()
    for action in rng.choice(
        ["arrive", "step", "depart", "restart", "save", "restore", "forget", "move"],
        220,
        p=[0.35, 0.2, 0.25, 0.06, 0.04, 0.04, 0.01, 0.05],
    ):
        context, prompt = requests.context, new_prompt()
        if action == "arrive" and context.slots.free:
            alive.append(requests.begin(prompt))
            requests.score(alive[-1])
        elif action == "step":
            for seq in alive:
                seq.extend([int(rng.integers(0, 8))])
                requests.score(seq)
        elif action == "depart" and alive:
            context.slots.release(alive.pop(rng.integers(len(alive))))
        elif action == "restart":
            while alive:
                context.slots.release(alive.pop())
            spill(context)
            requests = start()
        elif action == "forget":
            context.slots.forget()
        elif action == "move":
            context.slots.moves(Sequence.new(1000, prompt, SamplingParams()))
        elif action in ("save", "restore") and context.slots.store:
            with suppress(CacheError):  # nothing is there
                assert (save_prefix(context, prompt, saved) if action == "save" else restore_prefix(context, saved)) > 0
        assert requests.context.slots.kept_bytes <= limit * backend.bytes_per_token
        written(requests.context)
        assert sum(file.stat().st_size for file in directory.iterdir()) <= disk_bytes if directory else True


# -------------------------------------------------------------------------------------------------------------------- on the disk


def test_a_start_finds_what_the_last_one_left(tmp_path: Path) -> None:
    context = keeping(toy(), 30, directory=tmp_path)
    requests = Requests(context)
    for tokens in (A, B, C):
        requests.run(*tokens[:19])
    spill(context)
    again = Requests(keeping(toy(), 30, directory=tmp_path))
    assert [again.run(*tokens, 7) for tokens in (C, A, B)] == [2, 2, 2]  # of 21, without the 19
    assert Requests(keeping(toy(2), 30, directory=tmp_path)).run(*A, 7) == 21  # another model
    stats = again.context.slots.stats("target")
    assert (stats.num_blocks_read, stats.num_prompt_tokens, stats.num_cached_tokens) == (15, 63, 57)


def test_the_directory_keeps_what_was_used_last(tmp_path: Path) -> None:
    requests = Requests(keeping(toy(), 0, directory=tmp_path, disk_bytes=4500))
    for tokens in (A, B, C, A, counting(6, 20)):
        requests.run(*tokens)
    written(requests.context)
    assert 2000 < requests.context.slots.stats("").disk_bytes <= 4500
    assert requests.run(*A, 1) < 21


def test_an_unfinished_file_is_removed_when_its_writer_must_be_gone(tmp_path: Path) -> None:
    abandoned, unfinished = tmp_path / "a.prefix.1-2", tmp_path / "b.prefix.1-3"
    for path in (abandoned, unfinished):
        path.write_bytes(b"half")
    os.utime(abandoned, (0, 0))
    requests = Requests(keeping(toy(), 0, directory=tmp_path))
    requests.run(*A)
    written(requests.context)
    assert (abandoned.exists(), unfinished.exists()) == (False, True)


def test_a_directory_that_cannot_be_made_is_a_clear_error_and_one_that_cannot_be_written_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the prefix cache .*file.* cannot be used"):
        PrefixDirectory(tmp_path / "file" / "below", 100)
    requests = Requests(keeping(toy(), 0, directory=tmp_path / "there"))
    assert (tmp_path / "there").stat().st_mode & 0o077 == 0
    monkeypatch.setattr("cpuspec.files.os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert requests.run(*A) == 20
            written(requests.context)
    assert caplog.text.count("cannot be written") == 1
    assert "cannot be written: No space left on device" in caplog.text


def edited(**changes: object) -> Callable[[bytes], bytes]:
    """What a file becomes when fields of its line are changed."""

    def edit(content: bytes) -> bytes:
        line, _, rest = content.partition(b"\n")
        return json.dumps({**json.loads(line), **changes}).encode() + b"\n" + rest

    return edit


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda content: b"", "is not sound JSON"),
    "no JSON": (lambda content: b"\0" * 5000, "is not sound JSON"),
    "another object": (lambda content: b"{}\n", "holds no keys and values in format 2"),
    "truncated": (lambda content: content[:-1], "bytes of keys and values; wanted"),
    "longer": (lambda content: content + b"x", "bytes of keys and values; wanted"),
    "a changed byte": (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "do not agree with their checksum"),
    "another checksum": (edited(blake2b="00"), "do not agree with their checksum"),
    "another model": (edited(identity="0" * 32), "another model, KV format, processor or version"),
    "another version": (edited(format=1), "holds no keys and values in format 2"),
    "more tokens than bytes": (edited(tokens=[0] * 24), "which 24 tokens do not have"),
    "other tokens": (edited(tokens=[0] * 19), "do not agree with their checksum"),
    "no tokens": (edited(tokens=[]), "has 0 tokens; wanted 1 to 64"),
    "a million tokens": (edited(tokens=[0] * 10**6), "is not sound JSON"),
    "more tokens than the context": (edited(tokens=[0] * 66), "has 66 tokens; wanted 1 to 64"),
    "as many bytes of another number of tokens": (edited(tokens=[0] * 20), "do not agree with their checksum"),
    "blocks that are not there": (edited(blocks=9), "has 9 blocks and 0 bytes of states"),
    "states where there are none": (edited(states=8), "blocks and 8 bytes of states"),
    "other bytes than its blocks": (edited(bytes=7), "bytes of keys and values; wanted"),
    "nothing": (edited(blocks=0), "has 0 blocks and 0 bytes of states"),
    "ids beyond the vocabulary": (edited(tokens=[8] * 19), "no ids in"),
    "huge ids": (edited(tokens=[10**40] * 19), "no ids in|is not sound JSON"),
    "ids that are no numbers": (edited(tokens=[True] * 19), "no ids in"),
    "tokens that are no array": (edited(tokens="0"), "tokens is '0', wanted an array"),
    "bytes below zero": (edited(bytes=-288), "bytes of keys and values; wanted"),
    "a parent that is no key": (edited(parent="xyz"), "cannot be read"),
    "another parent": (edited(parent="00"), "do not agree with their checksum"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
@every_model
def test_a_saved_prefix_that_lies_is_refused(tmp_path: Path, damage: str, model: Callable[..., Any]) -> None:
    context = keeping(model(), 100)
    Requests(context).run(*A[:19])
    assert save_prefix(context, [*A, 5], tmp_path / "saved") == 19
    change, message = DAMAGES[damage]
    (tmp_path / "saved").write_bytes(change((tmp_path / "saved").read_bytes()))
    fresh = keeping(model(), 100)
    with pytest.raises(CacheError, match=message if model is toy else None):
        restore_prefix(fresh, tmp_path / "saved")
    assert Requests(fresh).run(*A, 5) == 21


@pytest.mark.parametrize("damage", DAMAGES)
@every_model
def test_a_block_on_the_disk_that_lies_is_computed_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture, model: Callable[..., Any]
) -> None:
    context = keeping(model(), 100, directory=tmp_path)
    Requests(context).run(*A[:19])
    spill(context)
    change, _ = DAMAGES[damage]
    known = keeping(model(), 100, directory=tmp_path)  # knows the files from before they were damaged
    for path in tmp_path.iterdir():
        path.write_bytes(change(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert Requests(known).run(*A, 5) == 21
    assert "it is removed, and its tokens are computed again" in caplog.text
    assert Requests(keeping(model(), 100, directory=tmp_path)).run(*A, 5) == 21


def test_files_of_a_process_with_other_heads_are_left_alone(tmp_path: Path) -> None:
    context = keeping(recurrent(), 100, directory=tmp_path)
    Requests(context).run(*A)
    spill(context)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    own = PrefixFiles(context.cache, 8)
    others = PrefixFiles(context.cache, 8, hidden_layers=(0,), hidden_size=4)
    found = [PrefixDirectory(tmp_path, 10**6).parts(files) for files in (own, others)]
    assert len(found[1]) < len(found[0])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_saved_prefix_is_restored(tmp_path: Path) -> None:
    context = keeping(toy(), 100)
    requests = Requests(context)
    with pytest.raises(CacheError, match="nothing to save; run the prompt first"):
        save_prefix(context, A, tmp_path / "saved")
    requests.run(*A)
    assert save_prefix(context, [*A[:11], 7, 7, 7], tmp_path / "saved") == 11
    assert (tmp_path / "saved").stat().st_mode & 0o077 == 0
    fresh = keeping(toy(), 100)
    assert restore_prefix(fresh, tmp_path / "saved") == 11
    assert Requests(fresh).run(*A) == 9
    context = keeping(toy(), 0, directory=tmp_path / "blocks")
    Requests(context).run(*A[:8])
    written(context)
    beginning, middle = sorted((tmp_path / "blocks").iterdir(), key=lambda path: b'"parent": ""' not in path.read_bytes())
    assert restore_prefix(fresh, beginning) == 4
    with pytest.raises(CacheError, match="holds the middle of a prefix; wanted a file that save_prefix wrote"):
        restore_prefix(fresh, middle)
    make_pipe(tmp_path / "pipe")
    for name in ("pipe", "gone", "a\0b"):
        with pytest.raises(CacheError, match=r"is not a file|cannot be read"):
            restore_prefix(fresh, tmp_path / name)
