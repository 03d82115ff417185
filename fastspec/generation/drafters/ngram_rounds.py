"""Drafts of n-grams: which rounds have some.

A round whose drafts come from the host waits for it, in all rows, and all rows score as many nodes. So there are drafts
only where all rows together save more than that takes; the others are the rounds of plain decoding, each of which is
launched before the one in front of it is read. Meanwhile every token says what drafts would have brought
(`Recurrence`), so that nothing is tried in vain. What rounds take is estimated, and measured where a clock may decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastspec.config import Storage
from fastspec.generation.capture import SPENT
from fastspec.generation.drafters.policy import LEAST_TIMES, RoundTimes
from fastspec.generation.drafters.recurrence import Recurrence

IN_VAIN = 0
"""Kind of a round without drafts that waited for a look-up, among `RoundTimes`; others are known by their nodes."""
SEEN, UNSEEN = LEAST_TIMES + 2, 512
"""Rounds without drafts that are run for their time, and rounds with drafts between two such runs."""
EARLY = 64
"""Rounds with drafts of a call before the first of these; an open batch, which goes on, begins with them."""
LEAST_TRIED, STALE = 2, 512
"""Rounds with drafts of a size before their time is known, and rounds without any after which it is no longer: what
held rounds up may be over, and nothing else would tell."""
RESTS = 2
"""Rounds without drafts at the least: the second is launched before the first is read."""
UNHEARD, QUIET, LONGEST = 4, 0.5, 16
"""Rounds for each further row that a rest is longer by: where the host has a part in choosing tokens, so that its other
work holds up the device, and in other open batches, whose answers it hands on; rounds at the most."""
GRANTED, LENT, SHARE, SAVED, OWED = (1.5, 1.0), 1.0, (0.01, 0.006), 4.0, 16.0
"""Target passes that drafts may lose at the start, of one row, for which a round with some is paid at the least, and of
several, of which each loses more; those that a call's round with some may cost beyond; those that every round without
adds, in a call of several rows less, how many there are at most, and how many rounds without have to bring back at
most."""
SLACK = 1.0
"""Target passes at the most that a round is taken to cost beyond what is known of its kind: others may hold it up."""
BEGINS, BEGUN = (1.3, 1.5), 1.1
"""Tokens over cost that drafts have to promise for rounds without any to end, and in a call of several rows, where each
round with drafts that fail costs more of what there is; and times what they have to promise to go on."""
LEAST_HOPE = 0.1
"""Drafts of a row that have to be expected for prices to be looked at."""
WATCHED = 4, 8
"""Rows whose every token is held against what their storages have next: half of all within these, which stand for
all."""
MARGIN = 1.1
"""Tokens per cost that drafts have to promise, over those of a round without that has waited for a look-up."""
FEW, BEYOND_COST, PROMISED = 8, 1.5, 128
"""Rows that go on of an open batch up to which drafts pay by what rounds cost; tokens over cost that they have to
promise to more rows, which part so that each prompt is read alone, and where the host chooses tokens; and rounds over
which what they promise to more rows is averaged: a few stand for all, and drafts that began when these had much to come
brought less. Without these, n-grams cost a 1.5B's 32 served rows up to 17 % (serving_drafts_h200.jsonl)."""


