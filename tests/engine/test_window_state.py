"""A state that goes round in a ring holds of every layer what a state of the whole text holds, as far as a span can see
it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from fastspec.generation import layer_state
from fastspec.generation.layer_state import FullAttentionState, Moves, WindowState, ring_of
from fastspec.generation.sequence_state import SequenceState
from fastspec.generation.tree import Verdict
from fastspec.kernels.attention.reference import Span
from fastspec.patches.backends import TORCH
from fastspec.patches.hf.cache import export_span, import_past

CPU = torch.device("cpu")
ELSEWHERE = torch.device("meta")  # as the default device: a tensor that is made without one cannot meet the others
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
    shown = torch.arange(width) >= width - state.lengths[:, None]
    held = export_span(state, torch.zeros(len(state.lengths), dtype=torch.long), shown)
    seen = (torch.arange(width) >= width - span)[None, None, :, None]
    for wound, whole in zip(held[:LAYERS], held[LAYERS:], strict=True):
        for mine, theirs in zip(wound, whole, strict=True):
            assert torch.equal(mine, theirs * seen)


@given(
    st.integers(1, 9),
    st.integers(1, 6),
    st.lists(st.integers(1, 25), min_size=ROWS, max_size=ROWS),
    st.lists(st.integers(0, 2**31), max_size=12),
    st.integers(0, 2**31),
)
@examples(60)
def test_rounds_behind_a_cache(span: int, tail: int, counts: list[int], rounds: list[int], seed: int) -> None:
    """A cache comes in, rows begin anew, nodes are written and paths kept, texts are made shorter: the ring holds what
    is seen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_state, "SLACK", 6)
        patch.setattr(layer_state, "STEP", 1)
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


def test_a_text_goes_on_from_where_its_window_was_not_written_over() -> None:
    """At most SLACK tokens before the end, or while no window is further back than that."""
    _, wound, _ = both(100, 4)
    for count, reached, held in ((88, 600, True), (87, 600, True), (0, 612, True), (100, 613, False), (101, 613, True)):
        assert wound.holds(count, reached) == held, (count, reached)


def alone(ring: int = 6, span: int = 4, rows: int = 3) -> WindowState:
    """A ring of which no two dimensions are alike, full of random numbers."""
    with ELSEWHERE:
        state = WindowState(2, rows, 5, 8, 7, span=Span(span), ring=ring, dtype=torch.float32, device=CPU)
    state.resize(ring)
    for buffer in (state.k, state.v):
        buffer.copy_(torch.randn(buffer.shape))
    return state


@pytest.mark.parametrize(
    "size, tail, chunk, slots",
    [
        (1000, 24, 7, 1536),
        (1000, 25, 7, 1664),
        (1000, 7, 24, 1536),
        (1000, 7, 25, 1664),
        (1, 1, 1, 640),
        (64, 64, 1, 640),
        (64, 65, 1, 768),
    ],
)
def test_a_ring_holds_the_span_what_a_pass_writes_and_slack_in_steps(size, tail, chunk, slots):
    """The longer of a tree and of a part of a prompt, beside 512 tokens of slack, in steps of 128."""
    assert ring_of(Span(size), tail, chunk) == slots and isinstance(ring_of(Span(size), tail, chunk), int)


def test_a_ring_is_made_empty_of_the_sizes_that_are_said():
    state = WindowState(2, 3, 5, 8, 7, span=Span(4), ring=6, dtype=torch.float16, device=CPU)
    assert (
        state.k.shape == (2, 3, 5, 0, 8)
        and state.v.shape == (2, 3, 5, 0, 7)
        and state.k.dtype == state.v.dtype == torch.float16
    )
    assert (state.layers, state.ring, state.span, state.device) == (2, 6, Span(4), CPU)
    alike = WindowState(2, 3, 5, 8, span=Span(4), ring=6, dtype=torch.float16, device=CPU)
    assert alike.v.shape == (2, 3, 5, 0, 8)


def test_memory_is_that_of_the_text_and_no_more_than_the_rings():
    """Keys and values in bytes: layers, rows, heads, slots, both sizes."""
    state = alone()
    assert [state.bytes(slots) for slots in (1, 6, 7)] == [4 * 2 * 3 * 5 * count * (8 + 7) for count in (1, 6, 6)]


def test_buffers_that_hold_as_much_are_not_replaced():
    """What was captured on them stays good; what they hold stays when they grow."""
    state = WindowState(1, 1, 1, 8, span=Span(4), ring=6, dtype=torch.float32, device=CPU)
    state.resize(5)
    state.k.fill_(3.0)
    held = state.k
    for slots in (5, 4, 1):
        state.resize(slots)
        assert state.k is held
    state.resize(7)
    assert state.k.shape[3] == 6 and torch.equal(state.k[:, :, :, :5], held) and not state.k[:, :, :, 5:].any()
    held = state.k
    state.resize(99)
    assert state.k is held


