"""The tree attention kernel against the reference: drawn shapes and lengths, any ancestor bits, nothing read that
nobody sees."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from helpers.devices import INTERPRETED
from helpers.examples import examples
from helpers.kernels import EVERYWHERE, HAS_CUDA, ON_CUDA, captured
from helpers.kernels_attention import DTYPES, HEADS, TYPED, Case, excess, good
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from fastspec.kernels.attention import few_queries as few_attention
from fastspec.kernels.attention import hopper as hopper_attention
from fastspec.kernels.attention import launches
from fastspec.kernels.attention import tree as kernels
from fastspec.kernels.attention.layout import attention_layout
from fastspec.kernels.launch import is_hopper

PREFIXES = st.lists(st.sampled_from([0, 1, 7, 31, 32, 33, 63, 64, 65, 130, 257]), min_size=1, max_size=2)


@INTERPRETED
@given(
    PREFIXES,
    st.sampled_from([1, 2, 7, 33, 65]),
    HEADS,
    st.sampled_from([8, 16, 20, 64]),
    st.sampled_from([torch.float32, torch.float16]),
    st.booleans(),
    st.sampled_from([0, 1, 63]),
    st.integers(0, 2**31),
)
@examples(15)
def test_the_interpreted_kernel_agrees_with_the_reference(prefixes, nodes, heads, size, dtype, chain, more, seed):
    """Trees whose tail is longer than the level that asks, and chains."""
    case = Case(
        prefixes, nodes, heads, size, dtype, "cpu", tail=nodes if chain else nodes + more, chain=chain, seed=seed
    )
    case.check()


@pytest.mark.each_value  # blocks do not hang on the dtype
@EVERYWHERE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("size", "nodes", "group"), [(512, 1, 4), (512, 7, 4), (300, 40, 1)])
@pytest.mark.parametrize("chain", [False, True])
def test_heads_of_up_to_512_channels(device, dtype, size, nodes, group, chain):
    """Blocks of 16 slots, half the bits of a piece of a word."""
    case = Case([75, 3], nodes, (1, group), size, dtype, device, tail=nodes if chain else nodes + 30, chain=chain)
    case.check()
    with patch.object(kernels, "_splits", lambda *_: 3), patch.object(few_attention, "_splits", lambda *_: 3):
        case.check()


@EVERYWHERE
@pytest.mark.parametrize(
    ("splits", "prefixes", "nodes", "chain"),
    [
        (1, [140, 3], 20, False),
        (3, [0], 1, False),
        (3, [40], 20, True),
        (3, [140, 3], 1, False),
        (3, [140, 3], 20, False),
        (16, [140, 3], 1, True),
        (64, [0], 20, True),
        (64, [40], 1, False),
    ],
    ids=str,
)
def test_any_number_of_splits(device, nodes, splits, prefixes, chain):
    """More splits than there are blocks, one layout for two layers, a capacity beyond the lengths, and equal results
    each time."""
    case = Case(prefixes, nodes, (1, 3), 32, torch.float32, device, capacity=190, chain=chain)
    layout = case.layout()
    with patch.object(kernels, "_splits", lambda *_: splits), patch.object(few_attention, "_splits", lambda *_: splits):
        first = case.check(layout)
        if device == "cuda":  # the interpreter runs programs one after another
            assert torch.equal(first, case.check(layout))


def test_how_many_splits():
    assert kernels._splits(512, 500, 500, 132, 1, 6) == 1  # full without
    assert kernels._splits(4096, 4096, 4096, 132, 8, 6) >= 8  # uneven rows
    assert kernels._splits(1, 100_000, 100_000, 264, 1, 2) == kernels.MAX_SPLITS
    assert (
        kernels._splits(48, 18, 18, 264, 1, 3) == 5 and kernels._splits(48, 18, 9, 264, 1, 3) == 1
    )  # a buffer that is half empty
    assert few_attention._splits(8, 34, 264) == 33  # plain decoding: the chip is filled
    assert few_attention._splits(8, 2, 264) == 1  # a merge would take longer
    assert few_attention._splits(512, 500, 264) == 1
    assert few_attention._splits(1, 100_000, 264) == few_attention.MAX_SPLITS


@EVERYWHERE
def test_a_batch_expects_half_of_its_first_buffer(device, monkeypatch):
    asked, splits = [], kernels._splits
    monkeypatch.setattr(kernels, "_splits", lambda *given: asked.append(given[1:3]) or splits(*given))
    for prefixes, capacity in (([300], 1000), ([300, 3], 1000), ([300, 3], 4000)):
        Case(prefixes, 20, (1, 1), 32, torch.float32, device, capacity=capacity).check()
    assert [expected for _, expected in asked] == [asked[0][0], asked[0][0] // 2, asked[2][0]]


@EVERYWHERE
def test_expanded_words_and_prefixes(device):
    """Static trees share one row of words: views with stride 0 are read as they are."""
    case = Case([40, 40], 7, (2, 2), 16, torch.float32, device)
    case.prefix = case.prefix[:1].expand(2)
    case.words = case.words[:1].expand(2, -1, -1)
    case.check()


@EVERYWHERE
def test_keys_of_any_layout(device):
    """A cache [B, C, Hkv, D] seen as [B, Hkv, C, D], keys and values of different strides."""
    case = Case([70, 9], 5, (3, 2), 16, torch.float32, device)
    case.k = case.k.transpose(1, 2).contiguous().transpose(1, 2)
    case.check()


@EVERYWHERE
def test_a_node_that_sees_nothing_is_zero(device):
    case = Case([0], 3, (1, 2), 16, torch.float32, device)
    case.words[0, 1] = 0
    got = kernels.tree_attention(case.q, case.k, case.v, case.layout(), case.scale)
    assert not got[:, 1].any() and got[:, 0].all() and not got.isnan().any()


@pytest.mark.parametrize(
    "slots", [[0, 31, 32, 63, 64, 95, 127, 128, 129], [0, 1, 31, 32, 62, 63]], ids=["three words", "one word"]
)
@pytest.mark.parametrize(("device", "dtype"), TYPED)
def test_each_bit_decides_one_slot(device, dtype, slots):
    """Node n sees tail slot bit(n) alone, and the result is that slot's value."""
    tail = slots[-1] + 1
    case = Case([0], len(slots), (1, 1), 16, dtype, device, tail=tail)
    case.words.zero_()
    for node, slot in enumerate(slots):
        bit = slot % 64
        case.words[0, node, slot // 64] = 1 << bit if bit < 63 else -(2**63)
    got = kernels.tree_attention(case.q, case.k, case.v, case.layout(), case.scale)
    assert torch.equal(got[0, :, 0], case.v[0, 0, slots])  # a weight of exactly 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": torch.ones(1, 2, 8)}, "q is"),
        ({"v": torch.ones(1, 2, 9, 8)}, "v is"),
        ({"q": torch.ones(1, 3, 4, 8)}, r"accepted is \[1, 2, 4, 8\]"),
        ({"q": torch.ones(1, 2, 6, 8)}, r"accepted is \[1, 2, 4, 8\]"),
        ({"q": torch.ones(1, 2, 4, 8).double()}, "float64"),
        ({"k": torch.ones(1, 2, 8, 8).half()}, r"v is .* accepted is .* torch\.float16"),
        ({"k": torch.ones(1, 2, 8, 8).transpose(2, 3)}, "contiguous"),
        ({"q": torch.ones(1, 2, 4, 513), "k": torch.ones(1, 2, 8, 513), "v": torch.ones(1, 2, 8, 513)}, "at most 512"),
        ({"scale": 0.0}, "positive"),
    ],
)
def test_what_is_not_accepted(change, says):
    with pytest.raises(ValueError, match=says):
        kernels.tree_attention(**{**good(), **change})


