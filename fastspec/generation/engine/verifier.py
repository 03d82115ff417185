"""Verifiers decide which tokens a call emits: on the device, or on the host for processors, criteria and mixtures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastspec.errors import Unsupported
from fastspec.generation.constraint import ConstrainedWalk, Held, Masks, nodes_of, roots_of
from fastspec.generation.drafters.base import Drafter, MixingDrafter, Place, Process
from fastspec.generation.engine.batching import Batch
from fastspec.generation.engine.call import Request
from fastspec.generation.engine.round_program import Scored, VerifiedTree
from fastspec.generation.ops import Ops
from fastspec.generation.tree import TokenTree
from fastspec.generation.verify import (
    RowProcessor,
    Steps,
    choose,
    pick_allowed,
    walk,
    walk_allowed,
    walk_drawn,
    walk_in_step,
    walk_with_history,
)
from fastspec.kernels.verification.reference import NO_TOKEN, SamplingSettings, stream_of, uniform_at

NEVER_PICKED = NO_TOKEN - 1
"""Stands for the drafts of a row that takes none."""
Text = tuple[Tensor, Tensor]
"""Tokens [B, T] and how many of them are real in each row [B]."""


class Verifier(ABC):
    """Chooses the tokens of a call."""

    place: Place = Place.HOST
    walks = False
    """True where a FED verdict on trees of drafts may be corrected by the host (`FedVerifier.decide`)."""

    @abstractmethod
    def first(self, logits: Tensor, text: Text, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """First tokens of prompts whose text was read, from raw logits [B, V] -> tokens [B], scores [B, V] fp32."""

    def joined(self, logits: Tensor, text: Text, prompt: int, drafter: Drafter | None) -> tuple[Tensor, Tensor]:
        """`first` of a prompt that joins the rounds, and that `drafter` is about to begin with."""
        return self.first(logits, text, [prompt])

    @abstractmethod
    def __call__(self, scored: Scored) -> VerifiedTree:
        """The verdict on a scored tree."""

    def seat(self, rows: Sequence[int], prompts: Sequence[int]) -> None:  # noqa: B027
        """Rows go on with these prompts, of which the first tokens were chosen and are not committed yet. Nothing where
        draws go by positions, or where plain decoding's steps draw."""


class FedVerifier(Verifier):
    """Verifier whose verdict on roots alone is the device's, by `masks` that the host has brought there before: it runs
    `feed`, and then `fed`, wherever its place is FED. On a tree of drafts it is the device's by `choices` and `walked`,
    between which the host walks along what the device has chosen (`decide`)."""

    masks: Masks
    ops: Ops

    @abstractmethod
    def _held(self) -> Held:
        """The rows that go on and have a constraint."""

    def _failed(self, row: int, error: BaseException) -> None:
        """Take what a row's constraint has raised."""
        raise error

    def _undrafted(self) -> Sequence[int]:
        """Rows that take none of their tree's drafts."""
        return ()

    def feed(self, scored: Scored) -> None:
        """Bring the roots' masks to the device. Nothing is read of the scored tree but its sizes."""
        self._feed(scored, self._held(), {})

    def _feed(self, scored: Scored, held: Held, at: Mapping[int, int]) -> None:
        """Bring the masks of one node of each row: of the nodes `at`, and of the others' roots."""
        rows, nodes = scored.tree.tokens.shape
        places = [row * nodes + at.get(row, 0) for row in range(rows)]
        self.masks.fill(roots_of(rows), scored.logits.shape[-1], held, self._failed, places)

    def choices(self, scored: Scored, out: Tensor) -> Tensor:
        """Tokens, parents and likeliest tokens [3, B, N] of a tree, these last with the likeliest allowed one at the
        nodes that masks were brought of; a DEVICE phase."""
        tree, at = scored.tree, self.masks.at.long()
        picks = choose(scored.logits, None, self.ops)
        found = choose(self.masks.masked(scored.logits.flatten(0, 1)[at][:, None]), None, self.ops)[:, 0]
        picks = picks.flatten().index_copy(0, at, found).view_as(picks)
        return torch.stack((tree.tokens, tree.parents, picks), out=out)

    def decide(self, scored: Scored, chosen: Callable[[], Tensor]) -> None:
        """Correct `choices` where walks need it. `chosen` runs them and gives the host's copy, which is corrected."""
        undrafted, going = self._undrafted(), [ConstrainedWalk(*each) for each in self._held()]
        host = chosen()  # the device is idle from here on
        told: list[list[list[int]]] = host.tolist()
        for row in undrafted:
            told[0][row][1:] = [NEVER_PICKED] * (host.shape[2] - 1)
        for each in going:
            each.step(told[2][each.row][0], *(part[each.row] for part in told))

        def ask(waiting: list[ConstrainedWalk]) -> list[int]:
            at = {each.row: each.at[0] for each in waiting}
            self._feed(scored, [(each.row, each.constraint, each.text) for each in waiting], at)
            found = chosen().numpy()[2]
            return [int(found[row, node]) for row, node in at.items()]

        walk_allowed(told, going, ask, self._failed)
        parts = host.numpy()
        for each in going:
            parts[2, each.row] = told[2][each.row]
        for row in undrafted:
            parts[0, row] = told[0][row]

    def walked(self, choices: Tensor, scored: Scored) -> VerifiedTree:
        """The verdict by corrected choices; a DEVICE phase."""
        return VerifiedTree(scored, walk(replace(scored.tree, tokens=choices[0]), choices[2], self.ops), None)

    @abstractmethod
    def fed(self, scored: Scored) -> VerifiedTree:
        """The verdict on a tree of one node a row; a DEVICE phase."""

    @property
    def key(self) -> Hashable:
        """Key of where `feed` has brought it."""
        return self.masks.key


