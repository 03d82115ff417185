"""Everything that depends on a transformers version, each probe with the condition of its end, and every private part
of torch, transformers and accelerate that `patches` reads; `tests/patches/hf/test_compat.py` pins these."""

from __future__ import annotations

import copy
import inspect
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig
from transformers.cache_utils import LinearAttentionLayer
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.utils import (
    GENERATION_MODES_MAPPING,
    MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL,
    is_deepspeed_zero3_enabled,
    is_fsdp_managed_module,
)

from fastspec.generation.layer_state import DeltaShape, LayerCache
from fastspec.patches.hf.ends import stop_criterion


def every_module(model: nn.Module) -> list[nn.Module]:
    """Modules in the order of `model.modules()`, each once, in a fraction of its time."""
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            waiting += reversed(list(module._modules.values()))
    return list(found)


MODULE_PARTS = "_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks"
"""Dictionaries of a `torch.nn.Module` that have a say in its passes."""
OWN_PARTS = "forward", "_hf_hook"
"""Attributes that an instance may have of its own: someone's forward, accelerate's hook."""
PEFT_SWITCHES = "_active_adapter", "_disable_adapters", "merged_adapters", "scaling"
"""Attributes of PEFT's layers that choose what they add: Python's, so that a graph holds what they were at its
capture."""


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that a module holds itself, by name."""
    return {name: each for name, each in module._parameters.items() if each is not None}


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Buffers that a module holds itself, by name: the dictionary that it reads."""
    return module._buffers


def hooks_of(module: nn.Module) -> list[Any]:
    """Forward hooks of a module, then those that run before its forward."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def keep_hooks(module: nn.Module, kept: Callable[[Any], bool]) -> None:
    """Give a module new dictionaries of those of its forward hooks that `kept` is true of; the old ones stay as they
    are."""
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        vars(module)[name] = OrderedDict((key, hook) for key, hook in vars(module)[name].items() if kept(hook))


def with_parameters(module: nn.Module, parameters: dict[str, nn.Parameter]) -> Any:
    """A copy of a module, of any class, that holds these parameters and has no `forward` of its own."""
    made = copy.copy(module)
    made.__dict__.pop("forward", None)
    made._parameters = dict(parameters)
    return made


def autocast_region(function: Any) -> tuple[torch.dtype, bool] | None:
    """The dtype of the autocast region that torch's decorator opens around a function, and whether it is enabled; None
    for a function without the decorator."""
    code = getattr(function, "__code__", None)
    place = "torch.amp.autocast_mode", "decorate_autocast"
    if code is None or (function.__globals__["__name__"], code.co_name) != place:
        return None
    region = dict(zip(code.co_freevars, function.__closure__, strict=True))["autocast_instance"].cell_contents
    return region.fast_dtype, region._enabled


def placing_hook(module: nn.Module) -> Any:
    """accelerate's hook of a module, which moves weights or inputs before a pass; None without one."""
    return getattr(module, "_hf_hook", None)


def hooked_device(modules: Iterable[nn.Module]) -> torch.device | None:
    """The device that the first of accelerate's hooks on modules computes on; None without one."""
    found = (getattr(placing_hook(module), "execution_device", None) for module in modules)
    return next((torch.device(device) for device in found if device is not None), None)


def change_count(tensor: Tensor) -> int:
    """torch's count of the changes of a tensor in place; -1 for one of inference mode, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def local_part(parameter: Tensor) -> Tensor:
    """A parameter itself, or this process's part of one that is cut. `to_local` gives a view since torch 2.13, and
    moving that would not move the parameter's own."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def held_tensors(parameter: Tensor) -> list[Tensor]:
    """Tensors with a parameter's values: itself or what this process has of it, or those inside a wrapper such as
    torchao's, which has no address of its own."""
    local: Any = local_part(parameter)
    return [getattr(local, name) for name in local.__tensor_flatten__()[0]] if is_wrapper(local) else [local]


def is_wrapper(tensor: Tensor) -> bool:
    """True of a tensor whose values are in other tensors that it holds."""
    return type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__")


