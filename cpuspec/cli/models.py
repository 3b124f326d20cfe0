"""Gathers the reports of `cpuspec models` and `cpuspec inspect` as plain data, and prints them as tables."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cpuspec.backends.packed import verify_packed
from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.adapters import adapter_facts
from cpuspec.checkpoints.checkpoint import norm_sha256
from cpuspec.checkpoints.download import fetch, find_fetched, find_model
from cpuspec.checkpoints.gguf_parts import file_identity, part_paths
from cpuspec.checkpoints.heads import own_mtp
from cpuspec.checkpoints.hub import HubModel, revision_of
from cpuspec.checkpoints.local_models import local_models
from cpuspec.checkpoints.recipes import load_all, recipe_of
from cpuspec.cli import options
from cpuspec.cli.console import ERROR, Report, emit, emit_json, exit_codes, note, print_facts, print_report, print_table, size
from cpuspec.cli.opening import open_target
from cpuspec.cli.options import argument, flag
from cpuspec.cli.progress import busy, fetch_progress
from cpuspec.engine.draft_spec import draft_models, model_and_spec
from cpuspec.environment import usable_cores
from cpuspec.errors import CheckpointError
from cpuspec.formats import QuantTensor
from cpuspec.formats.kv import get_kv_format
from cpuspec.metrics import read_bandwidth
from cpuspec.settings import EngineConfig


@exit_codes()
def pull(
    names: Annotated[
        list[str],
        argument(
            "NAME...", "Models to fetch: names from `cpuspec models` (of a chain target and drafts), owner/name:QUANT of the hub."
        ),
    ],
    as_json: options.JsonOption = False,
) -> None:
    """Fetch models, check them, and print where they are. What is already there is not fetched again.

    For a name of the hub's, it is asked whether there is a newer one.
    """
    named = [model_and_spec(options.checked_text(name, "NAME"), None) for name in names]
    found = {name: find_model(name) for target, spec in named for name in (target, *draft_models(spec))}
    done = []
    for name, model in found.items():
        was_there = path = model if isinstance(model, Path) else find_fetched(model)
        if not isinstance(model, Path) and (path is None or isinstance(model, HubModel)):
            with fetch_progress(name) as progress:
                path = fetch(model, progress, refresh=True)
        assert path is not None, "fetch returns a path"
        num_bytes, revision = size_of(path), revision_of(path)
        note(
            f"{name} {'is already there' if path == was_there else 'fetched and verified'} ({size(num_bytes)}"
            f"{f', revision {revision}' if revision else ''})"
        )
        done.append({"name": name, "path": str(path), "bytes": num_bytes, "was_there": path == was_there, "revision": revision})
        if not as_json:
            emit(f"{path}\n")
    if as_json:
        emit_json(done)


@exit_codes()
def models(as_json: options.JsonOption = False) -> None:
    """List the models that can be named: recipes, with size, licence, and whether they are fetched; chains of drafts; local models.

    Local models are those that huggingface_hub, LM Studio and Ollama hold on this machine.
    """
    (rows, problems), chains, found = known_models(), known_chains(), found_models()
    for problem in problems:
        note(f"warning: left out: {problem}")
    print_report(rows + chains + found, as_json, lambda _: show_models(rows, chains, found))


@exit_codes()
@options.takes_running("threads", with_backend=False)
def inspect(
    model: options.ModelArgument,
    *,
    tensors: Annotated[bool, flag("--tensors", "List every tensor.")] = False,
    verify: Annotated[
        bool,
        flag(
            "--verify", "Read the model's files and packed weights whole, and compare their checksums; exit code 1 if one differs."
        ),
    ] = False,
    as_json: options.JsonOption = False,
    running: options.Running,
) -> None:
    """Show a model's shape and formats, and how fast this machine's memory could feed it; of a chain, the target's.

    Of a LoRA adapter, a directory of PEFT or a GGUF file, show its base, its rank and what it changes.
    """
    if adapter := adapter_facts(Path(model)):
        print_report({"adapter": Path(model).name, **adapter._asdict()}, as_json, lambda facts: print_facts(facts.items()))
        return
    checkpoint, threads = open_target(model, adapts=True), running.settings.threads or usable_cores()
    with busy("measuring this machine's memory bandwidth"):
        report = describe_model(checkpoint, threads, tensors)
    if verify:
        with busy("reading the model's files"):
            report["verified"] = verify_model(checkpoint, threads)
    print_report(report, as_json, show_model)
    if verify and not report["verified"]["passed"]:
        raise typer.Exit(ERROR)


def known_models() -> tuple[list[Report], list[str]]:
    """Every recipe, with its file in the caches if there is one; and the errors of recipes that cannot be read."""
    recipes, _, problems = load_all()
    rows = []
    for recipe in recipes.values():
        if recipe.head:
            continue
        path = find_fetched(recipe)
        about = {"source": "recipe", "bytes": size_of(path) if path else recipe.num_bytes, "fetched": path is not None}
        told = ("name", "architecture", "parameters", "licence", "licence_note", "description")
        rows.append({name: getattr(recipe, name) for name in told} | about | {"path": str(path) if path else None})
    return rows, problems


def known_chains() -> list[Report]:
    """Every target with drafts that has a name of its own, and every head."""
    recipes, chains, _ = load_all()
    return [
        {"name": chain.name, "source": "chain", "target": chain.target, "draft": str(chain.spec), "description": chain.description}
        for chain in chains.values()
    ] + [
        {
            "name": recipe.name,
            "source": "head",
            "target": recipe.head.target,
            "draft": recipe.name,
            "licence": recipe.licence,
            "fetched": find_fetched(recipe) is not None,
            "description": recipe.description,
        }
        for recipe in recipes.values()
        if recipe.head
    ]


def found_models() -> list[Report]:
    """The models of other programs on this machine."""
    return [{"name": one.name, "source": one.source, "bytes": one.num_bytes, "path": str(one.path)} for one in local_models()]


def size_of(path: Path) -> int:
    """Bytes of a model's files: the parts of a GGUF model, or what is in a directory."""
    return sum(file.stat().st_size for file in (part_paths(path) if path.is_file() else path.iterdir()) if file.is_file())


