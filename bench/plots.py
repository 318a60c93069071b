"""One plot: ratios as bars around 1, each with the bound it should keep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.machine import Machine
from bench.results import Comparison

_COLOURS = {True: "#2a7f62", False: "#b3443c", None: "#5b7083"}
_BAR_INCHES, _FRAME_INCHES = 0.34, 1.3


def draw(name: str, machine: Machine, comparisons: Sequence[Comparison], path: Path) -> None:
    """Writes an SVG. The same records give the same bytes."""
    figure = Figure(figsize=(9.0, _FRAME_INCHES + _BAR_INCHES * len(comparisons)))
    axes = figure.add_subplot()
    places = range(len(comparisons))
    axes.barh(
        places,
        [each.ratio for each in comparisons],
        color=[_COLOURS[each.holds] for each in comparisons],
        height=0.7,
    )
    for place, each in zip(places, comparisons, strict=True):
        axes.annotate(
            f"{each.ratio:.3g}",
            (each.ratio, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
        bound = each.at_least if each.at_least is not None else each.at_most
        if bound is not None:
            axes.plot([bound, bound], [place - 0.42, place + 0.42], color="black", linewidth=1.6)
    axes.axvline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes.set_yticks(
        places, [f"{each.case}: {each.ours} / {each.against}" for each in comparisons], fontsize=7
    )
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    quantities = ", ".join(dict.fromkeys(each.quantity for each in comparisons))
    axes.set_xlabel(f"ratio of {quantities}; black: the bound (≥ or ≤, see the table)", fontsize=8)
    axes.set_title(
        f"{name}: {machine.cpu}, {machine.core_count} cores, {machine.date}",
        fontsize=9,
        loc="left",
    )
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
