"""Pictures of benchmarks/full_size.py and benchmarks/kernels.py from their rows.

    python benchmarks/plot_gpu.py benchmarks/results/full_size_h200.jsonl benchmarks/results/kernels_h200.jsonl

The first file becomes a picture of where a round's time goes, the second one of attention's bandwidth by the length of the text; each lies
beside its rows, with the ending .png.
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


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def part_of(name: str) -> str:
    """The names "draft 3" and its like belong to the drafting."""
    return name.split(" ")[0]


def rounds(path: Path) -> None:
    """Stacked bars of the medians of a round's parts, one per shape, method and batch, with the time of reading the weights once."""
    rows = [row for row in read(path) if row.get("parts_ms")]
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


def attention(path: Path) -> None:
    """Bandwidth of attention over the length of the text, as a share of what a plain read of memory reaches."""
    rows = [row for row in read(path) if row["kernel"] == "tree_attention" and "share" in row]
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
    for axes, nodes in zip(panels, ("1 nodes", "60 nodes"), strict=True):
        for way, colour in (("fastspec", "#4878a8"), ("sdpa with a mask", "#d9a441"), ("reference", "#8a8a8a")):
            found = [row for row in rows if row["size"].split(", ")[1] == nodes and row["way"] == way]
            mine = sorted((int(row["size"].split("prefix ")[1]), row["share"]) for row in found)
            axes.plot(*zip(*mine, strict=True), marker="o", color=colour, label=way)
        axes.set_xscale("log", base=2)
        axes.set_title(f"8B heads, {nodes.replace('1 nodes', '1 node')}", fontsize=10)
        axes.set_xlabel("slots of the prefix")
        axes.set_ylim(0, 1)
    panels[0].set_ylabel(f"share of {rows[0]['read_gb_per_s'] / 1000:.1f} TB/s")
    panels[0].legend(fontsize=8)
    figure.savefig(path.with_suffix(".png"), dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("full_size", type=Path)
    parser.add_argument("kernels", type=Path)
    args = parser.parse_args()
    rounds(args.full_size)
    attention(args.kernels)


if __name__ == "__main__":
    main()
