"""Samples to train a head on, in a directory: `extract.json` and shards of token ids, hidden states and likeliest next tokens.

Shards are `shard-00000.safetensors` and so on, the samples one after the other. `token_ids` and `hidden_states` have the names and
axes of the files of vLLM's `extract_hidden_states` (vllm, example_hidden_states_connector.py). Layers are numbered as `Head.layers`
numbers them: layer i is the output of decoder layer i from 0, which vLLM and speculators call i + 1, the input of the next one.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints.fields import Fields, read_json_object
from cpuspec.checkpoints.safetensors import StoredTensor, read_safetensors, write_arrays
from cpuspec.errors import CheckpointError
from cpuspec.files import write_file
from cpuspec.formats import FORMATS

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

FINAL = "final"  # in `layers`: the hidden state after the model's last norm, which its output matrix multiplies
METADATA = "extract.json"
DTYPES = {"bf16": "BF16", "f32": "F32", "int8": "I8"}  # of hidden states, and safetensors' names of them

_FORMAT, _VERSION = "cpuspec-samples", 1
_MAX_METADATA_BYTES = 1 << 20
MOST = {"vocab_size": 1 << 24, "hidden_size": 1 << 20, "num_layers": 1 << 12, "top": 1 << 12}
_SHARD = re.compile(r"shard-\d{5}\.safetensors")
_NUMPY = {"U8": "u1", "I8": "i1", "BF16": "<u2", "I32": "<i4", "F32": "<f4", "I64": "<i8"}


@dataclass(frozen=True)
class Extraction:
    """What `extract.json` says of samples.

    model: its name. files: name, bytes and sha256 of each file of the target. layers: of the target, from 0, whose outputs the
    samples hold, and FINAL. dtype: of hidden states, one of DTYPES. top: likeliest tokens that are kept of each row, 0 for none.
    """

    model: str
    files: tuple[Mapping[str, Any], ...]
    vocab_size: int
    hidden_size: int
    num_layers: int
    layers: tuple[int | str, ...]
    dtype: str = "bf16"
    top: int = 0

    def write(self, directory: Path) -> None:
        """Write it into a directory. Raises OSError."""
        write_file(directory / METADATA, json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=1) + "\n")

    @staticmethod
    def read(directory: Path) -> "Extraction":
        """That of a directory. Raises CheckpointError for a file that is missing or not sound."""
        path = directory / METADATA
        fields = Fields(str(path), read_json_object(path, _MAX_METADATA_BYTES))
        if fields.value("format") != _FORMAT or fields.value("version") != _VERSION:
            fields.fail("format" if fields.value("format") != _FORMAT else "version", f"{_FORMAT}, version {_VERSION}")
        for name, most in MOST.items():
            if not (0 if name == "top" else 1) <= fields.integer(name) <= most:
                fields.fail(name, f"a number up to {most}")
        num_layers, layers = fields.integer("num_layers"), fields.items("layers")
        found = tuple(one for one in layers if one == FINAL or (type(one) is int and 0 <= one < num_layers))
        if not found or len(set(found)) != len(layers):
            fields.fail("layers", f'different layers below {num_layers}, or "{FINAL}"')
        if fields.text("dtype") not in DTYPES:
            fields.fail("dtype", f"one of {', '.join(DTYPES)}")
        if fields.integer("top") > fields.integer("vocab_size"):
            fields.fail("top", "at most vocab_size")
        files = tuple(one for one in fields.items("files") if isinstance(one, dict) and isinstance(one.get("sha256"), str))
        if not files or len(files) != len(fields.items("files")):
            fields.fail("files", "objects with the sha256 of each file")
        vocab_size, hidden_size, top = (fields.integer(name) for name in ("vocab_size", "hidden_size", "top"))
        return Extraction(fields.text("model"), files, vocab_size, hidden_size, num_layers, found, fields.text("dtype"), top)


@dataclass(frozen=True, eq=False)
class Sample:
    """One text of T tokens.

    token_ids [T]. answer: bool [T], whether the target generated the token; these count for the loss. hidden [T, L, H]: in the
    order of `Extraction.layers`. top_ids, top_logits [T, K]: of the row that follows each token, the likeliest first; log_sum [T]:
    the logarithm of the sum of exp(logit) over the whole vocabulary, so that exp(top_logits - log_sum) are probabilities, all 0
    where neither the token nor the next one counts, though others do. None where `top` is 0.
    """

    token_ids: I32
    answer: NDArray[np.bool_]
    hidden: F32
    top_ids: I32 | None = None
    top_logits: F32 | None = None
    log_sum: F32 | None = None


class SampleSet:
    """The samples of a directory, mapped: a sample is read when it is asked for, `samples[i]`. `about` says what they are of.

    lengths [len(self)]: tokens of each sample.
    """

    def __init__(self, path: Path, about: Extraction, shards: "list[_Shard]") -> None:
        self.path = path
        self.about = about
        self._shards = shards
        self._firsts = np.cumsum([0, *(len(shard.starts) - 1 for shard in shards)]).tolist()
        self.lengths = np.concatenate([np.diff(shard.starts) for shard in shards] or [np.empty(0, np.int64)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> Sample:
        """Raises IndexError, and CheckpointError where a number is not finite or an id is none of the vocabulary's."""
        shard, rows = self._rows(index)
        return shard.sample(rows, self.about)

    def tokens(self, index: int) -> tuple[I32, NDArray[np.bool_]]:
        """`token_ids` and `answer` of a sample, without reading its hidden states."""
        shard, rows = self._rows(index)
        return shard.token_ids[rows], shard.answer[rows]

    @property
    def num_shards(self) -> int:
        """Files that hold them."""
        return len(self._shards)

    @property
    def num_tokens(self) -> int:
        """Of all samples."""
        return int(self.lengths.sum())

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that the target generated."""
        return sum(int(shard.answer.sum()) for shard in self._shards)

    def _rows(self, index: int) -> "tuple[_Shard, slice]":
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} samples, from 0; got {index}")
        number = bisect_right(self._firsts, index) - 1
        starts = self._shards[number].starts
        at = index - self._firsts[number]
        return self._shards[number], slice(int(starts[at]), int(starts[at + 1]))


@dataclass(frozen=True, eq=False)
class _Shard:
    path: Path
    token_ids: I32
    answer: NDArray[np.bool_]
    starts: NDArray[np.int64]
    arrays: Mapping[str, NDArray[Any]]  # views of the mapped file

    def sample(self, rows: slice, about: Extraction) -> Sample:
        hidden = _numbers(self.arrays["hidden_states"][rows], self.arrays.get("hidden_scales", np.empty(0))[rows], about.dtype)
        top_ids, top_logits, log_sum = (np.array(self.arrays[name][rows]) if about.top else None for name in _TOP)
        for name, numbers in (("hidden_states", hidden), ("top_logits", top_logits), ("log_sum", log_sum)):
            if numbers is not None and not np.isfinite(numbers).all():
                raise CheckpointError(f"{self.path}: {name} has numbers that are not finite; the file is damaged")
        if top_ids is not None and not 0 <= top_ids.min() <= top_ids.max() < about.vocab_size:
            raise CheckpointError(f"{self.path}: top_ids has ids that are none of the {about.vocab_size} of the vocabulary")
        return Sample(self.token_ids[rows], self.answer[rows], hidden, top_ids, top_logits, log_sum)


_TOP = ("top_ids", "top_logits", "log_sum")


def open_samples(directory: str | Path) -> SampleSet:
    """The samples of a directory that `cpuspec extract` wrote, or is writing.

    Raises CheckpointError, naming file and field, for metadata or a shard that is missing, damaged, or of another shape.
    """
    path = Path(directory)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; wanted one that `cpuspec extract` wrote")
    about = Extraction.read(path)
    return SampleSet(path, about, [_open_shard(shard, about) for shard in shard_paths(path)])


def shard_paths(directory: Path) -> list[Path]:
    """The shards of a directory in order. Raises CheckpointError if one is missing between them."""
    found = sorted(path for path in directory.iterdir() if _SHARD.fullmatch(path.name))
    for number, path in enumerate(found):
        if path != (wanted := shard_path(directory, number)):
            raise CheckpointError(f"{wanted} is missing, and {path.name} is there; extract the samples again")
    return found


def shard_path(directory: Path, number: int) -> Path:
    """The file of the shard of that number, from 0."""
    return directory / f"shard-{number:05}.safetensors"


def write_shard(path: Path, about: Extraction, samples: Sequence[Sample]) -> None:
    """Write samples, at least one, as one file; nobody ever sees half of it. Raises OSError, and what `Format.encode` raises."""
    arrays: dict[str, NDArray[Any]] = {"starts": np.cumsum([0, *(len(one.token_ids) for one in samples)], dtype=np.int64)}
    if about.top:
        arrays |= {name: np.concatenate([vars(one)[name] for one in samples]) for name in _TOP}
    arrays["token_ids"] = np.concatenate([one.token_ids for one in samples])
    codes, scales = zip(*(_codes(one.hidden, about.dtype) for one in samples), strict=True)
    if about.dtype == "int8":
        arrays["hidden_scales"] = np.concatenate(scales)
    arrays["hidden_states"] = np.concatenate(codes)
    arrays["answer"] = np.concatenate([one.answer for one in samples]).astype(np.uint8)
    wanted = _wanted(about, len(arrays["token_ids"]), len(samples))
    assert wanted.keys() == arrays.keys(), f"a shard holds {sorted(wanted)}, got {sorted(arrays)}"
    for name, (_, shape) in wanted.items():
        assert arrays[name].shape == shape, f"{name} is {list(shape)}, got {list(arrays[name].shape)}"
    write_arrays(path, {name: (wanted[name][0], array.astype(_NUMPY[wanted[name][0]])) for name, array in arrays.items()})


def _wanted(about: Extraction, num_tokens: int, num_samples: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor of a shard."""
    hidden = (num_tokens, len(about.layers), about.hidden_size)
    return {
        "starts": ("I64", (num_samples + 1,)),
        "token_ids": ("I32", (num_tokens,)),
        "answer": ("U8", (num_tokens,)),
        "hidden_states": (DTYPES[about.dtype], hidden),
        **({"hidden_scales": ("F32", hidden[:2])} if about.dtype == "int8" else {}),
        **({"top_ids": ("I32", (num_tokens, about.top)), "top_logits": ("F32", (num_tokens, about.top))} if about.top else {}),
        **({"log_sum": ("F32", (num_tokens,))} if about.top else {}),
    }


