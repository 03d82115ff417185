"""Prefix caching: rows of a batch keep their texts, and a prompt that begins like one of them is read from there on.

Nothing is stored but what the rows' own buffers hold. The row that is given to a prompt is one without a text, or with
the one that was used longest ago, and that text takes the place of an older one in an engine of more rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic

import torch
from torch import Tensor

from fastspec.errors import FastSpecError
from fastspec.generation.drafters.base import HostDrafter
from fastspec.generation.engine.batching import Batch
from fastspec.generation.engine.call import Prefix, Request
from fastspec.generation.engine.engine import Engine, TargetT
from fastspec.generation.stats import Stats

LEAST, LEAST_CAPTURED = 16, 128
"""Tokens that are worth not being read again; where passes are captured, one over fewer takes the same time."""
IDLE = 256
"""Prompts in a row that begin like no text, after which texts that a drafter has not read are not kept: more than there
are texts at most loads."""
NEVER, GIVEN_UP = -2, -1
"""Uses of a row without a text, and of a text that is part of a later one."""


@dataclass(slots=True, eq=False)
class CachedText:
    """Text of a row: `prompt` [T] int64 on the host, and the `answer` so far. The row's cache holds all of it but the
    last token, and more behind that may not belong to it: it was written up to slot `reached` at least. `used` is the
    number of its last use, and `running` says whether a prompt has the row."""

    prompt: Tensor
    answer: list[int]
    reached: int
    used: int
    running: bool = True
    first: bytes | None = None
    """Its `begins`, once it has so many tokens."""

    @property
    def ids(self) -> Tensor:
        """Its tokens [T]."""
        return torch.cat((self.prompt, torch.tensor(self.answer, dtype=torch.long, device="cpu")))

    def begins(self, count: int) -> bytes | None:
        """`begins` of its tokens, or None where it has fewer; `count` is always the same."""
        if self.first is None and len(self.prompt) + len(self.answer) >= count:
            self.first = begins(self.prompt if len(self.prompt) >= count else self.ids, count)
        return self.first


Texts = list[CachedText | None]
"""The text of each row of an engine."""


def common_length(one: Tensor, other: Tensor) -> int:
    """The number of tokens that two texts [T] begin with alike."""
    length = min(len(one), len(other))
    differs = one[:length].numpy() != other[:length].numpy()
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def begins(text: Tensor, count: int) -> bytes:
    """The first `count` tokens of a text [T] on the host, or all: texts differ in it that have fewer in common."""
    found: bytes = text[:count].numpy().tobytes()
    return found


class PrefixCache(Generic[TargetT]):
    """The texts of the rows of an open batch's engines, one of which, `current`, decodes.

    Prefixes have `least` tokens or more; None: nothing is kept. `unchanged` says whether the model is what it was when
    that was asked last; if not, what rows have read is void. `wider` gives the engine of the next larger number of
    rows, whose buffers may grow for a text; others keep those that fit. `anywhere` says whether something is true of
    this process, or of another that runs the same rounds.
    """

    def __init__(
        self,
        least: int | None = None,
        unchanged: Callable[[], bool] = lambda: True,
        anywhere: Callable[[bool], bool] = bool,
    ) -> None:
        self.least, self.unchanged, self.anywhere = least, unchanged, anywhere
        self.wider: Callable[[], Engine[TargetT] | None] = lambda: None
        self.texts: dict[Engine[TargetT], Texts] = {}
        self.current: Engine[TargetT] | None = None
        self.expected: set[int] = set()
        """Rows of the current engine whose next text is read by the model as it is."""
        self.uses = 0
        self.unlike = IDLE
        """Prompts since one began like a text."""
        self.dropped: deque[bytes | None] = deque(maxlen=IDLE)
        """Beginnings of the last texts that were not kept."""

    @property
    def idle(self) -> bool:
        """True where no prompt has begun like a text lately."""
        return self.least is None or self.unlike >= IDLE

    def begin(self, engine: Engine[TargetT], rows: int) -> None:
        """There is one engine, of so many rows, that holds nothing."""
        self.texts, self.current = {}, engine
        self.expected.clear()
        self.add(engine, rows)

    def add(self, engine: Engine[TargetT], rows: int) -> None:
        """There is an engine of so many rows."""
        self.texts.setdefault(engine, [None] * rows)

    def forget(self) -> None:
        """Void what rows have read, and what is being read."""
        self.texts = {engine: [None] * len(texts) for engine, texts in self.texts.items()}
        self.expected.clear()

    def oldest(self, engine: Engine[TargetT] | None, rows: int) -> list[int]:
        """The rows of an engine in the order in which they are given away."""
        texts = ([] if engine is None else self.texts.get(engine)) or [None] * rows
        return sorted(range(rows), key=lambda row: _age(texts[row]))

    def find(self, prompt: Tensor) -> Prefix | None:
        """The longest prefix of a prompt [T], on the host, that a row holds."""
        found = self.match(prompt)
        if found is not None or (self.least is not None and begins(prompt, self.least) in self.dropped):
            self.unlike = 0
        if found is not None and not self.unchanged():
            self.forget()
            return None
        return found

    def match(self, prompt: Tensor) -> Prefix | None:
        """The same by texts alone: waits for no device to look at weights."""
        best: Prefix | None = None
        if self.least is None:
            return best
        first = begins(prompt, self.least)
        for engine, texts in self.texts.items():
            target, drafter = engine.target, engine.drafter
            reads_next = drafter is not None and drafter.resumes
            for row, text in enumerate(texts):
                if text is None or text.begins(self.least) != first:
                    continue
                ids, least = text.ids, self.least if best is None else best.count + 1
                most = min(common_length(ids, prompt) - reads_next, len(prompt) - 1)
                reached = max(text.reached, len(ids) + 2 * engine.main.longest)  # a round may have run behind its end
                if most >= least and (count := target.reusable(row, len(ids) - 1, most, reached)) >= least:
                    best = Prefix(target, drafter, row, count, reached)
        return best

    def row_for(self, prefix: Prefix, free: Sequence[int]) -> int:
        """A free row, the oldest first, for a prompt with a prefix: where that is most of a text, the text's."""
        engine = next(each for each in self.texts if each.target is prefix.target)
        text = self.texts[engine][prefix.row]
        assert text is not None
        if not isinstance(engine.drafter, HostDrafter):  # such a one hears before the prompt joins
            engine.end()  # its drafter is told of rounds without it
        if text.running or 2 * prefix.count < len(text.ids):
            return free[0]
        text.used = GIVEN_UP
        return prefix.row if engine is self.current and prefix.row in free else free[0]

    def expect(self, row: int) -> None:
        """A prompt is read for a row of the current engine."""
        self.unlike += 1
        if self.least is not None:
            self.expected.add(row)

    def give_away(self, row: int) -> None:
        """A row of the current engine is about to be written."""
        if self.current is not None:
            if self.current.has_unread(row):
                self.drop(row)
            self.save(self.current, row)
            self.texts[self.current][row] = None

    def drop(self, row: int) -> None:
        """The drafter has not read the text of a row of the current engine, and will not: it is not kept."""
        assert self.current is not None
        text = self.texts[self.current][row]
        if text is not None:
            self.dropped.append(text.begins(self.least or 0))
            self.texts[self.current][row] = None

    def put(self, row: int, prompt: Tensor, answer: list[int], reached: int) -> None:
        """A row of the current engine, written up to a slot, has read a prompt [T], and goes on with its answer."""
        if row in self.expected and self.current is not None:
            self.expected.remove(row)
            self.texts[self.current][row] = CachedText(prompt, answer, reached, self._use())

    def end(self, row: int) -> None:
        """The prompt in a row of the current engine has ended."""
        self.expected.discard(row)
        texts = [] if self.current is None else self.texts[self.current]
        text = texts[row] if texts else None
        if text is not None and text.running:
            texts[row] = CachedText(text.ids, [], text.reached, self._use(), running=False, first=text.first)

    def leave(self, held: Collection[int]) -> None:
        """The rounds of the current engine end, where the rows `held` have prompts: its drafter reads no others."""
        assert self.current is not None
        for row in range(len(self.texts[self.current])):
            if row not in held and self.current.has_unread(row):
                self.drop(row)
                self.current.forget(row)
        self.current.end()

    def move(self, engine: Engine[TargetT], moves: dict[int, int]) -> None:
        """Another engine is about to decode: its rows take prompts from rows of the current one, which it has left, by
        `moves`."""
        assert self.current is not None
        texts, former = self.texts[engine], self.texts[self.current]
        for row in moves:
            self.save(engine, row, taken=moves.values())
        for row, source in moves.items():
            texts[row], former[source] = former[source], None
        self.current = engine

    def save(self, engine: Engine[TargetT], row: int, taken: Collection[int] = ()) -> None:
        """Copy the text of a row that is given away over an older one of an engine of more rows, if it is not taken."""
        text = self.texts[engine][row]
        if text is None or text.used == GIVEN_UP:
            return
        found, lost = None, False
        try:
            found = self._place(engine, row, text, taken)
        except FastSpecError:  # there is no memory for it: the text is lost, and nothing else
            lost = True
        if not self.anywhere(lost) and found is not None:
            other, place, count = found
            self.texts[other][place] = None
            other.copy_row(place, engine, row, count)
            self.texts[other][place] = text

    def _place(
        self, engine: Engine[TargetT], row: int, text: CachedText, taken: Collection[int]
    ) -> tuple[Engine[TargetT], int, int] | None:
        """Place for a text, with room for the tokens that its row has committed, and their number."""
        wider, rows = self.wider(), len(self.texts[engine])
        more = {other: texts for other, texts in self.texts.items() if len(texts) > rows}
        count = int(engine.target.lengths[row]) if more else 0
        places = [
            (_age(held), place, other)
            for other, texts in more.items()
            if other is wider or other.fits(count)
            for place, held in enumerate(texts)
            if other is not self.current or place not in taken
        ]
        age, place, other = min(places, key=lambda each: each[:2], default=(text.used, 0, engine))
        if age >= text.used:
            return None
        other.reserve(count)
        return other, place, count

    def _use(self) -> int:
        self.uses += 1
        return self.uses


