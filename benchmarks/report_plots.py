"""Figures of the report, by matplotlib (`pip install "cpuspec[report]"`), as PNG. They know numbers and labels, and no benchmark.

Colours are those of Okabe and Ito, which colour-blind people tell apart; markers differ as well.
"""

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#999933")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")
_WIDTH, _AROUND, _LINE, _DPI = (
    8.5,
    0.85,
    0.22,
    144,
)  # inches of a figure, a panel's title and axis, a line of a label; dots per inch


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
    colours = dict(zip(dict.fromkeys(label for panel in panels.values() for label in panel), cycle(COLOURS)))
    figure, axes = _panels(panels)
    for axis, panel in zip(axes, panels.values(), strict=True):
        ends = [(bar.value - (bar.low or bar.value), (bar.high or bar.value) - bar.value) for bar in panel.values()]
        drawn = axis.barh(
            [_wrapped(label) for label in panel],
            [bar.value for bar in panel.values()],
            0.7,
            xerr=[[max(end, 0) for end in side] for side in zip(*ends, strict=True)],
            color=[colours[label] for label in panel],
            alpha=0.85,
        )
        axis.bar_label(drawn, fmt=f"%.{digits}f", padding=5, fontsize=9)
        axis.invert_yaxis()
        axis.margins(x=0.15)
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
    """Lines over numbers, a panel for each title, its legend to the right of it.

    diagonal: what the line y = x stands for, if it is drawn. share: whether values are from 0 to 1.
    """
    from matplotlib import cycler
    from matplotlib.ticker import MaxNLocator

    figure, axes = _panels(panels, least=2.2)
    for axis, panel in zip(axes, panels.values(), strict=True):
        axis.set_prop_cycle(cycler(linestyle=DASHES) * (cycler(color=COLOURS) + cycler(marker=MARKERS)))
        for label, points in panel.items():
            axis.plot(*zip(*points, strict=True), label=_wrapped(label), markersize=5)
        if diagonal:
            most = max(x for points in panel.values() for x, _ in points)
            axis.plot((1, most), (1, most), color="#777777", linestyle=":", marker="", linewidth=1.2, label=diagonal)
        axis.set_ylim(0, 1.03 if share else None)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlabel(axes_labels[0])
        axis.set_ylabel(axes_labels[1])
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)
    return _png(figure)


def _panels(panels: Mapping[str, Mapping[str, object]], least: float = 0.0) -> "tuple[Figure, list[Axes]]":
    """A figure with axes for each panel, one below the other, as high as their labels need, and at least `least` inches."""
    from matplotlib.figure import Figure

    heights = [
        max(least, sum(_LINE * (_wrapped(label).count("\n") + 1.5) for label in ("", *panel))) + _AROUND
        for panel in panels.values()
    ]
    figure = Figure(figsize=(_WIDTH, sum(heights)), dpi=_DPI, layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    axes = [row[0] for row in grid]
    for axis, title in zip(axes, panels, strict=True):
        axis.set_title("\n".join(textwrap.wrap(title, 90)), fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
    return figure, axes


def _png(figure: "Figure") -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def _wrapped(label: str) -> str:
    """A label in lines of 40 characters. A chain's name has no spaces, so it gets one after each comma."""
    return textwrap.fill(", ".join(part.strip() for part in label.split(",")), 40, break_on_hyphens=False)
