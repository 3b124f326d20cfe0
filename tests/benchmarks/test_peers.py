"""The side-by-side benchmark reads programs rightly, computes ratios round by round, and never drops a peer in silence."""

import json
import subprocess
import sys
from pathlib import Path

import peers
import peers_report
import pytest
import record
from peers import FIGURES
from peers_engines import LlamaCpp, PeerError, Worker, parse_forward_cost, parse_llama_bench
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


@pytest.fixture(autouse=True)
def bandwidth(monkeypatch):
    """Memory whose speed is known without measuring it."""
    monkeypatch.setattr(record, "read_bandwidth", lambda threads: 1e9 * threads)


def compared(samples):
    """A summary in which nothing is known of bytes."""
    return summarize(samples, {}, [1e9] * 2)


def rounds(**seconds):
    """Samples of two rounds from pairs."""
    return [{name.replace("_", " "): pair[number] for name, pair in seconds.items()} for number in range(2)]


def test_forward_cost_gives_median_seconds_of_the_rows_it_lists():
    samples = parse_forward_cost(FORWARD_COST, [1, 2, 4, 16])
    assert samples == pytest.approx({"1 row": 0.0064, "2 rows": 0.0148, "16 rows": 0.0535})


def test_forward_cost_without_its_line_is_an_error_that_quotes_it():
    with pytest.raises(PeerError, match="decode failed"):
        parse_forward_cost("decode failed\n", [1])


def test_llama_bench_gives_the_seconds_of_a_token_and_its_settings():
    test = {"avg_ns": 2_500_000_000, "avg_ts": 50.0, "build_number": 7, "type_k": "f16", "type_v": "f16", "flash_attn": -1}
    assert parse_llama_bench(json.dumps([test])) == (0.02, "llama.cpp 7, keys in f16, values in f16, flash attention auto")


@pytest.mark.parametrize("output", ["", "[]", "[{}]", '[{"avg_ns": 1}, {"avg_ns": 2}]', "{}", "null"])
def test_other_output_of_llama_bench_is_an_error(output):
    with pytest.raises(PeerError, match="llama-bench"):
        parse_llama_bench(output)


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
    engines = {"engines": {"cpuspec": "ours", "llama.cpp": "theirs"}, "failed": {"torch": "No module named 'torch'"}}
    text = report(head | engines | compared(samples))
    assert "| decode | 2.00 (2.00 to 2.00) | llama.cpp 2.00 | 2.00 |" in text
    assert "| 1 row, ms | 1000.0 (1000.0 to 1000.0) | - |" in text
    assert "torch was left out: No module named 'torch'" in text
    assert "by round: 0%, 20%" in text
    assert "not quiet" in text
    assert "not quiet" not in report(head | {"stolen": [0.0, 0.01]} | engines | compared(samples))


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (peers.read_names, "llama.cpp,vllm"),
        (peers.read_rows, "1,0"),
        (peers.read_rows, "four"),
        (peers.read_rows, ""),
        (peers.read_rows, "1000"),
        (lambda text: peers.read_figures(text, ""), "decode,speed"),
        (lambda text: peers.read_figures(text, ""), ""),
        (lambda text: peers.read_figures(text, ""), "busy"),
        (lambda text: peers.read_figures("", text), "0"),
        (lambda text: peers.read_figures("", text), "4k"),
        (lambda text: peers.read_interpreters([text]), "openvino"),
        (lambda text: peers.read_interpreters([text]), f"llama.cpp={sys.executable}"),
        (lambda text: peers.read_interpreters([text]), "torch=no-such-file"),
    ],
)
def test_options_that_mean_nothing_are_refused(read, text):
    with pytest.raises(PeerError):
        read(text)


def test_options_are_read():
    assert peers.read_names("torch, llama.cpp,torch") == ["torch", "llama.cpp"]
    assert peers.read_rows("16,1,4,4") == [1, 4, 16]
    assert peers.read_figures("decode", "4096,64") == [Figure("decode"), Figure("decode", 4096), Figure("decode", 64)]
    assert peers.read_interpreters([f"torch={sys.executable}"]) == {"torch": Path(sys.executable)}


def test_a_directory_without_llama_bench_is_refused(tmp_path):
    with pytest.raises(PeerError, match="no llama-bench"):
        LlamaCpp(tmp_path, Path("m.gguf"), 2, [1], 10)


