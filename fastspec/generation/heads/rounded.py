"""Heads in 8 bits: the weights of their linear layers rounded to codes with a scale for each line.

Drafts only guess, so rounding can cost accepted tokens, never the output's, and half as many bytes are read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.heads.module import DraftHead, EagleHead, Layer, MtpHead
from fastspec.generation.heads.rounded_linear import RoundedLinear


def is_rounded(head: DraftHead) -> bool:
    """True of a head whose products are read in 8 bits."""
    return isinstance(head.fc, RoundedLinear)


@torch.inference_mode(False)  # calls in any mode draft with it
@torch.no_grad()
def rounded(head: BoundHead) -> BoundHead:
    """A copy of a head whose products are rounded, once: later changes of the head's weights are not seen. What it
    borrows of its target stays shared, and is not rounded but for the rows of a draft vocabulary, which are copies. A
    head that is rounded already stays itself.

    Raises ValueError, naming it, for a product that is no `torch.nn.Linear`.
    """
    module = head.module
    if is_rounded(module):
        return head
    made: dict[int, Any] = {id(module.binding): None}
    for name, layer in products(head):
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"{name} is a {type(layer).__name__}, and torch.nn.Linear layers are rounded")
        made[id(layer)] = RoundedLinear.of(layer)
    return BoundHead(copy.deepcopy(module, made), head.binding, head.rows)


def products(head: BoundHead) -> list[tuple[str, nn.Module]]:
    """The head's own layers that are multiplied when it drafts, by their names. The matrix that makes an LM head of the
    target's rows is not among them, nor are mixtures of experts."""
    module, family = head.module, head.binding.family
    mine: set[nn.Module] = {each for each in (module.fc, module.lm_head) if each is not None}
    if isinstance(module, EagleHead):
        for layer in cast(Iterable[Layer], module.layers):
            attn, mlp = layer.self_attn, layer.mlp
            mine |= {attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj}
    elif isinstance(module, MtpHead) and family is not None:
        mine |= set(family.products(module.layer))
    return [(name, each) for name, each in module.named_modules() if each in mine]
