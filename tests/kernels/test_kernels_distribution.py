"""Draws under temperature, top-k, top-p and min-p: the reference against transformers' warpers, the kernels against the
distribution itself."""

from __future__ import annotations

from itertools import product

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
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

from fastspec.kernels.verification import reference
from fastspec.kernels.verification.posterior_eval import pick
from fastspec.kernels.verification.reference import SamplingSettings, under_settings
from fastspec.kernels.verification.sampling import CHUNK, cut, inverse_of

SETTINGS = st.builds(
    SamplingSettings,
    temperature=st.sampled_from([1.0, 0.01, 100.0]) | st.floats(0.05, 5),
    top_k=st.sampled_from([0, 1, 2, 50, 10**6]) | st.integers(0, 70),
    top_p=st.sampled_from([1.0, 0.0, 1e-6, 0.5, 0.9999]) | st.floats(0.01, 1),
    min_p=st.sampled_from([0.0, 1.0, 1e-162]) | st.floats(2**-64, 0.5),  # 1e-162 is 0 in fp32
)
VOCABS = st.sampled_from([1, 7, 63, 65, 1000, CHUNK + 1])
STEPS = st.sampled_from([None, 0.25, 1.0])  # of the values: equal ones are common
# A mass in fp32 is off by 2^-18 of the whole (see `check_draws`), and what the digits above left over by as much again.
MASS_OFF = 2**-17


def scores_of(rows: int, vocab: int, step: float | None, dtype: torch.dtype, seed: int) -> Tensor:
    """scores [rows, vocab], in steps, some rows with many -inf and none with nothing else."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(rows, vocab, generator=generator)
    scores = scores if step is None else (scores / step).round() * step
    lost = (torch.rand(rows, vocab, generator=generator) < 0.6) & (torch.rand(rows, 1, generator=generator) < 0.4)
    lost &= torch.arange(vocab) != torch.randint(0, vocab, (rows, 1), generator=generator)
    return scores.masked_fill(lost, -torch.inf).to(dtype)


def warped(scores: Tensor, distribution: SamplingSettings) -> Tensor:
    """What transformers' warpers leave of scores [R, V]."""
    makers = {
        "temperature": lp.TemperatureLogitsWarper,
        "top_k": lp.TopKLogitsWarper,
        "top_p": lp.TopPLogitsWarper,
        "min_p": lp.MinPLogitsWarper,
    }
    given = {
        name: getattr(distribution, name)
        for name in makers
        if getattr(distribution, name) != getattr(SamplingSettings(), name)
    }
    return LogitsProcessorList([makers[name](value) for name, value in given.items()])(None, scores.float())


@given(VOCABS, STEPS, st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), SETTINGS, SEEDS)
@examples(150)
def test_the_reference_keeps_what_transformers_keeps(vocab, step, dtype, distribution, seed):
    """The same scores bit for bit; where top-p parts equal ones, as many, and the reference keeps the highest ids."""
    scores = scores_of(3, vocab, step, dtype, seed)
    got, wanted = under_settings(scores, distribution), warped(scores, distribution)
    assert torch.equal(got.sort(-1).values, wanted.sort(-1).values)
    tempered = scores.float() / distribution.temperature
    low = torch.where(got > -torch.inf, got, torch.inf).amin(-1, keepdim=True)
    assert torch.equal(got > low, tempered > low)
    edge = (tempered == low).int()
    kept = edge * (edge.flip(-1).cumsum(-1).flip(-1) <= (got == low).sum(-1, keepdim=True))
    assert torch.equal(got == low, kept.bool())


def check_cut(y: Tensor, keep: Tensor, distribution: SamplingSettings) -> Tensor:
    """Hold what is kept [R, V] of y [R, V], scores under the temperature, to the distribution in float64 -> rows where
    rounding has no say.

    Among what top-k leaves, in rising order of scores and then of ids, a token goes while the mass up to it is at most
    1 - top_p, or where it has less than min_p of the best one's probability, and the best one stays.
    """
    y = y.double()
    left = y >= y.topk(min(distribution.top_k or y.shape[-1], y.shape[-1])).values[..., -1:]
    left &= y > -torch.inf
    assert not (keep & ~left).any()
    values, order = y.masked_fill(~left, -torch.inf).sort(dim=-1, stable=True)
    left, keep = left.gather(-1, order), keep.gather(-1, order)
    mass = values.softmax(-1).cumsum(-1)
    tail = float(torch.tensor(1 - distribution.top_p)) if distribution.top_p < 1 else -1.0
    least = torch.tensor(distribution.min_p).double()  # as fp32 holds it: 0 removes nothing
    floor = values[..., -1:] + least.log()
    near = 2**-22 * values[..., -1:].abs().clamp(min=64)  # two roundings of fp32, log(min_p) is less than 64 from 0
    best = torch.arange(y.shape[-1], device=y.device) == y.shape[-1] - 1
    must_go = ((mass <= tail - MASS_OFF) | (values < floor - near)) & ~best
    may_go = ((mass <= tail + MASS_OFF) | (values < floor + near)) & ~best
    assert keep[..., -1].all() and not (keep & must_go).any() and not (left & ~keep & ~may_go).any()
    assert not (keep[..., :-1] & left[..., 1:] & ~keep[..., 1:]).any()  # what is kept is the end of the order
    return (must_go == may_go).all(-1)


