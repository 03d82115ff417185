"""Draw the rows of `fastspec bench`: tokens per second by category, and the milliseconds of a round by phase.

    python benchmarks/plot.py benchmarks/results/bench_cpu.jsonl --out benchmarks/results/bench_cpu.png

A file may hold several runs, told apart by their date; the last one is drawn, and of several batch sizes the first. Needs matplotlib
(`pip install "fastspec-transformers[bench]"`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from fastspec.programs.bench.report import OVERALL, by_size, summarise

COLOURS = {
    "transformers": "#7f7f7f", "prompt-lookup": "#b8b8b8", "assisted": "#dedede", "static-compile": "#4a4a4a",
    "autoregressive": "#56b4e9", "nasd": "#009e73", "speculative": "#f0e442", "eagle": "#e69f00", "eagle2": "#d55e00", "eagle3": "#0072b2",
}  # fmt: skip
"""A method looks the same in every picture. What transformers offers is grey, the assistants' colours are told apart by the colour-blind
too (Okabe and Ito)."""
PHASES = {
    "pass": "#bbbbbb", "draft": "#8c510a", "score": "#5e3c99", "choose": "#b2abd2", "commit": "#dfc27d", "other": "#555555",
    "round": "#80624d", "judge": "#8073ac", "observe": "#c7a76c", "draft and score": "#a06a9c",
}  # fmt: skip
"""None of them the colour of a method."""

LINE = 8
"""Most categories in a line of bars; the others go on in a further one."""
APART = 20
"""How many times the longest round may take the shortest one's time on a linear axis; beyond it the axis is logarithmic."""
MISSING = [float("nan")] * 3
LEGEND: dict[str, Any] = {"fontsize": 8, "frameon": False, "loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="jsonl file that `fastspec bench --out` wrote")
    parser.add_argument("--out", type=Path, help="PNG to write; by default beside the rows")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.read_text(encoding="utf-8").splitlines()]
    draw([row for row in rows if row["date"] == rows[-1]["date"]], options.out or options.rows.with_suffix(".png"))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Both pictures of one run, one above the other."""
    rows = by_size(rows)[0]
    summary, where = summarise(rows), rows[0]
    categories = list(dict.fromkeys(row["category"] for row in summary))
    found = {row["method"] for row in summary}
    methods = sorted(found, key=lambda name: [*COLOURS, name].index(name))
    each = -(-len(categories) // -(-len(categories) // LINE))  # as many in the last line as in the others, or a few less
    lines = [categories[start : start + each] for start in range(0, len(categories), each)]
    heights = [3.0] * len(lines) + [0.36 * len(methods) + 0.6]
    figure, axes = plt.subplots(len(heights), 1, figsize=(11, sum(heights) + 0.9 * len(heights) + 0.6), height_ratios=heights)
    most = max(row["tokens_per_second"][2] for row in summary)
    for ax, line in zip(axes, lines, strict=False):
        speeds(ax, summary, line, methods, each)
        ax.set_ylim(0, 1.05 * most)
    axes[0].legend(ncols=min(5, len(methods)), **LEGEND)
    whole = {row["method"]: row for row in summary if row["category"] == OVERALL}
    phases(axes[-1], [whole[method] for method in methods])
    figure.suptitle(
        f"{where['model']}, {where['device']}, {where['dtype']}, threads: {where['threads']}, batch: {where['batch']}, "
        f"at most {where['max_new_tokens']} new tokens",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def speeds(axes: Any, summary: list[dict[str, Any]], categories: list[str], methods: list[str], room: int) -> None:
    """Grouped bars with room for `room` categories: the median of tokens per second, whiskers from the 20 to the 80 % quantile."""
    found = {(row["method"], row["category"]): row["tokens_per_second"] for row in summary}
    wide = 0.84 / len(methods)
    for index, method in enumerate(methods):
        at = [place - 0.42 + wide * (index + 0.5) for place in range(len(categories))]
        low, middle, high = zip(*(found.get((method, category), MISSING) for category in categories), strict=True)
        reach = [[m - q for m, q in zip(middle, low, strict=True)], [q - m for m, q in zip(middle, high, strict=True)]]
        look = {"color": COLOURS.get(method, "#000000"), "edgecolor": "#555555", "linewidth": 0.4}
        axes.bar(at, middle, wide * 0.94, yerr=reach, label=method, error_kw={"lw": 0.7, "capsize": 1.5}, **look)
    axes.set_xticks(range(len(categories)), [category.replace("_", " ") for category in categories])
    axes.set_xlim(-0.6, max(room, 3) - 0.4)
    axes.set_ylabel("tokens/s, median over prompts\n(whiskers: 20 and 80 % quantiles)", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def phases(axes: Any, whole: list[dict[str, Any]]) -> None:
    """Stacked bars of what a round of each method takes; `pass` is a peer's round as a whole, `other` what lies between the phases."""
    ends = []
    for place, row in enumerate(whole):
        if row["ms_per_round"] is None:
            continue
        left = 0.0
        parts = row["phases_ms"] | {"other": max(0.0, row["ms_per_round"][1] - sum(row["phases_ms"].values()))}
        for name, spent in parts.items():
            axes.barh(place, spent, left=left, color=PHASES.get(name, "#000000"), label=name, height=0.66)
            left += spent
        ends.append(left)
        length = row["acceptance_length"][1]
        said = f"{left:.{0 if left >= 10 else 1}f} ms, {length:.2f} tokens"
        axes.annotate(said, (left, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(whole)), [row["method"] for row in whole])
    axes.invert_yaxis()
    if ends and max(ends) > APART * min(ends):
        axes.set_xscale("log")
        axes.set_xlim(min(ends) / 10, 6 * max(ends))
        axes.set_xlabel("ms a round (medians); logarithmic: the end of a part counts, not its width")
    else:
        axes.margins(x=0.16)
        axes.set_xlim(left=0)
        axes.set_xlabel("ms a round (medians)")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), ncols=len(handles), **LEGEND)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
