"""The head as a module: cached steps, rotary precision, and the training attention against a masked reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastspec.generation.heads.module import EagleHead, HeadConfig
from fastspec.programs.training.ttt import UnrolledAttention


def small_head(**changes: object) -> EagleHead:
    base = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 61,
        "draft_vocab_size": 40,
        "target_hidden_size": 32,
        "taps": (1, 2, 3),
    }
    torch.manual_seed(0)
    head = EagleHead(HeadConfig(**{**base, **changes}))  # type: ignore[arg-type]
    head.bind(torch.nn.Embedding(61, 32), torch.nn.Linear(32, 61, bias=False))
    return head.eval().requires_grad_(False)


EAGLE1 = {"kind": "eagle", "taps": (), "draft_vocab_size": 61, "own_lm_head": False}
VARIANTS = [
    {},
    {"num_hidden_layers": 2},
    {"qk_norm": True, "attention_bias": True},
    {"fc_norm": True, "norm_output": True},
    {"input_norm": True},
    {"norm_before_residual": True},
    EAGLE1,
    {**EAGLE1, "num_hidden_layers": 2, "fc_bias": True},
]


def causal(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class Cached:
    """Attention over everything fed so far, one position a call."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.kept:
            k, v = (torch.cat(pair, 1) for pair in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = (k, v)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("changes", VARIANTS)
def test_cached_steps_equal_a_full_pass(changes: dict[str, object]) -> None:
    head = small_head(**changes).double()
    head.bound.embedding.double()
    tokens, positions = torch.randint(0, 61, (2, 7)), torch.arange(7).expand(2, 7)
    features = torch.randn(2, 7, 32 * max(1, len(head.config.taps)), dtype=torch.float64)
    hidden = head.fuse(features)
    full = head.step(tokens, hidden, positions, causal)
    cached = Cached()
    parts = [head.step(tokens[:, i : i + 1], hidden[:, i : i + 1], positions[:, i : i + 1], cached) for i in range(7)]
    # Norms and rotary embedding run in fp32, so the bound is fp32's, not fp64's.
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-5, atol=1e-5)


def test_rope_stays_fp32_and_has_no_limit() -> None:
    head = small_head().to(torch.bfloat16)
    assert head.inv_freq is not None and head.inv_freq.dtype == torch.float32
    seen: list[Tensor] = []

    def spy(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(k)
        return causal(layer, q, k, v)

    tokens, hidden = torch.full((1, 2), 5), torch.randn(1, 1, 32).expand(1, 2, 32).bfloat16()
    far = torch.tensor([[100_003, 100_007]])
    head.step(tokens, hidden, far, spy)
    head.step(tokens, hidden, far - 100_003, spy)
    dots = [torch.einsum("bhd,bhd->bh", k[:, 0].float(), k[:, 1].float()) for k in seen]
    torch.testing.assert_close(
        dots[0], dots[1], rtol=0.05, atol=0.05
    )  # bf16 keys; half-precision angles would be off by whole turns


def test_bound_modules_are_neither_saved_nor_moved() -> None:
    head = small_head()
    assert not [name for name in head.state_dict() if "embed" in name]
    embed = head.bound.embedding
    head.to(torch.bfloat16)
    assert embed.weight.dtype == torch.float32


def test_offsets_map_to_the_target() -> None:
    head = small_head()
    chosen = torch.arange(0, 61)[::1][:40] + 21
    head.d2t.copy_(chosen - torch.arange(40))
    assert head.to_target(torch.tensor([0, 39])).tolist() == [21, 60]


@pytest.mark.parametrize(
    "bad", [{"kind": "medusa"}, {"taps": ()}, {"draft_vocab_size": 62}, {"num_attention_heads": 3}, {"head_dim": 7}]
)
def test_bad_configs_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        small_head(**bad)


@pytest.mark.parametrize("size", [1, 7, 65])
def test_unrolled_attention_equals_the_masked_reference(size: int) -> None:
    torch.manual_seed(size)
    steps, heads, groups, width = 4, 2, 3, 16
    parts = [
        [torch.randn(2, size, n, width, requires_grad=True) for n in (heads * groups, heads, heads)]
        for _ in range(steps)
    ]
    weights = [torch.randn(2, size, heads * groups, width) for _ in range(steps)]

    def reference(step: int) -> Tensor:
        q = parts[step][0]
        k, v = (torch.cat([part[i] for part in parts[: step + 1]], 1).repeat_interleave(groups, 2) for i in (1, 2))
        diagonal = torch.eye(size, dtype=torch.bool)
        mask = torch.cat([diagonal.new_ones(size, size).tril()] + [diagonal] * step, 1)
        return F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
        ).transpose(1, 2)

    leaves = [x for part in parts for x in part]
    attend = UnrolledAttention()
    ours = [attend(0, *part) for part in parts]
    theirs = [reference(i) for i in range(steps)]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    found, expected = (
        torch.autograd.grad(sum(((o * w).sum() for o, w in zip(outs, weights, strict=True)), torch.zeros(())), leaves)
        for outs in (ours, theirs)
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
