"""Fakes of what `Rounds` runs: a target and a drafter of one row, a verifier, a batch and an engine that keep what they
are told."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fastspec.generation.engine.batching import brought
from fastspec.generation.engine.call import RoundState
from fastspec.generation.engine.prefix_cache import PrefixCache
from fastspec.generation.stats import Stats

CPU, LONGEST = torch.device("cpu"), 3


class Reader:
    """A target of one row that keeps the parts it reads; logits [1, 1] say how many tokens there are, features [1, T,
    1] are the tokens."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.fails, self.reserved = False, 0

    def reserve(self, committed: int) -> None:
        self.reserved = max(self.reserved, committed)

    def prefill(self, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        if self.fails:
            raise ValueError("unreadable")
        assert counts.tolist() == [ids.shape[1]] and counts.device == CPU and self.reserved
        self.parts += ids.tolist()
        return torch.full((1, 1), float(sum(map(len, self.parts))), device=CPU), ids[..., None].float()


class Told:
    """A drafter that keeps how it was begun with."""

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        assert counts.device == CPU
        self.told = ids.tolist(), counts.tolist(), features[0, :, 0].tolist(), root.tolist()


class Counting:
    """A verifier whose first token is the number of tokens in front of it, and that keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.seated: list[tuple[list[int], list[int]]] = []

    def first(self, logits: Tensor, text: tuple[Tensor, Tensor], prompts: list[int]) -> tuple[Tensor, Tensor]:
        self.asked.append((logits.tolist(), text[0].tolist(), text[1].tolist(), list(prompts)))
        return text[1].clone(), logits + 0.5

    def joined(self, logits: Tensor, text: tuple[Tensor, Tensor], prompt: int, drafter: Any) -> tuple[Tensor, Tensor]:
        return self.first(logits, text, [prompt])

    def seat(self, rows: list[int], prompts: list[int]) -> None:
        self.seated.append((list(rows), list(prompts)))


class Waiting:
    """A batch of rows that hold prompts by number, of which a test says what ends; it keeps what it is told."""

    def __init__(self, rows: int, *prompts: int) -> None:
        self.stats, self.log = Stats(), []  # type: tuple[Stats, list[Any]]
        self.running, self.padded, self.lengths = (
            [False] * rows,
            [False] * rows,
            [10 * (row + 1) for row in range(rows)],
        )
        self.texts, self.queue = prompts, deque(enumerate(prompts))
        """(number, tokens) of each prompt."""
        self.reads_together = self.drafting = True
        self.takes_drafts: list[bool] | None = None
        self.prefixes: PrefixCache[Any] = PrefixCache()
        self.wanted, self.long, self.reserved = True, True, set()  # type: tuple[bool, bool, set[int]]

    def free(self) -> list[int]:
        return [row for row, on in enumerate(self.running) if not on and row not in self.reserved][: len(self.queue)]

    def escalate(self, error: BaseException) -> None:
        """Nothing ends more than one prompt."""

    def ahead(self, count: int) -> list[int]:
        assert count > 0
        return [length for _, length in self.queue][:count]

    def next(self, row: int) -> tuple[int, Tensor]:
        number, length = self.queue.popleft()
        self.reserved.add(row)
        self.log.append(("next", row, number))
        return number, torch.arange(length, device=CPU)[None] + 100 * number

    def expects(self, row: int) -> bool:
        self.log.append(("expects", row))
        if not self.wanted:
            self.reserved.discard(row)
        return self.wanted

    def goes_on(self, longest: int) -> bool:
        return longest == LONGEST and self.long

    def prefix(self) -> None:
        return None

    def text_of(self, prompt: int) -> Tensor:
        return torch.empty(self.texts[prompt])

    def unlike(self, places: Sequence[int]) -> int:
        return len(places)

    def bring(self, places: Sequence[int]) -> None:
        self.queue = deque(brought(self.queue, places))

    def give_away(self, row: int) -> None:
        assert not self.running[row]

    def seat(self, row: int, prompt: int, count: int, prefix: None) -> None:
        self.running[row], self.lengths[row] = True, count
        self.log.append(("seat", row, prompt, count))

    def read(self, prompt: int, tokens: list[int], scores: Tensor, logits: Tensor) -> None:
        self.log.append(("read", prompt, tokens, scores.tolist(), logits.tolist()))

    def refuse(self, prompt: int, error: Exception) -> None:
        self.reserved.clear()
        self.log.append(("refuse", prompt, str(error)))


class Stepping:
    """An engine that keeps what it is asked; `take` is another test's."""

    def __init__(self, rows: int, drafts: bool = False) -> None:
        self.state, self.longest, self.in_flight, self.joins = RoundState(rows, CPU), LONGEST, False, True
        self.target, self.drafter = SimpleNamespace(captures=False), None
        self.steps: list[Any] = []
        self.admitted: list[Any] = []
        self.joined: list[tuple[int, int, int]] = []
        self.entries: list[tuple[Reader, Told | None]] = []
        self.drafts, self.failing = drafts, set()  # type: tuple[bool, set[int]]

    def entry(self, count: int) -> tuple[Reader, Told | None]:
        assert count == 1
        self.entries.append((Reader(), Told() if self.drafts else None))
        self.entries[-1][0].fails = len(self.entries) - 1 in self.failing
        return self.entries[-1]

    def defer(self, *text: Any, refuse: Any) -> None:
        """No prompt waits for its drafter."""

    def admit(
        self,
        row: int,
        target: Reader,
        drafter: Any,
        root: Tensor,
        count: int,
        source: int | None = None,
        unread: None = None,
    ) -> None:
        assert source is unread is None
        self.admitted.append((row, self.entries.index((target, drafter)), root.tolist(), count))

    def join(self, row: int, text: Tensor, first: int, prefix: None) -> None:
        assert prefix is None
        self.joined.append((row, len(text), first))

    def interrupt(self) -> None:
        """No time of its rounds is taken."""

    def step(self, longest: int, stats: Stats, verifier: Any, asynchronous: bool) -> Any:
        self.steps.append((longest, stats, verifier, asynchronous, list(self.state.running), list(self.state.padded)))
        return "emitted"
