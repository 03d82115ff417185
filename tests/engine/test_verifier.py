"""Who decides by itself: every verifier over a tree and logits made by hand, with no model behind them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.trees import VOCAB, drawn_tree, scored_tree
from torch import Tensor

from fastspec import Unsupported
from fastspec.generation.constraint import Masks
from fastspec.generation.drafters.base import Place
from fastspec.generation.engine.batching import Batch
from fastspec.generation.engine.call import Request
from fastspec.generation.engine.round_program import Scored
from fastspec.generation.engine.verifier import (
    Choice,
    ChoiceRule,
    Draws,
    InLockstep,
    MixedChoice,
    Verifier,
    WithHistory,
    verifier_of,
)
from fastspec.generation.stats import Stats
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.generation.verify import walk, walk_drawn
from fastspec.kernels.verification.reference import SamplingSettings, pick, uniform_at
from fastspec.patches.backends import TORCH

ROWS, NODES = 40, 6
ELSEWHERE = torch.device("meta")  # as the default device: a tensor that is made without one cannot meet the others
MASKS = Masks(torch.device("cpu"))
TEXT = (torch.tensor([[5, 6]]), torch.tensor([2]))


scored = partial(scored_tree, ROWS, NODES)


def shifted(scores: Tensor) -> Tensor:
    """Processors that change the likeliest token, of scores in one row after another."""
    assert scores.dim() == 2 and scores.dtype == torch.float32
    return scores * 0.5 + torch.tensor([0.0, 2.0, 0.0], device=scores.device)


def seeded(verifier: Verifier, *call: Any) -> Any:
    """What it decides under a seed, and with another default device than the tensors have."""
    torch.manual_seed(7)
    with ELSEWHERE:
        return verifier.first(*call) if len(call) > 1 else verifier(*call)


def draws_of(sample: bool, rows: int = ROWS) -> Draws | None:
    """Numbers of a call of so many prompts, whose rows have other lengths."""
    draws = Draws(TORCH, torch.zeros(rows, dtype=torch.long), torch.arange(rows) * 3)
    draws.seeds = torch.arange(rows) + 7
    draws.seat(range(rows), range(rows))
    return draws if sample else None


def firsts(prompts: int = ROWS) -> Tensor:
    """The numbers of the first tokens."""
    return uniform_at(torch.arange(prompts) + 7, torch.tensor(0))


def uniforms(tree: TokenTree) -> Tensor:
    """The numbers of a tree's nodes: of an answer's second token at its root."""
    torch.manual_seed(7)
    if tree.q is not None:
        return torch.rand(tree.tokens.shape)
    return uniform_at((torch.arange(len(tree.tokens)) + 7)[:, None], tree.depths + 1)


def same(got: Verdict, want: Verdict) -> bool:
    return all(torch.equal(getattr(got, name), getattr(want, name)) for name in ("path", "accepted", "bonus"))


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("process", [None, shifted])
def test_first_tokens_are_the_likeliest_or_drawn_from_what_the_processors_leave(sample, process):
    logits = scored(half=True).logits[:, 0]
    choice = Choice(TORCH, ChoiceRule(sample=sample, process=process), draws_of(sample))
    tokens, scores = seeded(choice, logits, TEXT, range(ROWS))
    left = logits if process is None else shifted(logits.float())
    assert torch.equal(tokens, pick(left, firsts() if sample else None)) and tokens.shape == (ROWS,)
    assert torch.equal(scores, left.float()) and scores.dtype == torch.float32


@pytest.mark.parametrize("q", [False, True])
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("process", [None, shifted])
def test_a_tree_is_walked_by_choices_at_all_nodes_or_judged_by_what_its_drafts_were_drawn_from(q, sample, process):
    given = scored(q)
    judged = seeded(Choice(TORCH, ChoiceRule(sample=sample, process=process), draws_of(sample)), given)
    uniform, left = uniforms(given.tree), given.logits
    if process is not None:
        left = shifted(left.flatten(0, 1)).view(left.shape)
    chosen = walk(given.tree, pick(left, uniform if sample else None), TORCH)
    drawn = walk_drawn(given.tree, left, given.tree.q, uniform, TORCH) if q else chosen
    assert judged.scored is given and torch.equal(judged.scores, left) and not judged.along_path
    assert same(judged.verdict, drawn if sample else chosen)
    assert not q or not same(drawn, chosen)


def test_settings_choose_from_the_logits_unless_drafts_bring_a_distribution():
    """With settings the processors are not run, but for a walk that needs their probabilities."""
    settings, plain, drawn = SamplingSettings(0.5, top_k=2), scored(), scored(q=True)
    calls: list[int] = []

    def process(scores: Tensor) -> Tensor:
        calls.append(len(scores))
        return shifted(scores)

    choice = Choice(TORCH, ChoiceRule(sample=True, process=process, settings=settings), draws_of(True))
    judged, uniform = seeded(choice, plain), uniforms(plain.tree)
    want = walk(plain.tree, pick(plain.logits, uniform, settings), TORCH)
    assert same(judged.verdict, want) and torch.equal(judged.scores, plain.logits) and calls == []
    assert not same(want, walk(plain.tree, pick(plain.logits, uniform), TORCH))
    judged, left = seeded(choice, drawn), shifted(drawn.logits.flatten(0, 1)).view(drawn.logits.shape)
    assert torch.equal(judged.scores, left) and calls == [ROWS * NODES]
    assert same(judged.verdict, walk_drawn(drawn.tree, left, drawn.tree.q, uniforms(drawn.tree), TORCH))


class Mixing:
    """A drafter that adds the two distributions it is given, and keeps what else it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def first(
        self, ids: Tensor, counts: Tensor, logits: Tensor, scores: Tensor, *, process: Any, sample: bool
    ) -> Tensor:
        self.told.append((ids.tolist(), counts.tolist(), process, sample))
        return (logits + scores).half()

    def mix(self, tree: TokenTree, logits: Tensor, scores: Tensor) -> Tensor:
        self.told.append(tree)
        return logits + scores


