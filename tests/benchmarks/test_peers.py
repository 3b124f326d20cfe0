"""The side-by-side benchmark reads programs rightly, computes ratios round by round, and never drops a peer in silence."""

import json
import subprocess
import sys
from pathlib import Path

import instruction_sets
import peers
import peers_report
import pytest
from instruction_sets import of_llama_cpp
from peers_report import summarize

from cpuspec.checkpoints import open_checkpoint
from tools.make_readme_tables import END, START, with_tables
from tools.make_tiny_model import make_tiny_gguf

BENCHMARKS = Path(peers.__file__).parent


def compared(samples):
    """A summary in which nothing is known of bytes."""
    return summarize(samples, {}, [1e9] * 2)


def rounds(**seconds):
    """Samples of two rounds from pairs."""
    return [{name.replace("_", " "): pair[number] for name, pair in seconds.items()} for number in range(2)]


def test_ratios_are_taken_round_by_round_and_above_one_where_cpuspec_is_faster():
    # Both slow down fourfold in the second round: a ratio of medians over all rounds would not be seen to stay the same.
    summary = compared({"cpuspec": rounds(decode=(1.0, 4.0)), "torch": rounds(decode=(2.0, 8.0))})
    ratio = summary["ratios"]["decode"]["torch"]
    assert (ratio["median"], ratio["min"], ratio["max"], ratio["rounds"]) == (2.0, 2.0, 2.0, [2.0, 2.0])


def test_a_figure_that_a_peer_lacks_in_any_round_is_left_out_of_its_figures_and_ratios():
    samples = {
        "cpuspec": rounds(decode=(1.0, 1.0), prefill=(1.0, 1.0)),
        "llama.cpp": [{"decode": 2.0, "prefill": 1.0}, {"decode": 2.0}],
    }
    summary = compared(samples)
    assert "llama.cpp" in summary["figures"]["decode"]
    assert "llama.cpp" not in summary["figures"]["prefill"]
    assert "prefill" not in summary["ratios"]


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
    for told in (
        "decode, tokens/s: cpuspec ",
        "; llama.cpp 50 (50 to 50)\n",
        "llama.cpp, over 1 row: 2 rows 1.1",
        "llama.cpp: llama.cpp 7",
    ):
        assert told in done.stdout
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