class Draws:
    """The random numbers of a call, by prompt and by place in its answer, so that a seed gives the same tokens whatever
    the trees are.

    `streams` and `lengths` [B] are those of the engine's rows, which captured rounds read.
    """

    def __init__(self, ops: Ops, streams: Tensor, lengths: Tensor) -> None:
        self.ops, self.streams, self.lengths = ops, streams, lengths
        self.seeds = streams[:0]

    def begin(self, prompts: int) -> None:
        """Seeds of a call of so many prompts, from torch's own generator of the CPU."""
        self.seeds = torch.randint(0, 2**63 - 1, (prompts,), device="cpu").to(self.streams.device)

    def first(self, prompts: Sequence[int]) -> Tensor:
        """Numbers [R] in [0, 1) of the first tokens of these prompts."""
        seeds = self.seeds[list(prompts)]
        return uniform_at(seeds, torch.zeros_like(seeds))

    def seat(self, rows: Sequence[int], prompts: Sequence[int]) -> None:
        """Rows go on with these prompts."""
        self.streams[list(rows)] = stream_of(self.seeds[list(prompts)], self.lengths[list(rows)])

    def at(self, tree: TokenTree) -> Tensor:
        """Numbers [B, N] of the tokens that are chosen at a tree's nodes."""
        return self.ops.draws(self.streams, self.lengths, tree.depths)


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """Rule that a call chooses tokens by: the likeliest, or with `sample` one draw.

    `process` maps scores [R, V] as the call's processors do, None without any. Where temperature, top-k, top-p and
    min-p are all that they do, `settings` holds these: tokens are then drawn under them from the logits, and no scores
    are processed, unless drafts bring a distribution of their own. `place` is HOST where processors wait for the
    device.
    """

    sample: bool = False
    process: Process | None = None
    settings: SamplingSettings | None = None
    place: Place = Place.DEVICE


