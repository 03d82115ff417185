"""The prompts of a call: real tokens, inputs besides tokens, virtual tokens, and prompts that plain decoding reads
otherwise.

PEFT puts its `prepare_inputs_for_generation` on the base model in its own `generate`. Prompt learning puts virtual
tokens in front: as keys and values (prefix tuning), or as embeddings (prompt tuning, p-tuning). Both come to keys and
values that an assisted call begins with, as with a cache of the user's own; adapters of weights leave inputs as they
are. All is read from the model without importing PEFT.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from fastspec.errors import Unsupported
from fastspec.generation.layer_state import LayerCache
from fastspec.generation.target import Target
from fastspec.kernels.attention.reference import Span
from fastspec.patches.hf.cache import CACHE, cache_argument, import_past, is_recurrent, read_cache
from fastspec.patches.hf.compat import first_pass, is_besides_tokens
from fastspec.patches.hf.config_fields import recurrent_layers
from fastspec.patches.hf.families import Adapter
from fastspec.patches.hf.limits import LAYER_KINDS, counts_padding, layer_spans
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import is_wrapped, may_see_ahead
from fastspec.patches.hf.replaced import where_defined
from fastspec.patches.hf.tree_check import check_trust


def real_tokens(model: Any, ids: Tensor, mask: Tensor | None, config: Any, past: int) -> Tensor:
    """Mask of real tokens, [B, past + T] bool, or [B, T] where the mask is of the ids alone: the call's, or as
    transformers infers it. Raises Unsupported for another width, and for numbers besides 0 and 1."""
    rows, width = ids.shape
    if mask is None:
        held = getattr(config, "_pad_token_tensor", None)
        inferred = model._prepare_attention_mask_for_generation(ids, config, {}) if held is not None else None
        keep = torch.ones_like(ids, dtype=torch.bool) if inferred is None or inferred.dim() != 2 else inferred.bool()
    else:
        keep = mask.to(ids.device).bool()
        if not bool((mask.to(ids.device) == keep).all()):
            raise Unsupported(
                "attention_mask has numbers besides 0 and 1, such as those of texts packed into one row: pass each "
                "text as a row of its own, with 1 for its tokens and 0 for padding"
            )
        keep = keep.repeat_interleave(max(1, rows // max(1, keep.shape[0])), 0)
    if past and keep.shape[1] == past + width:
        return keep
    if keep.shape[1] != width:
        raise Unsupported(
            f"attention_mask is {keep.shape[1]} wide and input_ids {width}: they must agree, the tokens of "
            f"{CACHE} counted in both or in the mask alone"
        )
    return keep


def besides_tokens(model_kwargs: dict[str, Any]) -> set[str]:
    """The inputs besides tokens that a call brings."""
    return {name for name in given_inputs(model_kwargs) if is_besides_tokens(name)}


def given_inputs(model_kwargs: dict[str, Any]) -> set[str]:
    """The inputs of a call that hold something."""
    return {
        name
        for name, value in model_kwargs.items()
        if value is not None and not (isinstance(value, dict) and not value)
    }


def sees_ahead(model: Any, adapter: Adapter | None) -> bool:
    """True where prompt tokens see later ones, so that the model's own pass reads prompts. Raises Unsupported."""
    besides = is_wrapped(model) or may_see_ahead(model)
    checked = besides if adapter is not None else not any(recurrent_layers(model.config))  # these are refused later
    return checked and not check_trust(model, adapter=adapter)


def position_shift(model: Any, ids: Tensor, keep: Tensor, model_kwargs: dict[str, Any]) -> Tensor | None:
    """Distance between the position of the token after a prompt and the number of tokens before it, [B] int64; None for
    a model that reads nothing but tokens. keep [B, T] bool tells which tokens are real.

    A grid of image tokens takes fewer positions than it has tokens, or more, and some models count from one. Every new
    token is one further than the prompt's last, whose position the model prepares; without any, padding counts too.
    """
    padding = (~keep).sum(1)
    if counts_padding(model) and bool(padding.any()):
        raise Unsupported(
            f"the forward of this {type(model).__name__} is someone else's "
            f"({where_defined(model.forward)}) and names no position_ids, so that transformers prepares none for "
            "padded rows: decorate it with functools.wraps(type(model).forward), or pass prompts of one length"
        )
    if not is_wrapped(model):
        return None
    inputs = model.prepare_inputs_for_generation(ids, is_first_iteration=True, **model_kwargs)
    positions = inputs.get("position_ids")
    if positions is None:
        return padding
    last = positions[..., -1] if positions.dim() == 2 else positions[-1, :, -1]
    return last.to(keep.device).expand(len(keep)) + 1 - keep.sum(1)


@dataclass(frozen=True, slots=True)
class OwnPrefill:
    """The model's own pass over prompts ids [B, T] with `inputs` of `generate`, behind what their cache holds.

    keep [B, past + new] bool tells real tokens. It may run more than once: the cache that it fills is a copy.
    """

    model: Any
    config: Any
    ids: Tensor
    keep: Tensor
    inputs: dict[str, Any]

    def __call__(self, target: Target) -> tuple[Tensor, Tensor]:
        """Let a target stand behind the prompts -> logits of each last token [B, V], and features [B, new, F] of tokens
        that the cache did not hold, without left padding. Raises Unsupported where more than keys and values are
        left."""
        assert isinstance(target, HFModel)
        if target.before_norm:
            raise Unsupported(
                f"this head reads the last layer's output before the final norm, which {type(self.model).__name__} "
                "does not give of "
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
                    f"{type(self.model).__name__} keeps {layer.keys.shape[2]} keys in a layer behind a text of "
                    f"{self.keep.shape[1]} "
                    "tokens: what it reads besides tokens lies in its cache, and cannot be combined with assistant="
                )


