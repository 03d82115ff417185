"""Tree attention of layers that see a span of the text, have sinks or cap their scores: the kernels against the
reference."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from helpers.devices import INTERPRETED
from helpers.kernels import EVERYWHERE, HAS_CUDA, ON_CUDA, captured
from helpers.kernels_attention import DTYPES, HEADS, TYPED, Case, excess, good
from helpers.trees import random_parents

from fastspec.kernels.attention import few_queries as few_attention
from fastspec.kernels.attention import hopper as hopper_attention
from fastspec.kernels.attention import layout as layouts
from fastspec.kernels.attention import reference
from fastspec.kernels.attention import tree as kernels
from fastspec.kernels.attention.layout import TreeLayout
from fastspec.kernels.attention.reference import Span
from fastspec.kernels.drafting import reference as drafting_reference


class SpanCase(Case):
    """Chains and real trees, whose siblings share a depth. Slots that no query of a row sees hold NaN, those before the
    span too."""

    def __init__(
        self,
        prefixes: list[int],
        nodes: int,
        heads: tuple[int, int],
        size: int,
        dtype: torch.dtype,
        device: str,
        span: Span | None,
        *,
        chain: bool = False,
        sinks: bool = False,
        cap: float | None = None,
        capacity: int = 0,
        seed: int = 0,
        spare: int | None = None,
    ) -> None:
        super().__init__(prefixes, nodes, heads, size, dtype, device, chain=chain, capacity=capacity, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        depths = None
        if not chain:
            words = drafting_reference.ancestor_words(random_parents(len(prefixes), nodes, generator), nodes)
            bits = (words[..., None] >> torch.arange(64)) & 1
            self.words, depths = words.to(device), (bits.sum((2, 3)) - 1).to(device)
        if span is not None:
            self.seeing = {"span": span, "depths": depths}
        if sinks:
            self.extras["sinks"] = (
                (2 * torch.randn(heads[0] * heads[1], generator=generator)).clamp(max=2.0).to(device, dtype)
            )
        if cap is not None:
            self.extras["cap"] = cap
        layout = reference.attention_layout(self.prefix, self.words, nodes, nodes, self.extent, **self.seeing)
        unseen = ~layout.visible.any(2)[:, :, :, None]
        self.k, self.v = (x.clone() for x in self.clean)
        for x in (self.k, self.v):
            x[:, :, : self.extent].masked_fill_(unseen, torch.nan)
            x[:, :, self.extent :] = torch.nan
        self.ring = None if spare is None or span is None else max(layouts.LEAST_RING, span.size + nodes + spare)
        if self.ring is not None:
            self.k, self.v = (self.wound(x) for x in (self.k, self.v))

    def wound(self, cache: Tensor) -> Tensor:
        """The same of a cache whose slots go round in a ring, with NaN where no slot of the text stands."""
        assert self.ring is not None
        wound = torch.full_like(cache[:, :, :1], torch.nan).repeat(1, 1, self.ring, 1)
        for row, prefix in enumerate(self.prefix.tolist()):
            for slot in range(max(0, prefix + self.nodes - self.ring), prefix + self.nodes):
                wound[row, :, slot % self.ring] = cache[row, :, slot]
        return wound

    def layout(self) -> TreeLayout:
        return layouts.attention_layout(
            self.prefix, self.words, self.nodes, self.tail, self.extent, self.group, **self.seeing, ring=self.ring
        )


def in_splits(count: int):
    """Launches of so many programs for each tile, 0: as the host chooses."""
    fixed = {"_splits": lambda *_: count}
    both = patch.multiple(kernels, **fixed), patch.multiple(few_attention, **fixed)
    stack = ExitStack()
    for each in both if count else ():
        stack.enter_context(each)
    return stack


SPANS = st.builds(Span, st.sampled_from([1, 2, 5, 31, 32, 33, 64, 100, 300]), st.booleans())
PREFIXES = st.lists(st.sampled_from([0, 1, 7, 31, 32, 33, 64, 130, 257]), min_size=1, max_size=3)
CAPS = st.sampled_from([None, 0.5, 30.0])


@INTERPRETED
@given(
    PREFIXES,
    st.sampled_from([1, 2, 7, 33, 65]),
    HEADS,
    st.sampled_from([8, 20, 64]),
    st.sampled_from([torch.float32, torch.float16]),
    SPANS,
    st.booleans(),
    st.booleans(),
    CAPS,
    st.sampled_from([0, 1, 3, 16]),
    st.sampled_from([None, 0, 1, 30]),
    st.integers(0, 2**31),
)
@examples(50)
def test_the_interpreted_kernels_agree_with_the_reference(
    prefixes, nodes, heads, size, dtype, span, chain, sinks, cap, splits, spare, seed
):
    """What is expected is of a cache that holds the whole text, whether the kernel's is a ring or not."""
    case = SpanCase(
        prefixes, nodes, heads, size, dtype, "cpu", span, chain=chain, sinks=sinks, cap=cap, seed=seed, spare=spare
    )
    with in_splits(splits):
        case.check()


