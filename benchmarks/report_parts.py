"""The parts of the report: texts, tables and plots of the results on file.

Every part takes the results, the newest first, and returns its blocks. An empty list means that no result is on file.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report_plots as plots
from peers_report import OWN, who

from cpuspec.evaluate.parity import Parity, Recording, compare_sides
from cpuspec.evaluate.statistics import mean_ratio
from cpuspec.settings import SpecConfig

Result = Mapping[str, Any]
PLAIN, AUTO = "none", "auto"
POSITIONS = 16  # of a draft, that acceptance is drawn for

_UPPER = (
    "Where the model's file is quantized, so are the values that a cast of its own weights (`self:`) starts from, in 16 bits, too: "
    "casts agree with such a target more often than they would with weights that never were."
)
_PEERS = (
    "llama.cpp reads the same file. The others run a model of the same shape with random weights, in their own 4-bit format "
    "(torch: 8 bits). All engines took turns, round by round. Each part is about one instruction set of cpuspec and one build of "
    "llama.cpp; the others choose their instructions themselves."
)

_SAME_PROMPTS = (
    "llama.cpp reads the same file, transformers the values of its weights. All engines answered a prompt before the next one had "
    "its turn. Where an engine's forward over several rows differs in last bits from one over a single row, drafts may change its "
    "greedy answers."
)

_EXPLAINED = (
    "How far a backend may be from the numpy reference is a matter of its arithmetic. Values of weights times f32 inputs: sums in "
    "another order, KL below 1e-6 and another likeliest token only at ties. int8 inputs: about what `numpy:activations=int8` "
    "differs by, the reference with its inputs rounded so; numba has 16 bits where 8 cost most, and less. Rates were taken on "
    "machines as they were, busy ones too."
)


@dataclass(frozen=True)
class Table:
    """Cells under their headings; the first columns are texts, the others figures."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1


@dataclass(frozen=True)
class Plot:
    """A PNG, its file's name without the ending, and what it shows in words."""

    name: str
    caption: str
    png: bytes


Block = str | Table | Plot


@dataclass(frozen=True)
class Part:
    """A chapter. make: returns its blocks. commands: the commands that make results for it."""

    title: str
    commands: Sequence[str]
    make: Callable[[Sequence[Result], Sequence[Recording]], list[Block]]


def gains(results: Sequence[Result], runs: Sequence[Recording]) -> list[Block]:
    """Every arm over plain decoding, set by set."""
    blocks: list[Block] = []
    for number, (head, sets) in enumerate(_chains(results)):
        panels = {
            f"{name}: {_prompts(arms)}": {
                _arm(spec, head): plots.Bar(arm["over_plain"], *arm["over_plain_interval"])
                for spec, arm in arms.items()
                if arm["over_plain"]
            }
            for name, arms in sets.items()
        }
        rows = [
            [
                f"{name}: {_arm(spec, head)}",
                _figure(arm["tokens_per_s"], 1),
                _figure(arm["over_plain"]),
                _interval(arm["over_plain_interval"]),
                _figure(arm["tokens_per_forward"]),
                f"{arm['num_identical']} of {arm['num_prompts']}",
            ]
            for name, arms in sets.items()
            for spec, arm in arms.items()
        ]
        columns = ["prompts: drafts", "tokens/s", "over plain", "95 % interval", "tokens per forward", "identical"]
        caption = f"{head}: speed over plain decoding, geometric mean of prompts with its bootstrapped 95 % interval"
        blocks += [
            f"**{head}**",
            Plot(f"gains-{number}", caption, plots.bars(panels, "times the speed of plain decoding", reference=1.0)),
            Table(columns, rows),
        ]
    return [_UPPER, *blocks] if blocks else []


