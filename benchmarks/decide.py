"""How long a cascade's decision takes on the host: features of an answer, a predictor's probabilities, stop or go on.

    python benchmarks/decide.py --out benchmarks/results/decide_cpu.jsonl

Drawn answers and a predictor trained on drawn items of three stages: the time does not depend on the values. One thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fastspec.cascade.features import NAMES, features
from fastspec.cascade.predictor import Predictor
from fastspec.cascade.stopping import Rates, Solver
from fastspec.devices import cpu_name

STAGES = ("small", "medium", "large")


def drawn_predictor(items: int, generator: torch.Generator) -> Predictor:
    """A predictor for items whose labels follow the first feature."""
    told = [torch.randn(items, len(NAMES), generator=generator) for _ in STAGES]
    labels = torch.stack([(each[:, 0] + stage > torch.randn(items, generator=generator)).float() for stage, each in enumerate(told)], 1)
    tokens = torch.randint(5, 300, labels.shape, generator=generator).float()
    return Predictor.fit(STAGES, told, labels, tokens, torch.zeros_like(tokens), seed=0)


def quantiles(run: Callable[[], object], times: int) -> list[float]:
    """The 20, 50 and 80 % quantiles in microseconds."""
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        spent.append(1e6 * (time.perf_counter() - began))
    deciles = statistics.quantiles(spent[times // 10 :], n=10)
    return [round(deciles[at], 1) for at in (1, 4, 7)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=2000, help="training items")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the answer")
    parser.add_argument("--times", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    predictor = drawn_predictor(given.items, generator)
    solver = Solver(predictor.table(), Rates((0.5, 1.5, 4.0), (0.0, 0.2, 0.5), (6.0, 8.0, 12.0)))
    measures = torch.rand(given.tokens, 3, generator=generator).neg()
    ids = torch.randint(50_000, (given.tokens,), generator=generator).tolist()

    def read() -> torch.Tensor:
        return features(measures, ids, prompt_tokens=200, limit=512, ended=True, stage=0, stages=len(STAGES))

    told = read()
    scores = predictor.score(0, told)
    parts: dict[str, Callable[[], object]] = {
        "features": read, "score": lambda: predictor.score(0, told), "decide": lambda: solver.decide(0, scores, 500.0),
        "all": lambda: solver.decide(0, predictor.score(0, read()), 500.0),
    }  # fmt: skip
    for name, run in parts.items():
        row = {
            "part": name, "microseconds": quantiles(run, given.times), "tokens": given.tokens, "items": given.items, "stages": len(STAGES),
            "device": cpu_name(), "threads": 1, "torch": torch.__version__,
        }  # fmt: skip
        print(json.dumps(row))
        if given.out is not None:
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
