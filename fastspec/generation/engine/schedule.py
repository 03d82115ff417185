"""Schedules run the phases of a round, and are chosen by where these run. None of these knows how a round drafts.

captured  draft   verify  schedule
no        any     any     Eager           one phase after another
yes       DEVICE  DEVICE  WholeGraph      one graph, asynchronous where nothing is read but tokens
yes       DEVICE  HOST    SplitGraph      a graph on either side of the host's decision
yes       DEVICE  FED     FedGraph        a graph that scores, and one of what follows, which reads what the host has
                                          brought meanwhile
                          FedTreeGraph    the same of trees with drafts: one more between these chooses tokens, and the
                                          host corrects what it has chosen
yes       HOST    DEVICE  GraphFromScore  the host drafts; what follows is a graph for each shape of the tree
yes       HOST    HOST    GraphOfScore    the host drafts and decides, and scoring alone is a graph; so too where
                                          drafts bring distributions, which a larger graph would have to copy
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from fastspec.generation.capture import Captured, CapturedByShape
from fastspec.generation.drafters.base import Place
from fastspec.generation.engine.call import HostCopy
from fastspec.generation.engine.round_program import Marked, Round, RoundProgram, Scored, Verify, rounded
from fastspec.generation.engine.verifier import FedVerifier, Verifier
from fastspec.generation.stats import Stats, timed
from fastspec.generation.tree import TokenTree, Verdict

Value = TypeVar("Value")
ByPath: TypeAlias = dict[int, CapturedByShape[Marked[Value]]]
"""Graphs by the longest path of a tree, and then by its other shapes."""
Emitted: TypeAlias = list[list[int]]
"""Per row the number of accepted drafts, and the tokens."""


class Schedule(ABC):
    """Runs rounds of one program."""

    def __init__(self, program: RoundProgram) -> None:
        self.program = program

    def step(self, verifier: Verifier, longest: int, stats: Stats, asynchronous: bool) -> tuple[Round, Emitted]:
        """One round, where no row has more than `longest` committed tokens -> what it left, and what the host read of
        it.

        With `asynchronous` the next round may be launched before this one is waited for: then only the tokens of this
        one can be read."""
        found = self.run(verifier, longest, stats)
        if self.program.clock is not None:
            self.program.clock.close()
        return found

    @abstractmethod
    def run(self, verifier: Verifier, longest: int, stats: Stats) -> tuple[Round, Emitted]:
        """`step` of this round alone, from `RoundProgram.open` to what the drafter observes."""

    @property
    def in_flight(self) -> bool:
        """True where a round was launched before the one in front of it was read."""
        return False

    def drain(self) -> None:  # noqa: B027
        """Wait for a round that is in flight, and drop its result."""

    def leave(self) -> None:  # noqa: B027
        """Forget what was begun of a round whose rows change, or that another schedule runs."""

    @property
    def whole(self) -> torch.cuda.CUDAGraph | None:
        """The graph of a whole round, where there is one; what it reads is left as the last round left it."""
        return None


@dataclass(frozen=True, slots=True)
class InFlightRound:
    """A launched round, of which the host reads a copy: the next replay, which writes over it, follows that."""

    done: Round
    emitted: HostCopy

    def wait(self) -> Emitted:
        """Its result, when it has ended."""
        emitted: Emitted = self.emitted.tolist()
        return emitted


class Eager(Schedule):
    """One phase after another."""

    def score(self, tree: TokenTree, extent: int) -> Scored:
        return self.program.score(tree, extent)

    def run(self, verifier: Verifier, longest: int, stats: Stats) -> tuple[Round, Emitted]:
        program = self.program
        extent = program.open(longest)
        with timed(stats, "draft"):
            tree = program.draft(extent)
        with timed(stats, "score"):
            scored = self.score(tree, extent)
        program.meanwhile()
        with timed(stats, "choose"):
            judged = verifier(scored)
            program.mark("choose")
        with timed(stats, "commit"):
            done = program.commit(judged)
            program.observe(done, extent)
            return done, done.emitted.tolist()  # the round's one read-back


class WholeGraph(Schedule):
    """The whole round as one graph, which may be launched before the round in front of it is read.

    All that a round needs is on the device, so the host's work on one round goes on during the next. A row that ends
    goes on for one more round, whose tokens nobody reads.
    """

    def __init__(self, program: RoundProgram) -> None:
        super().__init__(program)
        self.graph: Captured[Marked[Round]] = Captured()
        self.next: InFlightRound | None = None
        """A round that was launched before the one in front of it was read."""
        self.spare: list[Tensor] = []
        """Where such rounds leave what the host reads: two that take turns."""

    def step(self, verifier: Verifier, longest: int, stats: Stats, asynchronous: bool) -> tuple[Round, Emitted]:
        """Launches the next round before this one is read, unless it has to be captured or made room for."""
        if self.next is None and not (asynchronous and self._ready(longest)):
            return super().step(verifier, longest, stats, asynchronous)
        with timed(stats, "round"):
            this = self.next or self.launch(verifier)
            self.next = self.launch(verifier) if asynchronous and self._ready(longest + self.program.longest) else None
            stats.replays += 1
            self.program.meanwhile()
            return this.done, this.wait()

    def run(self, verifier: Verifier, longest: int, stats: Stats) -> tuple[Round, Emitted]:
        self.program.open(longest)
        with timed(stats, "round"):
            done = _run(self.graph, self.program, partial(self.program.round, verifier), stats)
            self.program.meanwhile()
            return done, done.emitted.tolist()

    def launch(self, verifier: Verifier) -> InFlightRound:
        """Launch a round without waiting for it."""
        done = _run(self.graph, self.program, partial(self.program.round, verifier))
        emitted = done.emitted
        if not self.spare:
            self.spare = [torch.empty_like(emitted, device="cpu", pin_memory=emitted.is_cuda) for _ in range(2)]
        self.spare.append(self.spare.pop(0))
        return InFlightRound(done, HostCopy(emitted, self.spare[-1]))

    @property
    def in_flight(self) -> bool:
        return self.next is not None

    def drain(self) -> None:
        this, self.next = self.next, None
        if this is not None:
            this.wait()

    @property
    def whole(self) -> torch.cuda.CUDAGraph | None:
        return self.graph.graph

    def _ready(self, longest: int) -> bool:
        """True where a round can be launched without a wait."""
        return _is_ready(self.graph, self.program, longest)


class Halves(Schedule):
    """Two graphs, and the host's part between them. All such schedules of a program have one `front`."""

    def __init__(self, program: RoundProgram, front: Captured[Marked[Scored]] | None = None) -> None:
        super().__init__(program)
        self.front: Captured[Marked[Scored]] = Captured() if front is None else front
        self.back: Captured[Marked[Round]] = Captured()

    def scores(self, stats: Stats) -> Scored:
        """Draft and score."""
        return _run(self.front, self.program, self.program.to_scores, stats)


