"""Certificates of several drafts for one model, as `cpuspec certify` makes them, in one file. Exits 1 if one is refused.

python benchmarks/certificates.py smollm2-135m-instruct --draft auto --draft ngram,self:mxfp4@4 --draft text:MODEL
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from record import Rounds, record, save, say

from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.download import resolve_model
from cpuspec.checkpoints.gguf_parts import file_identity
from cpuspec.engine.draft_spec import check_spec
from cpuspec.environment import usable_cores
from cpuspec.errors import CpuspecError
from cpuspec.evaluate.certify import NUM_SAMPLES, certify
from cpuspec.metrics import now_s
from cpuspec.settings import EngineConfig, SpecConfig


def main(
    model: Annotated[str, typer.Argument(help="Recipe name, GGUF file or Hugging Face directory.")],
    draft: Annotated[list[str], typer.Option("--draft", metavar="SPEC", help="Drafts to certify. Repeatable.")],
    tokens: Annotated[int, typer.Option(help="Tokens of each greedy answer.", min=1)] = 128,
    samples: Annotated[int, typer.Option(help="Sampled answers at each temperature.", min=1)] = NUM_SAMPLES,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what is known after each here as well.")] = None,
) -> None:
    """Print a line for each draft."""
    try:
        specs = [SpecConfig.parse(text) for text in draft]
        for spec in specs:
            check_spec(spec)
        checkpoint = open_checkpoint(resolve_model(model))
    except CpuspecError as error:
        raise typer.BadParameter(str(error)) from None
    threads = threads or usable_cores()
    settings = EngineConfig(threads=threads)
    files, rounds = file_identity(checkpoint.path), Rounds(len(specs), threads)
    certificates: list[dict[str, Any]] = []
    for number in rounds:
        spec, begin_s = specs[number], now_s()
        one = certify(checkpoint, spec, max_tokens=tokens, num_samples=samples, settings=settings, on_progress=say)
        seconds = now_s() - begin_s
        certificates.append({"seconds": round(seconds, 1)} | one.as_dict())
        print(f"{spec}: {'certified' if one.passed else 'NOT CERTIFIED'} in {seconds:.0f} s", flush=True)
        save(record("certificates", checkpoint.path.name, rounds) | {"files": files, "certificates": certificates}, json_file)
    if not all(one["passed"] for one in certificates):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
