"""The kernels that draft: a frontier expanded and a tree built, against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.examples import examples
from helpers.kernels import EVERYWHERE, FLOATS, ON_CUDA, ON_CUDA_DTYPES, SEEDS, captured, moved_as_is, poisoned
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastspec.kernels.drafting import reference
from fastspec.kernels.drafting import topk_expand as kernel
from fastspec.kernels.drafting.topk_expand import topk_expand
from fastspec.kernels.drafting.tree_build import tree_build

DRAWN = examples(8)
NODE_COUNTS, VOCABULARIES = st.sampled_from([1, 2, 7]), st.sampled_from([16, 63, 130])


def expand(
    hidden: Tensor, weight: Tensor | None, scores: Tensor, count: int, d2t: Tensor, device: str
) -> tuple[Tensor, ...]:
    """What the kernel gives for inputs moved to the device, their strides kept, back on the CPU."""
    moved = [x if x is None else moved_as_is(x, device) for x in (hidden, weight, scores, d2t)]
    with poisoned():
        got = topk_expand(moved[0], moved[1], moved[2], count, moved[3])
    children, tokens, best, index = (x.cpu() for x in got)
    assert (children.dtype, tokens.dtype, best.dtype, index.dtype) == (
        torch.float32,
        torch.int64,
        torch.float32,
        torch.int64,
    )
    rows, nodes = scores.shape
    assert children.shape == tokens.shape == (rows, nodes * count) and best.shape == index.shape == (rows, count)
    wanted = reference.stable_topk(children, count)  # the ranking follows from the children alone, so it is exact
    assert torch.equal(best, wanted[0]) and torch.equal(index, wanted[1])
    return children, tokens, best, index


def ids_by_target(vocab: int, generator: torch.Generator) -> Tensor:
    """d2t under which id i becomes 3 * i, 3 * i + 1 or 3 * i + 2, so that a target id tells its draft id."""
    return 2 * torch.arange(vocab) + torch.randint(0, 3, (vocab,), generator=generator)


def check_expansion(logits: Tensor, scores: Tensor, got: tuple[Tensor, ...], count: int, tolerance: float) -> None:
    """Children and ids against logits [B, M, V] in float64: every child has the score of its id, and each rank the
    score due to it."""
    logp = logits.log_softmax(-1)
    children, ids = got[0].view(*scores.shape, count).double(), (got[1] // 3).view(*scores.shape, count)
    assert ids.min() >= 0 and ids.max() < logits.shape[-1]
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()  # no id twice
    wide = scores.double()[:, :, None]
    torch.testing.assert_close(children, wide + logp.gather(-1, ids), rtol=0, atol=tolerance)
    torch.testing.assert_close(children, wide + logp.topk(count).values, rtol=0, atol=tolerance)
    assert (children.diff(dim=-1) <= 0).all()


def rounding(logits: Tensor, scores: Tensor, additions: float) -> float:
    """Of a logit summed in fp32 by so many additions, each off by 2^-24 of the logits' size at most; then of exp, log
    and the sums.

    The exponential is good to 2^-22 at arguments of size 1, the rest is a few roundings of numbers of the size of
    scores and logits.
    """
    size = float(logits.abs().max())
    return size * 2**-24 * additions + 2**-20 * (1 + size + float(scores.abs().max()))


def additions_of(hidden: int, dtype: torch.dtype) -> float:
    """fp32 products are rounded to nearest, so the errors go as the root (4 for the worst of many); tensor cores cut
    off: all add up."""
    return 4 * math.sqrt(hidden) if dtype == torch.float32 else hidden


def frontier(
    rows: int, nodes: int, hidden: int, vocab: int, dtype: torch.dtype, generator: torch.Generator, device: str = "cpu"
):
    """hidden, weight, scores: logits of size 1, scores as of a few generations."""
    x = torch.randn(rows, nodes, hidden, generator=generator, device=device).to(dtype)
    weight = (torch.randn(vocab, hidden, generator=generator, device=device) * hidden**-0.5).to(dtype)
    return x, weight, -20 * torch.rand(rows, nodes, generator=generator, device=device)


@EVERYWHERE
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 7, 16]),
    st.sampled_from([1, 7, 63, 64, 65]),
    st.sampled_from([16, 63, 65, 130, 300]),
    st.integers(1, 16),
    FLOATS,
    st.booleans(),
    SEEDS,
)
@DRAWN
def test_topk_expand_of_a_product(device, rows, nodes, hidden, vocab, count, dtype, strided, seed):
    generator = torch.Generator().manual_seed(seed)
    x, weight, scores = frontier(rows, nodes, hidden, vocab, dtype, generator)
    if strided:  # parts of wider tensors, and scores that lie the other way round
        x = torch.cat((torch.full_like(x, torch.nan), x), 2).repeat(1, 2, 1)[:, nodes:, hidden:]
        weight = torch.cat((weight, torch.full_like(weight, torch.nan)), 1)[:, :hidden]
        scores = scores.t().contiguous().t()
    got = expand(x, weight, scores, count, ids_by_target(vocab, generator), device)
    logits = x.double() @ weight.double().t()
    check_expansion(logits, scores, got, count, rounding(logits, scores, additions_of(hidden, dtype)))


@EVERYWHERE
@given(
    st.integers(1, 2),
    st.sampled_from([1, 2, 7]),
    st.sampled_from([16, 65, 2047, 2049, 4100]),
    st.integers(1, 16),
    FLOATS,
    SEEDS,
)
@DRAWN
def test_topk_expand_of_logits(device, rows, nodes, vocab, count, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    wide = (30 * torch.randn(rows, nodes + 1, vocab, generator=generator)).to(dtype)
    logits, scores = wide[:, 1:], -20 * torch.rand(rows, nodes, generator=generator)
    got = expand(logits, None, scores, count, ids_by_target(vocab, generator), device)
    check_expansion(logits.double(), scores, got, count, rounding(logits, scores, 0))


@EVERYWHERE
@given(
    st.sampled_from([1, 3]),
    st.sampled_from([7, 65]),
    st.sampled_from([17, 65, 300]),
    st.integers(1, 16),
    FLOATS,
    st.booleans(),
    SEEDS,
)
@DRAWN
def test_the_lower_id_comes_first_among_equals(device, nodes, hidden, vocab, count, dtype, product, seed):
    """Small whole numbers: products and sums are exact, ties are many."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-1, 2, (2, nodes, hidden), generator=generator).to(dtype)
    weight = torch.randint(-1, 2, (vocab, hidden), generator=generator).to(dtype)
    logits = x.double() @ weight.double().t()
    if not product:
        lost = torch.rand(logits.shape, generator=generator) < 0.9
        lost[..., vocab // 2] = False
        logits = (
            torch.where(lost, -torch.inf, logits) * -0.0 if seed % 8 == 0 else torch.where(lost, -torch.inf, logits)
        )
        logits = torch.where(logits.isnan(), -torch.inf, logits)
    scores = -torch.randint(0, 3, (2, nodes), generator=generator).float()
    d2t = torch.randint(0, 9, (vocab,), generator=generator)
    got = expand(x if product else logits.to(dtype), weight if product else None, scores, count, d2t, device)
    values, ids = reference.stable_topk(logits.flatten(0, 1), count)
    assert torch.equal(got[1].view(-1, count), ids + d2t[ids])
    wanted = (values - logits.flatten(0, 1).logsumexp(-1, keepdim=True)).view(2, nodes, count) + scores[
        :, :, None
    ].double()
    torch.testing.assert_close(got[0].view_as(wanted).double(), wanted, rtol=0, atol=2**-20 * (4 + hidden))


@EVERYWHERE
@given(st.integers(1, 3), NODE_COUNTS, VOCABULARIES, st.integers(1, 16), st.booleans(), st.booleans(), SEEDS)
@DRAWN
def test_topk_expand_writes_into_the_candidates(device, rows, nodes, vocab, count, product, last, seed):
    """Parts of wider buffers, which stay as they are beside them."""
    generator = torch.Generator().manual_seed(seed)
    x, weight, scores = frontier(rows, nodes, 7, vocab, torch.float32, generator)
    read = [each.to(device) for each in ((x, weight) if product else (x @ weight.t(), x))]
    inputs = read[0], read[1] if product else None, scores.to(device), count, ids_by_target(vocab, generator).to(device)
    wide, below, first = nodes * count, count * count, seed % 1000
    dtypes = torch.float32, torch.int64, torch.int64
    buffers = [torch.full((rows, 5 - i + wide + below), -7, dtype=each, device=device) for i, each in enumerate(dtypes)]
    parts = [buffer[:, 3 : 3 + wide] for buffer in buffers[:2]]
    parents = None if last else buffers[2][:, 3 + wide :]
    wanted = topk_expand(*inputs)
    for op in (topk_expand, reference.topk_expand):
        got = op(*inputs, reference.Candidates(*parts, parents, first))
        assert got[0].data_ptr() == parts[0].data_ptr() and got[1].data_ptr() == parts[1].data_ptr()
        if op is topk_expand:
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        assert all(
            bool((buffer[:, :3] == -7).all()) and bool((buffer[:, 3 + wide :] == -7).all()) for buffer in buffers[:2]
        )
        assert bool((buffers[2][:, : 3 + wide] == -7).all())
        assert last or buffers[2][:, 3 + wide :].tolist() == [
            [first + i for i in row for _ in range(count)] for row in got[3].tolist()
        ]
        assert not last or bool((buffers[2] == -7).all())


@EVERYWHERE
def test_topk_expand_of_more_rows_than_a_block(device):
    generator = torch.Generator().manual_seed(0)
    x, weight, scores = frontier(9, 16, 16, 130, torch.float32, generator)
    got = expand(x, weight, scores, 4, ids_by_target(130, generator), device)
    logits = x.double() @ weight.double().t()
    check_expansion(logits, scores, got, 4, rounding(logits, scores, additions_of(16, x.dtype)))


@pytest.mark.parametrize("hidden", [64, 128, 192])
@EVERYWHERE
def test_topk_expand_where_tiles_are_wide(device, hidden, monkeypatch):
    """The launches of large vocabularies, whose weights come through a tensor descriptor, past the last id too."""
    monkeypatch.setattr(kernel, "ENOUGH_TILES", 0)
    assert kernel.launch_of(6, 300, hidden, True)[1:] == (kernel.HALF_DEEP if hidden == 128 else kernel.HALF)
    generator = torch.Generator().manual_seed(hidden)
    x, weight, scores = frontier(2, 3, hidden, 300, torch.float16, generator)
    got = expand(x, weight, scores, 5, ids_by_target(300, generator), device)
    logits = x.double() @ weight.double().t()
    check_expansion(logits, scores, got, 5, rounding(logits, scores, additions_of(hidden, x.dtype)))


@ON_CUDA
@ON_CUDA_DTYPES
@pytest.mark.parametrize(
    ("rows", "nodes", "hidden", "vocab", "count"),
    [
        (1, 10, 4096, 32000, 10),
        (1, 1, 4096, 128256, 10),
        (3, 10, 2048, 32000, 10),
        (1, 10, 576, 16384, 10),
        (4, 16, 1024, 49152, 16),
        (8, 10, 4096, 32000, 10),
        (9, 16, 2048, 8001, 16),
        (2, 7, 129, 999, 3),
        (3, 9, 4104, 30011, 8),
    ],
)
def test_topk_expand_at_real_sizes(device, dtype, rows, nodes, hidden, vocab, count):
    generator = torch.Generator(device).manual_seed(0)
    x, weight, scores = frontier(rows, nodes, hidden, vocab, dtype, generator, device)
    d2t = ids_by_target(vocab, torch.Generator().manual_seed(0)).to(device)
    logits = torch.cat([part.double() @ weight.double().t() for part in x.flatten(0, 1).split(32)]).view(
        rows, nodes, vocab
    )
    got = expand(x, weight, scores, count, d2t, device)
    tolerance = rounding(logits, scores, additions_of(hidden, dtype))
    check_expansion(logits.cpu(), scores.cpu(), got, count, tolerance)
    again = [topk_expand(x, weight, scores, count, d2t) for _ in range(20)]  # whichever program arrives last
    assert all(torch.equal(a.cpu(), b) for run in again for a, b in zip(run, got, strict=True))
    rounded = logits.to(dtype)
    got = expand(rounded, None, scores, count, d2t, device)
    check_expansion(rounded.double().cpu(), scores.cpu(), got, count, rounding(rounded, scores, 0))


def test_topk_expand_refuses_candidates_that_do_not_fit():
    x, weight, scores = frontier(2, 3, 8, 40, torch.float32, torch.Generator().manual_seed(0))
    d2t, whole = torch.zeros(40, dtype=torch.long), torch.zeros(2, 12, dtype=torch.long)
    grown = whole.float()
    for parts, name in (((scores, whole), "scores"), ((grown, grown), "tokens"), ((grown, whole, whole), "parents")):
        with pytest.raises(ValueError, match=rf"topk_expand: out.{name} is .*; accepted is \[2, "):
            topk_expand(x, weight, scores, 4, d2t, reference.Candidates(*parts))


@pytest.mark.parametrize("change", ["count", "stride", "dtype", "scores", "d2t", "half of V"])
def test_topk_expand_says_what_it_accepts(change):
    x, weight, scores = frontier(2, 3, 8, 40, torch.float32, torch.Generator().manual_seed(0))
    d2t, count = torch.zeros(40, dtype=torch.long), 65 if change == "count" else 4
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if change == "stride" else x
    weight = weight.double() if change == "dtype" else weight
    scores = scores[:, :2] if change == "scores" else scores
    d2t = d2t.int() if change == "d2t" else d2t[:20] if change == "half of V" else d2t
    with pytest.raises(ValueError, match=r"accepted"):
        topk_expand(x, weight, scores, count, d2t)


def grown(
    rows: int, count: int, steps: int, lost: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores with many ties and some -inf, tokens, parents, depths of random candidates: a child never outscores its
    parent."""
    index = torch.arange(count)
    parents = (torch.rand(rows, count, generator=generator) * (index + 1)).long() - 1
    scores = -torch.randint(0, steps, (rows, count), generator=generator).float()
    scores = torch.where(torch.rand(rows, count, generator=generator) < lost, -torch.inf, scores)
    row = torch.arange(rows)
    for i in range(count):
        up = parents[:, i]
        scores[:, i] += torch.where(up < 0, 0.0, scores[row, up.clamp(min=0)])
    return (
        scores,
        torch.randint(0, 128256, (rows, count), generator=generator),
        parents,
        torch.randint(1, 9, (count,), generator=generator),
    )


def check_tree(inputs: tuple[Tensor, ...], nodes: int, device: str) -> None:
    wanted = reference.tree_build(*inputs, nodes)
    with poisoned():
        got = tree_build(*(moved_as_is(x, device) for x in inputs), nodes)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.int64 and torch.equal(a.cpu(), b)


@EVERYWHERE
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 7, 63, 64, 65, 130, 710]),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.02, 1.0]),
    st.booleans(),
    st.data(),
    SEEDS,
)
@DRAWN
def test_tree_build(device, rows, count, steps, lost, strided, data, seed):
    scores, tokens, parents, depths = grown(rows, count, steps, lost, torch.Generator().manual_seed(seed))
    nodes = data.draw(st.one_of(st.integers(1, min(256, count + 1)), st.just(min(256, count + 1))))
    root = torch.arange(5, 5 + 2 * rows)
    if strided:  # rows of wider buffers; parents may be one row for all
        wide = torch.full((rows, count + 3), torch.inf)
        wide[:, :count] = scores
        scores, root = wide[:, :count], root[::2]
        tokens = tokens.repeat(1, 2)[:, count:]
        if rows == 1:
            parents = parents[0].expand(rows, -1)
    check_tree((scores, tokens, parents, depths, root[:rows]), nodes, device)


@EVERYWHERE
@given(st.integers(0, 2**32 - 1), SEEDS)
@DRAWN
def test_tree_build_tells_neighbouring_scores_apart(device, bits, seed):
    """Scores one unit in the last place apart, both zeros, subnormals: the limit must be found to the last bit."""
    generator = torch.Generator().manual_seed(seed)
    near = torch.randint(-4, 5, (2, 65), generator=generator) + (bits | 0x80000000)
    scores = torch.where(near > 2**31, near - 2**32, near).clamp(-(2**31), 0x7F800000).int().view(torch.float32)
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    scores = torch.where(torch.rand(2, 65, generator=generator) < 0.1, 0.0, scores)
    parents, depths = torch.full((2, 65), -1), torch.ones(65, dtype=torch.long)
    tokens = torch.randint(0, 99, (2, 65), generator=generator)
    check_tree(
        (scores, tokens, parents, depths, torch.tensor([1, 2])),
        int(torch.randint(1, 67, (), generator=generator)),
        device,
    )


@EVERYWHERE
@pytest.mark.parametrize("nodes", [2, 64, 65, 256])
def test_tree_build_of_a_chain(device, nodes):
    """Every candidate below the one before it: all doublings of the ancestors are needed."""
    count = 300
    scores, parents = -torch.arange(count)[None].float(), torch.arange(-1, count - 1)[None]
    check_tree((scores, parents + 7, parents, torch.arange(1, count + 1), torch.tensor([3])), nodes, device)


@ON_CUDA
@pytest.mark.parametrize(
    ("rows", "count", "nodes"),
    [(1, 710, 60), (8, 710, 60), (64, 710, 61), (3, 2064, 256), (2, 4096, 256), (5, 1025, 129)],
)
def test_tree_build_at_real_sizes(device, rows, count, nodes):
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        inputs = (
            *grown(rows, count, 1 + 3 * seed, 0.001, generator),
            torch.randint(0, 128256, (rows,), generator=generator),
        )
        for _ in range(5):
            check_tree(inputs, nodes, device)


@pytest.mark.parametrize(
    ("nodes", "stride", "dtype"), [(0, 1, torch.long), (12, 1, torch.long), (4, 2, torch.long), (4, 1, torch.int32)]
)
def test_tree_build_says_what_it_accepts(nodes, stride, dtype):
    scores, tokens, parents, depths = grown(2, 10, 3, 0.0, torch.Generator().manual_seed(0))
    scores = scores.repeat_interleave(stride, 1)[:, ::stride]
    with pytest.raises(ValueError, match=r"accepted"):
        tree_build(scores, tokens.to(dtype), parents, depths, torch.tensor([1, 2]), nodes)


@ON_CUDA
def test_a_draft_step_can_be_captured(device):
    """Replayed on other inputs, it gives what a plain call gives."""
    generator = torch.Generator(device).manual_seed(0)
    x, weight, scores = frontier(2, 10, 512, 32000, torch.bfloat16, generator, device)
    d2t, root = torch.zeros(32000, dtype=torch.long, device=device), torch.tensor([3, 4], device=device)
    parents = torch.full((2, 100), -1, device=device)
    depths = torch.ones(100, dtype=torch.long, device=device)

    def step() -> tuple[Tensor, ...]:
        children, tokens, *best = topk_expand(x, weight, scores, 10, d2t)
        return children, tokens, *best, *tree_build(children, tokens, parents, depths, root, 60)

    graph, outs = captured(step)
    for _ in range(3):
        x.normal_(generator=generator)
        scores.uniform_(-9, 0, generator=generator)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outs, step(), strict=True))
