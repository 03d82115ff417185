"""What the storages of `nasd` cost: insert, look-up and a tree's growth in microseconds, bytes in memory and on disk, by their size.

    python benchmarks/storage.py --out benchmarks/results/storage_cpu.jsonl

The text is this repository's own (its .py and .md files in the order of their paths, every word and sign a token). It is inserted alone,
as a prompt is, and with three fillers a token, as an answer is: the token and two that depend on the one before it. One thread.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import re
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import fastspec
from fastspec.devices import cpu_name
from fastspec.generation.drafters.ngram.growth import grow

ROOT = Path(__file__).parents[1]
STORAGES: dict[str, Callable[[], Any]] = {
    "ngram": lambda: fastspec.NgramStorage(4), "one_level": lambda: fastspec.NgramStorage(3, back_off=False),
    "suffix": lambda: fastspec.SuffixStorage(),
}  # fmt: skip
"""The three that `Nasd(storage=...)` makes by name, at their default sizes."""
BLOCK = 64
"""Tokens timed as one: the clock itself takes a share of a single insert."""
PLACES = 1000
"""Places of the text that are looked up and grown from."""


def words(root: Path, most: int) -> list[int]:
    """The first `most` words and signs of a folder's files as numbers, each numbered when it first occurs."""
    numbers: dict[str, int] = {}
    paths = sorted(path for kind in ("*.md", "*.py") for path in root.rglob(kind) if not {".venv", ".git"} & set(path.parts))
    texts = (re.findall(r"\w+|[^\w\s]|\n\s*", path.read_text(encoding="utf-8")) for path in paths)
    return [numbers.setdefault(word, len(numbers)) for word in itertools.islice(itertools.chain.from_iterable(texts), most)]


def filled(text: Sequence[int]) -> list[tuple[int, int, int]]:
    """Three fillers a token: two that depend on the token before it, in four kinds, and the token itself, as where a model was right."""
    size = max(text, default=0) + 1
    kinds = [(7 * before + at % 4, 5 * before + at % 4) for at, before in enumerate([0, *text[:-1]])]
    return [(first % size, second % size, token) for (first, second), token in zip(kinds, text, strict=True)]


def insert(storage: Any, text: Sequence[int], fillers: Sequence[Sequence[int]]) -> tuple[list[Any], list[float]]:
    """The cursors behind the tokens, and microseconds a token of every block."""
    cursor, cursors, spent = storage.start(), [], []
    for start in range(0, len(text), BLOCK):
        block = list(zip(text[start : start + BLOCK], fillers[start : start + BLOCK], strict=True))
        began = time.perf_counter()
        for token, likeliest in block:
            cursor = storage.feed(cursor, token, likeliest)
            cursors.append(cursor)
        spent.append(1e6 * (time.perf_counter() - began) / len(block))
    return cursors, spent


def each(run: Callable[[Any], object], places: Sequence[Any]) -> list[float]:
    """Microseconds of every place."""
    spent = []
    for place in places:
        began = time.perf_counter()
        run(place)
        spent.append(1e6 * (time.perf_counter() - began))
    return spent


def quantiles(values: Sequence[float]) -> list[float]:
    """The 20, 50 and 80 % quantiles."""
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return [round(deciles[at], 2) for at in (1, 4, 7)]


def held(make: Callable[[], Any], text: Sequence[int], fillers: Sequence[Sequence[int]]) -> int:
    """Bytes that a storage of this text keeps allocated."""
    gc.collect()
    tracemalloc.start()
    storage, before = make(), tracemalloc.get_traced_memory()[0]
    cursor = storage.start()
    for token, likeliest in zip(text, fillers, strict=True):
        cursor = storage.feed(cursor, token, likeliest)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return after - before


def on_disk(storage: Any) -> int:
    """Bytes of a storage's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "storage.safetensors"
        storage.save(path)
        return path.stat().st_size


def measure(name: str, text: Sequence[int], fillers: Sequence[Sequence[int]]) -> dict[str, Any]:
    """One row: a storage that has read this text."""
    make = STORAGES[name]
    storage = make()
    cursors, inserted = insert(storage, text, fillers)
    places = range(0, len(text), max(1, len(text) // PLACES))
    looked = each(lambda at: storage.look(cursors[at]), places)
    grown = each(lambda at: grow(storage, cursors[at], text[at], gamma=8, nodes=16, ends=frozenset()), places)
    return {
        "storage": name, "tokens": len(text), "fillers": len(fillers[0]), "insert_us": quantiles(inserted),
        "insert_us_mean": round(statistics.mean(inserted), 2), "look_us": quantiles(looked), "grow_16_us": quantiles(grown),
        "memory_bytes": held(make, text, fillers), "disk_bytes": on_disk(storage),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="tokens of the text")
    parser.add_argument("--structure", default="arrays", help="what the rows call the structure of the storages measured")
    parser.add_argument("--out", type=Path, help="jsonl file to append the rows to")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    text = words(ROOT, max(given.sizes))
    said = filled(text)
    where = {"structure": given.structure, "device": cpu_name(), "threads": 1, "torch": torch.__version__}
    for size in given.sizes:
        for name in STORAGES:
            for fillers in ([()] * size, said[:size]):
                row = measure(name, text[:size], fillers) | where
                print(json.dumps(row), flush=True)
                if given.out is not None:
                    with given.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