def show_models(rows: list[Report], chains: list[Report], found: list[Report]) -> None:
    """Print `known_models`, `known_chains` and `found_models` as tables."""
    cells = [
        (
            row["name"],
            f"{row['parameters'] / 1e9:.2f} B",
            size(row["bytes"]) if row["bytes"] else "",
            row["licence"],
            "yes" if row["fetched"] else "no",
            row["description"],
        )
        for row in rows
    ]
    print_table(("name", "parameters>", "size>", "licence", "fetched", "description"), cells)
    if chains:
        emit("\n")
        columns = ("name", "target", "draft", "description")
        print_table(columns, [tuple(chain[column] for column in columns) for chain in chains])
    if found:
        emit("\n")
        print_table(
            ("found here", "size>", "source", "path"),
            [(one["name"], size(one["bytes"]), one["source"], one["path"]) for one in found],
        )


def describe_model(checkpoint: Checkpoint, threads: int, with_tensors: bool) -> Report:
    """Configuration, formats, sizes, and the bound that memory sets to the speed of one sequence.

    A token reads every weight once, except for an embedding that is not the output matrix too, of which it reads one row, and for
    experts, of which it reads those that its row goes through.
    """
    # They import numba.
    from cpuspec.backends.kv_memory import slot_bytes
    from cpuspec.kernels import isa

    config, tensors, kv_format = checkpoint.config, checkpoint.tensors, get_kv_format(EngineConfig.kv_format)
    kept = slot_bytes(config, kv_format, config.context_length)
    share = config.experts.used / config.experts.count if config.experts else 1.0
    read_bytes = sum(
        t.num_bytes * (share if ".expert_" in name else 1)
        for name, t in tensors.items()
        if name != "layer_embed" and (name != "embed" or config.tied_embeddings)
    )
    bandwidth = read_bandwidth(threads)
    report = {
        "name": checkpoint.name,
        "path": str(checkpoint.path),
        "revision": revision_of(checkpoint.path),
        "quantization": checkpoint.quantization,
        "config": asdict(config),
        "norm_sha256": norm_sha256(checkpoint),
        **totals(tensors.values()),
        "formats": {
            name: totals(t for t in tensors.values() if t.format.name == name)
            for name in sorted({t.format.name for t in tensors.values()})
        },
        "prediction": totals(checkpoint.prediction_layers.values()) | {"refused": _refused(checkpoint)}
        if checkpoint.prediction_layers
        else None,
        "kv_format": kv_format.name,
        "state_bytes_per_sequence": kept.per_slot,  # with the rows that can be truncated
        "window_bytes_per_sequence": kept.of(config.context_length) - config.context_length * kept.per_token - kept.per_slot,
        "kv_bytes_per_token": kept.per_token,
        "bytes_per_sequence": kept.of(config.context_length),
        "read_bytes_per_token": read_bytes,
        "processor": isa.describe(),
        "threads": threads,
        "read_bytes_per_s": bandwidth,
        "bound_tokens_per_s": bandwidth / read_bytes,
    }
    if with_tensors:
        report["tensors"] = _listed(tensors)
        if report["prediction"]:
            report["prediction"]["tensors"] = _listed(checkpoint.prediction_layers)
    return report


