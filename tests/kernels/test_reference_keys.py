"""The likeliest token of a vocabulary in parts, each of which says one key."""

from __future__ import annotations

import torch
from helpers.examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from fastspec.generation.verify import choose
from fastspec.kernels.verification.reference import best_key, key_token
from fastspec.patches.backends import TORCH

VALUES = st.sampled_from(
    [-torch.inf, -1e30, -2.5, -1.0, -0.0, 0.0, 1e-40, 1.0, 2.5, 1e30, torch.inf, torch.nan, -torch.nan]
)


@given(
    st.lists(VALUES, min_size=2, max_size=65),
    st.integers(1, 7),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@example([-0.0, 0.0], 2, torch.float32)  # equal, so that the first of them is the likeliest
@example([1.0, -torch.nan, torch.nan, 2.0], 2, torch.float32)  # NaN is above all, whatever its sign
@examples(60)
def test_the_highest_key_is_the_first_of_the_highest_scores(
    values: list[float], parts: int, dtype: torch.dtype
) -> None:
    scores = torch.tensor(values).to(dtype)[None, None]
    keys, first = [], 0
    for part in scores.chunk(parts, -1):
        keys.append(best_key(part, part.argmax(-1), first))
        first += part.shape[-1]
    best = key_token(torch.stack(keys, -1))
    assert torch.equal(best, scores.argmax(-1)) and torch.equal(choose(best[..., None], None, TORCH), best)
