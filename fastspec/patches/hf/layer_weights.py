"""Weights of a decoder's layers: which are multiplied by the backend, read as stored, or packed side by side; and
mixtures of experts through the backend's ops, where a family's row describes their plain weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastspec.generation.decoder_layer import Linear, Product, Summed, gated, is_plain, pack, product, turn
from fastspec.generation.ops import Ops
from fastspec.kernels.linear.reference import GELU_TANH, SILU, Activation, DeferredSum, Expert, Routing, joined, linear
from fastspec.patches.hf.compat import own_parameters
from fastspec.patches.hf.config_fields import experts_name
from fastspec.patches.hf.families import Adapter, Mixture
from fastspec.patches.hf.modes import adapter_for, decoder_of, is_foreign, lm_head_of
from fastspec.patches.hf.parallel import ParallelStyle, parallel_style, share_of_experts, weights_of
from fastspec.patches.hf.quantised import StoredMixture, base_of, format_of, read

WEIGHTS = {"gate_up_proj", "down_proj"}
BIASES = {"gate_up_proj_bias", "down_proj_bias"}
FLOATS = torch.float32, torch.float16, torch.bfloat16
ACTIVATIONS = {"SiLU": SILU, "SiLUActivation": SILU, "GELUTanh": GELU_TANH}
"""What the op knows of transformers' activations, by their classes."""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """A mixture, x [B, N, H] -> [B, N, H]: the router's logits, its choice, and the experts, all by the backend.

    Of experts that several processes hold (`group`), each computes its channels, and the answers are added up once. A
    shared expert that all have whole is the first process's to add.
    """

    ops: Ops
    logits: Linear
    route: Callable[[Tensor], tuple[Tensor, Tensor]]
    experts: Callable[..., Tensor]
    shared: Product | None
    opening: Linear | None
    group: dist.ProcessGroup | None
    depths: tuple[int, ...] = ()
    """What the products of dense experts add up in this process: the hidden size and the expert size."""

    def __call__(self, x: Tensor) -> Summed:
        flat = x.flatten(0, 1)
        chosen, shares = self.route(self.logits(flat))
        beside = None if self.shared is None else joined(self.shared(flat))
        opened = None if self.opening is None else self.opening(flat)
        mixed = self.experts(flat, chosen, shares, shared=beside, shared_gate=opened).view_as(x)
        return mixed if self.group is None else DeferredSum(mixed, self.group, self.ops.all_reduce)


def mixture_of(row: Mixture, mlp: Any, ops: Ops) -> RoutedExperts:
    """A mixture that `is_mixture`."""
    router, held = getattr(mlp, row.router), mlp.experts
    stored = isinstance(read(held), tuple)
    compute = ops.stored_experts if stored else ops.experts
    assert compute is not None
    routing, kind, weight = _routing(row, router), _expert(row, held), router.weight
    bias, correction = own_parameters(router).get("bias"), getattr(router, row.correction) if row.correction else None
    weights, group = (lambda: _stored(held), None) if stored else _dense(row, held)
    own = own_parameters(held)
    biases = {"gate_up_bias": own.get("gate_up_proj_bias"), "down_bias": own.get("down_proj_bias")}
    shared = _shared(getattr(mlp, row.shared), group, ops) if row.shared else None
    opening = product(ops, (getattr(mlp, row.shared_gate),)) if row.shared_gate and shared is not None else None
    multiply = ops.linear if ops.exact or not row.wide else linear

    def logits(flat: Tensor) -> Tensor:
        return multiply(flat.float(), weight.float(), bias) if row.wide else multiply(flat, weight, bias)

    def run(flat: Tensor, *chosen: Tensor, **beside: Tensor | None) -> Tensor:
        return compute(flat, *weights(), *chosen, kind, **biases, **beside)

    depths = () if stored else tuple(each.shape[2] for each in weights())
    return RoutedExperts(
        ops, logits, lambda found: ops.route(found, routing, correction), run, shared, opening, group, depths
    )


def _weights(held: Any) -> tuple[Tensor, Tensor, dist.ProcessGroup | None]:
    """The weights that experts have here, and the processes that have the rest of them."""
    return share_of_experts(held) or (held.gate_up_proj, held.down_proj, None)


def _dense(row: Mixture, held: Any) -> tuple[Callable[[], tuple[Tensor, Tensor]], dist.ProcessGroup | None]:
    """`_weights` as [E, out, in]."""
    gate_up, down, group = _weights(held)
    weights = (gate_up.transpose(1, 2), down.transpose(1, 2)) if row.transposed else (gate_up, down)
    return lambda: weights, group


def _stored(held: Any) -> StoredMixture:
    """The weights of experts as stored, read of the module as it is at the time."""
    found = read(held)
    if not isinstance(found, tuple):
        raise RuntimeError(f"experts were changed while they were read as stored: {found}")
    return found


def _shared(side: Any, group: dist.ProcessGroup | None, ops: Ops) -> Product | None:
    """A shared expert's answer, or this process's part of it; None where it is another's to give."""
    inner, last = weights_of((side.gate_proj, side.up_proj)), weights_of((side.down_proj,), behind=True)
    assert inner is not None and last is not None
    if group is not None and group.rank() and is_plain(side.down_proj):
        return None
    return gated(ops, inner[0], inner[1], product(ops, last))


