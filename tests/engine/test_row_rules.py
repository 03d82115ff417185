"""The choice by rules of each row's own: every rule over a tree and logits made by hand, beside rows that have
others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.trees import VOCAB, scored_tree
from torch import Tensor

from fastspec.generation.drafters.base import Place
from fastspec.generation.engine.open_batch import OpenBatch, Rule
from fastspec.generation.engine.own_rules import OwnRules
from fastspec.generation.engine.round_program import Scored, VerifiedTree
from fastspec.generation.stats import Stats
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.generation.verify import walk
from fastspec.kernels.verification.reference import SamplingSettings, pick, uniform_at
from fastspec.patches.backends import TORCH

CPU = torch.device("cpu")
ROWS, NODES = 40, 6
ELSEWHERE = torch.device("meta")  # as the default device: a tensor that is made without one cannot meet the others
LENGTHS = torch.arange(ROWS) + 5
SETTINGS = SamplingSettings(0.5, top_k=2)


@dataclass
class Asked:
    """A prompt of one token."""

    rule: Rule
    limit: int = 9
    ends: frozenset[int] = frozenset()
    stop: Any = None
    is_cancelled: bool = False
    keeps_logits: bool = False
    keeps_tree: bool = False
    ids: Tensor = field(default_factory=lambda: torch.tensor([[1]]))

    def observe(self, drafted: int, logits: Tensor | None, tree: Any) -> None:
        """Nobody reads it here."""

    def emit(self, tokens: list[int], accepted: int, done: bool) -> None:
        """Nobody reads it here."""

    def finish(self, tokens: list[int], error: Exception | None) -> None:
        """Nobody reads it here."""


def held(*prompts: Asked | None) -> tuple[OwnRules, OpenBatch]:
    """Rules of a batch whose rows hold these prompts, and the batch."""
    batch = OpenBatch(len(prompts), Stats(), CPU)
    batch.queue.extend(prompt for prompt in prompts if prompt is not None)
    for row, prompt in enumerate(prompts):
        if prompt is not None:
            batch.next(row)
            batch.seat(row, row, 1)
    target: Any = SimpleNamespace(lengths=LENGTHS[: len(prompts)])
    return OwnRules(batch, target, TORCH), batch


scored = partial(scored_tree, ROWS, NODES)


def shifted(scores: Tensor) -> Tensor:
    """Processors that change the likeliest token, of scores in one row after another."""
    assert scores.dim() == 2 and scores.dtype == torch.float32
    return scores * 0.5 + torch.tensor([0.0, 1.0, 0.0], device=scores.device)


def decided(rules: OwnRules, given: Scored) -> VerifiedTree:
    """What they decide with another default device than the tensors have. Rules keep no scores."""
    with ELSEWHERE:
        judged = rules(given)
    assert judged.scored is given and judged.scores is None
    return judged


def same(got: Verdict, want: Verdict, rows: Any = slice(None)) -> bool:
    return all(
        torch.equal(getattr(got, name)[rows], getattr(want, name)[rows]) for name in ("path", "accepted", "bonus")
    )


def uniforms(seed: int, tree: TokenTree) -> Tensor:
    """The numbers of a seed at the places of the tokens that are chosen at a tree's nodes."""
    return uniform_at(torch.tensor(seed), LENGTHS[:, None] + tree.depths + 1)


def test_where_all_rules_are_plain_the_likeliest_tokens_are_taken_on_the_device():
    """Settings without a draw change nothing, and rows without a prompt or behind their end have no rule."""
    rules, batch = held(*[Asked(Rule(settings=SETTINGS))] * (ROWS - 2), Asked(Rule(sample=True)), None)
    assert rules.place is Place.HOST
    batch.active[ROWS - 2] = False
    given = scored()
    assert rules.place is Place.DEVICE and same(
        decided(rules, given).verdict, walk(given.tree, given.logits.argmax(-1), TORCH)
    )
    batch.active[ROWS - 1] = True
    assert rules.place is Place.DEVICE


RULES = {
    "plain": Rule(),
    "draw": Rule(sample=True, seed=3),
    "settings": Rule(sample=True, seed=3, settings=SETTINGS),
    "process": Rule(process=shifted),
    "process and draw": Rule(sample=True, seed=3, process=shifted),
}