def _open_shard(path: Path, about: Extraction) -> _Shard:
    stored = read_safetensors(path)
    num_tokens, num_samples = (_length(path, stored, name) for name in ("token_ids", "starts"))
    wanted = _wanted(about, num_tokens, num_samples - 1)
    if odd := sorted(wanted.keys() ^ stored.keys()):
        raise CheckpointError(f"{path}: tensor {odd[0]} is {'missing' if odd[0] in wanted else 'not expected'}; see {METADATA}")
    for name, (dtype, shape) in wanted.items():
        if (stored[name].dtype, stored[name].shape) != (dtype, shape):
            got = f"{stored[name].dtype} {list(stored[name].shape)}"
            raise CheckpointError(f"{stored[name].what} is {got}, wanted {dtype} {list(shape)}")
    arrays = {name: stored[name].data.view(_NUMPY[dtype]).reshape(shape) for name, (dtype, shape) in wanted.items()}
    token_ids, starts, answer = (np.array(arrays[name]) for name in ("token_ids", "starts", "answer"))
    if starts[0] != 0 or starts[-1] != num_tokens or not all(start < end for start, end in pairwise(starts.tolist())):
        raise CheckpointError(f"{path}: starts do not split {num_tokens} tokens into samples")
    if not 0 <= token_ids.min() <= token_ids.max() < about.vocab_size:
        raise CheckpointError(f"{path}: token_ids has ids that are none of the {about.vocab_size} of the vocabulary")
    if answer.max() > 1:
        raise CheckpointError(f"{path}: answer has the number {answer.max()}, wanted 0 and 1")
    return _Shard(path, token_ids, answer.astype(np.bool_), starts, arrays)


def _length(path: Path, stored: Mapping[str, StoredTensor], name: str) -> int:
    least = 2 if name == "starts" else 1
    shape = stored[name].shape if name in stored else ()
    if len(shape) != 1 or shape[0] < least:
        raise CheckpointError(
            f"{path}: tensor {name} is {list(shape) if name in stored else 'missing'}, wanted a vector of {least} or more"
        )
    return shape[0]


def _codes(hidden: F32, dtype: str) -> tuple[NDArray[Any], F32]:
    """Hidden states [T, L, H] as a shard holds them, and scales [T, L], which only int8 has."""
    if dtype != "int8":
        return FORMATS[dtype].encode(hidden).view(_NUMPY[DTYPES[dtype]]), np.empty(0, np.float32)
    scales = np.abs(hidden).max(axis=2) / np.float32(127)
    return np.rint(hidden / np.where(scales, scales, np.float32(1))[..., None]).astype(np.int8), scales


def _numbers(codes: NDArray[Any], scales: F32, dtype: str) -> F32:
    """The inverse of `_codes`."""
    if dtype == "int8":
        return codes * scales[..., None]
    return FORMATS[dtype].decode(np.ascontiguousarray(codes).view(np.uint8))
