"""Modes that models run in: by their adapters, by their own forwards, or as encoder-decoders; and refusals."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from fastspec.errors import Unsupported
from fastspec.patches.hf.cache import cache_argument
from fastspec.patches.hf.compat import (
    device_of,
    dtype_of,
    has_global_hooks,
    hooks_of,
    is_autocast,
    is_capturing_hook,
    is_stateful,
    is_unpacking_hook,
    placing_hook,
    stack_of,
)
from fastspec.patches.hf.config_fields import RECURRENT, attention_name, varied_lengths
from fastspec.patches.hf.families import ADAPTERS, SEQ2SEQ, Adapter
from fastspec.patches.hf.limits import LAYER_KINDS
from fastspec.patches.hf.parallel import check_placement, check_shares, devices_of, is_spread
from fastspec.patches.hf.replaced import (
    calls_original,
    foreign_attention,
    home_of,
    is_strangers,
    replaced_functions,
    where_defined,
)


def model_within(holder: Any) -> str:
    """Advice to pass a model inside an object instead of it, such as a pipeline or an engine; "" for none."""
    if isinstance(holder, PreTrainedModel):
        return ""
    parts = getattr(holder, "__dict__", {}) | (dict(holder.named_children()) if isinstance(holder, nn.Module) else {})
    names = sorted(f".{name}" for name, part in parts.items() if isinstance(part, PreTrainedModel) and name[0] != "_")
    return f"pass its {' or '.join(names)}" if names else ""


def not_patched(model: Any, then: str) -> str:
    """Message about an object that is not patched; `then` is what comes before the call."""
    return f"this {type(model).__name__} is not patched: {model_within(model) or then}"


def check_supported(model: Any) -> None:
    """Raise `Unsupported`, naming the reason, for a model that fastspec cannot decode with."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        what = model_within(model) or "load one with AutoModelForCausalLM.from_pretrained(...)"
        raise Unsupported(f"patch takes a transformers model, not {name}: {what}")
    if not callable(getattr(model, "generate", None)) or not model.can_generate():
        raise Unsupported(
            f"{name} has no generate method: load a causal language model, with "
            "AutoModelForCausalLM.from_pretrained(...)"
        )
    if not isinstance(model, GenerationMixin):
        raise Unsupported(
            f"{name} generates by a loop of its own; fastspec decodes models that generate token by token, left to "
            "right"
        )
    config: Any = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        check_decoder(model)
    adapter = ADAPTERS.get(config.model_type)
    known = {"full_attention", *LAYER_KINDS, *((RECURRENT,) if adapter is not None and adapter.recurrent else ())}
    if is_stateful(model) and RECURRENT not in known:
        raise Unsupported(f"{name} keeps a recurrent state, which cannot be taken back when a draft is rejected")
    kinds = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()} - known)
    if kinds:
        raise Unsupported(
            f"{name} has layers of type {', '.join(kinds)}; fastspec needs a full-attention KV cache in every layer"
        )
    varied = varied_lengths(config)
    if varied:
        raise Unsupported(
            f"{name} has layers that differ in {', '.join(varied)}; fastspec takes one for all layers of a type"
        )
    if not model.config.is_encoder_decoder and adapter_for(model) is None:
        _check_generic(model, config)
    check_shares(model)
    check_placement(model)


def _check_generic(model: PreTrainedModel, config: Any) -> None:
    """Names that the generic mode needs besides: positions and a mask that say where a draft node stands."""
    name = type(model).__name__
    forward = type(model).forward
    missing = [p for p in ("position_ids", cache_argument(forward)) if p not in inspect.signature(forward).parameters]
    if missing:
        told = "" if home_of(forward).startswith("transformers.") else ". Name them in its signature"
        what = f"{name}.forward takes no {' and no '.join(missing)}"
        raise Unsupported(f"{what}: fastspec cannot tell it where a draft node stands{told}")
    if not hasattr(config, "num_hidden_layers"):
        raise Unsupported(
            f"{name} is more than one stack of layers (its configuration has no num_hidden_layers); fastspec runs one"
        )
    if getattr(config, "alibi", False):
        raise Unsupported(
            f"{name} derives positions from the cache (alibi=True), where the nodes of a draft tree lie out of order"
        )
    check_masks(model)


def check_masks(model: Any) -> None:
    """Raise `Unsupported` where attention takes no 4-D mask, as trees need; someone else's is tried instead."""
    if not foreign_attention(model):
        _check_masks(type(model).__name__, model.config)


def _check_masks(name: str, config: Any) -> None:
    kernel = attention_name(config)
    if kernel not in (None, "eager", "sdpa"):
        raise Unsupported(
            f"{name} needs 4-D masks in generic mode, and {kernel} takes none: load it with attn_implementation='sdpa'"
        )


def refuse_foreign_masks(model: Any) -> None:
    """Raise Unsupported where a function of someone else's makes the masks of a model in generic mode."""
    for label, function in replaced_functions(model, list(model.modules())):
        if "mask" in label.rpartition(".")[2] or label.startswith("the mask"):
            raise Unsupported(
                f"{label} is someone else's ({where_defined(function)}), and a draft tree brings a mask of its own, "
                "which passes it by: put transformers' own back"
            )


