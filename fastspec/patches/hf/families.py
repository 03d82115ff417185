"""What fastspec knows of each model family, as rows of data, and which mode a model gets."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fastspec.errors import Unsupported
from fastspec.patches.hf.compat import (
    RECURRENT,
    device_of,
    has_global_hooks,
    is_autocast,
    is_capturing_hook,
    is_unpacking_hook,
    varied_lengths,
)
from fastspec.patches.hf.limits import LAYER_KINDS
from fastspec.patches.hf.mixtures import GLM4_EXPERTS, GPT_OSS_EXPERTS, QWEN_EXPERTS, SHARED_EXPERT, Mixture
from fastspec.patches.hf.wrappers import calls_original, where_defined


@dataclass(frozen=True, slots=True)
class Adapter:
    """Names of the parts of one decoder's `model_type`, as attributes of the model, of its decoder or of a layer."""

    model_type: str
    embed: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"
    rotary: str = "rotary_emb"
    lm_head: str = "lm_head"
    attention: str = "self_attn"
    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    mixer_out_norm: str = ""
    mlp_out_norm: str = ""
    """Norms of what attention and feed-forward add, where there are any; a family without norms of what they read has "" for those."""
    qk_norm: bool = False
    """Whether each head's queries and keys are normed."""
    normed_if: str = ""
    """The attribute of an attention that says whether they are, where not all models do so."""
    wide_qk_norm: bool = False
    """Whether all heads' queries are normed together, and so all keys."""
    eps: str = "variance_epsilon"
    """The attribute of a norm that is added to the mean square."""
    offset: float | None = None
    """What a norm adds to its weight, which it applies in fp32; None: it applies the weight to the rounded norm."""
    rotary_by_kind: bool = False
    """Whether the kinds of layers (`layer_types`) have rotary tables of their own."""
    angles_once: bool = False
    """Whether the rotary module gives each angle once; others repeat them for both halves of a head."""
    rotates: str = ""
    """The attribute of an attention that says whether it rotates at all, where some do not."""
    sinks: str = ""
    """The attribute of an attention with a logit per head that joins the softmax."""
    cap: str = ""
    """The attribute of an attention that its scores are soft-capped with, None for no cap."""
    final_cap: str = ""
    """The setting that logits are soft-capped with, None for no cap."""
    norms_values: bool = False
    """Whether values are normed, without a weight."""
    layer_input: str = ""
    """The module of a layer that opens a gate for the layer's own input of every token, which goes through `layer_input_out` and
    `layer_input_norm`; some models have none."""
    layer_input_out: str = "per_layer_projection"
    layer_input_norm: str = "post_per_layer_input_norm"
    layer_scale: str = ""
    """The attribute of a layer that its output is multiplied by."""
    experts: str = ""
    """The experts that some models have beside a dense feed-forward, with their `router`, and the norms below: of what the dense one gives,
    of what experts read and of what they give."""
    router: str = "router"
    dense_out_norm: str = "post_feedforward_layernorm_1"
    experts_norm: str = "pre_feedforward_layernorm_2"
    experts_out_norm: str = "post_feedforward_layernorm_2"
    hides: tuple[str, ...] = ()
    """Settings of the model around a decoder that name tokens which it shows the decoder as padding."""
    gated_attention: bool = False
    """Whether q_proj gives every head's queries and as many gates, which what the head reads is multiplied by."""
    recurrent: str = ""
    """The Gated DeltaNet of a layer that has one in place of attention, and its parts."""
    recurrent_inputs: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    """Products of queries, keys and values, of the norm's gates, and of b and a, which make rates and decays."""
    grouped_inputs: bool = False
    """Whether these hold everything of one key head side by side."""
    recurrent_norm: str = "norm"
    recurrent_out: str = "out_proj"
    doubles: str = ""
    """The attribute of a Gated DeltaNet that says whether its rates go up to 2."""
    recurrent_row: Adapter | None = None
    """The row of the layers that have one, where their norms stand elsewhere than in the others."""
    gated_mlp: bool = True
    """Whether a dense `mlp` is down_proj(act_fn(gate_proj(x)) * up_proj(x))."""
    mixture: Mixture | None = None
    """That of the layers that have one."""