def check_pick(scores: Tensor, uniform: Tensor, distribution: SamplingSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Check the cut by itself, and draws from what it leaves; scores [B, N, V], uniform [B, N] -> scores [B * N, V]
    under the temperature, what is kept of them, and the rows where rounding has no say."""
    with poisoned():
        got = pick(scores, uniform, distribution)
        low, first = (part[:, None] for part in cut(scores, distribution))
    y = scores.flatten(0, 1).float() * inverse_of(distribution)
    keep = ((y > low) | ((y == low) & (torch.arange(y.shape[-1], device=y.device) >= first))) & (y > -torch.inf)
    clear = check_cut(y, keep, distribution)
    check_draws(y.masked_fill(~keep, -torch.inf), uniform.flatten(), got.flatten())
    return y, keep, clear


@EVERYWHERE
@given(st.sampled_from([(1, 1), (1, 2), (2, 1)]), VOCABS, STEPS, FLOATS, SETTINGS, st.booleans(), SEEDS)
@examples(12)
def test_pick_under_a_distribution(device, leading, vocab, step, dtype, distribution, wide, seed):
    scores = scores_of(leading[0] * leading[1], vocab, step, dtype, seed).unflatten(0, leading)
    generator = torch.Generator().manual_seed(seed + 1)
    uniform = torch.rand(leading, generator=generator)
    kind = torch.randint(0, 4, leading, generator=generator)
    uniform = torch.where(kind == 0, 0.0, torch.where(kind == 1, 1 - 2**-24, uniform)).to(device)
    y, keep, clear = check_pick(moved_as_is(strided(scores) if wide else scores, device), uniform, distribution)
    wanted = under_settings(y, SamplingSettings(1.0, distribution.top_k, distribution.top_p, distribution.min_p))
    assert torch.equal(keep[clear], wanted[clear] > -torch.inf)


@EVERYWHERE
@pytest.mark.parametrize(("min_p", "kept"), [(6.7e-162, 4), (1e-20, 1)])
def test_a_min_p_that_fp32_holds_as_zero_removes_nothing(device, min_p, kept):
    scores, distribution = torch.tensor([[[5.0, 4.0, -3.0, 0.0]]]), SamplingSettings(temperature=0.01, min_p=min_p)
    assert (
        (warped(scores[0], distribution) > -torch.inf).sum()
        == (under_settings(scores, distribution) > -torch.inf).sum()
        == kept
    )
    assert check_pick(scores.to(device), torch.zeros(1, 1, device=device), distribution)[1].sum() == kept


@EVERYWHERE
@pytest.mark.parametrize(
    ("vocab", "top_p", "value", "dtype"),
    [(8, *each) for each in product([0.0, 0.25, 0.5, 0.75], [0.0, -1.5, 2.5], [torch.float32, torch.float16])]
    + [
        (2 * CHUNK, 0.0, -1.5, torch.float16),
        (2 * CHUNK, 0.25, 0.0, torch.float32),
        (2 * CHUNK, 0.75, 2.5, torch.float16),
    ],
)
def test_of_equal_scores_top_p_removes_the_lowest_ids(device, vocab, top_p, value, dtype):
    """Shares that fp32 holds exactly: the mass up to the last one removed is 1 - top_p."""
    scores = torch.full((1, 1, vocab), value, dtype=dtype)
    low, first = cut(scores.to(device), SamplingSettings(top_p=top_p))
    assert (low.item(), first.item()) == (value, min(vocab - 1, round((1 - top_p) * vocab)))
    kept = under_settings(scores, SamplingSettings(top_p=top_p))[0, 0] == value
    assert torch.equal(kept, torch.arange(vocab) >= first.item())


@EVERYWHERE
@pytest.mark.parametrize("min_p", [1.0, 0.5, 0.25, 0.125])  # whose products fp32 holds exactly
@pytest.mark.parametrize("top", [0.0, 2.5, -3.0])
def test_min_p_keeps_what_has_exactly_its_share(device, top, min_p):
    """As transformers does: probability min_p times the best one's stays, a thousandth less goes."""
    edge = torch.tensor(top) + torch.tensor(min_p).log()
    scores = torch.stack((edge - 1e-3, torch.tensor(top), edge, edge - 20))[None, None]
    distribution, wanted = SamplingSettings(min_p=min_p), [False, True, True, False]
    probs = scores.softmax(-1)[0, 0]
    assert probs[2] == min_p * probs[1]
    assert (warped(scores[0], distribution)[0] > -torch.inf).tolist() == wanted
    assert (under_settings(scores, distribution)[0, 0] > -torch.inf).tolist() == wanted
    low, first = (part.cpu() for part in cut(scores.to(device), distribution))
    assert ((scores[0, 0] > low) | ((scores[0, 0] == low) & (torch.arange(4) >= first))).tolist() == wanted
    drawn = [
        pick(scores.to(device), torch.full((1, 1), uniform, device=device), distribution).item()
        for uniform in (0.0, 1 - 2**-24)
    ]
    assert drawn == [1, 2]


@EVERYWHERE
def test_min_p_at_the_value_that_top_p_cuts_at_leaves_its_ids_removed(device):
    """Eight equal scores: top-p removes the lower four, min-p none of the others."""
    scores, distribution = torch.full((1, 1, 8), 1.5), SamplingSettings(top_p=0.5, min_p=1.0)
    low, first = cut(scores.to(device), distribution)
    assert (low.item(), first.item()) == (1.5, 4)
    assert (under_settings(scores, distribution)[0, 0] > -torch.inf).tolist() == [False] * 4 + [True] * 4


@EVERYWHERE
@pytest.mark.parametrize(
    "settings", [SamplingSettings(0.01, 1), SamplingSettings(top_p=1e-6), SamplingSettings(100.0, min_p=1.0)], ids=str
)
def test_distributions_that_leave_the_best_alone(device, settings):
    """Scores that are all different, in rising and falling order, negative and positive."""
    scores = torch.stack((torch.arange(65.0) - 70, 30 - torch.arange(65.0)))[None]
    for uniform in (0.0, 0.5, 1 - 2**-24):
        got = pick(scores.to(device), torch.full((1, 2), uniform, device=device), settings)
        assert got.tolist() == [[64, 0]] == reference.pick(scores, torch.full((1, 2), uniform), settings).tolist()


@EVERYWHERE
def test_top_k_keeps_all_that_equal_the_last(device):
    scores = torch.tensor([[3.0, 1.0, 2.0, 1.0, -torch.inf, 1.0, 0.5]])[None]
    uniform = torch.arange(16)[None] / 16
    got = pick(scores.expand(1, 16, 7).to(device), uniform.to(device), SamplingSettings(100.0, 3))
    assert sorted(set(got.flatten().tolist())) == [0, 1, 2, 3, 5]


@EVERYWHERE
@pytest.mark.parametrize("distribution", [SamplingSettings(0.7, 3, 0.9, 0.1), SamplingSettings()], ids=str)
def test_without_uniforms_every_distribution_takes_the_best(device, distribution):
    scores = torch.randn(2, 3, 65, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pick(scores.to(device), None, distribution).cpu(), scores.argmax(-1))
    assert torch.equal(reference.pick(scores, None, distribution), scores.argmax(-1))


@ON_CUDA
@ON_CUDA_DTYPES
@pytest.mark.parametrize(("rows", "nodes", "vocab"), [(1, 1, 128256), (1, 60, 128256), (4, 60, 49152), (2, 7, 262144)])
@pytest.mark.parametrize(
    "distribution",
    [SamplingSettings(0.8, 50, 0.95), SamplingSettings(top_p=0.95), SamplingSettings(1.3, 5000, 0.9, 0.01)],
    ids=str,
)
def test_pick_under_a_distribution_at_real_sizes(device, dtype, rows, nodes, vocab, distribution):
    generator = torch.Generator(device).manual_seed(0)
    scores = (3 * torch.randn(rows, nodes, vocab, generator=generator, device=device)).to(dtype)
    uniform = torch.rand(rows, nodes, generator=generator, device=device)
    check_pick(scores, uniform, distribution)
    assert torch.equal(pick(scores, uniform, distribution), pick(scores, uniform, distribution))


@ON_CUDA
@pytest.mark.parametrize(
    "distribution", [SamplingSettings(0.8, 50, 0.95), SamplingSettings(min_p=0.05), SamplingSettings(0.5)], ids=str
)
def test_a_draw_under_a_distribution_can_be_captured(device, distribution):
    """Replayed on other inputs, it gives what a plain call gives."""
    generator = torch.Generator(device).manual_seed(0)
    scores = torch.randn(2, 61, 32000, generator=generator, device=device)
    uniform = torch.rand(2, 61, generator=generator, device=device)
    graph, out = captured(lambda: pick(scores, uniform, distribution))
    for _ in range(3):
        scores.normal_(generator=generator)
        uniform.uniform_(generator=generator)
        graph.replay()
        assert torch.equal(out, pick(scores, uniform, distribution))
