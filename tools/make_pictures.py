"""The pictures of the READMEs, as SVG, from `benchmarks/results` and from what the engine does.

They suit light and dark pages. speed.svg and rows.svg show medians of the newest records of a real model. The others explain.
`tools/make_readme_tables.py` writes them.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from cpuspec.formats import get_format
from cpuspec.formats.packing import pack
from cpuspec.formats.tensor import QuantTensor
from tools.make_readme_tables import KINDS, OWN, Result

MODEL = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
PEER = "llama.cpp"

_STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 12px } .title { font-size: 16px; font-weight: 600 }
.code { font-family: ui-monospace, monospace; white-space: pre } .end { text-anchor: end } .middle { text-anchor: middle }
.axis { stroke: #8c959f; fill: none } .box { fill: #f6f8fa; stroke: #8c959f } .own { fill: #0969da } .drafted { fill: #1a7f37 }
.peer { fill: #afb8c1 } .peers { fill: #8c959f } .yes { fill: #dafbe1; stroke: #1a7f37 } .no { fill: #ffebe9; stroke: #cf222e }
.line-own { stroke: #0969da; fill: none; stroke-width: 3 } .line-peer { stroke: #8c959f; fill: none; stroke-width: 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .box { fill: #161b22; stroke: #6e7681 } .axis { stroke: #6e7681 } .own { fill: #4493f8 }
  .drafted { fill: #3fb950 } .peer { fill: #484f58 } .peers { fill: #6e7681 } .yes { fill: #12261e; stroke: #3fb950 }
  .no { fill: #25171c; stroke: #f85149 } .line-own { stroke: #4493f8 } .line-peer { stroke: #6e7681 }
}
"""


def pictures(results: Mapping[str, Result]) -> dict[str, str]:
    """Every picture's SVG by its name."""
    return {"speed": speed(results), "rows": rows(results), "draft": draft(), "round": timeline(), "panel": panel()}


class Svg:
    """An SVG being drawn: elements with the classes of `_STYLE`."""

    def __init__(self, width: int, height: int, description: str) -> None:
        self.width, self.height = width, height
        self._parts = [f"<title>{escape(description)}</title>", f"<style>{_STYLE}</style>"]

    def text(self, x: float, y: float, text: str, classes: str = "") -> None:
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{classes}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, classes: str = "box", radius: int = 3) -> None:
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" class="{classes}"/>')

    def line(self, points: Sequence[tuple[float, float]], classes: str = "axis") -> None:
        listed = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{listed}" class="{classes}"/>')

    def arrow(self, x: float, y: float, to_x: float) -> None:
        """A horizontal arrow."""
        self.line([(x, y), (to_x, y)])
        self.line([(to_x - 6, y - 4), (to_x, y), (to_x - 6, y + 4)])

    def labelled(self, x: float, y: float, width: float, text: str, classes: str = "box", height: float = 30) -> None:
        """A box with a text in its middle."""
        self.box(x, y, width, height, classes)
        self.text(x + width / 2, y + height / 2 + 5, text, "middle small")

    def done(self) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img">'
        return "\n".join([head, *self._parts, "</svg>", ""])


def _newest(results: Mapping[str, Result], benchmark: str, has: str) -> Result:
    return next(r for r in results.values() if r["benchmark"] == benchmark and r["model"] == MODEL and r.get(has))


# ------------------------------------------------------------------------------------------------------------------------- speed


_TEXTS = {
    "conversations": "conversation",
    **KINDS,
    "humaneval:complete": "code, repeated in the chat (HumanEval)",
}