GEMMA2 = Adapter(
    "gemma2", mlp_norm="pre_feedforward_layernorm", mixer_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm",
    eps="eps", offset=1.0, cap="attn_logit_softcapping", final_cap="final_logit_softcapping",
)  # fmt: skip
OLMO2 = Adapter(
    "olmo2", input_norm="", mlp_norm="", mixer_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm",
    wide_qk_norm=True,
)  # fmt: skip
QWEN3_5 = Adapter("qwen3_5_text", qk_norm=True, eps="eps", offset=1.0, gated_attention=True, recurrent="linear_attn")
ADAPTERS = {
    row.model_type: row
    for row in (
        Adapter("llama"),
        Adapter("mistral"),
        Adapter("qwen2"),
        Adapter("qwen3", qk_norm=True),
        Adapter("qwen3_moe", qk_norm=True, mixture=QWEN_EXPERTS),
        Adapter("qwen2_vl_text"),
        Adapter("qwen2_5_vl_text"),
        Adapter("qwen3_vl_text", qk_norm=True),
        Adapter("qwen3_vl_moe_text", qk_norm=True, mixture=Mixture()),
        Adapter("mixtral", gated_mlp=False, mixture=Mixture(rounded=False)),
        Adapter("glm4_moe", qk_norm=True, normed_if="use_qk_norm", mixture=GLM4_EXPERTS),
        Adapter("ministral"),
        Adapter("qwen2_moe", mixture=SHARED_EXPERT),
        Adapter("seed_oss"),
        Adapter("cwm"),
        Adapter("arcee"),
        Adapter("starcoder2"),
        Adapter("smollm3", rotates="use_rope"),
        Adapter("gemma", eps="eps", offset=1.0),
        GEMMA2,
        replace(GEMMA2, model_type="gemma3_text", cap="", qk_norm=True, rotary_by_kind=True),
        replace(
            GEMMA2, model_type="gemma4_text", cap="", qk_norm=True, rotary_by_kind=True, offset=0.0, norms_values=True,
            layer_input="per_layer_input_gate", layer_scale="layer_scalar", experts="experts",
            hides=("image_token_id", "video_token_id", "audio_token_id"),
        ),
        OLMO2,
        replace(OLMO2, model_type="olmo3", rotary_by_kind=True),
        QWEN3_5,
        replace(QWEN3_5, model_type="qwen3_5_moe_text", mixture=replace(SHARED_EXPERT, normalised_if="")),
        replace(
            QWEN3_5, model_type="qwen3_next", recurrent_inputs=("in_proj_qkvz", "in_proj_ba"), grouped_inputs=True, mixture=SHARED_EXPERT
        ),
        replace(
            OLMO2, model_type="olmo_hybrid", recurrent="linear_attn", recurrent_row=Adapter(
                "olmo_hybrid", recurrent="linear_attn", recurrent_inputs=("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
                recurrent_norm="o_norm", recurrent_out="o_proj", doubles="allow_neg_eigval",
            ),
        ),
        Adapter("gpt_oss", gated_mlp=False, sinks="sinks", angles_once=True, mixture=GPT_OSS_EXPERTS),
    )
}


@dataclass(frozen=True, slots=True)
class Seq2Seq:
    """Names of the parts of one encoder-decoder `model_type`, as attributes of its decoder, and how positions come in."""

    model_type: str
    relative: bool = False
    """Whether blocks take a bias by distance (T5) instead of embedded positions."""
    counted: bool = False
    """Whether padding tokens have no position (fairseq's tables)."""
    scale: str = ""
    """What embeddings are multiplied by, where `embed_tokens` does not do it."""
    embed_norm: str = ""
    norm_first: bool = False
    """Whether `embed_norm` comes before positions are added."""
    final: str = ""
    scaled_if: str = ""
    """The setting that says whether the last hidden state is multiplied by width**-0.5."""

    @property
    def needed(self) -> tuple[str, ...]:
        """Attributes that the decoder must have."""
        loop = ("block",) if self.relative else ("layers", "embed_positions")
        return (*loop, *filter(None, (self.scale, self.embed_norm, self.final)))


SEQ2SEQ = {
    row.model_type: row
    for row in (
        Seq2Seq("t5", relative=True, final="final_layer_norm", scaled_if="scale_decoder_outputs"),
        Seq2Seq("mt5", relative=True, final="final_layer_norm"),
        Seq2Seq("bart", embed_norm="layernorm_embedding"),
        Seq2Seq("plbart", embed_norm="layernorm_embedding"),
        Seq2Seq("mbart", embed_norm="layernorm_embedding", final="layer_norm"),
        Seq2Seq("marian", scale="embed_scale"),
        Seq2Seq("pegasus", scale="embed_scale", final="layer_norm"),
        Seq2Seq("bigbird_pegasus", final="layernorm_embedding"),
        Seq2Seq("blenderbot", final="layer_norm"),
        Seq2Seq("blenderbot-small", scale="embed_scale", embed_norm="layernorm_embedding", norm_first=True),
        Seq2Seq("m2m_100", counted=True, final="layer_norm"),
    )
}


def check_supported(model: Any) -> None:
    """Raise `Unsupported`, naming the reason, for a model that fastspec cannot decode with."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise Unsupported(f"patch takes a transformers model, not {name}: load one with AutoModelForCausalLM.from_pretrained(...)")
    if not callable(getattr(model, "generate", None)) or not model.can_generate():
        raise Unsupported(f"{name} has no generate method: patch a causal language model, such as {name.replace('Model', '')}ForCausalLM")
    config: Any = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        check_decoder(model)
    adapter = ADAPTERS.get(config.model_type)
    known = {"full_attention", *LAYER_KINDS, *((RECURRENT,) if adapter is not None and adapter.recurrent else ())}
    if getattr(model, "_is_stateful", False) and RECURRENT not in known:
        raise Unsupported(f"{name} keeps a recurrent state, which cannot be taken back when a draft is rejected")
    kinds = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()} - known)
    if kinds:
        raise Unsupported(f"{name} has layers of type {', '.join(kinds)}; fastspec needs a full-attention KV cache in every layer")
    varied = varied_lengths(config)
    if varied:
        raise Unsupported(f"{name} has layers that differ in {', '.join(varied)}; fastspec takes one for all layers of a type")
    if not model.config.is_encoder_decoder and adapter_for(model) is None:
        _check_generic(model, config)
    devices = {str(p.device) for p in model.parameters() if p.device.type != "meta"}
    if len(devices) > 1:
        raise Unsupported(f"{name} is spread over {', '.join(sorted(devices))}; fastspec keeps one KV cache on one device")


def _check_generic(model: PreTrainedModel, config: Any) -> None:
    """What the generic mode needs besides: positions and a mask that say where a draft node stands, and one size of key and value."""
    name = type(model).__name__
    missing = [p for p in ("position_ids", "past_key_values") if p not in inspect.signature(type(model).forward).parameters]
    if missing:
        raise Unsupported(f"{name}.forward takes no {' and no '.join(missing)}: fastspec cannot tell it where a draft node stands")
    if not hasattr(config, "num_hidden_layers"):
        raise Unsupported(f"{name} is more than one stack of layers (its configuration has no num_hidden_layers); fastspec runs one")
    if getattr(config, "alibi", False):
        raise Unsupported(f"{name} derives positions from the cache (alibi=True), where the nodes of a draft tree lie out of order")
    if getattr(config, "kv_lora_rank", None):
        raise Unsupported(f"{name} keeps keys and values of different sizes (multi-head latent attention); fastspec's cache holds one")
    _check_masks(name, config)


def _check_masks(name: str, config: Any) -> None:
    kernel = getattr(config, "_attn_implementation", None)
    if kernel not in (None, "eager", "sdpa"):
        raise Unsupported(f"{name} needs 4-D masks in generic mode, and {kernel} takes none: load it with attn_implementation='sdpa'")


def check_decoder(model: Any) -> None:
    """Raise `Unsupported` for an encoder-decoder model whose decoder's parts fastspec does not know, or whose loop someone else changed."""
    name, kind = type(model).__name__, model.config.model_type
    if kind not in SEQ2SEQ:
        raise Unsupported(f"{name} is an encoder-decoder model of type {kind}; fastspec knows the decoders of {', '.join(SEQ2SEQ)}")
    parts, decoder = SEQ2SEQ[kind], model.get_decoder()
    missing = [part for part in (*parts.needed, "embed_tokens") if not hasattr(decoder, part)]
    table = None if parts.relative or missing else decoder.embed_positions
    if missing or not hasattr(model, "lm_head") or (table is not None and not parts.counted and not _takes_positions(table)):
        raise Unsupported(f"{name} has a decoder that is not built as transformers' {kind}: fastspec cannot place draft nodes in it")
    for module in (model, model.base_model, decoder):
        if is_foreign(module):
            raise Unsupported(
                f"{type(module).__name__} of {name} has a hook or a forward of someone else's, which fastspec's own loop over the "
                "decoder's layers would pass by: remove it"
            )
    _check_masks(name, model.config)


def _takes_positions(table: nn.Module) -> bool:
    return "position_ids" in inspect.signature(table.forward).parameters


def adapter_for(model: nn.Module) -> Adapter | None:
    """The model's row, or None for the generic mode: no row, a layer whose forward belongs to someone else, or autocast, which
    chooses dtypes op by op in the modules' own forward."""
    adapter = _row_of(model)
    if adapter is None or has_global_hooks() or is_autocast(device_of(model)):
        return None
    return None if any(is_foreign(module) for module in _looped_over(model, adapter)) else adapter


def _row_of(model: Any) -> Adapter | None:
    """The row of a model's decoder, which may have a vision tower and the like beside it."""
    if getattr(model.config, "is_encoder_decoder", False):
        return None
    adapter = ADAPTERS.get(getattr(model.config.get_text_config(), "model_type", ""))
    if adapter is None or not hasattr(model, adapter.lm_head):
        return None
    return adapter if all(hasattr(decoder_of(model), name) for name in (adapter.layers, adapter.norm, adapter.embed)) else None


def decoder_of(model: Any) -> Any:
    """The stack of layers under a model's LM head."""
    return model.get_decoder()


def is_wrapped(model: Any) -> bool:
    """Whether a model has more in front of its decoder than tokens, images for one."""
    return decoder_of(model) is not model.base_model


def _looped_over(model: Any, adapter: Adapter) -> list[nn.Module]:
    """The modules whose forward an adapter's loop takes the place of."""
    decoder = decoder_of(model)
    layers = list(getattr(decoder, adapter.layers))
    attention = [getattr(layer, adapter.attention) for layer in layers if hasattr(layer, adapter.attention)]
    nets = [getattr(layer, adapter.recurrent) for layer in layers if adapter.recurrent and hasattr(layer, adapter.recurrent)]
    own = adapter.recurrent_row or adapter
    names = ("q_norm", "k_norm", "v_norm") if adapter.qk_norm else ()
    norms = [getattr(each, name) for each in attention for name in names if hasattr(each, name)]
    inner = [module for net in nets for module in (net, net.conv1d, getattr(net, own.recurrent_norm))]
    return [model, model.base_model, decoder, *layers, *attention, *norms, *inner]


def norms_heads(adapter: Adapter, attention: Any) -> bool:
    """Whether an attention norms each head's queries and keys."""
    return adapter.qk_norm and (not adapter.normed_if or bool(getattr(attention, adapter.normed_if)))


def why_generic(model: Any) -> str | None:
    """What keeps a model of a known family from its adapter, or None."""
    adapter = _row_of(model)
    if adapter is None:
        return None
    if has_global_hooks():
        return "torch has global module hooks"
    if is_autocast(device_of(model)):
        return "under autocast"
    found = next((module for module in _looped_over(model, adapter) if is_foreign(module)), None)
    if found is None:
        return None
    name = type(found).__name__
    if is_watched(found):
        return f"{name} has a forward hook"
    return f"{name} has a forward of someone else's ({where_defined(found.forward)})"


def mode_of(model: Any) -> str:
    """Why a model got its mode, in words, for `report`."""
    adapter = adapter_for(model)
    if adapter is not None:
        return f"adapter {adapter.model_type}"
    if getattr(model.config, "is_encoder_decoder", False):
        return f"encoder-decoder {model.config.model_type}"
    return f"generic ({why_generic(model) or 'no adapter for ' + getattr(model.config, 'model_type', '?')})"


def is_foreign(module: nn.Module) -> bool:
    """Whether someone else has a say in a module's forward: a hook, an override on the instance, or a class of their own."""
    home = type(module).forward.__module__.startswith(("transformers.", "torch."))
    return not home or ("forward" in module.__dict__ and not calls_original(module)) or is_watched(module)


def is_watched(module: nn.Module) -> bool:
    """Whether someone else's Python runs at every pass of a module, a forward hook or accelerate's, which moves weights: the replay of a
    graph would not run it."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    known = all(is_capturing_hook(hook) or is_unpacking_hook(hook) for hook in hooks)
    return has_global_hooks() or hasattr(module, "_hf_hook") or not known