class SplitGraph(Halves):
    """Two graphs, and the host's decision between them."""

    def __init__(self, program: RoundProgram, front: Captured[Marked[Scored]] | None = None) -> None:
        super().__init__(program, front)
        self.verdict: Verdict | None = None
        """The tensors that the second graph reads the verdict from."""

    def run(self, verifier: Verifier, longest: int, stats: Stats) -> tuple[Round, Emitted]:
        self.program.open(longest)
        with timed(stats, "draft and score"):
            scored = self.scores(stats)
        self.program.meanwhile()
        with timed(stats, "choose"):
            judged = verifier(scored)
            held = replace(judged, verdict=self._held(judged.verdict), scores=None)  # a graph keeps what it is given
            self.program.mark("choose")
        with timed(stats, "commit"):
            done = _run(self.back, self.program, partial(self.program.from_verdict, held), stats, self.front.keys)
            done = replace(done, scored=judged.scored, scores=judged.scores, along_path=judged.along_path)
            return done, done.emitted.tolist()

    def _held(self, verdict: Verdict) -> Verdict:
        held = self.verdict = self.verdict or verdict
        held.path.copy_(verdict.path)
        held.accepted.copy_(verdict.accepted)
        held.bonus.copy_(verdict.bonus)
        return held


class FedGraph(Halves):
    """A graph that drafts and scores, and a graph of what follows: the host prepares the verdict meanwhile."""

    def __init__(self, program: RoundProgram, front: Captured[Marked[Scored]] | None = None) -> None:
        super().__init__(program, front)
        self.begun: tuple[Hashable, Scored] | None = None
        """The next round's scores, launched already, and the key of what they were made with."""
        self.host: Tensor | None = None
        """Where the host reads such a round's tokens."""

    def step(self, verifier: Verifier, longest: int, stats: Stats, asynchronous: bool) -> tuple[Round, Emitted]:
        """With `asynchronous` the next round's tree is scored while the host reads this round and does its work."""
        if not (asynchronous and self._ready(longest + self.program.longest)):
            return super().step(verifier, longest, stats, asynchronous)
        done = self._launch(verifier, longest, stats)
        with timed(stats, "commit"):
            emitted = done.emitted
            if self.host is None:
                self.host = torch.empty_like(emitted, device="cpu", pin_memory=emitted.is_cuda)
            this = InFlightRound(done, HostCopy(emitted, self.host))
            self.begun = self.program.key, self.scores(stats)
            self.program.meanwhile()
            return done, this.wait()

    def run(self, verifier: Verifier, longest: int, stats: Stats) -> tuple[Round, Emitted]:
        done = self._launch(verifier, longest, stats)
        self.program.meanwhile()
        with timed(stats, "commit"):
            return done, done.emitted.tolist()

    def _launch(self, verifier: Verifier, longest: int, stats: Stats) -> Round:
        assert isinstance(verifier, FedVerifier)
        program = self.program
        program.open(longest)
        with timed(stats, "draft and score"):
            begun, self.begun = self.begun, None
            scored = begun[1] if begun is not None and begun[0] == program.key else self.scores(stats)
        with timed(stats, "choose"):
            verifier.feed(scored)
            verify = self._decided(verifier, scored, stats)
        with timed(stats, "commit"):
            key = self.front.keys, verifier.key
            return _run(self.back, program, partial(program.from_scores, verify, scored), stats, key)

    def _decided(self, verifier: FedVerifier, scored: Scored, stats: Stats) -> Verify:
        """The part of the verdict behind the host's."""
        return verifier.fed

    def leave(self) -> None:
        self.begun = None

    drain = leave

    def _ready(self, longest: int) -> bool:
        """True where the next round's tree can be scored without a wait."""
        return _is_ready(self.front, self.program, longest)


