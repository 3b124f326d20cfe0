"""The side-by-side benchmark reads programs rightly, computes ratios round by round, and never drops a peer in silence."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import instruction_sets
import llama_cpp_build
import peers
import peers_report
import pytest
import record
from instruction_sets import FEATURES, NATIVE, build_text, held_back, of_llama_cpp, read_instruction_sets
from llama_cpp_build import Build, find_build
from peers import FIGURES
from peers_engines import Worker, parse_forward_cost, parse_llama_bench
from peers_errors import FigureError, PeerError
from peers_report import DECODE, Figure, report, summarize
from record import Rounds

from cpuspec.checkpoints import open_checkpoint
from tools.make_readme_tables import END, START, with_tables
from tools.make_tiny_model import make_tiny_gguf

BENCHMARKS = Path(peers.__file__).parent
WORKERS = BENCHMARKS / "peer_workers"

FORWARD_COST = """model.gguf th=2 load 0.1s size 97 MB
rep 0 pp0 0.0 tok/s  tg64 153.75 tok/s (median step 154.74, best step 161.99)
N: med_ms(min_ms) x_of_N1:  1: 6.4(6.2) x1.00,1.00  2: 14.8(12.5) x2.33,2.02  16: 53.5(48.5) x8.41,7.85
"""

# An engine whose logits depend on every token fed so far; REMEMBERS is put in its place.
FAKE_WORKER = """
import sys
sys.path.insert(0, WORKERS)
import numpy as np
from serving import serve

class Fake:
    def __init__(self):
        self.reset()
    def reset(self):
        self.sum = np.zeros(50, np.float32)
    def feed(self, tokens, all_logits):
        print("a library's chatter")
        rows = []
        for token in tokens:
            kept = self.sum if REMEMBERS else 0
            self.sum = kept + np.random.default_rng(token).standard_normal(50).astype(np.float32)
            rows.append(self.sum)
        return np.array(rows if all_logits else rows[-1:])

def load(model, threads, capacity):
    if model.name == "missing":
        import a_package_that_is_not_there
    if model.name == "crash":
        print("out of luck", file=sys.stderr, flush=True)
        sys.exit(3)
    return Fake(), f"fake {threads} {capacity}"