def processes_of(model: Any) -> int:
    """Over how many processes transformers has cut a model."""
    return getattr(model, "_tp_size", None) or 1


def attention_name(config: Any) -> str | None:
    """The `attn_implementation` of a configuration."""
    return getattr(config.get_text_config(), "_attn_implementation", None)


def experts_name(config: Any) -> str | None:
    """The `experts_implementation` of a configuration."""
    return getattr(config.get_text_config(), "_experts_implementation", None)


def is_stateful(model: Any) -> bool:
    """True for a model whose class keeps a recurrent state."""
    return bool(getattr(model, "_is_stateful", False))


def layer_count(config: Any) -> int:
    """Number of a decoder's layers, from its config."""
    config = config.get_text_config()
    if config.is_encoder_decoder:  # T5 and BART have names of their own
        return getattr(config, "decoder_layers", None) or config.num_decoder_layers
    return config.num_hidden_layers


def layer_shapes(config: Any) -> list[tuple[int, int, int]]:
    """Key heads, and the sizes of a key and a value, of every layer of a decoder, as its caches hold them.

    `per_layer_config` says of every layer what differs (Gemma 4's `head_dim`) since transformers 5.10; reading it from
    the whole raises.
    """
    config, layers = config.get_text_config(), layer_count(config)
    if {"head_dim", "num_key_value_heads"} & set(getattr(config, "per_layer_attributes", None) or ()):
        return [_shape(config.per_layer_config[layer]) for layer in range(layers)]
    heads, key, value = _shape(config)
    kinds, wide = getattr(config, "layer_types", None) or [""] * layers, DOUBLED.get(config.model_type)
    return [(2 * heads if kind == wide else heads, key, value) for kind in kinds[:layers]]


DOUBLED = {"mimo_v2_flash": "sliding_attention"}
"""Model types -> the kind of their layers that has twice the key heads of the others, which no setting says."""


def _shape(config: Any) -> tuple[int, int, int]:
    """Latent attention keeps a head of latents and one of rotated channels since transformers 5.20, other layers keys
    and values."""
    latent = _setting(config, "kv_lora_rank")
    if latent:
        return 1, latent, config.qk_rope_head_dim
    heads, size = _heads(config)
    return heads, size, _setting(config, "v_head_dim") or size


def _setting(config: Any, name: str) -> Any:
    """A setting of a configuration, None where its class knows none of this name: a key that another model has left
    over is kept with it, and no forward reads it."""
    return getattr(config, name, None) if name in _parameters(type(config).__init__) else None


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _heads(config: Any) -> tuple[int, int]:
    if config.is_encoder_decoder:
        heads = getattr(config, "decoder_attention_heads", None) or config.num_heads
        return heads, getattr(config, "d_kv", None) or config.d_model // heads
    heads = config.num_attention_heads
    if getattr(config, "new_decoder_architecture", False):  # Falcon's caches hold its keys once per query head
        return heads, config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or (1 if getattr(config, "multi_query", False) else heads)
    return kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def layer_inputs(model: Any, tokens: Tensor, embedded: Tensor) -> Tensor | None:
    """Inputs that every layer of a decoder reads of each token beside the hidden state, [B, N, L, P], from its own
    tables; None where there are none.

    Gemma 4's decoder has the two methods since transformers 5.5.
    """
    decoder = model.get_decoder()
    if not getattr(decoder, "hidden_size_per_layer_input", 0):
        return None
    return decoder.project_per_layer_inputs(embedded, decoder.get_per_layer_inputs(tokens, embedded))


def kept_by(config: Any) -> list[int]:
    """Whose keys and values every layer of a decoder reads: its own, or, for the last `num_kv_shared_layers`, those of
    the last layer in front of these of the same type. Caches keep nothing for such a layer."""
    config = config.get_text_config()
    layers, kinds = layer_count(config), getattr(config, "layer_types", None)
    first = layers - (_setting(config, "num_kv_shared_layers") or 0)
    if kinds is None:
        return list(range(layers))
    return [
        layer if layer < first else max(each for each in range(first) if kinds[each] == kinds[layer])
        for layer in range(layers)
    ]