def mixed(sample: bool, process: Any = shifted) -> tuple[MixedChoice, Mixing]:
    drafter: Any = Mixing()
    return MixedChoice(TORCH, drafter, ChoiceRule(sample=sample, process=process), draws_of(sample)), drafter


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("process", [None, shifted])
def test_a_mixture_chooses_from_what_its_drafter_makes_of_raw_and_processed_scores(sample, process):
    choice, drafter = mixed(sample, process)
    given = scored()
    logits = given.logits[:, 0]
    tokens, scores = seeded(choice, logits, TEXT, range(ROWS))
    left = (logits + (logits if process is None else shifted(logits))).half()
    assert drafter.told.pop() == ([[5, 6]], [2], process, sample)
    assert torch.equal(tokens, pick(left, firsts() if sample else None))
    assert torch.equal(scores, left.float()) and scores.dtype == torch.float32
    judged = seeded(choice, given)
    left = given.logits + (
        given.logits if process is None else shifted(given.logits.flatten(0, 1)).view(given.logits.shape)
    )
    assert drafter.told == [given.tree] and judged.scored is given and torch.equal(judged.scores, left)
    assert same(judged.verdict, walk(given.tree, pick(left, uniforms(given.tree) if sample else None), TORCH))


def test_only_plain_choices_may_stay_on_the_device():
    """A mixture calls its drafter, and the others run Python between two launches."""
    choice = Choice(TORCH, ChoiceRule())
    assert choice.place is Place.DEVICE and mixed(False)[0].place is Place.HOST
    assert Choice(TORCH, ChoiceRule(place=Place.HOST)).place is Place.HOST
    nothing: Any = None
    assert WithHistory(choice, nothing, [], nothing).place is InLockstep(choice, nothing).place is Place.HOST


def asked(**changes: Any) -> Request:
    """Three prompts whose histories end with tokens of their own."""
    history = [torch.tensor([20, 21]), torch.tensor([30]), torch.tensor([40])]
    kept = {"limit": 9, "ends": frozenset[int](), "process_at": None}
    return Request(torch.zeros(3, 2, dtype=torch.long), torch.tensor([2, 1, 1]), history, **kept | changes)


