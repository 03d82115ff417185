"""Inputs besides tokens, such as images: a prompt that has any is read by the model's own first pass, and rounds go on from its cache."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from fastspec.errors import Unsupported
from fastspec.generation.target import Target
from fastspec.patches.hf.cache import import_past
from fastspec.patches.hf.cache_names import CACHE
from fastspec.patches.hf.compat import first_inputs, first_pass, is_besides_tokens, is_recurrent, read_cache, recurrent_layers
from fastspec.patches.hf.families import Adapter
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import is_wrapped, may_see_ahead
from fastspec.patches.hf.tree_check import reads_prompts_alike


def besides_tokens(model_kwargs: dict[str, Any]) -> set[str]:
    """The inputs besides tokens that a call brings."""
    given = {name for name, value in model_kwargs.items() if value is not None and not (isinstance(value, dict) and not value)}
    return {name for name in given if is_besides_tokens(name)}


def sees_ahead(model: Any, adapter: Adapter | None) -> bool:
    """Whether a model lets a prompt's tokens see others than those before them, so that its own pass must read every prompt. Raises
    Unsupported as `check_trust`."""
    besides = is_wrapped(model) or may_see_ahead(model)
    checked = besides if adapter is not None else not any(recurrent_layers(model.config))  # these are refused later
    return checked and not reads_prompts_alike(model, adapter)


def position_shift(model: Any, ids: Tensor, keep: Tensor, model_kwargs: dict[str, Any]) -> Tensor | None:
    """How far the position of the token behind a prompt is from the number of tokens before it, [B] int64; None for a model that reads
    nothing but tokens, whose positions count them.

    keep [B, T] bool tells which tokens are real. A grid of image tokens takes fewer positions than it has tokens, or more, and some models
    count from one. Every new token is one further than the last of the prompt, whose position the model prepares for the first pass; one
    that prepares none counts padding too, which shows in the keys that a cache keeps.
    """
    if not is_wrapped(model):
        return None
    positions = first_inputs(model, ids, model_kwargs).get("position_ids")
    if positions is None:
        return (~keep).sum(1)
    last = positions[..., -1] if positions.dim() == 2 else positions[-1, :, -1]
    return last.to(keep.device).expand(len(keep)) + 1 - keep.sum(1)


@dataclass(frozen=True, slots=True)
class OwnPrefill:
    """The model's own pass over prompts ids [B, T] with the `inputs` that `generate` has prepared, behind what their cache holds.

    keep [B, past + new] bool tells which tokens of the cache and of the prompts are real. It may run more than once: the cache that it
    fills is a copy.
    """

    model: Any
    config: Any
    ids: Tensor
    keep: Tensor
    inputs: dict[str, Any]

    def __call__(self, target: Target) -> tuple[Tensor, Tensor]:
        """Let a target stand behind the prompts -> logits of each prompt's last token [B, V], and the features [B, new, F] of the tokens
        that the cache did not hold, left padding removed. Raises Unsupported where the pass leaves more than keys and values of them."""
        assert isinstance(target, HFModel)
        if target.before_norm:
            raise Unsupported(
                f"this head reads the last layer's output before the final norm, which {type(self.model).__name__} does not give of "
                "prompts that it reads itself, such as those with images: use 'nasd', 'speculative' or another head"
            )
        before = self.inputs.get(CACHE)
        cache = DynamicCache(config=self.model.config.get_text_config()) if before is None else copy.deepcopy(before)
        new = self.keep.shape[1] - int(cache.get_seq_length())
        asked = {**self.inputs, CACHE: cache, "output_hidden_states": target.taps is not None}
        out = first_pass(self.model, self.ids, self.config, asked)
        held = read_cache(cache, target.depth)
        self._check(cache, target.depth)
        assert held is not None
        import_past(target.state, held, self.keep)
        kept = self.keep[:, -new:]
        order = torch.argsort((~kept).int(), dim=1, stable=True)[:, : int(kept.sum(1).max()), None]
        states = out.hidden_states if target.taps is not None else (out.logits[..., :0].expand(-1, new, -1),)
        taken = [states[tap] for tap in target.taps] if target.taps else [states[-1]]
        features = torch.cat(taken, -1)[:, -new:]
        return out.logits[:, -1], features.gather(1, order.expand(-1, -1, features.shape[-1]))

    def _check(self, cache: Any, layers: int) -> None:
        length = int(cache.get_seq_length())
        for layer in cache.layers[:layers]:
            if is_recurrent(layer) or getattr(layer, "is_sliding", False) or layer.keys is None:  # it reads another's
                continue
            if layer.keys.shape[2] != length or length != self.keep.shape[1]:
                raise Unsupported(
                    f"{type(self.model).__name__} keeps {layer.keys.shape[2]} keys in a layer behind a text of {self.keep.shape[1]} "
                    "tokens: what it reads besides tokens lies in its cache, and cannot be combined with assistant="
                )