RECURRENT = "linear_attention"
"""Name of a layer with a recurrent state in configurations, in `layer_types`."""


def recurrent_layers(config: Any) -> list[bool]:
    """True for the layers of a decoder that keep a recurrent state."""
    layers = layer_count(config)
    kinds = getattr(config.get_text_config(), "layer_types", None)
    return [False] * layers if kinds is None else [kind == RECURRENT for kind in kinds[:layers]]


def delta_shape(config: Any) -> DeltaShape:
    """The sizes of a decoder's Gated DeltaNet layers."""
    config = config.get_text_config()
    return DeltaShape(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )


def varied_lengths(config: Any) -> list[str]:
    """Settings of what a layer sees that differ from layer to layer; reading one from the whole raises."""
    return sorted(set(LENGTHS) & set(getattr(config.get_text_config(), "per_layer_attributes", None) or ()))


LENGTHS = ("sliding_window", "attention_chunk_size", "max_position_embeddings")


def read_cache(cache: Any, layers: int) -> list[LayerCache] | None:
    """Contents of a cache handed in by the user for each layer that keeps anything: keys and values [B, Hkv, T, D], or
    a recurrent layer's inputs and state; None when it is empty or absent. A layer with a window has dropped the oldest
    tokens, which it never sees again: zeros take their places.

    Caches hold `layers` with `keys` and `values` since transformers 4.56; delete the probe when that is all there is.
    """
    if cache is None or int(cache.get_seq_length()) == 0:
        return None
    length = int(cache.get_seq_length())
    return [_held(layer, length) for layer in held_layers(cache, layers)]


def _held(layer: Any, length: int) -> LayerCache:
    if is_recurrent(layer):
        return layer.conv_states[0], layer.recurrent_states[0]
    return _last(layer.keys, length), _last(layer.values, length)


def held_layers(cache: Any, layers: int) -> list[Any]:
    """The layers of a filled cache that keep anything."""
    return [layer for layer in cache.layers[:layers] if is_recurrent(layer) or layer.keys is not None]


def changing_part(cache: Any) -> Any:
    """The part of a cache, itself or a layer, that may keep and give back other keys and values than it is given, or
    None: one whose `update` is not transformers' own, or that quantises. A cache without layers makes them of the class
    that it names.

    Quantising layers have a common base since transformers 5.18; delete its other name when that is the oldest.
    """
    for part in (cache, *cache.layers, getattr(cache, "layer_class_to_replicate", None)):
        update = getattr(part, "update", None)  # a recurrent layer has none
        names = {base.__name__ for base in (part if isinstance(part, type) else type(part)).__mro__}
        own = update is None or str(getattr(update, "__module__", "")).startswith("transformers.")
        if not own or {"BaseQuantizedLayer", "QuantizedLayer"} & names:
            return part
    return None


def records_past(cache: Any) -> bool:
    """True where windows or recurrent states of a cache keep what they held before, so that tokens can be taken off
    them. Layers that keep every token, and those of older releases, have no such mode."""
    return any(getattr(layer, "record_past", False) for layer in cache.layers)


def keeps_all(cache: Any, layer: int) -> bool:
    """True where a cache keeps every token of a layer; one that was not told of windows makes its layers when it needs
    them, and they do."""
    return layer >= len(cache.layers) or not getattr(cache.layers[layer], "is_sliding", False)


def kept_lengths(cache: Any, layers: int) -> list[int | None]:
    """Number of last tokens that a pass of one token finds in each layer of a cache, its own counted; None for all. A
    static cache's layers name their size alone."""
    kept = [None if keeps_all(cache, layer) else cache.layers[layer] for layer in range(layers)]
    return [None if layer is None else getattr(layer, "sliding_window", None) or layer.max_cache_len for layer in kept]


def is_recurrent(layer: Any) -> bool:
    """True where a layer of a cache keeps the last inputs of a convolution and a state."""
    return isinstance(layer, LinearAttentionLayer)


def text_length(held: list[LayerCache] | None) -> int:
    """Number of tokens that `read_cache` has read: keys and values are of one length, and what recurrent layers keep is
    of any."""
    return max((keys.shape[2] for keys, values in held or () if keys.shape[:-1] == values.shape[:-1]), default=0)


