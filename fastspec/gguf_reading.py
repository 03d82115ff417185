"""Faster ways to do what gguf-py does in Python element by element: read a header, and unpack weights. What comes out
is the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import numpy as np

PART = 1 << 18
"""Bytes of packed weights that are unpacked at a time: what numpy makes of them stays in a processor's cache."""


def fast_reader(reader: Any) -> Any:
    """A subclass of `gguf.GGUFReader` that reads lists of a header whole, a vocabulary above all, and slices plain
    arrays, since each slice of a memory map makes another object of Python's."""
    from gguf import GGUFValueType

    class FastReader(reader):  # type: ignore[misc]
        @property
        def data(self) -> Any:
            return self._bytes

        @data.setter
        def data(self, mapped: Any) -> None:
            self._bytes = np.asarray(mapped)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            found = self._read_list(int(orig_offs)) if raw_type == GGUFValueType.ARRAY else None
            return super()._get_field_parts(orig_offs, raw_type) if found is None else found

        def _read_list(self, begin: int) -> Any:
            """(bytes, parts, places of the values among the parts, types) of a list; None where it is one of lists,
            empty or cut off."""
            kind, count = self._get(begin, np.uint32), self._get(begin + 4, np.uint64)
            at, end = begin + 12, len(self._bytes)
            if kind[0] == GGUFValueType.STRING:
                parts, number = [kind, count], np.dtype(np.uint64).newbyteorder(self.byte_order)
                for _ in range(int(count[0])):
                    length = self._bytes[at : at + 8]
                    if at + 8 > end:
                        return None
                    length = length.view(number)
                    text = at + 8
                    at = text + int(length[0])
                    parts += (length, self._bytes[text:at])
                places = range(3, len(parts), 2)
            else:
                scalar = self.gguf_scalar_to_np.get(kind[0])
                if scalar is None or at + int(count[0]) * np.dtype(scalar).itemsize > end:
                    return None
                values = self._get(at, scalar, int(count[0]))
                at += values.nbytes
                parts = [kind, count, *values.reshape(-1, 1)]
                places = range(2, len(parts))
            return (
                (at - begin, parts, list(places), [GGUFValueType.ARRAY, GGUFValueType(kind[0])])
                if places and at <= end
                else None
            )

    return FastReader


def over_rows(
    func: Callable[[np.ndarray], np.ndarray], arr: np.ndarray, otype: Any, oshape: tuple[int, ...]
) -> np.ndarray:
    """What `gguf.quants._apply_over_grouped_rows` returns; it takes 16 rows at a time, however short they are."""
    rows = arr.reshape((-1, arr.shape[-1]))
    out = np.empty((len(rows), math.prod(oshape) // max(1, len(rows))), dtype=otype)
    step = max(1, PART // max(1, rows.shape[1] * rows.itemsize))
    for at in range(0, len(rows), step):
        out[at : at + step] = func(rows[at : at + step]).reshape(-1, out.shape[1])
    return out.reshape(oshape)


@contextmanager
def faster_unpacking() -> Iterator[None]:
    """Unpack weights by `over_rows` meanwhile, in versions of gguf-py that have what it stands for."""
    from gguf import quants

    kept = vars(quants).get("_apply_over_grouped_rows")
    if kept is None or signature(kept).parameters.keys() != signature(over_rows).parameters.keys():
        yield
        return
    quants._apply_over_grouped_rows = over_rows
    try:
        yield
    finally:
        quants._apply_over_grouped_rows = kept