@pytest.mark.parametrize(
    ("prefix", "words", "says"),
    [
        (torch.tensor([1], dtype=torch.int32), None, "int64"),
        (torch.tensor(1), None, r"\[B\]"),
        (torch.tensor([1]), torch.zeros(1, 2, 1), "float32"),
        (torch.tensor([1]), torch.zeros(1, 3, 2, dtype=torch.long), "int64"),
        (torch.tensor([1]), torch.zeros(1, 2, 1, dtype=torch.long), "do not cover"),
        (torch.tensor([1]), torch.zeros(1, 2, 4, dtype=torch.long)[:, :, ::2], "contiguous"),
    ],
)
def test_what_no_layout_is_made_of(prefix, words, says):
    with pytest.raises(ValueError, match=says):
        attention_layout(prefix, words, 2, 65, 80)


SHAPES = {
    "8b": ((8, 4), 128),
    "smollm2": ((3, 3), 64),
    "qwen2-1.5b": ((2, 6), 128),
    "odd-80": ((2, 1), 80),
    "odd-96": ((2, 4), 96),
}
SHAPES["wide"], SHAPES["gemma-4"] = ((2, 2), 256), ((2, 4), 512)
ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))


@ON_CUDA
@DTYPES
@ALL_SHAPES
@pytest.mark.parametrize("nodes", [1, 7, 10, 60, 63, 65, 256])
def test_trees(device, dtype, shape, nodes):
    case = Case([2048, 1, 777], nodes, *shape, dtype, device, tail=nodes + 30, seed=nodes)
    case.check()


