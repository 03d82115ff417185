"""Pictures of benchmarks/full_size.py and benchmarks/kernel_times.py from their rows.

    python benchmarks/plot_gpu.py benchmarks/results/full_size_h200.jsonl benchmarks/results/kernels_h200.jsonl

The first file becomes a picture of where a round's time goes, the second one of bandwidth: attention's by the length of the text, and below
it that of every kernel at every size, beside its peers. Each lies beside its rows, with the ending .png.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PARTS = {"draft": "#4878a8", "score": "#d9a441", "choose": "#7a9a5b", "commit": "#9b6fa8", "observe": "#b5655a", "host": "#8a8a8a"}

WAYS = {"fastspec": "#4878a8", "sdpa with a mask": "#d9a441", "reference": "#8a8a8a", "cuBLAS, then fastspec": "#7a9a5b",
        "flex attention": "#9b6fa8"}  # fmt: skip
LEAST = 1e-4
"""Share of bandwidth at the left edge: what is below it is drawn there."""


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def part_of(name: str) -> str:
    """The names "draft 3" and its like belong to the drafting."""
    return name.split(" ")[0]


def rounds(path: Path) -> None:
    """Stacked bars of the medians of a round's parts, one per shape, method and batch, with the time of reading the weights once."""
    rows = sorted((row for row in read(path) if row.get("parts_ms")), key=lambda row: (row["shape"], row["batch"]))
    figure, axes = plt.subplots(figsize=(9, 0.45 * len(rows) + 1.6), layout="constrained")
    labels = []
    for place, row in enumerate(rows):
        left = 0.0
        for part, colour in PARTS.items():
            width = sum(middle for name, (_, middle, _) in row["parts_ms"].items() if part_of(name) == part)
            axes.barh(place, width, left=left, color=colour, label=part if place == 0 else None)
            left += width
        floor = row["floor_ms"]
        label = "weights read once" if place == 0 else None
        axes.plot([floor, floor], [place - 0.45, place + 0.45], color="black", linewidth=2, label=label)
        axes.text(left, place, f" {left:.2f} ms", va="center", fontsize=8)
        batch = f", batch {row['batch']}" if row["batch"] > 1 else ""
        way = ", drafter of separate kernels" if row.get("drafter") == "kernels" else ""
        labels.append(f"{row['shape']}, {row['method']}{batch}{way}")
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"median ms of a round's parts, {rows[0]['device']}, {rows[0]['dtype']}")
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path.with_suffix(".png"), dpi=130)


def kernels(path: Path) -> None:
    """Bandwidth as a share of what a plain read of memory reaches; where a size was measured more than once, as the last row says."""
    last = {(row["kernel"], row["size"], row["way"]): row for row in read(path) if row.get("us")}
    rows = list(last.values())
    sizes = list(dict.fromkeys((row["kernel"], row["size"]) for row in rows))
    figure = plt.figure(figsize=(11, 4.0 + 0.21 * len(sizes)), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(3.4, 0.6 + 0.21 * len(sizes)))
    attention(above, [row for row in rows if row["kernel"] == "tree_attention"])
    every_kernel(below.subplots(), rows, sizes)
    figure.savefig(path.with_suffix(".png"), dpi=110)
    plt.close(figure)


def share(row: dict[str, Any]) -> float:
    """Bandwidth over that of the read measured in the same run."""
    return max(LEAST, row["gb_per_s"] / row["read_gb_per_s"])


def microseconds(value: float) -> str:
    """Three digits of a time, all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def attention(figure: Any, rows: list[dict[str, Any]]) -> None:
    """Curves over the length of the text, for one node and for a tree."""
    panels = figure.subplots(1, 2, sharey=True)
    for axes, nodes in zip(panels, ("1 nodes", "60 nodes"), strict=True):
        for way in ("fastspec", "sdpa with a mask", "reference"):
            found = [row for row in rows if row["size"].startswith(f"8B, {nodes}") and row["way"] == way]
            mine = sorted((int(row["size"].split("prefix ")[1]), share(row)) for row in found)
            axes.plot([at for at, _ in mine], [value for _, value in mine], marker="o", color=WAYS[way], label=way)
        axes.set_xscale("log", base=2)
        axes.set_title(f"attention, 8B heads, {nodes.replace('1 nodes', '1 node')}", fontsize=10)
        axes.set_xlabel("slots of the prefix")
        axes.set_ylim(0, 1)
    panels[0].set_ylabel("share of read bandwidth")
    panels[0].legend(fontsize=8)


def every_kernel(axes: Any, rows: list[dict[str, Any]], sizes: list[tuple[str, str]]) -> None:
    """A line for every kernel and size with a point for each way, on a logarithmic axis; the times stand at the right."""
    places = {size: place for place, size in enumerate(sizes)}
    for way, colour in WAYS.items():
        mine = [row for row in rows if row["way"] == way]
        if mine:
            at = [share(row) for row in mine], [places[row["kernel"], row["size"]] for row in mine]
            look = {"s": 42, "zorder": 4} if way == "fastspec" else {"s": 26, "zorder": 3}
            axes.scatter(*at, color=colour, label=way, clip_on=False, **look)
    for size, place in places.items():
        mine = sorted((row for row in rows if (row["kernel"], row["size"]) == size), key=lambda row: -row["us"])
        times = {row["way"]: microseconds(row["us"]) for row in mine}
        ours = times.pop("fastspec", "none")
        said = f"{ours} ({', '.join(times.values())})" if times else ours
        axes.text(1.015, place, said, transform=axes.get_yaxis_transform(), va="center", fontsize=7.5)
    read_gb = sorted({row["read_gb_per_s"] / 1000 for row in rows})
    speed = " to ".join(f"{value:.2f}" for value in dict.fromkeys((read_gb[0], read_gb[-1])))
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(LEAST * 0.8, 1.0)
    axes.set_ylim(len(sizes) - 0.4, -0.6)
    axes.set_yticks(range(len(sizes)), [f"{kernel}: {size}" for kernel, size in sizes], fontsize=7.5)
    axes.grid(axis="both", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel(f"share of the read bandwidth of {speed} TB/s, logarithmic; {rows[0]['device']}", fontsize=9)
    head = "us: fastspec (the others,\nfrom left to right)"
    axes.text(1.015, -1.0, head, transform=axes.get_yaxis_transform(), va="bottom", fontsize=7.5)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.0 + 1.2 / len(sizes)), ncols=len(WAYS), frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("full_size", type=Path)
    parser.add_argument("kernels", type=Path)
    args = parser.parse_args()
    rounds(args.full_size)
    kernels(args.kernels)


if __name__ == "__main__":
    main()
