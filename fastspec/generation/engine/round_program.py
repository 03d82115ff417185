"""One round of drafting and verifying, as functions from tensors to tensors.

    extent  = open(longest)          room for what the rows have and for what the round commits
    tree    = draft(extent)          the next tree of draft tokens                                        [B, N]
    scored  = score(tree, extent)    one forward over the N nodes of every row                            [B, N, V]
    judged  = verifier(scored)       which path of the tree the call takes, and the token after it        (verifier.py)
    round   = commit(judged)         its keys and values are kept, and its tokens emitted                 [B, 1 + P]
    observe(round, extent)           what the target chose in the tree goes to the drafter

Nothing here knows whether it is captured, and nothing is read back: `schedule.py` runs these phases. What a round
leaves is valid until the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from fastspec.generation.drafters.base import Adopted, Drafter, HostDrafter, Place, check_roots, check_tree
from fastspec.generation.engine.call import RoundState
from fastspec.generation.ops import Ops
from fastspec.generation.stats import Clock, Marks, unmarked
from fastspec.generation.target import Target
from fastspec.generation.tree import DraftTree, TokenTree, Verdict
from fastspec.generation.verify import fill_ended, measure

EXTENT_BUCKET = 128


def rounded(longest: int) -> int:
    """Committed tokens that room is made for, so that few lengths tell launches apart."""
    return -(-longest // EXTENT_BUCKET) * EXTENT_BUCKET


@dataclass(frozen=True, slots=True)
class Scored:
    """A tree, and the target's raw logits [B, N, V] and features [B, N, F] of its nodes."""

    tree: TokenTree
    logits: Tensor
    features: Tensor


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """A scored tree with its verdict. `scores` are what the verdict was made of, fp32 as the processors leave them: at
    every node [B, N, V], or with `along_path` at every step of the path [B, P, V]; None where nobody may ask."""

    scored: Scored
    verdict: Verdict
    scores: Tensor | None
    along_path: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Round(VerifiedTree):
    """A verified tree that was committed, the result of a round: its tokens, and what else the call asks for.

    `emitted` [B, 1 + P] int64 is what the host reads back: how many drafts each row accepted, or -1 - so many where no
    token could be drawn behind them, then its tokens. Behind them stand the integers that a `HostDrafter` learns from,
    where the round was captured together with them. `verdict` has its tokens at hand, and `measures` [B, P, 3] are
    those of `fastspec.generation.verify.measure`, where the call asks for them.
    """

    emitted: Tensor
    measures: Tensor | None = None

    def on(self, tree: TokenTree) -> Round:
        """The same of the tree that was copied for it."""
        return replace(self, scored=replace(self.scored, tree=tree))

    @property
    def tree(self) -> TokenTree:
        """The round's tree."""
        return self.scored.tree

    @property
    def logits(self) -> Tensor:
        """The target's raw logits [B, N, V]."""
        return self.scored.logits

    @property
    def features(self) -> Tensor:
        """The target's features [B, N, F]."""
        return self.scored.features

    def tree_of(self, row: int, drafted: int, accepted: int) -> DraftTree:
        """A row's tree on the host, of `drafted` draft tokens, without the nodes that fill it up."""
        path: list[int] = self.verdict.path[row, : accepted + 1].tolist()
        nodes = 1 + max(drafted, *path)
        return DraftTree(self.tree.tokens[row, :nodes].tolist(), self.tree.parents[row, :nodes].tolist(), path)

    def scores_along(self, row: int, path: Tensor) -> Tensor:
        """Processed scores [len(path), V] fp32 of the first nodes of a row's path."""
        assert self.scores is not None
        return self.scores[row, : len(path)] if self.along_path else self.scores[row, path].float()


Verify: TypeAlias = Callable[[Scored], VerifiedTree]
Value = TypeVar("Value")
Marked: TypeAlias = tuple[Value, Marks]
"""Results of the phases, and where their profile's marks lie."""


