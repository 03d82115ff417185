"""The call as the rounds see it: request, tensors that all rounds share, rounds without drafts, and outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fastspec.generation.constraint import Constraint
from fastspec.generation.drafters.base import Drafter, HostDrafter
from fastspec.generation.stats import Stats
from fastspec.generation.target import Target
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.generation.verify import RowProcessor, Steps

Entry: TypeAlias = Callable[[int], tuple[Target, Drafter | None]]
"""Makes a target and a drafter of so many rows, for prompts to begin in."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `count` tokens of a prompt, read by a row of another target and drafter, written up to `reached`."""

    target: Target
    drafter: Drafter | None
    row: int
    count: int
    reached: int

    def held(self, drafter: Drafter | None) -> Prefix:
        """The prefix for a drafter that joins with it later, when another's row may have been given away."""
        theirs = self.drafter
        if theirs is drafter or not isinstance(theirs, HostDrafter):
            return self
        return replace(self, drafter=theirs.held())

    def begin(self, target: Target, drafter: Drafter | None) -> int:
        """Let a target and a drafter of one row begin behind these tokens -> how many the drafter has read."""
        target.copy_row(0, self.target, self.count, self.row)
        if drafter is None or self.drafter is None:
            return 0
        return drafter.take_prefix(self.drafter, self.row, self.count)


@dataclass(frozen=True, slots=True)
class Request:
    """A call's work: prompts [B, T] (left padding removed, rows filled up on the right) with counts [B] real tokens.

    `context` is the whole text in the same form, where the target's cache holds a part of it already: drafters that
    read no features get it; with an encoder-decoder model they get the source and then the decoder's tokens.
    `history[b]` [T_b] is what a history-dependent processor sees of row b before its first new token, `limit` the
    number of new tokens, `ends` the end tokens. Rows that `stop` ends before the others go on, as in transformers,
    where there are no end tokens and no prompts that wait; else they are over. `process_at` is called level by level of
    the walk where processors look at the history; all others belong to the rounds. `constraint_of` gives the constraint
    of each prompt, by which logits are masked before the rounds process them. With `steps` the rows decode in
    lockstep, and these choose every token and say when a row has ended: `ends`, `stop`, `process_at`, `constraint_of`
    and `keep_scores` are not used. `stop(row, new_tokens)` is asked after every token, and `emit(row, tokens, accepted,
    done)` is called for every round; before that `watch(tree, verdict, logits)` sees the round's tree and the target's
    raw logits [B, N, V] of its nodes, on the device. `answers`, a text per row that another model wrote, are verified
    as drafts first. `measure` asks for `fastspec.generation.verify.measure` of every new token.

    `rows` prompts are decoded at a time, None: all of them. The others wait, and take the place of those that have
    ended: `entry(count)` then gives a target and a drafter of so many rows for prompts to begin in. Such calls have no
    context and no answers.

    `prefill(target)` takes the place of `Target.prefill` for all prompts, where these are more than tokens.
    """

    prompts: Tensor
    counts: Tensor
    history: list[Tensor]
    limit: int
    ends: frozenset[int]
    process_at: RowProcessor | None
    stop: Callable[[int, list[int]], bool] | None = None
    emit: Callable[[int, list[int], int, bool], None] | None = None
    watch: Callable[[TokenTree, Verdict, Tensor], None] | None = None
    context: tuple[Tensor, Tensor] | None = None
    keep_scores: bool = False
    keep_logits: bool = False
    answers: Sequence[Sequence[int]] | None = None
    measure: bool = False
    rows: int | None = None
    steps: Steps | None = None
    constraint_of: Callable[[int], Constraint] | None = None
    entry: Entry | None = None
    prefill: Callable[[Target], tuple[Tensor, Tensor]] | None = None

    def read(self, target: Target) -> tuple[Tensor, Tensor]:
        """Let a target read the prompts -> logits of their last tokens [B, V] and the features of all [B, T, F]."""
        return target.prefill(self.prompts, self.counts) if self.prefill is None else self.prefill(target)

    @property
    def width(self) -> int:
        """Prompts that are decoded at a time."""
        return self.prompts.shape[0] if self.rows is None else self.rows

    @property
    def keeps_logits(self) -> bool:
        """True where the call returns logits, or what is measured in them."""
        return self.keep_scores or self.keep_logits or self.measure

    @property
    def reads_logits(self) -> bool:
        """True where more of the target's logits is asked for than which tokens they make the likeliest."""
        chosen = self.process_at, self.constraint_of, self.steps, self.watch
        return self.keeps_logits or any(each is not None for each in chosen)

    def begins(self) -> Request:
        """The same of the prompts that it begins with."""
        if self.rows is None:
            return self
        counts = self.counts[: self.rows]
        return replace(self, prompts=self.prompts[: self.rows, : int(counts.max())], counts=counts, rows=None)


