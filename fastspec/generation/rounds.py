"""The rounds of a call as a program on static tensors: draft, score, choose, commit, and one small tensor for the host.

The same lines run as they are on the CPU and are captured as a CUDA graph where the backend captures. What a round leaves (the tree,
the logits, the verdict) is valid until the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from fastspec.generation.aside import Aside
from fastspec.generation.capture import Captured, CapturedByShape
from fastspec.generation.clock import Clock, unmarked
from fastspec.generation.handover import TextVerifier
from fastspec.generation.lockstep import fill_ended
from fastspec.generation.protocols import Drafter, LanguageModel, Ops
from fastspec.generation.stats import Stats, timed
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.generation.verify import choose, measure, walk, walk_drawn
from fastspec.kernels.reference import SamplingLaw

EXTENT_BUCKET = 128
Process = Callable[[Tensor], Tensor]
Decide = Callable[[], tuple[Verdict, Tensor | None]]
LEFT = ("tree", "logits", "features", "scores", "verdict", "packed", "measures")
SHOWN = (*LEFT, "kept")
"""What a round leaves behind; see `Rounds`."""


@dataclass(slots=True)
class Flight:
    """A round that was launched: its small tensor on the host, there once `landed` has been reached (None: it is there)."""

    packed: Tensor
    landed: torch.cuda.Event | None

    def wait(self) -> list[list[int]]:
        """What it says, when it has ended."""
        if self.landed is not None:
            self.landed.synchronize()
        return self.packed.tolist()


class Rounds:
    """A target and a drafter, and what a round passes from one part to the next.

    `sample` draws the target's tokens, else they are the likeliest; `process` maps scores [R, V] as the call's processors do, None without
    any. With `law`, which is all that they do, tokens are drawn under it from the logits and no scores are processed, unless the drafter
    brings a law of its own. Rounds are captured where the backend captures and the drafter is static: its passes wait for nothing and
    keep their tensors in place. With `whole=False` the choice is not captured with the rest, for processors that wait for the device.
    With `filler`, the rounds of a call in lockstep, rows that have ended go on and say this token; the drafter hears nothing of it.
    """

    def __init__(
        self, target: LanguageModel, drafter: Drafter | None, ops: Ops, *, rows: int, sample: bool, process: Process | None,
        whole: bool = True, measure: bool = False, law: SamplingLaw | None = None, filler: int | None = None,
    ) -> None:  # fmt: skip
        # beyond the protocols, what is captured has a cache, and is opened and given room
        self.target, self.drafter = cast(Any, target), cast(Any, drafter)
        self.ops, self.sample, self.process, self.whole, self.measure, self.law = ops, sample, process, whole, measure, law
        self.filler = filler
        device = target.lengths.device
        self.root = torch.zeros(rows, dtype=torch.long, device=device)
        self.active = torch.ones(rows, dtype=torch.bool, device=device)
        self.running = [True] * rows
        self.ended = torch.zeros_like(self.active)
        """Rows that say `filler`."""
        self.filled = [False] * rows
        self.tree: TokenTree
        self.logits: Tensor
        self.scores: Tensor
        self.verdict: Verdict
        self.features: Tensor
        self.packed: Tensor
        self.measures: Tensor
        """[B, P, 3] of the tokens that a round emits, with `measure`; see `fastspec.generation.verify.measure`."""
        self.chain: Rounds | None = None
        """The rounds that verify a given text on the same target, once they were asked for."""
        self.clock: Clock | None = None
        """Takes the parts of every round down where a profile is wanted."""
        self.kept: Tensor | None = None
        """Where the choice was the host's: processed scores [B, P, V] along the path."""
        self.host_verdict: Verdict | None = None
        """Where it was: the tensors that the captured rest of a round reads the verdict from."""
        self.captured: dict[str, Captured[dict[str, Any]]] = {}
        if getattr(drafter, "static", drafter is None) and getattr(target, "alone", False):
            self.target.alone = False
            self.captured = {name: Captured() for name in ("round", "front", "back")}
        self.flight: Flight | None = None
        """The round that runs ahead of the host, see `step`."""
        self.spare: list[Tensor] = []
        """Where rounds that run ahead leave their small tensor on the host: two that take turns."""
        self.aside = Aside()
        self.entry: tuple[Any, Any] | None = None
        """A target and a drafter of one row, where prompts begin that `join` later, once there were some."""
        self.judges: dict[int, CapturedByShape[dict[str, Any]]] = {}
        """Longest path of a tree -> all of a round but its drafting, captured by the tree's size; for drafters that the host drives."""

    @contextmanager
    def verifying(self, texts: Sequence[Sequence[int]]) -> Iterator[Rounds]:
        """Rounds on the same target that verify a text per row, before these begin."""
        if self.chain is None:
            self.chain = Rounds(
                self.target, TextVerifier(texts, self.root.device), self.ops, rows=len(self.root), sample=self.sample, process=self.process,
                whole=self.whole, measure=self.measure, law=self.law, filler=self.filler,
            )  # fmt: skip
        chain = self.chain
        chain.drafter = TextVerifier(texts, self.root.device)
        chain.begin(self.root)
        alone = getattr(self.target, "alone", False)
        self.target.alone = getattr(self.target, "captures", False)  # these rounds are captured by themselves
        try:
            yield chain
        finally:
            self.target.alone = alone

    def begin(self, root: Tensor) -> None:
        """Start after a prompt whose first new tokens are root [B]."""
        self.settle()
        self.aside.begin()
        self.root.copy_(root)
        self.activate([True] * len(self.running))

    def join(self, row: int, target: Any, drafter: Any, root: Tensor, count: int) -> None:
        """Begin a row anew after another prompt, of `count` tokens, that a target and a drafter of one row have begun with; no round may
        run ahead. root [1] is its first new token."""
        self.aside.catch_up(self)
        self.target.join(row, target, count)
        if drafter is not None:
            self.drafter.join(row, drafter, count)
        self.root[row] = root[0]

    @property
    def ahead(self) -> bool:
        """Whether a round runs ahead of the host."""
        plain = self.aside.plain
        return self.flight is not None or (plain is not None and plain.flight is not None)

    def activate(self, running: list[bool], filled: list[bool] | None = None) -> None:
        """Say which rows go on, and which of them say `filler` alone."""
        if running != self.running:
            self.running = list(running)
            self.active.copy_(torch.tensor(running))
        filled = filled or [False] * len(running)
        if filled != self.filled:
            self.filled = list(filled)
            self.ended.copy_(torch.tensor(filled))

    @property
    def heard(self) -> Tensor:
        """[B] bool: the rows whose tokens the drafter hears of."""
        return self.active if self.filler is None else self.active & ~self.ended

    def uniform(self, shape: tuple[int, ...] | torch.Size) -> Tensor | None:
        """Random numbers in [0, 1) where the call samples."""
        return torch.rand(shape, device=self.root.device) if self.sample else None

    def processed(self, logits: Tensor) -> Tensor:
        """logits [..., V] as the processors leave them: fp32, or untouched where there are none."""
        return logits if self.process is None else self.process(logits.flatten(0, -2).float()).view(logits.shape)

    def along(self, row: int, path: Tensor) -> Tensor:
        """Processed scores [len(path), V] of nodes on a row's path."""
        return self.scores[row, path].float() if self.kept is None else self.kept[row, : path.shape[0]]

    def step(self, longest: int, stats: Stats, decide: Decide | None = None, ahead: bool = False) -> list[list[int]]:
        """One round, where no row has more than `longest` committed tokens -> per row the number of accepted drafts, and the tokens.

        `decide` makes the verdict in place of the round's own choice. With `ahead` the next round is launched before this one is waited
        for, where it can be: rows that this round ends go on for one more, and only the tokens of this one can be read.
        """
        if self.aside.asked(self.drafter):
            return self.aside.step(self, longest, stats, decide, ahead)
        if self.flight is None and not (ahead and decide is None and self._flies(longest)):
            return self._landed(longest, stats, decide)
        with timed(stats, "round"):
            flight = self.flight or self._launch()
            longest += 1 if self.drafter is None else self.drafter.max_path
            self.flight = self._launch() if ahead and self._flies(longest) else None
            stats.replays += 1
            return flight.wait()

    def settle(self) -> None:
        """Wait for a round that runs ahead, and forget what it says."""
        flight, self.flight = self.flight, None
        if flight is not None:
            flight.wait()
        if self.aside.plain is not None:
            self.aside.plain.settle()

    def show(self, other: Rounds) -> None:
        """Take what a round of others has left for one's own."""
        self.__dict__.update({name: other.__dict__[name] for name in SHOWN if name in other.__dict__})

    def end(self) -> None:
        """The call is over: nothing runs on, and the drafter has heard all of it."""
        self.settle()
        self.aside.tell(self)

    def _flies(self, longest: int) -> bool:
        """Whether a round can be launched without a wait: from its graph, in the buffers as they are."""
        if "round" not in self.captured or not self.whole or self.clock is not None:
            return False
        return self.captured["round"].ready(self._key()) and all(part.cache.fits(rounded(longest)) for part in self._parts())

    def _launch(self) -> Flight:
        packed = self._run("round", self._round)
        if not self.spare:
            self.spare = [torch.empty_like(packed, device="cpu", pin_memory=packed.is_cuda) for _ in range(2)]
        host = self.spare.pop(0).copy_(packed, non_blocking=True)  # before the next replay writes over it: they follow each other
        self.spare.append(host)
        landed = torch.cuda.Event() if packed.is_cuda else None
        if landed is not None:
            landed.record()
        return Flight(host, landed)

    def _landed(self, longest: int, stats: Stats, decide: Decide | None) -> list[list[int]]:
        extent = self._reserve(rounded(longest))
        if self.clock is None:
            return self._step(extent, stats, decide)
        self.clock.start()
        packed = self._step(extent, stats, decide)
        self.clock.close()
        return packed

    def _step(self, extent: int, stats: Stats, decide: Decide | None) -> list[list[int]]:
        self.kept = None  # a replay runs no Python that would
        if not self.captured:
            return self._judged(extent, stats) if self._judges(decide) else self._stepwise(extent, stats, decide)
        if decide is None and self.whole:
            with timed(stats, "round"):
                return self._run("round", self._round, stats).tolist()
        with timed(stats, "draft and score"):
            self._run("front", self._front, stats)
        with timed(stats, "choose"):
            if decide is None:
                self._choose()
            else:
                self.verdict, self.kept = decide()
            self.verdict = self._held(self.verdict)
        with timed(stats, "commit"):
            return self._run("back", self._back, stats).tolist()

    def _judges(self, decide: Decide | None) -> bool:
        """Whether a round of a drafter that the host drives is captured from its scoring on: drafts that bring a law are not."""
        laws = getattr(self.drafter, "process", None) is not None or hasattr(self.drafter, "mix")
        return decide is None and self.whole and getattr(self.target, "alone", False) and not laws

    def _judged(self, extent: int, stats: Stats) -> list[list[int]]:
        with timed(stats, "draft"):
            self._draft(extent)
        tree, drafted = self.tree, [] if self.clock is None else self.clock.marks
        with timed(stats, "judge"):
            judge = self.judges.setdefault(tree.max_path, CapturedByShape())
            parts = tree.tokens, tree.parents, tree.depths, tree.ancestors
            key = self.clock, self.target.cache.slots
            left = judge(partial(self._judge, tree.max_path), key, tree.tokens.shape[1], *parts)
            self.__dict__.update(left)
            if self.clock is not None:
                (_, began), *rest = left["marks"]
                self.clock.marks = [*drafted, ("copy", began), *rest]
            packed: list[list[int]] = self.packed.tolist()
        with timed(stats, "observe"):
            if hasattr(self.drafter, "digest"):
                own = 1 + tree.max_path
                self.drafter.take([row[own:] for row in packed], tree.max_path)
                packed = [row[:own] for row in packed]
            else:
                self.drafter.observe(self.tree, self.verdict, self.logits, self.features, self.active, extent)
            self._mark("observe")
        return packed

    def _judge(self, max_path: int, tokens: Tensor, parents: Tensor, depths: Tensor, ancestors: Tensor) -> dict[str, Any]:
        self.tree = TokenTree(tokens, parents, depths, ancestors, max_path)
        if self.clock is not None:
            self.clock.open()
        self.target.alone = False  # not a graph in a graph
        try:
            return self._left(self._scored)
        finally:
            self.target.alone = True

    def _scored(self, extent: int) -> None:
        self._score(extent)
        self._choose()
        self._commit()
        if hasattr(self.drafter, "digest"):
            told = self.drafter.digest(self.tree, self.verdict, self.logits, self.active)
            self.packed = torch.cat((self.packed, told), 1)  # one tensor is read back, not two

    def _parts(self) -> list[Any]:
        return [part for part in (self.target, self.drafter) if part is not None]

    def _key(self) -> Any:
        """What a captured round depends on beside its tensors."""
        return (self.clock, *(part.cache.slots for part in self._parts()))

    def _run(self, name: str, program: Callable[[int], None], stats: Stats | None = None) -> Any:
        """A part of the round from the graph of this name; what it leaves lies where the graph has it."""
        captured = self.captured[name]
        before = captured.replays
        left = captured(partial(self._left, program), self._key())
        if stats is not None:
            stats.replays += captured.replays - before
        self.__dict__.update(left)
        if self.clock is not None:
            self.clock.marks = left["marks"]
        return left.get("packed")

    def _left(self, program: Callable[[int], None]) -> dict[str, Any]:
        program(self.target.cache.bound)
        left = {name: self.__dict__[name] for name in LEFT if name in self.__dict__}
        return left if self.clock is None else left | {"marks": self.clock.marks}

    def _stepwise(self, extent: int, stats: Stats, decide: Decide | None) -> list[list[int]]:
        with timed(stats, "draft"):
            self._draft(extent)
        with timed(stats, "score"):
            self._score(extent)
        with timed(stats, "choose"):
            if decide is None:
                self._choose()
            else:
                self.verdict, self.kept = decide()
        with timed(stats, "commit"):
            self._back(extent)
            return self.packed.tolist()  # the round's one read-back

    def _round(self, extent: int) -> None:
        self._front(extent)
        self._choose()
        self._back(extent)

    def _front(self, extent: int) -> None:
        self._draft(extent)
        self._score(extent)

    def _mark(self, name: str) -> None:
        if self.clock is not None:
            self.clock.mark(name)

    def _draft(self, extent: int) -> None:
        if self.clock is not None:
            self.clock.open()
        if hasattr(self.drafter, "mark"):
            self.drafter.mark = unmarked if self.clock is None else self.clock.mark
        self.tree = TokenTree.root_only(self.root) if self.drafter is None else self.drafter.propose(extent)
        if self.filler is not None and self.drafter is not None:
            self.tree = fill_ended(self.tree, self.root, self.ended, self.filler)
        self._mark("draft")

    def _score(self, extent: int) -> None:
        self.logits, self.features = self.target.score(self.tree, extent)
        self._mark("score")

    def _choose(self) -> None:
        uniform, tree = self.uniform(self.tree.tokens.shape), self.tree
        drawn, mixes = tree.q is not None and uniform is not None, hasattr(self.drafter, "mix")
        law = None if drawn or mixes else self.law
        self.scores = self.processed(self.logits) if law is None else self.logits
        if mixes:
            self.scores = self.drafter.mix(tree, self.logits, self.scores)
        if tree.q is not None and uniform is not None:
            self.verdict = walk_drawn(tree, self.scores, tree.q, uniform, self.ops)
        else:
            self.verdict = walk(tree, choose(self.scores, uniform, self.ops, law), self.ops)
        self._mark("choose")

    def _back(self, extent: int) -> None:
        self._commit()
        if self.drafter is not None:
            self.drafter.observe(self.tree, self.verdict, self.logits, self.features, self.heard, extent)
        self._mark("observe")

    def _commit(self) -> None:
        self.target.commit(self.verdict, self.active)
        verdict = self.verdict
        self.packed = self.ops.emit(self.tree.tokens, verdict.path, verdict.accepted, verdict.bonus, self.active, self.root)
        said = self.packed[:, 1:]
        self.verdict = replace(verdict, said=said)
        if self.measure:
            at = self.verdict.path[..., None].expand(-1, -1, self.logits.shape[-1])
            self.measures = measure(self.logits.gather(1, at), said)
        self._mark("commit")

    def _held(self, verdict: Verdict) -> Verdict:
        """A verdict of the host's in the tensors that the captured rest of the round reads."""
        held = self.host_verdict = self.host_verdict or verdict
        for name in ("path", "accepted", "bonus"):
            getattr(held, name).copy_(getattr(verdict, name))
        return held

    def _reserve(self, committed: int) -> int:
        """Make room in the target's and the drafter's buffers; returns how many committed tokens are in bounds."""
        if getattr(self.drafter, "static", False):
            self.drafter.reserve(committed)
        reserve = getattr(self.target, "reserve", None)
        return committed if reserve is None else reserve(committed)


def rounded(longest: int) -> int:
    """Committed tokens that room is made for, so that few lengths tell launches apart."""
    return -(-longest // EXTENT_BUCKET) * EXTENT_BUCKET