serve(load, needs="fake-package")
"""


def make_worker(directory, *, remembers=True, timeout=900.0):
    script = directory / "worker.py"
    text = FAKE_WORKER.replace("WORKERS", repr(str(WORKERS))).replace("REMEMBERS", str(remembers))
    script.write_text(text, "utf-8")
    return Worker(Path(sys.executable), script, [], [1, 3], timeout)


def compared(samples):
    """A summary in which nothing is known of bytes."""
    return summarize(samples, {}, [1e9] * 2)


def rounds(**seconds):
    """Samples of two rounds from pairs."""
    return [{name.replace("_", " "): pair[number] for name, pair in seconds.items()} for number in range(2)]


def test_forward_cost_gives_median_seconds_of_the_rows_it_lists():
    samples = parse_forward_cost(FORWARD_COST, [1, 2, 4, 16])
    assert samples == pytest.approx({"1 row": 0.0064, "2 rows": 0.0148, "16 rows": 0.0535})


def test_llama_bench_gives_the_seconds_of_a_token_and_its_settings():
    test = {"avg_ns": 2_500_000_000, "avg_ts": 50.0, "build_number": 7, "type_k": "f16", "type_v": "f16", "flash_attn": -1}
    assert parse_llama_bench(json.dumps([test])) == (0.02, "llama.cpp 7, keys in f16, values in f16, flash attention auto")


def test_ratios_are_taken_round_by_round_and_above_one_where_cpuspec_is_faster():
    # Both slow down fourfold in the second round: a ratio of medians over all rounds would not be seen to stay the same.
    summary = compared({"cpuspec": rounds(decode=(1.0, 4.0)), "torch": rounds(decode=(2.0, 8.0))})
    ratio = summary["ratios"]["decode"]["torch"]
    assert (ratio["median"], ratio["min"], ratio["max"], ratio["rounds"]) == (2.0, 2.0, 2.0, [2.0, 2.0])


def test_rates_are_of_decode_and_prefill_and_milliseconds_of_forwards():
    figures = compared({"cpuspec": rounds(decode=(0.02, 0.02), prefill=(0.004, 0.004), **{"4_rows": (0.01, 0.03)})})["figures"]
    assert figures["decode"]["cpuspec"]["median"] == 50
    assert figures["prefill"]["cpuspec"]["median"] == 250
    assert figures["4 rows"]["cpuspec"]["median"] == 20.0


def test_the_best_peer_is_the_fastest_of_each_figure():
    samples = {
        "cpuspec": rounds(decode=(1.0, 1.0), prefill=(1.0, 1.0)),
        "torch": rounds(decode=(9.0, 9.0), prefill=(0.5, 0.5)),
        "openvino": rounds(decode=(3.0, 3.0), prefill=(2.0, 2.0)),
    }
    ratios = compared(samples)["ratios"]
    assert (ratios["decode"]["best"]["peer"], ratios["decode"]["best"]["median"]) == ("openvino", 3.0)
    assert (ratios["prefill"]["best"]["peer"], ratios["prefill"]["best"]["median"]) == ("torch", 0.5)


def test_the_fastest_rounds_are_compared_whenever_they_were_and_whoever_had_them():
    samples = {"cpuspec": rounds(decode=(1.0, 8.0)), "torch": rounds(decode=(9.0, 2.0)), "openvino": rounds(decode=(4.0, 4.0))}
    best = compared(samples)["ratios"]["decode"]["best"]
    assert (best["peer"], best["fastest"]) == ("openvino", 2.0)


def test_a_figure_that_a_peer_lacks_in_any_round_is_left_out_of_its_figures_and_ratios():
    samples = {
        "cpuspec": rounds(decode=(1.0, 1.0), prefill=(1.0, 1.0)),
        "llama.cpp": [{"decode": 2.0, "prefill": 1.0}, {"decode": 2.0}],
    }
    summary = compared(samples)
    assert "llama.cpp" in summary["figures"]["decode"]
    assert "llama.cpp" not in summary["figures"]["prefill"]
    assert "prefill" not in summary["ratios"]


def test_the_cost_of_rows_is_over_one_row_of_the_same_engine_and_round():
    samples = {"cpuspec": rounds(**{"1_row": (1.0, 2.0), "4_rows": (1.5, 3.0)})}
    assert compared(samples)["over_one_row"]["cpuspec"]["4 rows"]["rounds"] == [1.5, 1.5]


def test_shares_are_of_the_same_round():
    samples = {
        "cpuspec": rounds(decode=(0.1, 0.2), **{"decode,_busy": (0.2, 0.2)}),
        "llama.cpp": rounds(decode=(0.2, 0.4), **{"decode,_busy": (0.8, 1.6)}),
        "torch": rounds(decode=(0.4, 0.4)),
    }
    summary = summarize(samples, {"cpuspec": 10**8, "llama.cpp": 10**8}, [2e9, 1e9])
    assert {engine: share["rounds"] for engine, share in summary["bandwidth_share"].items()} == {
        "cpuspec": [0.5, 0.5],
        "llama.cpp": [0.25, 0.25],
    }
    assert {engine: share["rounds"] for engine, share in summary["busy_share"].items()} == {
        "cpuspec": [0.5, 1.0],
        "llama.cpp": [0.25, 0.25],
    }


def test_the_report_names_every_engine_and_why_one_was_left_out():
    samples = {"cpuspec": rounds(decode=(1.0, 1.0), **{"1_row": (1.0, 1.0)}), "llama.cpp": rounds(decode=(2.0, 2.0))}
    head = {"model": "m.gguf", "threads": 2, "rounds": 2, "load_average": [0.5, 1.0], "stolen": [0.0, 0.2]}
    head |= {"machine": {"processor": "one", "cores": 2, "isa": "generic"}, "read_bytes_per_s": record.spread([2e10])}
    part = {"engines": {"cpuspec": "ours", "llama.cpp": "theirs"}, "failed": {"torch": "No module named 'torch'"}}
    part |= {"instructions": {"cpuspec": "amx", "llama.cpp": "avx512_vnni without amx"}, **compared(samples)}
    text = report(head | {"instruction_sets": {"native": part}})
    assert "**native: cpuspec with amx, llama.cpp built for avx512_vnni without amx**" in text
    assert "| decode | 2.00 (2.00 to 2.00) | llama.cpp 2.00 | 2.00 |" in text
    assert "| 1 row, ms | 1000.0 (1000.0 to 1000.0) | - |" in text
    assert "torch was left out: No module named 'torch'" in text
    assert "by round: 0%, 20%" in text
    assert "not quiet" in text
    assert "not quiet" not in report(head | {"stolen": [0.0, 0.01], "instruction_sets": {"native": part}})


def test_options_are_read():
    assert peers.read_names("torch, llama.cpp,torch") == ["torch", "llama.cpp"]
    assert peers.read_rows("16,1,4,4") == [1, 4, 16]
    assert peers.read_figures("decode", "4096,64") == [Figure("decode"), Figure("decode", 4096), Figure("decode", 64)]
    assert peers.read_interpreters([f"torch={sys.executable}"]) == {"torch": Path(sys.executable)}


def test_ways_of_llama_cpp_differ_in_arguments_threads_and_programs(tmp_path):
    checkpoint = open_checkpoint(make_tiny_gguf(tmp_path / "tiny.gguf"))
    for name in ("bin", "fork"):
        (tmp_path / name).mkdir()
        program, test = tmp_path / name / "llama-bench", {"build_number": 7, "type_k": "f16", "type_v": "f16", "flash_attn": 0}
        text = json.dumps([{**test, "avg_ts": 50.0}])
        program.write_text(f"#!/bin/sh\necho $0 $* >> {tmp_path}/calls\necho '{text}'\n", "utf-8")
        program.chmod(0o755)
    launcher = peers._Launcher(checkpoint, tmp_path, 2, [], [1], 10, tmp_path / "bin", None, {}, tmp_path / "fork")
    for name in peers.LLAMA_PEERS:
        assert launcher.engine(NATIVE, name, prepare_only=False).measure(Figure("decode", busy=True)) == {"decode, busy": 0.02}
    calls = [call.split() for call in (tmp_path / "calls").read_text("utf-8").splitlines()]
    assert [Path(call[0]).parent.name for call in calls] == ["bin", "bin", "bin", "fork"]
    assert [call[call.index("-t") + 1] for call in calls] == ["2", "2", "1", "2"]
    assert ["--poll" in call for call in calls] == [False, True, False, False]
    with pytest.raises(PeerError, match="none can be spared"):
        replace(launcher, threads=1).engine(NATIVE, "llama.cpp-spare-core", prepare_only=False)


def test_a_worker_is_measured_through_the_chatter_of_its_libraries(tmp_path):
    worker = make_worker(tmp_path)
    try:
        figures = [*FIGURES.values(), Figure("decode", 600)]
        worker.load(tmp_path / "model", 2, 50, figures)
        assert worker.about == f"fake 2 {600 + DECODE + 16}"
        samples = [worker.measure(figure) for figure in figures]
    finally:
        worker.close()
    names = [["decode"], ["prefill"], ["1 row", "3 rows"], ["decode, busy"], ["decode @ d600"]]
    assert [list(sample) for sample in samples] == names
    assert all(seconds > 0 for sample in samples for seconds in sample.values())


class FakePeer:
    """Takes one second for everything until its n-th figure, then fails."""

    about, instructions = "fake", "avx2"

    def __init__(self, lasts=100):
        self.lasts, self.closed = lasts, False

    def measure(self, figure):
        self.lasts -= 1
        if self.lasts < 0:
            raise PeerError("it fell over")
        return {figure.name: 1.0}

    def close(self):
        self.closed = True


def test_a_peer_that_fails_on_the_way_is_reported_and_the_others_go_on():
    falling = FakePeer(lasts=4)
    engines = {("avx2", "cpuspec"): FakePeer(), ("avx2", "torch"): falling, ("native", "torch"): FakePeer()}
    failed = {}
    figures = [FIGURES["decode"], FIGURES["busy"], Figure("decode", 9)]
    samples = peers.measure(engines, Rounds(3, 1), figures, failed)
    assert failed == {("avx2", "torch"): "it fell over"}
    assert falling.closed
    assert list(engines) == list(samples) == [("avx2", "cpuspec"), ("native", "torch")]
    names = [figure.name for figure in figures]
    assert all(len(ones) == 3 and all(list(one) == names for one in ones) for ones in samples.values())


def test_a_figure_that_fails_is_reported_and_not_asked_again_and_the_other_figures_go_on():
    asked = []

    class Partial(FakePeer):
        def measure(self, figure):
            asked.append(figure.name)
            if figure.busy:
                raise FigureError("its program was ended by SIGILL")
            return super().measure(figure)

    engines, failed = {("avx2", "cpuspec"): FakePeer(), ("avx2", "llama.cpp"): Partial()}, {}
    samples = peers.measure(engines, Rounds(3, 1), [FIGURES["decode"], FIGURES["busy"]], failed)
    assert failed == {("avx2", "llama.cpp, decode, busy"): "its program was ended by SIGILL"}
    assert asked == ["decode", "decode, busy", "decode", "decode"]
    assert [list(one) for one in samples["avx2", "llama.cpp"]] == [["decode"]] * 3
    assert [list(one) for one in samples["avx2", "cpuspec"]] == [["decode", "decode, busy"]] * 3


def test_every_engine_has_its_turn_with_each_instruction_set_in_each_round():
    turns = []

    class Noting(FakePeer):
        def __init__(self, key):
            super().__init__()
            self.key = key

        def measure(self, figure):
            turns.append((figure.name, self.key))
            return super().measure(figure)

    keys = [(isa, name) for isa in ("native", "avx2") for name in ("cpuspec", "llama.cpp")]
    peers.measure({key: Noting(key) for key in keys}, Rounds(2, 1), [FIGURES["decode"], FIGURES["prefill"]], {})
    for start, figure in ((0, "decode"), (4, "prefill"), (8, "decode"), (12, "prefill")):
        assert sorted(turns[start : start + 4]) == sorted((figure, key) for key in keys)
    assert turns[0] != turns[8]  # who begins changes


def make_program(path, output):
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n", "utf-8")
    path.chmod(0o755)


def test_a_run_from_the_command_line_ends_in_readmes_table(tmp_path):
    make_tiny_gguf(tmp_path / "tiny.gguf", context_length=1024)
    test = {"avg_ts": 50.0, "build_number": 7, "type_k": "f16", "type_v": "f16", "flash_attn": 0}
    make_program(tmp_path / "llama-bench", json.dumps([test]))
    make_program(tmp_path / "forward-cost", "N: 1: 10.0(9.0) 2: 11.0(9.0)  4: 12.0(9.0)  8: 13.0(9.0)  16: 14.0(9.0)")
    options = ("--peers", "llama.cpp", "--llama-cpp", tmp_path, "--rounds", "1", "--json", tmp_path / "result.json")
    figures = ("--figures", "decode,prefill,forwards,busy", "--depth", "700")
    command = [sys.executable, BENCHMARKS / "peers.py", tmp_path / "tiny.gguf", *options, *figures]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text("utf-8"))
    part = result["instruction_sets"]["native"]
    own = instruction_sets.in_use()
    assert part["instructions"] == {"cpuspec": own, "llama.cpp": "unknown instructions"}  # these programs have no library to ask
    names = ["decode", "prefill", *(peers_report.rows_name(rows) for rows in (1, 2, 4, 8, 16)), "decode, busy", "decode @ d700"]
    assert list(part["ratios"]) == names
    assert part["figures"]["decode @ d700"]["llama.cpp"]["median"] == 50
    assert str(tmp_path) not in json.dumps(result)
    text = with_tables(f"{START}\n{END}\n", {"tiny": result})
    assert f"**cpuspec with {own}, llama.cpp built for unknown instructions**" in text
    assert "| the same, llama.cpp | 1.10 / 1.20 / 1.30 / 1.40 |" in text
    assert "decoding at a depth of 700 tokens, over llama.cpp" in text


@pytest.mark.parametrize("tied", [True, False])
def test_a_token_reads_every_matrix_but_the_embedding_of_an_untied_model(tmp_path, tied):
    checkpoint = open_checkpoint(make_tiny_gguf(tmp_path / "tiny.gguf", weight_format="q4_0", vocab_size=384, tied=tied))
    hidden, intermediate, kv, layers = 256, 512, 128, 2
    weights = 384 * hidden + layers * (2 * hidden * hidden + 2 * kv * hidden + 3 * hidden * intermediate)
    assert peers.weight_bytes(checkpoint) == weights * 18 // 32


def test_a_token_of_a_mixture_reads_the_experts_that_it_goes_through(tmp_path):
    paths = [make_tiny_gguf(tmp_path / f"{used}.gguf", "qwen3moe", num_experts=8, num_used=used) for used in (2, 3)]
    two, three = map(open_checkpoint, paths)
    of_experts = sum(tensor.num_bytes for tensor in two.tensors.values() if len(tensor.shape) == 3)
    assert of_experts > 0
    assert peers.weight_bytes(three) - peers.weight_bytes(two) == of_experts // 8


# ----------------------------------------------------------------------------------------------------------- instruction sets

SYSTEM_INFO = "CPU : SSE3 = 1 | AVX = 1 | {}AVX2 = 1 | F16C = 1 | LLAMAFILE = 1 | REPACK = 1 | "


@pytest.fixture
def laptop(monkeypatch):
    """A processor with AVX-VNNI and nothing wider."""
    monkeypatch.setattr(instruction_sets.isa, "features", lambda: frozenset((*FEATURES["avx_vnni"], "bmi2")))
    monkeypatch.setattr(instruction_sets.isa, "dot_isa", lambda: "avx_vnni")
    monkeypatch.setattr(instruction_sets.isa, "has_tiles", lambda: False)


def test_instruction_sets_are_read_in_the_order_given(laptop):
    assert read_instruction_sets("native, avx2,avx_vnni,avx2") == ["native", "avx2", "avx_vnni"]


def test_features_are_held_back_only_below_what_the_processor_has(laptop):
    assert held_back(NATIVE) == held_back("avx_vnni") == {}
    assert held_back("avx2")["NUMBA_CPU_FEATURES"].split(",") == [f"+{name}" for name in FEATURES["avx2"]]


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ("", "avx2"),
        ("AVX_VNNI = 1 | ", "avx_vnni"),
        ("AVX512 = 1 | ", "avx512"),
        ("AVX_VNNI = 1 | AVX512 = 1 | AVX512_VNNI = 1 | ", "avx512_vnni"),
        ("AVX512 = 1 | AVX512_VNNI = 1 | AMX_INT8 = 1 | ", "amx"),
        ("AVX512 = 0 | ", "avx2"),
    ],
)
def test_llama_cpps_instruction_set_is_the_best_that_its_system_info_has(more, wanted):
    assert of_llama_cpp(SYSTEM_INFO.format(more)) == wanted
    assert of_llama_cpp("") is None


@pytest.mark.parametrize(
    ("name", "own", "wanted"),
    [
        ("avx512_vnni", "amx", "avx512_vnni without amx"),
        ("avx2", "avx_vnni", "avx2 without avx_vnni"),
        ("avx2", "avx2", "avx2"),
        ("amx", "avx512_vnni", "amx"),
        (None, "avx2", "unknown instructions"),
    ],
)
def test_a_build_that_lacks_what_cpuspec_uses_is_called_so(name, own, wanted):
    assert build_text(name, own) == wanted


@pytest.fixture
def told(monkeypatch):
    """llama.cpp's system info by the directory whose library is in front, instead of asking libraries."""
    infos = {}

    def answer(programs, variant=None):
        return Build(programs, variant, SYSTEM_INFO.format(infos.get(variant and variant.name, "")))

    monkeypatch.setattr(llama_cpp_build, "open_build", answer)
    return infos


