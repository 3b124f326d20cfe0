"""The report says what is on file, where it comes from, and what is missing."""

import json
import re

import pytest
import report
import report_parts
import report_plots

from cpuspec.checkpoints import open_checkpoint
from cpuspec.evaluate.parity import ModelIdentity, Question, open_side, record
from cpuspec.evaluate.parity_file import write_recording
from cpuspec.settings import EngineConfig, SpecConfig
from tests.backends.models import SMALL
from tools.make_readme_tables import RESULTS
from tools.make_tiny_model import make_tiny_gguf

QUALITY = {"kl_mean": 2e-4, "kl_p99": 1e-3, "kl_max": 0.5, "same_top": 0.992, "perplexity_ratio": 1.001}


def spread(median):
    return {"median": median, "min": median * 0.9, "max": median * 1.1}


def result(benchmark, **figures):
    return {
        "benchmark": benchmark,
        "model": "one|two.gguf",
        "command": f"python benchmarks/{benchmark}.py one",
        "date": "2026-01-01T00:00:00+00:00",
        "machine": {"processor": "A <b>processor</b>", "cores": 2, "isa": "generic"},
        "threads": 2,
        "rounds": 5,
        "load_average": [0.5],
        "stolen": [0.0],
        **figures,
    }


def arm(ratio, **accepted):
    levels = {
        name: {
            "num_drafts": 10,
            "num_draft_tokens": 40,
            "num_accepted_tokens": sum(per_pos),
            "num_accepted_tokens_per_pos": per_pos,
            "mu": 1.5,
            "accepted_per_proposed": 0.25,
            "accepted_per_evaluated": 0.5,
        }
        for name, per_pos in accepted.items()
    }
    common = {"num_prompts": 20, "num_identical": 20, "tokens_per_s": 10 * ratio, "tokens_per_forward": 2.0, "levels": levels}
    return common | {"over_plain": ratio, "over_plain_interval": [ratio - 0.125, ratio + 0.125]}


def chains(factor, **more):
    arms = {
        "none": arm(1.0),
        "suffix": arm(1.25 * factor, suffix=[9, 3]),
        "self:mxfp4": arm(1.75 * factor, **{"self:mxfp4": [10, 8]}),
        "small.gguf": arm(1.5 * factor, **{"small.gguf": [8, 2]}),
        "suffix,self:mxfp4": arm(2.25 * factor, suffix=[5, 1], **{"self:mxfp4": [10, 9]}),
        "auto": arm(2.0 * factor),
    }
    target = {"name": "target", "weight_bytes": 300_000_000, "shared_bytes": 0, "kv_bytes": 5_000_000}
    cast = {"name": "self:mxfp4", "weight_bytes": 200_000_000, "shared_bytes": 50_000_000, "kv_bytes": 5_000_000}
    memory = {"none": [target], "suffix,self:mxfp4": [cast, target]}
    return result("chains", **{"target_dtype": None, "sets": {"mbpp": arms}, "memory": memory} | more)


def peers_of_chains():
    """llama.cpp on two prompts: half and a quarter as fast as our fastest arm."""
    theirs = {"num_prompts": 2, "num_identical": 1, "tokens_per_s": 8.0, "over_plain": 1.25}
    prompts = [
        {
            "set": "mbpp",
            "arms": {"suffix,self:mxfp4": {"tokens_per_s": 16.0}},
            "peers": {"llama.cpp: mod": {"tokens_per_s": 16.0 / times}},
        }
        for times in (2, 4)
    ]
    sets = {"mbpp": {"llama.cpp: mod": theirs}}
    theirs = {"sets": sets, "failed": {"transformers": "it did not answer either"}}
    return {"peers": theirs, "prompts": prompts, "instructions": {"cpuspec": "amx", "llama.cpp": "amx"}}


def peers(**part):
    without = {"cpuspec": "amx", "llama.cpp": "avx512_vnni without amx"}
    return result("peers", instruction_sets={"native": {"instructions": without, **part}})


