"""The rounds of a batch, the prompts that join it between two of them, and the loop of one generate call."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Generic, TypeAlias

import torch
from torch import Tensor

from fastspec.generation.capture import SPENT, padded_width, padded_widths
from fastspec.generation.drafters.base import MixingDrafter, Unread
from fastspec.generation.drafters.given_text import Transcript
from fastspec.generation.engine.batching import Batch
from fastspec.generation.engine.call import Entry, HostCopy, Outcome, Prefix, Request
from fastspec.generation.engine.engine import Engine, TargetT
from fastspec.generation.engine.gathering import Gathering
from fastspec.generation.engine.joining import Joining
from fastspec.generation.engine.prefix_cache import PrefixBatch
from fastspec.generation.engine.verifier import Verifier, verifier_of
from fastspec.generation.stats import Stats, timed
from fastspec.kernels.verification.reference import NO_TOKEN

TOGETHER = 8
"""Prompts at most that one pass reads."""
TOGETHER_TOKENS = 1024
"""Tokens of such a pass at most, padding counted."""
CHUNKS_OF_MANY = 4
"""Chunks of whole prompts that are read between two rounds while more prompts wait than rows go on."""
AHEAD = 64
"""Prompts that wait among which a pass finds those of like lengths."""
PADDING = 64
"""Tokens that a pass may be padded with for each prompt beside the first, whose own pass it saves."""
ROWS_FOR_ONE = 16
"""A call whose prompts nobody waits for lets one row in so many stand idle, until prompts can be read together."""

Waiting: TypeAlias = tuple[int, int, Tensor]
"""A prompt that is to take a row: the row, its number in the batch, and its tokens [1, T]."""


def groups(together: int) -> Iterator[tuple[int, int]]:
    """Numbers of prompts that one pass reads, up to `together`, with the tokens that they are padded to."""
    count = 2
    while count <= together:
        for width in padded_widths(TOGETHER_TOKENS // count):
            yield count, width
        count *= 2


class Rounds(Generic[TargetT]):
    """The rounds of a batch, a turn at a time.

    Before a round prompts that wait take the rows that are free: `entry(count)` gives a target and a drafter of so many
    rows for them to begin in. While other rows go on, no more than `chunk` tokens of prompts are read between two
    rounds, so that these do not wait for a long one, and four times as many of whole prompts while more wait than rows
    go on; None: any number, of a call that nobody hears of before its end.

    Where passes are captured, up to `together` short prompts are read in one, since each pass takes the host some time,
    however short. Where others hear of their answers meanwhile, `gathering` says how long prompts wait for that.
    """

    frees_early: ClassVar[bool] = True
    """True where a row's text is given away before its next prompt's last pass: that may wait for the device."""

    def __init__(
        self,
        engine: Engine[TargetT],
        batch: PrefixBatch,
        verifier: Verifier,
        entry: Entry | None,
        chunk: int | None = None,
        together: int = TOGETHER,
        gathering: Gathering | None = None,
    ) -> None:
        self.engine, self.batch, self.verifier, self.entry, self.chunk = engine, batch, verifier, entry, chunk
        drafter = engine.drafter
        moves = drafter is None or (drafter.moves and not isinstance(drafter, MixingDrafter))
        self.together = together if moves and engine.target.captures else 1
        self.gathered = (
            1 if chunk is not None else min(self.together, max(1, len(engine.state.running) // ROWS_FOR_ONE))
        )
        """Rows that are free before prompts join, where so many wait and others go on."""
        self.gathering = None if chunk is None or self.together == 1 else gathering
        self.joining: Joining | None = None
        """The prompt of which a part was read."""

    def turn(self, stays: bool = True) -> None:
        """Let prompts join, and run a round if any row goes on. Without `stays` the prompts move to another `Rounds`
        after this turn, so that no round may be launched before this one is read."""
        engine, batch = self.engine, self.batch
        if self.joining is not None and not batch.expects(self.joining.row):
            self.joining = None
        read = not engine.in_flight and self._admit()
        if any(batch.running) or engine.in_flight:
            asynchronous = stays and self.joining is None and not self._lets_in() and batch.goes_on(engine.longest)
            engine.state.activate(batch.running, batch.padded)
            engine.drafts = batch.drafting
            engine.takes = batch.takes_drafts
            waiting = self.gathering is not None and bool(batch.free())
            take(engine.step(max(batch.lengths), batch.stats, self.verifier, asynchronous), engine, batch)
            if self.gathering is not None:  # the round in flight may have ended while the batch was idle
                self.gathering.ran(waiting, alone=not read and any(engine.state.running))

    def _lets_in(self) -> bool:
        """True where prompts that wait take rows now."""
        free, gathering = len(self.batch.free()), self.gathering
        if gathering is not None and free and self.batch.reads_together:
            going = sum(self.batch.running)
            may = going and self._groups(max(self.batch.ahead(free))) and gathering.waits(free, going)
            return not may or self.batch.continues  # and is read alone in any case
        gathered = self.gathered if self.batch.reads_together else 1
        return free > 0 and (free >= len(self.batch.ahead(gathered)) or not any(self.batch.running))

    def _groups(self, length: int) -> bool:
        """True where one pass may read a prompt of so many tokens and another such one."""
        return 2 * padded_width(length) <= min(TOGETHER_TOKENS, self.chunk or TOGETHER_TOKENS)

    def _admit(self) -> bool:
        """Read prompts that wait, as far as this turn goes, and give those that were read whole their rows -> whether
        there were any."""
        spent, read = 0, False
        while self.joining is not None or self._lets_in():
            room = self._room(spent)
            if room is not None and (room <= 0 or (spent and self._waits_to_prefill_whole(room))):
                break
            read = True
            with timed(self.batch.stats, "prefill"):
                spent += self._read(room)
        return read

    def _room(self, spent: int) -> int | None:
        """Tokens of prompts that the next pass may read, after the `spent` ones since the last round; None: any."""
        going = sum(self.batch.running)
        if self.chunk is None or not going:
            return None
        many = self.joining is None and len(self.batch.ahead(going + 1)) > going
        return min(self.chunk, self.chunk * (CHUNKS_OF_MANY if many else 1) - spent)

    def _waits_to_prefill_whole(self, room: int) -> bool:
        """True if the next prompt fits whole into the next pass but not into the `room` tokens left of this one."""
        return (
            self.joining is None
            and self.together > 1
            and self.chunk is not None
            and room < self.batch.ahead(1)[0] <= self.chunk
        )

    def _read(self, room: int | None) -> int:
        """Read up to `room` tokens of one prompt, or of several -> how many; the batch hears of what fails. What the
        drafter has not heard it hears while the device reads: an error of that is the turn's, and refuses no prompt."""
        if self.joining is not None:
            return self._read_alone((self.joining.row, self.joining.prompt, self.joining.ids), room)
        batch = self.batch
        prefix = batch.prefix()
        if prefix is not None and not self.engine.joins:
            unread = self.engine.has_unread(prefix.row)
            self.engine.settle()  # a row that runs may have what is read
            prefix = batch.prefix() if unread else prefix  # which is gone where the drafter could not read it
        if prefix is not None:
            row, prefix = batch.row_for(prefix), prefix.held(self.engine.drafter)
            return self._read_alone((row, *batch.next(row)), room, prefix=prefix)
        rows = batch.free()[: self._gather(room)]
        taken = [(row, *batch.next(row)) for row in rows]
        longest, gathering = max(ids.shape[1] for *_, ids in taken), self.gathering
        block = (
            nullcontext()
            if gathering is None or not self._groups(longest)
            else gathering.reading([padded_width(ids.shape[1]) for *_, ids in taken])
        )
        with block:
            return self._read_alone(taken[0], room) if len(taken) == 1 else self._read_together(taken)

    def _gather(self, room: int | None) -> int:
        """Let the prompts that the next pass reads come first -> their number, a power of two, since each has its
        graphs. With the one that waits longest go those of the nearest widths, narrower ones before wider ones."""
        most = min(self.together if self.batch.reads_together else 1, len(self.batch.free()))
        if most == 1:
            return 1
        widths = [padded_width(length) for length in self.batch.ahead(AHEAD)]
        own = widths[0]
        others = sorted(range(1, len(widths)), key=lambda place: (widths[place] > own, abs(widths[place] - own)))
        places = [0, *others[: most - 1]]
        places = places[: self.batch.unlike(places)]
        tokens = TOGETHER_TOKENS if room is None else min(room, TOGETHER_TOKENS)
        count = 1 << (len(places).bit_length() - 1)
        while count > 1:
            taken = [widths[place] for place in places[:count]]
            whole = count * max(taken)
            if whole <= tokens and whole - sum(taken) <= PADDING * (count - 1):
                break
            count //= 2
        if places[:count] != [*range(count)]:
            self.batch.bring(places[:count])
        return count

    def _read_alone(
        self,
        waiting: Waiting,
        room: int | None,
        first: tuple[Tensor, Tensor] | None = None,
        prefix: Prefix | None = None,
    ) -> int:
        """Read up to `room` tokens of a prompt behind its prefix, or of the one that is `joining` -> how many."""
        assert self.entry is not None
        try:
            joining = self.joining = self.joining or Joining(*waiting, *self.entry(1), prefix)
            count = joining.left if room is None else min(room, joining.left)
            if self.frees_early and count == joining.left:
                self.batch.give_away(joining.row)
            if count:
                joining.read(count)
        except Exception as error:
            return self._refuse(waiting, error)
        self.engine.interrupt()
        try:
            return count if joining.left else count + self._arrive(joining, first)
        except Exception as error:
            return self._refuse(waiting, error)

    def _refuse(self, waiting: Waiting, error: Exception) -> int:
        """Refuse a prompt that is read alone -> none of its tokens were read."""
        self.joining = None
        self.batch.refuse(waiting[1], error)
        return 0

    def _arrive(self, joining: Joining, first: tuple[Tensor, Tensor] | None) -> int:
        """Give a prompt that was read whole its row -> the tokens that were read besides."""
        self.joining = None
        root, scores = joining.begin(self.verifier, first, self._defer)
        self.batch.give_away(joining.row)
        self.engine.admit(joining.row, joining.target, joining.drafter, root, joining.done, None, joining.unread)
        token = joining.first.tolist()
        self._seat(joining.row, joining.prompt, joining.done, token, scores, joining.logits, joining.prefix)
        return 0

    def _read_together(self, taken: Sequence[Waiting]) -> int:
        """Read prompts whole in one pass -> the tokens of that, padding counted."""
        assert self.entry is not None
        device = taken[0][2].device
        counts = torch.tensor([ids.shape[1] for _, _, ids in taken], device=device)
        ids = torch.nn.utils.rnn.pad_sequence([ids[0] for _, _, ids in taken], batch_first=True)
        try:
            for row, _, _ in taken:
                self.batch.give_away(row)
            target, drafter = self.entry(len(taken))
            logits, features = target.prefill(ids, counts)
        except Exception as error:
            return self._one_by_one([(each, None) for each in taken], error)
        self.engine.interrupt()
        firsts = [
            self._first(each, logits[place : place + 1], counts[place : place + 1]) for place, each in enumerate(taken)
        ]
        roots = torch.cat([counts.new_zeros(1) if first is None else first[0] for first in firsts])
        told, unread = HostCopy(roots), None
        if drafter is not None:
            try:
                text = ids, counts, features, roots.clamp(min=0)
                unread = self._defer(drafter, *text)
                if unread is None:
                    drafter.begin(*text)
            except Exception as error:
                return self._one_by_one(
                    [pair for pair in zip(taken, firsts, strict=True) if pair[1] is not None], error
                )
        seats = []
        for place, ((row, prompt, own), first) in enumerate(zip(taken, firsts, strict=True)):
            if first is None:
                continue
            try:
                self.engine.admit(row, target, drafter, first[0], own.shape[1], place, unread)
                seats.append((place, row, prompt, own.shape[1], first[1]))
            except Exception as error:
                self.batch.refuse(prompt, error)
        tokens = told.tolist()
        for place, row, prompt, count, scores in seats:
            try:
                self._seat(row, prompt, count, tokens[place : place + 1], scores, logits[place : place + 1])
            except Exception as error:
                self.batch.refuse(prompt, error)
        return ids.numel()

    def _defer(self, *text: Any) -> Unread | None:
        """`Engine.defer`, where no text is gone on from: a row whose prompt the drafter has not read is not kept."""
        return self.engine.defer(*text, refuse=self._unreadable) if self.batch.prefixes.idle else None

    def _unreadable(self, row: int, error: Exception) -> None:
        """End the prompt of a row that the drafter could not read, and keep no text of it."""
        self.batch.refuse(self.batch.places[row], error)
        self.batch.prefixes.drop(row)

    def _one_by_one(self, pairs: Sequence[tuple[Waiting, tuple[Tensor, Tensor] | None]], error: Exception) -> int:
        """Read alone what could not be read together, so that what one prompt raises is that one's -> the tokens. Where
        none of them raises anything, together is what does not work here: it is not tried again, which is said, by an
        error of these where warnings are."""
        self.batch.escalate(error)
        read = [self._read_alone(waiting, None, first) for waiting, first in pairs]
        if all(read):
            self.batch.reads_together = False
            try:
                warnings.warn(
                    f"fastspec: {len(pairs)} prompts could not be read in one pass ({type(error).__name__}: {error}); "
                    "each was read alone, as all that come are from here on",
                    RuntimeWarning,
                    stacklevel=2,
                )
            except RuntimeWarning as raised:
                for (_, prompt, _), _ in pairs:
                    self.batch.refuse(prompt, raised)
        return sum(read)

    def _first(self, waiting: Waiting, logits: Tensor, count: Tensor) -> tuple[Tensor, Tensor] | None:
        """A prompt's first new token [1] and its scores [1, V]; None where it was refused."""
        _, prompt, ids = waiting
        try:
            return self.verifier.first(logits, (ids, count), [prompt])
        except Exception as error:
            self.batch.refuse(prompt, error)
            return None

    def _seat(
        self,
        row: int,
        prompt: int,
        count: int,
        tokens: list[int],
        scores: Tensor,
        logits: Tensor,
        prefix: Prefix | None = None,
    ) -> None:
        """Let a prompt of `count` tokens go on in its row; `tokens` is its first."""
        self.batch.seat(row, prompt, count, prefix)
        if self.engine.joins:
            self.engine.join(row, self.batch.text_of(prompt), tokens[0], prefix)
        self.verifier.seat([row], [prompt])
        self.batch.stats.joined += 1
        self.batch.read(prompt, tokens, scores, logits)