def test_the_variant_of_an_instruction_set_is_found_beside_the_programs_or_where_the_option_says(tmp_path, told):
    told["avx_vnni"] = "AVX_VNNI = 1 | "
    for parent in (tmp_path / "variants", tmp_path / "elsewhere"):
        (parent / "avx_vnni").mkdir(parents=True)
    assert find_build(tmp_path, None, "avx_vnni").variant == tmp_path / "variants" / "avx_vnni"
    build = find_build(tmp_path, tmp_path / "elsewhere", "avx_vnni")
    assert build.variant == tmp_path / "elsewhere" / "avx_vnni"
    assert "libraries: elsewhere/avx_vnni; system info: CPU : " in build.about
    assert build.environment()["LD_LIBRARY_PATH"].split(os.pathsep)[0] == str(build.variant)


def test_native_is_the_directorys_own_library_and_so_is_the_instruction_set_that_it_is_for(tmp_path, told):
    (tmp_path / "variants" / "native").mkdir(parents=True)
    assert [find_build(tmp_path, None, isa).variant for isa in (NATIVE, "avx2")] == [None, None]


def test_programs_and_libraries_of_the_variant_are_preferred(tmp_path):
    build = Build(tmp_path, tmp_path / "avx2")
    build.variant.mkdir()
    (tmp_path / "llama-bench").touch()
    (tmp_path / "forward-cost").touch()
    (build.variant / "forward-cost").touch()
    assert build.find("llama-bench") == tmp_path / "llama-bench"
    assert build.find("forward-cost") == build.variant / "forward-cost"
    assert build.find("libllama.so*") is None