def drafts_of_peers(results: Sequence[Result], runs: Sequence[Recording]) -> list[Block]:
    """Our arms and other engines' drafts on the same prompts, set by set."""
    blocks: list[Block] = []
    seen: set[tuple[str, str]] = set()
    for number, result in enumerate(result for result in _of(results, "chains") if "peers" in result):
        target = _target(result)
        subject = f"{target}: {who(result['instructions'])}"
        sets = {name: theirs for name, theirs in result["peers"]["sets"].items() if (subject, name) not in seen}
        seen |= {(subject, name) for name in sets}
        panels, rows = {}, []
        for name, theirs in sets.items():
            ours = result["sets"][name]
            arms = {f"{OWN}: {_arm(spec, target)}": arm for spec, arm in ours.items()} | dict(theirs)
            rates = {label: arm["tokens_per_s"] for label, arm in arms.items() if arm["tokens_per_s"]}
            panels[f"{name}: {_prompts(ours)}"] = {
                label: plots.Bar(rates[label]) for label in sorted(rates, key=lambda one: -rates[one])
            }
            for peer, arm in theirs.items():
                same = "" if arm["num_identical"] is None else f"{arm['num_identical']} of {arm['num_prompts']}"
                cells = [_figure(arm["tokens_per_s"], 1), _figure(arm["over_plain"]), same, _fastest_over(result, name, peer)]
                rows.append([f"{name}: {peer}", *cells])
        blocks.append(f"**{subject}**")
        if rows:
            caption = f"{subject}: tokens per second of greedy answers to the same prompts, geometric mean, the fastest first"
            blocks.append(Plot(f"drafts-of-peers-{number}", caption, plots.bars(panels, "tokens/s", 1)))
            columns = ["prompts: engine, drafts", "tokens/s", "over its plain", "identical to it", f"{OWN}'s fastest over it"]
            blocks.append(Table(columns, rows))
        blocks += [f"{engine} was left out: {reason}" for engine, reason in result["peers"]["failed"].items()]
    return [_SAME_PROMPTS, *blocks] if blocks else []


def peers(results: Sequence[Result], runs: Sequence[Recording]) -> list[Block]:
    """Engines side by side: rates, and how many times as fast as each cpuspec is."""
    blocks: list[Block] = []
    seen: set[tuple[str, str]] = set()  # a figure of a model and build is told by the newest file that has it
    for number, result in enumerate(_parts(results)):
        subject = f"{result['model']}: {who(result['instructions'])}"
        figures = {figure: one for figure, one in result["figures"].items() if (subject, figure) not in seen}
        seen |= {(subject, figure) for figure in figures}
        if not figures:
            continue
        rates = {figure: by_engine for figure, by_engine in figures.items() if figure.startswith(("decode", "prefill"))}
        panels = {
            figure: {engine: plots.Bar(one["median"], one["min"], one["max"]) for engine, one in by_engine.items()}
            for figure, by_engine in rates.items()
        }
        head = f"{subject}; {result['threads']} threads, {result['rounds']} rounds"
        blocks.append(f"**{head}**")
        if panels:
            caption = f"{head}: tokens per second, median of the rounds, and the least and the most"
            blocks.append(Plot(f"peers-{number}", caption, plots.bars(panels, "tokens/s", 1)))
        ratios = {figure: by_peer for figure, by_peer in result["ratios"].items() if figure in figures}
        others = list(dict.fromkeys(peer for by_peer in ratios.values() for peer in by_peer if peer != "best"))
        rows = [[figure, *(_spread(by_peer.get(peer)) for peer in others)] for figure, by_peer in ratios.items()]
        blocks += [Table([f"{OWN} over", *others], rows)] if rows else []
        blocks += [f"{engine} was left out: {reason}" for engine, reason in result["failed"].items()]
    return [_PEERS, *blocks] if blocks else []


