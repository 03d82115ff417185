"""The phases of a round one by one, with a target and a drafter that keep what they are asked."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.round_program import NODES, ROWS, VOCAB, Digesting, Drafting, Model, Ticking, chain, judged, made
from torch import Tensor

from fastspec import Unsupported
from fastspec.generation.drafters.base import Place, Traits, adopt
from fastspec.generation.engine.call import RoundState
from fastspec.generation.engine.round_program import Round, RoundProgram, Scored, rounded
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.generation.verify import measure
from fastspec.patches.backends import TORCH


@pytest.mark.parametrize(("longest", "room"), [(0, 0), (1, 128), (127, 128), (128, 128), (129, 256), (1000, 1024)])
def test_room_is_made_in_steps_of_128_tokens(longest, room):
    assert rounded(longest) == room and isinstance(rounded(longest), int)


@pytest.mark.parametrize(
    ("longest", "room", "extent"), [(5, 128, 128), (125, 128, 128), (126, 256, 128), (128, 256, 128), (129, 256, 256)]
)
def test_a_round_makes_room_for_the_longest_path_and_reads_no_further_than_the_texts(longest, room, extent):
    target, drafter = Model(), Drafting()
    assert made(target, drafter).open(longest) == extent
    assert target.log == drafter.log == [("reserve", room)]


def test_without_a_drafter_a_round_makes_room_for_one_token():
    target = Model()
    program = made(target)
    assert [program.open(longest) for longest in (127, 128)] == [128, 128] and target.log == [
        ("reserve", 128),
        ("reserve", 256),
    ]


def test_a_round_reads_no_further_than_the_target_has_room():
    assert made(Model(bound=60)).open(50) == 60


def test_a_clock_starts_where_a_round_is_opened():
    program = made()
    program.clock = clock = Ticking()  # type: ignore[assignment]
    program.open(3)
    assert clock.log == ["start"]


@pytest.mark.parametrize(
    ("target", "drafter", "fits"), [(9, 9, True), (9, None, True), (7, 9, False), (9, 7, False), (7, None, False)]
)
def test_what_fits_must_fit_the_target_and_the_drafter_where_there_is_one(target, drafter, fits):
    program = made(Model(most=target), None if drafter is None else Drafting(most=drafter))
    assert program.fits(8) is fits


def test_without_a_drafter_the_tree_is_the_last_token():
    tree = made().draft(3)
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.max_path) == ([[4], [5]], [[0], [0]], 1)


@pytest.mark.parametrize("place", Place)
def test_a_drafters_tree_is_taken_as_it_is_and_asked_with_the_extent(place):
    drafter = Drafting(chain(4, 5), place)
    assert made(drafter=drafter).draft(17) is drafter.tree and drafter.log == [("propose", 17)]


def test_in_lockstep_rows_that_have_ended_draft_padding_below_their_last_token():
    """Whatever the drafter has for them, its root included."""
    drafter = Drafting(chain(4, 6))
    program = made(drafter=drafter, pad_token=0)
    program.state.activate([True, True], [False, True])
    tree = program.draft(3)
    assert tree.tokens.tolist() == [[4, 2, 3], [5, 0, 0]] and torch.equal(tree.parents, drafter.tree.parents)
    drafter.tree = chain(4, 5)
    program.state.activate([True, True], [True, False])
    assert program.draft(3).tokens.tolist() == [[4, 0, 0], [5, 2, 3]]


def test_phases_are_marked_by_name_where_a_clock_runs_and_parts_of_the_draft_with_them():
    target, drafter = Model(), Drafting()
    program = made(target, drafter)
    for clock in (None, Ticking(), None):
        program.clock = clock  # type: ignore[assignment]
        drafter.tree = chain(*program.state.root.tolist())
        tree = program.draft(3)
        scored = program.score(tree, 3)
        done = replace(judged(tree, target), scored=scored)
        program.observe(program.commit(done), 3)
        assert clock is None or clock.log == ["open", "inside", "draft", "score", "commit", "observe"]


@pytest.mark.parametrize(("place", "refused"), [(Place.HOST, True), (Place.DEVICE, False)])
def test_what_is_drafted_on_the_host_is_checked(place, refused):
    """On a device nothing is read back for it."""
    program = made(drafter=Drafting(chain(4, 6), place))
    if refused:
        with pytest.raises(
            Unsupported, match=r"^Drafting\.propose gave a tree that begins with token 6 in row 1, where 5 was"
        ):
            program.draft(3)
    else:
        assert program.draft(3).tokens[1, 0] == 6


@pytest.mark.parametrize(("running", "padded"), [([True, False], [False, False]), ([True, True], [False, True])])
def test_rows_that_do_not_go_on_may_begin_with_any_token(running, padded):
    program = made(drafter=Drafting(chain(4, 6)))
    program.state.activate(running, padded)
    assert program.draft(3).tokens.tolist() == [[4, 2, 3], [6, 2, 3]]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("no tree", "a str"),
        (chain(4, 5, 6), r"tokens of shape \[3, 3\] for 2 rows"),
        (
            TokenTree.chain(torch.tensor([[4, 1, 2, 3], [5, 1, 2, 3]])),
            "4 nodes and up to 4 a path, and it says nodes=3 and max_path=2",
        ),
        (
            TokenTree.chain(torch.tensor([[4, 1, 2], [5, 1, 2]])),
            "3 nodes and up to 3 a path, and it says nodes=3 and max_path=2",
        ),
        (
            replace(TokenTree.chain(torch.tensor([[4, 1], [5, 1]])), q=torch.zeros(2, 2, VOCAB)),
            "drafts with the distributions",
        ),
    ],
    ids=["kind", "rows", "nodes", "path", "distributions"],
)
def test_what_is_no_tree_of_the_drafter_is_refused_in_its_name(tree, words):
    drafter = Drafting(tree)
    drafter.max_path = 2
    with pytest.raises(Unsupported, match=rf"^Drafting\.propose gave (a tree of )?{words}"):
        made(drafter=drafter).draft(3)


def test_a_tree_of_the_size_and_of_the_kind_that_the_drafter_says_passes():
    drafter = Drafting(
        TokenTree.from_parents(torch.tensor([[4, 1, 2], [5, 1, 2]]), torch.zeros(2, 3, dtype=torch.long))
    )
    drafter.max_path, drafter.traits = 2, Traits(draws=True)
    assert made(drafter=drafter).draft(3) is drafter.tree
    drafter.tree = replace(drafter.tree, q=torch.zeros(2, 3, VOCAB))
    assert made(drafter=drafter).draft(3) is drafter.tree


class Theirs:
    """A third party's drafter of three methods."""

    nodes = max_path = NODES

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Asked by nobody here."""

    def propose(self, extent: int) -> TokenTree:
        return chain(4, 6)

    def observe(
        self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int
    ) -> None:
        """Asked by nobody here."""


def test_a_third_partys_drafter_is_named_by_its_own_class():
    with pytest.raises(Unsupported, match=r"^Theirs\.propose gave a tree that begins with token 6"):
        made(drafter=adopt(Theirs(), may_draw=False)).draft(3)


@pytest.mark.parametrize("adopted", [False, True])
def test_roots_are_read_back_from_a_device_for_a_third_partys_drafter_alone(adopted):
    """On a device whose tensors cannot be read, to look at them fails."""
    elsewhere = torch.device("meta")
    nodes = torch.empty(ROWS, NODES, dtype=torch.long, device=elsewhere)
    tree, theirs = TokenTree(nodes, nodes, nodes, nodes[..., None], NODES), Theirs()
    theirs.propose = lambda extent: tree  # type: ignore[method-assign]
    drafter: Any = adopt(theirs, may_draw=False) if adopted else Drafting(tree)
    program = RoundProgram(Model(), drafter, TORCH, RoundState(ROWS, elsewhere))  # type: ignore[arg-type]
    if adopted:
        with pytest.raises(NotImplementedError, match="meta"):
            program.draft(3)
    else:
        assert program.draft(3) is tree


def test_the_target_scores_the_tree_within_the_extent():
    target, tree = Model(), chain(4, 5)
    scored = made(target).score(tree, 17)
    assert target.log == [("score", tree, 17)]
    assert scored.tree is tree and scored.logits is target.logits and scored.features is target.features


@pytest.mark.parametrize("measures", [None, False, True])
def test_a_path_is_committed_and_its_tokens_are_emitted_and_measured_where_asked(measures):
    """The last of them are the next roots of the rows that go on."""
    target, tree = Model(), chain(4, 5)
    program = made(target, **({} if measures is None else {"measures": measures}))
    program.state.activate([True, False])
    given = judged(tree, target)
    committed = program.commit(given)
    ((name, verdict, active),) = target.log
    assert name == "commit" and verdict is given.verdict and active is program.state.active
    assert committed.emitted.tolist() == [[2, 2, 3, 6], [0, 1, 5, 5]]
    assert program.state.root.tolist() == [6, 5]
    tokens = torch.tensor([[2, 3, 6], [1, 5, 5]])
    assert committed.verdict.emitted is not None and torch.equal(committed.verdict.emitted, tokens)
    assert all(getattr(committed.verdict, name) is getattr(verdict, name) for name in ("path", "accepted", "bonus"))
    if measures:
        along = torch.stack((target.logits[0], target.logits[1, [0, 0, 0]]))
        assert committed.measures is not None and torch.equal(committed.measures, measure(along, tokens))
    else:
        assert committed.measures is None


def over(program: RoundProgram, tree: TokenTree) -> Round:
    given = judged(tree, program.target)  # type: ignore[arg-type]
    return program.commit(given)


@pytest.mark.parametrize(("pad", "observed"), [(None, [True, True]), (0, [True, False])])
def test_a_drafter_observes_the_round_in_the_rows_that_go_on(pad, observed):
    """Rows that are padded go on, and there is nothing to learn from them."""
    drafter, tree = Drafting(), chain(4, 5)
    program = made(drafter=drafter, pad_token=pad)
    done = over(program, tree)
    program.state.activate([True, True], [False, True])
    program.observe(done, 17)
    ((name, *given, active, extent),) = drafter.log
    assert (name, extent, active.tolist()) == ("observe", 17, observed)
    assert all(got is want for got, want in zip(given, (tree, done.verdict, done.logits, done.features), strict=True))


def test_a_drafter_is_not_shown_rows_that_have_ended():
    program = made(drafter=Drafting(), pad_token=0)
    done = over(program, chain(4, 5))
    program.state.activate([False, True])
    program.observe(done, 3)
    assert program.drafter.log[0][5].tolist() == [False, True]  # type: ignore[union-attr]


def test_a_digest_is_read_back_behind_the_rounds_own_integers_and_taken_off_again():
    """A drafter of digests gets the whole path's; what remains is what the round emitted."""
    drafter, tree = Digesting(), chain(4, 5)
    program = made(drafter=drafter)
    program.clock = clock = Ticking()  # type: ignore[assignment]
    done = over(program, tree)
    told = program.with_digest(done)
    ((name, *given, active, steps),) = drafter.log
    assert (name, steps) == ("digest", NODES) and active is program.state.active
    assert all(got is want for got, want in zip(given, (tree, done.verdict, done.logits), strict=True))
    assert told.emitted.tolist() == [[2, 2, 3, 6, 70, 71, 72], [0, 1, 5, 5, 80, 81, 82]]
    assert told.scored is done.scored and told.verdict is done.verdict
    clock.log.clear()
    read = program.observe_read(told, told.emitted.tolist(), 17)
    assert read == done.emitted.tolist() and clock.log == ["observe"]
    assert drafter.log[1:] == [("update", [[70, 71, 72], [80, 81, 82]], NODES)]