def _routing(row: Mixture, router: Any) -> Routing:
    return Routing(
        choices=router.top_k,
        sigmoid=row.sigmoid,
        normalised=bool(getattr(router, row.normalised_if)) if row.normalised_if else row.normalised,
        scale=float(getattr(router, row.scale)) if row.scale else 1.0,
        groups=getattr(router, row.groups) if row.groups else 1,
        kept=getattr(router, row.kept) if row.kept else 1,
        rounded=row.rounded,
    )


def experts_of(held: Any, ops: Ops) -> Callable[..., Tensor]:
    """Experts without their router: x [T, H], chosen [T, K], shares [T, K] -> [T, H]; plain ones by the backend."""
    if ops.experts is None or not are_plain(held):
        return held
    compute, kind, (gate_up, down, group) = ops.experts, _expert(Mixture(), held), _weights(held)
    if group is None:
        return lambda x, chosen, shares: compute(x, gate_up, down, chosen, shares, kind)
    return lambda x, chosen, shares: ops.all_reduce(compute(x, gate_up, down, chosen, shares, kind), group)


def _expert(row: Mixture, held: Any) -> Expert:
    return Expert(
        interleaved=row.interleaved,
        gate=Activation(float(getattr(held, row.alpha))) if row.alpha else ACTIVATIONS[type(held.act_fn).__name__],
        offset=row.offset,
        limit=float(getattr(held, row.limit)) if row.limit else None,
        scales_input=row.scales_input,
    )


def are_plain(held: Any, *, act: bool = True) -> bool:
    """True where experts are plain weights of one dtype, or this process's part, with an activation that the op has
    (or, without `act`, any), and nobody else having a say."""
    weights = dict(held.named_parameters())
    if weights.keys() not in (WEIGHTS, WEIGHTS | BIASES) or not is_own(held) or (act and gate_of(held) is None):
        return False  # quantised ones bring scales
    plain = all(type(weight) is nn.Parameter for weight in weights.values()) or share_of_experts(held) is not None
    return plain and len({weight.dtype for weight in weights.values()}) == 1 and weights["gate_up_proj"].dtype in FLOATS


def is_mixture(row: Mixture, mlp: Any, *, stored: bool = False) -> bool:
    """True where a feed-forward is the mixture of a row, of plain weights, this process's part of them, or weights that
    are read as `stored`, with nobody else having a say."""
    names = {name for name, _ in mlp.named_children()}
    if names != {"experts", row.router, *filter(None, (row.shared, row.shared_gate))}:
        return False
    if not is_own(mlp, _are_stored if stored else is_linear):
        return False
    router = dict(getattr(mlp, row.router).named_parameters())
    fit = _are_stored(mlp.experts) if stored else are_plain(mlp.experts, act=not row.alpha)
    if not {"weight"} <= router.keys() <= {"weight", "bias"} or not fit:
        return False
    # transformers 5.24 keeps wide routers in fp32
    own = mlp.experts.gate_up_proj_bias if stored else mlp.experts.gate_up_proj
    dtypes = {own.dtype, *((torch.float32,) if row.wide else ())}
    if any(type(weight) is not nn.Parameter or weight.dtype not in dtypes for weight in router.values()):
        return False
    side, opening = (getattr(mlp, name) if name else None for name in (row.shared, row.shared_gate))
    cut = share_of_experts(mlp.experts) is not None
    adds = side is None or (gate_of(side, row.shared_act) == SILU and _is_addend(side, cut))
    return adds and not (cut and row.transposed) and (opening is None or is_plain(opening))