def test_a_failing_program_is_quoted(tmp_path):
    program = tmp_path / "llama-bench"
    program.write_text("#!/bin/sh\necho cannot read the model >&2\nexit 1\n", "utf-8")
    program.chmod(0o755)
    engine = LlamaCpp(tmp_path, Path("m.gguf"), 2, [1], 10)
    assert "no forward-cost" in engine.about
    assert engine.measure(Figure("forwards")) == {}
    with pytest.raises(PeerError, match="cannot read the model"):
        engine.measure(Figure("decode"))


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


@pytest.mark.parametrize(
    ("model", "remembers", "words"),
    [
        ("model", False, "context is not used"),  # the same engine with a context that is dropped
        ("missing", True, "pip install fake-package"),
        ("crash", True, "out of luck"),
    ],
)
def test_a_worker_that_cannot_be_measured_says_why(tmp_path, model, remembers, words):
    worker = make_worker(tmp_path, remembers=remembers)
    try:
        with pytest.raises(PeerError, match=words):
            worker.load(tmp_path / model, 2, 50, [Figure("decode")])
    finally:
        worker.close()


def test_a_worker_that_does_not_answer_is_ended(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("import time\ntime.sleep(600)\n", "utf-8")
    worker = Worker(Path(sys.executable), script, [], [1], 0.2)
    try:
        with pytest.raises(PeerError, match=r"within 0\.2 s"):
            worker.load(tmp_path / "model", 2, 50, [Figure("decode")])
    finally:
        worker.close()


class FakePeer:
    """Takes one second for everything until its n-th figure, then fails."""

    about = "fake"

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
    engines, failed = {"cpuspec": FakePeer(), "torch": falling, "openvino": FakePeer()}, {}
    figures = [FIGURES["decode"], FIGURES["busy"], Figure("decode", 9)]
    samples = peers.measure(engines, Rounds(3, 1), figures, failed)
    assert failed == {"torch": "it fell over"}
    assert falling.closed
    assert list(engines) == list(samples) == ["cpuspec", "openvino"]
    names = [figure.name for figure in figures]
    assert all(len(ones) == 3 and all(list(one) == names for one in ones) for ones in samples.values())


def test_a_busy_process_runs_beside_busy_figures_only(monkeypatch):
    started, running = [], set()

    class Spinner:
        def __init__(self, command):
            started.append(command)
            running.add(self)

        def kill(self):
            running.discard(self)

        def wait(self):
            pass

    class Watching(FakePeer):
        def measure(self, figure):
            return {figure.name: 1.0 + len(running)}

    monkeypatch.setattr(peers.subprocess, "Popen", Spinner)
    samples = peers.measure({"cpuspec": Watching()}, Rounds(2, 1), [FIGURES["decode"], FIGURES["busy"]], {})
    assert samples == {"cpuspec": [{"decode": 1.0, "decode, busy": 2.0}] * 2}
    assert len(started) == 2
    assert not running


def test_the_command_refuses_a_model_and_a_shape_at_once():
    script = BENCHMARKS / "peers.py"
    done = subprocess.run(
        [sys.executable, script, "model.gguf", "--shape", "qwen2.5-0.5b"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "one of them" in done.stderr


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
    names = ["decode", "prefill", *(peers_report.rows_name(rows) for rows in (1, 2, 4, 8, 16)), "decode, busy", "decode @ d700"]
    assert list(result["ratios"]) == names
    assert result["figures"]["decode @ d700"]["llama.cpp"]["median"] == 50
    assert str(tmp_path) not in json.dumps(result)
    text = with_tables(f"{START}\n{END}\n", {"tiny": result})
    assert "| the same, llama.cpp | 1.10 / 1.20 / 1.30 / 1.40 |" in text
    assert "decoding at a depth of 700 tokens, over llama.cpp" in text


@pytest.mark.parametrize("tied", [True, False])
def test_a_token_reads_every_matrix_but_the_embedding_of_an_untied_model(tmp_path, tied):
    checkpoint = open_checkpoint(make_tiny_gguf(tmp_path / "tiny.gguf", weight_format="q4_0", vocab_size=384, tied=tied))
    hidden, intermediate, kv, layers = 256, 512, 128, 2
    weights = 384 * hidden + layers * (2 * hidden * hidden + 2 * kv * hidden + 3 * hidden * intermediate)
    assert peers.weight_bytes(checkpoint) == weights * 18 // 32
