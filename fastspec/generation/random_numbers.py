"""Random numbers by their place: the same seed and position give the same number, whoever asks, and whatever else is asked for.

A tree's nodes of one depth are alternatives, of which a walk visits one at most. So one number per position of the text is enough, and a
row's tokens depend neither on its tree nor on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31


def uniform_at(seeds: Tensor, positions: Tensor) -> Tensor:
    """Numbers [...] fp32 in [0, 1), multiples of 2^-24, for seeds and positions [...] int64 (shapes that broadcast).

    Position n of a seed is the n-th output of SplitMix64 (Steele et al., OOPSLA 2014) begun at a hash of the seed, so that the streams of
    neighbouring seeds do not run into each other. int64 arithmetic wraps around.
    """
    mixed = _mixed(_mixed(seeds + _signed(STEP)) + positions * _signed(STEP))
    return _shifted(mixed, 40).float() * 2.0**-24


def _mixed(x: Tensor) -> Tensor:
    for shift, factor in MIXERS:
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, LAST_SHIFT)


def _shifted(x: Tensor, by: int) -> Tensor:
    """A shift to the right that fills up with zeros: torch's own repeats the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value > MASK >> 1 else value


def drawn_seed() -> int:
    """A seed from torch's own generator, for who gives none."""
    return int(torch.randint(0, 2**63 - 1, (1,), device="cpu"))
