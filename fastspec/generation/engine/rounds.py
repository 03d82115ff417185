"""The rounds of a batch, and the prompts that join it between two of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

import torch
from torch import Tensor

from fastspec.generation.drafters.base import Drafter
from fastspec.generation.engine.batching import Batch
from fastspec.generation.engine.engine import Engine, TargetT
from fastspec.generation.engine.verifier import Verifier
from fastspec.generation.stats import timed
from fastspec.generation.target import Target


class Joining:
    """A prompt on its way into a row: a target and a drafter of one row read it, a part at a time.

    `prompt` is its number in the batch, ids [1, T] are its tokens.
    """

    def __init__(self, row: int, prompt: int, ids: Tensor, target: Target, drafter: Drafter | None) -> None:
        self.row, self.prompt, self.ids, self.target, self.drafter = row, prompt, ids, target, drafter
        self.done = 0
        """Tokens that were read."""
        self.features: list[Tensor] = []
        self.logits: Tensor

    @property
    def left(self) -> int:
        """Tokens that are still to be read."""
        return self.ids.shape[1] - self.done

    def read(self, most: int) -> None:
        """Read so many of the tokens."""
        part = self.ids[:, self.done : self.done + most]
        self.logits, features = self.target.prefill(part, torch.tensor([part.shape[1]], device=part.device))
        self.done += part.shape[1]
        if self.drafter is not None:
            self.features.append(features)

    def begin(self, verifier: Verifier) -> tuple[Tensor, Tensor]:
        """Begin behind the whole prompt -> its first new token [1], and the processed scores [1, V]."""
        text = self.ids, torch.tensor([self.done], device=self.ids.device)
        root, scores = verifier.first(self.logits, text, [self.prompt])
        if self.drafter is not None:
            self.drafter.begin(*text, self.features[0] if len(self.features) == 1 else torch.cat(self.features, 1), root)
        return root, scores


class Rounds(Generic[TargetT]):
    """The rounds of a batch, a turn at a time.

    Before a round prompts that wait take the rows that are free: `entry()` gives a target and a drafter of one row for each to begin in.
    While other rows go on, no more than `chunk` tokens of prompts are read between two rounds, so that these do not wait for a long one;
    None: any number.
    """

    def __init__(
        self, engine: Engine[TargetT], batch: Batch, verifier: Verifier, entry: Callable[[], tuple[Target, Drafter | None]] | None,
        chunk: int | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.batch, self.verifier, self.entry, self.chunk = engine, batch, verifier, entry, chunk
        self.joining: Joining | None = None
        """The prompt of which a part was read."""

    def turn(self, stays: bool = True) -> None:
        """Let prompts join, and run a round if any row goes on. Without `stays` the prompts move to another `Rounds` after this turn, so
        that no round may be launched before this one is read."""
        engine, batch = self.engine, self.batch
        if self.joining is not None and not batch.expects(self.joining.row):
            self.joining = None
        if not engine.in_flight:
            self._admit()
        if any(batch.running) or engine.in_flight:
            asynchronous = stays and self.joining is None and not batch.free() and batch.goes_on(engine.main.longest)
            engine.state.activate(batch.running, batch.padded)
            take(engine.step(max(batch.lengths), batch.stats, self.verifier, asynchronous), engine, batch)

    def _admit(self) -> None:
        """Read prompts that wait, as far as this turn goes, and give those that were read whole their rows."""
        spent = 0
        while self.joining is not None or self.batch.free():
            room = None if self.chunk is None or not any(self.batch.running) else self.chunk - spent
            if room is not None and room <= 0:
                return
            with timed(self.batch.stats, "prefill"):
                spent += self._read(room)

    def _read(self, room: int | None) -> int:
        """Read up to `room` tokens of one prompt -> how many; the batch hears of what fails."""
        batch = self.batch
        if self.joining is None:
            row = batch.free()[0]
            prompt, ids = batch.next(row)
        else:
            prompt = self.joining.prompt
        try:
            if self.joining is None:
                assert self.entry is not None
                self.joining = Joining(row, prompt, ids, *self.entry())
            joining = self.joining
            count = joining.left if room is None else min(room, joining.left)
            joining.read(count)
            if not joining.left:
                self.joining = None
                self._seat(joining)
            return count
        except Exception as error:
            self.joining = None
            batch.refuse(prompt, error)
            return 0

    def _seat(self, joining: Joining) -> None:
        engine, batch = self.engine, self.batch
        root, scores = joining.begin(self.verifier)
        engine.admit(joining.row, joining.target, joining.drafter, root, joining.done)
        tokens = root.tolist()
        batch.seat(joining.row, joining.prompt, joining.done)
        batch.stats.joined += 1
        batch.read(joining.prompt, tokens, scores, joining.logits)


def take(emitted: list[list[int]], engine: Engine[TargetT], batch: Batch) -> None:
    """Hand a round's tokens to the prompts that its rows hold."""
    request, stats, last = batch.request, batch.stats, engine.last
    if request.watch is not None:
        request.watch(last.tree, last.verdict, last.logits)
    measures = None if last.committed.measures is None else last.committed.measures.clone()  # the next replay writes over them
    nodes, drafted = last.tree.tokens.shape[1] - 1, last.tree.drafted
    asked = request.keep_scores or request.keep_logits
    paths = [last.verdict.path[row, : accepted + 1] for row, (accepted, *_) in enumerate(emitted)] if asked else []
    scores = [last.scores_along(row, path) for row, path in enumerate(paths)] if request.keep_scores else [None] * len(emitted)
    for row, (prompt, (accepted, *tokens)) in enumerate(zip(batch.places, emitted, strict=True)):
        if not batch.active[prompt]:
            continue
        if engine.state.padded[row]:
            batch.take(prompt, tokens[: accepted + 1], accepted, None, None)
            continue
        stats.count_round(accepted, nodes if drafted is None else drafted[row], nodes > 0)
        logits = last.logits[row, paths[row]].float() if request.keep_logits else None
        if measures is not None:
            batch.measures[prompt].append(measures[row, : accepted + 1])
        batch.take(prompt, tokens[: accepted + 1], accepted, scores[row], logits)
    follows = engine.main.longest if engine.in_flight else 0
    batch.grow([accepted + 1 for accepted, *_ in emitted], engine.state.running, follows)
    stats.rounds += 1