@dataclass(slots=True)
class Outcome:
    """New tokens per row, trimmed; per row and new token its processed scores and raw logits [V] where asked for, and
    per row the measures [T, 3] of its new tokens. `kept` counts the tokens of each row's given answer that the target
    has emitted too."""

    tokens: list[list[int]]
    scores: list[list[Tensor]] = field(default_factory=list)
    logits: list[list[Tensor]] = field(default_factory=list)
    measures: list[Tensor] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)


class HostCopy:
    """Copy of a tensor on its way to the host, into `host` where that is given. Who reads it does not wait for what is
    launched later."""

    def __init__(self, source: Tensor, host: Tensor | None = None) -> None:
        on_cuda = source.is_cuda
        self.host = torch.empty_like(source, device="cpu", pin_memory=on_cuda) if host is None else host
        self.host.copy_(source, non_blocking=on_cuda)
        self.landed = torch.cuda.Event() if on_cuda else None
        if self.landed is not None:
            self.landed.record(torch.cuda.current_stream(source.device))

    def tolist(self) -> Any:
        """Its values, once they are there."""
        if self.landed is not None:
            self.landed.synchronize()
        return self.host.tolist()


class RoundState:
    """State that all rounds of a call share and change in place: its programs and graphs read the same tensors."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.root = torch.zeros(rows, dtype=torch.long, device=device)
        """[B] int64: the last token of every row, emitted and not yet in the target's cache."""
        self.roots = TokenTree.root_only(self.root)
        """Trees of these alone: made once, since a round that makes them launches two kernels more."""
        self.active = torch.ones(rows, dtype=torch.bool, device=device)
        """[B] bool: the rows that go on."""
        self.ended = torch.zeros_like(self.active)
        """[B] bool: of these, the rows that have ended and are padded, in lockstep."""
        self.streams = torch.zeros_like(self.root)
        """[B] int64: what the answers of the rows are drawn by (`Ops.draws`), where the call samples."""
        self.running, self.padded = [True] * rows, [False] * rows
        """The same two on the host."""

    def activate(self, running: list[bool], padded: list[bool] | None = None) -> None:
        """Say which rows go on, and which of them are padded."""
        padded = padded or [False] * len(running)
        if running != self.running:
            self.running = list(running)
            self.active.copy_(torch.tensor(running, device="cpu"))
        if padded != self.padded:
            self.padded = list(padded)
            self.ended.copy_(torch.tensor(padded, device="cpu"))


class Fallback:
    """The rounds that a call runs without its drafter."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.left = 0
        """How many of the next rounds are such rounds."""
        self.missed: list[list[int]] = []
        """Tokens that the rows emitted in each such round and that the drafter has not observed yet."""
        self.counts: list[int] = []
        """In how many of these each row was still running."""

    def begin(self) -> None:
        """A call begins."""
        self.left, self.missed = 0, []

    def is_next(self, drafter: Drafter | None, later: bool = False) -> bool:
        """True where the next round is such a round; the drafter is asked before every round that it may draft for, and
        before the last of these (`later`: while it runs), so that the rounds of a longer rest are asynchronous
        throughout."""
        if drafter is not None and not later:
            self.extend(drafter)
        if not self.left and drafter is not None:
            self.left = drafter.pause()
        return self.left > 0

    def extend(self, drafter: Drafter) -> None:
        """Ask the drafter for more of these rounds where the next is the last of them."""
        if self.left == 1:
            self.left += drafter.rests_on()

    def count(self, emitted: list[list[int]], state: RoundState) -> None:
        """Take what such a round emitted."""
        if not self.missed:
            self.counts = [0] * len(state.running)
        self.missed.append([row[1] for row in emitted])
        going = zip(self.counts, state.running, state.padded, strict=True)
        self.counts = [count + (running and not padded) for count, running, padded in going]
        self.left -= 1

    def tell(self, drafter: Drafter | None) -> None:
        """Show the drafter what was emitted without it."""
        if self.missed and drafter is not None:
            device = "cpu" if isinstance(drafter, HostDrafter) else self.device
            drafter.catch_up(torch.tensor(self.missed, device=device).T, self.counts)
            self.missed = []

    def hear(self, drafter: Drafter | None) -> None:
        """Show it to a drafter on the host that listens."""
        if isinstance(drafter, HostDrafter) and (drafter.listens or self.left == 1):
            self.tell(drafter)

    def listen(self, drafter: HostDrafter) -> None:
        """Let such a drafter hear, rest on, and count, while a round runs in which it has no part."""
        self.hear(drafter)
        self.extend(drafter)
        drafter.work()