def speed(results: Mapping[str, Result]) -> str:
    """Tokens per second by kind of text: both engines plain, and each with its best drafts."""
    record, kinds = next((one, kinds) for one in results.values() if len(kinds := _compared_kinds(one)) > 2)
    svg = Svg(760, 120 + 84 * len(kinds), f"Tokens per second of {OWN} and {PEER} by kind of text")
    svg.text(20, 28, "Tokens per second, Qwen2.5-Coder 1.5B Q4_K_M, two cores", "title")
    svg.text(20, 48, f"{record['machine']['processor']}, {record['machine']['isa']}; greedy; the same answers in all arms", "small")
    scale = 460 / max(_best(arms)[1] for kind in kinds for arms in (record["sets"][kind], record["peers"]["sets"][kind]))
    for number, kind in enumerate(kinds):
        y = 70 + 84 * number
        svg.text(20, y + 12, _TEXTS[kind])
        own, peer = record["sets"][kind], record["peers"]["sets"][kind]
        arms = [
            ("peer", f"{PEER}", peer[f"{PEER}: none"]["tokens_per_s"]),
            ("peers", f"{PEER}, best drafts", _best(peer)[1]),
            ("own", f"{OWN}, no drafts", own["none"]["tokens_per_s"]),
            ("drafted", f"{OWN}, best drafts", _best(own)[1]),
        ]
        for place, (classes, label, value) in enumerate(arms):
            svg.text(175, y + 28 + 15 * place, label, "small end")
            svg.box(182, y + 18 + 15 * place, value * scale, 12, classes, 2)
            svg.text(188 + value * scale, y + 28 + 15 * place, f"{value:.0f}", "small")
    return svg.done()


def _compared_kinds(record: Result) -> list[str]:
    """The kinds of text on which a record has both engines, each without drafts, too."""
    if record["benchmark"] != "chains" or record["model"] != MODEL or "peers" not in record:
        return []
    peers = record["peers"]["sets"]
    return [kind for kind in _TEXTS if kind in record["sets"] and f"{PEER}: none" in peers.get(kind, {})]


def _best(arms: Mapping[str, Any]) -> tuple[str, float]:
    """The arm with the most tokens per second, and how many."""
    return max(((name, arm["tokens_per_s"]) for name, arm in arms.items()), key=lambda pair: pair[1])


# -------------------------------------------------------------------------------------------------------------------------- rows


def rows(results: Mapping[str, Result]) -> str:
    """The time of a forward over 1 to 16 tokens, over that of one token."""
    record = _newest(results, "peers", "instruction_sets")
    part = next(iter(record["instruction_sets"].values()))
    svg = Svg(760, 360, "The time of a forward over several tokens, over that of one")
    svg.text(20, 28, "Time of a forward over n tokens, over that of one token", "title")
    svg.text(20, 48, f"Qwen2.5-Coder 1.5B Q4_K_M, {record['machine']['processor']}, {part['instructions'][OWN]}", "small")
    counts = [1, 2, 4, 8, 16]
    lines = {
        engine: [1.0, *(part["over_one_row"][engine][f"{n} rows"]["median"] for n in counts[1:])] for engine in part["over_one_row"]
    }
    top = max(map(max, lines.values()))
    place = [80 + 150 * number for number in range(len(counts))]
    svg.line([(80, 70), (80, 310), (700, 310)])
    for x, count in zip(place, counts, strict=True):
        svg.text(x, 330, f"{count} token{'s' * (count > 1)}", "small middle")
    for engine, values in lines.items():
        kind = "own" if engine == OWN else "peer"
        points = [(x, 310 - 230 * value / top) for x, value in zip(place, values, strict=True)]
        svg.line(points, f"line-{kind}")
        for (x, y), value in list(zip(points, values, strict=True))[1:]:
            svg.text(x, y + (18 if engine == OWN else -8), f"{value:.2f}", "small middle")
        svg.text(points[1][0] + 30, points[1][1] + (34 if engine == OWN else -22), engine, "small")
    return svg.done()


# ----------------------------------------------------------------------------------------------------- pictures that explain