@given(
    PREFIXES,
    st.sampled_from([1, 2, 7, 33, 65]),
    HEADS,
    SPANS,
    st.booleans(),
    st.sampled_from([0, 1, 30]),
    st.integers(0, 2**31),
)
@examples(60)
def test_a_ring_holds_what_is_seen(prefixes, nodes, heads, span, chain, spare, seed):
    case = SpanCase(prefixes, nodes, heads, 8, torch.float64, "cpu", span, chain=chain, seed=seed, spare=spare)
    k, v = (case.wound(x).nan_to_num(1e30) for x in case.clean)
    layout = reference.attention_layout(
        case.prefix, case.words, nodes, nodes, case.extent, case.group, **case.seeing, ring=case.ring
    )
    torch.testing.assert_close(reference.tree_attention(case.q, k, v, layout, case.scale), case.expected()[0])


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nodes", [1, 7, 33, 60, 300])
@pytest.mark.parametrize("span", [Span(128), Span(1000), Span(512, chunk=True)], ids=str)
def test_rings_of_a_compiled_kernel(dtype, nodes, span):
    for chain in (True, False):
        SpanCase(
            [3000, 40, 1151, 0], nodes, (2, 4), 64, dtype, "cuda", span, chain=chain, sinks=True, spare=512
        ).check()


@EVERYWHERE
@pytest.mark.parametrize("size", [32, 34, 66])
def test_queries_of_a_tile_begin_to_see_on_both_sides_of_a_block(device, size):
    """Blocks of 32 slots end with the prefix: a block before one end of the window or chunk is whole to some queries
    only."""
    for chunk in (False, True):
        for chain in (False, True):
            SpanCase([130, size - 1], 33, (1, 1), 16, torch.float32, device, Span(size, chunk), chain=chain).check()


@INTERPRETED
@given(
    PREFIXES,
    st.sampled_from([1, 7, 33]),
    HEADS,
    st.sampled_from([torch.float32, torch.float16]),
    st.booleans(),
    CAPS,
    st.sampled_from([0, 1, 3]),
    st.integers(0, 2**31),
)
@examples(16)
def test_sinks_and_caps_without_a_span(prefixes, nodes, heads, dtype, sinks, cap, splits, seed):
    with in_splits(splits):
        SpanCase(prefixes, nodes, heads, 16, dtype, "cpu", None, sinks=sinks, cap=cap, seed=seed).check()