def read_row(row: list[int]) -> list[int]:
    """A row of `Ops.emit` for which no token could be drawn behind the accepted drafts, with NO_TOKEN there."""
    accepted = -1 - row[0]
    return [accepted, *row[1 : 1 + accepted], NO_TOKEN, *row[2 + accepted :]]


def take(emitted: list[list[int]], engine: Engine[TargetT], batch: Batch) -> None:
    """Hand a round's tokens to the prompts that its rows hold."""
    request, stats, last = batch.request, batch.stats, engine.last
    emitted = [row if row[0] >= 0 else read_row(row) for row in emitted]
    if request.watch is not None:
        request.watch(last.tree, last.verdict, last.logits)
    # the next replay writes over them
    measures = None if last.measures is None else last.measures.clone()
    nodes, drafted = last.tree.tokens.shape[1] - 1, last.tree.drafted
    wants = batch.wants
    kept = request.keep_scores or any(want.logits for want in wants)
    paths = [last.verdict.path[row, : told[0] + 1] for row, told in enumerate(emitted)] if kept else []
    scores = (
        [last.scores_along(row, path) for row, path in enumerate(paths)]
        if request.keep_scores
        else [None] * len(emitted)
    )
    answers, padded, counted = batch.out.tokens, engine.state.padded, list[tuple[int, int, int, int]]()
    for row, (prompt, told, want) in enumerate(zip(batch.places, emitted, wants, strict=True)):
        if not batch.active[prompt]:
            continue
        accepted = told[0]
        tokens = told[1 : accepted + 2]
        if padded[row]:
            batch.take(prompt, tokens, accepted, None, None)
            continue
        logits = last.logits[row, paths[row]].float() if want.logits else None
        if measures is not None:
            batch.measures[prompt].append(measures[row, : accepted + 1])
        own, tree = 0, None
        if nodes and want.drafts:
            own = nodes if drafted is None else drafted[row]
            tree = last.tree_of(row, own, accepted) if want.tree else None
        counted.append((prompt, len(answers[prompt]), accepted, own))
        batch.take(prompt, tokens, accepted, scores[row], logits, own, tree)
    batch.count(counted, nodes > 0)
    follows = engine.longest if engine.in_flight else 0
    batch.grow([told[0] + 1 for told in emitted], engine.state.running, follows)
    stats.rounds += 1


