"""Draw the rows of `fastspec bench`: tokens per second by category, and the milliseconds of a round by phase.

    python benchmarks/plot.py benchmarks/results/bench_cpu.jsonl --out benchmarks/results/bench_cpu.png

A file may hold several runs, told apart by their date; the last one is drawn. Needs matplotlib (`pip install fastspec[bench]`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from fastspec.bench.report import OVERALL, summarise

COLOURS = ("#7f7f7f", "#e69f00", "#56b4e9", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#000000")
"""Told apart by the colour-blind too (Okabe and Ito); grey is transformers' plain generate."""
PHASES = {
    "pass": "#bbbbbb", "draft": "#8c510a", "score": "#5e3c99", "choose": "#b2abd2", "commit": "#dfc27d", "other": "#555555",
    "round": "#80624d", "judge": "#8073ac", "observe": "#c7a76c", "draft and score": "#a06a9c",
}  # fmt: skip
"""None of them the colour of a method."""

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
    summary, where = summarise(rows), rows[0]
    categories = list(dict.fromkeys(row["category"] for row in summary))
    methods = list(dict.fromkeys(row["method"] for row in summary))
    width = max(9.0, 1.5 + 0.24 * len(categories) * (len(methods) + 1))
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(width, 4.4 + 0.5 * len(methods)), height_ratios=(3.4, 0.5 * len(methods) + 0.6))
    speeds(top, summary, categories, methods)
    phases(bottom, [row for row in summary if row["category"] == OVERALL])
    figure.suptitle(
        f"{where['model']}, {where['device']}, {where['dtype']}, threads: {where['threads']}, batch: {where['batch']}, "
        f"at most {where['max_new_tokens']} new tokens",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def speeds(axes: Any, summary: list[dict[str, Any]], categories: list[str], methods: list[str]) -> None:
    """Grouped bars: the median of tokens per second, whiskers from the 20 to the 80 % quantile."""
    found = {(row["method"], row["category"]): row["tokens_per_second"] for row in summary}
    wide = 0.84 / len(methods)
    for index, method in enumerate(methods):
        at = [place - 0.42 + wide * (index + 0.5) for place in range(len(categories))]
        low, middle, high = zip(*(found.get((method, category), MISSING) for category in categories), strict=True)
        reach = [[m - q for m, q in zip(middle, low, strict=True)], [q - m for m, q in zip(middle, high, strict=True)]]
        colour = COLOURS[index % len(COLOURS)]
        axes.bar(at, middle, wide * 0.92, yerr=reach, color=colour, label=method, error_kw={"lw": 0.8, "capsize": 2})
    axes.set_xticks(range(len(categories)), [category.replace("_", " ") for category in categories], rotation=25, ha="right")
    axes.set_xlim(-0.6, len(categories) - 0.4)
    axes.set_ylabel("tokens/s, median over prompts\n(whiskers: 20 and 80 % quantiles)")
    axes.legend(ncols=len(methods), **LEGEND)
    axes.spines[["top", "right"]].set_visible(False)


def phases(axes: Any, whole: list[dict[str, Any]]) -> None:
    """Stacked bars of what a round of each method takes; `pass` is a peer's round as a whole, `other` what lies between the phases."""
    for place, row in enumerate(whole):
        if row["ms_per_round"] is None:
            continue
        left = 0.0
        parts = row["phases_ms"] | {"other": max(0.0, row["ms_per_round"][1] - sum(row["phases_ms"].values()))}
        for name, spent in parts.items():
            axes.barh(place, spent, left=left, color=PHASES.get(name, "#000000"), label=name, height=0.66)
            left += spent
        length = row["acceptance_length"][1]
        said = f"{left:.{0 if left >= 10 else 1}f} ms, {length:.2f} tokens"
        axes.annotate(said, (left, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(whole)), [row["method"] for row in whole])
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms a round (medians)")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), ncols=len(handles), **LEGEND)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
