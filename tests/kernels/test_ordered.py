"""Kernels that sum in a fixed order: right beside the reference, and on a GPU the same bits for a query in a tree, in a
chain, beside other rows and by itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers.examples import examples
from helpers.kernels import EVERYWHERE, ON_CUDA, add_in_order
from helpers.trees import random_parents
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from torch.nn import functional as F

from fastspec.generation.tree import ancestor_words
from fastspec.kernels.attention import ordered, reference
from fastspec.kernels.attention.reference import Span
from fastspec.kernels.linear import experts as mixtures
from fastspec.kernels.linear import ordered as products
from fastspec.kernels.linear.reference import GELU_TANH, SILU, SWIGLU, Activation, Expert, Routing
from fastspec.kernels.quantised.reference import MXFP4, StoredExperts, StoredWeight

ROOTS = (
    3,
    15,
    16,
    17,
    60,
    63,
    64,
    65,
    127,
    250,
    255,
    256,
    257,
    511,
    512,
    700,
    1024,
    2040,
    2048,
    2555,
    2559,
    2560,
    2800,
    4095,
    4352,
)
LONG_ROOTS = 8187, 8192, 9216, 10240, 12300, 16384, 20470
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def depths_of(parents: torch.Tensor) -> torch.Tensor:
    depths = torch.zeros_like(parents)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    return depths


@pytest.mark.parametrize("fine", [False, True])
def test_runs_cover_the_text_once(fine):
    """The kernel's own functions, by their formula: runs follow each other, and `runs_of` counts them."""
    each, size = (8, 128) if fine else (4, 256)
    starts = [size * run for run in range(2 * each)]
    starts += [2048 + 2 * size * run for run in range(each)] + list(range(4096, 1 << 18, 4 * size))
    assert starts == sorted(set(starts)) and starts[2 * each] == 2048
    for extent in (1, 128, 129, 256, 257, 2047, 2048, 2049, 2560, 2561, 4096, 4097, 4353, 32768, 32769, 131072):
        assert ordered.runs_of(extent, fine) == sum(start < extent for start in starts)


@EVERYWHERE
@given(
    st.lists(st.sampled_from([0, 1, 15, 16, 33, 128, 130, 257, 600]), min_size=1, max_size=2),
    st.sampled_from([1, 2, 9, 20]),
    st.sampled_from([(1, 1), (2, 3), (1, 4), (2, 1)]),
    st.sampled_from([16, 24]),
    st.booleans(),
    st.sampled_from([None, Span(40), Span(64, chunk=True)]),
    st.booleans(),
    st.sampled_from([(512, None), (0, 0), (0, 1)]),
    st.integers(0, 2**31),
)
@examples(16)
def test_attention_is_the_references(device, prefixes, nodes, heads, size, chain, span, rare, cut, seed):
    """Trees and chains, windows and chunks, sinks and caps, in one launch and in two, whose first leaves the sums of
    runs or of all of them; unseen slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    kv_heads, group = heads
    parents = random_parents(1, nodes, generator)[0]
    words = None if chain else ancestor_words(parents.expand(len(prefixes), -1).contiguous(), nodes).to(device)
    depths = depths_of(parents).expand(len(prefixes), -1).contiguous().to(device) if span and not chain else None
    prefix, extent = torch.tensor(prefixes, device=device), max(prefixes) + nodes
    q = torch.randn(len(prefixes), nodes, kv_heads * group, size, generator=generator).to(device)
    cache = torch.randn(2, len(prefixes), kv_heads, extent + 3, size, generator=generator).to(device)
    seeing = {"span": span, "depths": depths}
    extras = {"sinks": torch.randn(kv_heads * group, generator=generator).to(device), "cap": 5.0} if rare else {}
    layout = reference.attention_layout(prefix, words, nodes, nodes, extent, group, **seeing)
    wanted = reference.tree_attention(q.double(), *cache.double(), layout, size**-0.5, **extras)
    for row, each in enumerate(prefixes):
        cache[:, row, :, each + nodes :] = torch.nan
    laid = ordered.attention_layout(prefix, words, nodes, nodes, extent, group, **seeing)
    got = ordered.tree_attention(q, *cache, laid, size**-0.5, short=cut[0], shares=cut[1], **extras)
    assert (got.double() - wanted).norm() < 1e-4 * wanted.norm()  # weights are taken on a grid of 2**-14


def test_a_root_alone_takes_the_one_launch_of_a_chain():
    words = torch.ones(2, 1, 1, dtype=torch.int64)
    prefix = torch.tensor([700, 3])
    assert ordered.attention_layout(prefix, words, 1, 1, 701).slots is None
    assert ordered.attention_layout(prefix, words.expand(-1, 2, -1), 2, 2, 702).slots is not None


def test_a_rejected_drafts_nan_reaches_no_other_node():
    """A node reads its own ancestors alone."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parents = torch.tensor([0, 0, 0, 1])
    words = ancestor_words(parents[None], 4).to(device)
    q, cache = torch.randn(1, 4, 2, 16, device=device), torch.randn(2, 1, 2, 24, 16, device=device)
    cache[:, :, :, 20 + 2] = torch.nan
    layout = ordered.attention_layout(torch.tensor([20], device=device), words, 4, 4, 24, 1)
    got = ordered.tree_attention(q, *cache, layout, 0.25)
    assert got[0, [0, 1, 3]].isfinite().all() and got[0, 2].isnan().all()


