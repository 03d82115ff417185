"""A batch without an end: prompts arrive while it runs, each with its own settings, and its rows follow the load."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, Protocol

import torch
from torch import Tensor

from fastspec.errors import FastSpecError
from fastspec.generation.constraint import Constraint
from fastspec.generation.drafters.base import Place, Process
from fastspec.generation.engine.batching import Wants, brought
from fastspec.generation.engine.call import Prefix, Request
from fastspec.generation.engine.engine import Engine, TargetT
from fastspec.generation.engine.prefix_cache import PrefixBatch, PrefixCache
from fastspec.generation.engine.rounds import Rounds
from fastspec.generation.stats import Stats
from fastspec.generation.tree import DraftTree
from fastspec.generation.verify import RowProcessor
from fastspec.kernels.verification.reference import SamplingSettings


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule by which the tokens of one prompt are chosen: the likeliest, or with `sample` drawn by the numbers of
    `seed`.

    `settings` are all that the processors do, else `process` is what they do to scores [R, V] where they look at no
    history, or `process_at` where they do; then `history` [T] is what they see before the first new token. With a
    `constraint`, which comes before `settings` and `process`, there is no `process_at`.
    """

    sample: bool = False
    seed: int = 0
    settings: SamplingSettings | None = None
    process: Process | None = None
    process_at: RowProcessor | None = None
    history: Tensor | None = None
    constraint: Constraint | None = None
    drafts: bool = True
    """False where no draft may be accepted; the tokens are the same without."""
    is_greedy: bool = field(init=False, repr=False, compare=False)
    """True where it is the likeliest token that the constraint allows."""
    is_plain: bool = field(init=False, repr=False, compare=False)
    """True where it is the likeliest token, of scores that nothing changes."""

    def __post_init__(self) -> None:
        greedy = not self.sample and self.process is None and self.process_at is None
        object.__setattr__(self, "is_greedy", greedy)  # rounds ask it of every row
        object.__setattr__(self, "is_plain", greedy and self.constraint is None)


class Prompt(Protocol):
    """A prompt that arrives, and who asked."""

    ids: Tensor
    """[1, T] int64 its tokens, on the target's device."""
    text: Tensor
    """[T] int64 its tokens, on the host."""
    limit: int
    """Tokens of its answer at most."""
    ends: frozenset[int]
    rule: Rule
    handed: Sequence[int]
    """An answer that another model gave, which `VerifyingRounds` verify as drafts first."""

    def reuse(self, count: int) -> None:
        """So many tokens of it are not read, since a row had read them."""

    @property
    def stop(self) -> Callable[[list[int]], bool] | None:
        """Asked after every token whether the answer ends there, where there are such criteria."""

    @property
    def keeps_logits(self) -> bool:
        """True where `observe` takes the logits of its tokens."""

    @property
    def keeps_tree(self) -> bool:
        """True where `observe` takes draft trees."""

    def observe(self, drafted: int, logits: Tensor | None, tree: DraftTree | None) -> None:
        """Take, before a round's tokens, its number of drafts, the raw logits [N, V] fp32, and its draft tree."""

    def emit(self, tokens: list[int], accepted: int, done: bool) -> None:
        """Take a round's tokens."""

    def finish(self, tokens: list[int], error: BaseException | None) -> None:
        """Take the whole answer, or what went wrong; called once."""

    @property
    def is_cancelled(self) -> bool:
        """True where nobody waits for the answer any more."""