def row_costs(results: Sequence[Result], runs: Sequence[Recording]) -> list[Block]:
    """v(n): what a forward over n rows costs, over that of one row."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for result in _parts(results):
        builds = {engine: f"{engine}, {text}" for engine, text in result["instructions"].items()}
        for engine, costs in result["over_one_row"].items():
            if costs:
                points = [(1.0, 1.0), *((float(name.partition(" ")[0]), one["median"]) for name, one in costs.items())]
                panels.setdefault(str(result["model"]), {}).setdefault(builds.get(engine, engine), points)
    rows = [
        [f"{model}: {engine}", "; ".join(f"{x:.0f}: {y:.2f}" for x, y in points[1:])]
        for model, curves in panels.items()
        for engine, points in curves.items()
    ]
    if not panels:
        return []
    caption = "time of a forward over n rows with all logits, over the time of one row; the lower, the cheaper a verification"
    picture = plots.curves(panels, ("rows n of a forward", "v(n), times one row"), diagonal="n rows, one by one")
    return [Plot("row-costs", caption, picture), Table(["model: engine", "rows: times one row"], rows, 2)]


def acceptance(results: Sequence[Result], runs: Sequence[Recording]) -> list[Block]:
    """The share of drafted tokens that was accepted, by position and level."""
    blocks: list[Block] = []
    for number, (head, sets) in enumerate(_chains(results)):
        panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
        rows = []
        for name, arms in sets.items():
            for spec, arm in arms.items():
                for level, counts in arm["levels"].items():
                    label = level if level == spec else f"{level} in {spec}"
                    shares = [some / counts["num_drafts"] for some in counts["num_accepted_tokens_per_pos"][:POSITIONS]]
                    if shares:
                        panels.setdefault(str(name), {})[label] = [(at + 1.0, share) for at, share in enumerate(shares)]
                    rows.append(
                        [
                            f"{name}: {label}",
                            _accepted(counts),
                            f"{counts['accepted_per_proposed']:.0%}",
                            f"{counts['accepted_per_evaluated']:.0%}",
                            f"{counts['mu']:.2f}",
                        ]
                    )
        if panels:
            caption = f"{head}: share of the drafts of which the token at a position was accepted, and so all before it"
            picture = plots.curves(panels, ("position in the draft", "share of drafts"), share=True)
            columns = ["prompts: level", "tokens accepted", "of drafted", "of those looked at", "accepted a round"]
            blocks += [f"**{head}**", Plot(f"acceptance-{number}", caption, picture), Table(columns, rows)]
    return [_UPPER, *blocks] if blocks else []


def trainings(results: Sequence[Result], runs: Sequence[Recording]) -> list[Block]:
    """The training of heads: acceptance on held-back answers, over tokens and minutes."""
    blocks: list[Block] = []
    for number, result in enumerate(_newest(results, "training")):
        panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
        lengths: dict[str, list[tuple[float, float]]] = {}
        rows = []
        for name, one in result["trainings"].items():
            log, last = one["log"], one["log"][-1]
            panels[f"{name}: share accepted, against thousands of tokens trained on"] = {
                f"position {at + 1}": [(line["tokens"] / 1000, line["accepted"][at]) for line in log]
                for at in range(len(last["accepted"]))
            }
            lengths[name] = [(line["seconds"] / 60, line["mean_length"]) for line in log]
            shares, said = (", ".join(f"{share:.3f}" for share in last[what]) for what in ("accepted", "said"))
            rows.append([name, str(one["tokens"]), str(one["epochs"]), str(one["minutes"]), shares, said or "-"])
        panels["tokens of a forward, against minutes of training"] = lengths
        caption = f"{result['model']}: drafted tokens that held-back answers accepted once all before them were"
        picture = plots.curves(panels, ("trained on", "on held-back answers"))
        columns = ["head", "tokens trained on", "epochs", "minutes", "accepted, by position", "its confidence said"]
        blocks += [f"**{result['model']}**", Plot(f"training-{number}", caption, picture), Table(columns, rows)]
    return blocks


def memory(results: Sequence[Result], runs: Sequence[Recording]) -> list[Block]:
    """The memory of the levels, and a process's peak."""
    blocks: list[Block] = []
    panels: dict[str, dict[str, plots.Bar]] = {}
    for result in _newest(results, "chains", _target):
        for spec, levels in result["memory"].items():
            held = sum(level["weight_bytes"] - level["shared_bytes"] + level["kv_bytes"] for level in levels)
            panels.setdefault(_target(result), {})[_arm(spec, _target(result))] = plots.Bar(held / 1e6)
    if panels:
        caption = "weights, and keys and values, of each arm in megabytes; weights that drafts share with the target count once"
        blocks.append(Plot("memory", caption, plots.bars(panels, "MB", 0)))
    rows = [
        [
            f"{result['model']}: {figure}, {engine}"
            # What the build of a peer is for, where the result tells.
            + (
                f" built for {result['instructions'][engine]}" if engine != OWN and engine in result.get("instructions", ()) else ""
            ),
            _figure(one["median"]),
        ]
        for result in _newest(results, "start")
        for figure, by_engine in result["figures"].items()
        for engine, one in by_engine.items()
    ]
    return blocks + ([Table(["starts and peaks (`start.py`)", "median"], rows)] if rows else [])