def refuse_lost_cache(model: Any) -> None:
    """Raise Unsupported where a decoder's forward drops its cache in train mode under gradient checkpointing."""
    decoder = model.base_model
    forward = inspect.unwrap(type(decoder).forward)
    checkpoints = model.training and getattr(decoder, "gradient_checkpointing", False)
    if checkpoints and "gradient_checkpointing" in forward.__code__.co_names:
        raise Unsupported(
            f"{type(model).__name__} in train mode leaves its cache out under gradient checkpointing: call "
            "model.eval(), or turn checkpointing off, for the calls of generate"
        )


def check_decoder(model: Any) -> None:
    """Raise `Unsupported` for an encoder-decoder model of unknown parts, or whose loop someone else changed."""
    name, kind = type(model).__name__, model.config.model_type
    if kind not in SEQ2SEQ:
        raise Unsupported(
            f"{name} is an encoder-decoder model of type {kind}; fastspec knows the decoders of {', '.join(SEQ2SEQ)}"
        )
    parts, decoder = SEQ2SEQ[kind], model.get_decoder()
    built = all(hasattr(decoder, part) for part in (*parts.needed, "embed_tokens")) and hasattr(model, "lm_head")
    if built and not parts.relative and not parts.counted:
        built = "position_ids" in inspect.signature(decoder.embed_positions.forward).parameters
    if not built:
        raise Unsupported(
            f"{name} has a decoder that is not built as transformers' {kind}: fastspec cannot place draft nodes in it"
        )
    loops = model, model.base_model, decoder
    for module in loops:
        if is_foreign(module):
            raise Unsupported(
                f"{type(module).__name__} of {name} has a hook or a forward of someone else's, which fastspec's own "
                "loop over the decoder's layers would pass by: remove it"
            )
    named = {each for loop in loops for each in inspect.unwrap(type(loop).forward).__code__.co_names}
    for label, function in replaced_functions(model, list(loops)):
        if label.startswith("the mask") or (label.startswith("transformers.") and label.rpartition(".")[2] in named):
            raise Unsupported(
                f"{label} is someone else's ({where_defined(function)}), which fastspec's own loop over the layers of "
                f"{name}'s decoder would pass by: put it back"
            )
    _check_masks(name, model.config)


@dataclass(frozen=True, slots=True)
class Mode:
    """Mode that a model runs in now, by an adapter or its own forward, and the dtype of its layers; `why` is what keeps
    one of a known family from its adapter."""

    adapter: Adapter | None
    why: str | None
    dtype: torch.dtype


def mode_for(model: Any) -> Mode:
    """Mode that a model runs in now: its own forward without a row, with layers on several devices, someone else's
    forward or functions, or under autocast, which chooses dtypes op by op in modules."""
    adapter = _row_of(model)
    why = None if adapter is None else _why_not(model, adapter)
    return Mode(adapter if why is None else None, why, dtype_of(model))


def adapter_for(model: Any) -> Adapter | None:
    """The model's row, or None for the generic mode."""
    return mode_for(model).adapter


def _row_of(model: Any) -> Adapter | None:
    """The row of a model's decoder, which may have a vision tower and the like beside it."""
    if getattr(model.config, "is_encoder_decoder", False):
        return None
    adapter = ADAPTERS.get(getattr(model.config.get_text_config(), "model_type", ""))
    if adapter is None or lm_head_of(model, adapter) is None:
        return None
    decoder, names = decoder_of(model), (adapter.layers, adapter.norm, adapter.embed)
    return adapter if all(hasattr(decoder, name) for name in names) else None


def lm_head_of(model: Any, adapter: Adapter) -> Any:
    """The LM head of a model or of the one inside it, or None where it is elsewhere."""
    owner = model if hasattr(model, adapter.lm_head) else getattr(model, adapter.inside, None)
    return getattr(owner, adapter.lm_head, None)


def _differs_by(model: Any, adapter: Adapter) -> list[str]:
    """Settings under which a model is not built as its row says, of its configuration, a layer or attention."""
    if not adapter.unless:
        return []
    layers = list(getattr(decoder_of(model), adapter.layers))
    parts = [*layers, *(getattr(layer, adapter.attention, None) for layer in layers)]
    held = [model.config.get_text_config(), *(part for part in parts if part is not None)]
    return [name for name in adapter.unless if any(getattr(each, name, None) not in (None, False) for each in held)]


def decoder_of(model: Any) -> Any:
    """The stack of layers under a model's LM head."""
    return stack_of(model.get_decoder())


def is_wrapped(model: Any) -> bool:
    """True where a model has more in front of its decoder than tokens, images for one."""
    return decoder_of(model) is not stack_of(model.base_model)


def may_see_ahead(model: Any) -> bool:
    """True where the tokens of a prompt may see those behind them, by a setting of the decoder's."""
    return bool(getattr(model.config.get_text_config(), "use_bidirectional_attention", None))


