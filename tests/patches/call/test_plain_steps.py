"""Processors, criteria and streamers as the loop is given them, and one step of transformers' own loop, with no model
behind them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from fastspec.patches.call.processors import (
    Ending,
    PlainSteps,
    Streaming,
    are_known,
    make_processors,
    of_rows,
    process_rows,
    read_processors,
    read_settings,
    unknown_types,
)

DRAWN = examples(30)
SEEDS = st.integers(0, 2**31)
VOCAB = 5


class Doubling(lp.LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores * 2


def config(**changes: Any) -> Any:
    kept = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    return SimpleNamespace(**{"do_sample": False, "_pad_token_tensor": None} | kept | changes)


class Columns:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.columns: list[Any] = []

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.columns.append(value.tolist())

    def end(self) -> None:
        self.columns.append("end")


def criteria(*ends: int, length: int = 99) -> StoppingCriteriaList:
    kept = [EosTokenCriteria(torch.tensor(ends))] if ends else []
    return StoppingCriteriaList([MaxLengthCriteria(length), *kept])


@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=6, max_size=6), min_size=1, max_size=3),
    st.booleans(),
    st.integers(3, 8),
)
@DRAWN
def test_steps_pad_what_has_ended_and_end_when_all_have(texts, pads, length):
    """Rows say their texts; token 4 ends one, and padding is 3. Without end tokens only the length ends them, all at
    once."""
    rows, streamer = len(texts), Columns()
    ids = torch.zeros(rows, 2, dtype=torch.long)
    ends = criteria(*([4] if pads else []), length=length)
    steps = PlainSteps(
        ids, LogitsProcessorList([Doubling()]), ends, config(_pad_token_tensor=torch.tensor(3)), streamer
    )
    assert (steps.pad_token, steps.lengths, steps.over) == (3, [None] * rows, False)
    want: list[list[int]] = [[] for _ in texts]
    ended: list[int | None] = [None] * rows
    for step in range(min(6, length - 2)):
        logits = torch.nn.functional.one_hot(torch.tensor([text[step] for text in texts]), VOCAB).half() - 0.5
        emitted = steps(logits)
        for row, text in enumerate(texts):
            want[row].append(text[step] if ended[row] is None else 3)
            if pads and ended[row] is None and (text[step] == 4 or step == length - 3):
                ended[row] = step + 1
        assert emitted == [row[-1] for row in want] and steps.lengths == ended
        assert steps.ids[:, 2:].tolist() == want and streamer.columns[-1] == emitted
        assert torch.equal(steps.scores[-1], logits.float() * 2) and torch.equal(steps.logits[-1], logits.float())
        assert steps.scores[-1].dtype == steps.logits[-1].dtype == torch.float32
        assert len(steps.scores) == len(steps.logits) == len(streamer.columns) == step + 1
        assert steps.over == (step == length - 3 or (pads and None not in ended))
        if steps.over:
            break


def test_steps_keep_what_the_call_asks_for():
    ids, logits = torch.zeros(1, 1, dtype=torch.long), torch.eye(VOCAB)[:1]
    for scores, raw, returned in ((True, False, True), (False, True, True), (True, True, False)):
        asked = config(output_scores=scores, output_logits=raw, return_dict_in_generate=returned)
        steps = PlainSteps(ids, LogitsProcessorList(), criteria(), asked, None)
        steps(logits)
        assert (steps.scores is None, steps.logits is None) == (not (scores and returned), not (raw and returned))
        assert steps.pad_token == 0 and not steps.pads


def test_a_sample_is_generates_own_and_scores_may_stand_in():
    ids, logits = torch.zeros(3, 1, dtype=torch.long), torch.randn(3, VOCAB)
    steps = PlainSteps(ids, LogitsProcessorList([Doubling()]), criteria(), config(do_sample=True), None)
    for scores in (None, torch.randn(3, VOCAB, dtype=torch.float64)):
        torch.manual_seed(3)
        emitted = steps(logits, scores)
        torch.manual_seed(3)
        processed = logits * 2 if scores is None else scores.float()
        assert emitted == torch.multinomial(processed.softmax(-1), 1)[:, 0].tolist()
        assert torch.equal(steps.scores[-1], processed) and steps.scores[-1].dtype == torch.float32
        assert torch.equal(steps.logits[-1], logits)


def test_rows_are_drawn_each_from_its_own_distribution():
    """A token that is likely in every row is drawn in every row: over the batch it would be no likelier than the other
    four."""
    logits = torch.tensor([0.0, 0.0, 40.0, 0.0, 0.0]).expand(64, -1)
    ids = torch.zeros(64, 1, dtype=torch.long)
    assert PlainSteps(ids, LogitsProcessorList(), criteria(), config(do_sample=True), None)(logits) == [2] * 64


def test_processors_may_not_change_the_models_logits():
    class Spoiling(lp.LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.fill_(1.0)

    logits = torch.eye(VOCAB)[:1].clone()
    PlainSteps(torch.zeros(1, 1, dtype=torch.long), LogitsProcessorList([Spoiling()]), criteria(), config(), None)(
        logits
    )
    assert torch.equal(logits, torch.eye(VOCAB)[:1])


def test_steps_are_made_where_the_prompts_lie():
    """The model's last layer may lie on another device."""

    class Seen(Exception):
        pass

    def where(ids: Tensor, scores: Any) -> Tensor:
        raise Seen(str((scores[-1] if isinstance(scores, tuple) else scores).device))

    ids, logits = torch.zeros(1, 1, dtype=torch.long, device="meta"), torch.eye(VOCAB)[:1]
    with pytest.raises(Seen, match="meta"):
        PlainSteps(ids, where, [], config(), None)(logits)
    asked: Any = type("Asked", (list,), {"__call__": lambda self, ids, scores: where(ids, scores)})()
    with pytest.raises(Seen, match="meta"):
        PlainSteps(ids, where, asked, config(), None)(logits, logits)