def quality(results: Sequence[Result], runs: Sequence[Recording]) -> list[Block]:
    """The loss by quantized arithmetic."""
    rows = [
        [
            f"{one['model']}, {one['backend']}, {one['num_tokens']} tokens of {one['text']}",
            f"{one['kl_mean']:.2e}",
            f"{one['kl_p99']:.2e}",
            f"{one['kl_max']:.2e}",
            f"{one['same_top']:.1%}",
            f"{one['perplexity_ratio']:.4f}",
        ]
        for one in _newest(results, "quality")
    ]
    if not rows:
        return []
    return [
        "Against the numpy backend on the dequantized weights of the same file: what the arithmetic loses, not what the format "
        "lost when the file was made. Divergences in nats.",
        Table(["model", "KL mean", "KL 99 %", "KL most", "same likeliest token", "perplexity over reference"], rows),
    ]


def formats(results: Sequence[Result], runs: Sequence[Recording]) -> list[Block]:
    """Divergence from a reference, and perplexity, by bits per weight."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    rows = []
    for one in _of(results, "kl"):
        label = Path(one["model"]).stem
        panels.setdefault(f"reference {one['reference']}", {}).setdefault(label, [(one["bits_per_weight"], one["kl_mean"])])
        rows.append(
            [
                f"{label}, against {one['reference']}",
                f"{one['bits_per_weight']:.2f}",
                f"{one['kl_mean']:.5f} ± {one['kl_error']:.5f}",
                f"{one['same_top']:.2%}",
                f"{one['top_overlap']:.2%}",
                f"{one['perplexity']:.3f} ± {one['perplexity_error']:.3f}",
            ]
        )
    if not rows:
        return []
    picture = plots.curves(panels, ("bits per weight", "KL divergence, nats"))
    columns = ["model", "bits per weight", "KL mean", "same likeliest token", "ten likeliest", "perplexity"]
    return [Plot("formats", "mean KL divergence from the reference, by bits per weight", picture), Table(columns, rows)]


def tasks(results: Sequence[Result], runs: Sequence[Recording]) -> list[Block]:
    """Right answers by speed, and their cost: of tasks, and of the four arms."""
    listed = [(one, one, "") for one in _of(results, "task") if "bits_per_weight" in one]
    listed += [
        (one, task | {"bits_per_weight": arm["bits_per_weight"], "draft": arm["draft"]}, f", {arm['arm']}")
        for one in _of(results, "arms")
        for arm in one["arms"]
        for task in arm["tasks"]
    ]
    speeds: dict[str, dict[str, list[tuple[float, float]]]] = {}
    rows = []
    for result, task, arm in listed:
        name, cost = f"{task['task']}, {task['form']}", task["cost"]
        label = f"{Path(result['model']).stem}{arm}, drafts {task['draft']}"
        panel = speeds.setdefault(f"{name}, {task['num_problems']} problems", {})
        panel.setdefault(label, [(cost["tokens_per_s"], task["pass@1"])])
        price = (task.get("price") or {}).get("per_accepted_answer")
        taken_s = cost["duration_s"] / task["num_passed"] if task["num_passed"] else None
        rows.append(
            [
                f"{label}: {name}",
                f"{task['pass@1']:.1%} ± {task['pass@1_error']:.1%}",
                f"{task['bits_per_weight']:.2f}",
                _figure(cost["tokens_per_s"], 1),
                *(_figure(1e3 * cost["ttft_s"][rank], 0) if cost["ttft_s"] else "" for rank in ("p50", "p99")),
                *(_figure(1e3 * cost["tpot_s"][rank], 1) if cost["tpot_s"] else "" for rank in ("p50", "p95", "p99")),
                f"{cost['memory_bytes'] / 1e6:.0f}" if cost["memory_bytes"] else "",
                _figure(taken_s, 1),
                _figure(price, 5),
            ]
        )
    if not rows:
        return []
    columns = ["model: task", "right", "bits", "tokens/s", "first token p50", "p99", "per token p50", "p95", "p99", "MB"]
    return [
        Plot("tasks-speed", "right answers by speed", plots.curves(speeds, ("tokens/s", "right answers"), share=True)),
        Table([*columns, "s a right answer", "price of one"], rows),
    ]


def elsewhere(results: Sequence[Result], runs: Sequence[Recording]) -> list[Block]:
    """Results of other engines and machines beside ours, with prices where they were given."""
    rows = [
        [
            f"{run['engine']}, {run['model']}",
            run["machine"],
            run["what"],
            *(_figure(run[name], 1) for name in ("prefill_tokens_per_s", "decode_tokens_per_s", "tokens_per_s")),
            *("" if run[name] is None else f"{1e3 * run[name]:.1f}" for name in ("ttft_s", "tpot_s")),
            *("" if run[name] is None else f"{run[name]:.0%}" for name in ("acceptance", "quality")),
            *(_figure(run[name], 4) for name in ("price_per_million", "price_per_answer")),
        ]
        for result in _of(results, "beside")
        for run in result["runs"]
    ]
    columns = ["engine, model", "machine", "what", "prefill tokens/s", "decode tokens/s", "tokens/s of all", "first token, ms"]
    columns += ["per token, ms", "accepted", "right", "price of a million tokens", "of a right answer"]
    return [Table(columns, rows, 3)] if rows else []


def identity(results: Sequence[Result], runs: Sequence[Recording]) -> list[Block]:
    """Prompts whose greedy ids stay the same, by drafts, threads and batches."""
    rows = [
        [f"{one['model']}: {arm['arm']}", f"{arm['identical_prompts']} of {one['prompts']}", _accepted(arm)]
        for one in _newest(results, "identity")
        for arm in one["arms"]
    ]
    return [Table(["model: how it was run", "prompts with identical ids", "drafted tokens accepted"], rows)] if rows else []


def machines(results: Sequence[Result], runs: Sequence[Recording]) -> list[Block]:
    """Recorded runs of a model beside each other: backends, and a GPU's beside a CPU's."""
    blocks: list[Block] = []
    by_files: dict[frozenset[str], list[Recording]] = {}
    for run in sorted(runs, key=lambda run: str(run.about.get("date", ""))):
        by_files.setdefault(frozenset(str(file["sha256"]) for file in run.model.files), []).append(run)
    for number, group in enumerate(by_files.values()):
        reference, *others = [run for run in group if run.questions == group[0].questions]
        head = f"{reference.model.name}, reference {who_ran(reference.about)}"
        blocks.append(f"**{head}**")
        if not others:
            blocks.append("One run is on file, and none to compare it with.")
            continue
        found = [compare_sides(reference, other, reference.questions) for other in others]
        sides = [found[0].sides[0], *(one.sides[1] for one in found)]
        rates: dict[str, plots.Bar] = {}
        for side in sides:
            for label, rate in (("plain", side["tokens_per_s"]), (side.get("draft"), (side["drafted"] or {}).get("tokens_per_s"))):
                if rate:
                    rates[f"{who_ran(side)}: {label}"] = plots.Bar(rate)
        if rates:
            caption = f"{reference.model.name}: tokens per second of greedy answers, one at a time, on each machine"
            blocks.append(Plot(f"machines-{number}", caption, plots.bars({reference.model.name: rates}, "tokens/s", 1)))
        columns = ["compared with it", "rows", "same likeliest token", "KL mean, at least", "largest difference, at least"]
        columns += ["same answers", "with drafts the plain ones"]
        blocks.append(Table(columns, [_agreement(one) for one in found]))
        levels = [
            [f"{who_ran(side)}: {name}", _accepted(counts), f"{counts['accepted_per_proposed']:.0%}"]
            for side in sides
            for name, counts in (side["drafted"] or {"levels": {}})["levels"].items()
        ]
        blocks += [Table(["drafts", "tokens accepted", "of drafted"], levels)] if levels else []
    return [_EXPLAINED, *blocks] if blocks else []


def _bench(name: str, arguments: str, suffix: str = "") -> str:
    return f"python benchmarks/{name}.py {arguments} --json benchmarks/results/{name}-NAME{suffix}.json"


_PROMPTS = "MODEL FILE.jsonl:FIELD:COUNT"
_CHAINS = _bench("chains", f"{_PROMPTS} --arm SPEC")
_WITH_PEERS = _bench("chains", f"{_PROMPTS} --arm SPEC --llama-cpp PROGRAMS --python torch=PYTHON")
_ARMS = "--arm self:mxfp4 --arm DRAFT_MODEL --arm DRAFT_MODEL,self:mxfp4"
_IN_BF16 = _bench("chains", f"{_PROMPTS} --target-dtype bf16 {_ARMS}", "-bf16")
_SIDE_BY_SIDE = _bench("peers", "MODEL --isa native,avx2 --llama-cpp PROGRAMS --python ENGINE=PYTHON")
_PERPLEXITY = "cpuspec eval perplexity MODEL TEXT --save-logits REFERENCE"
_KL = "cpuspec eval kl OTHER_MODEL REFERENCE --json > benchmarks/results/kl-NAME.json"
_TASK = "cpuspec eval task humaneval DATA.jsonl -m MODEL --allow-code-execution --json > benchmarks/results/task-NAME.json"
_FOUR_ARMS = "cpuspec eval arms MODEL humaneval:DATA.jsonl --allow-code-execution --json > benchmarks/results/arms-NAME.json"
_PRICES = "--price-per-hour X --price-per-hour Y"
_BESIDE = f"cpuspec eval beside FILE FILE {_PRICES} --json > benchmarks/results/beside-NAME.json"
_RUNS = "benchmarks/results/runs"
_RECORDS = (
    f"cpuspec parity BACKEND -m MODEL --record {_RUNS}/ONE.json",
    f"cpuspec parity BACKEND {_RUNS}/ONE.json -m MODEL --record {_RUNS}/OTHER.json",
)

PARTS = (
    Part("Drafts over plain decoding", (_CHAINS, _IN_BF16), gains),
    Part("Other engines' drafts", (_WITH_PEERS,), drafts_of_peers),
    Part("Peers side by side", (_SIDE_BY_SIDE,), peers),
    Part("The cost of n rows", (_bench("peers", "MODEL --llama-cpp PROGRAMS --figures forwards"),), row_costs),
    Part("Acceptance, by position and level", (_CHAINS,), acceptance),
    Part("Training of draft heads", (_bench("training", "MODEL HEAD"),), trainings),
    Part("Memory", (_CHAINS, _bench("start", "MODEL")), memory),
    Part("Quality", (_bench("quality", "MODEL TEXT"),), quality),
    Part("Formats: quality against bits", (_PERPLEXITY, _KL), formats),
    Part("Tasks: quality against speed and bits, and the cost of a right answer", (_TASK, _FOUR_ARMS), tasks),
    Part("Beside GPUs and other engines", (_BESIDE,), elsewhere),
    Part("Identical answers", (_bench("identity", f"{_PROMPTS} --draft-model OTHER_MODEL"),), identity),
    Part("Backends and machines", _RECORDS, machines),
)


def _of(results: Sequence[Result], benchmark: str) -> Iterator[Result]:
    return (result for result in results if result["benchmark"] == benchmark)


def _parts(results: Sequence[Result]) -> Iterator[Result]:
    """Results of `peers.py`, one for each instruction set."""
    return (result | part for result in _of(results, "peers") for part in result["instruction_sets"].values())


def _newest(
    results: Sequence[Result], benchmark: str, subject: Callable[[Result], str] = lambda one: str(one["model"])
) -> list[Result]:
    """The newest result about each subject, by default about each model."""
    newest: dict[str, Result] = {}
    for result in _of(results, benchmark):
        newest.setdefault(subject(result), result)
    return list(newest.values())


def _chains(results: Sequence[Result]) -> Iterator[tuple[str, dict[str, Any]]]:
    """For each target and instruction set its sets of prompts, each from the newest file that has it."""
    sets: dict[str, dict[str, Any]] = {}
    for result in _of(results, "chains"):
        for name, arms in result["sets"].items():
            sets.setdefault(f"{_target(result)}: {OWN} with {result['machine']['isa']}", {}).setdefault(name, arms)
    yield from sets.items()


def _target(result: Result) -> str:
    return f"{result['model']}" + (f", target in {result['target_dtype']}" if result["target_dtype"] else "")


def _arm(spec: str, head: str) -> str:
    """An arm's name; over a 16-bit target with what ML-SpecQD calls it (arXiv 2503.13565)."""
    if "target in" not in head:
        return "plain" if spec == PLAIN else spec
    levels = SpecConfig.parse(spec).levels
    cast = [level.name == "self" for level in levels]
    if not levels:
        return "plain (GREEDY)"
    if len(levels) > 1 and cast[-1]:
        return f"{spec} (MULTI)"
    if cast == [True]:
        return f"{spec} ({levels[0].argument.upper()})"
    return spec if spec in (AUTO, "ngram", "suffix") or levels[0].name == "skip" else f"{spec} (DRAFT)"