@pytest.mark.parametrize("nodes", [6, 40])
@pytest.mark.parametrize(("device", "dtype"), TYPED)
def test_a_child_of_the_root_stands_one_behind_it(device, dtype, nodes):
    """A root and its children before text 0..9, by a window of 4: each sees 8, 9, the root and itself, whatever its
    slot. Queries of zeros weigh all alike."""
    case = Case([10], nodes, (1, 1), 16, dtype, device, chain=True)
    children = torch.arange(nodes, device=device)
    words = ((1 << children) | 1).view(1, nodes, 1)
    layout = layouts.attention_layout(
        case.prefix, words, nodes, nodes, 10 + nodes, span=Span(4), depths=(children > 0).long()[None].contiguous()
    )
    case.k[:, :, :7] = case.v[:, :, :7] = torch.nan
    got = kernels.tree_attention(torch.zeros_like(case.q), case.k, case.v, layout, 1.0)[0, :, 0].double()
    v = case.v[0, 0].double()
    wanted = torch.stack([v[7:11].mean(0), *((v[8] + v[9] + v[10] + v[10 + j]) / 4 for j in range(1, nodes))])
    torch.testing.assert_close(got, wanted, rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.each_value  # slots are numbered alike, whatever is seen of them
@EVERYWHERE
@pytest.mark.parametrize("nodes", [7, 33])
@pytest.mark.parametrize("span", [Span(20), Span(40, chunk=True)], ids=str)
def test_a_span_counts_positions_and_not_slots(device, nodes, span):
    """What the kernel gives without the depths of a tree is off by more than the tolerance: by slots, nodes stand
    further behind."""
    case = SpanCase([35, 75], nodes, (2, 1), 16, torch.float32, device, span)
    case.check()
    by_slots = replace(case.layout(), depths=None)
    case.k, case.v = case.clean
    case.check()
    got = kernels.tree_attention(case.q, case.k, case.v, by_slots, case.scale)
    assert excess(got, case.expected()) > 100


@pytest.mark.each_value
@EVERYWHERE
@pytest.mark.parametrize("nodes", [1, 20])
@pytest.mark.parametrize("splits", [1, 5])
def test_a_sink_joins_once(device, nodes, splits):
    """A sink that is as heavy as all keys together halves the result, in one part and in several."""
    case = Case([200, 3], nodes, (2, 2), 16, torch.float32, device, chain=True)
    case.q = torch.zeros_like(case.q)
    with in_splits(splits):
        whole = case.check()
        for row, prefix in enumerate((200, 3)):
            case.extras = {"sinks": torch.full((4,), float(prefix + 1), device=device).log()}
            torch.testing.assert_close(case.check()[row, 0], whole[row, 0] / 2, rtol=1e-5, atol=1e-6)


@EVERYWHERE
def test_a_cap_bends_small_scores_and_large_ones(device):
    """64 heads see one key each, whose capped score is the head's sink: half a weight. A logit of up to 50 is held to
    its rounding and that of the tanh, 3e-7 of 50 together, of which the weight takes a half."""
    x = torch.linspace(-3, 3, 64, dtype=torch.float64)
    q, k = torch.zeros(1, 1, 64, 16, device=device), torch.ones(1, 1, 1, 16, device=device)
    q[0, 0, :, 0] = 50 * x
    sinks = (50 * x.tanh()).to(device, torch.float32)
    given = torch.tensor([0], device=device), None, 1, 1, 1, 64
    got = kernels.tree_attention(q, k, k, layouts.attention_layout(*given), 1.0, sinks=sinks, cap=50.0)
    wanted = reference.tree_attention(
        q.double(), k.double(), k.double(), reference.attention_layout(*given), 1.0, sinks=sinks, cap=50.0
    )
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=0)


@EVERYWHERE
@pytest.mark.parametrize("splits", [1, 3])
def test_what_is_seen_of_nothing_is_zero_beside_a_sink(device, splits):
    for nodes in (3, 20):
        case = Case([0], nodes, (1, 1), 16, torch.float32, device)
        case.words[0, 1] = 0
        for sink in (-torch.inf, 3.0):
            case.extras = {"sinks": torch.full((1,), sink, device=device), "cap": 2.0}
            with in_splits(splits):
                got = case.check()
            assert not got[:, 1].any() and got[:, 0].all()


@INTERPRETED
@pytest.mark.parametrize("nodes", [1, 3, 40])
@pytest.mark.parametrize("span", [Span(50), Span(50, chunk=True)], ids=str)
def test_time_does_not_grow_with_the_text(monkeypatch, nodes, span):
    """The blocks that are visited, and the programs of a launch, are as many over 5,300 slots as over 500."""
    asked = []
    for module in (kernels, few_attention):
        visit, splits = module.update, module._splits
        monkeypatch.setattr(module, "update", lambda *given, visit=visit: asked[-1].append("block") or visit(*given))
        monkeypatch.setattr(
            module, "_splits", lambda *given, splits=splits: asked[-1].append(("launch", *given)) or splits(*given)
        )
    for prefix in (440, 5240):  # of one rest by blocks and by chunks
        asked.append([])
        SpanCase([prefix], nodes, (1, 1), 16, torch.float32, "cpu", span, capacity=prefix + 60).check()
    assert asked[0] == asked[1] and 0 < asked[0].count("block") <= 8


@EVERYWHERE
def test_the_tail_before_a_window_is_passed_by(device, monkeypatch):
    """Tiles of a chain that is longer than the window."""
    visit, visits = kernels.update, []
    if device == "cpu":
        monkeypatch.setattr(kernels, "update", lambda *given: visits.append(1) or visit(*given))
    SpanCase([100], 256, (1, 1), 16, torch.float32, device, Span(20), chain=True).check()
    assert device != "cpu" or len(visits) <= 8 * 3  # tiles of 32 queries, blocks of 32 slots