def picks_of(rule: Rule, given: Scored) -> Tensor:
    """What a rule chooses at every node, said in another way."""
    left = (
        given.logits if rule.process is None else shifted(given.logits.float().flatten(0, 1)).view(given.logits.shape)
    )
    if not rule.sample:
        return pick(left, None)
    numbers = uniforms(rule.seed, given.tree)
    return pick(left, numbers) if rule.settings is None else pick(given.logits, numbers, rule.settings)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("half", [False, True])
def test_every_row_is_walked_by_its_own_rule_beside_rows_of_others(name, half):
    """Rows take turns between two rules: each decides for its own rows, as if it decided for all."""
    rule, other, given = RULES[name], Rule(sample=True, seed=8), scored(half)
    rules, batch = held(*[Asked(rule), Asked(other)] * (ROWS // 2))
    verdict = decided(rules, given).verdict
    mine, theirs = (walk(given.tree, picks_of(each, given), TORCH) for each in (rule, other))
    assert same(verdict, mine, slice(0, None, 2)) and same(verdict, theirs, slice(1, None, 2)) and not batch.errors
    assert not same(mine, theirs)


def test_with_settings_that_are_all_the_processors_do_these_are_not_run():
    def refused(scores: Tensor) -> Tensor:
        raise AssertionError("not to be run")

    given = scored()
    rule = replace(RULES["settings"], process=refused)
    rules, batch = held(*[Asked(rule)] * ROWS)
    assert (
        same(decided(rules, given).verdict, walk(given.tree, picks_of(RULES["settings"], given), TORCH))
        and not batch.errors
    )


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("half", [False, True])
def test_a_first_token_is_chosen_by_the_rule_of_the_prompt_that_is_named_at_the_place_behind_its_text(name, half):
    given, rule = scored(half), RULES[name]
    rules, _ = held(Asked(Rule(process=lambda scores: -scores)), Asked(rule))
    found = []
    for row in range(ROWS):
        logits, count = given.logits[row, :1], torch.tensor([row + 1])
        with ELSEWHERE:
            tokens, scores = rules.first(logits, (torch.zeros(1, row + 1, dtype=torch.long, device=CPU), count), [1])
        left = logits if rule.process is None or rule.settings is not None else shifted(logits.float())
        number = uniform_at(torch.tensor(rule.seed), count) if rule.sample else None
        assert torch.equal(tokens, pick(left, number) if rule.settings is None else pick(left, number, rule.settings))
        assert torch.equal(scores, logits.float()) and scores.dtype == torch.float32
        found.append(int(tokens))
    assert len(set(found)) > 1


class AtTexts:
    """Processors that look at the tokens so far: they raise the token (length of the text + `shift`) modulo 3, and keep
    what they see."""

    def __init__(self, shift: int = 0, by: float = 9.0) -> None:
        self.shift, self.by, self.seen = shift, by, []  # type: tuple[int, float, list[Any]]

    def __call__(self, rows: list[int], texts: Tensor, scores: Tensor) -> Tensor:
        self.seen.append((rows, texts.tolist()))
        assert scores.dtype == torch.float32
        raised = torch.tensor([(texts.shape[1] + self.shift) % VOCAB] * len(rows), device=scores.device)
        return scores + self.by * torch.nn.functional.one_hot(raised, VOCAB)


def looking(process: Any, *history: int, **options: Any) -> Rule:
    return Rule(process_at=process, history=torch.tensor(history), **options)


@pytest.mark.parametrize("sample", [False, True])
def test_a_first_token_with_a_history_is_chosen_from_what_its_processors_leave(sample):
    process, logits = AtTexts(by=1.0), torch.randn(1, VOCAB).half()
    rules, _ = held(Asked(Rule()), Asked(looking(process, 7, 8, sample=sample, seed=3)))
    left = logits.float() + torch.tensor([0.0, 0.0, 1.0])
    with ELSEWHERE:
        tokens, scores = rules.first(logits, (torch.tensor([[7, 8]], device=CPU), torch.tensor([2], device=CPU)), [1])
    assert process.seen == [([0], [[7, 8]])] and torch.equal(scores, left) and scores.dtype == torch.float32
    assert torch.equal(tokens, pick(left, uniform_at(torch.tensor(3), torch.tensor([2])) if sample else None))


def test_what_a_first_tokens_processors_raise_goes_to_the_caller():
    def fail(scores: Tensor) -> Tensor:
        raise ValueError("processors")

    rules, batch = held(Asked(Rule()), Asked(Rule(process=fail)))
    with pytest.raises(ValueError, match="processors"):
        rules.first(torch.zeros(1, VOCAB), (torch.tensor([[7]]), torch.tensor([1])), [1])
    assert not batch.errors


def chain(*rows: list[int]) -> Scored:
    tree = TokenTree.chain(torch.tensor(rows))
    return Scored(tree, torch.zeros(*tree.tokens.shape, VOCAB), torch.zeros(*tree.tokens.shape, 0))


def test_a_row_whose_processors_look_at_the_history_is_walked_behind_its_own_answer():
    """Each node behind the history, the answer so far and the path to it; the other rows are walked by theirs."""
    first, last = AtTexts(), AtTexts(1)
    rules, batch = held(Asked(looking(first, 20, 21)), Asked(Rule()), Asked(looking(last, 30)), None)
    batch.out.tokens[:3] = [[], [5], [8, 9]]
    given = chain([9, 2, 0], [7, 0, 0], [9, 1, 1], [9, 0, 0])
    verdict = decided(rules, given).verdict
    assert verdict.accepted.tolist() == [2, 2, 1, 2] and verdict.bonus.tolist() == [1, 0, 2, 0]
    assert verdict.path.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 1], [0, 1, 2]] and not batch.errors
    assert first.seen == [([0], [[20, 21]]), ([0], [[20, 21, 2]]), ([0], [[20, 21, 2, 0]])]
    assert last.seen == [([0], [[30, 8, 9]]), ([0], [[30, 8, 9, 1]])]


