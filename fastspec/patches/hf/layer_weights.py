"""Weights of a decoder's layers: which are multiplied by the backend, read as stored, or packed side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fastspec.generation.decoder_layer import pack, turn
from fastspec.patches.hf.experts import is_linear, is_mixture, is_own
from fastspec.patches.hf.families import Adapter
from fastspec.patches.hf.modes import adapter_for, decoder_of, lm_head_of
from fastspec.patches.hf.parallel import weights_of
from fastspec.patches.hf.quantised import base_of, format_of, read


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
    if parts.mixture is not None and is_mixture(parts.mixture, mlp, stored=True):
        slots.append(mlp.experts)
    return slots


def holds_stored(mlp: Any) -> bool:
    """True of a dense feed-forward with a quantised layer that is read as stored, and nothing of others' beside."""
    layers = [base_of(layer) for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]

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
