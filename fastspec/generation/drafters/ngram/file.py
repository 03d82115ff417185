"""Storages of n-grams and suffixes as safetensors files: a header with kind, version and sizes, and int64 tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastspec.errors import CheckpointError, Unsupported
from fastspec.generation.drafters.ngram.arrays import BITS, MOST, WIDTH

VERSION = 1
Entry = tuple[int, int]
"""A token, and how often it was counted."""
TALLIES = {"sizes": 1, "tokens": 1, "counts": 1}
Columns = dict[str, tuple[Sequence[int | Sequence[int]], int]]
"""Name of a tensor -> (values, columns), columns 0 for a flat list."""


class Damaged(Exception):
    """What a file says contradicts itself; becomes a CheckpointError that names the file."""


def pack_tallies(tallies: Iterable[list[Entry]]) -> Columns:
    """Tallies as three flat lists: the size of each, then tokens and counts of all, in their order."""
    kept = list(tallies)
    return {
        "sizes": ([len(tally) for tally in kept], 0),
        "tokens": ([token for tally in kept for token, _ in tally], 0),
        "counts": ([times for tally in kept for _, times in tally], 0),
    }


def unpack_tallies(tensors: dict[str, Tensor], expected: int) -> list[list[Entry]]:
    """The inverse of `pack_tallies`, for `expected` tallies. Raises Damaged."""
    sizes, tokens, counts = (tensors[name].tolist() for name in TALLIES)
    if len(sizes) != expected or len(tokens) != len(counts) or sum(sizes) != len(tokens):
        raise Damaged(f"{len(sizes)} tallies of {sum(sizes)}, {expected} contexts, {len(tokens)} tokens, {len(counts)} counts")
    if min(sizes, default=0) < 0 or max(sizes, default=0) > WIDTH:
        raise Damaged(f"a tally with more than {WIDTH} continuations")
    if not all(0 <= token < 1 << BITS for token in tokens) or not all(0 < times <= MOST for times in counts):
        raise Damaged(f"a token that is negative or has more than {BITS} bits, or a count below 1 or above {MOST}")
    pairs = iter(zip(tokens, counts, strict=True))
    tallies = [list(islice(pairs, size)) for size in sizes]
    if any(len({token for token, _ in tally}) != len(tally) for tally in tallies):
        raise Damaged("a continuation occurs twice")
    return tallies


def write_storage(path: str | Path, kind: str, options: dict[str, int], tensors: Columns) -> None:
    """Write lists of whole numbers. Raises CheckpointError when the file cannot be written."""
    flat = {name: torch.tensor(values, dtype=torch.long, device="cpu") for name, (values, _) in tensors.items()}
    packed = {name: values.view(-1, tensors[name][1]) if tensors[name][1] else values for name, values in flat.items()}
    header = {"format": "fastspec-storage", "version": str(VERSION), "kind": kind, **{name: str(value) for name, value in options.items()}}
    try:
        save_file(packed, str(path), metadata=header)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: the storage could not be written: {error}") from error


@contextmanager
def read_storage(
    path: str | Path, kind: str, options: tuple[str, ...], shapes: dict[str, int]
) -> Iterator[tuple[dict[str, int], dict[str, Tensor]]]:
    """(options, tensors) of a file, for a block that checks and takes them; `shapes` maps a tensor's name to its dimensions. All that
    goes wrong, in the block too, is a CheckpointError that names the file."""
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            _check_header(header, kind)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        values = {name: int(header[name]) for name in options}
        for name, dims in (shapes | TALLIES).items():
            if tensors[name].dim() != dims or tensors[name].dtype != torch.long:
                raise Damaged(f"{name} has shape {tuple(tensors[name].shape)} and dtype {tensors[name].dtype}")
        yield values, tensors
    except (OSError, SafetensorError, Damaged, Unsupported, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: no readable storage of kind {kind!r}: {error}") from error


def _check_header(header: dict[str, str], kind: str) -> None:
    if header.get("format") != "fastspec-storage":
        raise Damaged("it was not written by a fastspec storage")
    if header.get("version") != str(VERSION):
        raise Damaged(f"its version is {header.get('version')!r}; this fastspec reads version {VERSION}")
    if header.get("kind") != kind:
        raise Damaged(f"it holds a storage of kind {header.get('kind')!r}: load it with that class")