class OpenBatch(PrefixBatch):
    """A batch of so many rows that prompts join as they arrive: each is known by the row that it is in.

    What one of them raises, in a callback or while it is read, ends that one alone. Rows without a prompt hold a text
    of one token, or keep that of their last prompt for `prefixes`.
    """

    def __init__(self, rows: int, stats: Stats, device: torch.device, prefixes: PrefixCache[Any] | None = None) -> None:
        blank = torch.zeros(rows, 1, dtype=torch.long, device=device)
        super().__init__(
            Request(blank, torch.ones_like(blank)[:, 0], [], 0, frozenset(), None, stop=self._stop, emit=self._emit),
            stats,
            prefixes,
        )
        self.alone = True
        self.shared = False
        """True where several processes run the same rounds."""
        self.prompts: list[Prompt | None] = []
        """Prompts that the rows hold, or are about to."""
        self.resize(rows)
        self.queue: deque[Prompt] = deque()
        self.errors: dict[int, BaseException] = {}
        """Errors of the middle of a round, by row."""

    def resize(self, rows: int, order: Sequence[int] | None = None) -> dict[int, int]:
        """Go on with so many rows, the first of which, in an order, hold the prompts -> the row that each was in."""
        kept = [row for row, prompt in enumerate(self.prompts) if prompt is not None]
        moves = dict(zip(order or range(rows), kept, strict=False))
        places = {source: row for row, source in moves.items()}
        held = [moves.get(row) for row in range(rows)]
        self.asked = {(places[row], count): answer for (row, count), answer in self.asked.items() if row in places}
        self.active = [row is not None and self.active[row] for row in held]
        self.limits = [0 if row is None else self.limits[row] for row in held]
        self.ends = [frozenset() if row is None else self.ends[row] for row in held]
        self.out.tokens = [[] if row is None else self.out.tokens[row] for row in held]
        self.prompts = [None if row is None else self.prompts[row] for row in held]
        self.places, self.lengths = list(range(rows)), [1] * rows
        return moves

    def free(self) -> list[int]:
        """Rows without a prompt, as many as there are prompts that wait, and those that kept a text longest first."""
        return self._free()[: len(self.queue)] if self.queue else []

    @property
    def running(self) -> list[bool]:
        return self.active.copy()

    def _free(self) -> list[int]:
        if None not in self.prompts:
            return []
        oldest = self.prefixes.oldest(self.prefixes.current, len(self.prompts))
        return [row for row in oldest if self.prompts[row] is None]

    def ahead(self, count: int) -> list[int]:
        return [prompt.ids.shape[1] for prompt in islice(self.queue, count)]

    def text_of(self, prompt: int) -> Tensor:
        held = self.prompts[prompt]
        assert held is not None
        return held.text

    def text_ahead(self, place: int) -> Tensor:
        return self.queue[place].text

    def row_for(self, prefix: Prefix) -> int:
        return self.prefixes.row_for(prefix, self._free())

    def bring(self, places: Sequence[int]) -> None:
        self.queue = deque(brought(self.queue, places))

    def seat(self, row: int, prompt: int, count: int, prefix: Prefix | None = None) -> None:
        super().seat(row, prompt, count, prefix)
        held = self.prompts[row]
        if prefix is not None and held is not None:
            held.reuse(prefix.count)

    def next(self, row: int) -> tuple[int, Tensor]:
        self.prefixes.expect(row)
        prompt = self.prompts[row] = self.queue.popleft()
        self.out.tokens[row], self.limits[row], self.ends[row] = [], prompt.limit, prompt.ends
        self.asked = {key: answer for key, answer in self.asked.items() if key[0] != row}
        self.errors.pop(row, None)
        return row, prompt.ids

    def expects(self, row: int) -> bool:
        return self.prompts[row] is not None

    def escalate(self, error: BaseException) -> None:
        """Raise an error of memory, of the device, of a file or of a connection where other processes run the same
        rounds: they may not have it, and this one cannot go on without them. What follows from the prompt and its
        settings all of them raise alike."""
        cause: BaseException | None = error
        while isinstance(cause, FastSpecError):
            cause = cause.__cause__
        if self.shared and isinstance(cause, (RuntimeError, MemoryError, OSError)):
            raise error

    def refuse(self, prompt: int, error: BaseException) -> None:
        """End one prompt with an error, if it has not ended."""
        self.escalate(error)
        if self.prompts[prompt] is not None:
            self._leave(prompt, error)

    def wants_of(self, prompt: int) -> Wants:
        held = self.prompts[prompt]
        return Wants() if held is None else Wants(held.keeps_logits, held.keeps_tree, held.rule.drafts)

    @property
    def drafting(self) -> bool:
        going = False
        for on, held in zip(self.active, self.prompts, strict=True):
            if on and (held is None or held.rule.drafts):
                return True
            going = going or on
        return not going

    @property
    def takes_drafts(self) -> list[bool] | None:
        found = [held is None or held.rule.drafts for held in self.prompts]
        return None if all(found) else found

    def goes_on(self, longest: int) -> bool:
        wanted = any(each.logits or (each.tree and each.drafts) for each in self.wants)
        return not wanted and super().goes_on(longest)

    def take(
        self,
        prompt: int,
        tokens: list[int],
        accepted: int,
        scores: Tensor | None,
        logits: Tensor | None,
        drafted: int = 0,
        tree: DraftTree | None = None,
    ) -> None:
        """Takes a round's tokens of a prompt; one that has ended leaves its row."""
        held = self.prompts[prompt]
        try:  # `guarded`, without what its generator costs a row and round
            if held is not None:
                held.observe(drafted, logits, tree)
            super().take(prompt, tokens, accepted, None, None)
        except BaseException as error:
            self.end_later(prompt, error)
        if prompt in self.errors or not self.active[prompt]:
            self._leave(prompt, self.errors.pop(prompt, None))

    def row_of(self, prompt: int) -> int | None:
        """None: prompts are submitted one by one, and no caller has a number for one."""
        return None

    def has_stop(self, prompt: int) -> bool:
        """True where a prompt has criteria; an answer whose criteria raise is over."""
        held = self.prompts[prompt]
        return held is not None and held.stop is not None

    def stopped(self, prompt: int, answer: list[int]) -> bool:
        return self.has_stop(prompt) and super().stopped(prompt, answer)

    @contextmanager
    def guarded(self, row: int) -> Iterator[None]:
        """Block whose error ends the prompt of this row alone, once its round is over."""
        try:
            yield
        except BaseException as error:
            self.end_later(row, error)

    def end_later(self, row: int, error: BaseException) -> None:
        """End the prompt of a row with an error once its round is over."""
        self.escalate(error)
        self.errors.setdefault(row, error)

    def cancel(self) -> None:
        """Let go of prompts that nobody waits for any more; what a launched round emits for them is not read."""
        for row, prompt in enumerate(self.prompts):
            if prompt is not None and prompt.is_cancelled:
                self._leave(row, None)
        for prompt in [prompt for prompt in self.queue if prompt.is_cancelled]:
            self.queue.remove(prompt)
            prompt.finish([], None)

    def fail(self, error: BaseException) -> None:
        """End all prompts that hold rows."""
        for row, prompt in enumerate(self.prompts):
            if prompt is not None:
                self._leave(row, error)

    def ended(self, row: int, tokens: int) -> None:
        """The prompt of a row has ended, with so many tokens, before it began there: the row is free."""
        self.prompts[row] = None
        self.prefixes.end(row)
        self.stats.emitted += tokens

    @property
    def held(self) -> int:
        """Rows that hold a prompt."""
        return sum(prompt is not None for prompt in self.prompts)

    def _leave(self, row: int, error: BaseException | None) -> None:
        prompt, self.prompts[row], self.active[row] = self.prompts[row], None, False
        self.prefixes.end(row)
        self.stats.emitted += len(self.out.tokens[row])
        if prompt is not None:
            prompt.finish(list(self.out.tokens[row]), error)

    def _stop(self, row: int, answer: list[int]) -> bool:
        held, over = self.prompts[row], True
        assert held is not None and held.stop is not None
        with self.guarded(row):
            over = held.stop(answer)
        return over

    def _emit(self, row: int, tokens: list[int], accepted: int, done: bool) -> None:
        held = self.prompts[row]
        assert held is not None
        held.emit(tokens, accepted, done)