def watched(rows: int) -> int:
    """Number of rows that are watched, of so many."""
    return min(max(rows // 2, WATCHED[0]), WATCHED[1])


class TimedDrafts:
    """Prices of rounds by their nodes, as measured, and what drafts may still lose.

    `costs` has those that are estimated, of the sizes of trees and of 1, and `prices` by how many target passes each is
    more than a plain round; `look` is that of a look-up in vain, and `wait` that of one row's. `most` is the longest
    draft.
    """

    def __init__(
        self, costs: dict[int, float], prices: dict[int, float], look: float, wait: float, rows: int, most: int
    ) -> None:
        self.costs, self.prices, self.look, self.wait = costs, prices, look, wait
        self.sizes = [size for size in costs if size > 1]
        self.times, self.recurrence = RoundTimes(), Recurrence(rows, most)
        self.watched: Sequence[int] = range(0, rows, -(-rows // watched(rows)))
        self.begins, self.ends_at_once = BEGINS[0], False
        """Tokens over cost that drafts have to promise for rounds without any to end; True where a call ends with its
        last row."""
        self.left = GRANTED[1] if rows > 1 else max(GRANTED[0], min(map(prices.__getitem__, self.sizes), default=0.0))
        self.lent, self.share, self.unseen = OWED, SHARE[0], 0
        """Target passes that drafts may lose, those that a round may cost beyond, those that a round without adds, and
        rounds with drafts before those without are timed again."""
        self.idle = 0
        """Rounds since the last one with drafts."""
        self.promise, self.asked = 1.0, 0
        """Tokens over cost that drafts promise many rows on average, and rounds since that was last asked."""
        self.hosted = False
        """True where the host had a part in choosing the last round's tokens, which takes longer."""
        self.waits, self.made, self.timed = False, 0.0, False
        """True where the next round has waited for the host; the seconds that captures took before it; and whether a
        clock may decide."""

    def begin_call(self) -> None:
        """The rows are a call's, which all begin now."""
        several = len(self.recurrence.cursors) > 1
        self.begins, self.share, self.lent = BEGINS[several], SHARE[several], LENT
        self.unseen, self.ends_at_once = EARLY, True

    def spent(self, kind: int) -> float | None:
        """Milliseconds of a round of this kind; None where too few have run."""
        return self.times.ms(~kind if self.hosted else kind, LEAST_TRIED if kind > 1 else LEAST_TIMES)

    def ms(self, size: int) -> float | None:
        """Milliseconds of a round with a tree of so many nodes; a size that has not run takes as much more than its
        estimate as the nearest that has. None before any has."""
        known = {each: spent for each in self.sizes if (spent := self.spent(each)) is not None}
        if not known:
            return None
        near = min(known, key=lambda each: abs(each - size))
        return known[near] * self.costs[size] / self.costs[near]

    def price(self, kind: int) -> float:
        """Target passes that a round of this kind costs more than a plain one, as estimated before both have run."""
        plain, spent = self.spent(1), self.spent(IN_VAIN) if kind == IN_VAIN else self.ms(kind)
        if plain is None or spent is None:
            return self.look if kind == IN_VAIN else self.prices[kind]
        return max(0.0, spent / plain - 1)

    def behind_look_up(self) -> dict[int, float]:
        """Costs of rounds by their nodes, once all rows were looked up."""
        found = {size: spent for size in self.costs if (spent := self.ms(size)) is not None}
        if found and (vain := self.spent(IN_VAIN)) is not None:
            found[1] = vain / MARGIN
        return found or self.costs

    def shared(self, gains: dict[int, int]) -> float:
        """Rounds that an open batch is spared by rows that have accepted so many drafts."""
        if not gains:
            return 0.0
        watched = [row for row in self.watched if row in gains]
        return sum(gains.values()) / len(gains) * (self.recurrence.counted_share(watched) if watched else 1.0)

    def ran(self, kind: int, hosted: bool, gained: float = 0.0, rounds: int = 1) -> None:
        """A round of this kind, or so many, have ended, which spare so many others."""
        self.hosted = hosted
        made, self.made = self.made, SPENT.first_runs + SPENT.captures
        waited, self.waits = kind == 1 and self.waits, False
        told = None if waited or made != self.made else ~kind if hosted else kind
        spent = self.times.take(told, rounds) if self.timed else None
        self.unseen, self.asked = self.unseen - (kind > 1), self.asked + rounds
        self.idle = 0 if kind > 1 else self.idle + rounds
        if self.idle - rounds < STALE <= self.idle:
            for size in self.sizes:
                self.times.forget(size)
                self.times.forget(~size)
        if kind == 1 and not waited:
            self.left = min(SAVED, self.left + self.share * rounds)
            return
        cost, plain = self.wait if kind == 1 else self.price(kind), self.spent(1)
        if spent is not None and plain is not None and made == self.made:
            cost = min(max(0.0, spent / plain - 1), cost + SLACK)
        self.left = max(-OWED, min(SAVED, self.left + gained - cost))

    def _least(self, going: Sequence[bool]) -> float:
        """Tokens over cost, as far as that is known, by which drafts pay."""
        beyond = not self.ends_at_once and (self.hosted or sum(going) > FEW)
        return BEYOND_COST if beyond else 1.0

    def rests(self, going: Sequence[bool], timed: bool) -> int:
        """Rounds without drafts that come next, where rows go on or not; 0: there may be drafts. `timed` says whether a
        clock may decide."""
        self.waits, self.timed = True, timed
        if timed and self.unseen <= 0:
            self.unseen = UNSEEN
            return SEEN
        return 0 if self.left > 0 and self._promises(going) > self._least(going) else RESTS

    def rests_on(self, going: Sequence[bool]) -> int:
        """Rounds without drafts after the next one, which has none either."""
        if self.left > 0 and self._promises(going, following=True) >= max(self.begins, BEGUN * self._least(going)):
            return 0
        more = UNHEARD if self.hosted else 0.0 if self.ends_at_once else QUIET
        return max(1, min(LONGEST, int(more * (sum(going) - 1))))

    def _promises(self, going: Sequence[bool], following: bool = False) -> float:
        """Tokens over cost that drafts are expected to bring, lately where many rows go on."""
        pays, asked, self.asked = self.pays(going, following), self.asked, 0
        if self.ends_at_once or sum(going) <= FEW:
            return pays
        self.promise += min(LONGEST, asked) / PROMISED * (pays - self.promise)
        return self.promise

    def pays(self, going: Sequence[bool], following: bool = False) -> float:
        """Tokens over cost that drafts which may be lost are expected to bring now, or in the round after the next one
        without any; those of a round without are 1."""
        rows = [row for row in self.watched if going[row]] or self._watch(going)
        hopes = [hope for row in rows if (hope := self.recurrence.of(row, following))]
        if sum(hopes) <= LEAST_HOPE * len(rows):
            return 1.0
        if self.ends_at_once:  # the last rows decide, of which one may expect nothing
            hopes, share = [min(hopes) if len(hopes) == len(rows) else 0.0], 1.0
        else:
            share = self.recurrence.counted_share(rows) / len(rows)
        prices = {size: price for size in self.sizes if (price := self.price(size)) <= self.left + self.lent}
        promised = {size: 1 + share * sum([min(hope, size - 1) for hope in hopes]) for size in prices}
        return max((tokens / (1 + prices[size]) for size, tokens in promised.items()), default=1.0)

    def _watch(self, going: Sequence[bool]) -> Sequence[int]:
        """Watch others, of the rows that go on, where none that is watched does -> these rows."""
        rows = [row for row, on in enumerate(going) if on]
        if rows:
            self.watched = rows = rows[:: -(-len(rows) // watched(len(rows)))]
            for row in rows:
                self.recurrence.begin(row)
        return rows

    def hear(self, row: int, storage: Storage, tokens: Sequence[int]) -> bool:
        """Take a row's new tokens -> False where its place is not known, and is asked for."""
        if row not in self.watched:
            return True
        if self.recurrence.cursors[row] is None:
            return False
        self.recurrence.hear(row, storage, tokens)
        return True
