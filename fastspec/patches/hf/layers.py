"""A decoder's layers as `LayerParts`: plain ones through the backend, all others through their own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastspec.errors import Unsupported
from fastspec.generation.decoder_layer import (
    FULL_LAYOUT,
    Attend,
    FullAttention,
    Gated,
    GatedDelta,
    LayerFamily,
    LayerParts,
    LayoutKey,
    Linear,
    Norm,
    Product,
    RmsNorm,
    Rotary,
    StoredLinears,
    Summed,
    for_heads,
    gated,
    is_plain,
    product,
)
from fastspec.generation.layer_state import DeltaState, FullAttentionState, LayerState
from fastspec.generation.ops import Ops
from fastspec.kernels.linear.reference import joined
from fastspec.kernels.recurrent.reference import DecayRates
from fastspec.patches.hf.compat import device_of, dtype_of, local_part
from fastspec.patches.hf.config_fields import attention_name
from fastspec.patches.hf.families import Adapter, PositionFactor
from fastspec.patches.hf.layer_weights import (
    experts_of,
    gate_of,
    holds_stored,
    is_mixture,
    is_own,
    mixture_of,
    pack_layer,
    products_of,
    projections,
)
from fastspec.patches.hf.modes import decoder_of, is_foreign, is_wrapped, lm_head_of
from fastspec.patches.hf.parallel import (
    ParallelStyle,
    gives_own_outputs,
    product_of_shares,
    share_of,
    stored_share,
    weights_of,
)
from fastspec.patches.hf.quantised import AdaptedLinear, base_of, stored_halves, stored_layers
from fastspec.patches.hf.replaced import has_replaced_methods

NO_ROTATION = "none"
"""The kind of the layers that rotate nothing."""


def rotary_tables(model: Any, parts: Adapter, kinds: Iterable[str | None], count: int) -> dict[str | None, Rotary]:
    """The tables of the first `count` positions, in the model's dtype, by the kind of layer; None: of all layers."""
    row = parts.position_factor
    factor = None if row is None else position_factor(model, row, count)
    scaled = {kind for kind in kinds if row is not None and (kind == NO_ROTATION or not row.unrotated)}
    return {kind: Rotary(*_angles(model, parts, kind, count), factor if kind in scaled else None) for kind in kinds}


def position_factor(model: Any, row: PositionFactor, count: int) -> Tensor | None:
    """Factor of the queries of the first `count` positions, [count] fp32, or None where the model leaves it out."""
    config = model.config.get_text_config()
    if row.used_if and not getattr(config, row.used_if):
        return None
    settings = {**config.to_dict(), **config.rope_parameters}
    places = torch.arange(count, device=device_of(model)) + row.first
    factor = 1 + settings[row.b] * torch.log1p(torch.floor(places / settings[row.period]))
    return factor.to(dtype_of(model)).float() if row.rounded else factor


def _angles(model: Any, parts: Adapter, kind: str | None, count: int) -> tuple[Tensor, Tensor]:
    """cos and sin [count, R / 2]; those of NO_ROTATION leave everything as it is."""
    device, rotary = device_of(model), getattr(decoder_of(model), parts.rotary)
    if rotary is None:  # nothing is rotated: the fewest channels that a table can have stay as they are
        ones = torch.ones(count, 1, dtype=dtype_of(model), device=device)
        return ones, torch.zeros_like(ones)
    places = torch.arange(count, device=device)[None]
    sections = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if hasattr(rotary, "mrope_section") or "mrope_section" in sections:
        # in time, height and width, of text the same; since transformers 5.20 the forward takes one for all three too
        places = places.expand(3, 1, -1)
    given = torch.zeros(1, dtype=dtype_of(model), device=device), places
    found = rotary(*given) if kind in (None, NO_ROTATION) else rotary(*given, kind)
    cos, sin = (found.real, found.imag) if isinstance(found, Tensor) else found  # one complex number an angle
    cos, sin = (table[0] if table.dim() == 4 else table for table in (cos, sin))
    if kind == NO_ROTATION:
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    if parts.angles_twice:
        return cos[0, :, ::2].contiguous(), sin[0, :, ::2].contiguous()
    half = cos.shape[-1] if parts.angles_once or isinstance(found, Tensor) else cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


KEYED = torch.float32, torch.float16, torch.bfloat16
"""Logits that a key of a likeliest token holds whole."""


