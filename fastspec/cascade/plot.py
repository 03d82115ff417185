"""Pictures of a cascade: quality against cost, and reliability diagrams, from the rows of `fastspec cascade evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastspec.distribution import install_command
from fastspec.errors import FastSpecError

Row = dict[str, Any]

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00")
"""Told apart by the colour-blind too (Okabe and Ito); the stages' colours in the reliability diagrams, the first the frontier's."""
GREY, BLACK = "#7f7f7f", "#000000"
WIDTH, HEIGHT = 10.0, 3.7
"""Inches: of the picture, and of a set's row in it."""
STOPS = " (stops)"
"""Ends the name of a set whose random mixing is the same cascade with its stops drawn at random."""


def pictures() -> Any:
    """pyplot, drawing to files. Raises FastSpecError, with the command that installs it, where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise FastSpecError(f"a picture needs matplotlib: {install_command('bench')}") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(rows: list[Row], path: Path) -> None:
    """A row per set, as wide as a page: quality against cost on the left, reliability on the right where there are such rows. Needs
    matplotlib (the extra "bench")."""
    plt = pictures()
    sets = [name for name in dict.fromkeys(row["set"] for row in rows) if not name.endswith(STOPS)]
    reliable = [row for row in rows if row["kind"] == "reliability"]
    widths = (WIDTH * 0.6, WIDTH * 0.4) if reliable else (WIDTH,)
    figure, panels = plt.subplots(
        len(sets), len(widths), figsize=(WIDTH, HEIGHT * len(sets)), width_ratios=widths, squeeze=False, layout="constrained"
    )
    for place, name in enumerate(sets):
        axes = panels[place][0]
        frontier(axes, [row for row in rows if row["set"] == name and row["kind"] != "reliability"], name)
        mixed = [row for row in rows if row["set"] == name + STOPS and row["kind"] == "stage"]
        if mixed:
            corners = hull_corners([(row["cost"], row["quality"]) for row in mixed])
            axes.plot(*zip(*corners, strict=True), color=GREY, lw=1.2, ls="--", label="stops at random")
        axes.set_ylabel("mean quality")
        if place == 0:  # the same for all
            axes.legend(fontsize=8, frameon=False, loc="lower right")
        if reliable:
            reliability(panels[place][1], [row for row in reliable if row["set"] == name])
            panels[place][1].set_ylabel("share of good answers")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def frontier(axes: Any, rows: list[Row], name: str) -> None:
    """Quality against cost: the cascade by price, whiskers for the interval of its gain, single stages, random mixing, the oracle."""
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("stage", "frontier", "oracle", "oracle_curve", "area")}
    for row in kinds["oracle_curve"]:
        axes.plot(row["cost"], row["quality"], color=COLOURS[2], lw=1.2, ls="--", label="oracle")
    singles = sorted(kinds["stage"], key=lambda row: row["index"])
    corners = hull_corners([(row["cost"], row["quality"]) for row in singles])
    axes.plot(*zip(*corners, strict=True), color=GREY, lw=1.2, label="random mixing")
    if len(singles) > 2:
        ends = singles[0], singles[-1]
        axes.plot([row["cost"] for row in ends], [row["quality"] for row in ends], color=GREY, lw=1, ls=":", label="first and last mixed")
    for row in singles:
        axes.plot(row["cost"], row["quality"], "s", color=BLACK, ms=6, label="single stage" if row is singles[0] else None, zorder=4)
        last = row is singles[-1]
        place = {"xytext": (-6, 6), "ha": "right"} if last else {"xytext": (7, -4)}
        axes.annotate(row["stage"], (row["cost"], row["quality"]), textcoords="offset points", fontsize=8, **place)
    points = sorted(kinds["frontier"], key=lambda row: (row["cost"], row["quality"]))
    reach = [[max(0.0, row["gain"] - row["gain_low"]) for row in points], [max(0.0, row["gain_high"] - row["gain"]) for row in points]]
    axes.errorbar(
        [row["cost"] for row in points], [row["quality"] for row in points], yerr=reach, color=COLOURS[0], marker="o", ms=3.5, lw=1.4,
        elinewidth=0.7, capsize=1.5, label="cascade", zorder=3,
    )  # fmt: skip
    for row in kinds["area"]:
        name = f"{name}, {row['items']} items\nmean gain over random mixing: {100 * row['mean']:+.1f} points"
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("mean cost, ms an item")
    axes.margins(0.12)
    axes.spines[["top", "right"]].set_visible(False)


def hull_corners(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of the upper concave hull of (cost, quality), as far as quality rises, and on to the highest cost."""
    corners: list[tuple[float, float]] = []
    for cost, quality in sorted(points, key=lambda point: (point[0], -point[1])):
        if corners and quality <= corners[-1][1]:
            continue
        while len(corners) > 1 and slope(corners[-2], corners[-1]) <= slope(corners[-2], (cost, quality)):
            corners.pop()
        corners.append((cost, quality))
    return [*corners, (max(cost for cost, _ in points), corners[-1][1])]


def slope(one: tuple[float, float], two: tuple[float, float]) -> float:
    """Quality per cost from one point to another."""
    return (two[1] - one[1]) / (two[0] - one[0])


def reliability(axes: Any, rows: list[Row]) -> None:
    """Mean label against mean probability by bin, a line per stage; the dots' area grows with the items of the bin."""
    axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls=":")
    for place, row in enumerate(rows):
        colour = COLOURS[place % len(COLOURS)]
        seen = f", seen at {row['seen_at']}" if "seen_at" in row else ""
        told = f"{row['stage']}{seen}: ECE {row['ece']:.3f}"
        axes.plot(row["probability"], row["label"], color=colour, lw=1, label=told)
        most = max(row["count"])
        axes.scatter(row["probability"], row["label"], [8 + 70 * count / most for count in row["count"]], color=colour, alpha=0.8, lw=0)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_aspect("equal")
    axes.set_xlabel("predicted probability that the answer is good", fontsize=9)
    if rows:
        axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    axes.spines[["top", "right"]].set_visible(False)
