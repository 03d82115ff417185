"""The phases of a round that a graph holds as one: each asks the target and the drafter in their order, with what the
one before gave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.round_program import NODES, Digesting, Drafting, Model, Ticking, chain, judged, made

from fastspec.generation.drafters.base import Place
from fastspec.generation.engine.round_program import Scored, VerifiedTree

BOUND = 77
"""The target's room: what a graph holds is good for texts of any length."""
MARKS = ["draft", "score", "choose", "commit", "observe"]


class Chosen:
    """A verifier that keeps what it is asked: one row takes both drafts, the other none."""

    def __init__(self, target: Model) -> None:
        self.target, self.asked = target, []  # type: tuple[Model, list[Scored]]

    def __call__(self, scored: Scored) -> VerifiedTree:
        self.asked.append(scored)
        return judged(scored.tree, self.target)


def parts(kind: type[Drafting] = Drafting) -> tuple[Any, Any, Any, Ticking]:
    target, drafter, clock = Model(bound=BOUND), kind(chain(4, 5), Place.DEVICE), Ticking()
    program = made(target, drafter)
    program.clock = clock  # type: ignore[assignment]
    return program, target, drafter, clock


def test_a_whole_round_drafts_scores_chooses_commits_and_observes():
    program, target, drafter, clock = parts()
    verify = Chosen(target)
    done = program.round(verify)
    assert drafter.log[0] == ("propose", BOUND) and target.log[0] == ("score", drafter.tree, BOUND)
    [scored] = verify.asked
    assert scored.tree is drafter.tree and scored.logits is target.logits and scored.features is target.features
    assert target.log[1][0] == "commit" and target.log[1][1].path is done.verdict.path
    name, tree, verdict, logits, features, active, extent = drafter.log[1]
    assert (
        (name, extent) == ("observe", BOUND)
        and tree is drafter.tree
        and verdict is done.verdict
        and active is program.state.active
    )
    assert logits is target.logits and features is target.features
    assert done.emitted.tolist() == [[2, 2, 3, 6], [0, 1, 5, 5]]
    assert [each for each in clock.log if each in MARKS] == MARKS


def test_a_round_in_two_halves_is_the_whole_round():
    """The host's decision lies between them."""
    program, target, drafter, clock = parts()
    scored = program.to_scores()
    assert scored.tree is drafter.tree and scored.logits is target.logits
    assert drafter.log == [("propose", BOUND)] and target.log == [("score", drafter.tree, BOUND)]
    given = judged(scored.tree, target)
    committed = program.from_verdict(given)
    assert target.log[1][:2] == ("commit", given.verdict) and committed.emitted.tolist() == [[2, 2, 3, 6], [0, 1, 5, 5]]
    name, tree, verdict, *_, extent = drafter.log[1]
    assert (name, extent) == ("observe", BOUND) and tree is scored.tree and verdict is committed.verdict
    assert [each for each in clock.log if each in MARKS] == ["draft", "score", "commit", "observe"]


@pytest.mark.parametrize("kind", [Drafting, Digesting])
def test_what_follows_a_trees_making_leaves_the_observing_to_the_host(kind):
    """A drafter that learns from a digest finds it behind the round's own integers."""
    program, target, drafter, clock = parts(kind)
    tree, verify = chain(4, 5), Chosen(target)
    done = program.from_tree(verify, tree, 31)
    assert target.log[0] == ("score", tree, 31) and verify.asked[0].tree is tree
    assert target.log[1][0] == "commit" and target.log[1][1].path is done.verdict.path
    digest = [[70, 71, 72], [80, 81, 82]] if kind is Digesting else [[], []]
    assert done.emitted.tolist() == [row + more for row, more in zip([[2, 2, 3, 6], [0, 1, 5, 5]], digest, strict=True)]
    assert [each[0] for each in drafter.log] == (["digest"] if kind is Digesting else [])
    assert clock.log == ["score", "choose", "commit"]


def test_phases_on_a_copy_of_a_tree_see_its_parts_and_the_targets_room():
    program, _, _, clock = parts()
    program.clock, seen, tree = None, [], chain(4, 5)
    copies = [each.clone() for each in (tree.tokens, tree.parents, tree.depths, tree.ancestors)]
    assert program.on_copy(lambda *given: seen.append(given) or "left", NODES, *copies) == ("left", ())  # type: ignore[func-returns-value]
    [(copy, extent)] = seen
    assert extent == BOUND and copy.max_path == NODES and copy.q is None
    assert all(
        mine is theirs
        for mine, theirs in zip((copy.tokens, copy.parents, copy.depths, copy.ancestors), copies, strict=True)
    )
    watched: list[Any] = []
    program.clock = clock  # type: ignore[assignment]
    clock.watch = lambda phases: watched.append(phases()) or (watched[0], ("mark",))  # type: ignore[attr-defined]
    assert program.on_copy(lambda *_: "left", NODES, *copies) == ("left", ("mark",)) and clock.log == ["copy"]
    assert program.marked(lambda: torch.ones(1)) == ("left", ("mark",))