PATIENCE = 16
"""After so many turns that needed fewer rows there are fewer. Where more are needed there are more at once."""


class RowCounts(Generic[TargetT]):
    """Rounds of as many rows as the load needs: 1, 2, 4, ... or `rows`. Those of `rows` are made at once, the others
    when they are first needed, and all are kept: together keys and values take the memory of twice `rows` at most.

    `make(count, other)` makes rounds of `count` rows, whose prompts are read in the same target as those of `other`, if
    any. Beside others it may give None: then these go on. Without `narrows`, and with a drafter whose rows do not move,
    there are always `rows`.
    """

    def __init__(
        self,
        make: Callable[[int, Rounds[TargetT] | None], Rounds[TargetT] | None],
        batch: OpenBatch,
        rows: int,
        *,
        narrows: bool,
    ) -> None:
        self.make, self.batch, self.rows = make, batch, rows
        self.steps = [*(1 << power for power in range((rows - 1).bit_length())), rows] if narrows else [rows]
        self.made: dict[int, Rounds[TargetT]] = {}
        self.needed: deque[int] = deque(maxlen=PATIENCE)
        """The rows that the last turns had prompts for."""
        self.room = 0
        """Committed tokens of each row that all rounds have room for."""
        self.begin()

    def begin(self) -> None:
        """Make rounds of all rows, which hold nothing; what there was is dropped."""
        self.made.clear()
        self.needed.clear()
        self.batch.resize(self.rows)
        made = self.make(self.rows, None)
        assert made is not None
        self.current = self.made[self.rows] = made
        self.batch.prefixes.begin(made.engine, self.rows)
        self.batch.prefixes.wider = self._wider
        made.engine.reserve(self.room)
        drafter = self.current.engine.drafter
        if drafter is not None and not drafter.moves:
            self.steps = [self.rows]

    def bytes(self, room: int) -> int:
        """Memory of all rounds' buffers, and of the row that reads prompts, with room for so many tokens a row."""
        return self.current.engine.bytes(room) * (sum(self.steps) + 1) // len(self.batch.prompts)

    def reserve(self, room: int) -> None:
        """Make room for so many committed tokens of each row in all rounds, those that are made later too."""
        self.room = room
        for each in self.made.values():
            each.engine.reserve(room)

    def sizes(self, place: Place) -> dict[int, list[int | None]]:
        """Sizes of trees of captured rounds of every number of rows, by the place of their verdict; None alone where
        none are chosen."""
        found = dict[int, list[int | None]]()
        for step in self.steps:
            made = self.made.get(step)
            sizes = made.engine.sizes if made is not None and made.engine.target.captures else None
            found[step] = [None] if sizes is None else [*sizes.at(place)]
        return found

    def pin(self, size: int | None) -> list[Engine[TargetT]]:
        """Let all rounds have trees of this size, or of the one that they choose -> their engines."""
        engines = [each.engine for each in self.made.values()]
        for engine in engines:
            engine.pinned = size
        return engines

    def make_all(self) -> None:
        """Make the rounds of every number of rows."""
        for step in self.steps:
            self._of(step)

    def turn(self) -> None:
        """A turn of the rounds that the load needs. Before these change no round is launched ahead: prompts move."""
        self.needed.append(self.batch.held + len(self.batch.queue))
        width = next((step for step in self.steps if step >= max(self.needed)), self.rows)
        stays = width == len(self.batch.prompts) or self.current.joining is not None
        if not stays and not self.current.engine.in_flight:
            self._move(width)
            stays = True
        self.current.turn(stays)

    def _move(self, width: int) -> None:
        batch, former, made = self.batch, self.current, self._of(width)
        if made is None:
            return
        batch.prefixes.leave([row for row, prompt in enumerate(batch.prompts) if prompt is not None])
        self.current = made
        moves = batch.resize(width, batch.prefixes.oldest(made.engine, width))
        batch.prefixes.move(made.engine, moves)
        batch.lengths = made.engine.take_rows(former.engine, moves)

    def _of(self, width: int) -> Rounds[TargetT] | None:
        """Rounds of so many rows beside the current ones."""
        made = self.made.get(width) or self.make(width, self.current)
        if made is not None:
            self.made[width] = made
            made.engine.reserve(self.room)
            self.batch.prefixes.add(made.engine, width)
        return made

    def _wider(self) -> Engine[TargetT] | None:
        """The engine of the next larger number of rows."""
        step = next((step for step in self.steps if step > len(self.batch.prompts)), None)
        made = None if step is None else self._of(step)
        return None if made is None else made.engine