def moves(sources: list[list[int]], targets: list[list[int]]) -> Moves:
    path, rows = torch.tensor(sources), len(sources)
    zero = torch.zeros(rows, dtype=torch.long)
    return Moves(Verdict(torch.zeros_like(path), zero, zero), zero > 0, path, torch.tensor(targets))


def test_a_path_moves_round_the_ring():
    """Behind the end of the ring it goes on at its beginning, from where it comes and to where it goes."""
    state = alone()
    keys, values = state.k.clone(), state.v.clone()
    state.commit(TORCH, moves([[4, 7], [6, 8], [12, 17]], [[4, 5], [6, 7], [12, 13]]))
    for now, old in ((state.k, keys), (state.v, values)):
        for row, (sources, targets) in enumerate((((4, 1), (4, 5)), ((0, 2), (0, 1)), ((0, 5), (0, 1)))):
            old[:, row, :, targets] = old[:, row, :, sources]
        assert torch.equal(now, old)


def test_a_path_of_the_root_alone_moves_nothing():
    nothing: Any = SimpleNamespace()  # without kv_block_copy
    alone().commit(nothing, moves([[4], [5], [6]], [[4], [5], [6]]))


@pytest.mark.parametrize("source, reached", [(0, 0), (0, 5), (1, 7)])
@pytest.mark.parametrize("count, held", [(4, 4), (6, 6), (9, 6)])
def test_a_row_begins_anew_with_what_the_ring_of_another_holds(source, reached, count, held):
    """With its first tokens, or where there are more than slots with all of the ring; former texts are zeroed, its
    neighbours stay."""
    state, other = alone(), alone(rows=2)
    keys, values = state.k.clone(), state.v.clone()
    state.copy_row(1, other, count, source, reached)
    for now, old, new in ((state.k, keys, other.k), (state.v, values, other.v)):
        old[:, 1, :, :held] = new[:, source, :, :held]
        old[:, 1, :, held:reached] = 0
        assert torch.equal(now, old)


def test_a_row_takes_no_more_than_its_tokens_from_a_longer_buffer():
    state, other = alone(), alone()
    state.k, state.v = state.k[:, :, :, :5].clone(), state.v[:, :, :, :5].clone()
    state.copy_row(2, other, 5, 0, 0)
    assert torch.equal(state.k[:, 2], other.k[:, 0, :, :5]) and torch.equal(state.v[:, 2], other.v[:, 0, :, :5])


@pytest.mark.parametrize("width", [5, 6])
def test_the_last_tokens_of_a_text_are_taken_from_the_columns_that_they_stand_in(width):
    """Those of a text that is shorter than the ring from slot 0 on, with zeros behind it; those of a longer one go
    round."""
    state, texts = alone(), [[0, 1, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [7]]
    state.k, state.v = state.k[:, :, :, :width], state.v[:, :, :, :width]
    if width < 6:
        texts[1] = texts[1][:width]  # there is room
    before = state.k[0].clone()
    counts = torch.tensor([len(text) for text in texts])
    order = torch.tensor([[*text, *[0] * (int(counts.max()) - len(text))] for text in texts])
    held = torch.randn(3, 5, 11, 8), torch.randn(3, 5, 11, 7)
    with ELSEWHERE:
        state.load(1, held, order, counts)
    for now, source in zip((state.k[1], state.v[1]), held, strict=True):
        want = torch.zeros_like(now)
        for row, text in enumerate(texts):
            for position, column in enumerate(text):
                want[row, :, position % 6] = source[row, :, column]  # a later one takes the place of one before it
        assert torch.equal(now, want)
    assert torch.equal(state.k[0], before)


def test_what_is_handed_out_goes_round_the_ring_and_is_zero_where_it_is_not_seen_or_not_real():
    """A token that is the span or less behind the end is seen: transformers keeps as many."""
    state = alone()
    slots = torch.arange(12).expand(3, -1)
    lengths, real = torch.tensor([10, 3, 11]), slots < torch.tensor([10, 3, 9])[:, None]
    with ELSEWHERE:
        handed = state.export(1, slots, real, lengths)
    for out, buffer in zip(handed, (state.k[1], state.v[1]), strict=True):
        want = torch.zeros(3, 5, 12, buffer.shape[-1])
        for row, shown in enumerate((range(6, 10), range(0, 3), range(7, 9))):
            for slot in shown:
                want[row, :, slot] = buffer[row, :, slot % 6]
        assert torch.equal(out, want)