def draft() -> str:
    """The way of a draft: a drafter guesses, one forward checks, accepted tokens stay."""
    svg = Svg(760, 250, "A draft's way: guessed cheaply, checked in one forward, accepted up to the first wrong token")
    svg.text(20, 28, "One round: four tokens guessed, one forward, three tokens gained", "title")
    words, chosen = ["over", "the", "old", "dog"], ["over", "the", "lazy"]
    svg.text(20, 72, "the answer so far")
    svg.labelled(170, 52, 210, "The quick brown fox jumps")
    svg.text(20, 122, "a drafter guesses")
    for number, word in enumerate(words):
        svg.labelled(390 + 80 * number, 102, 70, word)
    svg.text(20, 172, "the model, in one forward")
    for number, word in enumerate(chosen):
        svg.labelled(390 + 80 * number, 152, 70, word, "yes" if word == words[number] else "no")
    svg.text(630, 172, "not read: it follows", "small")
    svg.text(630, 188, "a wrong token", "small")
    svg.text(20, 222, "the answer")
    svg.labelled(170, 202, 440, "The quick brown fox jumps over the lazy")
    return svg.done()


def timeline() -> str:
    """What a round of drafting costs beside plain steps."""
    svg = Svg(760, 220, "Plain steps and rounds with drafts on one line of time")
    svg.text(20, 28, "The same four tokens, without drafts and with one round", "title")
    svg.text(20, 72, "plain")
    for number in range(4):
        svg.labelled(90 + 152 * number, 52, 150, "one forward, one token")
    svg.text(20, 132, "drafted")
    for number in range(4):
        svg.labelled(90 + 27 * number, 112, 25, f"{number + 1}", "yes")
    svg.labelled(200, 112, 180, "one forward over 5 tokens")
    svg.text(392, 132, "5 tokens if all drafts are right, else those before the first wrong one and one more", "small")
    svg.arrow(90, 180, 700)
    svg.text(
        90,
        200,
        "time, drawn for a drafter that takes .18 of a forward for a token, and forwards over 5 tokens that take 1.2",
        "small",
    )
    return svg.done()


def panel() -> str:
    """A panel of packed Q4_K weights, and one group multiplied by hand with the bytes of a real block."""
    format = get_format("q4_k")
    values = np.linspace(-1, 1, 16 * 256, dtype=np.float32).reshape(16, 256) ** 3
    tensor = QuantTensor.encode(format, values)
    parts = format.split(tensor.data)
    num_bytes = pack(tensor).data.nbytes
    svg = Svg(760, 330, "The layout of a panel of Q4_K, and one group of 32 weights multiplied")
    svg.text(20, 28, f"A panel of Q4_K: 16 outputs by 256 inputs in {num_bytes:,} bytes", "title")
    svg.labelled(20, 52, 480, "codes: 4 bits of each weight, 16 outputs side by side", height=44)
    svg.labelled(506, 52, 110, "8 scales s, z", height=44)
    svg.labelled(622, 52, 110, "d, base", height=44)
    svg.text(20, 130, "weight = d · s · code - base · z", "code")
    codes, s, z = parts["codes"][0, :32], int(parts["s"][0, 0]), int(parts["z"][0, 0])
    d, base = float(parts["d"][0, 0]), float(parts["base"][0, 0])
    x = np.arange(32) % 5 - 2
    dot, total = int(codes.astype(int) @ x), int(x.sum())
    lines = [
        "One group of output 0, with 32 inputs that were rounded to integers:",
        f"codes    {' '.join(map(str, codes[:12]))} ...",
        f"inputs   {' '.join(map(str, x[:12]))} ...",
        f"sum of code · input = {dot}        sum of inputs = {total}        all in integers",
        f"d · s = {d:.6f} · {s}        base · z = {base:.6f} · {z}",
        f"result = {d * s:.5f} · {dot} - {base * z:.5f} · {total} = {d * s * dot - base * z * total:.4f}",
        f"the same with the weights as floats: {float(format.decode(tensor.data)[0, :32] @ x.astype(np.float32)):.4f}",
    ]
    for number, line in enumerate(lines):
        svg.text(20, 165 + 24 * number, line, "small code" if number else "small")
    return svg.done()