def decode(engine: Engine[TargetT], request: Request, name: str) -> Outcome:
    """Run a call to its end; without a drafter every round is one token."""
    target, drafter = engine.target, engine.drafter
    stats = Stats(assistant=name, rows=len(engine.state.root))
    began, first_runs, captures = time.perf_counter(), SPENT.first_runs, SPENT.captures
    batch = PrefixBatch(request, stats)
    verifier = verifier_of(engine.choice, request, batch, engine.masks)
    if engine.choice.draws is not None and request.steps is None:
        engine.choice.draws.begin(len(request.prompts))
    with timed(stats, "prefill"):
        first = request.begins()
        logits, features = first.read(target)
        text = (
            request.context if request.context is not None and not features.shape[-1] else (first.prompts, first.counts)
        )
        root, scores = verifier.first(logits, text, batch.places)
        verifier.seat(range(len(root)), batch.places)
        begun = root.clamp(min=0)  # of a row without a token the call hears below
        if drafter is not None and request.answers is None:
            drafter.begin(*text, features, begun)
        engine.begin(begun)
        if engine.sizes is not None:
            engine.sizes.begin()
        firsts = root.tolist()  # waits for the device: what comes after is the rounds' time
    for row, token in enumerate(firsts):
        one = slice(row, row + 1)
        batch.read(row, [token], scores[one], logits[one])
    batch.lengths = target.lengths.tolist()
    if request.answers is not None:
        with timed(stats, "verify"):
            _verify_answers(engine, verifier, batch, Transcript(*text, features))
    if batch.waiting and (drafter is None or drafter.resumes or not features.shape[-1]):
        batch.keep(engine)
    del features
    rounds = Rounds(engine, batch, verifier, request.entry)
    while any(batch.active):
        rounds.turn()
    engine.forget()
    engine.end()
    batch.finish()
    stats.seconds = time.perf_counter() - began
    stats.first_run_seconds, stats.capture_seconds = SPENT.first_runs - first_runs, SPENT.captures - captures
    return batch.out


def _verify_answers(engine: Engine[TargetT], verifier: Verifier, batch: Batch, read: Transcript) -> None:
    """Rounds over the given answers, then the start of the call's own drafter."""
    request, drafter, root = batch.request, engine.drafter, engine.state.root
    assert request.answers is not None
    with engine.verifying(request.answers) as given:
        given.begin(request.prompts, request.counts, read.blank, root)
        stats, batch.stats = batch.stats, Stats()  # of these rounds, which say nothing of the drafter's
        while given.goes_on and any(batch.active):
            engine.state.activate(batch.active, batch.padded)
            running = [on and not padded for on, padded in zip(batch.active, batch.padded, strict=True)]
            take(engine.step(max(batch.lengths), batch.stats, verifier), engine, batch)
            read.add(engine.last.tree, engine.last.verdict, engine.last.features, running)
        batch.stats = stats
    # a row's last round may go on in its text behind the end
    batch.out.kept = [min(kept, len(answer)) for kept, answer in zip(given.kept, batch.out.tokens, strict=True)]
    if drafter is not None:
        drafter.hint(request.answers)
        drafter.begin(*read.whole(), root.clone())