LATENCIES = {"p50": 0.25, "p95": 0.5, "p99": 0.75}
TASK = {
    "task": "humaneval",
    "form": "raw",
    "num_problems": 20,
    "num_passed": 17,
    "pass@1": 0.85,
    "pass@1_error": 0.08,
    "cost": {"duration_s": 34.0, "tokens_per_s": 12.5, "ttft_s": LATENCIES, "tpot_s": LATENCIES, "memory_bytes": 1_500_000_000},
    "price": {"per_million_tokens": 3.0, "per_accepted_answer": 0.00125},
}
KL = {
    "reference": "ours.kld",
    "bits_per_weight": 4.5,
    "kl_mean": 0.0125,
    "kl_error": 0.0005,
    "same_top": 0.9375,
    "top_overlap": 0.875,
    "perplexity": 10.5,
    "perplexity_error": 0.25,
}
ELSEWHERE = {
    "engine": "vllm",
    "model": "m",
    "machine": "H200",
    "what": "100 requests",
    "prefill_tokens_per_s": None,
    "decode_tokens_per_s": 100.0,
    "tokens_per_s": 1280.0,
    "ttft_s": 0.05,
    "tpot_s": 0.01,
    "acceptance": 0.6,
    "quality": None,
    "price_per_million": 0.5425,
    "price_per_answer": None,
}

RESULTS_OF_ALL = {
    "kl": result("kl", **KL),
    "task": result("task", bits_per_weight=5.0, draft="auto", **TASK),
    "arms": result("arms", arms=[{"arm": "baseline", "bits_per_weight": 16.0, "draft": "none", "tasks": [TASK]}]),
    "beside": result("beside", runs=[ELSEWHERE]),
    "chains": chains(1.0, **peers_of_chains()),
    "chains-bf16": chains(2.0, target_dtype="bf16"),
    "peers": peers(
        figures={"decode": {"cpuspec": spread(20.0), "llama.cpp": spread(10.0)}, "1 row": {"cpuspec": spread(50.0)}},
        ratios={"decode": {"llama.cpp": spread(2.0), "best": {"peer": "llama.cpp", **spread(2.0)}}},
        over_one_row={"cpuspec": {"2 rows": spread(1.0625), "8 rows": spread(1.5)}, "llama.cpp": {}},
        failed={"torch": "it did not answer"},
    ),
    "training": result(
        "training",
        trainings={
            "my-head": {
                "tokens": 5000,
                "epochs": 2.5,
                "minutes": 3.0,
                "log": [
                    {"tokens": 0, "seconds": 0.0, "accepted": [0.0, 0.0], "said": [], "mean_length": 1.0},
                    {"tokens": 5000, "seconds": 180.0, "accepted": [0.5, 0.25], "said": [0.5, 0.375], "mean_length": 1.625},
                ],
            }
        },
    ),
    "start": result("start", figures={"peak memory, MB": {"cpuspec": spread(777.0)}}, load_average=[9.0]),
    "quality": result("quality", backend="numba", text="wiki.txt", num_tokens=512, **QUALITY),
    "identity": result(
        "identity",
        prompts=40,
        arms=[{"arm": "plain", "identical_prompts": 39, "num_draft_tokens": 8, "num_accepted_tokens": 5}],
    ),
}


@pytest.fixture
def drawn(monkeypatch):
    """What was to be drawn, by the caption's order; no picture needs matplotlib."""
    panels = []
    for kind in ("bars", "curves"):
        monkeypatch.setattr(report_plots, kind, lambda what, *_, **__: panels.append(what) or b"a picture")
    monkeypatch.setattr(report, "find_spec", lambda name: name)
    return panels


def on_file(directory, results):
    directory.mkdir(exist_ok=True)
    for name, one in results.items():
        (directory / f"{name}.json").write_text(json.dumps(one), "utf-8")
    return directory


def chapter(markdown, title):
    return markdown.split(f"## {title}\n")[1].split("\n## ")[0]


def made(directory):
    return report.as_markdown(report.make_chapters(report.read_results(directory), report.read_runs(directory / "runs")))