class AtRows:
    """Processors that look at the tokens so far: a row's scores are raised at the token (prompt + length of its text)
    modulo 3."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []

    def __call__(self, rows: list[int], texts: Tensor, scores: Tensor) -> Tensor:
        self.seen += zip(rows, texts.tolist(), strict=True)
        assert scores.dtype == torch.float32
        raised = torch.tensor([(row + texts.shape[1]) % VOCAB for row in rows], device=scores.device)
        return scores + 9.0 * torch.nn.functional.one_hot(raised, VOCAB)


def test_first_tokens_with_a_history_are_those_of_the_prompts_that_are_named():
    process = AtRows()
    choice = Choice(TORCH, ChoiceRule())
    verifier = WithHistory(choice, process, asked().history, Batch(asked(), Stats()))
    logits = torch.zeros(2, VOCAB, dtype=torch.half)
    tokens, scores = seeded(verifier, logits, TEXT, (2, 1))
    assert process.seen == [(2, [40]), (1, [30])] and tokens.tolist() == [0, 2]
    assert scores.tolist() == [[9, 0, 0], [0, 0, 9]] and scores.dtype == torch.float32


def test_first_tokens_with_a_history_are_drawn_where_the_call_samples():
    verifier = WithHistory(
        Choice(TORCH, ChoiceRule(sample=True), draws_of(True)),
        lambda rows, texts, scores: scores,
        [torch.tensor([1])] * ROWS,
        None,
    )
    logits = scored().logits[:, 0]
    assert torch.equal(seeded(verifier, logits, TEXT, range(ROWS))[0], pick(logits, firsts()))


def chain(*rows: list[int]) -> TokenTree:
    return TokenTree.chain(torch.tensor(rows))


def test_a_walk_with_a_history_is_that_of_the_prompts_that_the_rows_hold():
    """Each node is processed behind the prompt and its answer so far; scores lie along the path."""
    process, request = AtRows(), asked(rows=2)
    batch = Batch(request, Stats())
    batch.places, batch.out.tokens = [2, 0], [[7], [], [8, 9]]
    verifier = WithHistory(Choice(TORCH, ChoiceRule()), process, request.history, batch)
    given = Scored(chain([9, 2, 0], [7, 1, 1]), torch.zeros(2, 3, VOCAB), torch.zeros(2, 3, 0))
    judged = seeded(verifier, given)
    assert process.seen == [(2, [40, 8, 9]), (0, [20, 21, 7]), (2, [40, 8, 9, 2]), (2, [40, 8, 9, 2, 0])]
    assert (judged.verdict.accepted.tolist(), judged.verdict.bonus.tolist()) == ([2, 0], [1, 0])
    assert judged.scored is given and judged.along_path is True
    assert judged.scores.tolist() == [[[0, 0, 9], [9, 0, 0], [0, 9, 0]], [[9, 0, 0], [0, 0, 0], [0, 0, 0]]]


@pytest.mark.parametrize(
    "change, want",
    [
        ({}, 2),
        ({"limit": 3}, 1),
        ({"limit": 2}, 0),
        ({"ends": frozenset({1})}, 0),
        ({"ends": frozenset({2})}, 1),
        ({"ends": frozenset({99}), "stop": lambda prompt, answer: prompt == 2 and answer == [8, 1, 2]}, 1),
    ],
    ids=["free", "limit of two more", "limit of one more", "end", "a later end", "criterion"],
)
def test_a_walk_with_a_history_goes_no_further_than_the_answer(change, want):
    """No processor is shown a text behind a row's limit, end token or criterion."""
    process, request = AtRows(), asked(rows=1, **change)
    batch = Batch(request, Stats())
    batch.places, batch.out.tokens = [2], [[], [], [8]]
    verifier = WithHistory(Choice(TORCH, ChoiceRule()), process, request.history, batch)
    judged = seeded(verifier, Scored(chain([8, 1, 2]), torch.zeros(1, 3, VOCAB), torch.zeros(1, 3, 0)))
    assert judged.verdict.accepted.tolist() == [want] and len(process.seen) == want + 1
    batch.active[2] = False
    process.seen.clear()
    assert seeded(verifier, judged.scored).verdict.accepted.tolist() == [0] and process.seen == []


def test_a_walk_with_a_history_draws_by_one_number_a_node():
    generator = torch.Generator().manual_seed(2)
    tree, logits = drawn_tree(3, NODES, generator), torch.randn(3, NODES, VOCAB, generator=generator)
    verifier = WithHistory(
        Choice(TORCH, ChoiceRule(sample=True), draws_of(True, 3)),
        lambda rows, texts, scores: scores,
        asked().history,
        Batch(asked(), Stats()),
    )
    judged = seeded(verifier, Scored(tree, logits, logits[..., :0]))
    assert same(judged.verdict, walk(tree, pick(logits, uniforms(tree)), TORCH))