def test_a_walk_with_a_history_draws_by_the_numbers_of_the_places_of_its_tokens():
    """Where processors change nothing it is the walk of the same draws without them."""
    given = scored(half=True)
    rules, _ = held(*[Asked(looking(lambda rows, texts, scores: scores, 1, sample=True, seed=3))] * ROWS)
    verdict = decided(rules, given).verdict
    assert same(verdict, walk(given.tree, picks_of(Rule(sample=True, seed=3), given), TORCH))
    assert not same(verdict, walk(given.tree, given.logits.argmax(-1), TORCH))


@pytest.mark.parametrize(
    "change, want",
    [
        ({}, 2),
        ({"limit": 3}, 1),
        ({"limit": 2}, 0),
        ({"ends": frozenset({2})}, 0),
        ({"ends": frozenset({0})}, 1),
        ({"stop": lambda answer: answer == [8, 2, 0]}, 1),
        ({"stop": lambda answer: answer == [2]}, 2),
    ],
    ids=["free", "limit of two more", "limit of one more", "end", "a later end", "criterion", "criterion of no prefix"],
)
def test_a_walk_with_a_history_goes_no_further_than_the_answer(change, want):
    """No processor is shown a text behind a row's limit, end token or criterion, of which the other row has none."""
    process = AtTexts()
    rules, batch = held(Asked(Rule()), Asked(looking(process, 20), **change))
    batch.out.tokens = [[], [8]]
    verdict = decided(rules, chain([8, 0, 0], [8, 2, 0])).verdict
    assert verdict.accepted.tolist() == [2, want] and len(process.seen) == want + 1 and not batch.errors


@pytest.mark.parametrize("history", [False, True])
def test_what_a_rows_processors_raise_is_that_rows_error_and_the_others_are_walked(history):
    def fail(*given: Any) -> Tensor:
        raise ValueError("processors")

    failing = looking(fail, 20) if history else Rule(process=fail)
    rules, batch = held(Asked(failing), Asked(Rule(process=shifted)), Asked(looking(AtTexts(), 20)))
    verdict = decided(rules, chain([8, 0, 0], [8, 1, 1], [8, 1, 2])).verdict
    assert verdict.accepted.tolist()[1:] == [2, 2] and verdict.bonus.tolist()[1:] == [1, 0]
    assert list(batch.errors) == [0] and str(batch.errors[0]) == "processors"