def _looped_over(model: Any, adapter: Adapter) -> list[nn.Module]:
    """The modules whose forward an adapter's loop takes the place of."""
    decoder = decoder_of(model)
    layers = list(getattr(decoder, adapter.layers))
    attention = [getattr(layer, adapter.attention) for layer in layers if hasattr(layer, adapter.attention)]
    nets = [getattr(layer, adapter.recurrent) for layer in layers if hasattr(layer, adapter.recurrent)]
    own = adapter.recurrent_row or adapter
    names = [*(("q_norm", "k_norm", "v_norm") if adapter.qk_norm else ()), *filter(None, (adapter.heads_norm,))]
    norms = [getattr(each, name) for each in attention for name in names if hasattr(each, name)]
    inner = [module for net in nets for module in (net, net.conv1d, getattr(net, own.recurrent_norm))]
    within = [getattr(model, adapter.inside)] if hasattr(model, adapter.inside) else []
    owners = decoder, *layers, *attention
    dropouts = [child for owner in owners for name, child in owner.named_children() if NOISE[0] in name]
    return [model, *within, model.base_model, decoder, *layers, *attention, *norms, *inner, *dropouts]


def _why_not(model: Any, adapter: Adapter) -> str | None:
    """Reason that keeps a model from its adapter, or None."""
    differs = _differs_by(model, adapter)
    if differs:
        return f"its {' and '.join(differs)} is set"
    if has_global_hooks():
        return "torch has global module hooks"
    if is_autocast(device_of(model)):
        return "under autocast"
    if is_spread(model):
        return f"its layers are on {' and '.join(devices_of(model))}, uncaptured, through accelerate's hooks"
    layers = list(getattr(decoder_of(model), adapter.layers))
    if len(set(layers)) < len(layers):
        return "a layer of its decoder stands there more than once, and keeps all of its keys and values in one place"
    keepers = [layer._modules.get(name) for layer in layers for name in (adapter.attention, adapter.recurrent)]
    numbers = [each.layer_idx for each in keepers if isinstance(getattr(each, "layer_idx", None), int)]
    if numbers != sorted(numbers):
        return "its layers do not run in the order of the numbers (layer_idx) by which caches hold what they keep"
    attentions = [each for layer in layers if (each := layer._modules.get(adapter.attention)) is not None]
    if any(vars(each).get("rotary_ndims", 0) % 2 for each in attentions):
        return "its rotation turns an odd number of channels of a head, which its own forward makes one more"
    if adapter.heads_norm and any(hasattr(getattr(layer, adapter.attention), adapter.heads_norm) for layer in layers):
        scale = getattr(decoder_of(model), adapter.rotary).attention_scaling
        if scale != 1.0:
            return f"its rotation scales by {scale:g} what is normed after it (attention_scaling)"
    looped = _looped_over(model, adapter)
    noisy = noise_of([*looped, *(getattr(layer, adapter.mlp) for layer in layers)])
    if noisy is not None:
        return f"{noisy} of a model in train mode, which its own forward applies"
    found = next((module for module in looped if is_foreign(module)), None)
    if found is None:
        replaced = replaced_functions(model, looped)
        return None if not replaced else f"{replaced[0][0]} is someone else's ({where_defined(replaced[0][1])})"
    name = type(found).__name__
    if is_watched(found):
        return f"{name} has a forward hook"
    return f"{name} has a forward of someone else's ({where_defined(found.forward)})"


DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
NOISE = ("drop", "jitter")
"""Parts of the names by which transformers' modules hold how much noise a pass in train mode adds."""


def noise_of(modules: Iterable[nn.Module]) -> str | None:
    """The noise that a pass of these modules adds in train mode: its name and its size, None for none."""
    for module in modules:
        name = type(module).__name__
        for label, child in module.named_children():
            if isinstance(child, DROPOUTS) and child.training and child.p > 0:
                return f"{label}={child.p} in the {name}"
        if module.training:
            for label, value in vars(module).items():
                if isinstance(value, float) and value > 0 and any(part in label for part in NOISE):
                    return f"{label}={value} in the {name}"
    return None


def mode_of(model: Any) -> str:
    """Mode of a model and the reason for it, in words, for `report`."""
    mode = mode_for(model)
    if mode.adapter is not None:
        return f"adapter {mode.adapter.model_type}"
    if getattr(model.config, "is_encoder_decoder", False):
        return f"encoder-decoder {model.config.model_type}"
    return f"generic ({mode.why or 'no adapter for ' + getattr(model.config, 'model_type', '?')})"


def is_foreign(module: nn.Module) -> bool:
    """True where someone else has a say in a module's forward: a hook, an override, or a class of their own."""
    forward = type(module).forward
    home = home_of(forward).startswith(("transformers.", "torch.")) and not is_strangers(forward)
    return not home or ("forward" in module.__dict__ and not calls_original(module)) or is_watched(module)


def is_watched(module: nn.Module) -> bool:
    """True where someone else's Python runs at every pass of a module, which the replay of a graph would not run."""
    known = all(is_capturing_hook(hook) or is_unpacking_hook(hook) for hook in hooks_of(module))
    return has_global_hooks() or placing_hook(module) is not None or not known
