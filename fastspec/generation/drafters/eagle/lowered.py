"""A head that drafts in a lower precision than its target computes in.

Drafts are judged by the target, so a head's rounding can cost accepted tokens and never changes what is said. What it brings is time: on
the CPU a draft pass takes as long as reading the head's weights, and half as many bytes are read in half the time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fastspec.generation.drafters.eagle.head import EagleHead, RMSNorm
from fastspec.generation.layers.decoder import is_plain

SOURCE = "_lowered_from"  # set on a twin: its head
READS = "_embed_tokens", "_target_lm_head"


def lowered(head: EagleHead, dtype: torch.dtype | None) -> EagleHead:
    """What drafts for an fp32 head where a backend drafts in `dtype`: a twin with weights of that dtype, which the head keeps.

    The head itself for None, for a head of another dtype, for one that drafts with the target's whole LM head, and for one of whose modules
    any is more than its weights (hooks, parametrizations, other classes).
    """
    borrows = head.lm_head is None and head.lm_head_map is None
    if dtype is None or head.fc.weight.dtype is not torch.float32 or borrows or not _is_weights(head):
        head.__dict__["_lowered"] = None
        return head
    twin: EagleHead | None = head.__dict__.get("_lowered")
    fits = twin is not None and twin.fc.weight.dtype is dtype and all(twin.__dict__[name] is head.__dict__[name] for name in READS)
    if twin is None or not fits or not follow(twin):
        twin = head.__dict__["_lowered"] = _twin(head, dtype)
    return head if twin is None else twin


@torch.no_grad()
def follow(twin: EagleHead) -> bool:
    """Give a twin its head's weights anew, in place: the head may have been trained since, which nothing tells reliably. False, and nothing
    has happened, where the head's weights have other shapes than the twin's. A head that is no twin is left as it is."""
    head = twin.__dict__.get(SOURCE)
    if head is None:
        return True
    mine, theirs = dict(_weights(twin)), dict(_weights(head))
    if {name: each.shape for name, each in mine.items()} != {name: each.shape for name, each in theirs.items()}:
        return False
    for name, weight in mine.items():
        weight.copy_(theirs[name])
    _take(twin, head)
    twin.renew()
    return True


@torch.inference_mode(False)
@torch.no_grad()
def _twin(head: EagleHead, dtype: torch.dtype) -> EagleHead | None:
    """A twin, or None where a head has other modules than its configuration names."""
    with torch.device("meta"):
        twin = EagleHead(head.config)
    modules = dict(twin.named_modules())
    for name, weight in _weights(head):
        place, _, attribute = name.rpartition(".")
        if place not in modules:
            return None
        setattr(modules[place], attribute, nn.Parameter(weight.detach().to(dtype), requires_grad=False))
    if any(weight.is_meta for weight in twin.parameters()):
        return None
    for name in READS:
        twin.__dict__[name] = head.__dict__[name]
    twin.__dict__[SOURCE] = head
    _take(twin, head)
    return twin.eval()


def _take(twin: EagleHead, head: EagleHead) -> None:
    """What is no weight, and the same for both."""
    twin.d2t, twin.inv_freq, twin.rope_scale = head.d2t, head.inv_freq, head.rope_scale


def _is_weights(head: EagleHead) -> bool:
    """Whether what a head computes follows from its class and its weights."""
    for module in head.modules():
        if isinstance(module, nn.Linear):
            if not is_plain(module):
                return False
        elif isinstance(module, RMSNorm):
            if type(module.weight) is not nn.Parameter or module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
                return False
        elif any(True for _ in module.parameters(recurse=False)):
            return False
    return True


def _weights(head: EagleHead) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its name, one that two modules share under both."""
    return head.named_parameters(remove_duplicate=False)
