"""Combinations that no assistant allows, refused by name before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastspec.errors import Unsupported
from fastspec.generation.drafters.base import Decoding
from fastspec.patches.call.prompts import AS_CACHE, AS_EMBEDDINGS, given_inputs, peft_of
from fastspec.patches.hf.cache import (
    CACHE,
    OLD,
    PADDED,
    changing_part,
    given_cache,
    held_layers,
    is_recurrent,
    records_past,
    shown_padding,
)
from fastspec.patches.hf.compat import device_of, every_module, is_besides_tokens, is_shared_out, is_zero3
from fastspec.patches.hf.config_fields import kept_by, layer_shapes, position_limit
from fastspec.patches.hf.ends import listed
from fastspec.patches.hf.limits import position_rows
from fastspec.patches.hf.modes import is_wrapped
from fastspec.patches.hf.parallel import local_heads
from fastspec.patches.hf.replaced import home_of, is_strangers, where_defined

_ARGUMENTS = {
    "inputs_embeds": "an assistant drafts from token ids: pass input_ids",
    "position_ids": "positions follow from the attention mask: leave them out",
    "assistant_model": "transformers' assisted generation and assistant= exclude each other",
    "custom_generate": "both replace the decoding loop",
    "negative_prompt_ids": "classifier-free guidance runs the model a second time per token",
    "synced_gpus": "the loop does not keep idle ranks running",
}
_CONFIG: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "prompt_lookup_num_tokens": (None,),
    "guidance_scale": (None, 1, 1.0),
    "assistant_early_exit": (None,),
    "cache_implementation": (None, "hybrid", "paged", "dynamic"),
    "use_cache": (None, True),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "use_mtp": (None, False),
    "token_healing": (None, False),
}
"""Settings by name -> the values under which plain `generate` decodes token by token over a growing cache.

transformers makes that cache for "hybrid", which Gemma 2 and 3 are published with, and, where it is a configuration's
and no argument, for "paged". Healing needs the tokenizer, which it does not hand on to a custom loop."""
_READ_BESIDE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "penalty_alpha": ("do_sample", (None, False)),
    "output_attentions": ("return_dict_in_generate", (True,)),
    "output_hidden_states": ("return_dict_in_generate", (True,)),
}
"""Settings that transformers ignores unless another one has one of these values."""
_EXPECTED = {
    "attention_mask",
    "position_ids",
    CACHE,
    "use_cache",
    "logits_to_keep",
    "cache_position",
    "tokenizer",
    "synced_gpus",
    "assistant_model",
    "assistant_tokenizer",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "labels",  # of a trainer's batch: plain decoding hands them to no pass
}


_PASSED_BY = (
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_prefill",
    "_sample",
    "_has_unfinished_sequences",
    "_prepare_position_ids_for_generation",
)
"""Methods of a model that plain decoding goes by at every pass, and an assisted call does not."""


def setting(name: str, given: dict[str, Any], *more: Any) -> Any:
    """A setting of a call: the argument, else the given generation_config's, else that of `more`, else None."""
    sources = (given.get(name), *(getattr(config, name, None) for config in (given.get("generation_config"), *more)))
    return next((value for value in sources if value is not None), None)


def refuse_overrides(model: Any) -> None:
    """Refuse a model whose decoding someone else has changed where rounds do not go by it, and DeepSpeed's ZeRO 3."""
    for name in _PASSED_BY:
        method = getattr(type(model) if name == "_sample" else model, name, None)  # as plain decoding looks them up
        if method is None or (home_of(method).startswith("transformers.") and not is_strangers(method)):
            continue
        if name == "prepare_inputs_for_generation" and (owner := peft_of(model)) is not None:
            refuse_peft(owner)
            continue
        raise Unsupported(
            f"{type(model).__name__}.{name} is {home_of(method)}'s ({where_defined(method)}): plain decoding goes by "
            "it at every step, an assistant's rounds do not; remove the override, or leave out assistant="
        )
    refuse_hooks_of_peft(model)
    if is_zero3():
        raise Unsupported(
            f"DeepSpeed's ZeRO 3 has spread this {type(model).__name__} over several processes, which must run the "
            "same number of passes: "
            "rounds take as many as their drafts need; generate with the unsharded model, or share it out by FSDP2"
        )


def refuse_peft(owner: Any) -> None:
    """Raise Unsupported for an adapter whose virtual tokens the rounds would not reproduce."""
    config = owner.active_peft_config
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning and kind not in (*AS_CACHE, *AS_EMBEDDINGS):
        raise Unsupported(
            f"the prompt-learning adapter {kind} cannot be combined with an assistant: accepted are "
            f"{', '.join(AS_CACHE + AS_EMBEDDINGS)}, and adapters of weights such as LoRA"
        )
    said = inspect.unwrap(type(owner).prepare_inputs_for_generation).__code__.co_consts
    if config.is_prompt_learning and OLD in said and CACHE not in said:  # PEFT before 0.22 with transformers 5.24
        raise Unsupported(
            f"this PEFT looks for {OLD} where transformers has {CACHE}, so that plain decoding goes wrong about the "
            f"virtual tokens of {kind}: update PEFT"
        )