def _listed(tensors: Mapping[str, QuantTensor]) -> list[Report]:
    return [{"name": name, "format": t.format.name, "shape": list(t.shape), "bytes": t.num_bytes} for name, t in tensors.items()]


def _refused(checkpoint: Checkpoint) -> str:
    """Why a model's layer for multi-token prediction does not draft; "" where it does."""
    try:
        own_mtp(checkpoint)
    except CheckpointError as error:
        return str(error)
    return ""


def verify_model(checkpoint: Checkpoint, threads: int) -> Report:
    """The sha256 of the model's files beside that of its recipe, where one knows the file, and whether its packed weights are
    what their checksums say. Damaged packed weights are removed.
    """
    files = file_identity(checkpoint.path)
    recipe = recipe_of(checkpoint.path)
    wanted = recipe.sha256 if recipe else None
    packed = [{"path": str(path), "sound": sound} for path, sound in verify_packed(threads, checkpoint.name).items()]
    return {
        "files": files,
        "recipe": recipe and recipe.name,
        "recipe_sha256": wanted,
        "packed": packed,
        "passed": (not wanted or files[0]["sha256"] == wanted) and all(one["sound"] for one in packed),
    }


def _verdicts(report: Report, path: str) -> list[tuple[str, str]]:
    """`verify_model` in lines."""
    lines = [("sha256", f"{file['sha256']} {file['name']}") for file in report["files"]]
    wanted = report["recipe_sha256"]
    if not wanted:
        lines.append(("", "no recipe knows these files, so nothing says what they ought to be"))
    elif report["files"][0]["sha256"] == wanted:
        lines.append(("", f"as the recipe {report['recipe']} has it"))
    else:
        lines.append(("", f"DAMAGED: {report['recipe']} is {wanted}; remove {path}, and the next start fetches it again"))
    lines += [
        ("packed weights", f"{'sound' if one['sound'] else 'DAMAGED, and removed: the next start packs anew'}: {one['path']}")
        for one in report["packed"]
    ]
    return lines if report["packed"] else [*lines, ("packed weights", "none are kept")]


def totals(tensors: Iterable[QuantTensor]) -> Report:
    """How many tensors, weights and bytes there are, and bits for each weight."""
    listed = list(tensors)
    num_bytes, num_weights = sum(t.num_bytes for t in listed), sum(t.num_values for t in listed)
    return {
        "num_tensors": len(listed),
        "num_weights": num_weights,
        "bytes": num_bytes,
        "bits_per_weight": 8 * num_bytes / num_weights,
    }