@ON_CUDA
@DTYPES
@ALL_SHAPES
@pytest.mark.parametrize(
    ("nodes", "prefixes"), [(1, [33]), (6, [2048, 100]), (512, [0]), (511, [1000, 5]), (1300, [70])], ids=str
)
def test_chains(device, dtype, shape, nodes, prefixes):
    Case(prefixes, nodes, *shape, dtype, device, chain=True).check()


@ON_CUDA
@DTYPES
@pytest.mark.parametrize("nodes", [1, 60])
def test_a_long_prefix_in_a_larger_buffer(device, dtype, nodes):
    Case([30000], nodes, (8, 4), 128, dtype, device, capacity=33000).check()


@ON_CUDA
@DTYPES
def test_a_large_batch_of_uneven_rows(device, dtype):
    prefixes = [(97 * i * i) % 3000 + 1 for i in range(64)]
    Case(prefixes, 5, (2, 3), 64, dtype, device, capacity=40000 if dtype != torch.float32 else 4000).check()


@ON_CUDA
@pytest.mark.parametrize("nodes", [1, 4, 60])
def test_a_captured_launch_follows_the_lengths(device, nodes):
    """Replayed at lengths other than those of the capture, many times over: no race in the merge."""
    case = Case([3000, 2000], nodes, (8, 4), 128, torch.float16, device, capacity=8192)
    layout = case.layout()
    case.check(layout)
    graph, out = captured(lambda: kernels.tree_attention(case.q, case.k, case.v, layout, case.scale))
    for lengths in ([3000, 2000], [0, 64], [5, 1], [1999, 1024]):
        case.prefix.copy_(torch.tensor(lengths))
        expected = case.expected()
        first = None
        for _ in range(50):
            out.fill_(torch.nan)
            graph.replay()
            first = out.clone() if first is None else first
            assert torch.equal(out, first)
        assert excess(out, expected) < 1


def hopper_from(slots: int):
    """The kernel for long prefixes on Hopper, for buffers of so many slots and more."""
    return patch.object(hopper_attention, "LONG", slots)


HOPPER = pytest.mark.skipif(
    not HAS_CUDA or not is_hopper(torch.device("cuda")), reason="the kernel is for compute capability 9.0"
)
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


