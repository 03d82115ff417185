"""What a call returns, made of an outcome and a cache by hand: columns, the padding of rows that ended early, and the
cache handed back."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.state import AttentionState
from torch import Tensor
from transformers import DynamicCache
from transformers.generation import logits_process as lp
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from fastspec.generation.engine.call import Outcome
from fastspec.generation.stats import Stats
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.patches.backends import TORCH
from fastspec.patches.call import output
from fastspec.patches.call.output import output_of
from fastspec.patches.call.plan import Text
from fastspec.patches.call.processors import Processing
from fastspec.patches.hf.cache import kept_cache

VOCAB, PAD = 7, 6
TOKENS = [[1, 2, 3, 4, 5], [2, 1], [3, 3, 4]]
READ = [3, 1, 2]  # of each prompt, what the call has read: the other columns are padding
PAST = [2, 2, 1]  # what each row had in its cache before


class Reader:
    """A target whose logits say which token was read at which place; it writes (token, place) as key and value."""

    def __init__(self, tail: int) -> None:
        self.state = AttentionState(1, 3, 1, 40, tail, 2)
        self.state.lengths.fill_(30)  # a row's last round may have gone on behind its end
        self.lengths, self.widths, self.rewinds = self.state.lengths, [], True

    def rewind(self, lengths: Tensor) -> None:
        self.state.lengths.copy_(lengths)

    def commit(self, verdict: Verdict, active: Tensor) -> None:
        self.state.commit(TORCH, verdict, active)

    def score(self, tree: TokenTree, extent: int) -> tuple[Tensor, Tensor]:
        places = self.state.lengths[:, None] + tree.depths
        assert extent == int(self.state.lengths.max()) and tree.tokens.shape[1] <= self.state.tail
        self.widths.append(tree.tokens.shape[1])
        for row in range(3):
            self.state.k[0, row, 0, places[row], 0] = tree.tokens[row].float()
            self.state.k[0, row, 0, places[row], 1] = places[row].float()
        self.state.v.copy_(-self.state.k)
        return emitted(tree.tokens, places).half(), torch.empty(0)


def emitted(tokens: Tensor, places: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(tokens, VOCAB) * 8.0 + places[..., None]


def made(tail: int = 4, **changes: Any) -> tuple[Any, Outcome, Any]:
    """(call, outcome, target) of three rows whose past lies in the cache, and whose texts are committed but for the
    last token."""
    asked = {"return_dict_in_generate": True, "output_scores": False, "output_logits": False}
    settings = SimpleNamespace(**asked | {name: changes.pop(name) for name in tuple(changes) if name in asked})
    ids = torch.tensor([[1, 2, 3], [0, 0, 4], [0, 5, 6]])
    keep = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 1], [0, 1, 0, 1, 1]])
    call: Any = SimpleNamespace(
        config=settings,
        steps=None,
        ids=ids,
        pad=PAD,
        keep=keep,
        past_length=2,
        cache=None,
        source=None,
        rows=None,
        handed_in=False,
        processors=lp.LogitsProcessorList([lp.RepetitionPenaltyLogitsProcessor(2.0)]),
    )
    vars(call).update(changes)
    target = Reader(tail)
    for row, (past, read, text) in enumerate(zip(PAST, READ, TOKENS, strict=True)):
        line = [9.0] * past + ids[row, 3 - read :].tolist() + text[:-1]
        target.state.k[0, row, 0, : len(line)] = torch.stack((torch.tensor(line), torch.arange(len(line)).float()), -1)
    target.state.v.copy_(-target.state.k)
    scores, logits = (
        [
            [torch.full((VOCAB,), 10.0 * row + step + more) for step in range(len(text))]
            for row, text in enumerate(TOKENS)
        ]
        for more in (0, 0.5)
    )
    return call, Outcome([list(text) for text in TOKENS], scores, logits, stats=Stats(assistant="by hand")), target


def returned(call: Any, outcome: Outcome, target: Any) -> Any:
    """With another default device than the tensors have: one that is made without a device cannot meet the others."""
    given = vars(call)
    plan: Any = SimpleNamespace(
        config=call.config,
        steps=call.steps,
        pad=call.pad,
        text=Text(**{each.name: given[each.name] for each in fields(Text) if each.name in given}),
        processing=Processing(call.processors),
        request=SimpleNamespace(rows=call.rows, counts=torch.tensor(READ)),
    )
    with torch.device("meta"):
        return output_of(plan, outcome, target)


SEQUENCES = [[1, 2, 3, 1, 2, 3, 4, 5], [0, 0, 4, 2, 1, PAD, PAD, PAD], [0, 5, 6, 3, 3, 4, PAD, PAD]]


def test_sequences_are_filled_up_with_padding_and_nothing_more_is_read():
    call, outcome, target = made(return_dict_in_generate=False)
    assert returned(call, outcome, target).tolist() == SEQUENCES and target.widths == []
    out = returned(*made())
    assert (
        type(out) is GenerateDecoderOnlyOutput
        and out.sequences.tolist() == SEQUENCES
        and out.fastspec.assistant == "by hand"
    )
    assert (out.scores, out.logits, kept_cache(out)) == (None, None, None)
    assert type(returned(*made(source=torch.zeros(1)))) is GenerateEncoderDecoderOutput


@pytest.mark.parametrize("tail", [1, 2, 3, 9])
@pytest.mark.parametrize("scores, logits", [(True, False), (False, True), (True, True)])
def test_rows_that_ended_early_read_padding_as_plain_decoding_does(tail, scores, logits):
    call, outcome, target = made(tail, output_scores=scores, output_logits=logits)
    out = returned(call, outcome, target)
    assert sum(target.widths) == 3 and max(target.widths) == min(tail, 3)
    assert (out.scores is not None, out.logits is not None, kept_cache(out)) == (scores, logits, None)
    assert target.state.lengths.tolist() == [past + read + 4 for past, read in zip(PAST, READ, strict=True)]
    for row, text in enumerate(TOKENS):
        for step in range(5):
            raw = torch.full((VOCAB,), 10.0 * row + step + 0.5)
            processed = raw - 0.5
            if step >= len(text):
                last = text[-1] if step == len(text) else PAD
                raw = emitted(torch.tensor(last), torch.tensor(PAST[row] + READ[row] + step - 1))
                seen = torch.tensor([[*call.ids[row].tolist(), *text, *[PAD] * (step - len(text))]])
                processed = lp.RepetitionPenaltyLogitsProcessor(2.0)(seen, raw[None].clone())[0]
            if logits:
                assert (
                    torch.equal(out.logits[step][row], raw)
                    and out.logits[step].shape == (3, VOCAB)
                    and len(out.logits) == 5
                )
            if scores:
                assert (
                    torch.equal(out.scores[step][row], processed)
                    and out.scores[step].shape == (3, VOCAB)
                    and len(out.scores) == 5
                )


def test_padding_is_processed_by_what_processors_keep_of_its_own_row():
    """A penalty that leaves out each row's own number of tokens; the rows that ended early are the second and the
    third."""
    penalty = lp.RepetitionPenaltyLogitsProcessor(2.0)
    penalty.prompt_ignore_length = torch.tensor([0, 4, 3])
    call, outcome, target = made(output_scores=True, output_logits=True, processors=lp.LogitsProcessorList([penalty]))
    out = returned(call, outcome, target)
    for row, seen in ((1, [1, PAD, PAD]), (2, [3, 3, 4, PAD])):
        raw = out.logits[4][row]
        want = raw.clone()
        want[seen] = raw[seen] / 2  # no logit is negative
        assert torch.equal(out.scores[4][row], want)


@pytest.mark.parametrize("handed_in", [True, False])
def test_a_cache_comes_back_with_the_call_in_columns_and_its_padding(handed_in):
    """Behind what it held: prompts in their columns, then what was said but for the last token, padding of ended rows
    included."""
    cache = DynamicCache()
    cache.update(torch.full((3, 1, 2, 2), 9.0), torch.full((3, 1, 2, 2), -9.0), 0)
    call, outcome, target = made(cache=cache, handed_in=handed_in, return_dict_in_generate=not handed_in)
    out = returned(call, outcome, target)
    assert (out if handed_in else out.sequences).tolist() == SEQUENCES and (handed_in or kept_cache(out) is cache)
    keys, values = cache.layers[0].keys, cache.layers[0].values
    assert keys.shape == (3, 1, 9, 2) and torch.equal(values, -keys)
    for row, (past, read) in enumerate(zip(PAST, READ, strict=True)):
        text = [*call.ids[row, 3 - read :].tolist(), *(TOKENS[row] + [PAD] * 3)[:4]]
        committed = [[float(token), float(past + place)] for place, token in enumerate(text)]
        assert keys[row, 0].tolist() == [[9.0, 9.0]] * 2 + [[0.0, 0.0]] * (3 - read) + committed


@pytest.mark.parametrize("changes", [{"rows": 2}, {"handed_in": False, "return_dict_in_generate": False}])
def test_a_cache_is_left_alone_where_it_cannot_come_back(changes):
    cache = DynamicCache()
    call, outcome, target = made(**{"cache": cache, "handed_in": True} | changes)
    out = returned(call, outcome, target)
    assert len(cache) == 0 and target.widths == [] and (isinstance(out, Tensor) or kept_cache(out) is None)


def test_rows_of_a_continuous_batch_are_filled_with_zeros():
    call, outcome, target = made(rows=2, output_scores=True, output_logits=True)
    out = returned(call, outcome, target)
    for columns, more in ((out.scores, 0), (out.logits, 0.5)):
        for step, column in enumerate(columns):
            want = [10.0 * row + step + more if step < len(text) else 0.0 for row, text in enumerate(TOKENS)]
            assert torch.equal(column, torch.tensor(want)[:, None].expand(-1, VOCAB))
    assert target.widths == [] and len(out.scores) == len(out.logits) == 5


def test_steps_give_their_own_scores_and_need_no_padding_read():
    steps = SimpleNamespace(scores=("scores",), logits=("logits",), ids=torch.tensor([[7, 8]]))
    call, outcome, target = made(steps=steps, output_scores=True, output_logits=True)
    out = returned(call, outcome, target)
    assert (out.scores, out.logits, target.widths) == (("scores",), ("logits",), []) and torch.equal(
        out.sequences, steps.ids
    )


def test_answers_of_one_token_are_one_column():
    call, outcome, target = made(output_scores=True, output_logits=True)
    outcome.tokens, outcome.scores, outcome.logits = (
        [row[:1] for row in kept] for kept in (TOKENS, outcome.scores, outcome.logits)
    )
    out = returned(call, outcome, target)
    assert target.widths == [] and out.sequences[:, 3:].tolist() == [[1], [2], [3]]
    assert [column[:, 0].tolist() for column in (*out.scores, *out.logits)] == [[0.0, 10.0, 20.0], [0.5, 10.5, 20.5]]


class Once(Reader):
    """A target that cannot take back what it has read; it takes down what it is told."""

    told: list[Any]

    def open(self, capacity: int) -> None:
        self.told.append(("open", capacity))
        self.state.lengths.zero_()

    def move(self, shift: Tensor) -> None:
        self.told.append(("move", shift))

    def prefill(self, ids: Tensor, counts: Tensor) -> None:
        self.told.append(("read", ids.tolist(), counts.tolist()))
        self.state.lengths += counts


def read_again(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[Any, Outcome, Any]:
    """`made` with such a target, whose past is put in place by a function that tells so."""
    call, outcome, target = made(**{"output_logits": True, "past": None, "shift": None, "own": None} | changes)
    target.__class__, target.rewinds, target.told, call.keep = Once, False, [], call.keep.bool()

    def imported(state: Any, past: Any, keep: Tensor) -> None:
        target.told.append(("past", past, keep.tolist()))
        state.lengths.copy_(keep.sum(1))

    monkeypatch.setattr(output, "import_past", imported)
    return call, outcome, target


STANDS = [past + read + len(text) - 1 for past, read, text in zip(PAST, READ, TOKENS, strict=True)]
"""How many tokens each row has behind its answer, but for the last."""
TEXTS = [[1, 2, 3, 1, 2, 3, 4], [4, 2, 0, 0, 0, 0, 0], [5, 6, 3, 3, 0, 0, 0]]


@pytest.mark.parametrize("shift", [None, torch.tensor([4, 0, 1])])
def test_what_cannot_be_taken_back_is_read_once_more_behind_the_calls_past(monkeypatch, shift):
    past = [("keys", "values")]
    call, outcome, target = read_again(monkeypatch, past=past, shift=shift)
    returned(call, outcome, target)
    moved = [] if shift is None else [("move", shift)]
    assert target.told == [
        ("open", max(STANDS)),
        *moved,
        ("past", past, call.keep[:, :2].tolist()),
        ("read", TEXTS, [7, 2, 4]),
    ]


def test_a_row_that_stands_where_it_should_reads_nothing_again(monkeypatch):
    call, outcome, target = read_again(monkeypatch)
    target.state.lengths.copy_(torch.tensor(STANDS))
    returned(call, outcome, target)
    assert target.told == []


@pytest.mark.parametrize("short", [False, True])
def test_a_prompt_that_is_more_than_tokens_is_read_by_its_own_pass_again(monkeypatch, short):
    """Then the tokens of the answer follow, where it has more than one."""

    def own(target: Any) -> None:
        target.told.append("own")
        target.state.lengths.copy_(
            torch.tensor([past + read for past, read in zip(PAST, READ, strict=True)], device="cpu")
        )

    call, outcome, target = read_again(monkeypatch, own=own, output_logits=not short)
    if short:
        outcome.tokens = [text[:1] for text in TOKENS]
        call.config.output_scores = True
        outcome.scores = [scores[:1] for scores in outcome.scores]
    returned(call, outcome, target)
    more = [("read", [[1, 2, 3, 4], [2, 0, 0, 0], [3, 3, 0, 0]], [4, 1, 2])]
    assert target.told == [("open", 6 - 1 if short else max(STANDS)), "own", *([] if short else more)]


def test_rows_that_decoded_in_step_read_their_padding_with_their_answers(monkeypatch):
    steps = SimpleNamespace(scores=("scores",), logits=("logits",), ids=torch.tensor(SEQUENCES))
    call, outcome, target = read_again(monkeypatch, steps=steps)
    returned(call, outcome, target)
    texts = [[1, 2, 3, 1, 2, 3, 4], [4, 2, 1, PAD, PAD, 0, 0], [5, 6, 3, 3, 4, PAD, 0]]
    assert target.told == [("open", 9), ("read", texts, [7, 5, 6])]
    assert target.widths == []