def test_what_is_known_is_asked_by_type():
    class Own(MaxLengthCriteria):
        """A subclass may keep what it likes."""

    known, own = lp.TemperatureLogitsWarper(0.7), Own(3)
    assert are_known([known], [MaxLengthCriteria(3), MaxTimeCriteria(1.0)])
    assert (
        not are_known([known, Doubling()], []) and not are_known([known], [own]) and not are_known([Doubling()], [own])
    )
    assert unknown_types([known, Doubling(), Doubling()], [own, MaxLengthCriteria(2)]) == "Doubling, Own"
    assert unknown_types([known]) == ""


def test_processors_come_in_the_form_that_they_need():
    ids, scores = torch.tensor([[1, 2], [3, 1]]), torch.randn(3, VOCAB)
    warm, penalty = lp.TemperatureLogitsWarper(0.5), lp.RepetitionPenaltyLogitsProcessor(2.0)
    assert (
        make_processors(LogitsProcessorList(), ids)
        == (None, None)
        == make_processors(LogitsProcessorList([warm, Doubling()]), ids)
    )
    at_once, by_row = make_processors(LogitsProcessorList([warm]), ids)
    assert by_row is None and torch.equal(at_once(scores), scores / 0.5)
    at_once, by_row = make_processors(LogitsProcessorList([warm, penalty]), ids)
    assert at_once is None and torch.equal(by_row([1, 0], ids, scores[:2]), penalty(ids, warm(ids, scores[:2])))


def test_a_penalty_leaves_out_each_rows_own_padding():
    """`prompt_ignore_length` may be a number for each row."""
    penalty = lp.RepetitionPenaltyLogitsProcessor(2.0)
    assert of_rows(penalty, [1]) is penalty
    penalty.prompt_ignore_length = torch.tensor([3, 7, 9])
    twin = of_rows(penalty, [2, 0])
    assert (
        twin is not penalty
        and twin.prompt_ignore_length.tolist() == [9, 3]
        and penalty.prompt_ignore_length.tolist() == [3, 7, 9]
    )
    assert twin.penalty == 2.0 and type(twin) is type(penalty)
    texts, scores = torch.tensor([[0, 1, 2], [0, 1, 2]]), torch.ones(2, VOCAB)
    penalty.prompt_ignore_length = None
    assert torch.equal(process_rows([penalty], [0, 1], texts, scores.clone()), penalty(texts, scores.clone()))


def test_a_distribution_keeps_one_token_and_removes_with_minus_infinity():
    warm = lp.TemperatureLogitsWarper(0.5)
    for change, distribution in (({}, True), ({"min_tokens_to_keep": 2}, False), ({"filter_value": -1e9}, False)):
        processors = LogitsProcessorList([warm, lp.TopPLogitsWarper(0.9, **change)])
        assert (read_settings(processors) is not None) == distribution
    assert read_settings(LogitsProcessorList([warm, lp.TopPLogitsWarper(0.9)])).top_p == 0.9


