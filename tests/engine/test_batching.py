"""The host's side of a call by itself: what ends an answer, what is kept of it, and when a round may be
asynchronous."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.examples import examples
from helpers.generate import MAKERS, TREE, prompts
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

import fastspec
from fastspec.generation.engine.batching import ASYNCHRONOUS_AFTER, Batch
from fastspec.generation.engine.call import Request
from fastspec.generation.engine.round_program import Scored
from fastspec.generation.engine.verifier import Choice, ChoiceRule, InLockstep, MixedChoice
from fastspec.generation.stats import Stats
from fastspec.generation.tree import TokenTree
from fastspec.generation.verify import measure
from fastspec.patches.assistants.registry import Continued
from fastspec.patches.backends import TORCH
from fastspec.patches.hf.cache import CACHE

DRAWN = examples(40)
TEXTS = st.lists(st.lists(st.integers(0, 9), min_size=12, max_size=12), min_size=1, max_size=3)


def request(count: int, limit: int = 99, ends: tuple[int, ...] = (), **changes: Any) -> Request:
    counts = torch.arange(1, count + 1)
    return Request(
        torch.arange(count * 5).view(count, 5),
        counts,
        [torch.tensor([7])] * count,
        limit,
        frozenset(ends),
        None,
        **changes,
    )


def fed(run: Batch, texts: list[list[int]], sizes: list[int]) -> None:
    """Hand every row its text in pieces, as rounds do, each row's next piece only while its answer goes on."""
    places = [0] * len(texts)
    for size in sizes * 12:
        for row, text in enumerate(texts):
            piece = text[places[row] : places[row] + size]
            if run.active[row] and piece:
                scores = torch.tensor([[float(place), row] for place in range(places[row], places[row] + len(piece))])
                run.take(row, piece, len(piece), scores, scores + 0.5)
                places[row] += len(piece)


