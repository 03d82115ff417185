"""Probes of transformers versions, each with the condition of its end, and every private part of torch, transformers
and accelerate that `patches` reads, but for `config_fields.py` and `cache.py`."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.utils import (
    GENERATION_MODES_MAPPING,
    MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL,
    is_deepspeed_zero3_enabled,
    is_fsdp_managed_module,
)

from fastspec.patches.hf.ends import stop_criterion


def every_module(model: nn.Module) -> list[nn.Module]:
    """Modules in the order of `model.modules()`, each once, in a fraction of its time."""
    found: dict[nn.Module, None] = {model: None}
    _find_inside(model, found)
    return list(found)


def _find_inside(module: nn.Module, found: dict[nn.Module, None]) -> None:
    for part in tuple(module._modules.values()):  # to which another thread may add
        if part is not None and part not in found:
            found[part] = None
            if part._modules:
                _find_inside(part, found)


MODULE_PARTS = "_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks"
"""Dictionaries of a `torch.nn.Module` that have a say in its passes."""
OWN_PARTS = "forward", "_hf_hook"
"""Attributes that an instance may have of its own: someone's forward, accelerate's hook."""
PEFT_SWITCHES = "_active_adapter", "_disable_adapters", "merged_adapters", "scaling"
"""Attributes of PEFT's layers that choose what they add; a graph holds what they were at its capture."""


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
    """Give a module new dictionaries of the forward hooks that are `kept`; the old ones stay as they are."""
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        vars(module)[name] = OrderedDict((key, hook) for key, hook in vars(module)[name].items() if kept(hook))


def with_parameters(module: nn.Module, parameters: dict[str, nn.Parameter]) -> Any:
    """A copy of a module, of any class, that holds these parameters and has no `forward` of its own."""
    made = copy.copy(module)
    made.__dict__.pop("forward", None)
    made._parameters = dict(parameters)
    return made


def autocast_region(function: Any) -> tuple[torch.dtype, bool] | None:
    """Dtype of the autocast region that torch's decorator opens around a function, and True where enabled; or None."""
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
    """A parameter itself, or this process's part of a cut one; `to_local` gives a view since torch 2.13, and moving
    that would not move the parameter's own."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def held_tensors(parameter: Tensor) -> list[Tensor]:
    """Tensors with a parameter's values: its local part, or those inside a wrapper such as torchao's."""
    local: Any = local_part(parameter)
    wraps = type(local) not in (Tensor, nn.Parameter) and hasattr(local, "__tensor_flatten__")
    return [getattr(local, name) for name in local.__tensor_flatten__()[0]] if wraps else [local]


def processes_of(model: Any) -> int:
    """Over how many processes transformers has cut a model."""
    return getattr(model, "_tp_size", None) or 1


def is_stateful(model: Any) -> bool:
    """True for a model whose class keeps a recurrent state."""
    return bool(getattr(model, "_is_stateful", False))


def layer_inputs(model: Any, tokens: Tensor, embedded: Tensor) -> Tensor | None:
    """A decoder's own inputs of every layer for each token, [B, N, L, P], from its tables; or None."""
    decoder = model.get_decoder()
    if not getattr(decoder, "hidden_size_per_layer_input", 0):
        return None
    return decoder.project_per_layer_inputs(embedded, decoder.get_per_layer_inputs(tokens, embedded))


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
    """True for an argument of `generate` that a prompt's first pass takes besides tokens: images, sound, what was
    encoded of them, and the tokens that stand for them. Transformers keeps a list of most, and pops what encoders
    took."""
    return name in FIRST_PASS or name.startswith(STEMS)


def first_pass(model: Any, ids: Tensor, config: Any, inputs: dict[str, Any]) -> Any:
    """Plain decoding's own pass over a prompt, whole, its cache among the inputs -> the model's output."""
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
    """transformers' own decoding of a call that `generate` prepared for a custom loop: `given` are the call's
    arguments, the others what the loop is handed."""
    decode = getattr(type(model), GENERATION_MODES_MAPPING[config.get_generation_mode(None)])
    settings = {"logits_processor": processors, "stopping_criteria": criteria, "generation_config": config}
    return decode(model, ids, **settings, streamer=given.get("streamer"), synced_gpus=in_step(model, given), **inputs)


