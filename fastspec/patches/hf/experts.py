"""A transformers mixture of experts through the backend's ops, where it is one of plain weights that a family's row describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastspec.generation.layers.decoder import gated, is_plain, product
from fastspec.generation.layers.mixers import Linear
from fastspec.generation.ops import Ops
from fastspec.kernels.linear.reference import GELU_TANH, SILU, Expert, Gate, Routing, joined, linear
from fastspec.patches.hf.families import Adapter
from fastspec.patches.hf.mixtures import Mixture
from fastspec.patches.hf.modes import is_foreign

WEIGHTS = {"gate_up_proj", "down_proj"}
BIASES = {"gate_up_proj_bias", "down_proj_bias"}
FLOATS = torch.float32, torch.float16, torch.bfloat16
ACTIVATIONS = {"SiLU": SILU, "SiLUActivation": SILU, "GELUTanh": GELU_TANH}
"""What the op knows of transformers' activations, by their classes."""


def mixture_of(row: Mixture, mlp: Any, ops: Ops) -> Linear:
    """A mixture that `is_mixture`: x [B, N, H] -> [B, N, H]. The router's logits, its choice, and the experts, all by the backend."""
    compute = ops.experts
    assert compute is not None
    router, held = getattr(mlp, row.router), mlp.experts
    routing, kind, weight = _routing(row, router), _expert(row, held), router.weight
    bias, correction = router._parameters.get("bias"), getattr(router, row.correction) if row.correction else None
    gate_up, down = (each.transpose(1, 2) if row.transposed else each for each in (held.gate_up_proj, held.down_proj))
    biases = {"gate_up_bias": held._parameters.get("gate_up_proj_bias"), "down_bias": held._parameters.get("down_proj_bias")}
    side = getattr(mlp, row.shared) if row.shared else None
    shared = gated(ops, side.gate_proj, side.up_proj, side.down_proj, parts=False) if side is not None else None
    opening = product(ops, (getattr(mlp, row.shared_gate),)) if row.shared_gate else None

    def run(x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        logits = linear(flat.float(), weight.float(), bias) if row.wide else ops.linear(flat, weight, bias)
        chosen, shares = ops.route(logits, routing, correction)
        beside = joined(shared(flat)) if shared is not None else None
        opened = opening(flat) if opening is not None else None
        return compute(flat, gate_up, down, chosen, shares, kind, **biases, shared=beside, shared_gate=opened).view_as(x)

    return run


def _routing(row: Mixture, router: Any) -> Routing:
    return Routing(
        choices=router.top_k, sigmoid=row.sigmoid, normalised=bool(getattr(router, row.normalised_if)) if row.normalised_if else True,
        scale=float(getattr(router, row.scale)) if row.scale else 1.0, groups=getattr(router, row.groups) if row.groups else 1,
        kept=getattr(router, row.kept) if row.kept else 1, rounded=row.rounded,
    )  # fmt: skip


def experts_of(held: Any, ops: Ops) -> Callable[..., Tensor]:
    """Experts without their router: x [T, H], chosen [T, K], their shares [T, K] -> [T, H]. By the backend where they are plain."""
    if ops.experts is None or not are_plain(held):
        return held
    compute, kind = ops.experts, _expert(Mixture(), held)
    return lambda x, chosen, shares: compute(x, held.gate_up_proj, held.down_proj, chosen, shares, kind)


def _expert(row: Mixture, held: Any) -> Expert:
    return Expert(
        interleaved=row.interleaved, gate=Gate(float(getattr(held, row.alpha))) if row.alpha else ACTIVATIONS[_act(held)],
        offset=row.offset, limit=float(getattr(held, row.limit)) if row.limit else None,
    )  # fmt: skip


def are_plain(held: Any, *, act: bool = True) -> bool:
    """Whether experts are plain weights of one dtype, with an activation that the op has (or, without `act`, one that is told otherwise),
    and nobody else having a say in them."""
    weights = dict(held.named_parameters())
    if weights.keys() not in (WEIGHTS, WEIGHTS | BIASES) or not is_own(held) or (act and _act(held) not in ACTIVATIONS):
        return False  # quantised ones bring scales
    plain = all(type(weight) is nn.Parameter for weight in weights.values())  # sharded ones are another kind of tensor
    return plain and len({weight.dtype for weight in weights.values()}) == 1 and weights["gate_up_proj"].dtype in FLOATS


def is_mixture(row: Mixture, mlp: Any) -> bool:
    """Whether a feed-forward is the mixture that a row describes, of plain weights, with nobody else having a say in it."""
    names = {name for name, _ in mlp.named_children()}
    if names != {"experts", row.router, *filter(None, (row.shared, row.shared_gate))} or not is_own(mlp):
        return False
    router = dict(getattr(mlp, row.router).named_parameters())
    if not {"weight"} <= router.keys() <= {"weight", "bias"} or not are_plain(mlp.experts, act=not row.alpha):
        return False
    if any(type(weight) is not nn.Parameter or weight.dtype != mlp.experts.gate_up_proj.dtype for weight in router.values()):
        return False
    side, opening = (getattr(mlp, name) if name else None for name in (row.shared, row.shared_gate))
    if side is not None and not (gate_of(side) == SILU and all(map(is_plain, (side.gate_proj, side.up_proj, side.down_proj)))):
        return False
    return opening is None or is_plain(opening)


def waits_for_host(parts: Adapter, holder: Any, model: Any, ops: Ops) -> bool:
    """Whether a feed-forward, or a layer with experts beside one, runs the experts' own module, which reads its routing back: no graph can
    hold that.

    Transformers' `grouped_mm` multiplies on the device in bf16 alone, its `batched_mm` always, its `eager` never. Kernels of others, for
    weights packed in bytes, are taken to read it.
    """
    if not hasattr(holder, "experts"):
        return False
    beside = bool(parts.experts) and are_plain(holder.experts)
    if ops.experts is not None and (beside if parts.mixture is None else is_mixture(parts.mixture, holder)):
        return False
    weight = holder.experts._parameters.get("gate_up_proj")
    if weight is None or not weight.is_floating_point():
        return True
    way = getattr(model.config.get_text_config(), "_experts_implementation", None)
    return way != "batched_mm" and not (way == "grouped_mm" and model.dtype == torch.bfloat16)


def gate_of(module: Any, name: str = "act_fn") -> Gate | None:
    """What a feed-forward's gate becomes by its activation of this name, None where the kernels do not have it."""
    return ACTIVATIONS.get(_act(module, name))


def _act(module: Any, name: str = "act_fn") -> str:
    return type(getattr(module, name, None)).__name__


def is_own(module: nn.Module) -> bool:
    """Whether nobody else has a say in what a feed-forward or its parts compute."""
    return not any(is_foreign(each) for each in module.modules() if type(each) is not nn.Linear)
