"""Changes that PEFT makes to the inputs of a model in its own `generate`, read from the model without importing PEFT.

PEFT puts its `prepare_inputs_for_generation` on the base model there. Prompt learning puts virtual tokens in front: as
keys and values (prefix tuning), or as embeddings (prompt tuning, p-tuning). Both come to keys and values that an
assisted call begins with, as with a cache of the user's own; adapters of weights leave the inputs as they are.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from fastspec.errors import Unsupported
from fastspec.generation.layer_state import LayerCache
from fastspec.patches.hf.cache import CACHE, OLD, cache_argument, read_cache
from fastspec.patches.hf.compat import every_module

AS_CACHE = ("PREFIX_TUNING", "CARTRIDGE")
AS_EMBEDDINGS = ("PROMPT_TUNING", "P_TUNING")


def peft_of(model: Any) -> Any:
    """The PEFT model whose `generate` runs, or None."""
    owner: Any = getattr(getattr(model, "prepare_inputs_for_generation", None), "__self__", None)
    return owner if type(owner).__module__.startswith("peft.") else None


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


def virtual_tokens(model: Any, keep: Tensor, layers: int) -> list[LayerCache] | None:
    """Keys and values [B, Hkv, n, D] per layer of virtual tokens before prompts with the mask keep [B, T], or None.
    Raises Unsupported for virtual embeddings before padding, which plain decoding would count, without positions of
    PEFT's."""
    owner = peft_of(model)
    if owner is None or not owner.active_peft_config.is_prompt_learning:
        return None
    kind = owner.active_peft_config.peft_type
    rows = keep.shape[0]
    if getattr(kind, "value", kind) in AS_CACHE:
        return read_cache(owner.get_prompt(batch_size=rows), layers)
    if not bool(keep.all()):
        raise Unsupported(
            "prompts of different lengths behind a prompt-tuning adapter: plain decoding counts their padding as "
            "positions, which an assistant leaves out; generate prompts of one length together, or one at a time"
        )
    embeddings = owner.get_prompt(batch_size=1).to(device=model.device, dtype=owner.word_embeddings.weight.dtype)
    cache, taking = DynamicCache(config=model.config), cache_argument(type(model).forward)
    with torch.no_grad():
        model(inputs_embeds=embeddings, use_cache=True, return_dict=True, **{taking: cache})
    read = read_cache(cache, layers)
    return None if read is None else [tuple(states.expand(rows, *states.shape[1:]) for states in held) for held in read]  # type: ignore[misc]