def _last(states: Tensor, length: int) -> Tensor:
    """The tokens [B, Hkv, T, D] of states that hold all of them, or the last ones."""
    return F.pad(states, (0, 0, length - states.shape[2], 0)) if states.shape[2] < length else states[:, :, :length]


def fill_cache(cache: Any, kept: int, more: list[LayerCache]) -> Any:
    """Append keys and values [B, Hkv, T, D] per layer to a cache that holds `kept` tokens, through its own `update`; a
    recurrent layer's inputs [B, C, K] and state take the place of what it has."""
    if int(cache.get_seq_length()) != kept:
        raise RuntimeError(
            f"the cache changed during generation: it held {kept} tokens and now holds {cache.get_seq_length()}"
        )
    for layer, (keys, values) in enumerate(more):
        if layer < len(cache.layers) and is_recurrent(
            cache.layers[layer]
        ):  # one that was not told of layers makes them now
            cache.update_conv_state(keys, layer, conv_kernel_size=keys.shape[-1])
            cache.update_recurrent_state(values, layer)
        else:
            cache.update(keys, values, layer)
    return cache


FIRST_PASS = {
    *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL,
    "token_type_ids",
    "mm_token_type_ids",
    "moe_mm_token_type_ids",
}
STEMS = (
    "pixel_",
    "image_",
    "images",
    "video_",
    "videos",
    "audio_",
    "input_features",
    "feature_attention_mask",
    "vision_",
    "second_per_grid",
)


def is_besides_tokens(name: str) -> bool:
    """True where an argument of `generate` is what the first pass over a prompt takes besides its tokens: images,
    sound, what was encoded of them, and which tokens stand for them (of every new token plain decoding says that it is
    text).

    Transformers keeps a list of most since 5.10, and pops what its encoders took.
    """
    return name in FIRST_PASS or name.startswith(STEMS)