def refuse_hooks_of_peft(model: Any) -> None:
    """Raise Unsupported for adapters that follow the text by hooks: an activated LoRA, which counts from a pass's end,
    and those that run a pass of their own before each (X-LoRA, Shadow)."""
    for hook in model._forward_pre_hooks.values():
        if str(getattr(hook, "__module__", "")).startswith("peft."):
            raise Unsupported(
                f"an adapter of PEFT computes from the whole text before each pass ({hook.__module__}), which an "
                "assistant's rounds do not repeat: leave out assistant="
            )
    hooks = (hook for module in every_module(model) for hook in module._forward_pre_hooks.values())
    if any("alora_offsets" in getattr(hook, "keywords", ()) for hook in hooks):
        raise Unsupported("an activated LoRA begins within the text, at its invocation tokens: leave out assistant=")


def refuse_arguments(model: Any, given: dict[str, Any]) -> None:
    """Refuse, by name, arguments of `generate` that an assistant cannot honour, and settings of the given
    generation_config, or else the model's own.

    This comes before transformers acts on any of them: for a static cache, say, it leaves an attribute on the model.
    """
    _refuse_weights(model)
    kept = ("synced_gpus",) if is_shared_out(model) else ()  # what a call does by itself there
    for name, why in _ARGUMENTS.items():
        if given.get(name) is not None and given[name] is not False and name not in kept:
            raise Unsupported(f"{name} cannot be combined with assistant=: {why}")
    inputs = sorted(name for name, value in given.items() if is_besides_tokens(name) and value is not None)
    if inputs and (
        model.config.is_encoder_decoder or not set(inputs) <= set(inspect.signature(type(model).forward).parameters)
    ):
        raise Unsupported(
            f"{', '.join(inputs)} cannot be combined with assistant=: it decodes from input_ids and attention_mask "
            "alone"
        )
    types = given.get("token_type_ids")
    if types is not None and not is_wrapped(model) and not _are_first(types, model):
        raise Unsupported(
            f"token_type_ids cannot be combined with assistant= on {type(model).__name__}: plain decoding gives every "
            "new token the type of the last one, and rounds give none: leave them out"
        )
    if given.get("cache_implementation") == "paged":
        raise Unsupported(
            "cache_implementation='paged' cannot be combined with assistant=: it is transformers' own continuous "
            "batching"
        )
    _refuse_settings(partial(_setting, model, given))
    if _attends_otherwise(model, given):
        raise Unsupported(
            f"output_attentions=True cannot be combined with assistant= on {type(model).__name__}, which attends in "
            "another way where it is asked for weights: leave it out"
        )


def _refuse_weights(model: Any) -> None:
    """Refuse weights that no pass can multiply."""
    if device_of(model).type == "meta":
        raise Unsupported(
            f"the weights of this {type(model).__name__} are on the meta device, without values: load them, by "
            "AutoModelForCausalLM.from_pretrained(...)"
        )
    if model.dtype.itemsize == 1:
        raise Unsupported(
            f"the weights of this {type(model).__name__} were cast to {model.dtype}, in which torch does not add: cast "
            "them to torch.bfloat16, or load the model with a quantization_config"
        )


def refuse_ids(model: Any, given: dict[str, Any]) -> None:
    """Refuse texts, lists and a tokenizer's whole output in place of token ids, and a mask that is no batch."""
    mask = given.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() > 1):
        raise Unsupported(
            "attention_mask must be a tensor of shape [rows, tokens], as "
            '**tokenizer(texts, return_tensors="pt") gives it'
        )
    names = ["input_ids"] if model.main_input_name != "input_ids" else ["input_ids", "inputs"]
    for name in names:
        ids = given.get(name)
        if ids is None or (isinstance(ids, Tensor) and ids.dim() == 2 and ids.dtype in (torch.int64, torch.int32)):
            continue
        is_tensor = isinstance(ids, Tensor)
        found = f"{ids.dtype} of shape {tuple(ids.shape)}" if is_tensor else f"a {type(ids).__name__}"
        raise Unsupported(
            f"{name} is {found}: pass whole numbers of shape [rows, tokens], as "
            '**tokenizer(texts, return_tensors="pt") does'
        )


def _are_first(types: Any, model: Any) -> bool:
    """True where all tokens have the first type of a model's table, which is that of a token that is given none."""
    has_table = any(name.endswith("token_type_embeddings") for name, _ in model.named_modules())
    return has_table and not bool(torch.as_tensor(types, device="cpu").any())


