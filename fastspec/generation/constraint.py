"""Constraints on an answer's tokens, such as a grammar: bit masks of the tokens that may follow each node of a tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from fastspec.generation.tree import TokenTree


class Constraint(Protocol):
    """Constraint on the tokens of one answer, whose state it holds."""

    def masks(self, answer: list[int], tokens: list[int], parents: list[int]) -> Tensor:
        """Masks [N, W] int32 of the tokens that may follow each node of a tree, 32 tokens to a word, on the CPU.

        Node 0 stands for all of `answer`; the others are drafts behind it, parents before their children. Where a draft
        itself is not allowed, all bits of it and of what is below it are 1: no walk gets there.
        """


def nodes_of(tree: TokenTree) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and parents of a tree's nodes, row by row. Of roots alone both are 0, which stands for the answer: masks
    are then made while a device scores them."""
    if tree.tokens.shape[1] == 1:
        roots = [[0]] * len(tree.tokens)
        return roots, roots
    return tree.tokens.tolist(), tree.parents.tolist()


def masked(logits: Tensor, masks: Mapping[int, Tensor]) -> Tensor:
    """logits [B, N, V] with -inf at the tokens that the masks [N, W] of some rows forbid; tokens past a mask's last bit
    are forbidden. Other rows stay as they are."""
    if not masks:
        return logits
    words = torch.stack(list(masks.values())).to(logits.device).view(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    forbidden = ((words[..., None] >> shifts) & 1 == 0).flatten(-2)
    lacking = logits.shape[-1] - forbidden.shape[-1]
    forbidden = torch.nn.functional.pad(forbidden, (0, lacking), value=True)  # cut where it is longer
    rows = torch.tensor(list(masks), device=logits.device)
    return logits.index_copy(0, rows, logits[rows].masked_fill(forbidden, -torch.inf))
