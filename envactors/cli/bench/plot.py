"""Chart of a bench."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from envactors.cli.bench.figures import Comparison

FORMATS = ("pdf", "png", "svg")

_ACCENT, _OTHERS = "#2a7f62", "#a9b4bd"


def draw_comparisons(comparisons: Sequence[Comparison], title: str, path: Path) -> None:
    """Draw the env-steps per second of each side, with quartiles.

    Args:
        comparisons: The sides that ran.
        title: What was measured.
        path: Where the chart goes; its suffix says in which of `FORMATS`.
    """
    figure = Figure(figsize=(8, 1.2 + 0.42 * len(comparisons)), layout="constrained")
    axes = figure.subplots()
    medians = [one.rate.median for one in comparisons]
    spreads = [
        [one.rate.median - one.rate.lower_quartile for one in comparisons],
        [one.rate.upper_quartile - one.rate.median for one in comparisons],
    ]
    colors = [_ACCENT if one.is_ours else _OTHERS for one in comparisons]
    bars = axes.barh([one.title for one in comparisons], medians, color=colors, xerr=spreads, ecolor="#444444")
    axes.bar_label(bars, [f" {median:,.0f}" for median in medians], padding=6, fontsize=9)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("env-steps per second: median and quartiles")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.18)
    with mpl.rc_context({"svg.fonttype": "none"}):  # text stays text: smaller, and to be searched
        figure.savefig(path)
