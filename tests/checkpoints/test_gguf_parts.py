from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.gguf_parts import file_identity, part_paths
from cpuspec.errors import CheckpointError
from tests.model_files import copy_gguf

T = gguf.GGUFValueType


@pytest.fixture
def parts(small_gguf: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A model in three parts, written by the gguf package; what is wrong with a part is given as {number: {key: value or None}}."""

    def make(wrong: dict[int, dict[str, object]] | None = None, tensors_of: dict[int, list[str]] | None = None) -> Path:
        names = [tensor.name for tensor in gguf.GGUFReader(small_gguf("qwen2")).tensors]
        third = len(names) // 3
        shares = [names[:third], names[third : 2 * third], names[2 * third :]]
        for number, share in enumerate(shares):
            split = {"split.no": number, "split.count": 3, "split.tensors.count": len(names)} | (wrong or {}).get(number, {})
            kinds = {str: T.STRING, list: T.ARRAY, int: T.INT32}
            copy_gguf(
                small_gguf("qwen2"),
                tmp_path / f"m-0000{number + 1}-of-00003.gguf",
                set={key: (value, kinds[type(value)]) for key, value in split.items() if value is not None},
                drop=None if number else (),
                drop_tensors=[name for name in names if name not in (tensors_of or {}).get(number, share)],
            )
        return tmp_path / "m-00001-of-00003.gguf"

    return make


def test_parts_are_read_as_the_whole_is(parts: Callable[..., Path], small_gguf: Callable[[str], Path]) -> None:
    ours, whole = open_checkpoint(parts()), open_checkpoint(small_gguf("qwen2"))
    assert ours.config == whole.config
    assert ours.vocabulary == whole.vocabulary
    assert ours.tensors.keys() == whole.tensors.keys()
    assert all(np.array_equal(ours.tensors[name].data, tensor.data) for name, tensor in whole.tensors.items())


def test_every_part_belongs_to_a_models_identity(parts: Callable[..., Path]) -> None:
    path = parts()
    assert [file["name"] for file in file_identity(path)] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]


def test_another_part_than_the_first_names_the_first(parts: Callable[..., Path]) -> None:
    path = parts()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf is part 2 of 3; give the first, .*m-00001-of-00003\.gguf"):
        open_checkpoint(path.with_name("m-00002-of-00003.gguf"))


def test_a_missing_part_is_named(parts: Callable[..., Path]) -> None:
    path = parts()
    path.with_name("m-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf, part 2 of 3, is missing"):
        open_checkpoint(path)


def test_a_part_under_another_name_is_refused(parts: Callable[..., Path], tmp_path: Path) -> None:
    renamed = parts().rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="says that it is one of 3 parts, and its name says 1 of 1; give the first part"):
        open_checkpoint(renamed)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({0: {"split.no": 1}}, "m-00001-of-00003.gguf: split.no is 1, wanted 0"),
        ({1: {"split.no": 2}}, "m-00002-of-00003.gguf: split.no is 2, wanted 1"),
        ({2: {"split.count": 4}}, "m-00003-of-00003.gguf: split.count is 4, wanted 3"),
        ({2: {"split.tensors.count": 5}}, "m-00003-of-00003.gguf: split.tensors.count is 5, wanted"),
        ({number: {"split.tensors.count": 99} for number in range(3)}, "its 3 parts have 14 tensors, wanted 99"),
        ({number: {"split.tensors.count": None} for number in range(3)}, "split.tensors.count is missing, wanted an integer"),
        ({0: {"split.count": 2}}, "says that it is one of 2 parts, and its name says 1 of 3"),
        ({0: {"split.count": -1}}, "says that it is one of -1 parts"),
        ({0: {"split.count": "three"}}, "split.count is str, wanted an integer"),
        ({0: {"split.count": [1, 2]}}, "split.count is ndarray, wanted an integer"),
        ({1: {"split.no": [1, 2]}}, "split.no is ndarray, wanted an integer"),
        ({1: {"split.count": None}}, "split.count is missing, wanted an integer"),
    ],
)
def test_parts_that_disagree_are_refused(parts: Callable[..., Path], wrong: dict[int, dict[str, object]], named: str) -> None:
    path = parts(wrong)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert named in str(caught.value)


def test_a_tensor_in_two_parts_is_refused(parts: Callable[..., Path]) -> None:
    path = parts(tensors_of={1: ["token_embd.weight"]})
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf: tensor token_embd\.weight is in an earlier part, too"):
        open_checkpoint(path)


def test_a_model_that_is_called_like_a_part_and_is_none_is_read(small_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    copy = tmp_path / "m-00001-of-00001.gguf"
    copy.write_bytes(small_gguf("qwen2").read_bytes())
    assert open_checkpoint(copy).config == open_checkpoint(small_gguf("qwen2")).config
    assert part_paths(copy) == [copy]