def _are_stored(module: Any) -> bool:
    return isinstance(read(module), tuple)


def _is_addend(side: Any, cut: bool) -> bool:
    """True where a shared expert is plain, or cut beside cut experts, so that its parts add up with theirs."""
    inner, last = (side.gate_proj, side.up_proj), side.down_proj
    if all(map(is_plain, (*inner, last))):
        return True
    parts = weights_of(inner), weights_of((last,), behind=True)
    return cut and None not in parts and last.bias is None and not any(map(is_plain, (*inner, last)))


def waits_for_host(parts: Adapter, holder: Any, model: Any, ops: Ops) -> bool:
    """True where a feed-forward, or a layer with experts beside one, runs the experts' own module, which reads its
    routing back: no graph can hold that. Transformers' `grouped_mm` stays on the device in bf16 alone, its `batched_mm`
    always, its `eager` never; kernels of others are taken to read it."""
    if not hasattr(holder, "experts"):
        return False
    beside = bool(parts.experts) and are_plain(holder.experts)
    if ops.experts is not None and (beside if parts.mixture is None else is_mixture(parts.mixture, holder)):
        return False
    if ops.stored_experts is not None and parts.mixture is not None and is_mixture(parts.mixture, holder, stored=True):
        return False
    weight = own_parameters(holder.experts).get("gate_up_proj")
    if weight is None or not weight.is_floating_point() or parallel_style(holder.experts) is not None:
        return True
    way = experts_name(model.config)
    return way != "batched_mm" and not (way == "grouped_mm" and weight.dtype == torch.bfloat16)


def gate_of(module: Any, name: str = "act_fn") -> Activation | None:
    """Activation of a feed-forward's gate by this name, None where the kernels do not have it."""
    return ACTIVATIONS.get(type(getattr(module, name, None)).__name__)


def is_linear(module: nn.Module) -> bool:
    """True of torch's own linear layer."""
    return type(module) is nn.Linear


def is_own(module: nn.Module, known: Callable[[nn.Module], bool] = is_linear) -> bool:
    """True where only transformers has a say in a feed-forward; parts that are `known` are not asked."""
    parts = (each for each in module.modules() if not known(each))
    return not any(is_foreign(each) for each in parts if parallel_style(each) is not ParallelStyle.EXPERTS)


def projections(parts: Adapter, attn: Any) -> list[Any]:
    """The linear layers that make queries, keys and values: one, or fewer for an attention without own ones."""
    names = (parts.qkv,) if parts.qkv else ("q_proj", "k_proj", "v_proj")
    return [each for name in names if (each := getattr(attn, name, None)) is not None]


def _mixer(parts: Adapter, layer: Any) -> tuple[list[Any], Any]:
    """Linear layers that read the input of a layer's attention or Gated DeltaNet, and the one that gives its output."""
    attn = getattr(layer, parts.attention, None)
    if attn is not None:
        return projections(parts, attn), getattr(attn, parts.out)
    row, net = parts.recurrent_row or parts, getattr(layer, parts.recurrent)
    return [getattr(net, name) for name in row.recurrent_inputs], getattr(net, row.recurrent_out)


def product_slots(model: Any) -> list[Any]:
    """Modules of a decoder whose products `product_of` makes: projections, dense feed-forwards, experts that are read
    as stored, and the LM head; of LoRA layers those inside."""
    parts = adapter_for(model)
    if parts is None:
        return []
    slots: list[Any] = [lm_head_of(model, parts)]
    for layer in getattr(decoder_of(model), parts.layers):
        slots += products_of(parts, layer, holds_stored)
    return list(map(base_of, slots))


def products_of(parts: Adapter, layer: Any, dense: Callable[[Any], bool]) -> list[Any]:
    """`product_slots` of one layer; of dense feed-forwards those that are `dense`."""
    inputs, out = _mixer(parts, layer)
    slots, mlp = [*inputs, out], getattr(layer, parts.mlp)
    if parts.gated_mlp and hasattr(mlp, "gate_proj") and dense(mlp):
        slots += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if hasattr(mlp, parts.gate_up) and holds_stored(mlp, (parts.gate_up, "down_proj")):
        slots += [getattr(mlp, parts.gate_up), mlp.down_proj]
    if parts.layer_scale and hasattr(layer, parts.layer_input):
        slots += [getattr(layer, parts.layer_input), getattr(layer, parts.layer_input_out)]
    if parts.mixture is not None and is_mixture(parts.mixture, mlp, stored=True):
        slots.append(mlp.experts)
    return slots