def in_step(model: Any, given: dict[str, Any]) -> bool:
    """True where plain decoding keeps all processes of a call together, whichever learned that an assistant cannot
    serve it. `generate` itself goes by the whole model, and would not for one of which only layers are cut."""
    said = given.get("synced_gpus")
    return is_shared_out(model) if said is None else bool(said)


def unwrapped(model: Any) -> Any:
    """The transformers model inside wrappers of PEFT, `torch.compile` or `accelerate.prepare`, or the model itself."""
    if not isinstance(model, nn.Module):
        return model
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    if not type(inner).__module__.startswith("peft."):
        return inner
    base = inner._modules.get("base_model", inner._modules.get("model"))
    return inner if base is None else unwrapped(base)


def is_shared_out(model: Any) -> bool:
    """True where processes share out a model's weights, or some layers', by FSDP: a pass of one needs all."""
    return _are_several() and any(map(is_fsdp_managed_module, model.modules()))


def brings_weights(hook: Any) -> bool:
    """True where a hook is one of FSDP's or of our own, without which a pass has no weights."""
    return str(getattr(hook, "__module__", "")).startswith(("torch.distributed.", "fastspec.patches."))


def is_zero3() -> bool:
    """True where DeepSpeed shares all models' weights out over several processes."""
    return _are_several() and bool(is_deepspeed_zero3_enabled())


def _are_several() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def device_of(model: Any) -> torch.device:
    """Device that a model computes on: its parameters', or where accelerate's hooks put offloaded ones. Delete when
    `PreTrainedModel.device` of an offloaded model is no longer "meta"."""
    if model.device.type != "meta":
        return model.device
    return hooked_device(model.modules()) or model.device


def dtype_of(model: Any) -> torch.dtype:
    """Dtype that a model's layers compute in: what FSDP2's mixed precision casts to, or that of most weights of its
    decoder's matrices but LM head, embedding and adapters; `model.dtype` where none is of floating point.

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
    for module in every_module(model.get_decoder()):
        own = own_parameters(module).values()
        # matrices beside codes are scales; bitsandbytes stores codes in any dtype (bnb_4bit_quant_storage)
        if all(
            each.element_size() > 1 and each.is_floating_point() and type(each).__name__ != "Params4bit" for each in own
        ):
            for each in own:
                if each.dim() > 1 and id(each) not in apart:
                    apart.add(id(each))
                    counts[each.dtype] += each.numel()
    return counts.most_common(1)[0][0] if counts else model.dtype


def stack_of(base: Any) -> Any:
    """Decoder or base that a model gives, or the stack below the LM head of that. Llama 4 gives itself, since its
    `base_model_prefix` is no attribute of it; delete when it gives its `model`."""
    below = getattr(base, "model", None)
    whole = below is None or not hasattr(base, "lm_head") or hasattr(base, base.base_model_prefix)
    return base if whole else below


CAPTURING_FLAG = "_output_capturing_hooks_installed"
"""Attribute by which transformers remembers its capturing hooks; it goes with the three below."""


def is_capturing_hook(hook: Any) -> bool:
    """True for transformers' own forward hook, left on layers by the first output_hidden_states=True, and idle. Delete
    this and the next two when `transformers.utils.output_capturing` leaves none behind."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def is_unpacking_hook(hook: Any) -> bool:
    """True for the forward hook by which compressed-tensors unpacks a model's weights at its first pass. Delete this
    and the next when weights are not left to that pass."""
    return getattr(hook, "__name__", None) == "ct_decompress_hook"


def unpack_weights(model: nn.Module) -> None:
    """Let compressed-tensors unpack a model's weights, as its own first pass would."""
    for hook in filter(is_unpacking_hook, list(model._forward_pre_hooks.values())):
        hook(model, ())


def dequantised_method(model: Any) -> str | None:
    """Method of quantisation in a model's files whose weights transformers dequantised at loading; else None. Delete
    when a model's configuration says so."""
    if vars(model).get("is_quantized") is not False:
        return None
    try:
        held, _ = PreTrainedConfig.get_config_dict(model.config.name_or_path, local_files_only=True)
    except OSError:
        return None
    return (held.get("quantization_config") or {}).get("quant_method")


def names_of_weights(model: Any, keys: Iterable[str]) -> dict[str, str]:
    """Keys of a checkpoint -> a model's names for them, one by one. Delete when a quantiser is told them."""
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
    """True where torch calls a hook at every module's forward. Delete when torch says so itself."""
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
