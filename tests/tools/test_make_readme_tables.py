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


def test_figures_of_each_instruction_set_and_build_have_a_table_that_names_them():
    without = {"cpuspec": "amx", "llama.cpp": "avx512_vnni without amx"}
    parts = {
        "native": part({"decode": {"llama.cpp": {**SPREAD, "median": 3.0}}}, without),
        "avx2": part({"decode": {"llama.cpp": SPREAD}}),
    }
    text = with_tables(README, {"a": result("peers", instruction_sets=parts)})
    first, second = text.split("**cpuspec with avx2, llama.cpp built for avx2**")
    assert "**cpuspec with amx, llama.cpp built for avx512_vnni without amx**" in first
    assert row(first, "decoding over llama.cpp on the same file") == "3.00x (1.25 to 2.00)"
    assert row(second, "decoding over llama.cpp on the same file") == "1.50x (1.25 to 2.00)"


def test_times_of_each_instruction_set_have_a_table_and_figures_that_depend_on_none_have_one_together():
    def chains(isa):
        arms = {"auto": {"over_plain": 2.0, "over_plain_interval": [1.5, 2.5]}}
        return result("chains", sets={"mbpp": arms}, target_dtype=None, machine={"processor": "One", "cores": 2, "isa": isa})

    arms = [{"arm": "none", "identical_prompts": 4}]
    text = with_tables(README, {"a": chains("avx2"), "b": chains("avx_vnni"), "c": result("identity", prompts=4, arms=arms)})
    titles = [line for line in text.splitlines() if line.startswith("**")]
    by_itself = [f"**cpuspec by itself, with {isa}**" for isa in ("avx2", "avx_vnni")]
    assert titles == [*by_itself, "**any instruction set: the bits are the same**"]
    for one in by_itself:
        assert row(text.split(one)[1].split("**")[0], "mbpp: auto over plain decoding") == "2.00x (1.50 to 2.50)"


def test_a_figure_that_only_an_older_result_has_is_kept():
    results = {
        "new": peers({"decode": {"llama.cpp": SPREAD}}, date="2026-01-02T00:00:00+00:00"),
        "old": peers({"decode": {}, "prefill": {"llama.cpp": SPREAD}}),
    }
    assert row(with_tables(README, results), "prefill over llama.cpp on the same file") == "1.50x (1.25 to 2.00)"


def test_a_server_under_load_has_a_row_for_each_engine_and_number_of_clients():
    def figures(clients, least):
        names = ("output tokens/s", "p50 ttft, ms", "p95 ttft, ms", "p50 tpot, ms", "p95 tpot, ms", "p99 tpot, ms")
        spreads = [{"median": least * 10.0**place, "min": 0.0, "max": 0.0} for place in range(len(names))]
        return {f"{clients} clients, {name}": {"llama.cpp ngram --n 4": s} for name, s in zip(names, spreads, strict=True)}

    both = figures(32, 2) | figures(8, 1)
    sets = {"cpuspec none": "avx2", "llama.cpp ngram --n 4": "avx2 without amx"}
    one = result("serving", figures=both, prompts=["mt_bench.jsonl:turns:4:chat", "edits:4"], instructions=sets)
    text = with_tables(README, {"a": one})
    table = text.split("**serving, with generic and avx2 and avx2 without amx**")[1].split("```")[0]
    rows = [line for line in table.splitlines() if line.startswith("| m ")]
    assert rows == [
        "| m | mt_bench, edits | 8 | llama.cpp ngram | 1 | 0.01 | 0.1 | 1000 | 10000 |",
        "| m | mt_bench, edits | 32 | llama.cpp ngram | 2 | 0.02 | 0.2 | 2000 | 20000 |",
    ]


def test_a_benchmark_that_compares_engines_needs_no_row_of_its_own():
    figures = {"second start to first token, s": {"cpuspec": SPREAD, "llama.cpp": {"median": 5.0, "min": 4.0, "max": 6.0}}}
    one = result("start", "one.gguf", figures=figures, instructions={"cpuspec": "amx", "llama.cpp": "avx2 without amx"})
    text = with_tables(README, {"a": one, "b": result("start", "two.gguf", figures={})})
    assert row(text, "second start to first token, s") == "1.5 (1.25 to 2); llama.cpp 5 (built for avx2 without amx)"
    assert "two" not in text.split("```")[0]


def test_identity_and_certificates_tell_the_worst_of_all_ways():
    arms = [{"arm": name, "identical_prompts": same} for name, same in (("none", 40), ("ngram", 39))]
    certificates = [{"spec": "auto", "passed": True}, {"spec": "ngram,skip:4", "passed": False}]
    results = {
        "a": result("identity", prompts=40, arms=arms),
        "b": result("certificates", certificates=certificates),
    }
    text = with_tables(README, results)
    assert "memory reads" not in text  # nothing was timed, so nobody asks how busy it was
    assert "load average" not in text
    assert row(text, "prompts with identical greedy ids whatever drafts, threads, batches, chunks") == "39 of 40, 2 ways"
    assert row(text, "drafts certified: the same greedy ids and distribution, and a lie seen") == "1 of 2: auto; ngram,skip:4"


def test_what_a_step_takes_besides_its_forward_has_a_row_for_each_arm():
    spread = {"median": 90.6, "min": 85.5, "max": 100.4}
    older = result("overhead", us_per_step={"none, 1 threads": {"time": SPREAD}, "none, 2 threads": {"time": SPREAD}})
    newer = result("overhead", date="2026-02-01T00:00:00+00:00", us_per_step={"none, 2 threads": {"time": spread}})
    text = with_tables(README, {"b": newer, "a": older})
    assert row(text, "a step besides the compiled forward, drafts none, 2 threads") == "91 us (86 to 100)"
    assert row(text, "a step besides the compiled forward, drafts none, 1 threads") == "2 us (1 to 2)"


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


def test_our_fastest_arm_is_compared_with_another_engines_prompt_by_prompt():
    def rates(*figures):
        return [{"tokens_per_s": figure} for figure in figures]

    def arms(prompt):
        return {"arms": dict(zip(("none", "auto"), rates(1.0, (8.0, 2.0)[prompt]), strict=True))}

    def peer(prompt):
        return {"peers": dict(zip(("llama.cpp: none", "llama.cpp: mod -n 3", "hf: x"), rates(1.0, 2.0, 99.0), strict=True))}

    prompts = [{"set": "mbpp", "prompt": number, **arms(number), **peer(number)} for number in range(2)]
    ours = {"none": {"tokens_per_s": 1.0}, "auto": {"tokens_per_s": 4.0}}
    ours = {spec: one | {"over_plain": None, "over_plain_interval": [None, None]} for spec, one in ours.items()}
    theirs = {"mbpp": peer(0)["peers"]}
    sets = {"mbpp": ours, "words": ours}
    found = result("chains", sets=sets, target_dtype=None, prompts=prompts, peers={"sets": theirs}, instructions=AVX2)
    text = with_tables(README, {"a": found})
    assert row(text, "mbpp: fastest arm over llama.cpp's fastest") == "2.00x (1.00 to 4.00), auto over mod"
    assert "**cpuspec with avx2, llama.cpp built for avx2**" in text
    assert text.count("over llama.cpp's fastest") == 1  # nothing of it was measured on words
