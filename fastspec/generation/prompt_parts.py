"""How a prompt is read: in parts, each of which is one pass.

Wide parts fill a GPU's multiprocessors and read the weights seldom; narrow ones keep the activations of many rows, and the rings of layers
that see a window, small. All but the last are whole passes, and the last is padded to a power of two
(`fastspec.generation.capture.padded_width`), so that a few graphs serve all prompts.
"""

from __future__ import annotations

from collections.abc import Iterator

NARROW = 512
WIDE = 2048


def widest_part(rows: int, *, captures: bool, windows: bool = False) -> int:
    """The most tokens of each of `rows` prompts that a pass reads: WIDE of one row on a device that captures, in all rows together, but
    NARROW of each at least. With `windows`, whose rings hold a part beside the window, NARROW whatever the rows."""
    if not captures or windows:
        return NARROW
    return max(NARROW, _power_below(max(1, WIDE // rows)))


def prompt_parts(length: int, widest: int) -> Iterator[tuple[int, int]]:
    """The begin and width of every part of a prompt of `length` tokens, none wider than `widest`: as few as powers of two above NARROW
    make them, and what is left."""
    begin = 0
    while begin < length:
        left = length - begin
        width = left if left <= NARROW else min(widest, _power_below(left))
        yield begin, width
        begin += width


def _power_below(number: int) -> int:
    """The largest power of two that is no larger."""
    return 1 << (number.bit_length() - 1)
