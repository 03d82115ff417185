"""What cannot be combined with an assistant, refused by name before anything runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastspec.errors import Unsupported
from fastspec.patches.compat import position_limit

_ARGUMENTS = {
    "inputs_embeds": "an assistant drafts from token ids: pass input_ids",
    "position_ids": "positions follow from the attention mask: leave them out",
    "assistant_model": "transformers' assisted generation and assistant= exclude each other",
    "negative_prompt_ids": "classifier-free guidance runs the model a second time per token",
    "synced_gpus": "the loop does not keep idle ranks running",
}
_CONFIG: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1), "num_beam_groups": (None, 1), "penalty_alpha": (None, 0), "dola_layers": (None,), "constraints": (None,),
    "force_words_ids": (None,), "prompt_lookup_num_tokens": (None,), "guidance_scale": (None, 1, 1.0),
    "assistant_early_exit": (None,), "cache_implementation": (None, "dynamic"), "use_cache": (None, True),
    "output_attentions": (None, False), "output_hidden_states": (None, False), "use_mtp": (None, False),
}  # fmt: skip
_EXPECTED = {
    "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position", "tokenizer", "synced_gpus",
    "assistant_model", "assistant_tokenizer", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
}  # fmt: skip


def refuse_arguments(kwargs: dict[str, Any]) -> None:
    """Refuse keyword arguments of `generate` that an assistant cannot honour."""
    for name, why in _ARGUMENTS.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise Unsupported(f"{name} cannot be combined with assistant=: {why}")
    _refuse_settings({name: kwargs[name] for name in _CONFIG if name in kwargs})  # before transformers acts on them


def refuse_config(config: Any, model_kwargs: dict[str, Any]) -> None:
    """Refuse generation settings, wherever they came from, and model inputs besides tokens."""
    _refuse_settings({name: getattr(config, name, None) for name in _CONFIG})
    extra = sorted(name for name, value in model_kwargs.items() if name not in _EXPECTED and value is not None)
    if extra:
        raise Unsupported(f"{', '.join(extra)} cannot be combined with assistant=: it decodes from input_ids and attention_mask alone")


def _refuse_settings(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        accepted = _CONFIG[name]
        if value not in accepted:
            raise Unsupported(f"{name}={value!r} cannot be combined with assistant=: accepted is {accepted[-1]!r}")


def refuse_prompts(model: Any, ids: Tensor, keep: Tensor, past: int) -> None:
    """Refuse empty batches and prompts, right padding, a cache without new tokens, and prompts past the position limit."""
    if ids.shape[0] == 0 or ids.shape[1] == 0:
        raise Unsupported(f"input_ids has shape {tuple(ids.shape)}: a batch needs at least one row with one token")
    if keep.shape[0] != ids.shape[0]:
        raise Unsupported(f"attention_mask has {keep.shape[0]} rows for {ids.shape[0]} rows of input_ids")
    if keep.shape[1] <= past:
        raise Unsupported(f"past_key_values holds {past} tokens and input_ids brings no further ones: pass the whole sequence")
    if not bool(keep[:, -1].all()):
        raise Unsupported("a row ends in padding: set padding_side='left' on the tokenizer")
    limit, longest = position_limit(model.config), int(keep.sum(1).max())
    if limit is not None and longest > limit:
        raise Unsupported(f"the prompt has {longest} tokens and the model's positions end at {limit} (max_position_embeddings): shorten it")