def layer_parts(
    parts: Adapter,
    layer: Any,
    ops: Ops,
    state: LayerState,
    index: int,
    *,
    layout: LayoutKey | None = None,
    rotary: str | None = None,
) -> LayerParts:
    """Decoder layer `index` of `state`; a quantised, hooked or replaced module in it keeps its own forward."""
    parts = parts if isinstance(state, FullAttentionState) else parts.recurrent_row or parts

    factor = getattr(layer, parts.residual_scale) if parts.residual_scale else None

    def norm(name: str) -> Norm:
        return norm_of(getattr(layer, name), ops, parts) if name else plain_sum

    def added(name: str) -> Norm | None:
        """Norm or factor of what a part of the layer adds."""
        if factor is not None:
            return times(factor, norm(name))
        return norm(name) if name else None

    return LayerParts(
        input_norm=norm(parts.input_norm),
        mixer=_attention(parts, getattr(layer, parts.attention), ops, state, index, layout, rotary)
        if isinstance(state, FullAttentionState)
        else _gated_delta(parts, getattr(layer, parts.recurrent), ops, state, index),
        mlp_norm=None if parts.parallel else norm(parts.mlp_norm),
        mlp=mlp_of(parts, getattr(layer, parts.mlp), ops),
        mixer_out_norm=added(parts.mixer_out_norm),
        mlp_out_norm=added(parts.mlp_out_norm),
        beside=_experts_beside(parts, layer, ops) if parts.experts and hasattr(layer, parts.experts) else None,
        after=_after(parts, layer, ops) if parts.layer_scale else None,
    )


def _experts_beside(parts: Adapter, layer: Any, ops: Ops) -> Callable[[Tensor, Tensor], Tensor]:
    """Experts that read what the dense feed-forward's norm reads. Both results are normed before they are added up."""
    router, experts = getattr(layer, parts.router), experts_of(getattr(layer, parts.experts), ops)
    norm, out_norm, dense_norm = (
        getattr(layer, name) for name in (parts.experts_norm, parts.experts_out_norm, parts.dense_out_norm)
    )

    def beside(dense: Tensor, total: Tensor) -> Tensor:
        flat = total.flatten(0, -2)
        _, weights, chosen = router(flat)
        return dense_norm(dense) + out_norm(experts(norm(flat), chosen, weights).view_as(total))

    return beside


def _after(parts: Adapter, layer: Any, ops: Ops) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The layer's own input of every token through a gate, and the scale of all."""
    gate, scale = getattr(layer, parts.layer_input, None), getattr(layer, parts.layer_scale)
    if gate is None:
        return lambda hidden, _: hidden * scale
    opened, out = product_of((gate,), ops), product_of((getattr(layer, parts.layer_input_out),), ops)
    norm, act = norm_of(getattr(layer, parts.layer_input_norm), ops, parts), layer.act_fn

    def after(hidden: Tensor, own: Tensor | None) -> Tensor:
        assert own is not None
        return (hidden + norm(out(act(opened(hidden)) * own))[0]) * scale

    return after


def _attention(
    parts: Adapter,
    attn: Any,
    ops: Ops,
    state: FullAttentionState,
    index: int,
    layout: LayoutKey | None,
    rotary: str | None,
) -> FullAttention:
    inputs = projections(parts, attn)
    owns, ties = bool(parts.qkv) or len(inputs) > 1, len(inputs) == 2
    _, _, heads, _, size = state.k.shape
    queries = heads * size * (2 if parts.gated_attention else 1) * (1 if layout is None else layout.group)
    wanted = queries + (heads * (size if ties else size + state.v.shape[-1]) if owns else 0)
    _refuse_other_sizes(attn, inputs, size, None if layout is None else wanted)
    q_norm, k_norm, eps = _head_norms(parts, attn, state, owns)
    caps = bool(parts.cap) and attention_name(attn.config) != "sdpa"  # sdpa leaves it out
    return FullAttention(
        ops,
        state,
        index,
        scale=attn.scaling,
        eps=eps,
        qkv=normed_together(attn, ops) if parts.wide_qk_norm else for_heads(product_of(inputs, ops)),
        out=product_of((getattr(attn, parts.out),), ops, parts=True),
        q_norm=q_norm,
        k_norm=k_norm,
        interleaved=parts.interleaved,
        norms_values=parts.norms_values,
        ties_values=ties,
        owns=owns,
        offset=parts.offset,
        layout=layout or FULL_LAYOUT,
        rotary=rotary,
        gated=parts.gated_attention,
        sinks=local_part(getattr(attn, parts.sinks)) if parts.sinks else None,
        cap=getattr(attn, parts.cap) if caps else None,
    )