class Following:
    """Steps that choose the likeliest token of the scores, where some stand in, and never end."""

    over, lengths, pad_token = False, (None, None), 0

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor | None]] = []

    def __call__(self, logits: Tensor, scores: Tensor | None = None) -> list[int]:
        self.seen.append((logits, scores))
        return (logits if scores is None else scores).argmax(-1).tolist()


@pytest.mark.parametrize("mixes", [False, True])
def test_first_tokens_in_lockstep_are_the_steps(mixes):
    """From raw logits; a mixture's log-probabilities stand in for the scores."""
    steps: Any = Following()
    choice, drafter = mixed(True) if mixes else (Choice(TORCH, ChoiceRule(sample=True, process=shifted)), None)
    logits = torch.tensor([[0.5, 0.0, 1.0], [1.0, 0.0, 0.0]], dtype=torch.half)
    tokens, scores = seeded(InLockstep(choice, steps), logits, TEXT, [0, 1])
    ((raw, shown),) = steps.seen
    left = shifted(logits.float())
    assert raw is logits and scores.dtype == torch.float32
    if mixes:
        assert drafter.told == [([[5, 6]], [2], shifted, True)]
        assert (
            torch.equal(shown, (logits + left).half())
            and torch.equal(scores, shown.float())
            and tokens.tolist() == [1, 1]
        )
    else:
        assert shown is None and torch.equal(scores, left) and tokens.tolist() == [2, 0]


@pytest.mark.parametrize("mixes", [False, True])
def test_rows_in_lockstep_take_the_steps_down_their_trees(mixes):
    steps: Any = Following()
    choice, drafter = mixed(True) if mixes else (Choice(TORCH, ChoiceRule(sample=True, process=shifted)), None)
    likely = 4.0 * torch.nn.functional.one_hot(torch.tensor([[2, 0, 1], [2, 1, 1]]), VOCAB)
    given = Scored(chain([0, 2, 0], [1, 2, 2]), likely, likely[..., :0])
    judged = seeded(InLockstep(choice, steps), given)
    assert (judged.verdict.accepted.tolist(), judged.verdict.bonus.tolist()) == (
        [1, 1],
        [0, 1],
    )  # one row's draft is wrong
    assert judged.scored is given and judged.scores is None and len(steps.seen) == 2
    for step, (raw, scores) in enumerate(steps.seen):
        assert torch.equal(raw, likely[:, step]) and (
            torch.equal(scores, raw + shifted(raw)) if mixes else scores is None
        )
    assert drafter is None or drafter.told == [given.tree]


def test_a_call_is_decided_by_its_steps_else_its_history_else_its_choice():
    plain, steps, process = Choice(TORCH, ChoiceRule()), SimpleNamespace(lengths=()), AtRows()
    request = asked(process_at=process)
    batch = Batch(request, Stats())
    assert verifier_of(plain, asked(), batch, MASKS) is plain
    history, lockstep = (
        verifier_of(plain, request, batch, MASKS),
        verifier_of(plain, asked(process_at=process, steps=steps), batch, MASKS),
    )
    assert isinstance(history, WithHistory) and isinstance(lockstep, InLockstep)
    assert (history.choice, history.process_at, history.history, history.batch) == (
        plain,
        process,
        request.history,
        batch,
    )
    assert (lockstep.choice, lockstep.steps) == (plain, steps)


def test_a_mixture_takes_no_processors_with_a_history_and_no_answers():
    choice = mixed(False)[0]
    batch = Batch(asked(), Stats())
    assert verifier_of(choice, asked(), batch, MASKS) is choice
    assert isinstance(verifier_of(choice, asked(steps=SimpleNamespace(lengths=())), batch, MASKS), InLockstep)
    for changes in ({"process_at": AtRows()}, {"answers": [[1], [2], [3]]}):
        with pytest.raises(Unsupported, match="a mixture of two models' distributions takes no processors"):
            verifier_of(choice, asked(**changes), batch, MASKS)
    assert isinstance(verifier_of(Choice(TORCH, ChoiceRule()), asked(answers=[[1]] * 3), batch, MASKS), Choice)
