"""The memory that compiled code and Python share, as numpy records: a forward's state, its operations, attention's plan, the team.

Compiled code reads the fields through `pointers`, Python as fields of arrays. Fields that are addresses of rows or weights are
plain int64s: their readers know what lies there. Strides and sizes are in bytes.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from cpuspec.kernels import isa
from cpuspec.kernels.ops import I64, Value
from cpuspec.kernels.pointers import pointer_to, to

_DType = np.dtype[Any]
_I64, _I32, _F32 = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32)


def _record(**fields: Any) -> _DType:
    """A record of these fields in order, aligned; a pair is (type, number of them)."""
    return np.dtype([(name, *typ) if isinstance(typ, tuple) else (name, typ) for name, typ in fields.items()], align=True)


def _words(*names: str) -> _DType:
    """A record of int64s."""
    return _record(**dict.fromkeys(names, _I64))


# Where a row lies in the cache and what it sees.
PLACE = _record(
    storage=_I64,  # address of the sequence's cache slot
    cache_index=_I64,  # at which the row is appended
    length=_I64,  # positions that the row attends to
    straight=_I64,  # first logical position that the row's path places; `length` where the row is a chain's
)

# Attention of one forward is shared out as tasks: rows of one sequence that go over the cache together. A task's chunks are walked
# over in spans; a span for one key head is an item of work.
TASK = _record(
    row=_I64,
    end_row=_I64,
    chunks=_I64,
    span=_I64,  # chunks of a span
    first=_I64,  # the first chunk that one of its rows sees; `chunks` is behind the last
    item=_I64,  # the first of the task's items
    partial=_I64,  # the first of the task's partials, where several spans make them
)

# How the attention of layers that are alike is shared out: by query heads, key heads and window.
PLAN = _record(
    heads=_I64,
    kv_heads=_I64,
    window=_I64,  # positions that a row sees; 0 for all
    max_partials=_I64,  # how many partials of several threads have room; the plan makes no more
    tasks=to(TASK),  # [rows]
    num_tasks=_I64,
    num_items=_I64,  # of all tasks
)
NUM_PLANS = 4

ROTATION = _words("cosines", "sines")  # f32 [positions, D/2] each
NUM_ROTATIONS, NO_ROTATION = 4, -1

# A row and one of the experts that it goes through (`experts`). Its activations lie in the block that begins at pair `block`.
PAIR = _words("row", "block", "block_rows")
# The pairs of one expert: `rows` of them, from pair `first` on.
SEGMENT = _words("expert", "first", "rows")

# A sequence of a forward over a model with recurrent layers (`recurrent`).
SEQUENCE = _record(
    source=_I64,  # address of the memory that its slot has of these layers
    target=_I64,  # address of the memory that its slot will have
    length=_I64,  # tokens that its slot holds
    row=_I64,
    end_row=_I64,
    fold=_I64,  # the number of tokens after which states are folded
    recorded=_I64,  # the first token whose row is kept
)

# Adapters (`adapters`): both parts of one matrix (rank 0 for none), an adapter of some rows, and the adapters of a sequence's rows.
ADAPTER_PAIR = _words("down", "up", "rank")
ADAPTED = _record(
    row=_I64,
    end_row=_I64,
    pairs=to(ADAPTER_PAIR),  # by the numbers of the matrices
    partials=_I64,  # where `down x` goes
    rank_bytes=_I64,
    scale=_F32,
)
ADAPTED_SPAN = _words("first", "end")

# `program.enter` writes the fields from num_rows to num_chunks, num_sequences, and the records that `places` points to, for each
# forward. The other addresses are of arrays that the backend keeps.
STATE = _record(
    num_rows=_I64,
    starts=to(_I64),  # [sequences + 1]: the first row of each, and the end of the last
    num_logit_rows=_I64,
    num_picked=_I64,  # rows of logits whose largest is looked for: all of up to argmax.MOST_ROWS, or none
    stops_early=_I64,  # not 0: the forward ends behind the running operation once it is asked to
    stop=_words("asked"),  # by another thread
    stopped=_I64,  # whether the forward ended early
    tokens=to(_I64),  # [rows]
    positions=to(_I64),  # [rows]
    logit_rows=to(_I64),  # rows to project
    logits=_I64,  # where the logits go
    kept=to(_I64),  # for each layer, where its output rows go, or 0; a null pointer where no layer is kept
    num_chunks=_I64,  # of keys and values that a cache slot has room for
    places=to(PLACE),  # [rows]
    paths=_I64,  # int64 [rows, path_length]: cache index of each logical position from a row's `straight` on
    path_length=_I64,
    rotations=(ROTATION, NUM_ROTATIONS),
    scratch=_I64,  # of all threads, one after another
    scratch_bytes=_I64,  # of one thread
    threads=_I64,
    plans=(PLAN, NUM_PLANS),
    num_plans=_I64,
    partials=_I64,  # room for the partials of tasks that several threads share
    walked=to(_I64),  # [tasks, kv heads]: how many spans of a task that has several are done
    peaks=_I64,  # f32 [argmax.MOST_ROWS, threads * PIECES]: the largest logit of each piece of the tiles
    picked=to(_I32),  # [argmax.MOST_ROWS]: the lowest id of a row's largest logit; -1 where that is no finite number
    routed=_words("rows"),  # that the router which runs has chosen experts for
    chosen=to(_I64),  # [rows, used]: the experts of the router that ran last
    pair_of=to(_I64),  # [rows, used]: and the pair of each
    pairs=to(PAIR),  # [rows * used]
    segments=to(SEGMENT),  # [experts]
    num_segments=_I64,
    first_pair=_I64,  # of these segments
    num_pairs=_I64,
    of_expert=to(_I64),  # [experts]: to count with
    expert_bytes=_I64,  # of weights of experts that the forward has read
    sequences=to(SEQUENCE),  # where there are recurrent layers
    num_sequences=_I64,
    sequence_of=to(_I64),  # [rows]
    copy_of=to(_I64),  # [MOST_PROCESSORS]: which copy of the weights is near a logical processor; null where there is one
    adapted=to(ADAPTED),  # in programs with adapters
    num_adapted=_I64,
    spans=to(ADAPTED_SPAN),
    num_spans=_I64,
)
MOST_PROCESSORS = 8192  # of Linux on x86-64

# The notes of `Program.enter` on a forward begin with this record. `logits` and `kept` are addresses of numpy objects, not of their
# numbers. num_done: of the extra_steps forwards that may follow, those that did.
CALL = _words(
    "num_rows",
    "num_logit_rows",
    "num_parents",
    "num_sequences",
    "both_ways",
    "sees_rows",
    "stops_early",
    "num_chunks",
    "logits",
    "kept",
    "extra_steps",
    "num_ends",
    "num_done",
)

# One matrix of a "linear" operation, or one of each expert, one after another.
#   bias, residual: added where they are not 0
#   bias_bytes: from one expert's bias to the next
#   one_row: address of the activations in a forward over one row; 0 if it is that of other forwards
#   table: int64 [experts], the address of each expert's tiles, 0 for an expert that is not in memory; no table: the experts' tiles
#     lie one after another
#   apart: from the results of one head to those of the next, for matrices of heads
#   copies_apart: from the tiles of one copy of the weights to those of the next, 0 where there is one
TENSOR = _words(
    "kernel", "tiles", "tile_bytes", "num_tiles", "inputs", "row_bytes", "bias", "residual", "out", "stride", "bias_bytes",
    "one_row", "table", "apart", "copies_apart",
)  # fmt: skip
# A matrix of "shrink" and "expand": its number among those that adapters may change, and where its results are.
ADAPTED_TENSOR = _words("number", "out", "stride", "num_tiles")
# Activations in one encoding that "gather" copies: `steps` steps of `step_bytes` bytes a row, `row_bytes` in all. A step of a block
# has `pieces` pieces of `size` bytes, each of all rows, and behind them `words` words likewise (`products.StepLayout`).
COPY = _words("source", "to", "row_bytes", "steps", "step_bytes", "size", "pieces", "words")

# The recurrence of a layer (`recurrent`).
#   queries, keys, values: rows with one stride
#   steps, dt, rates: a step is softplus(steps + dt), at least `least`. dt may be 0 for none. Rates are below 0.
#   decays: written with exp(rates * step)
#   factors: read and overwritten with what updates are multiplied by. With `corrects` (the delta rule) that is the sigmoid of what
#     lies there, else the step.
#   state_at to updates_at: where in a slot's memory the layer's states begin, how many tokens each covers, and the rings
_RECURRENCE = _record(
    **dict.fromkeys(("queries", "keys", "values", "stride", "steps", "steps_stride", "dt", "rates"), _I64),
    **dict.fromkeys(("factors", "factors_stride", "decays", "decays_stride", "out", "out_stride", "corrects"), _I64),
    **dict.fromkeys(("key_heads", "key_dims", "value_heads", "value_dims"), _I64),
    tiled=_I64,  # not 0: value heads i, i + key_heads, ... read key head i, else neighbours read one
    **dict.fromkeys(("state_at", "folded_at", "decays_at", "keys_at", "updates_at"), _I64),
    least=_F32,
    length_eps=_F32,
)

# inputs: f32 activations, `row_bytes` a row.
_OF_ADAPTERS = _record(features=_I64, inputs=_I64, row_bytes=_I64, num_tensors=_I64, tensors=to(ADAPTED_TENSOR))

# Operands by operation, in the order of their numbers.
OPERANDS: Mapping[str, _DType] = MappingProxyType(
    {
        "embed": _record(
            **dict.fromkeys(("decoder", "data", "row_bytes", "blocks", "features", "out", "stride"), _I64), scale=_F32
        ),
        "prepare": _record(
            kind=_I64,  # of `pointwise`
            rows=_I64,
            other=_I64,  # rows, or the bias of a layer norm
            stride=_I64,
            other_stride=_I64,
            weight=_I64,
            order=_I64,  # int32 [features, padded]: the input of each place, 0 where they are in order
            eps=_F32,
            features=_I64,
            select=_I64,  # not 0: only the rows to project to logits
            used=_I64,  # not 0: rows are pairs, and this the experts of a row
            heads=_I64,  # not 0: rows have the numbers of so many heads, which go to activations head by head
            apart=_I64,  # from the numbers of one head to those of the next
            # Where each encoding is written, 0 for nowhere.
            **dict.fromkeys(("int8", "int16", "f32", "bf16", "rounded", "rotated", "int14"), _I64),
        ),
        "linear": _record(
            num_tensors=_I64,
            vocab=_I64,  # 0 unless these are the logits
            features=_I64,
            cap=_F32,  # of soft-capped logits, 0 for none
            used=_I64,  # not 0: each segment of pairs is multiplied with its expert's matrices
            heads=_I64,  # not 0: the rows of so many heads are multiplied each with its own matrices
            tensors=to(TENSOR),
        ),
        "rotate": _record(
            **dict.fromkeys(("queries", "keys", "values", "q_stride", "k_stride", "v_stride", "q_norm", "k_norm"), _I64),
            eps=_F32,
            scale=_F32,  # of queries
            **dict.fromkeys(("heads", "kv_heads", "key_dims", "value_dims", "append"), _I64),
            **dict.fromkeys(("cache_at", "chunk_bytes"), _I64),  # of `backends.kv_memory.Place`
            rotation=_I64,  # of keys: number of the table, or NO_ROTATION
            q_rotation=_I64,  # of queries
            norm_last=_I64,  # not 0: norms follow the rotation
            centres=_I64,  # of keys, f32 [kv_heads][dims] (`backends.weights.key_centres`), or 0
            hadamard=_I64,  # of `formats.kv.hadamard_size`, for queries and keys
            v_hadamard=_I64,  # for values
            v_norm=_I64,  # f32 [value_dims], or 0
            copies=_I64,  # not 0: values are keys before norms and positions, and are written first
        ),
        "attend": _record(
            **dict.fromkeys(("queries", "stride", "out", "out_stride", "heads", "kv_heads", "key_dims", "value_dims"), _I64),
            **dict.fromkeys(("cache_at", "chunk_bytes", "kernel"), _I64),
            plan=_I64,  # number of the layer's PLAN
            together=_I64,  # queries that the kernel takes at most
            partials_at=_I64,  # where in a thread's scratch
            partial_bytes=_I64,
            window=_I64,  # positions that a row sees, itself included; 0 for all
            cap=_F32,  # of soft-capped scores
            hadamard=_I64,  # of results
            sinks=_I64,  # f32 [heads], or 0
        ),
        # rows = after * (rows + scale * `branch`, after an RMS norm times weight where that is not 0)
        "add": _record(
            **dict.fromkeys(("rows", "branch", "stride", "weight", "features"), _I64),
            eps=_F32,
            scale=_F32,
            after=_F32,
            parts=_I64,  # pieces of `features` numbers that a row has, one after another
        ),
        # `latent.assemble`. rope_dims: of the numbers in `q_rope` and `k_rope`
        "latent": _record(
            **dict.fromkeys(("heads", "rank", "rope_dims", "vectors", "vectors_stride", "q_rope", "q_rope_stride", "latent"), _I64),
            **dict.fromkeys(("latent_stride", "k_rope", "k_rope_stride", "weight", "queries", "q_stride", "keys"), _I64),
            k_stride=_I64,
            eps=_F32,
        ),
        "keep": _words("rows", "stride", "layer", "row_bytes"),
        "pick": _words("tiles", "stride"),
        # rows = RMS norm, times weight
        "norm": _record(**dict.fromkeys(("rows", "stride", "weight", "features"), _I64), eps=_F32),
        # logits: f32 [rows, stride / 2], with as much room behind each row; factors: f32 [rows, used padded to 16]; weights: f32
        # [experts], of factors in the end, or 0
        "route": _record(
            **dict.fromkeys(
                ("logits", "stride", "factors", "shift", "count", "used", "score", "normalised", "groups", "groups_used"), _I64
            ),
            weights=_I64,
            bytes=_I64,  # of an expert's weights
            table=_I64,  # that of a TENSOR: experts that are in memory get the first segments
            scale=_F32,
            least_sum=_F32,
        ),
        "gather": _record(used=_I64, num_copies=_I64, copies=to(COPY)),
        # rows = scale * (the sum over slots of factors * outputs of pairs, + sigmoid(weights) * shared), + rows where it `adds`
        "combine": _record(
            **dict.fromkeys(
                ("rows", "stride", "features", "factors", "used", "outputs", "outputs_stride", "shared", "shared_stride"), _I64
            ),
            weights=_I64,
            weights_stride=_I64,
            adds=_I64,
            scale=_F32,
        ),
        # silu(convolution + bias) or, with `outer`, outer * convolution of rows * factors; bias, outer and factors may be 0.
        # weights: f32 [taps][channels]; inputs_at: of their ring of `ring` rows in a slot's memory; outer, factors: rows like rows
        "convolve": _words(
            "rows", "stride", "factors", "outer", "weights", "bias", "out", "out_stride", "channels", "taps", "inputs_at", "ring"
        ),
        "record": _RECURRENCE,
        "recur": _RECURRENCE,
        # rows = RMS norm of (rows + skip * values) * silu(gate); skip, gate and weight may be 0. skip: f32, of each `dims` numbers;
        # weight_bytes: from a group's weights to the next group's
        "finish": _record(
            **dict.fromkeys(("rows", "stride", "values", "values_stride", "gate", "gate_stride", "skip", "weight"), _I64),
            **dict.fromkeys(("weight_bytes", "features", "groups", "dims"), _I64),
            eps=_F32,
        ),
        "shrink": _OF_ADAPTERS,
        "expand": _OF_ADAPTERS,
    }
)
OPERATION: _DType = np.dtype(
    {
        "names": ["number", *OPERANDS],
        "formats": [_I64, *OPERANDS.values()],
        "offsets": [0, *[8] * len(OPERANDS)],  # operands of one operation lie where those of another would
    }
)


@intrinsic(prefer_literal=True)
def is_operation(typingctx, op, name):
    """Whether the record of OPERATION at a pointer is the operation of this name, a literal."""
    number = list(OPERANDS).index(name.literal_value)
    return types.boolean(op, name), lambda context, builder, sig, args: Value(builder, args[0]).load(I64).equals(number).v


# A number that threads wait to see changed. On a cache line of its own, for others look at the number all the time: how many
# threads sleep until it changes, are about to, or just woke up. Each sleeper subtracts itself. If the waker did, a thread that
# goes to sleep on the next value meanwhile could be missed and never woken.
WATCHED: _DType = np.dtype({"names": ["number", "sleeping"], "formats": [_I64, _I64], "offsets": [0, 64], "itemsize": 128})
SLEEPING = 64

WORKER: _DType = np.dtype(
    {
        # crowded: until when, in cycles of the time stamp counter, the thread sleeps where it would yield.
        # inside: not 0 while the thread may read the job.
        # seen: the number that the thread sleeps on, as it saw it.
        "names": ["parked", "crowded", "inside", "seen"],
        "formats": [_I64, _I64, (_I64, 1), _I64],
        "offsets": [0, 8, 16, 24],
        "itemsize": 64,
    }
)
SEEN = 24
JOB = _record(operations=to(OPERATION), num_operations=_I64, state=to(STATE), counters=_I64)
# `step` of a team: how many forwards were published, times DONE + 1, plus the number of the operation that runs, DONE for none.
DONE = (1 << 20) - 1
TEAM: _DType = np.dtype(
    {
        "names": ["step", "quit", "job", "workers"],
        "formats": [WATCHED, (_I64, 1), JOB, (WORKER, 0)],  # of workers, one for each thread follows
        "offsets": [0, 128, 192, 256],
        "itemsize": 256,
    }
)

# The queries of a walk over a chunk, at the start of a thread's scratch.
MAX_QUERIES = 128 if isa.has_bf16_dots() else 64  # products of bf16 want more of them for the keys that are prepared
WALK = _record(
    queries=(_I64, MAX_QUERIES),  # addresses
    partials=(_I64, MAX_QUERIES),  # addresses
    starts=(_I64, MAX_QUERIES),  # first position that a query sees; read where a layer has a window
    lengths=(_I64, MAX_QUERIES),  # positions up to and including its own
    caps=(_F32, 2 * MAX_QUERIES),  # the first: of soft-capped scores
)

call_at, job_at, team_at, walk_at, int64s_at = map(pointer_to, (CALL, JOB, TEAM, WALK, _I64))


def program(operations: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    """Records of OPERATION, and the arrays that they have the addresses of.

    operations: each one's name and its operands by field; what is not named is 0. An operand may be a list of records, to which the
    field of its name points.
    """
    records, lists = np.zeros(len(operations), OPERATION), []
    for record, (name, operands) in zip(records, operations, strict=True):
        record["number"] = list(OPERANDS).index(name)
        for field, value in operands.items():
            if isinstance(value, list):
                pointed: Any = OPERANDS[name][field].metadata
                of_list = np.zeros(len(value), pointed["to"])
                for part, some in zip(of_list, value, strict=True):
                    for inner, number in some.items():
                        part[inner] = number
                lists.append(of_list)
                record[name][field] = of_list.ctypes.data
            else:
                record[name][field] = value
    return records, lists