def _refuse_other_sizes(attn: Any, inputs: Sequence[nn.Module], size: int, width: int | None) -> None:
    """Raise Unsupported for an attention of other heads or channels than its configuration, as after pruning."""
    plain = [each for each in inputs if isinstance(each, nn.Linear) and is_plain(each)]
    found = sum(len(local_part(each.weight)) for each in plain) if len(plain) == len(inputs) else width
    if attn.head_dim != size or (width is not None and found != width):
        raise Unsupported(
            f"{type(attn).__name__} gives {found} channels in heads of {attn.head_dim}, and its configuration says "
            f"{width} in heads of {size} (num_attention_heads, num_key_value_heads, head_dim): let it say what all "
            "layers have, or leave out assistant="
        )


def _head_norms(
    parts: Adapter, attn: Any, state: FullAttentionState, owns: bool
) -> tuple[Tensor | None, Tensor | None, float]:
    """Weights of the norms of each head's queries and keys, and what these add to a mean square."""
    if parts.qk_norm and (not parts.normed_if or getattr(attn, parts.normed_if)):
        norms = attn.q_norm, attn.k_norm if owns else attn.q_norm
        eps, other = (getattr(each, parts.eps) for each in norms)
        if eps != other:
            raise Unsupported(
                f"the norms of queries and keys of {type(attn).__name__} add {eps} and {other} ({parts.eps}), and one "
                "kernel norms both: give them one number"
            )
        return norms[0].weight, norms[1].weight, eps
    norm = getattr(attn, parts.heads_norm, None) if parts.heads_norm else None
    if norm is None:
        return None, None, 0.0
    weight = state.k.new_ones(attn.head_dim)
    return weight, weight, getattr(norm, parts.eps)


def _gated_delta(parts: Adapter, net: Any, ops: Ops, state: LayerState, index: int) -> GatedDelta:
    assert isinstance(state, DeltaState)
    channels, _, width = net.conv1d.weight.shape
    found = net.num_v_heads, net.head_k_dim, net.head_v_dim, width, channels
    kept = (*state.s.shape[2:], *state.held.shape[2:])
    if found != kept:
        raise Unsupported(
            f"{type(net).__name__} has value heads, key and value sizes, and a convolution's width and channels of "
            f"{found}, and its configuration says {kept} (linear_*): let it say what all layers have, or leave out "
            "assistant="
        )
    project = product_of([getattr(net, name) for name in parts.recurrent_inputs], ops)
    order = _by_kind(net).to(net.A_log.device) if parts.grouped_inputs else None
    norm, most = getattr(net, parts.recurrent_norm), 2.0 if parts.doubles and getattr(net, parts.doubles) else 1.0
    return GatedDelta(
        ops,
        state,
        index,
        project=project if order is None else lambda x: project(x).index_select(-1, order),
        conv=net.conv1d.weight.squeeze(1),
        rates=DecayRates(net.A_log, net.dt_bias, most),
        norm=norm.weight,
        eps=norm.variance_epsilon,
        out=product_of((getattr(net, parts.recurrent_out),), ops, parts=True),
        activation=None if net.activation in ("silu", "swish") else ACT2FN[net.activation],
    )


def _by_kind(net: Any) -> Tensor:
    """Places of queries, keys, values, gates, b and a in products that hold them key head by key head."""
    per = net.num_v_heads // net.num_k_heads
    wide, narrow = (net.head_k_dim, net.head_k_dim, per * net.head_v_dim, per * net.head_v_dim), (per, per)
    first = torch.arange(net.num_k_heads * sum(wide), device="cpu").view(net.num_k_heads, -1).split(wide, 1)
    rest = torch.arange(net.num_k_heads * sum(narrow), device="cpu") + net.num_k_heads * sum(wide)
    second = rest.view(net.num_k_heads, -1).split(narrow, 1)
    return torch.cat([part.flatten() for part in (*first, *second)])


def rotary_kinds(parts: Adapter, layers: Sequence[Any], config: Any) -> list[str | None]:
    """Rotary tables that each layer takes, as `rotary_tables` names them."""
    kinds = config.layer_types[: len(layers)] if parts.rotary_by_kind else [None] * len(layers)
    attention = [getattr(layer, parts.attention, None) for layer in layers]
    turning = [
        attn is None
        or not parts.rotates
        or bool(getattr(attn, parts.rotates))
        or (parts.rotates_all != "" and getattr(attn, parts.rotates_all) is None)
        for attn in attention
    ]
    return [kind if turns else NO_ROTATION for kind, turns in zip(kinds, turning, strict=True)]