@HOPPER
@ON_CUDA
@HALVES
@pytest.mark.parametrize("heads", [(8, 4), (2, 6), (1, 1)], ids=str)
@pytest.mark.parametrize("nodes", [17, 60, 65, 256])
@pytest.mark.parametrize("prefixes", [[2048, 1, 777], [0], [127], [128], [129, 5000]], ids=str)
def test_hopper_trees(device, dtype, heads, nodes, prefixes):
    """Prefixes around a block, one program and many, rows of which most programs have no share."""
    with hopper_from(0):
        case = Case(prefixes, nodes, heads, 128, dtype, device, tail=nodes + 30, capacity=6000, seed=nodes)
        rows = nodes * heads[1]
        assert hopper_attention.fits(case.q, case.k, case.v, rows, 6000) == (rows > hopper_attention.BLOCK_M)
        case.check()


@HOPPER
@ON_CUDA
@HALVES
@pytest.mark.parametrize(
    ("nodes", "prefixes"),
    [
        (512, [0]),
        (511, [1000, 5]),
        (100, [9000]),
        (512, [9000, 8000, 300, 0]),
        (2048, [0]),
        (2048, [1000]),
        (1025, [77, 0]),
    ],
    ids=str,
)
def test_hopper_chains(device, dtype, nodes, prefixes):
    with hopper_from(0):
        Case(prefixes, nodes, (8, 4), 128, dtype, device, chain=True).check()


@HOPPER
@ON_CUDA
@pytest.mark.parametrize("splits", [1, 2, 7, 64])
def test_hopper_with_any_number_of_splits(device, splits):
    case = Case([3000, 130, 0], 60, (2, 4), 128, torch.bfloat16, device, capacity=9000)
    with patch.object(kernels, "_splits", lambda *_: splits):
        first = case.check()
        assert all(torch.equal(first, case.check()) for _ in range(20))


@HOPPER
@ON_CUDA
def test_hopper_takes_slices_of_a_cache_and_leaves_others(device):
    """A cache of several layers, of which fewer slots are used; one whose slots are not the lines of a descriptor goes
    elsewhere."""
    case = Case([8500], 60, (2, 4), 128, torch.bfloat16, device, capacity=9000)
    wide = torch.full((2, 1, 2, 12000, 128), torch.nan, dtype=torch.bfloat16, device=device)
    wide[:, :, :, : case.k.shape[2]] = torch.stack((case.k, case.v))
    case.k, case.v = wide[:, :, :, :9100]
    assert hopper_attention.fits(case.q, case.k, case.v, 240, 9000)
    case.check()
    case.k = case.k.transpose(1, 2).contiguous().transpose(1, 2)
    assert not hopper_attention.fits(case.q, case.k, case.v, 240, 9000)
    case.check()


def test_large_tiles_are_for_work_that_fills_the_chip():
    small, large = launches.TREE[2, 64][-2][1], launches.TREE[2, 64][-1][1]
    for prompt in (256, 512):  # with SmolLM2's heads
        assert launches.tree_launch_for(2, 64, prompt * 3, 3, 132) == small
    assert launches.tree_launch_for(2, 64, 512 * 3, 3 * 8, 132) == large  # eight of them
    short, long = (launches.tree_launch_for(2, 128, prompt * 4, 8, 132) for prompt in (256, 512))  # Llama-3.1-8B's
    assert short.block_m == 64 < long.block_m
    assert launches.tree_launch_for(4, 64, 256, 1, 132) == launches.TREE[4, 64][-1][1]


def test_small_tiles_are_for_few_keys():
    small = launches.SHORT_TREE[2, 256][1]
    for rows, pairs, reach, found in (
        (64, 4, 4096, True),
        (65, 4, 4096, False),
        (64, 4, 4097, False),
        (64, 5, 4096, False),
    ):
        assert (launches.tree_launch_for(2, 256, rows, pairs, 132, reach) == small) is found
    assert launches.tree_launch_for(2, 128, 64, 4, 132, 64) in dict(launches.TREE[2, 128]).values()