def _setting(model: Any, given: dict[str, Any], name: str) -> Any:
    """Setting of a call with arguments `given` by name: an argument of None counts too."""
    return given[name] if name in given else setting(name, given, model.generation_config)


def _attends_otherwise(model: Any, given: dict[str, Any]) -> bool:
    """True where a call asks for weights of attention, and the model takes another way to them."""
    reads = inspect.signature(type(model).forward).parameters
    return bool(_setting(model, given, "output_attentions")) and "output_attentions" in reads


def refuse_prepared(config: Any, model_kwargs: dict[str, Any], reads_source: bool = False) -> None:
    """Refuse model inputs besides tokens, and settings that a `generate` of the user's own has added on the way."""
    _refuse_settings(lambda name: getattr(config, name, None))
    if reads_source and getattr(config, "prefill_chunk_size", None) is not None:
        raise Unsupported(
            f"prefill_chunk_size={config.prefill_chunk_size} cannot be combined with assistant= on an encoder-decoder "
            "model: plain decoding cuts the mask of the source by it; leave it out"
        )
    expected = _EXPECTED | ({"encoder_outputs"} if reads_source else set())
    extra = sorted(
        name for name in given_inputs(model_kwargs) - expected if reads_source or not is_besides_tokens(name)
    )
    if extra:
        raise Unsupported(
            f"{', '.join(extra)} cannot be combined with assistant=: rounds read tokens, and of other inputs only "
            "those are known that the first pass over a prompt takes"
        )


def refuse_heads(name: str, model: Any) -> None:
    """Refuse an assistant that drafts with a head for an encoder-decoder model."""
    if model.config.is_encoder_decoder:
        raise Unsupported(
            f"assistant {name!r} drafts with a head for decoder-only models, and {type(model).__name__} is an "
            'encoder-decoder model: use "nasd" or "speculative"'
        )


def refuse_joining(decoding: Any, model: Any) -> None:
    """Refuse continuous batching of an encoder-decoder model, and of rows that cannot begin anew one by one."""
    if model.config.is_encoder_decoder:
        raise Unsupported(
            f"ContinuousBatch takes prompts of a decoder-only model, and {type(model).__name__} is an "
            "encoder-decoder model"
        )
    if not isinstance(decoding, Decoding) or not decoding.continuous:
        raise Unsupported(
            f"ContinuousBatch: assistant {decoding.name!r} cannot take a new prompt into a running batch: accepted are "
            "'autoregressive', 'eagle', 'eagle2', 'eagle3', 'mtp', 'nasd', 'speculative' with one tokenizer and "
            "decodings that say `continuous = True`"
        )


def _refuse_settings(named: Callable[[str], Any]) -> None:
    for name, accepted in _CONFIG.items():
        beside, values = _READ_BESIDE.get(name, (None, ()))
        value, is_read = named(name), beside is None or named(beside) in values
        if is_read and value not in accepted:
            hint = '; assistant="mtp" drafts with the same layer' if name == "use_mtp" else ""
            raise Unsupported(
                f"{name}={value!r} cannot be combined with assistant=: accepted is {accepted[-1]!r}{hint}"
            )


def refuse_cache(model: Any, cache: Any, rows: int) -> None:
    """Refuse a caller's cache that changes what it keeps, or has other rows, layers, heads or lengths."""
    plain = "hand in a DynamicCache or a StaticCache, or leave it out"
    if not isinstance(getattr(cache, "layers", None), list):
        raise Unsupported(f"{CACHE} is a {type(cache).__name__}, which has no layers of keys and values: {plain}")
    part = changing_part(cache)
    if part is not None:
        name = part.__name__ if isinstance(part, type) else type(part).__name__
        raise Unsupported(
            f"{CACHE} is a {type(cache).__name__}: {name} may keep other keys and values than it is given, and "
            f"assisted rounds keep them as they are: {plain}"
        )
    if records_past(cache):
        raise Unsupported(
            f"{CACHE} records what its windows and recurrent states held before (activate_past_recording, which "
            "transformers' assisted generation leaves on), and assisted rounds keep none of it, so that a crop would "
            "be wrong: hand in one that does not record, or leave out assistant="
        )
    length, shapes = int(cache.get_seq_length()), layer_shapes(model.config)
    if length == 0:
        return
    owners, held = sorted(set(kept_by(model.config))), held_layers(cache, len(shapes))
    if len(held) != len(owners):
        raise Unsupported(
            f"{CACHE} holds {len(held)} layers, and {type(model).__name__} keeps {len(owners)}: hand in one of its own"
        )
    for owner, layer in zip(owners, held, strict=True):
        states = (layer.conv_states[0],) if is_recurrent(layer) else (layer.keys, layer.values)
        if states[0].shape[0] != rows:
            raise Unsupported(
                f"{CACHE} holds {states[0].shape[0]} rows for {rows} of input_ids, each of num_return_sequences "
                f"counted: make as many by {CACHE}.batch_repeat_interleave or {CACHE}.batch_select_indices"
            )
        if is_recurrent(layer):
            continue
        heads, *sizes = shapes[owner]
        wanted = [(local_heads(model, heads), size) for size in sizes]
        found = [(each.shape[1], each.shape[3]) for each in states]
        if found != wanted:
            raise Unsupported(
                f"{CACHE} holds keys and values of {found} heads and channels in layer {owner}, and those of "
                f"{type(model).__name__} are of {wanted}: hand in one of its own"
            )
        if int(layer.get_seq_length()) != length or layer.keys.shape[2] != layer.values.shape[2]:
            raise Unsupported(
                f"{CACHE} holds {layer.keys.shape[2]} keys and {layer.values.shape[2]} values in layer {owner}, and "
                f"{length} tokens: rounds read as many of every layer; {plain}"
            )


