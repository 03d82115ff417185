"""The forms of a tree that EAGLE's code has, dense mask and paths to the leaves, and the share of drafts accepted."""

from __future__ import annotations

import torch
from helpers.trees import trees
from hypothesis import given
from hypothesis import strategies as st

import fastspec
from fastspec.generation.stats import Stats
from fastspec.generation.tree import TokenTree


@given(tree=trees())
def test_a_node_sees_itself_and_what_its_parent_sees(tree: TokenTree) -> None:
    rows, nodes = tree.tokens.shape
    for row in range(rows):
        wanted = torch.zeros(nodes, nodes, dtype=torch.bool)
        for node in range(nodes):
            wanted[node] = wanted[int(tree.parents[row, node])] if node else False
            wanted[node, node] = True
        assert tree.mask[row].equal(wanted)


@given(tree=trees())
def test_paths_lead_from_the_root_to_every_leaf(tree: TokenTree) -> None:
    rows, nodes = tree.tokens.shape
    found = tree.retrieve_indices
    for row in range(rows):
        parents = tree.parents[row].tolist()
        wanted = []
        for leaf in (node for node in range(nodes) if node not in parents[1:]):
            path = [leaf]
            while path[0]:
                path.insert(0, parents[path[0]])
            wanted.append(path)
        told = [[node for node in path if node >= 0] for path in found[row].tolist()]
        assert [path for path in told if path] == wanted and not any(told[len(wanted) :])
        assert all(path == sorted(path, key=lambda node: node < 0) for path in found[row].tolist())  # -1 at the end


def test_they_are_eagles_of_its_published_tree() -> None:
    """`retrieve_indices` and `tree_mask` of EAGLE-1's tree, built as its code does: leaves by their child ranks, and a
    node's ancestors."""
    paths = fastspec.Eagle1().tree()
    at = {path: number for number, path in enumerate(paths, 1)} | {(): 0}
    parents = torch.tensor([[0, *(at[path[:-1]] for path in paths)]])
    tree = TokenTree.from_parents(torch.zeros_like(parents), parents)
    leaves = [path for path in paths if not any(other[:-1] == path for other in paths)]
    wanted = [[at[path[:n]] for n in range(len(path) + 1)] + [-1] * (5 - len(path)) for path in leaves]
    assert tree.retrieve_indices[0].tolist() == wanted
    assert all(tree.mask[0, at[path], at[path[:n]]] for path in paths for n in range(len(path) + 1))
    assert int(tree.mask.sum()) == 1 + sum(len(path) + 1 for path in paths)


def test_nodes_beyond_the_first_word_of_ancestors_are_seen() -> None:
    tree = TokenTree.chain(torch.zeros(1, 130, dtype=torch.long))
    assert tree.mask[0].equal(torch.ones(130, 130, dtype=torch.bool).tril())
    assert tree.retrieve_indices.tolist() == [[list(range(130))]]


@given(accepted=st.integers(0, 9), rejected=st.integers(0, 9))
def test_the_rate_is_accepted_over_drafted(accepted: int, rejected: int) -> None:
    stats = Stats()
    stats.count_rows([(accepted + 1, accepted, accepted + rejected)], has_drafts=True)
    assert stats.acceptance_rate == (accepted / (accepted + rejected) if accepted + rejected else 0.0)
    assert stats.acceptance_length == accepted + 1
