"""Drawn trees of tokens, and their paths."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from fastspec.generation.engine.round_program import Scored
from fastspec.generation.tree import TokenTree

VOCAB = 3


def drawn_tree(rows: int, nodes: int, generator: torch.Generator) -> TokenTree:
    """Few tokens, so that equal siblings and long paths are common."""
    parents = (torch.rand(rows, nodes, generator=generator) * torch.arange(nodes)).long()
    return TokenTree.from_parents(torch.randint(0, VOCAB, (rows, nodes), generator=generator), parents)


def scored_tree(rows: int, nodes: int, q: bool = False, half: bool = False) -> Scored:
    """A tree of many rows, so that no two rules walk all of them alike, and logits that differ by token and by node."""
    generator = torch.Generator().manual_seed(1)
    tree = drawn_tree(rows, nodes, generator)
    if q:
        odds = torch.rand(rows, nodes, VOCAB, generator=generator).softmax(-1)
        tree = TokenTree(tree.tokens, tree.parents, tree.depths, tree.ancestors, tree.max_path, odds)
    logits = torch.randn(rows, nodes, VOCAB, generator=generator)
    return Scored(tree, logits.half() if half else logits, logits[..., :0])


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    nodes, rows = draw(st.integers(1, 9)), 2
    parents = [[0] + [draw(st.integers(0, node - 1)) for node in range(1, nodes)] for _ in range(rows)]
    tokens = [[draw(st.integers(0, 96)) for _ in range(nodes)] for _ in range(rows)]
    return TokenTree.from_parents(torch.tensor(tokens), torch.tensor(parents), nodes)


def paths(tree: TokenTree, row: int) -> list[torch.Tensor]:
    """The tokens from the root to each node of a row."""
    found = []
    for node in range(tree.tokens.shape[1]):
        path, at = [], node
        while at:
            path.append(at)
            at = int(tree.parents[row, at])
        found.append(tree.tokens[row, [0, *reversed(path)]])
    return found


def random_parents(rows: int, nodes: int, generator: torch.Generator) -> Tensor:
    index = torch.arange(nodes)
    return (torch.rand(rows, nodes, generator=generator) * index).long().clamp(max=(index - 1).clamp(min=0))
