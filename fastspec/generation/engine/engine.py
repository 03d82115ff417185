"""The engine of calls of one kind: a target, a drafter, the programs of their rounds, and their graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fastspec.generation.capture import SPENT, padded_width, padded_widths
from fastspec.generation.constraint import Masks
from fastspec.generation.drafters.base import Drafter, HostDrafter, MixingDrafter, Place, RootsOnly, Unread
from fastspec.generation.drafters.given_text import GivenText
from fastspec.generation.drafters.tree_sizes import TreeSizes
from fastspec.generation.engine.call import Fallback, Prefix, RoundState
from fastspec.generation.engine.round_program import Round, RoundProgram
from fastspec.generation.engine.schedule import Emitted, Schedule, place_of, schedule_of
from fastspec.generation.engine.verifier import Choice, ChoiceRule, Draws, MixedChoice, Verifier
from fastspec.generation.ops import Ops
from fastspec.generation.stats import Clock, Stats
from fastspec.generation.target import Target

TargetT = TypeVar("TargetT", bound=Target)


class Engine(Generic[TargetT]):
    """A target and a drafter of `rows` rows, and all programs of their rounds, which share one state.

    A drafter that mixes makes the rule's choice a `MixedChoice`. `measures` and `pad_token` are those of
    `RoundProgram`. `sizes` chooses how many nodes the trees of a round have; None: those of the drafter's own.
    """

    def __init__(
        self,
        target: TargetT,
        drafter: Drafter | None,
        ops: Ops,
        rule: ChoiceRule,
        *,
        rows: int,
        measures: bool = False,
        pad_token: int | None = None,
        sizes: TreeSizes | None = None,
    ) -> None:
        self.target, self.ops, self.state = target, ops, RoundState(rows, target.lengths.device)
        self.masks = Masks(self.state.root.device)
        """Of rows that are constrained."""
        draws = Draws(ops, self.state.streams, target.lengths) if rule.sample else None
        self.choice = Choice(ops, rule, draws)
        if isinstance(drafter, MixingDrafter):
            self.choice = MixedChoice(ops, drafter, rule, draws)
        self._program = partial(RoundProgram, target, ops=ops, state=self.state, measures=measures, pad_token=pad_token)
        self.resting = None if drafter is None or sizes is None else drafter.resting(self.state.root)
        """Drafter of rounds without drafts, where sizes are chosen."""
        self.kept = [0] * rows
        """Rounds of every row of which it keeps what the drafter has not read, but for one in flight."""
        self.main, self.plain, self.given = (self._program(each) for each in (drafter, self.resting, None))
        """The call's own rounds, those without its drafter, and those that verify a given text."""
        self.fallback = Fallback(self.state.root.device)
        self.undrafted = self._undrafted()
        """Rounds that the drafter hears of and drafts nothing for, where it can."""
        self.drafts = True
        """False where no row takes drafts in the rounds from here on."""
        self.rests = False
        """True where the last round had drafts for no row."""
        self.takes: Sequence[bool] | None = None
        """Rows that take drafts, where not all do."""
        self.current = self.main
        self.sizes = sizes
        self.sized: dict[int, RoundProgram] = {}
        """The rounds of every size that was chosen."""
        self.size = 0
        """That of the last round."""
        self.pinned: int | None = None
        """The size that a warm-up asks for, in place of the one that is chosen."""
        self.measured_from: float | None = None
        """Second from which the next round's time counts; None where other work comes before it."""
        self.leads = True
        """True where other work came since the last round, so that the next one is led (`_lead`)."""
        self.schedules: dict[tuple[RoundProgram, Place], Schedule] = {}
        self.place = Place.DEVICE
        """Place of the last round's verdict."""
        self.last: Round
        """Result of the last round."""
        self.entries: dict[int, tuple[TargetT, Drafter | None]] = {}
        """A target and a drafter of so many rows, where prompts begin that are admitted later, once there were some."""

    @property
    def drafter(self) -> Drafter | None:
        """The call's drafter."""
        return self.main.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | None) -> None:
        self.main.drafter = drafter
        self.undrafted = self._undrafted()

    def _undrafted(self) -> RoundProgram | None:
        drafter, self.plain.behind = self.drafter, None
        if isinstance(drafter, HostDrafter):
            self.plain.behind = partial(self.fallback.listen, drafter)
        if drafter is None or not drafter.observes_roots:
            return None
        program = self._program(RootsOnly(drafter, self.state.root))
        if isinstance(drafter, HostDrafter):
            program.behind = drafter.work
        return program

    def profile(self, clock: Clock | None) -> None:
        """Take the phases of the rounds from here on down, or not."""
        undrafted = () if self.undrafted is None else (self.undrafted,)
        for program in (self.main, self.plain, *undrafted, *self.sized.values()):
            program.clock = clock

    def fits(self, committed: int) -> bool:
        """True where there is room for so many committed tokens of each row already."""
        return self.main.fits(committed)

    def bytes(self, committed: int) -> int:
        """Memory of the buffers with room for so many committed tokens of each row."""
        return self.target.bytes(committed) + (0 if self.drafter is None else self.drafter.bytes(committed))

    def reserve(self, committed: int) -> None:
        """Make room for so many committed tokens of each row, as far as the call may reach."""
        self.target.reserve(committed)
        if self.drafter is not None:
            self.drafter.reserve(committed)

    def begin(self, root: Tensor) -> None:
        """Start after a prompt whose first new tokens are root [B]."""
        self.drain()
        self.fallback.begin()
        self.interrupt()
        self.forget()
        self.state.root.copy_(root)
        self.state.activate([True] * len(self.state.running))

    def defer(
        self,
        reader: Drafter | None,
        ids: Tensor,
        counts: Tensor,
        features: Tensor,
        root: Tensor,
        *,
        refuse: Callable[[int, Exception], None],
    ) -> Unread | None:
        """Let prompts that a drafter would begin with wait until drafts are wanted; None where it has to begin with
        them now: where the next round has drafts, or there is no room for their features. An error of it
        then goes to `refuse`, for every row that took one."""
        resting = self.resting
        if resting is None or reader is None or self.pinned is not None or self._wanted:
            return None
        if not resting.takes(ids.numel()):
            return None
        return Unread(reader, ids, counts, features.clone(), root, refuse)  # the next pass may write over them

    def has_unread(self, row: int) -> bool:
        """True where the drafter has not read the prompt of a row."""
        return self.resting is not None and any(row in each.rows for each in self.resting.unread)

    def admit(
        self,
        row: int,
        target: Target,
        drafter: Drafter | None,
        root: Tensor,
        count: int,
        source: int | None = None,
        unread: Unread | None = None,
    ) -> None:
        """Give a row another prompt, of `count` tokens, which row `source` of this target and this drafter has read
        (None: their only one), or this one is yet to read. root [1] is the first token of its answer, or NO_TOKEN: then
        the prompt is about to leave. No round may be in flight."""
        self.fallback.tell(self.drafter)
        self.interrupt()
        self.forget(row)  # the others' is read later
        if self.resting is not None and unread is not None:
            unread.rows[row] = source or 0, count
            if unread not in self.resting.unread:
                self.resting.unread.append(unread)
        if self.sizes is not None and self.pinned is None:
            self.sizes.join(1 / len(self.state.running))
        self._leave()
        self.target.copy_row(row, target, count, source or 0)
        if drafter is not None and self.drafter is not None and unread is None:
            if source is None:
                self.drafter.copy_row(row, drafter, count)
            else:
                self.drafter.move_row(row, drafter, source, count)
        self.state.root[row] = root[0].clamp(min=0)

    @property
    def joins(self) -> bool:
        """True where the drafter is on the host, and `join` has to follow `admit`."""
        return isinstance(self.drafter, HostDrafter)

    def join(self, row: int, text: Tensor, first: int, prefix: Prefix | None, hint: Sequence[int] = ()) -> None:
        """Let a drafter on the host begin with a text [T], there too, that was admitted to a row, and its first new
        token: once that was read, so that the host waits for nothing else in between."""
        assert isinstance(self.drafter, HostDrafter)
        known = None if prefix is None or prefix.drafter is None else (prefix.drafter, prefix.row, prefix.count)
        self.drafter.join(row, text, max(first, 0), known, hint)

    def copy_row(self, row: int, other: Engine[TargetT], source: int, count: int) -> None:
        """Copy the `count` committed tokens of a row of another engine, to which nothing is in flight."""
        other.settle()
        self.target.copy_row(row, other.target, count, source)
        if self.drafter is not None and other.drafter is not None:
            self.drafter.move_row(row, other.drafter, source, count)

    def take_rows(self, other: Engine[TargetT], rows: Mapping[int, int]) -> list[int]:
        """Go on with rows of another engine, in this one's rows -> how many committed tokens each of these has then."""
        other.end()
        root, lengths = self.state.root.clone(), other.target.lengths.tolist()
        for row, source in rows.items():
            self.copy_row(row, other, source, lengths[source])
            root[row] = other.state.root[source]
        self.begin(root)
        found: list[int] = self.target.lengths.tolist()
        return found

    def step(self, longest: int, stats: Stats, verifier: Verifier, asynchronous: bool = False) -> Emitted:
        """One round, where no row has more than `longest` committed tokens -> per row the number of accepted drafts,
        and the tokens.

        With `asynchronous` the next round is launched before this one is read, where it can be: rows that this round
        ends go on for one more, and only the tokens of this one can be read. Without `drafts` it is a round of
        `undrafted`, or of size 0 where sizes are chosen, unless one of the other rounds is in flight.
        """
        if not self.in_flight:
            self.rests = not self.drafts and self.undrafted is not None
        if self.sizes is not None and self.current is self.main:
            return self._sized_step(self.sizes, longest, stats, verifier, asynchronous)
        if self.rests and self.undrafted is not None:
            self.settle()
            return self._step(self.undrafted, longest, stats, verifier, asynchronous)
        later = not (asynchronous or self.in_flight) and isinstance(self.drafter, HostDrafter)  # behind the launch
        if not later:
            self.fallback.hear(self.drafter)
        if not self.fallback.is_next(self.current.drafter, later):
            return self._step(self.current, longest, stats, verifier, asynchronous)
        emitted = self._step(self.plain, longest, stats, verifier, asynchronous and self.fallback.left > 1)
        self.fallback.count(emitted, self.state)
        if isinstance(self.drafter, HostDrafter):
            self.drafter.come()
        if not self.fallback.left:
            self.fallback.tell(self.drafter)
        elif asynchronous:  # the next round may be in flight
            self.fallback.hear(self.drafter)
        return emitted

    def _sized_step(
        self, sizes: TreeSizes, longest: int, stats: Stats, verifier: Verifier, asynchronous: bool
    ) -> Emitted:
        """`step` with trees of the size that was chosen. It changes where no round is in flight: the last one of a size
        is read before one of another is launched."""
        assert self.resting is not None
        place = place_of(self.main, verifier)
        if self.pinned is None and not self.rests:
            sizes.expect(longest, place)
        began, size = self.measured_from, self._wanted
        if not self.in_flight:
            self.size = size
        chosen = self.pinned is None and not self.rests
        stays = size == self.size and (sizes.goes_on or not chosen)
        # its reading is launched while a round runs; that of prompts is part of what a change costs
        tries_next = self.in_flight and chosen and sizes.tries_next and not self.resting.unread
        made = SPENT.first_runs + SPENT.captures
        if self.size or tries_next or max(self.kept) + self.in_flight > self.resting.backlog - 2:
            self._hand_over()  # part of what the next round takes, but for what is captured in it
        emitted = self._step(self._of_size(sizes, self.size), longest, stats, verifier, asynchronous and stays)
        now, made = time.perf_counter(), SPENT.first_runs + SPENT.captures - made
        if not self.size:
            self.kept = [count + on for count, on in zip(self.kept, self.state.running, strict=True)]
        # a call's first captured rounds wait for the host, and those of a profile for its marks
        settled = (asynchronous or not self.target.captures) and self.main.clock is None
        ms = 1e3 * (now - began) if began is not None and settled and not made else None
        if self.pinned is not None:
            sizes.try_out(self.size, ms, longest, self.sized.keys(), place)
        elif chosen:
            going = zip(emitted, self.state.running, self.state.padded, strict=True)
            rows = [row for row, (_, running, padded) in enumerate(going) if running and not padded]
            takes = [row for row in rows if self.takes is None or self.takes[row]]
            accepted = [max(emitted[row][0], -1 - emitted[row][0]) for row in takes]
            share = len(takes) / len(rows) if rows else 1.0
            sizes.count(self.size, accepted, ms, longest, self.sized.keys(), share, place)
        self.measured_from = now if chosen or self.pinned is not None else None
        return emitted

    @property
    def _wanted(self) -> int:
        """The size of the next round, where sizes are chosen."""
        if self.rests or self.sizes is None:
            return 0
        return self.sizes.size if self.pinned is None else min(self.pinned, len(self.sizes.shapes))

    def warm_reading(self) -> None:
        """Capture how the drafter reads what so many rounds without drafts emitted. No row goes on."""
        if self.resting is None or not self.target.captures:
            return
        self.drain()
        self.settle()
        for width in padded_widths(padded_width(self.resting.backlog)):
            for _ in range(2):  # the first run compiles
                self.resting.hand_over(min(width, self.resting.backlog))

    def _of_size(self, sizes: TreeSizes, size: int) -> RoundProgram:
        """The rounds of a size, 0 without drafts."""
        assert self.drafter is not None
        if size not in self.sized:
            self.sized[size] = self.plain if not size else self._program(self.drafter.sized(sizes.shapes[size - 1]))
            self.sized[size].clock = self.main.clock
        return self.sized[size]

    def _hand_over(self) -> None:
        """Let the drafter read prompts that wait for it, and what rounds without drafts have kept; one in flight is
        launched already."""
        flying = int(self.in_flight and not self.size)
        rounds = max(self.kept) + flying
        if self.resting is not None and (rounds > 0 or self.resting.unread):
            self.resting.hand_over(rounds)
            self.kept, self.leads = [-flying] * len(self.kept), True  # one in flight counts when it is read

    def interrupt(self) -> None:
        """Other work comes before the next round, whose time says nothing then."""
        self.measured_from, self.leads = None, True
        if isinstance(self.drafter, HostDrafter):
            self.fallback.hear(self.drafter)
            self.drafter.interrupt()

    def forget(self, row: int | None = None) -> None:
        """Drop what is kept of a row (None: of all) for the drafter, of prompts and of rounds without drafts: nobody
        drafts after these."""
        self.kept = [0 if row in (None, place) else rounds for place, rounds in enumerate(self.kept)]
        if self.resting is not None:
            self.resting.forget(row)

    def settle(self) -> None:
        """Let the drafter read what was emitted without it; other work comes between two rounds."""
        self.fallback.tell(self.drafter)
        self._hand_over()
        self.measured_from = None

    def _step(
        self, program: RoundProgram, longest: int, stats: Stats, verifier: Verifier, asynchronous: bool
    ) -> Emitted:
        self.place = place_of(program, verifier)
        if isinstance(self.drafter, HostDrafter) and self.drafter.hosted != (hosted := self.place is not Place.DEVICE):
            self.fallback.tell(self.drafter)
            self.drafter.hosted = hosted
        key = program, self.place
        schedule = self.schedules.get(key)
        if schedule is None:
            schedule = self.schedules[key] = schedule_of(program, verifier, self.schedules.values())
        self._leave(schedule)
        if self.leads and self.target.captures:
            self._lead()
        self.last, emitted = schedule.step(verifier, longest, stats, asynchronous)
        return emitted

    def _lead(self) -> None:
        """Launch two kernels with programmatic dependent launch outside a graph: after some that have none, replayed
        rounds took longer on an H200 until such kernels were launched."""
        self.leads = False
        roots = self.state.roots
        for _ in range(2):
            self.ops.tree_input(roots.tokens, roots.depths, self.target.lengths, 0, None)

    def _leave(self, schedule: Schedule | None = None) -> None:
        """Forget what schedules, but for this one, have begun of the next round."""
        for each in self.schedules.values():
            if each is not schedule:
                each.leave()

    @contextmanager
    def verifying(self, texts: Sequence[Sequence[int]]) -> Iterator[GivenText]:
        """Rounds that verify a text per row, before the call's own begin -> what drafts in them."""
        drafter = self.given.drafter = GivenText(texts, self.state.root.device)
        self.current = self.given
        try:
            yield drafter
        finally:
            self.current = self.main

    @property
    def graph(self) -> torch.cuda.CUDAGraph | None:
        """The graph of the call's whole rounds, where there is one; what it reads is left as the last round left it."""
        schedule = self.schedules.get((self.sized.get(self.size, self.main), Place.DEVICE))
        return None if schedule is None else schedule.whole

    @property
    def longest(self) -> int:
        """Tokens at the most of the round that is in flight, or of the next one."""
        if self.fallback.left:
            return self.plain.longest
        if self.sizes is None or self.current is not self.main:
            return self.main.longest
        size = self.size if self.in_flight else self._wanted
        return self.sizes.shapes[size - 1].max_path if size else 1

    @property
    def in_flight(self) -> bool:
        """True where a round was launched before the one in front of it was read."""
        return any(each.in_flight for each in self.schedules.values())

    def drain(self) -> None:
        """Wait for a round that is in flight, and drop its result."""
        for each in self.schedules.values():
            each.drain()

    def end(self) -> None:
        """The call is over: nothing is in flight, and the drafter has observed all of it that was not dropped."""
        self.drain()
        self.settle()
        if isinstance(self.drafter, HostDrafter):
            self.drafter.finish()
        if self.sizes is not None:
            self.sizes.end()
