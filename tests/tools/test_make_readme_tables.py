"""The table of measurements says what the results say, all of it, and nothing older than the newest."""

import json

import pytest

from tools.make_readme_tables import END, RESULTS, START, read_results, with_tables
from tools.make_readme_tables import README as TABLES

SPREAD = {"median": 1.5, "min": 1.25, "max": 2.0}
README = f"# cpuspec\n\n{START}\nold\n{END}\n\nrest\n"


def result(benchmark, model="m.gguf", date="2026-01-01T00:00:00+00:00", **figures):
    return {
        "benchmark": benchmark,
        "model": model,
        "command": f"python benchmarks/{benchmark}.py {model}",
        "date": date,
        "machine": {"processor": "One", "cores": 2, "isa": "generic"},
        "load_average": [0.25, 0.5],
        "read_bytes_per_s": {"median": 2e10, "min": 1e10, "max": 2e10},
        **figures,
    }


AVX2 = {"cpuspec": "avx2", "llama.cpp": "avx2"}


def part(ratios, instructions=AVX2, **more):
    empty = {"figures": {}, "over_one_row": {}, "bandwidth_share": {}, "busy_share": {}}
    return {"instructions": instructions, "ratios": ratios, **empty, **more}


def peers(ratios, date="2026-01-01T00:00:00+00:00", **more):
    return result("peers", date=date, instruction_sets={"native": part(ratios, **more)})


def row(text, label):
    [line] = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    return line.split(" | ", 1)[1].removesuffix(" |")


def test_the_table_is_what_the_results_say():
    readme = TABLES.read_text("utf-8")
    assert readme == with_tables(readme, read_results(RESULTS)), "run python tools/make_readme_tables.py"


def test_another_figure_gives_another_table():
    readme, results = TABLES.read_text("utf-8"), read_results(RESULTS)
    name = next(name for name, one in results.items() if one["benchmark"] == "quality")
    assert with_tables(readme, results | {name: results[name] | {"kl_mean": 0.5}}) != readme


def test_only_what_stands_between_the_markers_changes():
    text = with_tables(README, {"a": peers({"decode": {"llama.cpp": SPREAD}})})
    assert text.startswith(f"# cpuspec\n\n{START}\n")
    assert text.endswith(f"{END}\n\nrest\n")
    assert "old" not in text
    assert with_tables(text, {"a": peers({"decode": {"llama.cpp": SPREAD}})}) == text


@pytest.mark.parametrize("readme", ["", START, END, README + README])
def test_a_readme_without_its_markers_is_refused(readme):
    with pytest.raises(ValueError, match="README needs"):
        with_tables(readme, {})


def test_ratios_shares_and_costs_have_rows():
    ratios = {
        "decode": {"llama.cpp": SPREAD, "torch": SPREAD, "best": {"peer": "torch", **SPREAD}},
        "decode @ d4096": {"llama.cpp": SPREAD},
        "prefill": {"llama.cpp": SPREAD, "best": {"peer": "llama.cpp", **SPREAD}},
    }
    figures = {figure: {} for figure in ratios}
    costs = {"cpuspec": {f"{rows} rows": {"median": rows / 2} for rows in (2, 4, 8, 16)}}
    busy = {"cpuspec": {"median": 0.5, "min": 0.5, "max": 0.5}}
    text = with_tables(README, {"a": peers(ratios, figures=figures, over_one_row=costs, busy_share=busy)})
    assert row(text, "decoding over llama.cpp on the same file") == "1.50x (1.25 to 2.00)"
    assert row(text, "decoding over the best of all peers") == "1.50x (1.25 to 2.00), torch"
    assert row(text, "decoding at a depth of 4096 tokens, over llama.cpp") == "1.50x (1.25 to 2.00)"
    assert row(text, "a forward over 2 / 4 / 8 / 16 rows over one row, all logits") == "1.00 / 2.00 / 4.00 / 8.00"
    assert row(text, "decoding beside one busy process, of the speed without") == "50 %"
    assert "prefill over the best of all peers" not in text  # one peer is no choice
    assert "One, 2 cores, generic; memory reads 20.0 to 20.0 GB/s; 2026-01-01; load average as rounds began 0.25 to 0.5:" in text
    assert "python benchmarks/peers.py m.gguf" in text


def test_the_newest_result_counts_whatever_the_files_are_called(tmp_path):
    old = peers({"decode": {"llama.cpp": {**SPREAD, "median": 9.0}}}, date="2026-01-01T00:00:00+00:00")
    new = peers({"decode": {"llama.cpp": SPREAD}}, date="2026-01-01T00:00:01+00:00")
    for names in (("a", "b"), ("b", "a")):
        for name, one in zip(names, (old, new), strict=True):
            (tmp_path / f"{name}.json").write_text(json.dumps(one), "utf-8")
        assert "1.50x (" in row(with_tables(README, read_results(tmp_path)), "decoding over llama.cpp on the same file")


def test_drafts_are_told_for_each_set_of_prompts_and_target():
    def arm(ratio):
        return {"over_plain": ratio, "over_plain_interval": [ratio - 0.25, ratio + 0.25]}

    arms = {"none": arm(1.0), "ngram": arm(1.5), "ngram,self:mxfp4": arm(2.25), "auto": arm(2.0)}
    plain = {"none": arm(1.0), "ngram": {"over_plain": None, "over_plain_interval": [None, None]}}
    results = {
        "a": result("chains", sets={"mbpp": arms, "words": plain}, target_dtype=None),
        "b": result("chains", sets={"mbpp": {"none": arm(1.0), "ngram": arm(3.0)}}, target_dtype="bf16"),
    }
    text = with_tables(README, results)
    assert row(text, "mbpp: best drafts over plain decoding") == "2.25x (2.00 to 2.50), ngram,self:mxfp4"
    assert row(text, "mbpp: auto over plain decoding") == "2.00x (1.75 to 2.25)"
    assert row(text, "mbpp, target in bf16: best drafts over plain decoding") == "3.00x (2.75 to 3.25), ngram"
    assert "words" not in text