def first_inputs(model: Any, ids: Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that plain decoding's own pass over a prompt hands to the model, of what `generate` has prepared.

    `prepare_inputs_for_generation` has had these arguments since transformers 5.0.
    """
    return model.prepare_inputs_for_generation(ids, is_first_iteration=True, **inputs)


def first_pass(model: Any, ids: Tensor, config: Any, inputs: dict[str, Any]) -> Any:
    """Plain decoding's own pass over a prompt, the whole of it at once -> the model's output. Its cache is among the
    inputs.

    `_prefill` has had these arguments since transformers 5.0.
    """
    whole = copy.copy(config)
    whole.prefill_chunk_size = None
    return model._prefill(ids, whole, inputs)


def own_stop_strings(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` with stop strings made into a stopping criterion.

    transformers (up to 5.24 at least) loses `tokenizer` on its way to the criteria when a custom loop is given; delete
    this when it does not.
    """
    tokenizer, config = arguments.get("tokenizer"), arguments.get("generation_config")
    sources = (
        arguments.get("stop_strings"),
        getattr(config, "stop_strings", None),
        model.generation_config.stop_strings,
    )
    strings = next((s for s in sources if s is not None), None)
    if strings is None or tokenizer is None:
        return arguments
    given = [*(arguments.get("stopping_criteria") or ()), stop_criterion(tokenizer, strings)]
    return {**arguments, "stopping_criteria": StoppingCriteriaList(given), "stop_strings": None}


def plain_decoding(
    model: Any, given: dict[str, Any], ids: Tensor, processors: Any, criteria: Any, config: Any, inputs: Any
) -> Any:
    """transformers' own decoding of a call that `generate` has prepared for a custom loop: `given` are the call's
    arguments by name, the others what `generate` hands to the loop.

    `GENERATION_MODES_MAPPING` names the methods since transformers 4.56; a custom loop is not handed the streamer.
    """
    decode = getattr(type(model), GENERATION_MODES_MAPPING[config.get_generation_mode(None)])
    settings = {"logits_processor": processors, "stopping_criteria": criteria, "generation_config": config}
    return decode(model, ids, **settings, streamer=given.get("streamer"), synced_gpus=in_step(model, given), **inputs)


def in_step(model: Any, given: dict[str, Any]) -> bool:
    """True where plain decoding of a call that an assistant cannot serve keeps processes together: in all of them or in
    none, wherever each learned of it. Unless the call says, `generate` decides by the whole model alone, and would not
    for one of which only layers are cut.
    """
    said = given.get("synced_gpus")
    return is_shared_out(model) if said is None else bool(said)


def unwrapped(model: Any) -> Any:
    """The transformers model inside what PEFT, `torch.compile` or `accelerate.prepare` wrapped around it, or the model
    itself.

    accelerate knows its own wrappers and torch's; PEFT's models hold what is inside by one of two names.
    """
    if not isinstance(model, nn.Module):
        return model
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    if not type(inner).__module__.startswith("peft."):
        return inner
    base = inner._modules.get("base_model", inner._modules.get("model"))
    return inner if base is None else unwrapped(base)


def is_shared_out(model: Any) -> bool:
    """True where several processes share a model's weights out by FSDP, or those of some of its layers, so that each
    pass of one needs a pass of all."""
    return _are_several() and any(map(is_fsdp_managed_module, model.modules()))


def brings_weights(hook: Any) -> bool:
    """True where a module's hook is one of FSDP's, or one of our own that goes with them: without them a pass has no
    weights."""
    return str(getattr(hook, "__module__", "")).startswith(("torch.distributed.", "fastspec.patches."))


def is_zero3() -> bool:
    """True where DeepSpeed shares all models' weights out over several processes."""
    return _are_several() and bool(is_deepspeed_zero3_enabled())


def _are_several() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def table_rows(module: Any, config: Any) -> int:
    """Rows of an embedding or an LM head, or what the configuration says where the module in its place does not: the
    layers of `torch.ao.nn.quantized` have a method for the weight."""
    weight = getattr(module, "weight", None)
    return int(weight.shape[0] if isinstance(weight, Tensor) else config.get_text_config().vocab_size)


def position_limit(config: Any) -> int | None:
    """The longest sequence the positions of a model allow, or None where nothing limits them."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def rope_bound(config: Any) -> int | None:
    """The length up to which rotary frequencies do not depend on the length of the text, or None where they never do.

    "dynamic" and "longrope" choose one set of frequencies for a whole forward pass by its largest position.
    """
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    if kind == "longrope":
        return rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return config.max_position_embeddings if kind == "dynamic" else None


def device_of(model: Any) -> torch.device:
    """Device that a model computes on: where its parameters are, or, where accelerate keeps them elsewhere between
    passes, where its hooks put them.

    Delete when `PreTrainedModel.device` of an offloaded model is no longer "meta".
    """
    if model.device.type != "meta":
        return model.device
    return hooked_device(model.modules()) or model.device


def dtype_of(model: Any) -> torch.dtype:
    """Dtype that a model's layers compute in: the one to which FSDP2's mixed precision casts all weights for a pass, or
    that of most weights of its decoder's matrices, without those of the LM head and the embedding, which may be cast by
    themselves, and without what adapters put beside a layer of the model. `model.dtype` names the embedding's; it
    stands where no matrix is in a dtype of floating point, as with weights stored in codes.

    torch (2.13) keeps the policy where no public name leads; delete the probe when one does.
    """
    modules: list[Any] = every_module(model)
    states = (module._get_fsdp_state() for module in modules if hasattr(type(module), "_get_fsdp_state"))
    cast = {getattr(getattr(state, "_mp_policy", None), "param_dtype", None) for state in states}
    if len(cast) == 1 and (policy := next(iter(cast))) is not None:
        return policy
    apart = {id(getattr(end, "weight", None)) for end in (model.get_input_embeddings(), model.get_output_embeddings())}
    for module in modules:
        if isinstance(base := module._modules.get("base_layer"), nn.Module):
            apart |= {id(each) for each in module.parameters()} - {id(each) for each in base.parameters()}
    counts: Counter[torch.dtype] = Counter()
    owned = [own_parameters(module).values() for module in every_module(model.get_decoder())]
    dense = [  # beside codes matrices are scales
        own for own in owned if all(each.element_size() > 1 and each.is_floating_point() for each in own)
    ]
    for each in {id(each): each for own in dense for each in own}.values():
        if each.dim() > 1 and each.is_floating_point() and id(each) not in apart:
            counts[each.dtype] += each.numel()
    own: torch.dtype = model.dtype
    return counts.most_common(1)[0][0] if counts else own


def stack_of(base: Any) -> Any:
    """Module that a model gives as its decoder or base, or, where that is a model with an LM head, what is below the
    head.

    Llama 4 gives itself, since its `base_model_prefix` is no attribute of it; delete when it gives its `model`.
    """
    below = getattr(base, "model", None)
    return (
        below if below is not None and hasattr(base, "lm_head") and not hasattr(base, base.base_model_prefix) else base
    )


CAPTURING_FLAG = "_output_capturing_hooks_installed"
"""The attribute by which transformers remembers that its capturing hooks are on a model; it goes with the three
below."""


def is_capturing_hook(hook: Any) -> bool:
    """True where a forward hook is transformers' own, left on layers by the first output_hidden_states=True and idle
    otherwise.

    Delete this and the next two when `transformers.utils.output_capturing` no longer leaves hooks behind.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def is_unpacking_hook(hook: Any) -> bool:
    """True where a forward hook is the one that compressed-tensors puts on a model whose weights are packed: the first
    forward pass unpacks them and takes the hook off.

    Delete this and the next when compressed-tensors, or transformers' loading, no longer leaves the weights to the
    first pass.
    """
    return getattr(hook, "__name__", None) == "ct_decompress_hook"


def unpack_weights(model: nn.Module) -> None:
    """Let compressed-tensors unpack a model's weights, as at the model's own first pass, which an assisted call does
    not make."""
    for hook in filter(is_unpacking_hook, list(model._forward_pre_hooks.values())):
        hook(model, ())


def dequantised_method(model: Any) -> str | None:
    """Method of quantisation that a model's files name, where transformers has dequantised the weights that it loaded
    of them; None of other models, and where the files are gone.

    Delete when a model's configuration says so.
    """
    if vars(model).get("is_quantized") is not False:
        return None
    try:
        held, _ = PreTrainedConfig.get_config_dict(model.config.name_or_path, local_files_only=True)
    except OSError:
        return None
    told: str | None = (held.get("quantization_config") or {}).get("quant_method")
    return told


def names_of_weights(model: Any, keys: Iterable[str]) -> dict[str, str]:
    """Keys of a checkpoint -> the names under which transformers loads them into a model, where it does so one by one.

    Delete when a quantiser is told them.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    found, held = {}, model.state_dict()
    changes = get_model_conversion_mapping(model)
    renamings = [each for each in changes if isinstance(each, WeightRenaming)]
    converters = [each for each in changes if isinstance(each, WeightConverter)]
    for key in keys:
        name, converted = rename_source_key(key, renamings, converters, model.base_model_prefix, held)
        if converted is None and name in held:
            found[key] = name
    return found


def has_global_hooks() -> bool:
    """True where torch calls a hook at the forward of every module of the process.

    Delete the names of torch's internals when it offers a question of its own.
    """
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def is_autocast(device: torch.device) -> bool:
    """True where ops on a device choose their dtypes by autocast."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def has_capturing_hooks(model: nn.Module) -> bool:
    """True where transformers has put its capturing hooks on a model."""
    return any(is_capturing_hook(hook) for module in model.modules() for hook in module._forward_hooks.values())


def drop_capturing_hooks(model: nn.Module) -> None:
    """Take them off again; transformers puts them back when it next needs them."""
    for module in every_module(model):
        if module._forward_hooks:
            for key in [key for key, hook in module._forward_hooks.items() if is_capturing_hook(hook)]:
                del module._forward_hooks[key]
        module.__dict__.pop(CAPTURING_FLAG, None)


def is_out_of_memory(error: BaseException) -> bool:
    """True where an error is torch's way of saying that memory has run out, on any device."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