@ON_CUDA
@HALVES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "span", "sinks", "roots"),
    [
        (32, 8, 128, None, False, ROOTS),
        (9, 3, 64, None, False, ROOTS),
        (12, 2, 128, None, True, ROOTS),
        (16, 16, 64, Span(128), False, ROOTS),
        (16, 2, 256, Span(512, chunk=True), False, ROOTS),
        (32, 8, 128, None, False, LONG_ROOTS),
        (28, 4, 128, None, False, LONG_ROOTS),
        (9, 3, 64, None, False, LONG_ROOTS),
    ],
)
def test_a_querys_bits_hang_on_its_text_alone(device, dtype, heads, kv_heads, size, span, sinks, roots):
    """At roots around borders of groups and of runs: in a tree whose nodes lie in any order, in two chains of
    other beginnings, in one launch and in two of any shares, beside rows of other lengths."""
    generator = torch.Generator().manual_seed(heads + size)
    group, slots, scale = heads // kv_heads, max(roots) + 80, size**-0.5
    keys, values = (torch.randn(1, kv_heads, slots, size, generator=generator).to(device, dtype) for _ in range(2))
    queries = (2 * torch.randn(1, slots, heads, size, generator=generator)).to(device, dtype)
    extras = {"sinks": torch.randn(heads, generator=generator).to(device, dtype)} if sinks else {}

    def chain(first: int, count: int, short: int = 512, more: int = 0) -> torch.Tensor:
        layout = ordered.attention_layout(
            torch.tensor([first], device=device), None, count, count, first + count + more, group, span=span
        )
        part = queries[:, first : first + count]
        return ordered.tree_attention(part, keys, values, layout, scale, short=short, **extras)[0]

    for root in roots:
        nodes = int(torch.randint(20, 60, (1,), generator=generator))
        parents = torch.tensor(
            [0, *(int(torch.randint(max(0, node - 12), node, (1,), generator=generator)) for node in range(1, nodes))]
        )
        depths, path = depths_of(parents), []
        node = int(depths.argmax())
        while node:
            path.insert(0, node)
            node = int(parents[node])
        path.insert(0, 0)
        k, v = keys.clone(), values.clone()
        for cache in (k, v):
            cache[:, :, root : root + nodes] = torch.randn(1, kv_heads, nodes, size, generator=generator).to(
                device, dtype
            )
        q = torch.randn(1, nodes, heads, size, generator=generator).to(device, dtype)
        for depth, node in enumerate(path):
            k[:, :, root + node], v[:, :, root + node] = keys[:, :, root + depth], values[:, :, root + depth]
            q[:, node] = queries[:, root + depth]
        words = ancestor_words(parents[None], nodes).to(device)
        laid = ordered.attention_layout(
            torch.tensor([root], device=device),
            words,
            nodes,
            nodes,
            root + nodes,
            group,
            span=span,
            depths=depths[None].to(device) if span else None,
        )
        trees = [
            ordered.tree_attention(q, k, v, laid, scale, short=short, shares=shares, **extras)[0]
            for short, shares in ((0, None), (0, 1), (0, 5), (512, None))
        ]
        before = max(0, root - 30)
        chains = [(root, chain(root, 60)), (before, chain(before, root + 60 - before))]
        for depth, node in enumerate(path):
            alone = chain(root + depth, 1)[0]
            assert alone.equal(chain(root + depth, 1, short=0, more=40)[0])
            assert all(alone.equal(tree[node]) for tree in trees), (root, depth)
            assert all(alone.equal(rows[root + depth - first]) for first, rows in chains), (root, depth)
    rows = torch.tensor([700, 37, 2555], device=device)
    layout = ordered.attention_layout(rows, None, 1, 1, 2556, group, span=span)
    together = ordered.tree_attention(
        torch.cat([queries[:, row : row + 1] for row in rows.tolist()]),
        keys.expand(3, -1, -1, -1).contiguous(),
        values.expand(3, -1, -1, -1).contiguous(),
        layout,
        scale,
        **extras,
    )
    assert all(together[at, 0].equal(chain(row, 1)[0]) for at, row in enumerate(rows.tolist()))