def _fastest_over(result: Result, name: str, peer: str) -> str:
    """Of a set of prompts: our arm with most tokens/s, and how many times a peer's, prompt by prompt, with the interval."""
    rates = {spec: arm["tokens_per_s"] for spec, arm in result["sets"][name].items() if arm["tokens_per_s"]}
    if not rates:
        return ""
    best, prompts = max(rates, key=rates.__getitem__), [one for one in result["prompts"] if one["set"] == name]
    ratio, interval = mean_ratio(
        [one["arms"][best]["tokens_per_s"] for one in prompts],
        [one.get("peers", {}).get(peer, {}).get("tokens_per_s") for one in prompts],
    )
    return "" if ratio is None else f"{best}: {ratio:.2f} ({_interval(interval)})"


def _prompts(arms: Mapping[str, Any]) -> str:
    number = next(iter(arms.values()))["num_prompts"]
    return f"{number} prompt{'s' * (number > 1)}"


def who_ran(about: Mapping[str, Any]) -> str:
    """The name of a run's side, and the machine that it ran on."""
    where = about["device"] if about.get("device", "cpu") != "cpu" else about.get("processor", "an unknown machine")
    return f"{about['name']} on {where}"


def _agreement(found: Parity) -> list[str]:
    report = found.as_dict()
    return [
        who_ran(found.sides[1]),
        str(found.num_rows),
        f"{found.same_top:.2%}",
        f"{found.kl_mean:.2e}",
        f"{found.max_abs_logit_difference:.3g}",
        f"{report['num_identical']} of {report['num_prompts']}",
        _kept(found.sides[1]),
    ]


def _kept(side: Mapping[str, Any]) -> str:
    """Answers that drafts left as they were, and whether the backend promises all of them."""
    drafted = side["drafted"]
    promised = ", promised" if side["row_invariant"] else ""
    return f"{drafted['num_identical']} of {drafted['num_answers']}{promised}" if drafted else ""


def _spread(one: Mapping[str, Any] | None) -> str:
    return "" if one is None else f"{one['median']:.2f} ({one['min']:.2f} to {one['max']:.2f})"


def _accepted(counts: Mapping[str, Any]) -> str:
    return f"{counts['num_accepted_tokens']} of {counts['num_draft_tokens']}" if counts["num_draft_tokens"] else ""


def _interval(ends: Sequence[float | None]) -> str:
    return "" if ends[0] is None else f"{ends[0]:.2f} to {ends[1]:.2f}"


def _figure(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
