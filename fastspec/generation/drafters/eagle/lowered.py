"""A head that drafts in a lower precision than its target computes in.

Drafts are judged by the target, so a head's rounding can cost accepted tokens and never changes what is said. What it brings is time: on
the CPU a draft pass takes as long as reading the head's weights, and half as many bytes are read in half the time.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Hashable

import torch

from fastspec.generation.drafters.eagle.head import EagleHead

_twins: weakref.WeakKeyDictionary[EagleHead, EagleHead] = weakref.WeakKeyDictionary()
"""Head -> the twin that drafts for it; a twin knows its head by a weak reference, so that neither keeps the other."""
SOURCE, BOUND = "_lowered_from", "_lowered_with"  # set on a twin: its head, and what that reads beside its own weights


def lowered(head: EagleHead, dtype: torch.dtype | None) -> EagleHead:
    """What drafts for an fp32 head where a backend drafts in `dtype`: a twin with weights of that dtype, kept for as long as the head.

    The head itself for None, for a head of another dtype, and for one that drafts with the target's whole LM head, which stays as it is.
    """
    if dtype is None or head.fc.weight.dtype is not torch.float32 or (head.lm_head is None and head.lm_head_map is None):
        return head
    twin = _twins.get(head)
    if twin is None or twin.fc.weight.dtype is not dtype or twin.__dict__[BOUND] != _bound(head):
        twin = _twins[head] = _twin(head, dtype)
    else:
        follow(twin)
    return twin


@torch.no_grad()
def follow(twin: EagleHead) -> None:
    """Give a twin its head's weights anew, in place: the head may have been trained since, which nothing tells reliably, and 12 million
    take 3 ms. Nothing where the head is no twin, or its own head is gone."""
    head = twin.__dict__[SOURCE]() if SOURCE in twin.__dict__ else None
    if head is None:
        return
    for mine, theirs in zip(twin.parameters(), head.parameters(), strict=True):
        mine.copy_(theirs)
    twin.renew()


def _twin(head: EagleHead, dtype: torch.dtype) -> EagleHead:
    borrowed = [part for part in (head.__dict__["_embed_tokens"], head.__dict__["_target_lm_head"]) if part is not None]
    kept = {id(part): part for part in borrowed} | {id(head.__dict__["_joined"]): None}  # which the twin makes in its own dtype
    twin = copy.deepcopy(head, kept).to(dtype)
    twin.__dict__.update({SOURCE: weakref.ref(head), BOUND: _bound(head)})
    return twin


def _bound(head: EagleHead) -> Hashable:
    return id(head.__dict__["_embed_tokens"]), id(head.__dict__["_target_lm_head"]), id(head.inv_freq), head.rope_scale
