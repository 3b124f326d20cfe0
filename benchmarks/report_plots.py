"""Figures of the report, by matplotlib (`pip install "cpuspec[report]"`), as PNG. They know numbers and labels, and no benchmark.

Colours are those of Okabe and Ito, which colour-blind people tell apart; markers differ as well.
"""

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#999933")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")
_WIDTH, _BAR, _AROUND, _DPI = 8.5, 0.34, 0.85, 144  # inches of a figure, a bar, a panel's title and axis; dots per inch
_LINE = 0.155  # inches of a line of a label
_BETWEEN = 0.065  # inches between the entries of a legend
_LABEL = 40  # characters of a line of a label
_TICKS = 8  # that may stand where the values are


@dataclass(frozen=True)
class Bar:
    """A value, with the ends of its interval where it has one."""

    value: float
    low: float | None = None
    high: float | None = None


def bars(panels: Mapping[str, Mapping[str, Bar]], unit: str, digits: int = 2, reference: float | None = None) -> bytes:
    """Horizontal bars, a panel for each title, each bar with its value; a label has its colour in every panel.

    reference: what they are compared with, a line.
    """
    labels = list(dict.fromkeys(label for panel in panels.values() for label in panel))
    colours = dict(zip(labels, _cycle(COLOURS, len(labels)), strict=True))
    figure, axes = _panels(list(panels), _heights(panels))
    for axis, panel in zip(axes, panels.values(), strict=True):
        for place, (label, bar) in enumerate(panel.items()):
            axis.barh(place, bar.value, 0.7, color=colours[label], alpha=0.85)
            ends = (bar.value, bar.value) if bar.low is None or bar.high is None else (bar.low, bar.high)
            if ends[0] < ends[1]:
                axis.plot(ends, (place, place), color="black", linewidth=1.2, marker="|", markersize=7)
            axis.annotate(
                f"{bar.value:.{digits}f}",
                (max(bar.value, ends[1]), place),
                (5, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        axis.set_yticks(range(len(panel)), [_wrapped(label) for label in panel], fontsize=9)
        axis.invert_yaxis()
        most = max((max(bar.value, bar.high or 0) for bar in panel.values()), default=1)
        axis.set_xlim(0, 1.15 * most)
        axis.set_xlabel(unit)
        if reference is not None:
            axis.axvline(reference, color="#555555", linestyle=":", linewidth=1.2)
    return _png(figure)


def curves(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    axes_labels: tuple[str, str],
    diagonal: str | None = None,
    share: bool = False,
) -> bytes:
    """Lines over whole numbers, a panel for each title, its legend to the right of it.

    diagonal: what the line y = x stands for, if it is drawn. share: whether values are from 0 to 1.
    """
    from matplotlib.ticker import FixedLocator, MaxNLocator

    figure, axes = _panels(list(panels), [max(2.2, _legend_height([*panel, diagonal or ""])) for panel in panels.values()])
    for axis, panel in zip(axes, panels.values(), strict=True):
        for number, (label, points) in enumerate(panel.items()):
            x, y = zip(*points, strict=True)
            style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
            axis.plot(x, y, DASHES[number // len(COLOURS) % len(DASHES)], label=_wrapped(label), markersize=5, **style)
        most = max((x for points in panel.values() for x, _ in points), default=1)
        highest = max((y for points in panel.values() for _, y in points), default=1)
        if diagonal:
            axis.plot((1, most), (1, most), color="#777777", linestyle=":", linewidth=1.2, label=diagonal)
        axis.set_ylim(0, 1.03 if share else 1.1 * highest)
        places = sorted({x for points in panel.values() for x, _ in points})
        axis.xaxis.set_major_locator(FixedLocator(places) if len(places) <= _TICKS else MaxNLocator(integer=True))
        axis.set_xlabel(axes_labels[0])
        axis.set_ylabel(axes_labels[1])
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)
    return _png(figure)


def _legend_height(labels: Sequence[str]) -> float:
    """Inches of a legend with one entry below the other."""
    return sum(_LINE * (_wrapped(label).count("\n") + 1) + _BETWEEN for label in labels) + _BETWEEN


def _heights(panels: Mapping[str, Mapping[str, object]]) -> list[float]:
    """Inches for the bars of each panel, and for their labels."""
    lines = max((_wrapped(label).count("\n") + 1 for panel in panels.values() for label in panel), default=1)
    return [max(_BAR, _LINE * (lines + 0.5)) * max(len(panel), 1) for panel in panels.values()]


def _panels(titles: Sequence[str], heights: Sequence[float]) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, sum(heights) + _AROUND * len(heights)), dpi=_DPI, layout="constrained")
    grid = figure.subplots(len(titles), 1, squeeze=False, gridspec_kw={"height_ratios": list(heights)})
    axes = [row[0] for row in grid]
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title("\n".join(textwrap.wrap(title, 90)), fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
    return figure, axes


def _png(figure: "Figure") -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def _wrapped(label: str) -> str:
    """A label in lines that end at spaces and after commas: a chain's name has no spaces."""
    after_comma = "\x1f"  # marks where there was no space
    lines = textwrap.fill(re.sub(r",(?=\S)", f",{after_comma} ", label), _LABEL, break_on_hyphens=False)
    return lines.replace(f"{after_comma} ", "").replace(after_comma, "")


def _cycle(values: Sequence[str], count: int) -> list[str]:
    return [values[number % len(values)] for number in range(count)]