def test_every_part_tells_its_figures(tmp_path, drawn):
    text = made(on_file(tmp_path / "results", RESULTS_OF_ALL))
    assert "No result on file" not in chapter(text, "Drafts over plain decoding")
    for title, wanted in {
        "Drafts over plain decoding": [
            "| mbpp: suffix,self:mxfp4 | 22.5 | 2.25 | 2.12 to 2.38 | 2.00 | 20 of 20 |",
            "| mbpp: plain (GREEDY) |",
            "| mbpp: self:mxfp4 (MXFP4) |",
            "| mbpp: small.gguf (DRAFT) |",
            "| mbpp: suffix,self:mxfp4 (MULTI) | 45.0 |",
            "quantized",
        ],
        "Other engines' drafts": [
            "| mbpp: llama.cpp: mod | 8.0 | 1.25 | 1 of 2 | suffix,self:mxfp4: 2.83 (2.00 to 4.00) |",
            "transformers was left out: it did not answer either",
            "**one|two.gguf: cpuspec with amx, llama.cpp built for amx**",
        ],
        "Peers side by side": [
            "| cpuspec over | llama.cpp |",
            "| decode | 2.00 (1.80 to 2.20) |",
            "torch was left out: it did not answer",
            "**one|two.gguf: cpuspec with amx, llama.cpp built for avx512_vnni without amx; 2 threads, 5 rounds**",
        ],
        "The cost of n rows": ["| one\\|two.gguf: cpuspec, amx | 2: 1.06; 8: 1.50 |"],
        "Acceptance, by position and level": ["| mbpp: suffix in suffix,self:mxfp4 | 6 of 40 | 25% | 50% | 1.50 |"],
        "Training of draft heads": ["| my-head | 5000 | 2.5 | 3.0 | 0.500, 0.250 | 0.500, 0.375 |"],
        "Memory": ["peak memory, MB, cpuspec | 777.00 |"],
        "Quality": ["| 2.00e-04 | 1.00e-03 | 5.00e-01 | 99.2% | 1.0010 |"],
        "Identical answers": ["| 39 of 40 | 5 of 8 |"],
        "Backends and machines": ["No result on file", "cpuspec parity"],
        "Where this comes from": ["yes: load average up to 0.5", "NO: load average up to 9.0", "`python benchmarks/peers.py one`"],
    }.items():
        for line in wanted:
            assert line in chapter(text, title), (title, line)


def test_pictures_show_the_figures_that_the_tables_have(tmp_path, drawn):
    made(on_file(tmp_path / "results", RESULTS_OF_ALL))
    bars = next(panels for panels in drawn if "plain" in panels.get("mbpp: 20 prompts", ()))
    assert bars["mbpp: 20 prompts"]["suffix,self:mxfp4"] == report_plots.Bar(2.25, 2.125, 2.375)
    beside = next(panels["mbpp: 20 prompts"] for panels in drawn if "llama.cpp: mod" in panels.get("mbpp: 20 prompts", ()))
    assert [(label, bar.value) for label, bar in beside.items()][::6] == [
        ("cpuspec: suffix,self:mxfp4", 22.5),
        ("llama.cpp: mod", 8.0),
    ]
    curves = next(panels["mbpp"] for panels in drawn if "mbpp" in panels)
    assert curves["suffix"] == [(1.0, 0.9), (2.0, 0.3)]
    learned = next(panels for panels in drawn if "tokens of a forward, against minutes of training" in panels)
    assert learned["my-head: share accepted, against thousands of tokens trained on"]["position 2"] == [(0.0, 0.0), (5.0, 0.25)]
    assert {"one|two.gguf": {"cpuspec, amx": [(1.0, 1.0), (2.0, 1.0625), (8.0, 1.5)]}} in drawn
    memory = next(panels["one|two.gguf"] for panels in drawn if "plain" in panels.get("one|two.gguf", ()))
    assert memory["suffix,self:mxfp4"] == report_plots.Bar(300 + 150 + 10), "shared weights count once"


def test_a_figure_is_told_by_the_newest_file_that_has_it(tmp_path, drawn):
    newest, older = json.loads(json.dumps([RESULTS_OF_ALL["peers"]] * 2))
    older["date"] = "2025-01-01"
    part = older["instruction_sets"]["native"]
    part["figures"]["prefill"] = {"cpuspec": spread(99.0)}
    part["ratios"] = {figure: {"llama.cpp": spread(7.0)} for figure in ("decode", "prefill")}
    text = chapter(made(on_file(tmp_path / "results", {"a": older, "b": newest})), "Peers side by side")
    assert re.findall(r"\| (\w+) \| ([\d.]+) \(", text) == [("decode", "2.00"), ("prefill", "7.00")]


