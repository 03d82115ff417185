"""The kernels that verify: one token per node, and the walk, against the reference."""

from __future__ import annotations

import pytest
import torch
from helpers.examples import examples
from helpers.kernels import (
    EVERYWHERE,
    FLOATS,
    ON_CUDA,
    ON_CUDA_DTYPES,
    SEEDS,
    captured,
    check_draws,
    moved_as_is,
    poisoned,
    strided,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastspec.kernels.verification import reference
from fastspec.kernels.verification.posterior_eval import CHUNK, pick, posterior_walk
from fastspec.kernels.verification.reference import SamplingSettings

DRAWN = examples(25)
LEADING = st.sampled_from([(), (1,), (3,), (2, 3), (1, 7), (2, 1, 3)])
VOCABS = st.sampled_from([1, 7, 63, 65, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 65])


def picked(scores: Tensor, uniform: Tensor | None, device: str) -> Tensor:
    with poisoned():
        got = pick(moved_as_is(scores, device), None if uniform is None else moved_as_is(uniform, device))
    assert got.dtype == torch.int64 and got.shape == scores.shape[:-1]
    return got.cpu()


@EVERYWHERE
@given(LEADING, VOCABS, st.integers(1, 400), FLOATS, st.booleans(), SEEDS)
@DRAWN
def test_pick_takes_the_lowest_of_the_highest(device, leading, vocab, steps, dtype, wide, seed):
    """Whole numbers, so that ties are many; some rows are -inf throughout, some have both zeros on top."""
    generator = torch.Generator().manual_seed(seed)
    scores = -torch.randint(0, steps, (*leading, vocab), generator=generator).to(dtype)
    scores = torch.where(torch.rand(scores.shape, generator=generator) < 0.3, -torch.inf, scores)
    scores = torch.where(torch.rand((*leading, 1), generator=generator) < 0.2, -torch.inf, scores)
    scores = torch.where((scores == 0) & (torch.rand(scores.shape, generator=generator) < 0.5), -0.0, scores)
    got = picked(strided(scores) if wide else scores, None, device)
    assert torch.equal(got, scores.argmax(-1)) and torch.equal(got, reference.pick(scores, None))


@EVERYWHERE
@given(
    LEADING,
    VOCABS,
    st.sampled_from([0.0, 1.0, 8.0, 60.0]),
    st.sampled_from([0.0, 0.5, 0.99]),
    FLOATS,
    st.booleans(),
    SEEDS,
)
@DRAWN
def test_pick_draws_by_inversion(device, leading, vocab, scale, lost, dtype, wide, seed):
    """Scores in all ranges, most of them possibly -inf, whole chunks too; the lowest and the highest uniform among the
    drawn."""
    generator = torch.Generator().manual_seed(seed)
    scores = scale * torch.randn(*leading, vocab, generator=generator)
    start = torch.randint(0, vocab, (*leading, 1), generator=generator)
    keep = (torch.rand(scores.shape, generator=generator) >= lost) & (torch.arange(vocab) >= (start if lost else 0))
    scores = torch.where(keep | (torch.arange(vocab) == start), scores, -torch.inf).to(dtype)
    uniform = torch.rand(leading, generator=generator)
    kind = torch.randint(0, 4, leading, generator=generator)
    uniform = torch.where(kind == 0, 0.0, torch.where(kind == 1, 1 - 2**-24, uniform))
    got = picked(strided(scores) if wide else scores, uniform, device)
    check_draws(scores, uniform, got)


NAN_BELOW_ZERO = torch.tensor(-(2**22), dtype=torch.int32).view(torch.float32).item()
"""What x86 makes of inf - inf: NaN with its sign set."""
SETTINGS = st.sampled_from(
    [
        None,
        SamplingSettings(0.7),
        SamplingSettings(0.7, 5),
        SamplingSettings(top_p=0.8),
        SamplingSettings(1.3, 7, 0.9, 0.02),
    ]
)


def spoiled(scores: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Scores [..., V], some rows of which have NaN or +inf at a few places or are -inf throughout, and which rows these
    are [...]."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 5, scores.shape[:-1], generator=generator)
    value = torch.tensor([0, torch.nan, torch.inf, NAN_BELOW_ZERO, 0])[kind][..., None].to(scores.dtype)
    at = torch.rand(scores.shape, generator=generator) < 0.1
    at |= torch.arange(scores.shape[-1]) == torch.randint(
        0, scores.shape[-1], (*scores.shape[:-1], 1), generator=generator
    )
    odd = torch.where((kind == 4)[..., None], -torch.inf, torch.where(at, value, scores))
    return torch.where((kind > 0)[..., None], odd, scores), kind > 0


@EVERYWHERE
@given(LEADING, VOCABS, FLOATS, SETTINGS, SEEDS)
@DRAWN
def test_pick_draws_no_token_where_there_is_no_distribution(device, leading, vocab, dtype, settings, seed):
    """NaN, +inf, or -inf alone: the reference and the kernel say so of the same rows, and of no others."""
    scores, wanted = spoiled(
        torch.randn(*leading, vocab, generator=torch.Generator().manual_seed(seed)).to(dtype), seed
    )
    uniform = torch.rand(leading, generator=torch.Generator().manual_seed(seed))
    got = pick(moved_as_is(scores, device), moved_as_is(uniform, device), settings).cpu()
    for each in (got, reference.pick(scores, uniform, settings)):
        assert torch.equal(each == reference.NO_TOKEN, wanted) and (each[~wanted] >= 0).all()


@EVERYWHERE
@given(LEADING, VOCABS, FLOATS, SEEDS)
@DRAWN
def test_the_likeliest_of_nan_is_its_first_place(device, leading, vocab, dtype, seed):
    scores, _ = spoiled(torch.randn(*leading, vocab, generator=torch.Generator().manual_seed(seed)).to(dtype), seed)
    assert torch.equal(picked(scores, None, device), scores.argmax(-1)) and torch.equal(
        scores.argmax(-1), reference.pick(scores, None)
    )


@EVERYWHERE
@given(st.sampled_from([1, 65, CHUNK + 1]), st.floats(0, 1 - 2**-24, width=32), SEEDS)
@DRAWN
def test_pick_has_no_choice_but_the_only_token(device, vocab, uniform, seed):
    generator = torch.Generator().manual_seed(seed)
    token = torch.randint(0, vocab, (2, 3), generator=generator)
    scores = torch.full((2, 3, vocab), -torch.inf).scatter(
        2, token[..., None], 9 * torch.randn(2, 3, 1, generator=generator)
    )
    assert torch.equal(picked(scores, torch.full((2, 3), uniform), device), token)


@EVERYWHERE
def test_pick_hits_its_shares_exactly(device):
    """Probabilities 1/2, 1/4, 1/8, 1/8 and a level between any two of them, for nodes whose uniforms lie the other way
    round."""
    scores = torch.log(torch.tensor([4.0, 0.0, 2.0, 1.0, 1.0])).expand(2, 8, 5)
    uniform = ((torch.arange(8) + 0.5) / 8)[:, None].expand(8, 2).contiguous().t()
    assert picked(scores, uniform, device).tolist() == [[0, 0, 0, 0, 2, 2, 3, 4]] * 2


@EVERYWHERE
@pytest.mark.parametrize("vocab", [2, 64, 2 * CHUNK])
def test_a_level_between_two_tokens_is_the_upper_ones(device, vocab):
    """Equal scores: every mass is exactly 1, and the level of uniform k / V is exactly the mass before token k."""
    tokens = torch.unique(torch.tensor([0, 1, vocab // 2 - 1, vocab // 2, vocab - 1]).clamp(0, vocab - 1))
    assert torch.equal(picked(torch.zeros(1, len(tokens), vocab), tokens[None] / vocab, device), tokens[None])


@EVERYWHERE
@given(SEEDS)
@examples(3)
def test_a_level_past_the_last_mass_takes_the_last_token_with_mass(device, seed):
    """The chunk's sum in fp32 may exceed the running sum in fp64, so the highest uniform may find no place: what
    follows is -inf."""
    scores = torch.randn(30, CHUNK, generator=torch.Generator().manual_seed(seed))
    scores[:, CHUNK // 2 :] = -torch.inf
    uniform = torch.full((30,), 1 - 2**-53, dtype=torch.float64)
    check_draws(scores, uniform, picked(scores, uniform, device))


@ON_CUDA
@ON_CUDA_DTYPES
@pytest.mark.parametrize(
    ("rows", "nodes", "vocab"),
    [(1, 1, 128256), (1, 61, 128256), (8, 61, 32000), (8, 64, 50257), (2, 7, 262144), (3, 5, 999)],
)
def test_pick_at_real_sizes(device, dtype, rows, nodes, vocab):
    generator = torch.Generator(device).manual_seed(0)
    scores = (4 * torch.randn(rows, nodes, vocab, generator=generator, device=device)).to(dtype)
    assert torch.equal(picked(scores, None, device), scores.cpu().argmax(-1))
    cut = scores.masked_fill(scores < scores.kthvalue(vocab - 50, -1, keepdim=True).values, -torch.inf)
    for given_scores in (scores, cut):
        uniform = torch.rand(rows, nodes, generator=generator, device=device)
        for part in range(rows):  # float64 takes room
            check_draws(given_scores[part], uniform[part], picked(given_scores, uniform, device)[part])


@pytest.mark.parametrize("change", ["dtype", "stride", "uniform", "empty"])
def test_pick_says_what_it_accepts(change):
    scores, uniform = torch.randn(2, 3, 9), torch.rand(2, 3)
    scores = {"dtype": scores.double(), "stride": scores.transpose(1, 2)[:, :3], "empty": scores[..., :0]}.get(
        change, scores
    )
    with pytest.raises(ValueError, match=r"accepted"):
        pick(scores, uniform[:, :2] if change == "uniform" else uniform)


def tree(rows: int, nodes: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, parents, picks of random trees, where siblings may say the same and half of the picks name a child."""
    index = torch.arange(nodes)
    parents = (torch.rand(rows, nodes, generator=generator) ** 0.3 * index).long().clamp(max=(index - 1).clamp(min=0))
    tokens = torch.randint(0, 5, (rows, nodes), generator=generator)
    picks = torch.randint(0, 5, (rows, nodes), generator=generator)
    named = torch.rand(rows, nodes, generator=generator) < 0.7
    return tokens, parents, picks.scatter(1, torch.where(named, parents, nodes - 1), tokens)


def check_walk(inputs: tuple[Tensor, ...], steps: int, device: str) -> None:
    wanted = reference.posterior_walk(*inputs, steps)
    with poisoned():
        got = posterior_walk(*(moved_as_is(x, device) for x in inputs), steps)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.int64 and torch.equal(a.cpu(), b)


@EVERYWHERE
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 7, 31, 32, 63, 65, 130, 256, 300]),
    st.integers(1, 20),
    st.booleans(),
    SEEDS,
)
@examples(60)
def test_posterior_walk(device, rows, nodes, steps, wide, seed):
    inputs = tree(rows, nodes, torch.Generator().manual_seed(seed))
    if wide:  # parts of wider rows, and one tree for all rows
        inputs = (
            inputs[0].repeat(1, 2)[:, nodes:],
            inputs[1][0].expand(rows, -1),
            inputs[2].repeat(1, 3)[:, nodes : 2 * nodes],
        )
    check_walk(inputs, steps, device)


@EVERYWHERE
@pytest.mark.parametrize("nodes", [1, 9, 64])
def test_a_chain_that_is_accepted_whole(device, nodes):
    tokens = torch.arange(nodes).expand(2, -1)
    parents = (torch.arange(nodes) - 1).clamp(min=0).expand(2, -1)
    for steps in {1, nodes, nodes + 3}:
        check_walk((tokens, parents, tokens + 1), steps, device)


@ON_CUDA
@pytest.mark.parametrize(("rows", "nodes", "steps"), [(1, 60, 9), (64, 61, 9), (8, 256, 33), (2, 4096, 20)])
def test_posterior_walk_at_real_sizes(device, rows, nodes, steps):
    for seed in range(5):
        check_walk(tree(rows, nodes, torch.Generator().manual_seed(seed)), steps, device)


@pytest.mark.parametrize("change", ["steps", "dtype", "stride"])
def test_posterior_walk_says_what_it_accepts(change):
    tokens, parents, picks = tree(2, 6, torch.Generator().manual_seed(0))
    picks = {"dtype": picks.int(), "stride": picks.t().contiguous().t()}.get(change, picks)
    with pytest.raises(ValueError, match="accepted"):
        posterior_walk(tokens, parents, picks, 0 if change == "steps" else 3)


@ON_CUDA
def test_a_verification_can_be_captured(device):
    """Replayed on other inputs, it gives what a plain call gives."""
    generator = torch.Generator(device).manual_seed(0)
    scores = torch.randn(2, 61, 32000, generator=generator, device=device)
    uniform = torch.rand(2, 61, generator=generator, device=device)
    tokens, parents, _ = (x.to(device) for x in tree(2, 61, torch.Generator().manual_seed(0)))

    def verify() -> tuple[Tensor, ...]:
        greedy, drawn = pick(scores, None), pick(scores, uniform)
        return greedy, drawn, *posterior_walk(tokens, parents, greedy % 5, 9)

    graph, outs = captured(verify)
    for _ in range(3):
        scores.normal_(generator=generator)
        uniform.uniform_(generator=generator)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outs, verify(), strict=True))