def test_the_flags_of_a_build_are_those_in_cmakes_file(tmp_path):
    lines = (
        "GGML_AVX2:BOOL=ON",
        "GGML_CUDA:BOOL=OFF",
        "//of a compiler",
        "CMAKE_BUILD_TYPE:STRING=Release",
        "CMAKE_CXX_FLAGS:STRING=",
    )
    (tmp_path / "CMakeCache.txt").write_text("\n".join(lines), "utf-8")
    (tmp_path / "bin").mkdir()
    assert Build(tmp_path / "bin").about.endswith("build flags: GGML_AVX2=ON CMAKE_BUILD_TYPE=Release")
    assert "build flags: unknown" in Build(tmp_path / "bin" / "bin").about


def test_cpuspecs_worker_tells_the_instruction_set_that_it_was_held_back_to():
    features = ",".join(f"+{name}" for name in FEATURES["avx2"])
    environment = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": features}
    worker = Worker(Path(sys.executable), WORKERS / "worker_cpuspec.py", [], [1], 900, environment)
    try:
        assert worker.ask(do="instructions") == "avx2"
    finally:
        worker.close()


def test_peers_that_choose_their_instructions_themselves_are_left_to_native(tmp_path):
    checkpoint = open_checkpoint(make_tiny_gguf(tmp_path / "tiny.gguf"))
    launcher = peers._Launcher(checkpoint, tmp_path, 1, [Figure("decode")], [1], 10, None, None, {})
    with pytest.raises(PeerError, match="chooses its instructions itself; --isa native"):
        launcher.engine("avx2", "openvino", prepare_only=False)
