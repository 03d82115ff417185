"""How a prompt is read: in parts, each of which is one pass.

Wide parts fill a GPU's multiprocessors and read the weights seldom; narrow ones keep the activations of many rows, and the rings of layers
that see a window, small. All but the last are whole passes, and the last is padded to a power of two
(`fastspec.generation.capture.padded_width`), so that a few graphs serve all prompts.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastspec.generation.capture import NARROWEST

NARROW = 512
WIDE = 2048
MOST = 2**15
"""Tokens of all rows together that a pass reads where passes are captured: the activations of 128 rows of NARROW tokens take gigabytes, of
a mixture of experts above all."""


def widest_part(rows: int, *, captures: bool, windows: bool = False) -> int:
    """The most tokens of each of `rows` prompts that a pass reads: NARROW where the device does not capture. Where it does, WIDE in all
    rows together, but NARROW of each at least, and MOST in all of them at most, where that leaves each NARROWEST. With `windows`, whose
    rings hold a part beside the window, no more than NARROW."""
    if not captures:
        return NARROW
    widest = NARROW if windows else max(NARROW, _power_below(max(1, WIDE // rows)))
    return min(widest, _power_below(max(NARROWEST, MOST // rows)))


def prompt_parts(length: int, widest: int) -> Iterator[tuple[int, int]]:
    """The begin and width of every part of a prompt of `length` tokens, none wider than `widest`: as few as powers of two above NARROW
    make them, and what is left."""
    begin, narrow = 0, min(NARROW, widest)
    while begin < length:
        left = length - begin
        width = left if left <= narrow else min(widest, _power_below(left))
        yield begin, width
        begin += width


def _power_below(number: int) -> int:
    """The largest power of two that is no larger."""
    return 1 << (number.bit_length() - 1)
