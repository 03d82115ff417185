"""Draw the rows of `fastspec bench`, full_size.py or peers.py, which the rows tell apart.

    python benchmarks/plot.py benchmarks/results/bench_cpu.jsonl --out bench_cpu.png
    python benchmarks/plot.py benchmarks/results/peers_h200.jsonl benchmarks/results/peers_h100.jsonl --out peers.png

A bench: tokens per second by category, and the milliseconds of a round by phase; of several runs, told apart by their
date, the last, and of several batch sizes the first. full_size.py: where a round's time goes. peers.py: how many times
vLLM's speed fastspec has, by case and device. Needs matplotlib (`pip install -e ".[bench]"`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
from common import Row, parser_of, read
from pages import case_name, first_token, peer_cases, peer_figure
from PIL import Image

from fastspec.programs.bench.report import OVERALL, by_size, summarise

matplotlib.use("Agg")
from matplotlib import pyplot as plt

METHODS = ("transformers", "prompt-lookup", "assisted", "static-compile", "autoregressive", "nasd", "speculative")
METHODS += ("eagle", "eagle2", "eagle3")
HUES = ["#7f7f7f", "#b8b8b8", "#dedede", "#4a4a4a", "#56b4e9", "#009e73", "#f0e442", "#e69f00", "#d55e00", "#0072b2"]
COLOURS = dict(zip(METHODS, HUES, strict=True))
"""A method looks the same in every picture. What transformers offers is grey, the assistants' colours are told apart by
the colour-blind too (Okabe and Ito)."""
STEPS = ("pass", "draft", "score", "choose", "commit", "other", "round", "judge", "observe", "draft and score")
HUES = ["#bbbbbb", "#8c510a", "#5e3c99", "#b2abd2", "#dfc27d", "#555555", "#80624d", "#8073ac", "#c7a76c", "#a06a9c"]
PHASES = dict(zip(STEPS, HUES, strict=True))
"""None of them the colour of a method."""
PARTS = dict(zip(("draft", "score", "choose", "commit", "observe", "host"), plt.get_cmap("Dark2").colors, strict=False))
LINE = 8
"""Most categories in a line of bars; the others go on in a further one."""
APART = 20
"""How many times the longest round may take the shortest one's time on a linear axis; beyond it the axis is
logarithmic."""
MISSING = [float("nan")] * 3
LEGEND: dict[str, Any] = {"fontsize": 8, "frameon": False, "loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("rows", type=Path, nargs="+", help="jsonl files; --out is a PNG, by default beside the first")
    args = parser.parse_args(arguments)
    rows = [row for file in args.rows for row in read(file)]
    path = args.out or args.rows[0].with_suffix(".png")
    if "engine" in rows[0]:
        beside(rows, path)
    elif "shape" in rows[0]:
        rounds(rows, path)
    else:
        draw([row for row in rows if row.get("date") == rows[-1].get("date")], path)


def save(figure: Any, path: Path) -> None:
    """Write a picture in few colours, which takes a third of the bytes."""
    figure.savefig(path, dpi=110)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)
    plt.close(figure)


def draw(rows: list[Row], path: Path) -> None:
    """Both pictures of one run, one above the other."""
    rows = by_size(rows)[0]
    summary, where = summarise(rows), rows[0]
    categories = list(dict.fromkeys(row["category"] for row in summary))
    found = {row["method"] for row in summary}
    methods = sorted(found, key=lambda name: [*COLOURS, name].index(name))
    each = math.ceil(len(categories) / math.ceil(len(categories) / LINE))  # about as many in the last line
    lines = [categories[start : start + each] for start in range(0, len(categories), each)]
    heights = [3.0] * len(lines) + [0.36 * len(methods) + 0.6]
    size = (11, sum(heights) + 0.9 * len(heights) + 0.6)
    figure, axes = plt.subplots(len(heights), 1, figsize=size, height_ratios=heights)
    most = max(row["tokens_per_second"][2] for row in summary)
    for ax, line in zip(axes, lines, strict=False):
        speeds(ax, summary, line, methods, each)
        ax.set_ylim(0, 1.05 * most)
    axes[0].legend(ncols=min(5, len(methods)), **LEGEND)
    whole = {row["method"]: row for row in summary if row["category"] == OVERALL}
    phases(axes[-1], [whole[method] for method in methods])
    told = f"{where['model']}, {where['device']}, {where['dtype']}, threads: {where['threads']}"
    figure.suptitle(f"{told}, batch: {where['batch']}, at most {where['max_new_tokens']} new tokens", fontsize=11)
    figure.tight_layout()
    save(figure, path)


def speeds(axes: Any, summary: list[Row], categories: list[str], methods: list[str], room: int) -> None:
    """Grouped bars with room for `room` categories: the median of tokens per second, whiskers from the 20 to the 80 %
    quantile."""
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


def phases(axes: Any, whole: list[Row]) -> None:
    """Stacked bars of what a round of each method takes; `pass` is a peer's round as a whole, `other` what lies between
    the phases."""
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


def rounds(rows: list[Row], path: Path) -> None:
    """Stacked bars of the medians of a round's parts, one per shape, method and batch, with the floor of each."""
    rows = sorted((row for row in rows if row.get("parts_ms")), key=lambda row: (row["shape"], row["batch"]))
    figure, axes = plt.subplots(figsize=(9, 0.45 * len(rows) + 1.6), layout="constrained")
    for place, row in enumerate(rows):
        left = 0.0
        for part, colour in PARTS.items():  # "draft 3" and its like belong to the drafting
            width = sum(middle for name, (_, middle, _) in row["parts_ms"].items() if name.split(" ")[0] == part)
            axes.barh(place, width, left=left, color=colour, label=part if place == 0 else None)
            left += width
        floor, label = [row["floor_ms"]] * 2, "weights read once" if place == 0 else None
        axes.plot(floor, [place - 0.45, place + 0.45], color="black", linewidth=2, label=label)
        axes.text(left, place, f" {left:.2f} ms", va="center", fontsize=8)
    labels = [f"{row['shape']}, {row['method']}, batch {row['batch']}" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"median ms of a round's parts, {rows[0]['device']}, {rows[0]['dtype']}")
    axes.legend(fontsize=8, loc="lower right")
    save(figure, path)