@given(
    TEXTS,
    st.integers(1, 12),
    st.sets(st.integers(0, 9), max_size=2),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
@DRAWN
def test_answers_end_at_their_end_tokens_and_at_the_limit(texts, limit, ends, sizes):
    told: list[Any] = []
    run = Batch(request(len(texts), limit, tuple(ends), emit=lambda *call: told.append(call)), Stats())
    fed(run, texts, sizes)
    run.finish()
    want = []
    for text in texts:
        end = next((place + 1 for place, token in enumerate(text) if token in ends), limit)
        want.append(text[: min(end, limit)])
    assert run.out.tokens == want and run.active == [False] * len(texts) and run.stats.emitted == sum(map(len, want))
    for row, text in enumerate(want):
        assert [scores.tolist() for scores in run.out.scores[row]] == [
            [float(place), row] for place in range(len(text))
        ]
        assert [logits.tolist() for logits in run.out.logits[row]] == [
            [place + 0.5, row + 0.5] for place in range(len(text))
        ]
        mine = [call for call in told if call[0] == row]
        assert [token for _, tokens, _, _ in mine for token in tokens] == text
        assert [done for *_, done in mine] == [False] * (len(mine) - 1) + [True]
        assert all(accepted == len(tokens) for _, tokens, accepted, _ in mine)


@given(
    TEXTS, st.integers(1, 12), st.lists(st.integers(1, 12), min_size=3, max_size=3), st.booleans(), st.integers(1, 4)
)
@DRAWN
def test_a_criterion_ends_rows_alone_or_all_together(texts, limit, stops, alone, size):
    """Without end tokens rows that were stopped go on until every one was, as in transformers; with end tokens they are
    over."""
    asked: list[Any] = []

    def stop(row: int, generated: list[int]) -> bool:
        asked.append((row, len(generated)))
        assert generated == texts[row][: len(generated)]
        return len(generated) == stops[row]

    run = Batch(request(len(texts), limit, (99,) if alone else (), stop=stop), Stats())
    fed(run, texts, [size])
    run.finish()
    common = min(limit, max(stops[: len(texts)]))
    assert [len(generated) for generated in run.out.tokens] == [
        min(limit, stop) if alone else common for stop in stops[: len(texts)]
    ]
    assert run.active == [False] * len(texts) and len(asked) == len(set(asked))
    assert all(len(row) == len(run.out.tokens[0]) or alone for row in (*run.out.scores, *run.out.logits))


def test_what_the_walk_asked_is_not_asked_again():
    asked: list[int] = []
    run = Batch(
        request(1, 9, (5,), stop=lambda row, generated: asked.append(len(generated)) or len(generated) == 3), Stats()
    )
    run.take(0, [1], 0, None, None)
    assert [run.over(0, more) for more in ([2], [5], [2, 3], [2, 5])] == [False, True, True, True]
    run.take(0, [2, 3, 4], 3, None, None)
    assert run.out.tokens == [[1, 2, 3]] and asked == [1, 2, 3] and run.active == [False]
    together = Batch(request(1, 9, (), stop=lambda row, generated: True), Stats())
    assert not together.over(0, [1]) and together.stopped(0, []) is True
    assert Batch(request(1, 9, (5,)), Stats()).stopped(0, [1]) is False


def test_no_row_goes_on_once_every_row_was_stopped():
    """Rows that have the common length by then are over with the last one, without another round."""
    run = Batch(request(2, 9, stop=lambda row, generated: len(generated) == 2), Stats())
    run.take(0, [1, 2], 1, None, None)
    assert run.active == [True, True]
    run.take(1, [3, 4], 1, None, None)
    assert run.active == [False, False] and run.limits == [2, 2]
    later = Batch(request(2, 9, stop=lambda row, generated: len(generated) == 2 + row), Stats())
    later.take(0, [1, 2], 1, None, None)
    later.take(1, [3, 4, 5], 2, None, None)
    assert later.active == [True, False] and later.limits == [3, 3]


class Ended:
    """Steps of which a test says when rows end."""

    def __init__(self, lengths: list[int | None], over: bool) -> None:
        self.lengths, self.over, self.pad_token = lengths, over, 0


def test_rows_in_lockstep_are_cut_at_their_ends_and_all_go_on_until_the_call_is_over():
    told: list[Any] = []
    steps = Ended([3, None], False)
    run = Batch(request(2, 9, steps=steps, emit=lambda *call: told.append(call)), Stats())
    assert run.padded == [True, False]
    run.take(0, [1, 2, 3, 0], 3, None, None)
    run.take(1, [4, 5, 6, 7], 3, None, None)
    assert run.active == [True, True] and run.out.tokens == [[1, 2, 3], [4, 5, 6, 7]]
    steps.over, steps.lengths = True, [3, 6]
    run.take(0, [0, 0], 1, None, None)
    run.take(1, [8, 9], 1, None, None)
    assert run.active == [False, False] and run.out.tokens == [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    assert told == [(0, [1, 2, 3], 3, True), (1, [4, 5, 6, 7], 3, False), (1, [8, 9], 1, True)]
    assert Batch(request(2), Stats()).padded == [False, False]


@pytest.mark.parametrize("mixes", [True, False])
def test_a_drafter_that_mixes_its_own_distribution_in_gives_the_scores_of_the_steps(mixes):
    tree, logits = TokenTree.root_only(torch.tensor([1, 2])), torch.randn(2, 1, 5)
    choice = Choice(TORCH, ChoiceRule(process=lambda scores: scores * 2))
    if mixes:
        drafter: Any = SimpleNamespace(mix=lambda drafts, raw, scores: raw + scores if drafts is tree else None)
        choice = MixedChoice(TORCH, drafter, ChoiceRule(process=choice.rule.process))
    shown: list[Any] = []

    def steps(raw: torch.Tensor, scores: torch.Tensor | None = None) -> list[int]:
        shown.append((raw, scores))
        return [3, 4]

    steps.over = True  # type: ignore[attr-defined]
    judged = InLockstep(choice, steps)(Scored(tree, logits, logits[..., :0]))  # type: ignore[arg-type]
    assert judged.scores is None and judged.verdict.bonus.tolist() == [3, 4] and torch.equal(shown[0][0], logits[:, 0])
    assert torch.equal(shown[0][1], logits[:, 0] * 3) if mixes else shown[0][1] is None


def test_waiting_prompts_take_the_rows_that_are_free():
    run = Batch(request(5, rows=3), Stats())
    assert (run.places, run.waiting, run.alone, run.counts) == ([0, 1, 2], [3, 4], True, [1, 2, 3, 4, 5])
    assert run.running == [True] * 3 and run.free() == [] and run.padded == [False] * 3
    run.active[0] = run.active[1] = run.active[2] = False
    assert run.free() == [0, 1] and run.running == [False] * 3
    run.places[1] = run.waiting.pop(0)
    assert run.free() == [0] and run.running == [False, True, False]
    everyone = Batch(request(2), Stats())
    assert (everyone.places, everyone.waiting, everyone.alone, everyone.active) == ([0, 1], [], False, [True, True])
    assert Batch(request(2, ends=(1,)), Stats()).alone


def test_rows_that_have_ended_grow_by_what_was_launched_already_and_no_more():
    run = Batch(request(3), Stats())
    run.lengths, run.active = [5, 6, 7], [True, False, False]
    run.grow([3, 2, 1], [True, True, False], 4)
    assert run.lengths == [8, 6 + 2 + 4, 7]
    run.grow([3, 2, 1], [True, False, False], 4)
    assert run.lengths == [11, 12, 7]


def test_a_call_begins_with_as_many_prompts_as_it_has_rows():
    whole = request(4)
    assert whole.begins() is whole
    first = request(4, rows=2).begins()
    assert first.prompts.tolist() == [[0, 1], [5, 6]] and first.counts.tolist() == [1, 2] and first.rows is None


@pytest.mark.parametrize(
    "asks", [{}, {"watch": print}, {"keep_scores": True}, {"keep_logits": True}, {"measure": True}], ids=str
)
def test_rounds_are_launched_ahead_where_only_tokens_are_asked_for_and_some_row_goes_on(asks):
    run = Batch(request(2, 30, **asks), Stats(rounds=ASYNCHRONOUS_AFTER))
    told = not asks
    run.out.tokens = [[0] * 24, [0] * 25]
    assert run.goes_on(5) == told
    run.active[0] = False
    assert not run.goes_on(5) and run.goes_on(1) == told
    run.out.tokens[1] += [0] * 4
    assert not run.goes_on(1)
    run.active, run.stats.rounds = [True, True], ASYNCHRONOUS_AFTER - 1
    assert not run.goes_on(5)


def test_first_tokens_are_read_with_what_the_call_keeps():
    scores, logits = torch.randn(1, 7), torch.randn(1, 7)
    for keep_scores, keep_logits, measured in ((True, False, False), (False, True, False), (False, False, True)):
        run = Batch(request(2, keep_scores=keep_scores, keep_logits=keep_logits, measure=measured), Stats())
        for row in (0, 1):
            run.read(row, [3], scores, logits)
            run.out.tokens[1] = run.out.tokens[0]
        run.limits = [1, 1]
        run.finish()
        assert [len(row) for row in run.out.scores] == [keep_scores] * 2 and [len(row) for row in run.out.logits] == [
            keep_logits
        ] * 2
        if keep_scores:
            assert torch.equal(run.out.scores[0][0], scores[0])
        if keep_logits:
            assert torch.equal(run.out.logits[1][0], logits[0])
        assert [torch.equal(part, measure(logits, torch.tensor([3]))) for part in run.out.measures] == [
            True
        ] * 2 * measured


PACKAGE = str(Path(fastspec.__file__).parent)
FACTORIES = {torch.tensor, torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.rand, torch.randint}


class Placed(TorchFunctionMode):
    """Notes the functions of fastspec that make a tensor without saying on which device."""

    def __init__(self) -> None:
        super().__init__()
        self.without: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = sys._getframe(1)
        if func in FACTORIES and (kwargs or {}).get("device") is None and caller.f_code.co_filename.startswith(PACKAGE):
            self.without.add(f"{Path(caller.f_code.co_filename).stem}.{caller.f_code.co_name}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "output_scores": True},
        {"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]},
        {"do_sample": True, "num_return_sequences": 2, "output_logits": True, "eos_token_id": list(range(60))},
        {CACHE: True, "output_scores": True, "eos_token_id": list(range(60))},
        {"assistant": "speculative", "do_sample": True},
        {"assistant": fastspec.ContinuousBatch(TREE, 1)},
        {"assistant": Continued(TREE, [[1, 2], [3]], lambda outcome: None, measure=True)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_tensor_of_a_call_is_made_on_a_device_that_is_named(options):
    """But for what is copied to one, or shown to a streamer."""
    target, head = MAKERS["random"]
    model = target()
    fastspec.patch(model, eagle3=head(model), speculative=target(seed=3))
    if CACHE in options:
        options = options | {CACHE: DynamicCache(config=model.config)}
    options = {
        **prompts(5, 3),
        "max_new_tokens": 6,
        "return_dict_in_generate": True,
        "pad_token_id": 0,
        "assistant": TREE,
    } | options
    with Placed() as placed:
        model.generate(**options)
    assert placed.without <= {"round_state.activate"}