class Choice(Verifier):
    """The target's own choice at all nodes at once, by a rule; it draws by `draws`, where it samples."""

    def __init__(self, ops: Ops, rule: ChoiceRule, draws: Draws | None = None) -> None:
        self.ops, self.rule, self.draws, self.place = ops, rule, draws, rule.place

    def uniform(self, tree: TokenTree) -> Tensor | None:
        """Random numbers [B, N] in [0, 1) where the call samples: by the depth of the nodes, or of each node by itself
        where drafts bring a distribution and several of a depth are judged."""
        if self.draws is None:
            return None
        return self.draws.at(tree) if tree.q is None else torch.rand(tree.tokens.shape, device=tree.tokens.device)

    def seat(self, rows: Sequence[int], prompts: Sequence[int]) -> None:
        if self.draws is not None:
            self.draws.seat(rows, prompts)

    def processed(self, logits: Tensor) -> Tensor:
        """logits [..., V] as the processors leave them: fp32, or untouched where there are none."""
        process = self.rule.process
        return logits if process is None else process(logits.flatten(0, -2).float()).view(logits.shape)

    def pick(self, scores: Tensor, prompts: Sequence[int]) -> Tensor:
        """First tokens [R] of prompts, of scores [R, V]."""
        uniform = None if self.draws is None else self.draws.first(prompts)[:, None]
        return choose(scores[:, None], uniform, self.ops)[:, 0]

    def first(self, logits: Tensor, text: Text, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        scores = self.processed(logits)
        return self.pick(scores, prompts), scores.float()

    def __call__(self, scored: Scored) -> VerifiedTree:
        """The likeliest token, or one draw, at every node, and the walk by them."""
        tree, uniform = scored.tree, self.uniform(scored.tree)
        drawn = tree.q is not None and uniform is not None
        settings = None if drawn else self.rule.settings
        scores = self.processed(scored.logits) if settings is None else scored.logits
        return self._walked(scored, scores, uniform, settings)

    def _walked(
        self, scored: Scored, scores: Tensor, uniform: Tensor | None, settings: SamplingSettings | None
    ) -> VerifiedTree:
        tree = scored.tree
        if tree.q is not None and uniform is not None:
            return VerifiedTree(scored, walk_drawn(tree, scores, tree.q, uniform, self.ops), scores)
        return VerifiedTree(scored, walk(tree, choose(scores, uniform, self.ops, settings), self.ops), scores)


class MixedChoice(Choice):
    """The choice from a mixture of the target's distribution and the drafter's, on the host."""

    def __init__(self, ops: Ops, drafter: MixingDrafter, rule: ChoiceRule, draws: Draws | None = None) -> None:
        super().__init__(ops, rule, draws)
        self.drafter, self.place = drafter, Place.HOST

    def mixed_first(self, logits: Tensor, text: Text, drafter: MixingDrafter | None = None) -> Tensor:
        """Log-probabilities [B, V] of the first new tokens; the drafter, or another one, reads the text for it."""
        rule, scores = self.rule, self.processed(logits)
        return (drafter or self.drafter).first(*text, logits, scores, process=rule.process, sample=rule.sample)

    def mixed(self, scored: Scored) -> Tensor:
        """Log-probabilities [B, N, V] at a tree's nodes."""
        return self.drafter.mix(scored.tree, scored.logits, self.processed(scored.logits))

    def first(self, logits: Tensor, text: Text, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        scores = self.mixed_first(logits, text)
        return self.pick(scores, prompts), scores.float()

    def joined(self, logits: Tensor, text: Text, prompt: int, drafter: Drafter | None) -> tuple[Tensor, Tensor]:
        assert isinstance(drafter, MixingDrafter)
        scores = self.mixed_first(logits, text, drafter)
        return self.pick(scores, [prompt]), scores.float()

    def __call__(self, scored: Scored) -> VerifiedTree:
        return self._walked(scored, self.mixed(scored), self.uniform(scored.tree), None)


class WithHistory(Verifier):
    """The choice node by node, for processors that look at the tokens so far."""

    def __init__(self, choice: Choice, process_at: RowProcessor, history: Sequence[Tensor], batch: Batch) -> None:
        self.choice, self.process_at, self.history, self.batch = choice, process_at, history, batch

    def first(self, logits: Tensor, text: Text, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        scores = self.process_at(
            list(prompts), torch.stack([self.history[prompt] for prompt in prompts]), logits.float()
        )
        return self.choice.pick(scores, prompts), scores.float()

    def seat(self, rows: Sequence[int], prompts: Sequence[int]) -> None:
        self.choice.seat(rows, prompts)

    def __call__(self, scored: Scored) -> VerifiedTree:
        batch, tree = self.batch, scored.tree
        places, answers = batch.places, batch.out.tokens
        history = [torch.cat((h := self.history[prompt], h.new_tensor(answers[prompt]))) for prompt in places]
        left = [batch.limits[prompt] - len(answers[prompt]) if batch.active[prompt] else 0 for prompt in places]
        uniform = self.choice.uniform(tree)

        def process(rows: list[int], texts: Tensor, scores: Tensor) -> Tensor:
            return self.process_at([places[row] for row in rows], texts, scores)

        def over(row: int, more: list[int]) -> bool:
            return batch.over(places[row], more)

        verdict, scores = walk_with_history(tree, scored.logits, uniform, history, process, left, over, self.choice.ops)
        return VerifiedTree(scored, verdict, scores, along_path=True)


class Constrained(FedVerifier):
    """The choice among the tokens that a constraint of each prompt allows at a node. Where that is the likeliest one,
    and nobody asks for scores, masks are made of the nodes that need them."""

    def __init__(self, choice: Choice, request: Request, batch: Batch, masks: Masks) -> None:
        assert request.constraint_of is not None
        self.choice, self.constraint_of, self.batch, self.masks = choice, request.constraint_of, batch, masks
        self.ops = choice.ops
        self.walks = choice.rule == ChoiceRule() and not request.keep_scores
        self.place = Place.FED if choice.place is Place.DEVICE else Place.HOST

    def first(self, logits: Tensor, text: Text, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        masks = Masks(logits.device)
        held = [(row, self.constraint_of(prompt), list[int]()) for row, prompt in enumerate(prompts)]
        masks.fill(roots_of(len(held)), logits.shape[-1], held)
        return self.choice.first(masks.masked(logits[:, None])[:, 0], text, prompts)

    def seat(self, rows: Sequence[int], prompts: Sequence[int]) -> None:
        self.choice.seat(rows, prompts)

    def __call__(self, scored: Scored) -> VerifiedTree:
        tree, logits, ops = scored.tree, scored.logits, self.ops
        if self.walks:
            picks = pick_allowed(tree, logits, choose(logits, None, ops), self._held(), self.masks, ops)
            return VerifiedTree(scored, walk(tree, picks, ops), None)
        self.masks.fill(nodes_of(tree), logits.shape[-1], self._held())
        return self.fed(scored)

    def _held(self) -> Held:
        batch = self.batch
        return [
            (row, self.constraint_of(prompt), batch.out.tokens[prompt])
            for row, prompt in enumerate(batch.places)
            if batch.active[prompt]
        ]

    def fed(self, scored: Scored) -> VerifiedTree:
        judged = self.choice(replace(scored, logits=self.masks.masked(scored.logits)))
        return replace(judged, scored=scored)


class InLockstep(Verifier):
    """Plain decoding's own steps, which choose every token of the whole batch and say when a row has ended."""

    def __init__(self, choice: Choice, steps: Steps) -> None:
        self.choice, self.steps = choice, steps

    def first(self, logits: Tensor, text: Text, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        choice = self.choice
        scores = choice.mixed_first(logits, text) if isinstance(choice, MixedChoice) else None
        tokens = torch.tensor(self.steps(logits, scores), device=logits.device)
        return tokens, (choice.processed(logits) if scores is None else scores).float()

    def __call__(self, scored: Scored) -> VerifiedTree:
        scores = self.choice.mixed(scored) if isinstance(self.choice, MixedChoice) else None
        return VerifiedTree(scored, walk_in_step(scored.tree, scored.logits, self.steps, scores), None)


BLIND_MIXTURE = (
    "a mixture of two models' distributions takes no processors that look at the tokens so far (repetition_penalty, "
    "no_repeat_ngram_size, structures, ...) and no answers to verify: leave them out, or decode the large model's own "
    "distribution"
)


def verifier_of(choice: Choice, request: Request, batch: Batch, masks: Masks) -> Verifier:
    """Verifier of a call's tokens: plain decoding's steps or processors that look at the history, where it has
    them, else `choice`, behind the engine's `masks` where it is constrained. Raises Unsupported for what a mixture
    cannot be combined with."""
    looks_back = request.process_at is not None or request.constraint_of is not None
    if isinstance(choice, MixedChoice) and (looks_back or request.answers is not None):
        raise Unsupported(BLIND_MIXTURE)
    if request.steps is not None:
        return InLockstep(choice, request.steps)
    if request.process_at is not None:
        return WithHistory(choice, request.process_at, request.history, batch)
    if request.constraint_of is not None:
        return Constrained(choice, request, batch, masks)
    return choice