def beside(rows: list[Row], path: Path) -> None:
    """A bar for each case of each device, from 1 to the ratio of fastspec's speed to vLLM's, with both figures; then
    the first tokens. Of several chains of vLLM the quickest counts."""
    panels: list[tuple[str, list[tuple[str, str, float]]]] = []
    firsts: list[tuple[str, str, float]] = []
    for device in dict.fromkeys(row["device"] for row in rows):
        bars = []
        for case, (ours, theirs) in peer_cases(row for row in rows if row["device"] == device).items():
            best = min(theirs, key=lambda row: peer_figure(ours, row)[2])
            here, there, ratio = peer_figure(ours, best)
            name, count, before = case_name(case, best)
            name += f", {count} row{'s' * (count != '1')}" + ("" if before == "prompts" else f", {before} before")
            bars.append((name, f"{there} → {here}", ratio))
            if "first_token_s" in ours:
                told, there, here, ratio = first_token(case, ours, best)
                firsts.append((f"{told}, {before} before, {device.split()[1]}", f"{there} → {here} ms", ratio))
        panels.append((f"One {' '.join(device.split()[:2])}: tokens per second, vLLM → fastspec", bars))
    panels.append(("First token", firsts))
    heights = [0.26 * len(bars) + 0.7 for _, bars in panels]
    size = (11, sum(heights))
    figure, axes = plt.subplots(len(panels), 1, figsize=size, height_ratios=heights, sharex=True, layout="constrained")
    for ax, (title, bars) in zip(axes, panels, strict=True):
        for place, (_, said, ratio) in enumerate(bars):
            ax.barh(place, ratio - 1, left=1, color=COLOURS["eagle3" if ratio >= 1 else "eagle"], height=0.7)
            ax.text(max(ratio, 1), place, f"  {ratio:.2f}   {said}", va="center", fontsize=8)
        ax.axvline(1, color="black", linewidth=1)
        ax.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize=8)
        ax.set_ylim(len(bars) - 0.4, -0.6)
        ax.set_title(title, fontsize=10, loc="left")
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
    axes[-1].set_xlim(0.5, 5.8)
    axes[-1].set_xlabel("times vLLM's speed; on the left of the line vLLM is faster", fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    main()
