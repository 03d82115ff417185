"""Drafts of an adaptive length, enumerated: what the loop says has the target's distribution, however long the chains
of a round are, and where rounds go without drafts; and what such rounds save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.enumerate import PROCESSES, Make, Tables, agree, closed, distribution_of, enumerated
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from fastspec.generation.drafters import policy as draft_length
from fastspec.generation.drafters.chain import ChainDrafter
from fastspec.generation.drafters.policy import BUDGET, LARGEST_BUDGET, PROBES, DraftBudget, Length
from fastspec.generation.engine import verifier
from fastspec.generation.tree import TokenTree
from fastspec.generation.verify import walk_drawn

VOCAB = 2
SEEN: Counter[int] = Counter()
"""How often a round had so many drafts."""


class Counted(ChainDrafter):
    """Holds every node's q to the draft model's distribution after the whole text and the drafts before the node."""

    def begin(self, ids, counts, features, root):
        self.emitted = [[*text, first] for text, first in zip(ids.tolist(), root.tolist(), strict=True)]
        super().begin(ids, counts, features, root)

    def propose(self, extent):
        tree = super().propose(extent)
        SEEN[tree.tokens.shape[1] - 1] += 1
        for row, emitted in enumerate(self.emitted):
            for node in range(1, tree.tokens.shape[1] if self.alive[row] else 1):
                own = distribution_of(self.draft, (*emitted, *tree.tokens[row, 1:node].tolist()), self.process)
                torch.testing.assert_close(
                    tree.q[row, node].double(), torch.tensor(own, dtype=torch.float64), rtol=1e-5, atol=1e-6
                )
        return tree

    def catch_up(self, tokens, counts):
        super().catch_up(tokens, counts)
        SEEN[0] += tokens.shape[1]
        for emitted, more in zip(self.emitted, tokens.tolist(), strict=True):
            emitted += more

    def observe(self, tree, verdict, logits, features, active, extent):
        super().observe(tree, verdict, logits, features, active, extent)
        for row, emitted in enumerate(self.emitted):
            emitted += verdict.tokens(tree)[row, : int(verdict.accepted[row]) + 1].tolist() if active[row] else []


def drafting(seed: int, length: Length, process: Any, kind: Any = Counted) -> Make:
    def make(rows: int, ops: Any) -> tuple[Any, Any]:
        target, draft = (Tables(seed, name, rows, VOCAB) for name in ("target", "draft"))
        return target, kind(draft, length, branches=1, vocab=VOCAB, draft_vocab=VOCAB, ops=ops, process=process)

    return make


def lossless(seed: int, length: Length, process: Any, limit: int, kind: Any = Counted, companions: int = 0) -> bool:
    """Whether the loop's distribution is the target's. One batch a script: how long a chain is depends on the rows
    beside."""
    found = enumerated(drafting(seed, length, process, kind), process, limit, 1, companions)
    return agree(
        found, closed(VOCAB, limit, partial(distribution_of, Tables(seed, "target", 1, VOCAB), process=process))
    )


@pytest.mark.some("0.1-3-0", "0.3-2-1")
@pytest.mark.parametrize("cost, limit, companions", [(0.1, 3, 0), (0.3, 4, 0), (0.3, 2, 1)])
@given(st.integers(0, 10**6), st.sampled_from(PROCESSES[1:]))
@examples(3)
def test_chains_of_any_length_say_what_the_target_says_alone(cost, limit, companions, seed, process):
    assert lossless(seed, Length(3, cost), process, limit, companions=companions)


def test_what_is_enumerated_has_rounds_of_every_length():
    SEEN.clear()
    assert lossless(2, Length(3, 0.3), PROCESSES[1], 4)
    assert {1, 2, 3} <= set(SEEN)


@contextmanager
def scarce(credit: float, pause: int) -> Iterator[None]:
    """With a credit that a round or two use up, and so many rounds without drafts then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_length, "BUDGET", credit)
        patch.setattr(draft_length, "LONGEST_PAUSE", pause)
        yield


@pytest.mark.some("1-1-4-0", "1-2-5-0", "1-1-3-1")
@pytest.mark.parametrize("most, pause, limit, companions", [(1, 1, 4, 0), (2, 1, 5, 0), (1, 2, 5, 0), (1, 1, 3, 1)])
@given(st.integers(0, 10**6), st.sampled_from(PROCESSES[1:]), st.sampled_from([0.0, 0.2, 0.5]))
@examples(3)
def test_rounds_without_drafts_leave_the_distribution_as_it_is(most, pause, limit, companions, seed, process, credit):
    with scarce(credit, pause):
        assert lossless(seed, Length(most, 0.3, 0.1), process, limit, companions=companions)


def test_what_is_enumerated_has_rounds_without_drafts_and_drafts_behind_them():
    SEEN.clear()
    with scarce(0.1, 1):
        assert lossless(2, Length(2, 0.3), PROCESSES[1], 5)
    assert {0, 1, 2} <= set(SEEN)


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


