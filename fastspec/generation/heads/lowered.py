"""Twins of heads in a lower precision than their target's: rounding can cost accepted tokens, never the output's, and
half as many bytes are read in half the time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fastspec.generation.decoder_layer import is_plain
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.heads.module import EagleHead, RMSNorm


def lowered(head: BoundHead, dtype: torch.dtype | None) -> BoundHead:
    """The twin of an fp32 head with weights of `dtype`, in which a backend drafts; the head keeps it.

    The head itself for None, for a head of another dtype, for one that drafts with the target's whole LM head, and for
    one of whose modules any is more than its weights (hooks, parametrizations, other classes).
    """
    module = head.module
    borrows = module.lm_head is None and module.lm_head_map is None
    if dtype is None or module.fc.weight.dtype is not torch.float32 or borrows or not _is_weights(module):
        head.derived.lowered = None
        return head
    twin = head.derived.lowered
    if twin is None or twin.module.fc.weight.dtype is not dtype or not follow(twin):
        twin = head.derived.lowered = _twin(head, dtype)
    return head if twin is None else twin


@torch.no_grad()
def follow(twin: BoundHead) -> bool:
    """Give a twin its head's weights anew, in place: the head may have been trained since. False, and nothing has
    happened, where these have other shapes. A head that is no twin is left as it is."""
    if twin.source is None:
        return True
    head = twin.source.module
    mine, theirs = dict(_weights(twin.module)), dict(_weights(head))
    if {name: each.shape for name, each in mine.items()} != {name: each.shape for name, each in theirs.items()}:
        return False
    for name, weight in mine.items():
        weight.copy_(theirs[name])
    _take(twin.module, head)
    twin.renew()
    return True


@torch.inference_mode(False)
@torch.no_grad()
def _twin(head: BoundHead, dtype: torch.dtype) -> BoundHead | None:
    """A twin, or None where a head has other modules than its configuration names."""
    with torch.device("meta"):
        twin = EagleHead(head.config)
    modules = dict(twin.named_modules())
    for name, weight in _weights(head.module):
        place, _, attribute = name.rpartition(".")
        if place not in modules:
            return None
        setattr(modules[place], attribute, nn.Parameter(weight.detach().to(dtype), requires_grad=False))
    if any(weight.is_meta for weight in twin.parameters()):
        return None
    _take(twin, head.module)
    return BoundHead(twin.eval(), head.binding, head.rows, source=head)


def _take(twin: EagleHead, head: EagleHead) -> None:
    """Share the buffers."""
    twin.d2t, twin.inv_freq, twin.rope_scale = head.d2t, head.inv_freq, head.rope_scale


def _is_weights(head: EagleHead) -> bool:
    """Whether what a head computes follows from its class and its weights."""
    for module in head.modules():
        if isinstance(module, nn.Linear):
            if not is_plain(module):
                return False
        elif isinstance(module, RMSNorm):
            hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
            if hooked or type(module.weight) is not nn.Parameter:
                return False
        elif any(True for _ in module.parameters(recurse=False)):
            return False
    return True


def _weights(head: EagleHead) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its name, one that two modules share under both."""
    return head.named_parameters(remove_duplicate=False)
