"""Arguments of a `generate` call of a cascade: refused ones, and those of each stage."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from fastspec.errors import Unsupported
from fastspec.patches.call.processors import grammars, unknown_types, whole_limit
from fastspec.patches.call.refusals import inferred_mask, setting
from fastspec.patches.cascade.stages import OWN, StageModel
from fastspec.patches.hf.cache import GIVEN
from fastspec.patches.hf.compat import is_besides_tokens

OF_TOKENS = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "bad_words_ids",
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "watermarking_config",
)
"""Arguments of `generate` that name or see tokens of one vocabulary."""
ENDS = ("eos_token_id", "pad_token_id", "bos_token_id")
OURS = {
    "input_ids",
    "inputs",
    "attention_mask",
    "streamer",
    "num_return_sequences",
    "return_dict_in_generate",
    "max_length",
    "max_new_tokens",
    "tokenizer",
    "generation_config",
    "assistant",
}
REFUSED = {
    **dict.fromkeys(GIVEN, "its stages keep caches of their own: Cascade(memory=bytes)"),
    "output_scores": "the answer may be another model's",
    "output_logits": "the answer may be another model's",
    "inputs_embeds": "a stage reads tokens: pass input_ids",
}


def refuse(stages: Sequence[StageModel], given: dict[str, Any]) -> None:
    """Refuse arguments that a cascade cannot honour, by name, before any stage runs."""
    for name, why in REFUSED.items():
        if given.get(name) is not None and given[name] is not False:
            raise Unsupported(f"{name} cannot be combined with assistant='cascade': {why}")
    inputs = sorted(name for name, value in given.items() if value is not None and is_besides_tokens(name))
    if inputs:
        raise Unsupported(
            f"{', '.join(inputs)} cannot be combined with assistant='cascade': its stages share texts of tokens alone"
        )
    criteria, processors = (given.get(name) or () for name in ("stopping_criteria", "logits_processor"))
    stateful = (
        unknown_types(processors, criteria)
        or grammars(processors)
        or ("prefix_allowed_tokens_fn" if given.get("prefix_allowed_tokens_fn") else "")
    )
    if stateful:
        raise Unsupported(
            f"{stateful} may keep a state over a whole batch, and the stages of a cascade answer some of its rows "
            "each, one after another: leave it out, or decode with the large model's own assistant"
        )
    for stage in stages:
        if stage.stage.tokenizer is not None:
            _refuse_tokens(stage, given)


def _refuse_tokens(stage: StageModel, given: dict[str, Any]) -> None:
    """Refuse arguments that speak of the large model's tokens for a stage that has others."""
    held = {name: setting(name, given) for name in OF_TOKENS}
    named = [
        name for name, value in held.items() if value is not None and (not hasattr(value, "__len__") or len(value))
    ]
    if named and stage.foreign:
        raise Unsupported(
            f"{', '.join(named)} speaks of the large model's tokens, and {stage.label} has others: leave it out"
        )


def read_prompts(large: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The call's token ids [B, T] and which are real [B, T]; as in transformers, without a mask pad tokens are not."""
    ids = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or 0 in ids.shape:
        raise Unsupported("assistant='cascade' needs input_ids [B, T] of at least one row and one token")
    mask = given.get("attention_mask")
    keep = inferred_mask(large, ids, given) if mask is None else mask.to(ids.device).bool()
    if keep.shape != ids.shape or not bool(keep[:, -1].all()):
        raise Unsupported(
            f"attention_mask {tuple(keep.shape)} must have the shape of input_ids {tuple(ids.shape)}, padding on the "
            "left"
        )
    times = setting("num_return_sequences", given, large.generation_config) or 1
    return ids.repeat_interleave(times, 0), keep.repeat_interleave(times, 0)


def new_tokens(large: Any, given: dict[str, Any], width: int) -> int:
    """Limit of a stage's new tokens, as transformers reads it: max_new_tokens from anywhere before max_length."""
    limit = setting("max_new_tokens", given, large.generation_config)
    if limit is not None:
        return whole_limit(limit)
    longest = setting("max_length", given, large.generation_config)
    if longest is None or (given.get("max_length") is None and longest == GenerationConfig().max_length):
        return 20
    if longest <= width:
        raise Unsupported(f"max_length={longest} leaves no token after input_ids of {width}: give max_new_tokens")
    return whole_limit(longest) - width


def ends_of(stage: StageModel, given: dict[str, Any]) -> Any:
    """The end tokens that a call sets for a stage: OWN where it sets none, None where it takes them away."""
    if stage.foreign:
        return OWN
    if "eos_token_id" in given:
        return given["eos_token_id"]
    found = setting("eos_token_id", given)
    return OWN if found is None else found


def pad_of(stage: StageModel, given: dict[str, Any]) -> int:
    """The pad token of a stage in a call; an end token where there is none."""
    held = None if stage.foreign else setting("pad_token_id", given)
    held = stage.model.generation_config.pad_token_id if held is None else held
    return int(held) if held is not None else (*stage.ends(ends_of(stage, given)), *stage.ends(), 0)[0]


def stage_options(stage: StageModel, given: dict[str, Any], limit: int) -> dict[str, Any]:
    """The call's arguments as a stage takes them, for `limit` new tokens."""
    _refuse_tokens(stage, given)  # a stage that is loaded late has brought its tokenizer with it
    options = {
        name: value for name, value in given.items() if name not in OURS and not (stage.foreign and name in ENDS)
    }
    if given.get("tokenizer") is not None:
        options["tokenizer"] = stage.tokenizer if stage.foreign else given["tokenizer"]
    fixed = {"max_new_tokens": limit, "num_return_sequences": 1, "pad_token_id": pad_of(stage, given)}
    if given.get("generation_config") is None:
        return options | fixed
    # all settings go in here: arguments beside a generation_config are deprecated
    config = copy.deepcopy(given["generation_config"])
    own = {name: getattr(stage.model.generation_config, name) for name in ENDS} if stage.foreign else {}
    for name, value in (own | fixed | {"max_length": None}).items():
        setattr(config, name, value)
        options.pop(name, None)
    return {**options, "generation_config": config}


def left_padded(prompts: Sequence[Sequence[int]], pad: int, device: Any) -> tuple[Tensor, Tensor]:
    """Prompts as ids [B, T], filled up on the left, and their attention mask [B, T]."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    return ids, torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