@pytest.mark.parametrize("drafts", [False, True])
def test_without_a_digest_a_round_that_was_read_is_observed_as_any(drafts):
    drafter = Drafting() if drafts else None
    program = made(drafter=drafter)
    done = over(program, chain(4, 5))
    assert program.with_digest(done) is done
    emitted = done.emitted.tolist()
    assert program.observe_read(done, emitted, 17) is emitted
    assert drafter is None or [(call[0], call[1], call[-1]) for call in drafter.log] == [("observe", done.tree, 17)]


def test_a_round_on_a_copy_of_its_tree_is_the_round_on_the_tree():
    """All else of it stays."""
    program, copy = made(), chain(4, 5)
    done, tree = over(program, copy), chain(4, 5)
    moved = done.on(tree)
    assert moved.tree is tree and moved.emitted is done.emitted and moved.verdict is done.verdict
    assert moved.logits is done.logits and moved.features is done.features and done.tree is copy


def test_scores_are_found_at_the_nodes_of_a_path_or_at_its_steps():
    """Where they are of every node they are looked up and come in fp32; where they lie along the path its first ones
    are taken."""
    scores, path = torch.randn(ROWS, NODES, VOCAB).half(), torch.tensor([0, 2])
    tree: Any = SimpleNamespace()
    verdict = Verdict(path[None], path, path)
    scored = Scored(tree, scores, scores)

    def round_of(along: bool) -> Round:
        return Round(scored, verdict, scores, along, emitted=path)

    found = round_of(False).scores_along(1, path)
    assert torch.equal(found, scores[1, [0, 2]].float()) and found.dtype == torch.float32
    assert torch.equal(round_of(True).scores_along(1, path), scores[1, :2])
