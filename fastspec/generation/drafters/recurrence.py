"""Chances that texts go on as they did before, learnt from every token of a batch whether it was drafted or not.

A storage's likeliest continuation of each place is held against the token that comes. So it is known what drafts would
bring before a round has any, and rounds without drafts need not wait for the host to find out.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastspec.config import Cursor, Storage

LENGTHS, STREAKS = 3, 8
"""Kinds of places: by the tokens of the known context, and by how many tokens before were foretold."""
PRIOR, BEFORE = (0.1, 0.3, 0.8), 8.0
"""Chances that a place's likeliest token comes, by the length of its context, before any was seen, and the tokens that
each counts for beside those that were foretold."""
TRUSTED, RENEWED = 16, 0.02
"""Places that a prior counts for, and the least weight of a further place."""
LEARNT = 16
"""Tokens after which chances are looked at again."""
FRESH = 0.03
"""Weight of a further token in what drafts of a row are expected to bring over a longer time."""

FIRST = tuple((BEFORE * chance + streak) / (BEFORE + streak) for chance in PRIOR for streak in range(STREAKS))
"""Chances by kind of place before any was seen."""


def expectations(chances: Sequence[float], most: int) -> tuple[list[float], list[float]]:
    """Drafts that are accepted after a place, `most` at the most, and those after the token that comes next there, by
    kind, from the chances that the likeliest token comes."""
    last = STREAKS - 1
    expected, following = [0.0] * len(chances), [0.0] * len(chances)
    for length in reversed(range(LENGTHS)):
        for streak in reversed(range(STREAKS)):
            kind = length * STREAKS + streak
            chance = chances[kind]
            if length == LENGTHS - 1 and streak == last:
                then = chance * (1 - chance**most) / (1 - chance) if chance < 1 else float(most)
            else:
                then = expected[min(length + 1, LENGTHS - 1) * STREAKS + min(streak + 1, last)]
            following[kind] = chance * then
            expected[kind] = min(float(most), chance * (1 + then))
    return expected, following


class Recurrence:
    """Chances by kind of place, and the place of every row. `most` is the longest draft."""

    def __init__(self, rows: int, most: int) -> None:
        self.most = most
        self.chances = [*FIRST]
        self.seen = [TRUSTED] * len(self.chances)
        self.cursors: list[Cursor | None] = [None] * rows
        """Places of the rows after their last token; None where that is not known yet."""
        self.guesses: list[tuple[int, int] | None] = [None] * rows
        """Kind of each row's place, and the likeliest token there; None where nothing is known."""
        self.streaks, self.gains = [0] * rows, [0.0] * rows
        """Last tokens of each row that were foretold, and drafts that it is expected to accept over a longer time."""
        self.unlearnt = 0
        """Tokens since expectations were made."""
        self.expected, self.following = expectations(FIRST, most)
        """By these chances."""

    def begin(self, row: int) -> None:
        """A row has another text, at a place that is not known."""
        self.cursors[row], self.guesses[row], self.streaks[row] = None, None, 0

    def move(self, row: int, other: Recurrence, source: int) -> None:
        """A row goes on with that of another batch, if its place is known."""
        if other.cursors[source] is None:
            self.begin(row)
            return
        self.cursors[row], self.guesses[row] = other.cursors[source], other.guesses[source]
        self.streaks[row], self.gains[row] = other.streaks[source], other.gains[source]

    def hear(self, row: int, storage: Storage, tokens: Sequence[int]) -> None:
        """Take tokens of a row whose place is known; of more than `STREAKS` the first ones are not looked at."""
        if len(tokens) > STREAKS:
            cursor, self.streaks[row] = self.cursors[row], 0
            for token in tokens[:-STREAKS]:
                cursor = storage.step(cursor, token)
            self.stand(row, storage, cursor)
            tokens = tokens[-STREAKS:]
        for token in tokens:
            if (guess := self.guesses[row]) is not None:
                kind, likely = guess
                hit = token == likely
                self.seen[kind] += 1
                self.chances[kind] += (hit - self.chances[kind]) * max(RENEWED, 1 / self.seen[kind])
                self.streaks[row] = min(self.streaks[row] + 1, STREAKS - 1) if hit else 0
            self.stand(row, storage, storage.step(self.cursors[row], token))
        self.unlearnt += len(tokens)
        if self.unlearnt >= LEARNT:
            self.expected, self.following = expectations(self.chances, self.most)
            self.unlearnt = 0

    def stand(self, row: int, storage: Storage, cursor: Cursor) -> None:
        """Set the place of a row, and what is likeliest there."""
        self.cursors[row] = cursor
        length, known = storage.look(cursor)
        if known and length:
            self.guesses[row] = (min(length, LENGTHS) - 1) * STREAKS + self.streaks[row], known[0][0]
        else:
            self.guesses[row], self.streaks[row] = None, 0
        self.gains[row] += FRESH * (self.of(row) - self.gains[row])

    def of(self, row: int, following: bool = False) -> float:
        """Drafts of a row that are expected to be accepted now, or in the round after the next one without any."""
        guess = self.guesses[row]
        return 0.0 if guess is None else (self.following if following else self.expected)[guess[0]]

    def counted_share(self, rows: Sequence[int]) -> float:
        """Share of what drafts bring to all of these rows that counts: what the rows save of their time a token, over
        what they would if all accepted alike. A round with drafts holds up those that accept none."""
        gains = [self.gains[row] for row in rows]
        mean = sum(gains) / len(gains)
        return (len(gains) / sum([1 / (1 + each) for each in gains]) - 1) / mean if mean > 0 else 1.0