def holds_stored(mlp: Any, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")) -> bool:
    """True of a dense feed-forward with a quantised layer that is read as stored, and nothing of others' beside."""
    layers = [base_of(getattr(mlp, name)) for name in names]

    def known(module: nn.Module) -> bool:
        return is_linear(module) or format_of(module) is not None or base_of(module) is not module

    return is_own(mlp, known) and any(not isinstance(read(layer), str) for layer in layers)


def reads_packed(model: Any) -> bool:
    """True where passes over an adapted model read all weights as stored that its library would unpack."""
    slots = set(map(id, product_slots(model)))
    packed = [module for module in model.modules() if (row := format_of(module)) is not None and row.unpacked]
    return all(id(module) in slots and not isinstance(read(module), str) for module in packed)


def keeps_activations(model: Any) -> bool:
    """True of quantised weights that are read as stored, where no layer's own forward rounds activations."""
    held = [(row, module) for module in model.modules() if (row := format_of(module)) is not None]
    stored = any(not isinstance(read(module), str) for _, module in held)
    return stored and not any(row.rounds(each) for row, each in held)


def told_formats(model: Any, stored: bool) -> tuple[dict[str, int], dict[str, int]]:
    """For `report`: formats that are multiplied as stored -> layers, and reasons for own forwards -> layers."""
    slots, together = set(map(id, product_slots(model))), stored and reads_packed(model)
    held: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for module in model.modules():
        row = format_of(module)
        if row is None:
            continue
        found = read(module)
        if isinstance(found, str):
            kept[f"{row.name}: {found}"] += 1
        elif not stored:
            why = "it rounds activations too, and " if row.rounds(module) else ""
            kept[f"{row.name}: {why}patch(model, stored=True) was not asked for"] += 1
        elif id(module) not in slots:
            kept[f"{row.name}: it is a part of a module that runs by its own forward"] += 1
        elif row.unpacked and not together:
            kept[f"{row.name}: other layers have to be unpacked, and all are at once"] += 1
        else:
            held[row.name] += 1
    return dict(held), dict(kept)


def pack_model(model: Any, *, experts: bool = True) -> list[Tensor]:
    """Pack query, key and value, and gate and up weights of plain layers, or this process's part, and turn those of
    `experts` that are [in, out] -> the tensors that were moved."""
    parts = adapter_for(model)
    moved: list[Tensor] = []
    if parts is None:
        return moved
    for layer in getattr(decoder_of(model), parts.layers):
        moved += pack_layer(parts, layer, experts=experts)
    return moved


def pack_layer(parts: Adapter, layer: Any, *, experts: bool = True) -> list[Tensor]:
    """`pack_model` of one layer."""
    moved: list[Tensor] = []
    groups, mlp = [_mixer(parts, layer)[0]], getattr(layer, parts.mlp)
    if parts.gated_mlp and hasattr(mlp, "gate_proj"):
        groups.append([mlp.gate_proj, mlp.up_proj])
    if parts.mixture is not None and parts.mixture.shared and hasattr(mlp, "experts"):
        shared = getattr(mlp, parts.mixture.shared)
        groups.append([shared.gate_proj, shared.up_proj])
    if experts and parts.mixture is not None and parts.mixture.transposed and is_mixture(parts.mixture, mlp):
        moved += [*turn(mlp.experts.gate_up_proj), *turn(mlp.experts.down_proj)]
    for group in groups:
        weights = weights_of(group)
        if weights is not None:
            moved += pack(weights)
    return moved


def reads_outliers(module: nn.Module) -> bool:
    """True for bitsandbytes' LLM.int8 with a threshold, whose forward asks on the host which columns lie above
    (Dettmers et al., arXiv 2208.07339): no graph can hold that."""
    named = any(kind.__name__ == "Linear8bitLt" for kind in type(module).__mro__)
    state: Any = module.state if named else None
    return named and state.threshold > 0