def test_what_drafts_gain_is_told_for_each_instruction_set(tmp_path, drawn):
    newest = chains(1.0, date="2026-02-01", machine={"processor": "A laptop", "cores": 2, "isa": "avx2"})
    text = chapter(made(on_file(tmp_path / "results", {"a": chains(2.0), "b": newest})), "Drafts over plain decoding")
    assert re.findall(r"\*\*(.*)\*\*|\| mbpp: auto \| [\d.]+ \| ([\d.]+)", text) == [
        ("one|two.gguf: cpuspec with avx2", ""),
        ("", "2.00"),
        ("one|two.gguf: cpuspec with generic", ""),
        ("", "4.00"),
    ]


def test_a_part_with_nothing_on_file_names_the_command_that_makes_it(tmp_path, drawn):
    text = made(on_file(tmp_path / "results", {}))
    for part in report_parts.PARTS:
        assert all(f"`{command}`" in chapter(text, part.title) for command in part.commands)
        assert "No result on file" in chapter(text, part.title)
    assert drawn == []


def test_the_results_that_are_kept_make_a_report(drawn):
    assert "No result on file" not in chapter(made(RESULTS), "Quality")


def test_recorded_runs_of_a_model_are_compared(tmp_path, drawn):
    (tmp_path / "runs").mkdir()
    checkpoint = open_checkpoint(make_tiny_gguf(tmp_path / "tiny.gguf", **SMALL))
    questions, first = [Question([1, 2, 3], 4)], None
    drafts = SpecConfig.parse("ngram")
    for name, kv_format, device, date in (("gpu", "f32", "cuda:0", "2026-01-01"), ("cpu", "int8", "cpu", "2026-01-02")):
        settings, about = EngineConfig(kv_format=kv_format), {"device": device, "processor": "A processor", "date": date}
        with open_side("numpy", checkpoint, questions, drafts, settings, about) as side:
            run = record(side, ModelIdentity.from_checkpoint(checkpoint), questions, first, top=8)
        first = first or run
        write_recording(run, tmp_path / "runs" / f"{name}.json")
    text = chapter(made(tmp_path), "Backends and machines")
    assert "reference numpy on cuda:0" in text
    assert re.search(r"\| numpy on A processor \| 7 \| [\d.]+% \| \S+ \| \S+ \| [01] of 1 \| [01] of 1 \|", text)
    assert "numpy:activations=int8" in text
    assert "runs/gpu.json" in chapter(made(tmp_path), "Where this comes from")


def test_pictures_are_drawn_whatever_labels_and_intervals_are():
    pytest.importorskip("matplotlib")
    chain = "auto,qwen2.5-coder-1.5b-eagle3,text:smollm2-135m-instruct"
    bars = {"one": {chain: report_plots.Bar(2.0, 2.5, 1.5), "plain": report_plots.Bar(1.0)}, "two": {chain: report_plots.Bar(0.0)}}
    curves = {"one": {chain: [(1.0, 0.5), (2.0, 0.25)], "plain": [(4.5, 0.0)]}}
    for png in (report_plots.bars(bars, "tokens/s", reference=1.0), report_plots.curves(curves, ("x", "y"), "n rows", share=True)):
        assert png.startswith(b"\x89PNG")


def test_formats_tasks_and_other_engines_have_their_tables_and_plots(drawn, tmp_path):
    results = report.read_results(on_file(tmp_path / "results", RESULTS_OF_ALL))
    chapters = dict(report.make_chapters(results, []))
    text = report.as_markdown(list(chapters.items()))
    assert "| 4.50 | 0.01250 ± 0.00050 | 93.75% | 87.50% | 10.500 ± 0.250 |" in text
    assert "| 85.0% ± 8.0% | 5.00 | 12.5 | 250 | 750 | 250.0 | 500.0 | 750.0 | 1500 | 2.0 | 0.00125 |" in text
    assert ", baseline, drafts none: humaneval, raw | 85.0% ± 8.0% | 16.00 |" in text
    assert "| vllm, m | H200 | 100 requests |  | 100.0 | 1280.0 | 50.0 | 10.0 | 60% |  | 0.5425 |  |" in text
    plotted = {block.name for blocks in chapters.values() for block in blocks if isinstance(block, report_parts.Plot)}
    assert {"formats", "tasks-speed"} <= plotted
    (speeds,) = (panels for panels in drawn if any("humaneval" in title for title in panels))
    assert list(speeds["humaneval, raw, 20 problems"].values()) == [[(12.5, 0.85)]] * 2