class FedTreeGraph(FedGraph):
    """A third graph between these chooses tokens at the tree's nodes. The host reads them, corrects what is not allowed
    by further replays, with the masks of the nodes that it reached, and brings them back."""

    def __init__(self, program: RoundProgram, front: Captured[Marked[Scored]] | None = None) -> None:
        super().__init__(program, front)
        self.middle: Captured[Marked[Tensor]] = Captured()
        self.choices: tuple[Tensor, Tensor] | None = None
        """Tokens, parents and picks [3, B, N] of the tree, where graphs write and read them and where the host does."""

    def _decided(self, verifier: FedVerifier, scored: Scored, stats: Stats) -> Verify:
        if self.choices is None:
            tokens = scored.tree.tokens
            there = tokens.new_empty(3, *tokens.shape)
            self.choices = there, torch.empty_like(there, device="cpu", pin_memory=there.is_cuda)
        there, here = self.choices

        def chosen() -> Tensor:
            choose = partial(verifier.choices, scored, there)
            if self.front.graph is None:  # a graph could not read these scores again
                choose()
            else:
                _run(self.middle, self.program, choose, stats, (self.front.keys, verifier.key))
            return here.copy_(there)

        verifier.decide(scored, chosen)
        there.copy_(here, non_blocking=True)
        return partial(verifier.walked, there)