def test_signatures_tell_kinds_and_settings_apart():
    def signature(*processors: Any) -> Any:
        return read_processors(LogitsProcessorList(processors), torch.zeros(1, 1, dtype=torch.long), True).signature

    lists: list[list[Any]] = [
        [],
        [lp.TemperatureLogitsWarper(0.5)],
        [lp.TemperatureLogitsWarper(0.7)],
        [lp.TopPLogitsWarper(0.5)],
        [lp.TopPLogitsWarper(0.5), lp.TemperatureLogitsWarper(0.5)],
        [lp.TemperatureLogitsWarper(0.5), lp.TopPLogitsWarper(0.5)],
        [lp.SuppressTokensLogitsProcessor([1, 2])],
        [lp.SuppressTokensLogitsProcessor([1, 3])],
    ]
    made = [signature(*each) for each in lists]
    assert len(set(made)) == len(lists)
    assert signature(lp.TopPLogitsWarper(0.5)) == made[3]
    first, second = lp.TopPLogitsWarper(0.5), lp.TopPLogitsWarper(0.5)
    second.__dict__ = dict(reversed(vars(second).items()))  # the order in which settings were made does not count
    assert signature(first) == signature(second)


def test_lengths_and_end_tokens_are_the_loops_and_all_others_are_asked():
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    asked: list[Any] = []

    class Asked(MaxLengthCriteria):
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
            asked.append((input_ids.tolist(), scores))
            return self.answer

    ends = [EosTokenCriteria(torch.tensor([8, 9])), EosTokenCriteria(torch.tensor([[4]]))]
    plain = Ending([MaxLengthCriteria(9), MaxLengthCriteria(7), *ends], ids)
    assert (plain.limit, plain.ends, plain.stop) == (4, frozenset({8, 9, 4}), None)
    ending = Ending([Asked(torch.tensor([False, True])), Asked(False)], ids)
    assert (ending.limit, ending.ends) == (2**62, frozenset())
    assert [ending.stop(row, [7, 8]) for row in (0, 1)] == [False, True]
    assert asked == [
        ([[*ids[row].tolist(), 7, 8]] * 2, None) for row in (0, 0, 1, 1)
    ]  # a criterion may count its calls
    for answer in (True, torch.tensor(True), torch.tensor([True])):
        assert Ending([Asked(answer)], ids).stop(1, [])


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 3), SEEDS)
@DRAWN
def test_columns_are_shown_as_soon_as_every_row_has_them(lengths, most, seed):
    generator, streamer = torch.Generator().manual_seed(seed), Columns()
    texts = [[10 * row + place for place in range(length)] for row, length in enumerate(lengths)]
    streaming = Streaming(streamer, len(texts), 7)
    given_out = [0] * len(texts)
    while any(done < length for done, length in zip(given_out, lengths, strict=True)):
        row = int(torch.randint(0, len(texts), (), generator=generator))
        count = min(int(torch.randint(1, most + 1, (), generator=generator)), lengths[row] - given_out[row])
        if count == 0:
            continue
        begin, given_out[row] = given_out[row], given_out[row] + count
        streaming.emit(row, texts[row][begin : given_out[row]], 0, given_out[row] == lengths[row])
        ready = min((g for g, length in zip(given_out, lengths, strict=True) if g < length), default=max(lengths))
        ready = min(ready, max(given_out))
        assert streamer.columns == [
            [text[place] if place < len(text) else 7 for text in texts] for place in range(ready)
        ]
    assert len(streamer.columns) == max(lengths)


@pytest.mark.parametrize("rows", [1, 2])
def test_rounds_and_trees_are_told_to_streamers_of_one_row(rows):
    class Telling(Columns):
        def on_round(self, tokens: list[int], accepted: int) -> None:
            self.columns.append((list(tokens), accepted))

        def on_tree(self, tree: Any, verdict: Any, logits: Any) -> None:
            raise AssertionError("not called here")

    streamer = Telling()
    streaming = Streaming(streamer, rows, 0)
    assert streaming.watch == (streamer.on_tree if rows == 1 else None) and Streaming(Columns(), rows, 0).watch is None
    streaming.emit(0, [4, 5], 1, False)
    assert streamer.columns == ([([4, 5], 1), [4], [5]] if rows == 1 else [])