def _age(text: CachedText | None) -> int:
    return NEVER if text is None else text.used


class PrefixBatch(Batch):
    """A batch whose prompts go on from what rows have read, where its `prefixes` keep that."""

    def __init__(self, request: Request, stats: Stats, prefixes: PrefixCache[Any] | None = None) -> None:
        super().__init__(request, stats)
        self.prefixes: PrefixCache[Any] = prefixes or PrefixCache()

    def keep(self, engine: Engine[Any]) -> None:
        """Keep what the rows of an engine have read, the prompts that they hold first."""
        self.prefixes.begin(engine, len(self.places))
        self.prefixes.least = LEAST_CAPTURED if engine.target.captures else LEAST
        for row, prompt in enumerate(self.places):
            self.prefixes.expect(row)
            self._put(row, prompt, self.counts[prompt])

    @cached_property
    def texts(self) -> Tensor:
        """The tokens [B, T] of the prompts, on the host."""
        return self.request.prompts.cpu()

    def text_of(self, prompt: int) -> Tensor:
        """The tokens [T] of a prompt, on the host."""
        return self.texts[prompt, : self.counts[prompt]]

    def text_ahead(self, place: int) -> Tensor:
        """The same of the prompt at a place of the queue."""
        return self.text_of(self.waiting[place])

    def next(self, row: int) -> tuple[int, Tensor]:
        self.prefixes.expect(row)
        return super().next(row)

    def prefix(self) -> Prefix | None:
        """The first tokens of the next prompt that a row has read."""
        return self.prefixes.find(self.text_ahead(0)) if self.prefixes.least is not None else None

    @property
    def continues(self) -> bool:
        """True where a row has the first tokens of the next prompt, whatever has become of weights since."""
        return self.prefixes.match(self.text_ahead(0)) is not None

    def row_for(self, prefix: Prefix) -> int:
        """The free row that a prompt takes which begins with a prefix."""
        return self.prefixes.row_for(prefix, self.free())

    def unlike(self, places: Sequence[int]) -> int:
        """Number of waiting prompts at these places of the queue, the first at the least, that begin like no row and
        like none of each other."""
        least = self.prefixes.least
        if least is None:
            return len(places)
        seen: dict[bytes, list[Tensor]] = {}
        for count, text in enumerate(map(self.text_ahead, places)):
            alike = seen.setdefault(begins(text, least), [])
            if any(common_length(text, other) > least for other in alike):
                return count
            if count and self.prefixes.find(text) is not None:
                return count
            alike.append(text)
        return len(places)

    def give_away(self, row: int) -> None:
        """A free row is about to be written."""
        self.prefixes.give_away(row)

    def seat(self, row: int, prompt: int, count: int, prefix: Prefix | None = None) -> None:
        super().seat(row, prompt, count)
        if prefix is not None:
            self.stats.reused += prefix.count
        if self.prefixes.least is not None:
            self._put(row, prompt, count if prefix is None else prefix.reached)

    def _put(self, row: int, prompt: int, reached: int) -> None:
        self.prefixes.put(row, self.text_of(prompt), self.out.tokens[prompt], reached)
