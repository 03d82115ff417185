"""Draw README's picture, light and dark, from rows of `fastspec bench`: tokens per second of one model on GPUs and on
two CPU cores.

    python benchmarks/front_picture.py --out docs/assets

A panel is one run. A bar is the median over its prompts; a method that a run has not measured has no bar. The pictures
hold a digest of their bars, which a test compares with the rows. Needs matplotlib (`pip install -e ".[bench]"`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from common import parser_of, read

from fastspec.programs.bench.report import OVERALL, summarise

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

RESULTS = Path(__file__).with_name("results")
PICTURES = Path(__file__).parents[1] / "docs" / "assets"


@dataclass(frozen=True, slots=True)
class Panel:
    """One run: the file of its rows, the title, and the methods of its bars from top to bottom."""

    rows: str
    title: str
    methods: tuple[str, ...]

    def speeds(self) -> dict[str, float]:
        """Method -> median of tokens per second, one prompt at a time."""
        rows = [row for row in read(RESULTS / self.rows) if row["batch"] == 1]
        return {row["method"]: row["tokens_per_second"][1] for row in summarise(rows) if row["category"] == OVERALL}

    def bars(self) -> list[tuple[str, str, float]]:
        """(method, label, tokens per second) of what the run measured."""
        found = self.speeds()
        return [(method, LABELS.get(method, method), found[method]) for method in self.methods if method in found]


PLAIN = "transformers", "static-compile", "autoregressive"
PANELS = (
    Panel("bench_qwen_all_h100.jsonl", "H100, bf16", ("transformers", "autoregressive", "nasd", "eagle3")),
    Panel("bench_qwen_h200.jsonl", "H200, bf16", (*PLAIN, "nasd")),
    Panel("bench_pair_cpu.jsonl", "Two CPU cores, fp32", (*PLAIN, "speculative")),
)
LABELS = {"transformers": "generate", "static-compile": "static cache,\ncompiled", "autoregressive": "no drafts"}
LABELS |= {"nasd": "n-grams", "eagle3": "EAGLE-3 head"}
"""Method -> its name in the picture, where that is not its own."""
THEIRS = ("transformers", "static-compile")
"""Methods of transformers; the others are fastspec's."""
TITLE = "Qwen2.5-Coder-1.5B-Instruct, one prompt at a time, tokens per second"
THEMES = {
    "light": {"ink": "#1f2328", "faint": "#59636e", "transformers": "#a7afb8", "fastspec": "#0969da"},
    "dark": {"ink": "#f0f6fc", "faint": "#9198a1", "transformers": "#656c76", "fastspec": "#4493f8"},
}
"""Ink, text of less weight, and the bars of transformers and of fastspec, on a page's white or black."""
MOST = max(len(panel.methods) for panel in PANELS)


def digest() -> str:
    """Hash of the panels' titles and bars."""
    held = [TITLE, [(panel.title, panel.bars()) for panel in PANELS]]
    return hashlib.sha256(json.dumps(held).encode()).hexdigest()


def number(value: float) -> str:
    """A speed as the pages write it: one decimal below ten, else whole, with a comma at the thousands."""
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def draw_panel(axes: Axes, panel: Panel, colours: dict[str, str]) -> None:
    """Horizontal bars with their numbers at the end."""
    bars = panel.bars()
    most = max(value for _, _, value in bars)
    for place, (method, _, value) in enumerate(bars):
        whose = "transformers" if method in THEIRS else "fastspec"
        axes.barh(place, value, height=0.66, color=colours[whose], label=whose)
        weight = "bold" if whose == "fastspec" else "normal"
        axes.text(value + 0.02 * most, place, number(value), va="center", color=colours["ink"], weight=weight)
    axes.set_yticks(range(len(bars)), [label for _, label, _ in bars], color=colours["ink"])
    axes.set_title(panel.title, loc="left", fontsize=11, color=colours["ink"], weight="bold")
    axes.set_xlim(0, 1.3 * most)
    axes.set_ylim(MOST - 0.5, -0.5)  # bars of all panels are as high
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(colours["faint"])


def draw(theme: str, path: Path) -> None:
    """The picture in one theme, as SVG without a ground of its own."""
    colours = THEMES[theme]
    with plt.rc_context({"font.size": 10.5, "svg.hashsalt": "fastspec", "svg.fonttype": "path"}):
        figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 2.5), layout="constrained")
        for ax, panel in zip(axes, PANELS, strict=True):
            draw_panel(ax, panel, colours)
            ax.patch.set_alpha(0)
        figure.suptitle(TITLE, x=0.005, ha="left", fontsize=11, color=colours["faint"])
        known = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
        look = {"loc": "upper right", "ncols": 2, "frameon": False, "labelcolor": colours["ink"], "handlelength": 1}
        figure.legend(known.values(), known.keys(), bbox_to_anchor=(1.0, 1.03), **look)
        figure.patch.set_alpha(0)
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": digest()})
        plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    out = parser_of(__doc__).parse_args(arguments).out
    for theme in THEMES:
        draw(theme, (out or PICTURES) / f"speed_{theme}.svg")


if __name__ == "__main__":
    main()
