"""Products in plain torch: what the kernels beside it compute, and their specification.
Letters are those of `fastspec.kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] times weight [M, K] transposed, plus bias [M] -> [..., M]."""
    return F.linear(x, weight, bias)


@dataclass(frozen=True, slots=True)
class Parts:
    """A product [..., M] as S sums, each over a part of its inner size: `values` [S, ..., M] fp32, contiguous.

    Their sum, in their order, of four as (0 + 1) + (2 + 3), and rounded to `dtype`, is the product.
    """

    values: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """The product's."""
        return self.values.shape[1:]


@dataclass(frozen=True, slots=True)
class DeferredProduct:
    """A deferred matrix product [..., M] of x [..., K] and weight [M, K], bias [M]: `multiply` computes it, or the
    consumer's own kernel, fused with more."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    multiply: Callable[..., Tensor | Parts]

    @property
    def shape(self) -> torch.Size:
        """The product's."""
        return torch.Size((*self.x.shape[:-1], self.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        """The product's."""
        return self.x.dtype

    def made(self) -> Tensor | Parts:
        """The product."""
        return self.multiply(self.x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class DeferredSum:
    """A product [..., M] that processes have added up between them: `own` is this process's addend, which a norm behind
    it may send off before it is a tensor, and `all_reduce(own, group)` the sum."""

    own: Tensor | Parts | DeferredProduct
    group: dist.ProcessGroup
    all_reduce: Callable[[Tensor, dist.ProcessGroup], Tensor]

    @property
    def shape(self) -> torch.Size:
        """The product's."""
        return self.own.shape

    @property
    def dtype(self) -> torch.dtype:
        """The product's."""
        return self.own.dtype


def joined(x: Tensor | Parts | DeferredProduct | DeferredSum) -> Tensor:
    """A product as a tensor: itself, or the sum of its parts or of the processes' addends."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, DeferredProduct):
        return joined(x.made())
    if isinstance(x, DeferredSum):
        return x.all_reduce(joined(x.own), x.group)
    parts: list[Tensor] = list(x.values)
    if len(parts) == 4:
        parts = [parts[0] + parts[1], parts[2] + parts[3]]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Activation:
    """Activation of a gate before it multiplies: gate * sigmoid(alpha * (gate + cubic * gate**3)); the default is
    SiLU."""

    alpha: float = 1.0
    cubic: float = 0.0


SILU = Activation()
GELU_TANH = Activation((8 / math.pi) ** 0.5, 0.044715)
"""GELU by its tangent."""


def opened(gate: Tensor, kind: Activation) -> Tensor:
    """A gate as its kind makes it, rounded to its dtype; SiLU and GELU by torch's own."""
    if kind == SILU:
        return F.silu(gate)
    if kind == GELU_TANH:
        return F.gelu(gate, approximate="tanh")
    wide = gate.float()
    return (wide * torch.sigmoid(kind.alpha * (wide + kind.cubic * wide**3))).to(gate.dtype)


def swiglu(gate_up: Tensor, kind: Activation = SILU) -> Tensor:
    """opened(gate) * up of gate_up [..., 2 * I], the gate first -> [..., I]."""
    gate, up = gate_up.chunk(2, -1)
    return opened(gate, kind) * up


def gate_up(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: Activation = SILU, *, product: Callable[..., Tensor] = linear
) -> Tensor:
    """`swiglu` of x [..., K] times a packed weight [2 * I, K], the gate's rows first, plus bias [2 * I] -> [..., I]."""
    return swiglu(product(x, weight, bias), kind)


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    kind: Activation | None = None,
    *,
    product: Callable[..., Tensor] = linear,
) -> Tensor:
    """Linear layers over one input whose weights lie apart: x [..., K] times each weight [M, K] transposed, plus its
    bias [M] -> their outputs side by side [..., all M]; with a kind, of a gate and an up part, opened(gate) * up [...,
    M]."""
    parts = [product(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    if kind is None:
        return torch.cat(parts, -1)
    gate, up = parts
    return opened(gate, kind) * up


@dataclass(frozen=True, slots=True)
class Routing:
    """Rule by which a token chooses `choices` of its E experts, and how much of each it takes."""

    choices: int
    sigmoid: bool = False
    """True where an expert's score is the sigmoid of its logit by itself, else the softmax over all."""
    normalised: bool = False
    """True where the chosen scores are divided by their sum."""
    scale: float = 1.0
    """Factor of the scores in the end."""
    groups: int = 1
    kept: int = 1
    """With several groups, E / groups neighbours each, experts of the `kept` best are chosen; a group counts as its two
    best experts."""
    rounded: bool = True
    """True where shares are rounded to the dtype of the logits, else fp32."""


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A router's choice: logits [T, E] -> chosen [T, K] int64, in no order of meaning, and their shares [T, K].

    Experts are chosen by their logits, or, with a correction [E], by the fp32 sum of it and their score; shares are of
    the scores alone. The forms are those of Mixtral and Qwen (softmax), gpt-oss (softmax over the chosen: that of all,
    normalised), DeepSeek-V3 and GLM-4 (sigmoid, correction, groups, scale) and Llama 4 (sigmoid), as transformers 5.23
    has them.
    """
    wide = logits.float()
    order = wide if correction is None else (wide.sigmoid() if routing.sigmoid else wide.softmax(-1)) + correction
    if routing.groups > 1:
        grouped = order.unflatten(-1, (routing.groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1])).values.sum(-1).topk(routing.kept).indices
        keep = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=order.device).scatter_(1, best, True)
        order = grouped.masked_fill(~keep[..., None], -torch.inf).flatten(-2)
    chosen = order.topk(routing.choices).indices
    if routing.sigmoid:
        shares = wide.gather(-1, chosen).sigmoid()
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20) if routing.normalised else shares
    else:
        shares = wide.gather(-1, chosen).softmax(-1) if routing.normalised else wide.softmax(-1).gather(-1, chosen)
    shares = shares * routing.scale
    return chosen, shares.to(logits.dtype) if routing.rounded else shares


@dataclass(frozen=True, slots=True)
class Expert:
    """Computation of one expert: down((up + offset) * opened(gate)); the defaults are SwiGLU."""

    interleaved: bool = False
    """True where the rows of gate and up take turns, else the gate's come first."""
    gate: Activation = SILU
    offset: float = 0.0
    limit: float | None = None
    """The gate is at most this before it is used, and the up part within plus and minus this."""
    scales_input: bool = False
    """True where a share multiplies what its expert reads, else what it gives."""


SWIGLU = Expert()


def experts(
    x: Tensor,
    gate_up: Tensor | Sequence[Tensor],
    down: Tensor | Sequence[Tensor],
    chosen: Tensor,
    weights: Tensor,
    kind: Expert = SWIGLU,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """A mixture of experts: x [T, H], gate_up [E, 2 * I, H], down [E, H, I], chosen [T, K] int64, weights [T, K] -> [T,
    H].

    Row t is the sum over its K experts of weights[t, k] times the expert's answer, each product rounded to x's dtype,
    the weighted sum in fp32 and rounded once. Biases are gate_up_bias [E, 2 * I] and down_bias [E, H]. `shared` [T, H]
    is added, what an expert that all tokens share gave, times the sigmoid of shared_gate [T, 1] where there is one.
    Where shares scale the input, a token's experts differ.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if shared is not None:
        out += shared.float() if shared_gate is None else shared.float() * shared_gate.float().sigmoid()
    for expert in range(len(gate_up)):
        taken = chosen == expert  # no index is read back: a round waits for nothing
        share = (weights.float() * taken).sum(1, keepdim=True)
        given = x * share.to(x.dtype) if kind.scales_input else x
        both = F.linear(given, gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
        answer = F.linear(_joined(both, kind), down[expert], None if down_bias is None else down_bias[expert])
        out += (taken.any(1, keepdim=True) if kind.scales_input else share) * answer.float()
    return out.to(x.dtype)


def _joined(both: Tensor, kind: Expert) -> Tensor:
    """An expert's gate and up parts [..., 2 * I] -> [..., I]."""
    gate, up = both.unflatten(-1, (-1, 2)).unbind(-1) if kind.interleaved else both.chunk(2, -1)
    if kind.limit is not None:
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    return opened(gate, kind.gate) * (up if kind.offset == 0.0 else up + kind.offset)
