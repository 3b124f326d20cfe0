r"""What quantizing costs, type by type and method by method: bits per weight, KL divergence, same-top share, perplexity, seconds.

    python benchmarks/quantize.py smollm2-135m-instruct wikitext2_test.txt calibration.txt --type q4_0 \
        --method round --method gptq --json benchmarks/results/quantize-smollm2-135m-instruct.json

The reference is the model as given, with its weights in f32: of a file that is quantized already, these are the dequantized ones.
Seconds are of processors, all threads together: on a busy machine they say more than the clock.
"""

import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from record import Rounds, record, save, say

from cpuspec.backends import make_backend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.download import resolve_model
from cpuspec.config import EngineConfig
from cpuspec.evaluate.quality import compare
from cpuspec.quantize.job import METHODS, Job, measure_importance, quantize, read_chunks
from cpuspec.quantize.weights import Weights
from cpuspec.tokenizer import make_tokenizer


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    text: Annotated[Path, typer.Argument(help="A text to judge by, such as WikiText-2's test split.", exists=True)],
    calibration: Annotated[Path, typer.Argument(help="Another text, to calibrate by.", exists=True)],
    types: Annotated[list[str], typer.Option("--type", help="A type of `cpuspec quantize`. Repeatable.")],
    methods: Annotated[
        list[str], typer.Option("--method", help=f"round, imatrix, or some of {', '.join(METHODS)} joined by commas. Repeatable.")
    ],
    tokens: Annotated[int, typer.Option(help="Tokens from the start of the text.", min=2)] = 512,
    chunks: Annotated[int, typer.Option(help="Pieces of the calibration text.", min=1)] = 8,
    ctx_size: Annotated[int, typer.Option(help="Tokens of such a piece.", min=2)] = 512,
    pure: Annotated[bool, typer.Option("--pure", help="No mixes.")] = False,
    threads: Annotated[int, typer.Option(help="Threads that round.", min=1)] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Print a line for each type and method."""
    checkpoint = open_checkpoint(resolve_model(model))
    ids = make_tokenizer(checkpoint).encode(text.read_text(encoding="utf-8")[: tokens * 32])[:tokens]
    pieces = read_chunks(checkpoint, calibration.read_text(encoding="utf-8"), chunks, ctx_size)
    engine = EngineConfig(kv_format="f32")
    reference = make_backend("numpy", checkpoint, engine)
    arms: list[dict[str, Any]] = []
    rounds = Rounds(1, threads)
    with tempfile.TemporaryDirectory() as directory:
        for _ in rounds:
            importance = (
                measure_importance(Weights(checkpoint), pieces, lambda what, done, total: None) if "imatrix" in methods else None
            )
            for type_name in types:
                for method in methods:
                    by = () if method in ("round", "imatrix") else tuple(method.split(","))
                    out, before = Path(directory) / "out.gguf", time.process_time()
                    made = quantize(
                        checkpoint,
                        out,
                        Job(type_name, by, pure=pure),
                        threads,
                        chunks=pieces if by else None,
                        importance=importance if method == "imatrix" else None,
                    )
                    seconds = time.process_time() - before
                    own = make_backend("numpy", open_checkpoint(out), engine)
                    arm = {
                        "type": type_name,
                        "method": method,
                        "num_bytes": made.num_bytes,
                        "bits_per_weight": made.bits_per_weight,
                        "formats": made.formats,
                        "cpu_s": round(seconds, 1),
                        **asdict(compare(reference, own, ids)),
                    }
                    own.close()
                    arms.append(arm)
                    told = f"{arm['bits_per_weight']:.3f} bits, KL {arm['kl_mean']:.4f}, same top {arm['same_top']:.3f}"
                    say(f"{type_name} {method}: {told}")
    result = record("quantize", checkpoint.path.name, rounds) | {
        "text": text.name,
        "calibration": calibration.name,
        "calibration_tokens": int(pieces.size),
        "pure": pure,
        "arms": arms,
    }
    print(json.dumps(arms, indent=2))
    save(result, json_file)


if __name__ == "__main__":
    typer.run(main)
