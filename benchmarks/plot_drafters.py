"""A picture of benchmarks/drafters.py from its rows: acceptance lengths of every way to draft, and the tokens per second that follow.

    python benchmarks/plot_drafters.py benchmarks/results/drafters_h200.jsonl

It lies beside the rows, with the ending .png. Temperature 0; means over the sets of prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

WAYS = ("chain 4", "chain 8", "tree 32", "tree 60", "tree 60, marginals")
COLOURS = ("#4878a8", "#d9a441", "#7a9a5b", "#9b6fa8", "#b5655a")
TARGETS = {"smollm2-135m": "SmolLM2-135M", "llama-8b": "Llama-3.1-8B's shape, at SmolLM2's acceptance"}


def speed(row: dict[str, Any], target: str) -> float:
    """Tokens per second on a target, of a block head by its estimate."""
    found = row["predicted"][target]
    return float(found.get("tokens_per_second_estimate", found.get("tokens_per_second_measured")))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Three panels with a group of bars for each way, a bar for each head."""
    rows = [row for row in rows if row["temperature"] == 0 and row.get("way") in WAYS]
    heads = list(dict.fromkeys(row["head"] for row in rows))
    panels = {"acceptance length": lambda row: row["acceptance_length"]}
    panels |= {f"tokens/s, computed: {shown}": lambda row, target=target: speed(row, target) for target, shown in TARGETS.items()}
    figure, axes = plt.subplots(3, 1, figsize=(9, 9), layout="constrained", sharex=True)
    for axis, (title, value) in zip(axes, panels.items(), strict=True):
        for place, head in enumerate(heads):
            for at, way in enumerate(WAYS):
                found = [value(row) for row in rows if row["head"] == head and row["way"] == way]
                if found:
                    left = at + (place - (len(heads) - 1) / 2) * 0.16
                    axis.bar(left, statistics.mean(found), 0.15, color=COLOURS[place % len(COLOURS)], label=head if at == 0 else None)
        axis.set_title(title, fontsize=10, loc="left")
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend(fontsize=8, ncols=len(heads), loc="upper left")
    axes[0].margins(y=0.2)
    axes[-1].set_xticks(range(len(WAYS)), WAYS)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    path = parser.parse_args(arguments).rows
    draw([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()], path.with_suffix(".png"))


if __name__ == "__main__":
    main()