class NoDraftsAfterTheDraw(ChainDrafter):
    """A round goes without its drafts where the first of them looks bad."""

    def propose(self, extent):
        tree = super().propose(extent)
        return TokenTree.root_only(self.root) if int(tree.tokens[0, -1]) == 1 else tree


BUGS = [UnlikelyDraftsLeftOut, CutAfterTheDraw, QOfAnotherPrefix, UnprocessedQ, NoDraftsAfterTheDraw]


@pytest.mark.some("CutAfterTheDraw", "QOfAnotherPrefix", "UnprocessedQ", "NoDraftsAfterTheDraw")
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug):
    assert not any(lossless(seed, Length(2, 0.3), PROCESSES[1], 3, bug) for seed in range(3))


def test_a_bonus_that_is_drawn_again_is_found(monkeypatch):
    """From the target's own distribution rather than from what is left of it."""

    def drawn_again(tree, scores, q, uniform, ops):
        verdict = walk_drawn(tree, scores, q, uniform, ops)
        last = verdict.path.gather(1, verdict.accepted[:, None])
        own = scores.gather(1, last[..., None].expand(-1, -1, scores.shape[-1]))[:, 0]
        return replace(verdict, bonus=ops.pick(torch.log_softmax(own, -1), uniform[:, 0]))

    monkeypatch.setattr(verifier, "walk_drawn", drawn_again)
    assert not any(lossless(seed, Length(2, 0.3), PROCESSES[1], 3) for seed in range(3))


class ForgetsWhatWasSaid(Counted):
    """After rounds without drafts the draft model reads the end of the text as if nothing had been said meanwhile."""

    def _lacked(self):
        return super()._lacked()[:, -2:]


def test_a_draft_model_that_missed_a_round_is_found():
    with pytest.raises(AssertionError), scarce(0.1, 1):
        assert all(lossless(seed, Length(1, 0.3), PROCESSES[1], 4, ForgetsWhatWasSaid) for seed in range(4))


# What rounds without drafts save


def played(length: Length, gains: list[tuple[int, float]]) -> tuple[list[bool], float]:
    """Which rounds drafted, and what their drafts lost: each has a number of drafts and the share of it that is
    accepted."""
    budget, drafted, lost, sitting = DraftBudget(length.pause, torch.device("cpu"), BUDGET), [], 0.0, 0
    for count, share in gains:
        sitting = sitting or budget.pause()
        drafted.append(not sitting)
        sitting = max(0, sitting - 1)
        if drafted[-1]:
            lost += length.price(count) - count * share
            budget.judge(torch.tensor(count * share), length.price(count))
    return drafted, lost


lengths = st.builds(Length, st.just(4), st.floats(0.01, 2.0), st.floats(0.0, 0.3))


@given(lengths, st.lists(st.tuples(st.integers(1, 4), st.floats(0, 1)), min_size=1, max_size=120))
@examples(100)
def test_whatever_the_drafts_are_they_lose_no_more_than_was_granted(length, gains):
    """The budget, the last round's overdraft, and the price of one round whenever drafts were tried again."""
    drafted, lost = played(length, gains)
    tried = sum(now and not before for before, now in pairwise(drafted))
    assert lost <= BUDGET + (tried + 1) * length.price(4) + 1e-3
    for start in range(len(drafted)):  # a pause has its length
        if not drafted[start] and (start == 0 or drafted[start - 1]):
            pause = next((n for n, now in enumerate(drafted[start:]) if now), None)
            assert pause in (None, length.pause)


@given(st.floats(0.01, 2.0), st.floats(0.0, 0.3))
def test_drafts_that_are_never_accepted_cost_little(cost, check):
    """A share of the rounds that a test of theirs costs on average, once the budget is used up; LONGEST_PAUSE bounds
    how rare they are."""
    length, rounds = Length(8, cost, check), 2000
    _, lost = played(length, [(1, 0.0)] * rounds)
    assert lost <= BUDGET + length.price(1) + rounds * max(PROBES, length.price(1) / draft_length.LONGEST_PAUSE) + 1e-2


@given(lengths, st.integers(0, 60))
def test_drafts_that_pay_are_tried_again_and_kept(length, bad):
    good = 60
    share = min(1.0, 1.2 * length.price(4) / 4)
    if 4 * share <= length.price(4):
        return  # nothing that can be accepted pays
    drafted, _ = played(length, [(1, 0.0)] * bad + [(4, share)] * good)
    assert all(drafted[bad + length.pause :])
    assert all(played(length, [(4, share)] * good)[0])


def test_what_can_be_lost_after_a_gain_is_bounded():
    drafted, _ = played(Length(4, 1.0), [(4, 1.0), (4, 1.0)] + [(1, 0.0)] * 40)
    assert all(drafted) is False and drafted.index(False) <= 2 + LARGEST_BUDGET


def test_the_pause_goes_by_the_price():
    assert [Length(8, cost).pause for cost in (0.0, 0.05, 0.5, 1.0, 9.0)] == [0, 1, 10, 20, 32]
    assert Length(8, 0.05, 0.2).pause == 5 and Length(8, 0.0, 0.2).pause == 0
    assert Length(8, 0.5).room == 8 + 2 + 10 and Length(8).room == 10
