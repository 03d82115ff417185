"""What `fastspec.tune` gains on this GPU: a round before and after it, and every place that was measured.

    python benchmarks/tuned.py --shapes smollm2-135m llama-8b --minutes 2 --out rows.jsonl

Shapes are those of full_size.py, with random weights and a head of the published EAGLE-3 shape. A row of `when` "before" or "after" is one
of full_size.py's, of one row behind PREFIX tokens; one of `when` "place" is a kernel's: microseconds with the launch that was used before
and with the fastest. What is kept goes to the cache folder, as always: name an empty one by FASTSPEC_CACHE to begin with the shipped
launches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from full_size import SHAPES, make_head, make_model, ours

import fastspec
from fastspec.programs.bench.device import device_name, versions

PREFIX = 2048
Row = dict[str, Any]


def rows_of(shape: str, minutes: float, tokens: int, prefix: int, backend: str, methods: Sequence[str], device: str) -> Iterator[Row]:
    """Rounds before, the places, rounds after."""
    torch.manual_seed(0)
    model = make_model(shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
    ids = torch.randint(10, model.config.vocab_size, (1, prefix), device=device)
    with fastspec.patched(model, eagle3=make_head(model, 32000), backend=backend):

        def rounds(when: str) -> Iterator[Row]:
            for method in methods:
                assistant = fastspec.Eagle3(depth=7, top_k=10, total_tokens=60) if method == "eagle3" and device == "cuda" else method
                yield {"when": when, "method": method, **ours(model, ids, assistant, tokens)}

        yield from rounds("before")
        found = fastspec.tune(model, length=prefix, minutes=minutes)
        for place in found.places:
            yield {"when": "place", **asdict(place), "shape_asked": place.shape, "minutes": minutes, "left": found.left}
        yield from rounds("after")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and append the rows to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["llama-8b"], choices=list(SHAPES))
    parser.add_argument("--methods", nargs="+", default=["autoregressive", "eagle3"])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--prefix", type=int, default=PREFIX)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = {"device": device_name(torch.device(device)), "prefix": args.prefix, **versions()}
    for shape in args.shapes:
        for row in rows_of(shape, args.minutes, args.tokens, args.prefix, args.backend, args.methods, device):
            line = json.dumps({**row, **where, "shape": shape}, default=str)
            told = ("when", "method", "round_ms", "replay_ms", "op", "shape_asked", "before_us", "best_us", "launch", "kept", "refused")
            print(shape, *(f"{name}={row[name]}" for name in told if name in row), flush=True)
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")


if __name__ == "__main__":
    main()
