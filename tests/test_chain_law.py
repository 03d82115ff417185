"""Drafts of an adaptive length, enumerated: what the loop says has the target's law, however long the chains of a round are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers_enumerate import PROCESSES, Make, Tables, agree, closed, enumerated, law_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fastspec.generation import rounds
from fastspec.generation.draft_model import ChainDrafter, Length
from fastspec.generation.tree import TokenTree
from fastspec.generation.verify import walk_drawn

VOCAB = 2
SEEN: Counter[int] = Counter()
"""How often a round had so many drafts."""


class Counted(ChainDrafter):
    def propose(self, extent):
        tree = super().propose(extent)
        SEEN[tree.tokens.shape[1] - 1] += 1
        return tree


def drafting(seed: int, length: Length, process: Any, kind: Any = Counted) -> Make:
    def make(rows: int, ops: Any) -> tuple[Any, Any]:
        target, draft = (Tables(seed, name, rows, VOCAB) for name in ("target", "draft"))
        return target, kind(draft, length, branches=1, vocab=VOCAB, draft_vocab=VOCAB, ops=ops, process=process)

    return make


def lawful(seed: int, length: Length, process: Any, limit: int, kind: Any = Counted, companions: int = 0) -> bool:
    """Whether the loop's law is the target's. One batch a script: how long a chain is depends on the rows beside."""
    found = enumerated(drafting(seed, length, process, kind), process, limit, 1, companions)
    return agree(found, closed(VOCAB, limit, partial(law_of, Tables(seed, "target", 1, VOCAB), process=process)))


@pytest.mark.parametrize("cost, limit, companions", [(0.1, 3, 0), (0.3, 4, 0), (0.3, 2, 1)])
@given(st.integers(0, 10**6), st.sampled_from(PROCESSES[1:]))
@settings(max_examples=3, deadline=None)
def test_chains_of_any_length_say_what_the_target_says_alone(cost, limit, companions, seed, process):
    assert lawful(seed, Length(3, cost), process, limit, companions=companions)


def test_what_is_enumerated_has_rounds_of_every_length():
    SEEN.clear()
    assert lawful(2, Length(3, 0.3), PROCESSES[1], 4)
    assert {1, 2, 3} <= set(SEEN)


class UnlikelyDraftsLeftOut(ChainDrafter):
    """Whether a token is handed on depends on which one it is."""

    def propose(self, extent):
        tree = super().propose(extent)
        return tree if tree.q is None else replace(tree, q=tree.q * (tree.tokens != 1)[..., None])


class CutAfterTheDraw(ChainDrafter):
    """How long the chain is depends on the token that would come last."""

    def propose(self, extent):
        tree = super().propose(extent)
        count = tree.tokens.shape[1] - (int(tree.tokens[0, -1]) == 1)
        return TokenTree.chain(tree.tokens[:, :count], tree.max_path, None if tree.q is None else tree.q[:, :count])


class QOfAnotherPrefix(ChainDrafter):
    def propose(self, extent):
        tree = super().propose(extent)
        return tree if tree.q is None else replace(tree, q=tree.q[:, [0, 1, *range(1, tree.q.shape[1] - 1)]])


class UnprocessedQ(ChainDrafter):
    """Drawn at the temperature 0.6, and given as if at 1."""

    def propose(self, extent):
        tree = super().propose(extent)
        return tree if tree.q is None else replace(tree, q=tree.q**0.6 / (tree.q**0.6).sum(-1, keepdim=True))


BUGS = [UnlikelyDraftsLeftOut, CutAfterTheDraw, QOfAnotherPrefix, UnprocessedQ]


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug):
    assert not any(lawful(seed, Length(2, 0.3), PROCESSES[1], 3, bug) for seed in range(3))


def test_a_bonus_that_is_drawn_again_is_found(monkeypatch):
    """From the target's own law rather than from what is left of it."""

    def drawn_again(tree, scores, q, uniform, ops):
        verdict = walk_drawn(tree, scores, q, uniform, ops)
        last = verdict.path.gather(1, verdict.accepted[:, None])
        own = scores.gather(1, last[..., None].expand(-1, -1, scores.shape[-1]))[:, 0]
        return replace(verdict, bonus=ops.pick(torch.log_softmax(own, -1), uniform[:, 0]))

    monkeypatch.setattr(rounds, "walk_drawn", drawn_again)
    assert not any(lawful(seed, Length(2, 0.3), PROCESSES[1], 3) for seed in range(3))