@EVERYWHERE
def test_one_row_of_depths_for_all(device):
    case = SpanCase([50, 50], 9, (1, 2), 16, torch.float32, device, Span(12))
    case.words, depths = (x[:1].expand(2, *x.shape[1:]) for x in (case.words, case.seeing["depths"]))
    case.seeing["depths"] = depths
    case.k, case.v = case.clean
    case.check()


def test_hopper_s_kernel_is_left_to_the_whole_text(monkeypatch):
    """Spans, sinks and caps never ask for it."""
    asked = []
    monkeypatch.setattr(hopper_attention, "fits", lambda *_: asked.append(1) or False)
    device = "cuda" if HAS_CUDA else "cpu"
    for span, more in ((Span(9), {}), (None, {"sinks": True}), (None, {"cap": 1.0})):
        SpanCase([30], 20, (1, 1), 16, torch.float32, device, span, **more).check()
        assert not asked
    SpanCase([30], 20, (1, 1), 16, torch.float32, device, None).check()
    assert asked


DEPTHS = torch.zeros(1, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"span": Span(0)}, "at least 1"),
        ({"tail": 5}, "with a span"),
        ({"depths": DEPTHS.int()}, "int32"),
        ({"depths": DEPTHS[:, :3]}, r"accepted is \[1, 4\] torch.int64"),
        ({"depths": DEPTHS.repeat(1, 2)[:, ::2]}, "contiguous"),
    ],
)
def test_what_no_layout_with_a_span_is_made_of(change, says):
    given = {"prefix": torch.tensor([3]), "words": None, "nodes": 4, "tail": 4, "extent": 9, "span": Span(3), **change}
    with pytest.raises(ValueError, match=says):
        layouts.attention_layout(**given)


@pytest.mark.parametrize(
    ("extras", "says"),
    [
        ({"sinks": torch.zeros(3)}, r"\[4\]"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, "int64"),
        ({"sinks": torch.zeros(8)[::2]}, "contiguous"),
        ({"cap": 0.0}, "the cap is 0.0"),
        ({"cap": torch.inf}, "positive and finite"),
    ],
)
def test_what_sinks_and_caps_are_not_accepted(extras, says):
    with pytest.raises(ValueError, match=says):
        kernels.tree_attention(**good(), **extras)


SHAPES = {
    "mistral": ((8, 4), 128, {}),
    "gpt-oss": ((8, 8), 64, {"sinks": True}),
    "gemma-2": ((4, 2), 256, {"cap": 50.0}),
}
ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))


@ON_CUDA
@DTYPES
@ALL_SHAPES
@pytest.mark.parametrize("nodes", [1, 7, 60, 65, 256])
@pytest.mark.parametrize("chain", [False, True], ids=["trees", "chains"])
@pytest.mark.parametrize("span", [None, Span(128), Span(1000, chunk=True), Span(4096)], ids=str)
def test_spans_of_real_shapes(device, dtype, shape, nodes, chain, span):
    heads, size, extras = shape
    SpanCase(
        [6000, 1, 777], nodes, heads, size, dtype, device, span, chain=chain, capacity=9000, seed=nodes, **extras
    ).check()


@ON_CUDA
@pytest.mark.parametrize("nodes", [1, 60])
def test_a_captured_launch_follows_the_window(device, nodes):
    """Replayed at lengths other than those of the capture."""
    case = SpanCase([3000, 2000], nodes, (8, 4), 128, torch.float16, device, Span(512), sinks=True, capacity=8192)
    case.k, case.v = case.clean
    layout = case.layout()
    case.check(layout)
    graph, out = captured(lambda: kernels.tree_attention(case.q, case.k, case.v, layout, case.scale, **case.extras))
    replays: list[Tensor] = []
    for lengths in ([3000, 2000], [0, 64], [8000, 511], [513, 1024]):
        case.prefix.copy_(torch.tensor(lengths))
        for _ in range(2):
            out.fill_(torch.nan)
            graph.replay()
            replays.append(out.clone())
        assert excess(out, case.expected()) < 1
    assert all(torch.equal(*pair) for pair in list(pairwise(replays))[::2])
