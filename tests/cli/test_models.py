"""The commands about models and the machine: `models`, `pull`, `inspect`, `export`, `quantize`, `bench`, `info`."""

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import cpuspec
from cpuspec import environment, kernels, metrics
from cpuspec.backends import packed
from cpuspec.checkpoints import open_checkpoint
from cpuspec.cli import machine
from cpuspec.cli.console import size
from cpuspec.platform import SYSTEM, Core, Memory, Node, Topology
from tests.backends.models import missing
from tests.block_heads import make_block_head
from tests.command import CONTROL, ENDLESS, SMALL, ok, refused, report_of, run, small_model
from tests.processes import interrupt, started, wait_for
from tests.stand_in_hub import COMMIT, Repository, StandInHub, running
from tools.make_tiny_model import make_tiny_gguf

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def hub(model: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """A hub on this machine that has the tiny model, and one with less noise for drafts."""
    content = Path(model).read_bytes()
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    caches = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "OLLAMA_MODELS")
    for name in (*proxies, *map(str.upper, proxies), *caches, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "CPUSPEC_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    hub = StandInHub({"some/one": Repository({"tiny-Q8_0.gguf": content, "tiny-Q4_K_M.gguf": content})})
    with running(hub) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield hub


@pytest.fixture
def recipe(model: str, hub: StandInHub, cache: Path, tmp_path: Path) -> SimpleNamespace:
    """A user's recipe for the tiny model."""
    content = Path(model).read_bytes()
    (cache / "recipes").mkdir(parents=True)
    (cache / "recipes" / "tiny.toml").write_text(
        f'name = "tiny"\ndescription = "random"\narchitecture = "qwen2"\nparameters = 1000\nfile = "tiny.gguf"\n'
        f'bytes = {len(content)}\nsha256 = "{hashlib.sha256(content).hexdigest()}"\nlicence = "none"\n'
        f'[[sources]]\nkind = "huggingface"\nname = "some/one:Q8_0"\n'
    )
    return SimpleNamespace(path=snapshot(tmp_path) / "tiny-Q8_0.gguf", content=content)


def snapshot(tmp_path: Path) -> Path:
    return tmp_path / "hf" / "hub" / "models--some--one" / "snapshots" / COMMIT


def test_pull_fetches_once_and_prints_the_path(recipe: SimpleNamespace) -> None:
    first, second = run("pull", "tiny"), run("pull", "tiny")
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert first.stdout == second.stdout == f"{recipe.path}\n"
    assert recipe.path.read_bytes() == recipe.content
    assert "fetching tiny: licence none." in first.stderr
    assert "licence" not in second.stderr
    assert f"revision {COMMIT}" in first.stderr
    assert "already there" in second.stderr
    assert not CONTROL.search(first.stderr)


@pytest.mark.parametrize("name", ["tiny", "some/one:Q8_0"])
def test_pull_as_json_says_what_was_there_and_its_revision(recipe: SimpleNamespace, name: str) -> None:
    wanted = {"name": name, "path": str(recipe.path), "bytes": len(recipe.content), "revision": COMMIT}
    assert report_of("pull", name) == [wanted | {"was_there": False}]
    assert report_of("pull", name) == [wanted | {"was_there": True}]


def test_pull_checks_every_name_before_it_fetches_one(recipe: SimpleNamespace) -> None:
    assert run("pull", "tiny", "no-such-model").exit_code == 1
    assert not recipe.path.exists()


@pytest.mark.posix
def test_pull_of_a_chain_fetches_target_and_drafts(recipe: SimpleNamespace, cache: Path, tmp_path: Path, hub: StandInHub) -> None:
    (cache / "recipes" / "tiny-fast.toml").write_text(
        'name = "tiny-fast"\ndescription = "d"\ntarget = "tiny"\nlevels = ["auto", "match:some/one:Q4_K_M", "some/one:Q8_0"]\n'
    )
    paths = [recipe.path, snapshot(tmp_path) / "tiny-Q4_K_M.gguf", recipe.path]
    assert ok("pull", "tiny-fast", "tiny").split() == [str(path) for path in paths]
    assert hub.fetched() == ["tiny-Q8_0.gguf"]  # the other one has the same bytes


def test_a_heads_recipe_fetches_and_runs_it_with_its_target(
    recipe: SimpleNamespace, model: str, cache: Path, tmp_path: Path, hub: StandInHub
) -> None:
    made = make_block_head(tmp_path / "head", open_checkpoint(model).config, (0,), layout="speculators")
    files = {path.name: path.read_bytes() for path in made.path.iterdir()}
    hub.repositories["some/head"] = Repository(files)
    norm = json.loads(ok("inspect", model, "--json", "--threads", "1"))["norm_sha256"]
    (cache / "recipes" / "tiny-head.toml").write_text(
        f'name = "tiny-head"\ndescription = "d"\narchitecture = "dflash"\nlicence = "MIT"\n'
        f'[head]\ntarget = "tiny"\nnorm_sha256 = "{norm}"\n'
        f'[files]\n"model.safetensors" = "{hashlib.sha256(files["model.safetensors"]).hexdigest()}"\n'
        f'[[sources]]\nkind = "huggingface"\nname = "some/head:safetensors"\n'
    )
    assert report_of("generate", "a b a b", "-m", "tiny-head", *ENDLESS, "--max-tokens", "12")["draft"] == "auto,tiny-head"
    assert hub.fetched() == ["tiny-Q8_0.gguf", "config.json", "model.safetensors"]
    (row,) = [row for row in report_of("models") if row["name"] == "tiny-head"]
    assert (row["source"], row["target"], row["fetched"]) == ("head", "tiny", True)
    assert "tiny-head" in ok("models")


def test_a_hub_name_can_be_generated_with_and_json_has_its_revision(hub: StandInHub) -> None:
    hub.repositories["some/one"].files |= {"mmproj-x-Q8_0.gguf": b"eyes"}
    result = run("generate", "hello", "-m", "some/one:Q8_0", *ENDLESS, "--max-tokens", "2", "--json")
    shown = json.loads(result.stdout)
    assert (shown["model"], shown["revision"]) == ("some/one:Q8_0", COMMIT)
    assert hub.fetched() == ["tiny-Q8_0.gguf"]
    assert report_of("inspect", "some/one:Q8_0")["revision"] == COMMIT
    assert COMMIT in ok("inspect", "some/one:Q8_0")


def test_models_lists_recipes_and_whether_they_are_fetched(recipe: SimpleNamespace) -> None:
    assert re.search(r"^tiny .* no ", ok("models"), re.M)
    ok("pull", "tiny")
    assert re.search(r"^tiny .* yes ", ok("models"), re.M)
    rows = {row["name"]: row for row in report_of("models")}
    assert {"smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct", "tiny"} <= set(rows)
    assert rows["qwen2.5-coder-1.5b-edit"]["target"] == "qwen2.5-coder-1.5b-instruct"
    assert "qwen2.5-coder-1.5b-edit" in ok("models")
    assert (rows["tiny"]["fetched"], rows["smollm2-135m-instruct"]["fetched"]) == (True, False)
    assert (rows["tiny"]["path"], rows["smollm2-135m-instruct"]["path"]) == (str(recipe.path), None)
    # The hub's cache is shown, too, under a name that -m takes.
    assert {"source": "huggingface", "path": str(recipe.path)}.items() <= rows["some/one:Q8_0"].items()
    assert re.search(rf"^some/one:Q8_0 .* huggingface +{re.escape(str(recipe.path))}$", ok("models"), re.M)


def test_a_recipe_that_cannot_be_read_costs_a_line_of_models_and_nothing_else(recipe: SimpleNamespace, cache: Path) -> None:
    (cache / "recipes" / "broken.toml").write_text("name = ")
    result = run("models")
    assert result.exit_code == 0
    assert [line for line in result.stderr.splitlines() if "broken.toml is not TOML" in line] == result.stderr.splitlines()
    assert len(result.stderr.splitlines()) == 1
    assert run("pull", "tiny").exit_code == 0
    assert run("pull", "broken").exit_code == 1


@pytest.mark.usefixtures("bandwidth")
@pytest.mark.parametrize("tied", [True, False])
def test_inspect_adds_up(tmp_path: Path, tied: bool) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", "qwen3", weight_format="q4_0", embed_format="q8_0", tied=tied, **SMALL)
    report = json.loads(ok("inspect", str(path), "--json", "--tensors", "--threads", "3"))
    tensors = report["tensors"]
    assert report["bytes"] == sum(t["bytes"] for t in tensors) == sum(f["bytes"] for f in report["formats"].values())
    assert report["num_tensors"] == len(tensors) == sum(f["num_tensors"] for f in report["formats"].values())
    assert report["bits_per_weight"] == pytest.approx(8 * report["bytes"] / report["num_weights"])
    assert report["formats"]["q4_0"]["bits_per_weight"] == 4.5
    embed = next(t["bytes"] for t in tensors if t["name"] == "embed")
    assert report["read_bytes_per_token"] == report["bytes"] - (0 if tied else embed)
    assert report["bound_tokens_per_s"] == pytest.approx(3e9 / report["read_bytes_per_token"])
    assert report["kv_bytes_per_token"] == 2 * 1 * 1 * 32 * 2
    shown = ok("inspect", str(path), "--tensors")
    assert all(text in shown for text in ("qwen3", "q8_0", "layers.0.down", "tokens/s", "4.50"))
    assert "layers.0.down" not in ok("inspect", str(path))


def test_inspect_shows_experts_and_windows(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", "gpt-oss", num_layers=3)
    shown = " ".join(ok("inspect", str(path), "--threads", "1").split())
    assert "experts 8 of 128, 3 for a token windows 8 tokens in 2 layers" in shown


def test_inspect_tells_of_a_layer_for_prediction(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", num_layers=3, predicts=True)
    found = json.loads(ok("inspect", str(path), "--json", "--tensors", "--threads", "1"))
    assert found["prediction"]["bytes"] == sum(tensor["bytes"] for tensor in found["prediction"]["tensors"])
    assert not any("nextn" in tensor["name"] for tensor in found["tensors"])
    shown = " ".join(ok("inspect", str(path), "--tensors", "--threads", "1").split())
    assert "in 16 tensors for multi-token prediction: it drafts by --draft mtp, or where auto chooses it" in shown
    assert "blk.2.nextn.eh_proj.weight" in shown


@pytest.mark.posix
@pytest.mark.usefixtures("bandwidth")
def test_inspect_verifies_the_file_and_packed_weights(recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_SMALLEST_BYTES", 0)
    ok("pull", "tiny")
    checkpoint = open_checkpoint(recipe.path)
    matrices = {name: tensor for name, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}
    packed.packed_matrices(checkpoint.name, matrices, 1)
    [(path, _)] = packed.packed_files()
    verified = report_of("inspect", "tiny", "--verify")["verified"]
    assert verified["files"][0]["sha256"] == verified["recipe_sha256"] == hashlib.sha256(recipe.content).hexdigest()
    assert (verified["recipe"], verified["packed"], verified["passed"]) == ("tiny", [{"path": str(path), "sound": True}], True)
    shown = ok("inspect", "tiny", "--verify")
    assert "as the recipe tiny has it" in shown
    assert "sound: " in shown

    def flip_last_bit(file: Path) -> None:
        status, content = file.stat(), bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    flip_last_bit(path)
    found = run("inspect", "tiny", "--verify")
    assert found.exit_code == 1
    assert "DAMAGED, and removed: the next start packs anew" in found.stdout
    assert not path.exists()
    assert "none are kept" in ok("inspect", "tiny", "--verify")
    flip_last_bit(recipe.path)
    found = run("inspect", "tiny", "--verify")
    assert found.exit_code == 1
    assert "DAMAGED: tiny is " in found.stdout
    assert json.loads(run("inspect", "tiny", "--verify", "--json").stdout)["verified"]["passed"] is False


@pytest.mark.usefixtures("bandwidth")
def test_files_that_no_recipe_knows_have_a_hash_and_no_verdict(model: str) -> None:
    verified = report_of("inspect", model, "--verify")["verified"]
    assert verified["files"][0]["sha256"] == hashlib.sha256(Path(model).read_bytes()).hexdigest()
    assert (verified["recipe"], verified["recipe_sha256"], verified["passed"]) == (None, None, True)
    assert "no recipe knows these files" in ok("inspect", model, "--verify")


def test_bandwidth_is_the_best_pass_over_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.1, 0.6, 0.7, 0.9, 1.5])  # start, then begin and end of two passes, then past the second
    monkeypatch.setattr(metrics, "perf_counter", lambda: next(times))
    assert metrics.read_bandwidth(2, num_bytes=4096) == pytest.approx(4096 / 0.2)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.00 kB"), (46080, "46.1 kB"), (98_362_432, "98.4 MB"), (999_600_000, "1.00 GB")],
)
def test_sizes_are_given_in_decimal_units(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.skipif(bool(missing("onnxruntime")), reason=missing("onnxruntime"))
def test_export_prints_the_file_that_it_wrote(model: str, tmp_path: Path) -> None:
    out = tmp_path / "model.onnx"
    result = run("export", model, str(out))
    assert (result.exit_code, result.stdout) == (0, f"{out}\n")
    assert f"wrote {size(sum(path.stat().st_size for path in tmp_path.glob('model.onnx*')))}" in result.stderr
    again = run("export", model, str(out))
    assert again.exit_code == 1
    assert "exists; remove it" in again.stderr


SHORT = ("-p", "9", "-n", "2", "-r", "2", "--rows-depth", "3", "--backend", "numpy")


@pytest.mark.usefixtures("bandwidth")
def test_a_chain_is_inspected_and_measured_as_its_target(model: str, tmp_path: Path) -> None:
    recipe = tmp_path / "fast.toml"
    recipe.write_text(f'name = "fast"\ndescription = "x"\ntarget = \'{model}\'\nlevels = ["ngram@2"]\n')
    chain, target = (json.loads(ok("inspect", one, "--json", "--threads", "1")) for one in (str(recipe), model))
    assert chain["config"] == target["config"]
    assert report_of("bench", str(recipe), *SHORT, "--rows", "1")["rows"][0]["rows"] == 1


@pytest.mark.usefixtures("bandwidth")
def test_bench_as_json_is_what_scripts_rely_on(model: str) -> None:
    options = ("--rows", "1,2,4,8,16", "--depth", "0,5")
    batched = report_of("bench", model, *SHORT, "--rows", "none", "--sequences", "1,3")
    assert [(one["name"], one["tokens"], one["sequences"]) for one in batched["more"]] == [("tg2 x 3", 6, 3)]
    result = run("bench", model, *SHORT, *options, "--json")
    shown = json.loads(result.stdout)
    assert [row["rows"] for row in shown["rows"]] == [1, 2, 4, 8, 16]
    assert all(row["median_s"] > 0 and row["depth"] == 3 for row in shown["rows"])
    assert (shown["prefill"]["tokens"], shown["decode"]["tokens"]) == (9, 2)
    assert {one["weight_bytes"] for one in (shown["decode"], *shown["rows"])} == {shown["weight_bytes"]}
    assert all(shown[name]["tokens_per_s"] == shown[name]["tokens"] / shown[name]["median_s"] for name in ("prefill", "decode"))
    assert [one["name"] for one in shown["more"]] == ["pp9 @ d5", "tg2 @ d5"]
    assert (shown["model"], shown["backend"], shown["threads"], shown["repetitions"]) == (model, "numpy", 1, 2)
    assert shown["read_bytes_per_s"] == 1e9
    assert shown["kv_format"] == "f16"
    assert "round 2 of 2" in result.stderr
    assert not CONTROL.search(result.stderr)
    assert json.loads(ok("bench", model, *SHORT, *options, "-o", "json")).keys() == shown.keys()


@pytest.mark.skipif(bool(missing("torch")), reason=missing("torch"))
@pytest.mark.usefixtures("bandwidth")
def test_bench_measures_a_backend_with_its_settings_and_says_which(model: str) -> None:
    options = (*SHORT, "--rows", "1", "--backend", "torch", "--device", "cpu", "--dtype", "bf16", "--weights", "values")
    shown = report_of("bench", model, *options)
    assert (shown["backend"], shown["device"], shown["dtype"], shown["activations"]) == ("torch", "cpu", "bf16", "auto")
    assert "torch backend with dtype bf16, weights values, " in ok("bench", model, *options).splitlines()[0]
    assert "is a setting of the torch backend" in run("bench", model, *SHORT, "--dtype", "bf16").stderr


@pytest.mark.usefixtures("bandwidth")
def test_bench_prints_markdown_or_csv_of_the_same_workloads(model: str) -> None:
    lines = ok("bench", model, *SHORT, "--rows", "1,3").splitlines()
    tables = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert [cells[0] for cells in tables if not cells[0].startswith("-")] == ["test", "pp9", "tg2", "rows @ d3", "1", "3"]
    assert len({len(line) for line in lines[2:6]}) == 1
    assert " ± " in tables[2][1]
    assert [cells.index("weights read") for cells in (tables[0], tables[4])] == [3, 4]
    shown = list(csv.DictReader(io.StringIO(ok("bench", model, *SHORT, "--rows", "1,3", "-o", "csv"))))
    assert [row["name"] for row in shown] == ["pp9", "tg2", "1 row @ d3", "3 rows @ d3"]
    assert all(float(row["median_s"]) > 0 and row["model"] == model for row in shown)


@pytest.mark.usefixtures("bandwidth")
def test_bench_leaves_out_what_is_not_asked_for(model: str) -> None:
    for asked, absent in ((("-p", "0", "-n", "0", "--rows", "2"), "tokens/s"), (("--rows", "none"), "rows @")):
        assert absent not in ok("bench", model, *SHORT, *asked)
    shown = report_of("bench", model, *SHORT, "-p", "0", "-n", "0", "--rows", "2")
    assert (shown["prefill"], shown["decode"], shown["rows"][0]["over_one_row"]) == (None, None, None)


def test_ctrl_c_ends_a_bench_with_130_and_no_half_results(model: str) -> None:
    with started("bench", model, *SHORT, "-r", "1000000") as process:
        wait_for(process.stderr, b"round 1 of")
        interrupt(process)
        shown, errors = process.communicate()
    assert process.returncode == 130
    assert shown == b""
    assert b"interrupted" in errors
    assert b"Traceback" not in errors


def test_info_prints_the_instructions_that_multiply_a_format() -> None:
    one, four = (ok("info", "--kernel", "q4_0", "--rows", rows).splitlines() for rows in ("1", "4"))
    assert ".LBB0_2:" in one  # loops
    assert len(one) + 30 < len(four)
    refused("info", "--kernel", "q4_9", code=1, message="format 'q4_9' is not known")


@pytest.mark.usefixtures("bandwidth")
def test_info_says_what_was_chosen_and_why(cache: Path) -> None:
    shown = report_of("info")
    assert (shown["isa"], shown["lookup_isa"]) == (kernels.isa.dot_isa(), kernels.isa.lookup_isa())
    assert shown["tile_registers"] == kernels.isa.has_tiles()
    assert set(shown["features"]) == kernels.isa.features()
    assert 1 <= shown["default_threads"] == shown["usable_cores"] <= shown["logical_cpus"]
    assert shown["read_bandwidth"] == [{"threads": n, "bytes_per_s": 1e9 * n} for n in sorted({1, shown["usable_cores"]})]
    assert sum(one["count"] for one in shown["cores"]) >= shown["usable_cores"]
    assert shown["versions"]["cpuspec"] == cpuspec.__version__
    assert shown["versions"].keys() - {"commit"} == {"cpuspec", "python", "numpy", "numba", "llvmlite"}
    assert (shown["cache_directory"], shown["kernel_directory"]) == (str(cache), str(kernels.kernel_directory()))
    assert (shown["kernels_compiled"], shown["kernel_bytes"], shown["models"]) == (False, 0, [])
    table = ok("info")
    assert all(str(text) in table for text in (shown["processor"], shown["isa_reason"], shown["kernel_directory"], "not compiled"))


@pytest.mark.usefixtures("bandwidth", "cache")
def test_info_tells_unequal_cores_a_quota_and_where_weights_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = (*(Core((n,), 1.0, "core") for n in range(6)), *(Core((n,), 0.45, "atom") for n in range(6, 14)))
    machine = Topology(cores, (Node(0, tuple(range(6)), 1 << 30), Node(1, tuple(range(6, 14)), None)), 2.5)
    monkeypatch.setattr("cpuspec.cli.machine.SYSTEM", replace(SYSTEM, topology=lambda: machine))
    shown = report_of("info")
    assert shown["cores"] == [{"kind": "core", "speed": 1.0, "count": 6}, {"kind": "atom", "speed": 0.45, "count": 8}]
    assert (shown["cpu_quota"], shown["nodes_in_use"]) == (2.5, [0, 1])
    table = " ".join(ok("info").split())
    fast, slow = "6 cores of kind core, 100% of the top speed", "8 cores of kind atom, 45%"
    assert all(text in table for text in (fast, slow, "a quota of 2.5", "each of 2 memory nodes"))


@pytest.mark.usefixtures("bandwidth")
def test_info_lists_what_is_kept(recipe: SimpleNamespace, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUSPEC_PACKED_GB", "1.5")
    ok("pull", "tiny")
    for path, num_bytes in ((kernels.kernel_directory() / "run.o", 5), (cache / "packed" / "tiny-0.packed", 2000)):
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(num_bytes))
    shown, table = report_of("info"), ok("info")
    assert (shown["kernels_compiled"], shown["kernel_bytes"]) == (True, 5)
    assert shown["models"] == [{"name": "tiny", "bytes": len(recipe.content), "path": str(recipe.path)}]
    assert (shown["packed_directory"], shown["packed_limit_bytes"]) == (str(cache / "packed"), 1_500_000_000)
    assert shown["packed"] == [{"name": "tiny-0.packed", "bytes": 2000}]
    assert all(text in table for text in (str(recipe.path), "packed (2.00 kB of at most 1.50 GB)", "tiny-0.packed (2.00 kB)"))


@pytest.mark.parametrize(
    ("isa", "features", "reason"),
    [
        ("avx512_vnni", {"avx512vnni", "avxvnni"}, "this processor has avx512vnni"),
        ("avx_vnni", {"avx2", "avxvnni"}, "this processor has avxvnni and no avx512vnni"),
        ("generic", {"avx2"}, "this processor has no avx512vnni or avxvnni"),
    ],
)
def test_the_choice_of_kernels_has_its_reason(
    monkeypatch: pytest.MonkeyPatch, bandwidth: None, isa: str, features: set[str], reason: str
) -> None:
    monkeypatch.setattr(kernels.isa, "dot_isa", lambda: isa)
    monkeypatch.setattr(kernels.isa, "features", lambda: frozenset(features))
    assert report_of("info")["isa_reason"] == reason
    assert f"{isa}: {reason}" in ok("info")


def test_what_a_machine_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch, bandwidth: None) -> None:
    for module in (machine, environment):
        monkeypatch.setattr(module, "SYSTEM", replace(SYSTEM, memory=Memory))
    shown = report_of("info")
    assert shown["memory_bytes"] is shown["available_memory_bytes"] is shown["memory_limit_bytes"] is None
    assert re.search(r"^memory +unknown$", ok("info"), re.M)


@pytest.mark.usefixtures("kept_kernels")
def test_quantize_prints_its_mix_as_a_table_and_as_json_and_tells_of_own_formats(tmp_path: Path) -> None:
    model, text = small_model(tmp_path / "tiny.gguf", weight_format="f16", num_layers=2), tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog ran to the door. " * 30, "utf-8")
    quantize, candidates = ("quantize", model, str(tmp_path / "out.gguf")), "mxfp4,q5_0,q8_0"
    options = ["--bits-per-weight", "5.5", "--candidates", candidates, "--calibration", str(text), "-c", "32", "--chunks", "4"]
    mix = report_of(*quantize, *options)["matrices"]
    assert set(mix.values()) <= set(candidates.split(","))
    lines = [line.split() for line in ok(*quantize, *options).splitlines()]
    parts = ["q", "k", "v", "o", "gate", "up", "down"]
    first, second = ([mix[f"layers.{layer}.{part}"] for part in parts] for layer in (0, 1))
    rows = [["0", "to", "1", *first]] if first == second else [["0", *first], ["1", *second]]
    assert all(line in lines for line in (["layers", *parts], *rows, ["embed", mix["embed"]]))
    refused(*quantize, "--type", "q4_0", "--bits-per-weight", "4.5", code=2, message="give no type")
    assert "llama.cpp does not read this file" in run(*quantize, "--type", "nl4_g32").stderr