@overload
def product_of(modules: Sequence[Any], ops: Ops) -> Linear: ...
@overload
def product_of(modules: Sequence[Any], ops: Ops, *, parts: bool) -> Product: ...
def product_of(modules: Sequence[Any], ops: Ops, *, parts: bool = False) -> Product:
    """Linear layers over one input, outputs side by side; `parts` as in `product`. Of cut layers what each process puts
    out where the plan leaves that apart, else the whole."""
    if all(map(is_plain, modules)):
        return product(ops, modules, parts=parts)
    shares = [share for share in map(share_of, modules) if share is not None]
    if len(shares) == len(modules):
        return product_of_shares(shares, ops, parts=parts)
    if ops.stored_linears is not None:
        layers = stored_layers(modules)
        if layers is not None and gives_own_outputs(modules):
            return StoredLinears(ops, layers, parts=parts and len(layers) == 1)
        if layers is not None and len(layers) == 1:
            cut = stored_share(modules[0], layers[0].weight)
            assert cut is not None  # else it would not be read
            return cut.run(ops, parts=parts)
        base = base_of(modules[0])
        if len(modules) == 1 and stored_layers((base,)) is not None:
            return AdaptedLinear(modules[0], product_of((base,), ops))
    if len(modules) == 1:
        return modules[0]
    each = [product_of((module,), ops) for module in modules]
    return lambda x: torch.cat([run(x) for run in each], -1)


def normed_together(attn: Any, ops: Ops) -> Linear:
    """Queries, keys and values side by side, all heads' queries normed together, and so all keys."""
    query, key, value = (product_of((module,), ops) for module in (attn.q_proj, attn.k_proj, attn.v_proj))
    return lambda x: torch.cat((attn.q_norm(query(x)), attn.k_norm(key(x)), value(x)), -1)


