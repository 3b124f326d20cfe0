r"""What quantizing costs, type by type and method by method: bits per weight, KL divergence, same-top share, perplexity, seconds.

    python benchmarks/quantize.py smollm2-135m-instruct wikitext2_test.txt calibration.txt --type q4_0 \
        --method round --method gptq --json benchmarks/results/quantize-smollm2-135m-instruct.json

The reference is the model as given, with its weights in f32: of a file that is quantized already, these are the dequantized ones.
`--scatter` then takes the file's grid out of them, which would favour the formats that have the same one: it multiplies the columns
of q, k, v, gate, up, o and down by random factors, which the norms before them, v and up take back. Seconds are of processors, all
threads together: on a busy machine they say more than the clock.
"""

import json
import tempfile
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from record import Rounds, record, save, say

from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.download import resolve_model
from cpuspec.evaluate.quality import compare_rows
from cpuspec.formats import QuantTensor, get_format
from cpuspec.formats.tensor import F32
from cpuspec.quantize.calibration import run
from cpuspec.quantize.job import METHODS, Job, measure_importance, quantize, read_chunks
from cpuspec.quantize.weights import Weights, layer_parts
from cpuspec.text import make_tokenizer


def logits_of(checkpoint: Checkpoint, ids: list[int]) -> F32:
    """Of all rows, with weights decoded one matrix at a time."""
    tokens = np.array([ids], np.int32)
    return run(Weights(checkpoint), tokens, lambda x, names: None, {}, with_logits=True).astype(np.float32)


def scattered(checkpoint: Checkpoint, spread: float) -> Checkpoint:
    """The same model with columns multiplied by random factors up to 1 + spread, which what feeds them takes back."""
    config, rng = checkpoint.config, np.random.default_rng(0)
    inputs: dict[str, F32] = {}
    outputs: dict[str, F32] = {}

    def factors(count: int) -> F32:
        return np.exp(rng.uniform(-1, 1, count) * np.log1p(spread)).astype(np.float32)

    for layer in range(config.num_layers):
        for norm, parts in (("attn_norm", "qkv"), ("mlp_norm", ("gate", "up"))):
            own = factors(config.hidden_size)
            outputs[f"layers.{layer}.{norm}"] = own
            inputs |= {f"layers.{layer}.{part}": own for part in parts}
        of_values = factors(config.num_kv_heads * config.head_dim).reshape(config.num_kv_heads, 1, -1)
        outputs[f"layers.{layer}.v"] = outputs[f"layers.{layer}.v_bias"] = of_values.reshape(-1)
        shared = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
        inputs[f"layers.{layer}.o"] = np.broadcast_to(of_values, shared).reshape(-1)
        inputs[f"layers.{layer}.down"] = outputs[f"layers.{layer}.up"] = factors(config.intermediate_size)
    weights, f16 = Weights(checkpoint, inputs, outputs), get_format("f16")
    tensors = dict(checkpoint.tensors)
    for name, tensor in checkpoint.tensors.items():
        if layer_parts(name)[0] >= 0:
            is_matrix = len(tensor.shape) == 2
            tensors[name] = QuantTensor.encode(f16, weights.matrix(name)) if is_matrix else weights.vector(name)
    return replace(checkpoint, tensors=tensors)


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    text: Annotated[Path, typer.Argument(help="A text to judge by, such as WikiText-2's test split.", exists=True)],
    calibration: Annotated[Path, typer.Argument(help="Another text, to calibrate by.", exists=True)],
    types: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            help="A type of `cpuspec quantize`, or a number of bits per weight, and with : what to choose from. Repeatable.",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", help=f"round, imatrix, or some of {', '.join(METHODS)} joined by commas. Repeatable."),
    ] = None,
    files: Annotated[
        list[Path] | None, typer.Option("--file", help="The same model by another tool, to be judged beside them. Repeatable.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens from the start of the text.", min=2)] = 512,
    chunks: Annotated[int, typer.Option(help="Pieces of the calibration text.", min=1)] = 8,
    ctx_size: Annotated[int, typer.Option(help="Tokens of such a piece.", min=2)] = 512,
    pure: Annotated[bool, typer.Option("--pure", help="No mixes.")] = False,
    scatter: Annotated[float, typer.Option(help="How far random factors of columns are from 1. 0 leaves weights as they are.")] = 0,
    threads: Annotated[int, typer.Option(help="Threads that round.", min=1)] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print a line for each type and method."""
    given = open_checkpoint(resolve_model(model))
    ids = make_tokenizer(given).encode(text.read_text(encoding="utf-8")[: tokens * 32])[:tokens]
    pieces = read_chunks(given, calibration.read_text(encoding="utf-8"), chunks, ctx_size)
    reference = logits_of(given, ids)
    checkpoint = scattered(given, scatter) if scatter else given
    arms: list[dict[str, Any]] = []
    rounds = Rounds(1, threads)

    def take(arm: dict[str, Any], path: Path) -> None:
        arms.append(arm | asdict(compare_rows(reference, logits_of(open_checkpoint(path), ids), ids[1:])))
        told = f"{arm['bits_per_weight']:.3f} bits, KL {arms[-1]['kl_mean']:.4f}, same top {arms[-1]['same_top']:.3f}"
        say(f"{arm['type']} {arm['method']}: {told}")

    with tempfile.TemporaryDirectory() as directory:
        for _ in rounds:
            for path in files or ():
                matrices = [tensor for tensor in open_checkpoint(path).tensors.values() if len(tensor.shape) == 2]
                arm = {
                    "type": path.name,
                    "method": "as given",
                    "num_bytes": path.stat().st_size,
                    "bits_per_weight": 8 * sum(one.num_bytes for one in matrices) / sum(one.num_values for one in matrices),
                    "formats": dict(Counter(tensor.format.name for tensor in matrices)),
                }
                take(arm, path)
            importance = None
            if "imatrix" in (methods or ()):
                importance = measure_importance(Weights(checkpoint), pieces, lambda what, done, total: None)
            for type_name in types or ():
                for method in methods or ("round",):
                    by = () if method in ("round", "imatrix") else tuple(method.split(","))
                    bits, _, some = type_name.partition(":")
                    is_budget = bits[:1].isdigit()
                    candidates = tuple(some.split(",")) if some else ()
                    if is_budget:
                        job = Job("", by, bits_per_weight=float(bits), candidates=candidates)
                    else:
                        job = Job(type_name, by, pure=pure, candidates=candidates)
                    out, before = Path(directory) / "out.gguf", time.process_time()
                    chosen, weighed = pieces if by or is_budget else None, importance if method == "imatrix" else None
                    made = quantize(checkpoint, out, job, threads, chunks=chosen, importance=weighed)
                    arm = {"type": type_name, "method": method, "num_bytes": made.num_bytes, "formats": made.formats}
                    cpu_s = round(time.process_time() - before, 1)
                    take(arm | {"bits_per_weight": made.bits_per_weight, "cpu_s": cpu_s}, out)
    texts = {"text": text.name, "calibration": calibration.name, "calibration_tokens": int(pieces.size)}
    print(json.dumps(arms, indent=2))
    save(record("quantize", given.path.name, rounds) | texts | {"pure": pure, "scatter": scatter, "arms": arms}, json_file)


if __name__ == "__main__":
    typer.run(main)