def _heads(config: Report) -> str:
    if latent := config["latent"]:
        made = f"keys and values made of {latent['rank']} and {latent['rope_dims']} numbers"
        return f"{config['num_heads']} of {latent['plain'] + latent['rope_dims']}, {made}"
    return f"{config['num_heads']} of {config['head_dim']}, {config['num_kv_heads']} for keys and values"


def _prediction(found: Report | None) -> str:
    """A text about a layer for multi-token prediction; "" where there is none."""
    if not found:
        return ""
    use = found["refused"] or "it drafts by --draft mtp, or where auto chooses it"
    return f"a layer of {size(found['bytes'])} in {found['num_tensors']} tensors for multi-token prediction: {use}"


def show_model(report: Report) -> None:
    """Print `describe_model`: facts, formats, and tensors if they were asked for."""
    config = report["config"]
    output = "output tied to the embedding" if config["tied_embeddings"] else "output of its own"
    scaling = f", {config['rope_scaling']['kind']} scaling" if config["rope_scaling"] else ""
    experts, windows = config["experts"], config["layer_windows"]
    of_windows, of_states = (report[f"{name}_bytes_per_sequence"] for name in ("window", "state"))
    per_second = f"{report['read_bytes_per_s'] / 1e9:.1f} GB/s"
    facts = [
        ("model", report["name"]),
        ("path", report["path"]),
        ("revision", report["revision"]),
        ("quantized by", report["quantization"]),
        ("architecture", config["architecture"]),
        ("layers", config["num_layers"]),
        ("hidden size", f"{config['hidden_size']}, MLP {config['intermediate_size']}"),
        ("heads", _heads(config)),
        ("experts", experts and f"{experts['count']} of {experts['size']}, {experts['used']} for a token"),
        ("windows", f"{max(windows)} tokens in {len(windows) - windows.count(0)} layers" if windows else ""),
        ("vocabulary", f"{config['vocab_size']}, {output}"),
        ("context", f"{config['context_length']} tokens"),
        ("rotary base", f"{config['rope_base']:,.0f}{scaling}"),
        ("weights", f"{report['num_weights']:,} in {report['num_tensors']} tensors"),
        ("size", f"{size(report['bytes'])}, {report['bits_per_weight']:.2f} bits per weight"),
        ("prediction", _prediction(report["prediction"])),
        ("keys and values", f"{size(report['kv_bytes_per_token'])} per token of context, in {report['kv_format']}"),
        ("windows", f"{size(of_windows)} at most per sequence, of layers that keep their last rows" if of_windows else ""),
        ("sequence", f"{size(report['bytes_per_sequence'])} in all, of a sequence that fills the context"),
        ("recurrent state", f"{size(of_states)} per sequence, however long it is, and once more" if of_states else ""),
        ("processor", report["processor"]),
        ("memory", f"reads {per_second} with {report['threads']} threads (estimated in about a second)"),
        (
            "bound",
            f"{report['bound_tokens_per_s']:.1f} tokens/s: a token reads {size(report['read_bytes_per_token'])}; "
            "drafts and large caches may exceed it",
        ),
    ]
    if "verified" in report:
        facts += _verdicts(report["verified"], report["path"])
    print_facts(facts)
    emit("\n")
    print_table(
        ("format", "tensors>", "weights>", "size>", "bits per weight>"),
        [
            (name, str(f["num_tensors"]), f"{f['num_weights']:,}", size(f["bytes"]), f"{f['bits_per_weight']:.2f}")
            for name, f in report["formats"].items()
        ],
    )
    if "tensors" in report:
        emit("\n")
        print_table(
            ("tensor", "format", "shape", "size>"),
            [
                (t["name"], t["format"], " x ".join(map(str, t["shape"])), size(t["bytes"]))
                for t in [*report["tensors"], *(report["prediction"] or {}).get("tensors", [])]
            ],
        )
