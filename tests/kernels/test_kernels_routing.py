"""The router's kernel against the reference, for drawn sizes, and the reference against transformers' own routers."""

from __future__ import annotations

import pytest
import torch
from helpers.examples import examples
from helpers.kernels import EVERYWHERE
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import Glm4MoeConfig, GptOssConfig, Llama4TextConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from fastspec.kernels.linear import reference
from fastspec.kernels.linear.experts import route
from fastspec.kernels.linear.reference import Routing

pytestmark = pytest.mark.usefixtures("filled_with_nan")
UNIT = torch.finfo(torch.float32).eps


def by_expert(count: int, chosen: Tensor, shares: Tensor) -> Tensor:
    """The share of every expert [T, E], NaN for those that were not chosen; an expert is chosen once."""
    assert all(len(set(row)) == chosen.shape[1] for row in chosen.tolist())
    return torch.full((len(chosen), count), torch.nan, device=chosen.device).scatter_(1, chosen, shares.float())


def apart(grouped: Tensor) -> bool:
    """Whether no two groups of logits [T, G, S] have best pairs of the same sum, of which either may be kept."""
    sums = grouped.topk(min(2, grouped.shape[-1])).values.sum(-1).sort(-1).values
    return bool((sums.diff() > 0).all())


@EVERYWHERE
@given(
    data=st.data(),
    seed=st.integers(0, 2**31),
    tokens=st.sampled_from([1, 7, 33]),
    sizes=st.sampled_from([(1, 1), (2, 3), (4, 5), (8, 8), (1, 60), (1, 130)]),
    sigmoid=st.booleans(),
    normalised=st.booleans(),
    corrected=st.booleans(),
    rounded=st.booleans(),
    pad=st.booleans(),
)
@examples(20)
def test_route(device, seed, tokens, sizes, data, sigmoid, normalised, corrected, rounded, pad):
    generator = torch.Generator(device).manual_seed(seed)
    groups, size = sizes
    count = groups * size
    kept = data.draw(st.integers(1, groups))
    choices = data.draw(st.integers(1, min(kept * size, 9)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    # A step of a sixteenth between any two: no two experts are as good as each other, and fp16 holds all of them.
    steps = torch.stack([torch.randperm(count, generator=generator, device=device) for _ in range(tokens)])
    logits = torch.full((tokens, count + pad), torch.nan, device=device, dtype=dtype)[:, :count]
    logits.copy_((steps - count // 2) / 16)
    kinds = st.sampled_from([torch.float32, torch.float16])  # of half precision in a model that was cast as a whole
    correction = torch.randn(count, generator=generator, device=device).to(data.draw(kinds)) if corrected else None
    routing = Routing(choices, sigmoid, normalised, 2.5, groups, kept, rounded)
    assume(kept == groups or corrected or apart(logits.unflatten(-1, sizes)))
    chosen, shares = route(logits, routing, correction)
    wanted = reference.route(logits, routing, correction)
    assert chosen.dtype == torch.int64 and shares.dtype == wanted[1].dtype == (dtype if rounded else torch.float32)
    got, expected = by_expert(count, chosen, shares), by_expert(count, *wanted)
    # An exponential, a sum of up to 130 terms, a quotient and a product, each of a unit or two; half precision rounds
    # once.
    torch.testing.assert_close(
        got, expected, rtol=20 * UNIT if shares.dtype == torch.float32 else 1e-3, atol=0.0, equal_nan=True
    )


@EVERYWHERE
@pytest.mark.filterwarnings("ignore:invalid value")
def test_equal_experts_are_chosen_in_their_order_and_what_is_not_a_number_stays_in_bounds(device):
    chosen, shares = route(torch.zeros(2, 9, device=device), Routing(4, normalised=True))
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2 and bool((shares == 0.25).all())
    for logits in (torch.full((1, 9), torch.nan), torch.full((1, 9), -torch.inf)):
        for routing in (Routing(3), Routing(3, sigmoid=True, groups=3, kept=2)):
            chosen, _ = route(logits.to(device), routing)
            assert bool(((chosen >= 0) & (chosen < 9)).all())


THEIRS = {
    "mixtral": (
        MixtralTopKRouter,
        MixtralConfig(hidden_size=12, num_local_experts=6),
        Routing(2, normalised=True, rounded=False),
    ),
    "qwen3_moe": (
        Qwen3MoeTopKRouter,
        Qwen3MoeConfig(hidden_size=12, num_experts=6, num_experts_per_tok=3, norm_topk_prob=False),
        Routing(3),
    ),
    "qwen3_moe, normalised": (
        Qwen3MoeTopKRouter,
        Qwen3MoeConfig(hidden_size=12, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True),
        Routing(3, normalised=True),
    ),
    "gpt_oss": (GptOssTopKRouter, GptOssConfig(hidden_size=12, num_local_experts=6), Routing(4, normalised=True)),
    "glm4_moe": (
        Glm4MoeTopkRouter,
        Glm4MoeConfig(
            hidden_size=12,
            n_routed_experts=12,
            n_group=4,
            topk_group=2,
            num_experts_per_tok=3,
            routed_scaling_factor=1.5,
        ),
        Routing(3, True, True, 1.5, 4, 2),
    ),
    "llama4": (
        Llama4Router,
        Llama4TextConfig(hidden_size=12, num_local_experts=6, num_experts_per_tok=2),
        Routing(2, sigmoid=True),
    ),
}


@pytest.mark.parametrize("family", THEIRS)
@given(seed=st.integers(0, 2**31), tokens=st.sampled_from([1, 7]))
@examples(10)
def test_the_reference_is_transformers_router(family, seed, tokens):
    kind, config, routing = THEIRS[family]
    generator = torch.Generator().manual_seed(seed)
    router = kind(config)
    for parameter in (*router.parameters(), *router.buffers()):
        parameter.data = torch.randn(parameter.shape, generator=generator)
    x = torch.randn(tokens, 12, generator=generator)
    logits = torch.nn.functional.linear(x, router.weight, getattr(router, "bias", None)).detach()
    got = by_expert(
        router.num_experts, *reference.route(logits, routing, getattr(router, "e_score_correction_bias", None))
    )
    if family == "llama4":
        scores = router(x)[0].detach()
        wanted = scores.masked_fill(scores == 0.0, torch.nan)
    else:
        wanted = by_expert(router.num_experts, *(part.detach() for part in router(x)[:0:-1]))
    torch.testing.assert_close(got, wanted, rtol=20 * UNIT, atol=0.0, equal_nan=True)


def test_what_a_router_refuses():
    logits = torch.zeros(3, 12)
    for wrong, message in (
        (Routing(0), "0 choices of 12"),
        (Routing(13), "13 choices"),
        (Routing(7, groups=4, kept=2), "7 choices of 6"),
        (Routing(2, groups=5), "12 experts in 5 groups"),
        (Routing(2, groups=4, kept=5), "5 are kept"),
    ):
        with pytest.raises(ValueError, match=message):
            route(logits, wrong)
    with pytest.raises(ValueError, match=r"logits is .* contiguous last dimension"):
        route(torch.zeros(12, 3).T, Routing(2))
    with pytest.raises(ValueError, match=r"correction is \[12\] torch\.float64"):
        route(logits, Routing(2), torch.zeros(12).double())
    assert [part.shape for part in route(logits[:0], Routing(2))] == [(0, 2), (0, 2)]