@EVERYWHERE
@pytest.mark.parametrize(("rows", "channels", "depth"), [(1, 40, 72), (5, 96, 128), (70, 33, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_torchs(device, rows, channels, depth, bias):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, depth, device=device), torch.randn(2 * channels, depth, device=device) / depth**0.5
    given = torch.randn(2 * channels, device=device) if bias else None
    x, weight, given = (each if each is None else each.half() for each in (x, weight, given))
    wanted = F.linear(x.double(), weight.double(), None if given is None else given.double())
    assert (products.linear(x, weight, given).double() - wanted).norm() < 1e-3 * wanted.norm()
    gate, up = wanted.chunk(2, -1)
    for kind, opened in ((SILU, F.silu(gate)), (GELU_TANH, F.gelu(gate, approximate="tanh"))):
        assert (products.gate_up(x, weight, given, kind).double() - opened * up).norm() < 3e-3 * (opened * up).norm()


@ON_CUDA
@pytest.mark.parametrize(("rows", "channels", "depth"), [(200, 13000, 72), (300, 12320, 64), (512, 6200, 1032)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_several_tiles_a_program_are_torchs(device, rows, channels, depth, bias):
    """Of fewer steps than stages, and of more; the last tiles are not whole."""
    assert all(products.hopper_launch(rows, channels * (2 - gated), depth, gated).ring for gated in (False, True))
    test_products_are_torchs(device, rows, channels, depth, bias)


@ON_CUDA
@HALVES
@pytest.mark.parametrize(
    ("channels", "depth"),
    [(960, 576), (576, 1536), (2048, 1536), (1536, 8960), (4096, 4096), (4096, 14336), (1000, 640), (49152, 576)],
)
def test_a_rows_bits_are_the_same_beside_any_rows(device, dtype, channels, depth):
    """From one row to a prompt's part, which is torch's product."""
    torch.manual_seed(depth)
    x, weight = torch.randn(2048, depth, device=device), torch.randn(channels, depth, device=device) / depth**0.5
    x, weight = x.to(dtype), weight.to(dtype)
    alone = products.linear(x[:1], weight, None)[0]
    gated = products.gate_up(x[:1], weight, None)[0]
    for rows in (2, 8, 17, 60, 64, 65, 200, 512, 513, 1024, 2048):
        assert products.linear(x[:rows], weight, None)[0].equal(alone), rows
        assert products.linear(x[:rows].flip(0), weight, None)[-1].equal(alone), rows
        assert products.gate_up(x[:rows], weight, None)[0].equal(gated), rows
    wide = torch.cat((weight, weight), 1)[:, :depth]  # lines apart: parts cannot lie side by side
    assert products.linear(x[:2], wide, None)[0].equal(alone)
    assert products.linear(torch.cat((x, x), 1)[:3, :depth], weight, None)[0].equal(alone)


@ON_CUDA
@HALVES
@pytest.mark.parametrize(("channels", "depth"), [(576, 576), (1536, 8960), (1000, 640)])
def test_parts_are_those_of_torch(device, dtype, channels, depth):
    """Side by side, in series, and by torch's products of each part by itself: the same bits, with a bias."""
    torch.manual_seed(depth)
    x, weight = torch.randn(300, depth, device=device), torch.randn(channels, depth, device=device) / depth**0.5
    x, weight, bias = x.to(dtype), weight.to(dtype), torch.randn(channels, device=device).to(dtype)
    parts = products.parts_of(channels, depth, False)
    assert parts > 1
    each = [
        torch.mm(a, b.T, out_dtype=torch.float32)
        for a, b in zip(x.chunk(parts, 1), weight.chunk(parts, 1), strict=True)
    ]
    while len(each) > 1:
        each = [each[i] + each[i + 1] for i in range(0, len(each), 2)]
    wanted = (each[0] + bias.float()).to(dtype)
    for rows in (1, 2, 16, 33, 64, 65, 128, 300):
        assert products.linear(x[:rows], weight, bias).equal(wanted[:rows]), rows


@pytest.fixture
def dots_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    add_in_order(monkeypatch)


KINDS = {
    "swiglu": SWIGLU,
    "gpt-oss": Expert(interleaved=True, gate=Activation(1.702), offset=1.0, limit=1.5),
    "llama4": Expert(scales_input=True),
}
ROUTINGS = {
    "swiglu": Routing(2, normalised=True),
    "gpt-oss": Routing(3, normalised=True, rounded=False),
    "llama4": Routing(1, sigmoid=True),
}
SIZES = {"cpu": (5, 40, 72), "cuda": (128, 2048, 768)}
"""Experts, hidden size and expert size."""


def beside_any_others(device, dtype, kind, sizes, transposed, make=None, counts=(1, 2, 8, 17, 60, 65)):
    """A mixture's answers to tokens in other numbers and orders, among them one alone, against those to all at once."""
    count, size, inner = sizes
    generator = torch.Generator(device).manual_seed(size)

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    def weight(*shape: int) -> torch.Tensor:
        made = drawn(*shape, scale=shape[-1] ** -0.5)
        return made.transpose(1, 2).contiguous().transpose(1, 2) if transposed else made

    tokens = 70 if device == "cpu" else 700
    x, logits = drawn(tokens, size), drawn(tokens, count) + 2 * drawn(count)
    shared, gate = drawn(tokens, size), drawn(tokens, 1)
    gate_up, down = (make or weight)(count, 2 * inner, size), (make or weight)(count, size, inner)
    biases = {"gate_up_bias": drawn(count, 2 * inner), "down_bias": drawn(count, size)}

    def run(at: torch.Tensor) -> torch.Tensor:
        chosen = mixtures.route(logits[at].contiguous(), ROUTINGS[kind])
        more = biases | {"shared": shared[at], "shared_gate": gate[at]}
        return mixtures.experts(x[at], gate_up, down, *chosen, KINDS[kind], **more, ordered=True)

    whole = run(torch.arange(tokens, device=device))
    for rows in counts:
        at = torch.randperm(tokens, generator=generator, device=device)[:rows]
        assert run(at).equal(whole[at]), rows
    return whole


@pytest.mark.each_value
@EVERYWHERE
@pytest.mark.usefixtures("dots_in_order")
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_tokens_experts_give_the_same_bits_beside_any_tokens(device, kind, transposed, hopper, monkeypatch):
    """One alone, and by each size of tile; of equally likely experts the first."""
    monkeypatch.setattr(mixtures, "is_hopper", lambda device: hopper)
    beside_any_others(device, torch.float16, kind, SIZES[device], transposed, counts=(1, 1, 9, 40))


@ON_CUDA
@HALVES
@pytest.mark.parametrize(
    ("kind", "sizes", "transposed"),
    [
        ("swiglu", (128, 2048, 768), False),
        ("swiglu", (8, 1024, 3584), False),
        ("swiglu", (4, 72, 40), False),
        ("gpt-oss", (32, 2880, 720), True),
        ("llama4", (16, 1024, 2048), True),
    ],
)
def test_so_they_do_in_sizes_of_models(device, dtype, kind, sizes, transposed):
    beside_any_others(device, dtype, kind, sizes, transposed)


@ON_CUDA
@HALVES
def test_so_do_experts_in_mxfp4(device, dtype):
    generator = torch.Generator(device).manual_seed(0)

    def make(count: int, channels: int, depth: int) -> StoredExperts:
        lines = count * channels
        codes = torch.randint(0, 256, (lines, depth // 2), generator=generator, device=device).to(torch.uint8)
        powers = torch.randint(118, 123, (lines, depth // 32), generator=generator, device=device).to(torch.uint8)
        return StoredExperts(StoredWeight(codes, MXFP4, powers.view(torch.float8_e8m0fnu), (1, 32), depth, None), count)

    beside_any_others(device, dtype, "gpt-oss", (32, 2880, 2880), False, make)


@EVERYWHERE
@pytest.mark.usefixtures("dots_in_order")
@pytest.mark.parametrize(("channels", "depth"), [(5, 72), (128, 96)])
def test_a_routers_logits_in_fp32_are_the_same_beside_any_rows(device, channels, depth):
    generator = torch.Generator().manual_seed(depth)
    drawn = partial(torch.randn, generator=generator)
    x, weight = (each.to(device) for each in (drawn(300, depth), drawn(channels, depth)))
    whole = products.linear(x, weight, None)
    assert (whole.double() - F.linear(x.double(), weight.double())).abs().max() < 1e-4
    for rows in (1, 2, 16, 17, 64, 65, 257):
        assert products.linear(x[-rows:], weight, None).equal(whole[-rows:]), rows


@ON_CUDA
@HALVES
@pytest.mark.parametrize(("channels", "depth"), [(1, 2048), (8, 4096), (128, 2048), (32, 2880), (1, 72)])
def test_products_of_few_channels_are_the_same_beside_any_rows(device, dtype, channels, depth):
    """Those of routers, and of what opens a shared expert."""
    torch.manual_seed(depth)
    x, weight = torch.randn(700, depth, device=device), torch.randn(channels, depth, device=device) / depth**0.5
    x, weight = x.to(dtype), weight.to(dtype)
    whole = products.linear(x, weight, None)
    assert (whole.double() - F.linear(x.double(), weight.double())).abs().max() < 0.02
    for rows in (1, 2, 8, 17, 60, 64, 65, 200, 512):
        assert products.linear(x[-rows:], weight, None).equal(whole[-rows:]), rows
