"""A state that goes round in a ring holds of every layer what a state of the whole text holds, as far as a span can see it."""

from __future__ import annotations

import pytest
import torch
from helpers_examples import examples
from hypothesis import given
from hypothesis import strategies as st

from fastspec.generation.state import window
from fastspec.generation.state.attention import FullAttentionState
from fastspec.generation.state.sequence import SequenceState
from fastspec.generation.state.window import WindowState, ring_of
from fastspec.generation.tree import Verdict
from fastspec.kernels.attention.reference import Span
from fastspec.patches.backends import TORCH
from fastspec.patches.hf.cache import export_span, import_past

CPU = torch.device("cpu")
ROWS, LAYERS, LIMIT = 2, 2, 90


def both(span: int, tail: int, rows: int = ROWS) -> tuple[SequenceState, WindowState, FullAttentionState]:
    """A sequence whose layers are kept twice: the first ones in a ring, the others whole."""
    ring = ring_of(Span(span), tail, 3)
    wound = WindowState(LAYERS, rows, 2, 4, span=Span(span), ring=ring, dtype=torch.float32, device=CPU)
    whole = FullAttentionState(LAYERS, rows, 2, 4, dtype=torch.float32, device=CPU)
    order = [(kind, layer) for kind in range(2) for layer in range(LAYERS)]
    return SequenceState([wound, whole], rows=rows, capacity=LIMIT, tail=tail, device=CPU, order=order), wound, whole


def check(state: SequenceState, span: int) -> None:
    """What is handed out of the last `span` tokens is the same, and nothing else is handed out of the ring."""
    width = int(state.lengths.max())
    held = export_span(state, torch.zeros(len(state.lengths), dtype=torch.long), width, width - state.lengths)
    seen = (torch.arange(width) >= width - span)[None, None, :, None]
    for wound, whole in zip(held[:LAYERS], held[LAYERS:], strict=True):
        for mine, theirs in zip(wound, whole, strict=True):
            assert torch.equal(mine, theirs * seen)


@given(
    st.integers(1, 9), st.integers(1, 6), st.lists(st.integers(1, 25), min_size=ROWS, max_size=ROWS),
    st.lists(st.integers(0, 2**31), max_size=12), st.integers(0, 2**31),
)  # fmt: skip
@examples(60)
def test_rounds_behind_a_cache(span: int, tail: int, counts: list[int], rounds: list[int], seed: int) -> None:
    """A cache comes in, rows begin anew, nodes are written and paths kept, texts are made shorter: the ring holds what is seen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "SLACK", 6)
        patch.setattr(window, "STEP", 1)
        state, wound, whole = both(span, tail)
        one, _, _ = both(span, tail, 1)
    generator = torch.Generator().manual_seed(seed)
    past = [tuple(torch.randn(ROWS, 2, max(counts), 4, generator=generator) for _ in "kv") for _ in range(LAYERS)] * 2
    keep = torch.arange(max(counts)) >= max(counts) - torch.tensor(counts)[:, None]
    import_past(state, past, keep)
    check(state, span)
    assert wound.k.shape[3] <= wound.ring and wound.bytes(10**6) == wound.k.numel() * 2 * 4
    for turn in rounds:
        kind = turn % 4
        if kind == 3:
            import_past(one, [tuple(each[:1] for each in pair) for pair in past], keep[:1])
            state.copy_row(turn % ROWS, one, counts[0])
            check(state, span)
            continue
        slots = state.lengths[:, None] + torch.arange(tail)
        for layer in range(LAYERS):
            k, v = (torch.randn(ROWS, tail, 2, 4, generator=generator) for _ in "kv")
            wound.write(TORCH, layer, k, v, slots % wound.ring)
            whole.write(TORCH, layer, k, v, slots)
        steps = torch.randint(0, tail, (ROWS,), generator=generator)
        path = torch.stack([torch.randperm(tail, generator=generator).sort().values for _ in range(ROWS)])
        state.commit(TORCH, Verdict(path, steps, steps), torch.tensor([True, kind != 1]))
        if kind == 2:
            state.lengths -= torch.randint(0, 6, (ROWS,), generator=generator)
            state.lengths.clamp_(min=1)
        check(state, span)


def test_texts_shorter_than_the_ring_take_no_more_than_they_need() -> None:
    _, wound, whole = both(3000, 4)
    assert wound.ring > whole.k.shape[3] == wound.k.shape[3]
    wound.resize(2000)
    assert wound.k.shape[3] == 2000
    wound.resize(10**6)
    assert wound.k.shape[3] == wound.ring