class RoundProgram:
    """The phases of a round of one target and one drafter; None drafts nothing, and every round is one token.

    With `measures` a round keeps `measure` of its tokens. With `pad_token`, in a call that decodes in lockstep, rows
    that have ended go on and emit this token, which the drafter does not observe.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        ops: Ops,
        state: RoundState,
        *,
        measures: bool = False,
        pad_token: int | None = None,
    ) -> None:
        self.target, self.drafter, self.ops, self.state = target, drafter, ops, state
        self.measures, self.pad_token = measures, pad_token
        self.behind: Callable[[], None] | None = None
        """Callback that runs beside a round, in place of what its drafter has put off."""
        self.clock: Clock | None = None
        """Takes the phases of every round down where a profile is wanted."""

    @property
    def place(self) -> Place:
        """Place of this program's drafting and of its drafter's observing."""
        return Place.DEVICE if self.drafter is None else self.drafter.traits.place

    @property
    def draws(self) -> bool:
        """True where drafts bring distributions of their own."""
        return self.drafter is not None and self.drafter.traits.draws

    @property
    def longest(self) -> int:
        """Tokens of a round at most."""
        return 1 if self.drafter is None else self.drafter.max_path

    @property
    def key(self) -> Hashable:
        """Key of what a captured round depends on beside its tensors."""
        return self.clock, self.target.buffers, None if self.drafter is None else self.drafter.buffers

    def open(self, longest: int) -> int:
        """Begin a round where no row has more than `longest` committed tokens: make room for these and for what the
        round commits -> how many of them are in bounds."""
        room = rounded(longest + self.longest)
        if self.drafter is not None:
            self.drafter.reserve(room)
        extent = min(self.target.reserve(room), rounded(longest))
        if self.clock is not None:
            self.clock.start()
        return extent

    def fits(self, committed: int) -> bool:
        """True where there is room for so many already."""
        return self.target.fits(committed) and (self.drafter is None or self.drafter.fits(committed))

    def mark(self, name: str) -> None:
        """A phase is done."""
        if self.clock is not None:
            self.clock.mark(name)

    def draft(self, extent: int) -> TokenTree:
        """The next tree; no row has more than `extent` committed tokens."""
        state, drafter = self.state, self.drafter
        if self.clock is not None:
            self.clock.open()
        if drafter is None:
            tree = state.roots
        else:
            drafter.mark = unmarked if self.clock is None else self.clock.mark
            tree = drafter.propose(extent)
            if self.place is Place.HOST:
                self._check(tree, drafter)
            if self.pad_token is not None:
                tree = fill_ended(tree, state.root, state.ended, self.pad_token)
        self.mark("draft")
        return tree

    def _check(self, tree: TokenTree, drafter: Drafter) -> None:
        """Refuse a tree that is none, or that does not begin where the text ends: the target would go on from there. On
        a device only three-method drafters are asked for the latter, since it is read back."""
        state, who = self.state, type(drafter.theirs if isinstance(drafter, Adopted) else drafter).__name__
        check_tree(
            tree, state.root, nodes=drafter.nodes, max_path=drafter.max_path, draws=drafter.traits.draws, who=who
        )
        if state.root.device.type == "cpu" or isinstance(drafter, Adopted):
            check_roots(tree.tokens, state.root, state.active & ~state.ended, who)

    def score(self, tree: TokenTree, extent: int) -> Scored:
        """Score the tree's nodes."""
        logits, features = self.target.score(tree, extent)
        self.mark("score")
        return Scored(tree, logits, features)

    def commit(self, judged: VerifiedTree) -> Round:
        """Keep the verdict's path in the target's cache, and emit its tokens; the last of them are the next roots."""
        scored, verdict, state = judged.scored, judged.verdict, self.state
        self.target.commit(verdict, state.active)
        emitted = self.ops.emit(
            scored.tree.tokens, verdict.path, verdict.accepted, verdict.bonus, state.active, state.root
        )
        tokens, measures = emitted[:, 1:], None
        if self.measures:
            at = verdict.path[..., None].expand(-1, -1, scored.logits.shape[-1])
            measures = measure(scored.logits.gather(1, at), tokens)
        self.mark("commit")
        verdict = replace(verdict, emitted=tokens)
        return Round(scored, verdict, judged.scores, judged.along_path, emitted=emitted, measures=measures)

    def observe(self, done: Round, extent: int) -> None:
        """Let the drafter hear of the rows that go on."""
        state = self.state
        if self.drafter is not None:
            observed = state.active if self.pad_token is None else state.active & ~state.ended
            self.drafter.observe(done.tree, done.verdict, done.logits, done.features, observed, extent)
        self.mark("observe")

    def round(self, verify: Verify) -> Round:
        """All phases, in bounds of any length."""
        return self.from_scores(verify, self.to_scores())

    def to_scores(self) -> Scored:
        """The phases in front of the verdict, in bounds of any length."""
        extent = self.target.bound
        return self.score(self.draft(extent), extent)

    def from_verdict(self, judged: VerifiedTree) -> Round:
        """The phases behind the verdict."""
        done = self.commit(judged)
        self.observe(done, self.target.bound)
        return done

    def from_scores(self, verify: Verify, scored: Scored) -> Round:
        """The verdict on scores, and the phases behind it."""
        judged = verify(scored)
        self.mark("choose")
        return self.from_verdict(judged)

    def from_tree(self, verify: Verify, tree: TokenTree, extent: int) -> Round:
        """The phases behind a tree of the host's, but for what the host observes."""
        judged = verify(self.score(tree, extent))
        self.mark("choose")
        return self.with_digest(self.commit(judged))

    def marked(self, phases: Callable[[], Value]) -> Marked[Value]:
        """Phases, and the marks that they made."""
        if self.clock is None:
            return phases(), ()
        return self.clock.watch(phases)

    def on_copy(self, phases: Callable[[TokenTree, int], Value], max_path: int, *parts: Tensor) -> Marked[Value]:
        """Phases, in bounds of any length, on the tokens, parents, depths and ancestors that a graph reads."""

        def run() -> Value:
            self.mark("copy")
            tokens, parents, depths, ancestors = parts
            return phases(TokenTree(tokens, parents, depths, ancestors, max_path), self.target.bound)

        return self.marked(run)

    def with_digest(self, done: Round) -> Round:
        """The round with the integers that the drafter learns from behind its own: one tensor is read back, not two."""
        if not isinstance(self.drafter, HostDrafter):
            return done
        digest = self.drafter.digest(done.tree, done.verdict, done.logits, self.state.active, done.tree.max_path)
        return replace(done, emitted=torch.cat((done.emitted, digest), 1))

    def meanwhile(self) -> None:
        """Let the drafter do what it has put off, while the device is busy."""
        if self.behind is not None:
            self.behind()
        elif isinstance(self.drafter, HostDrafter):
            self.drafter.work()

    def observe_read(self, done: Round, emitted: list[list[int]], extent: int) -> list[list[int]]:
        """`observe` for a round of `with_digest` that the host has read -> what it emitted."""
        drafter, own = self.drafter, 1 + done.tree.max_path
        if not isinstance(drafter, HostDrafter):
            self.observe(done, extent)
            return emitted
        drafter.update([row[own:] for row in emitted], done.tree.max_path)
        self.mark("observe")
        return [row[:own] for row in emitted]