def plain_sum(x: Summed, residual: Tensor | None = None, *, total: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The sum without a norm, of a family that norms what a layer's parts add and not what they read."""
    summed = joined(x) if residual is None else joined(x) + residual
    summed = summed if total is None else total.copy_(summed)
    return summed, summed


def times(factor: float, norm: Norm) -> Norm:
    """A norm of what a layer's part adds, or the sum alone, and a factor behind it."""

    def scaled(x: Summed) -> tuple[Tensor, Tensor]:
        out = norm(x)[0] * factor
        return out, out

    return scaled


def vocabulary_of(model: Any, parts: Adapter, ops: Ops, *, likeliest: bool = False) -> Linear:
    """The LM head, hidden states [..., H] -> logits [..., V], scaled or soft-capped as the family does; with
    `likeliest`, of a cut one, the likeliest token [..., 1] int64."""
    lm_head, config = lm_head_of(model, parts), model.config.get_text_config()
    scales = not is_wrapped(model) or model.config.model_type in parts.scaled_around
    names = parts.final_cap, parts.logit_scale if scales else "", parts.logit_divisor if scales else ""
    cap, factor, divisor = (getattr(config, name) if name else None for name in names)

    def told(logits: Tensor) -> Tensor:
        if divisor is not None:
            return logits / divisor
        if factor is not None:
            return logits * factor
        return logits if cap is None else cap * torch.tanh(logits / cap)

    share = share_of(lm_head) if likeliest else None
    if share is not None and share.style is ParallelStyle.COLUMN_JOINED and share.weight.dtype in KEYED:
        return share.likeliest(ops, told)
    product = product_of((lm_head,), ops)
    return lambda hidden: told(product(hidden))


def norm_of(module: Any, ops: Ops, parts: Adapter) -> Norm:
    """A norm of a family with the sum before it."""
    own = not is_foreign(module) and not has_replaced_methods(type(module))
    if own and hasattr(module, parts.eps) and type(module.weight) is nn.Parameter:
        return RmsNorm(ops, module, getattr(module, parts.eps), parts.offset)

    def norm(x: Tensor, residual: Tensor | None = None, *, total: Tensor | None = None) -> tuple[Tensor, Tensor]:
        summed = joined(x) if residual is None else joined(x) + residual
        return module(summed), summed if total is None else total.copy_(summed)

    return norm


def mlp_of(parts: Adapter, mlp: Any, ops: Ops) -> Product:
    """The feed-forward: fused where plain and gated by SiLU or GELU, a mixture by the backend's op if it has one."""
    dense = parts.gated_mlp and hasattr(mlp, "gate_proj")
    own, kind = is_own(mlp), gate_of(mlp, parts.act)
    inner = weights_of((mlp.gate_proj, mlp.up_proj)) if dense and own else None
    if inner is not None and weights_of((mlp.down_proj,), behind=True) is not None:
        if kind is not None:
            return gated(ops, inner[0], inner[1], product_of((mlp.down_proj,), ops, parts=True), kind)
        return _gated_apart(parts, mlp, ops)
    if dense and ops.stored_linears is not None and holds_stored(mlp):
        stored = stored_layers((mlp.gate_proj, mlp.up_proj))
        if kind is None or stored is None or not gives_own_outputs((mlp.gate_proj, mlp.up_proj)):
            return _gated_apart(parts, mlp, ops)
        return Gated(StoredLinears(ops, stored, kind), product_of((mlp.down_proj,), ops, parts=True))
    whole = getattr(mlp, parts.gate_up, None)
    if whole is not None and own and kind is not None and all(map(is_plain, (whole, mlp.down_proj))):
        return Gated(product(ops, (whole,), kind=kind), product(ops, (mlp.down_proj,), parts=True))
    if whole is not None and ops.stored_linears is not None and holds_stored(mlp, (parts.gate_up, "down_proj")):
        halves = stored_halves(whole)
        if kind is None or halves is None:
            return _opened_whole(parts, mlp, ops)
        return Gated(StoredLinears(ops, halves, kind), product_of((mlp.down_proj,), ops, parts=True))
    for compute, is_stored in ((ops.experts, False), (ops.stored_experts, True)):
        if parts.mixture is not None and compute is not None and is_mixture(parts.mixture, mlp, stored=is_stored):
            return mixture_of(parts.mixture, mlp, ops)

    def run(x: Tensor) -> Tensor:
        mixed = mlp(x)
        return mixed[0].view_as(x) if isinstance(mixed, tuple) else mixed

    return run


def _gated_apart(parts: Adapter, mlp: Any, ops: Ops) -> Product:
    """A gated feed-forward in three products."""
    gate, up, down = (product_of((layer,), ops) for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    act = getattr(mlp, parts.act)
    return lambda x: down(act(gate(x)) * up(x))


def _opened_whole(parts: Adapter, mlp: Any, ops: Ops) -> Product:
    """A gated feed-forward in two products, the first of gates and of what they open."""
    both, down = (product_of((getattr(mlp, name),), ops) for name in (parts.gate_up, "down_proj"))
    act = getattr(mlp, parts.act)

    def run(x: Tensor) -> Tensor:
        gate, up = both(x).chunk(2, -1)
        return down(act(gate) * up)

    return run


@dataclass(frozen=True, slots=True, eq=False)
class ModelLayers(LayerFamily):
    """Layers and norms of a model's classes that are no part of the model, as its family reads them."""

    model: Any
    parts: Adapter

    def layer(self, module: Any, ops: Ops, state: FullAttentionState) -> LayerParts:
        return layer_parts(self.parts, module, ops, state, 0)

    def norm(self, module: Any, ops: Ops) -> Norm:
        return norm_of(module, ops, self.parts)

    def tables(self, count: int) -> tuple[Tensor, Tensor]:
        kind = "full_attention" if self.parts.rotary_by_kind else None
        found = rotary_tables(self.model, self.parts, (kind,), count)[kind]
        return found.cos, found.sin

    def products(self, module: Any) -> list[nn.Module]:
        """Projections, and the parts of a dense feed-forward."""
        return products_of(self.parts, module, is_own)

    def pack(self, module: Any) -> None:
        pack_layer(self.parts, module)

    def forward(self, module: Any, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """By the layer's own forward. Raises Unsupported for attention of another form than softmax over all keys."""
        ALL_ATTENTION_FUNCTIONS[CALLERS] = _attended
        getattr(module, self.parts.attention).config._attn_implementation = CALLERS  # a configuration of its own
        rotary = getattr(decoder_of(self.model), self.parts.rotary)
        out = module(
            hidden,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=rotary(hidden, positions),
            fastspec_attend=attend,
        )
        return out[0] if isinstance(out, tuple) else out


CALLERS = "fastspec_callers"
"""The caller's attention among transformers' own: a name that no configuration has by itself."""


def _attended(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, fastspec_attend: Attend, **more: Any
) -> tuple[Tensor, None]:
    scaling, size = more.get("scaling"), query.shape[-1]
    odd = [name for name in ("sliding_window", "s_aux", "softcap") if more.get(name) is not None]
    if scaling is not None and abs(scaling * size**0.5 - 1) > 1e-4:
        odd.append(f"scaling={scaling:g}")
    if odd or value.shape[-1] != size:
        told = ", ".join(odd) or f"values of {value.shape[-1]} channels beside keys of {size}"
        raise Unsupported(f"a layer like those of {type(module).__name__} cannot be trained: its attention has {told}")
    return fastspec_attend(0, *(x.transpose(1, 2) for x in (query, key, value))), None
