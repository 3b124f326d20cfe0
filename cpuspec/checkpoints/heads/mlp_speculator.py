"""MLP speculators (arXiv 2404.19124) as fms-extras and vLLM (`mlp_speculator.py`) name their tensors.

The target's hidden state is that after its final norm. Stage i, from 0, reads the token i + 1 after the state's own one.
"""

import math
import re

import numpy as np

from cpuspec.checkpoints.checkpoint import Checkpoint
from cpuspec.checkpoints.heads.head import Head, HeadFiles, HeadNorm, final_norm
from cpuspec.checkpoints.heads.stages import RecurrentStage, output_name, stages_model
from cpuspec.formats import QuantTensor

_MOST_STAGES = 32
_EPS = 1e-6  # of all its norms
_KINDS = ("mlp_speculator", "mlp")
_PART = re.compile(r"(emb|proj|head|ln)\.(\d{1,3})\.(weight|bias)")


def is_mlp_speculator(files: HeadFiles) -> bool:
    """Whether a directory has the layout of an MLP speculator."""
    fields = files.fields
    return not files.is_gguf and (fields.value("model_type") in _KINDS or fields.value("speculators_model_type") in _KINDS)


def read_mlp_speculator(files: HeadFiles, target: Checkpoint) -> Head:
    """An MLP speculator. Raises CheckpointError where it does not fit, or is of a kind that is not supported, such as an LSTM."""
    fields, vocab_size, hidden = files.fields, target.config.vocab_size, target.config.hidden_size
    if fields.text("method", "sum_rnn") != "sum_rnn":
        fields.fail("method", "sum_rnn: others are not supported")
    files.check("hidden size", fields.integer("emb_dim"), hidden, target)
    files.check("vocabulary", fields.integer("vocab_size"), vocab_size, target)
    size, number = fields.integer("inner_dim", 0) or hidden, fields.integer("n_predict")
    if not 1 <= number <= _MOST_STAGES:
        fields.fail("n_predict", f"a number from 1 to {_MOST_STAGES}")
    if size < 1:
        fields.fail("inner_dim", "0 for emb_dim, or more")
    is_tied, parts = fields.boolean("tie_weights", False), _sorted(files, number)

    def part(kind: str, stage: int, what: str = "weight") -> QuantTensor:
        """Of tied stages one copy is in the file, or several that are the same. The first stage's `proj` is its own."""
        first = min(stage, 1) if kind == "proj" else 0
        names = [(kind, one, what) for one in (range(first, number if first or kind != "proj" else 1) if is_tied else [stage])]
        found = next((parts[name] for name in names if name in parts), None)
        if found is None:
            files.refuse(f"tensor {kind}.{stage}.{what} is missing")
        return found

    # So that the first state has half of the weight in the last one (fms_extras/models/speculator.py).
    state_weight = 0.5 ** (0.5 / number)
    embed_weight = math.sqrt((1 - state_weight**2) * size / 2) / state_weight
    tensors: dict[str, QuantTensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    stages = []
    for stage in range(number):
        embed = part("emb", stage)
        if embed.shape != (vocab_size, size):
            files.refuse(f"tensor emb.{stage}.weight has the shape {list(embed.shape)}, wanted {[vocab_size, size]}")
        matrix, output = f"states.{min(stage, 1) if is_tied else stage}", output_name(0 if is_tied else stage)
        tensors |= {matrix: part("proj", stage), output: part("head", stage)}
        shapes |= {matrix: (size, size if stage else hidden), output: (vocab_size, size)}
        weight, bias = (files.numbers(f"ln.{stage}.{what}", part("ln", stage, what), size) for what in ("weight", "bias"))
        stages.append(RecurrentStage(matrix, embed, embed_weight, weight, bias, _EPS, output))
    model = stages_model(files.path, target, size, vocab_size, {**tensors, "embed": stages[0].embed}, shapes)
    norms: tuple[HeadNorm, ...] = (final_norm(target),)
    if fields.boolean("scale_input", False):
        norms += (HeadNorm(np.full(hidden, math.sqrt(0.5), np.float32), _EPS),)
    return Head(
        "mlp-speculator",
        files.name,
        model,
        (target.config.num_layers - 1,),
        norms,
        num_tokens=number,
        stages=tuple(stages),
        tokenizer=files.tokenizer,
    )


def _sorted(files: HeadFiles, num_stages: int) -> dict[tuple[str, int, str], QuantTensor]:
    """The tensors by kind, stage, and weight or bias. Raises CheckpointError for others."""
    parts: dict[tuple[str, int, str], QuantTensor] = {}
    for name, tensor in files.tensors.items():
        found = _PART.fullmatch(name.removeprefix("speculator."))
        if found is None or (found[3] == "bias" and found[1] != "ln") or int(found[2]) >= num_stages:
            files.refuse(f"tensor {name} has no place in an MLP speculator; it would be ignored silently")
        parts[found[1], int(found[2]), found[3]] = tensor
    return parts
