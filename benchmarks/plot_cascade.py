"""Draw the rows of `fastspec cascade evaluate`: quality against cost, and reliability diagrams, a column for each set of items.

    python benchmarks/plot_cascade.py benchmarks/results/cascade_h200.jsonl --out benchmarks/results/cascade_h200.png

The rows are those of `fastspec.cascade.evaluate.summary` and `reliability`. Needs matplotlib
(`pip install "fastspec-transformers[bench]"`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fastspec.cascade.plot import draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="jsonl file that `fastspec cascade evaluate` wrote")
    parser.add_argument("--out", type=Path, help="PNG to write; by default beside the rows")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.read_text(encoding="utf-8").splitlines()]
    draw(rows, options.out or options.rows.with_suffix(".png"))


if __name__ == "__main__":
    main()