def refuse_shown_padding(cache: Any, keep: Tensor) -> None:
    """Refuse a mask keep [B, past + T] bool that shows slots which an assisted call left empty, as padding: plain
    decoding leaves there what it computes of padding."""
    if rows := shown_padding(cache, keep):
        raise Unsupported(
            f"attention_mask shows tokens of rows {rows} that {CACHE} holds nothing of, since they were padding "
            "when it was filled: begin with the mask of that call, or pass the whole text without a cache"
        )


def inferred_mask(model: Any, ids: Tensor, given: dict[str, Any]) -> Tensor:
    """Mask of a call's real tokens ids [B, T] bool, as transformers infers it: pad tokens are not, unless they end."""
    pad, ends = (setting(name, given, model.generation_config) for name in ("pad_token_id", "eos_token_id"))
    return torch.ones_like(ids, dtype=torch.bool) if pad is None or int(pad) in listed(ends) else ids != int(pad)


def refuse_plain_padding(model: Any, given: dict[str, Any]) -> None:
    """The same for a call of arguments `given` that transformers decodes, which may infer the mask."""
    cache, mask = given_cache(given), given.get("attention_mask")
    if not getattr(cache, PADDED, False):
        return
    if mask is None:
        ids = next((given[name] for name in ("input_ids", "inputs") if given.get(name) is not None), None)
        if ids is None:
            return
        mask = inferred_mask(model, ids, given)
    if mask.dim() != 2 or mask.shape[1] <= int(cache.get_seq_length()):
        return
    refuse_shown_padding(cache, mask.bool())
    adds_mask = model.config._attn_implementation == "sdpa" and _attends_otherwise(model, given)
    if adds_mask and shown_padding(cache, torch.ones_like(mask, dtype=torch.bool)):
        raise Unsupported(
            f"output_attentions=True cannot be combined on {type(model).__name__} with a {CACHE} that an assisted call "
            "filled beside padding: with SDPA the model adds its mask to scores as numbers, which hides nothing, and "
            'the cache holds nothing there: load the model with attn_implementation="eager", or pass the whole text '
            "without a cache"
        )


def refuse_prompts(model: Any, ids: Tensor, keep: Tensor, past: int) -> None:
    """Refuse empty batches and prompts, right padding, a cache without new tokens, and prompts past the positions."""
    if ids.shape[0] == 0 or ids.shape[1] == 0:
        raise Unsupported(f"input_ids has shape {tuple(ids.shape)}: a batch needs at least one row with one token")
    if keep.shape[0] != ids.shape[0]:
        raise Unsupported(f"attention_mask has {keep.shape[0]} rows for {ids.shape[0]} rows of input_ids")
    if keep.shape[1] <= past:
        raise Unsupported(
            f"{CACHE} holds {past} tokens and input_ids brings no further ones: pass the whole sequence, with a token "
            f"that the cache does not hold, or take one off a cache without windows by {CACHE}.crop(-1)"
        )
    empty = (~keep.any(1)).nonzero().flatten().tolist()
    if empty:
        raise Unsupported(
            f"the prompts of rows {empty} have no token, as attention_mask is 0 everywhere: leave these rows out, or "
            "begin them with a token, such as bos_token_id"
        )
    if not bool(keep[:, -1].all()):
        raise Unsupported("a row ends in padding: set padding_side='left' on the tokenizer")
    limit, longest = position_limit(model.config), int(keep.sum(1).max())
    ends = limit is not None and longest > limit
    if ends and (model.config.is_encoder_decoder or position_rows(model) is not None):
        raise Unsupported(
            f"the prompt has {longest} tokens and the model's positions end at {limit} (max_position_embeddings): "
            "shorten it"
        )
