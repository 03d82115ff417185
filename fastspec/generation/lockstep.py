"""Rounds in which all rows take the same number of tokens, for processors and criteria that must see every step of the whole batch.

A user's own logits processor or stopping criterion may keep a state of its own. It gives plain decoding's output only where it sees plain
decoding's calls: the whole batch [B, T], every step once, in order, and never a text that does not stand. So a round ends for all rows at
the first step at which any row leaves its tree. What other rows would have accepted further is drafted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from fastspec.generation.tree import TokenTree, Verdict


class Steps(Protocol):
    """Plain decoding's own step: it processes scores, chooses a token per row and asks the criteria."""

    over: bool
    """Whether the call has ended."""
    lengths: list[int | None]
    """How many tokens each row had when it ended; None for a row that goes on. A row that has ended emits `pad_token` from then on."""
    pad_token: int

    def __call__(self, logits: Tensor, scores: Tensor | None = None) -> list[int]:
        """Take the next step from raw logits [B, V] -> the token of every row. `scores` [B, V] stand in for the processed logits."""


def fill_ended(tree: TokenTree, root: Tensor, ended: Tensor, pad_token: int) -> TokenTree:
    """The tree with `pad_token` at every draft node of the rows that have ended [B] bool, below root [B]: what these rows will emit."""
    tokens = torch.where(ended[:, None], pad_token, tree.tokens)
    return replace(tree, tokens=torch.cat((torch.where(ended, root, tokens[:, 0])[:, None], tokens[:, 1:]), 1))


def walk_in_step(tree: TokenTree, logits: Tensor, steps: Steps, scores: Tensor | None = None) -> Verdict:
    """Walk all rows down their trees together, a step of plain decoding at a time; logits and scores are [B, N, V].

    Every token is what `steps` chooses from the row's own logits, so the output is plain decoding's whatever the trees hold.
    """
    rows = torch.arange(len(tree.tokens), device=logits.device)
    children = _children(tree)
    paths = [[0] for _ in children]
    while True:
        at = torch.tensor([path[-1] for path in paths], device=logits.device)
        chosen = steps(logits[rows, at], None if scores is None else scores[rows, at])
        found = [below.get((path[-1], token)) for below, path, token in zip(children, paths, chosen, strict=True)]
        below = [node for node in found if node is not None]
        if steps.over or len(below) < len(found) or len(paths[0]) == tree.max_path:
            break
        for path, node in zip(paths, below, strict=True):
            path.append(node)
    accepted = len(paths[0]) - 1
    full = [path + [path[-1]] * (tree.max_path - len(path)) for path in paths]
    made = [torch.tensor(values, device=logits.device) for values in (full, [accepted] * len(paths), chosen)]
    return Verdict(made[0], made[1], made[2])


def _children(tree: TokenTree) -> list[dict[tuple[int, int], int]]:
    """Per row, (node, token) -> the child of this token; of several the one with the longest path below it."""
    found = []
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        heights = [0] * len(tokens)
        for node in range(len(tokens) - 1, 0, -1):
            heights[parents[node]] = max(heights[parents[node]], heights[node] + 1)
        row: dict[tuple[int, int], int] = {}
        for node in range(1, len(tokens)):
            key = parents[node], tokens[node]
            if key not in row or heights[node] > heights[row[key]]:
                row[key] = node
        found.append(row)
    return found


def until_end(tokens: Sequence[int], length: int | None, before: int) -> list[int]:
    """Of a row's tokens, those up to its end at `length`; `before` tokens were there already."""
    return list(tokens if length is None else tokens[: max(0, length - before)])