class GraphOfScore(Eager):
    """The host drafts and decides; a graph for each shape of the tree scores it."""

    def __init__(self, program: RoundProgram) -> None:
        super().__init__(program)
        self.graphs: ByPath[Scored] = {}

    def score(self, tree: TokenTree, extent: int) -> Scored:
        """Replays the graph of scoring for trees of this shape, which holds in bounds of any length."""
        return replace(_run_on_tree(self.graphs, self.program, tree, self.program.score), tree=tree)


class GraphFromScore(Schedule):
    """The host drafts; a graph for each shape of the tree does all that follows, but for what the host observes."""

    def __init__(self, program: RoundProgram) -> None:
        super().__init__(program)
        self.graphs: ByPath[Round] = {}

    def run(self, verifier: Verifier, longest: int, stats: Stats) -> tuple[Round, Emitted]:
        program = self.program
        extent = program.open(longest)
        with timed(stats, "draft"):
            tree = program.draft(extent)
        with timed(stats, "judge"):
            done = _run_on_tree(self.graphs, program, tree, partial(program.from_tree, verifier)).on(tree)
            program.meanwhile()
            emitted: Emitted = done.emitted.tolist()
        with timed(stats, "observe"):
            return done, program.observe_read(done, emitted, extent)


def _is_ready(graph: Captured[Marked[Value]], program: RoundProgram, longest: int) -> bool:
    """True where a graph of a round can be launched without a wait, in the buffers as they are."""
    return program.clock is None and graph.ready(program.key) and program.fits(rounded(longest + program.longest))


def place_of(program: RoundProgram, verifier: Verifier) -> Place:
    """Place of the verdict in a program's rounds."""
    place = verifier.place
    if place is not Place.FED or (program.place is Place.DEVICE and (program.longest == 1 or verifier.walks)):
        return place
    return Place.HOST


def schedule_of(program: RoundProgram, verifier: Verifier, others: Iterable[Schedule] = ()) -> Schedule:
    """Schedule of a program's rounds with a verifier, the table above, beside `others` of the same rows."""
    if not program.target.captures:
        return Eager(program)
    decides = place_of(program, verifier)
    if program.place is Place.DEVICE:
        if decides is Place.DEVICE:
            return WholeGraph(program)
        kind = SplitGraph if decides is Place.HOST else FedGraph if program.longest == 1 else FedTreeGraph
        fronts = (each.front for each in others if isinstance(each, Halves) and each.program is program)
        return kind(program, next(fronts, None))
    return GraphFromScore(program) if decides is Place.DEVICE and not program.draws else GraphOfScore(program)


def _run(
    graph: Captured[Marked[Value]],
    program: RoundProgram,
    phases: Callable[[], Value],
    stats: Stats | None = None,
    more: Hashable = None,
) -> Value:
    """Phases from their graph, of the program's key and `more`; what they leave lies where the graph has it."""
    before = graph.replays
    key = program.key if more is None else (program.key, more)
    value, marks = graph(partial(program.marked, phases), key)
    if stats is not None:
        stats.replays += graph.replays - before
    if program.clock is not None:
        program.clock.add(marks)
    return value


def _run_on_tree(
    graphs: ByPath[Value], program: RoundProgram, tree: TokenTree, phases: Callable[[TokenTree, int], Value]
) -> Value:
    """Phases behind a tree of the host's, from the graph of its shape."""
    graph = graphs.setdefault(tree.max_path, CapturedByShape())
    run = partial(program.on_copy, phases, tree.max_path)
    value, marks = graph(run, program.key, tree.tokens.shape[1], tree.tokens, tree.parents, tree.depths, tree.ancestors)
    if program.clock is not None:
        program.clock.add(marks)
    return value