INSTEAD = "pass the whole text of every row, padded on the left alone, without a cache, or leave out assistant="


def refuse_holes(model: Any, keep: Tensor, past: int, limit: int, dropped: Sequence[Span | None]) -> None:
    """Raise Unsupported for a mask keep [B, past + T] bool with holes under which plain decoding, which counts slots,
    sees other tokens than without: they fill up windows and chunks, and a recurrent state decays over them. The call
    has up to `limit` new tokens on a cache of `past`; `dropped` are those of `HFModel`."""
    first = keep.int().argmax(1, keepdim=True)
    holes = ~keep & (torch.arange(keep.shape[1], device=keep.device) > first)
    rows = holes.any(1).nonzero()[:, 0].tolist()
    if not rows:
        return
    read = [span for span in dict.fromkeys(layer_spans(model)) if span is not None]
    left = [span for span in dict.fromkeys(dropped) if span is not None]
    name = type(model).__name__
    for row in rows:
        slots = keep[row].nonzero()[:, 0].cpu()
        where = f"row {row} of attention_mask has {int(holes[row].sum())} zeros behind its first token"
        if any(recurrent_layers(model.config)) and bool(holes[row, past:].any()):
            raise Unsupported(f"{where}, and the recurrent states of {name} go on over them: {INSTEAD}")
        begin = int(keep[row, :past].sum())
        for spans, query in ((read, begin), (left, len(slots))):
            cut = next((span for span in spans if _differs(slots - slots[0], query, limit, span)), None)
            if cut is not None:
                kind = "chunks" if cut.chunk else "a window"
                raise Unsupported(
                    f"{where}, and {name} sees {kind} of {cut.size} tokens, which plain decoding counts padding "
                    f"among: {INSTEAD}"
                )


def refuse_seen_padding(model: Any, keep: Tensor, past: int, held: list[LayerCache] | None, config: Any) -> None:
    """Raise Unsupported where a row's left padding goes on after a cache of `past` tokens, whose recurrent states
    (`held`) have seen some: plain decoding hides it in passes of several tokens alone."""
    rows = ~keep[:, past]
    kinds = recurrent_layers(model.config)
    if not any(kinds) or not bool(rows.any()):
        return
    seen = getattr(config, "prefill_chunk_size", None) == 1 or any(
        bool(state[rows.to(state.device)].any())
        for recurrent, layer in zip(kinds, held or (), strict=False)
        if recurrent
        for state in layer
    )
    if seen:
        raise Unsupported(
            f"rows {rows.nonzero()[:, 0].tolist()} begin with padding that the recurrent states of "
            f"{type(model).__name__} see token by token, of the cache or by prefill_chunk_size=1, and plain decoding "
            f"goes on over: {INSTEAD}"
        )


def _differs(slots: Tensor, begin: int, limit: int, span: Span) -> bool:
    """True where queries from number `begin` on see other tokens by their slots than by their numbers."""
    new = torch.arange(min(max(limit - 1, 0), 2 * span.size), device="cpu")  # the last new token is never read
    slots = torch.cat((slots, slots[-1] + 1 + new))
    number = torch.arange(len(slots), device="cpu")
    first, wanted = (
        each // span.size * span.size if span.chunk else (each - span.size + 1).clamp(min=0) for each in (number, slots)
    )
    return not torch.equal(torch.searchsorted(slots, wanted)[begin:], first[begin:])


def refuse_dropped(model: Any, cache: Any, past: int, config: Any, dropped: Sequence[Span | None]) -> None:
    """Raise Unsupported where a cache keeps less of the text than layers see, and plain decoding goes by more: it is
    static, some of its `past` tokens are gone, or the prompt is read in parts."""
    sizes = [span.size for span in dropped if span is not None]
    if not sizes:
        return
    least, parts = min(sizes), getattr(config, "prefill_chunk_size", None)
    if getattr(cache, "is_compileable", False):
        what = f"a {type(cache).__name__} brings masks with windows of {least} tokens"
    elif past >= least:
        what = f"the {past} tokens of {CACHE} are kept in windows of {least}"
    elif parts is not None:
        what = f"prefill_chunk_size={parts} reads a prompt in windows of {least} tokens"
    else:
        return
    raise Unsupported(
        f"{what}, by a setting that the forward of {type(model).__name__} does not read "
        f"({' or '.join(LAYER_KINDS.values())}): set it to None, or pass whole prompts without a cache"
    )


AS_CACHE = ("PREFIX_TUNING", "CARTRIDGE")
AS_EMBEDDINGS = ("PROMPT_TUNING", "P_TUNING")


def peft_of(model: Any) -> Any:
    """The PEFT model whose `generate` runs, or None."""
    owner: Any = getattr(getattr(model, "prepare_inputs_for_generation", None), "__self__", None)
    return owner if type(owner).__module__.startswith("peft.") else None


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
