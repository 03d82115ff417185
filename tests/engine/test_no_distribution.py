"""Rows without a distribution: sampling raises where plain generate does, greedy decoding takes what argmax takes."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.generate import NEVER, OwnProcessor, bigram, free, prompts, seer, seer1, shallow_model
from helpers.open import told
from helpers.sizes import force_sizes
from helpers.tokenizers import DRAFT, TARGET
from torch import Tensor, nn
from transformers import LogitsProcessorList

import fastspec
from fastspec.errors import FastSpecError, NoDistribution
from fastspec.generation.tree import TokenTree
from fastspec.generation.verify import walk_drawn
from fastspec.patches.backends import TORCH

INPUTS = prompts(5, 3)
WIDTH = INPUTS["input_ids"].shape[1]
DRAWN: dict[str, Any] = {"do_sample": True, "top_k": 1, "max_new_tokens": 16, "eos_token_id": NEVER, "pad_token_id": 0}
"""Draws of which only one is possible: where a row fails does not depend on the random numbers."""
GREEDY = {**DRAWN, "do_sample": False, "top_k": None}
PLAINLY = "probability tensor contains either `inf`, `nan` or element < 0"
SPOILS = {"nan": torch.nan, "inf": torch.inf, "none left": -torch.inf}


class Spoiled(nn.Linear):
    """An LM head whose logits are `value` in part, or wholly where that is -inf, wherever their best token is `at`."""

    value: float
    at: int

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        odd = torch.full_like(logits, self.value)
        odd = odd if self.value == -torch.inf else torch.where(torch.arange(logits.shape[-1]) % 3 == 1, odd, logits)
        return torch.where((logits.argmax(-1) == self.at)[..., None], odd, logits)


def counting(**over: Any) -> Any:
    """A model that counts: behind every token it says the next one, and behind the last one the first."""
    model = bigram(**over)
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data.roll(1, 0) * 20)
    return model


@cache
def clean() -> list[list[int]]:
    """The greedy answers of the sound model, which have no token in common."""
    found = free(counting(), INPUTS, 16)
    assert len({*found[0], *found[1]}) == 32
    return found


def spoiled(value: float, step: int) -> Any:
    model = counting()
    own = model.lm_head
    model.lm_head = Spoiled(own.in_features, own.out_features, bias=False)
    model.lm_head.weight, model.lm_head.value, model.lm_head.at = own.weight, value, clean()[1][step]
    return model


def drafted(model: Any, sound: bool = True) -> Any:
    """The model with heads and a draft model that know it, or whose weights have become NaN."""
    parts = seer1(counting()), seer(counting()), counting()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*drafting will not pay")
        fastspec.patch(model, eagle=parts[0], eagle2=parts[0], eagle3=parts[1], speculative=parts[2])
    for parameter in () if sound else (each for part in parts for each in part.parameters()):
        parameter.data.fill_(torch.nan)
    return model


ASSISTANTS = [
    "autoregressive",
    "nasd",
    "eagle",
    "eagle2",
    "eagle3",
    "speculative",
    fastspec.Speculative(gamma=3, branches=2),
    fastspec.Speculative(early_exit=1, gamma=2),
]


def fails(model: Any, row: int, after: int, **options: Any) -> None:
    with pytest.raises(
        NoDistribution, match=f"row {row} of the batch cannot be sampled after {after} new tokens"
    ) as found:
        model.generate(**INPUTS, **{**DRAWN, **options})
    assert found.value.row == row and PLAINLY in str(found.value)


@pytest.mark.some("nan-5", "inf-5", "none left-5")
@pytest.mark.parametrize(("spoil", "step"), [("nan", 0), ("nan", 5), ("inf", 5), ("none left", 5)])
def test_sampling_raises_where_plain_generate_does(spoil, step):
    """In the middle of a batch, in every assistant, at the first token and behind accepted drafts; greedy calls give
    plain's tokens."""
    plain, model = (spoiled(SPOILS[spoil], step) for _ in range(2))
    drafted(model)
    with pytest.raises(RuntimeError, match=PLAINLY):
        plain.generate(**INPUTS, **DRAWN)
    want = plain.generate(**INPUTS, **GREEDY)
    for assistant in ASSISTANTS:
        fails(model, 1, step, assistant=assistant)
        assert torch.equal(model.generate(**INPUTS, **GREEDY, assistant=assistant), want), assistant


def test_an_answer_that_ends_before_does_not_fail():
    """At its end token or at its limit, behind which a round may have gone on into what cannot be drawn."""
    model = drafted(spoiled(torch.nan, 5))
    for assistant in ASSISTANTS:
        ended = model.generate(**INPUTS, **{**DRAWN, "eos_token_id": clean()[1][4]}, assistant=assistant)
        assert ended[:, WIDTH:].tolist() == [clean()[0], clean()[1][:5] + [0] * 11], assistant
        short = model.generate(**INPUTS, **{**DRAWN, "max_new_tokens": 5}, assistant=assistant)
        assert short[:, WIDTH:].tolist() == [row[:5] for row in clean()], assistant


HISTORY, WAITING, OWN = (
    {"repetition_penalty": 1.0001},
    {"eta_cutoff": 1e-9},
    {"logits_processor": LogitsProcessorList([OwnProcessor()])},
)


@pytest.mark.parametrize(
    "more", [{}, {"top_k": 0, "temperature": 1e-6}, HISTORY, WAITING], ids=["settings", "plain", "history", "waiting"]
)
def test_every_schedule_raises(monkeypatch, more):
    """Captured whole, launched before the round in front of it is read, in halves around the host, and from a tree of
    the host's."""
    stand_in(monkeypatch)
    model = drafted(spoiled(torch.nan, 12))
    for assistant in (
        "autoregressive",
        fastspec.Eagle3(depth=1, top_k=1, total_tokens=2),
        "nasd",
        "speculative",
        "eagle",
    ):
        for _ in range(2):
            fails(model, 1, 12, assistant=assistant, **more)
    assert fastspec.report(model).backend == "stand-in"


def test_lockstep_names_the_row():
    model = drafted(spoiled(torch.inf, 0))
    for assistant in ("autoregressive", "nasd", "eagle3"):
        fails(model, 1, 0, assistant=assistant, **OWN)


def test_processors_that_leave_no_token():
    """Behind a token after which every other one is forbidden."""
    plain, model = counting(), drafted(counting())
    banned = [[clean()[1][3], token] for token in range(97)]
    with pytest.raises(RuntimeError, match=PLAINLY):
        plain.generate(**INPUTS, **DRAWN, bad_words_ids=banned)
    for assistant in ("autoregressive", "eagle3", "eagle", "nasd", "speculative"):
        fails(model, 1, 4, assistant=assistant, bad_words_ids=banned)


def test_a_cascades_models_raise():
    """A mixture, and a chain of draft models; also where a rule's comparisons would pass by the large model's NaN."""
    for cascade in (
        fastspec.Cascade([counting()], mode="lossless"),
        *(
            fastspec.Cascade([counting()], mode="token", rule=rule, alpha=alpha)
            for rule, alpha in (("chow", 0.5), ("diff", 0.5), ("token_v3", 0.5), ("token_v3", "lossless"))
        ),
    ):
        fails(fastspec.patch(spoiled(torch.nan, 5), cascade=cascade), 1, 5, assistant="cascade")


def test_drafts_that_are_nan_do_not_change_what_is_said():
    """The target judges them all the same: greedy, in draws, and by distributions of theirs that are none."""
    model, plain = drafted(counting(), sound=False), [row[:8] for row in clean()]
    nan = counting()
    nan.lm_head.weight.data.fill_(torch.nan)
    cascades = [
        fastspec.Cascade([nan, counting()], mode="lossless"),
        fastspec.Cascade([nan], mode="token", alpha="lossless"),
    ]
    calls = [(model, assistant) for assistant in ASSISTANTS]
    calls += [(fastspec.patch(counting(), cascade=cascade), "cascade") for cascade in cascades]
    other = shallow_model(vocab_size=93)
    other.lm_head.weight.data.fill_(torch.nan)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*drafting will not pay")
        calls.append((fastspec.patch(counting(), speculative=(other, DRAFT, TARGET)), fastspec.Speculative()))
    for called, assistant in calls:
        for options in (GREEDY, DRAWN):
            got = called.generate(**INPUTS, **{**options, "max_new_tokens": 8}, assistant=assistant)
            assert got[:, WIDTH:].tolist() == plain, (assistant, options)


def test_a_draft_without_a_distribution_is_not_accepted():
    """And takes nothing from the target's: the root's draw is of all of p."""
    tokens, q = torch.tensor([[3, 1, 0]]), torch.full((1, 3, 4), torch.nan)
    scores = torch.log(torch.tensor([0.25, 0.25, 0.25, 0.25])).expand(1, 3, 4)
    for place in range(4):
        verdict = walk_drawn(TokenTree.chain(tokens), scores, q, torch.full((1, 3), (place + 0.5) / 4), TORCH)
        assert (int(verdict.accepted), int(verdict.bonus)) == (0, place)


@pytest.mark.some("nasd", "eagle3")
@pytest.mark.parametrize("assistant", ["autoregressive", "nasd", "eagle3"])
def test_an_open_batch_fails_the_prompt_alone(assistant):
    """The others go on beside it, and take its row later; under settings, under processors that look at the history,
    and at once."""
    model = drafted(spoiled(torch.nan, 5))
    ids = [row[mask.bool()] for row, mask in zip(INPUTS["input_ids"], INPUTS["attention_mask"], strict=True)]
    with fastspec.continuous(model, assistant, rows=2) as batch:
        for more in ({}, HISTORY, WAITING):
            rows = [batch.submit(ids[row], **{**DRAWN, **more}, seed=7) for row in (0, 1, 0, 1, 0)]
            assert [row[len(ids[0]) :] for row in told(rows[::2])] == [clean()[0]] * 3
            for failed in rows[1::2]:
                error = failed.exception(300)
                assert (
                    isinstance(error, NoDistribution)
                    and error.row is None
                    and "this prompt cannot be sampled after 5 " in str(error)
                )
        first = clean()[1][4]
        shown = torch.cat((ids[1], torch.tensor(clean()[1][:5])))
        assert isinstance(batch.submit(shown, **DRAWN).exception(300), NoDistribution) and first == int(shown[-1])
        assert told([batch.submit(shown, **GREEDY, seed=1)])[0][:8] == shown.tolist()


def test_a_head_reads_on_where_a_row_beside_had_no_token(monkeypatch):
    """After rounds without drafts, whose tokens it reads of all rows."""
    taken = force_sizes(monkeypatch, order=(4,))
    model = drafted(spoiled(torch.nan, 5))
    ids = [row[mask.bool()] for row, mask in zip(INPUTS["input_ids"], INPUTS["attention_mask"], strict=True)]
    with fastspec.continuous(model, fastspec.Eagle3(total_tokens="auto"), rows=2, narrows=False) as batch:
        batch._widths.current.engine.sizes._use(0, 9)
        rows = [batch.submit(ids[row], **DRAWN, seed=7) for row in (0, 1)]
        assert told(rows[:1])[0][len(ids[0]) :] == clean()[0]
        assert isinstance(rows[1].exception(300), NoDistribution)
    assert {size for size, _ in taken} == {0, 4}


def test_prompts_that_wait_fail_the_call_by_their_number():
    model = drafted(spoiled(torch.nan, 5))
    for assistant in ("autoregressive", "nasd"):
        with pytest.raises(NoDistribution, match="row 1 of the batch"):
            model.generate(**INPUTS, **DRAWN, assistant=fastspec.ContinuousBatch(assistant, rows=1))


def test_a_streamer_hears_what_was_drawn_before():
    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            raise AssertionError("the call did not end")

    heard = [Streamer(), Streamer()]
    model, ids = drafted(spoiled(torch.nan, 5)), INPUTS["input_ids"][1:, -3:]
    for streamer, options in zip(heard, ({"assistant": None}, {"assistant": "eagle3"}), strict=True):
        with pytest.raises(RuntimeError):
            model.generate(ids, **DRAWN, **options, streamer=streamer)
    assert heard[0].tokens == heard[1].tokens == ids[0].tolist() + clean()[1][:5]


def test_the_error_is_torchs_kind_of_error():
    """So that what catches plain generate's catches it; and it keeps its row from process to process."""
    import pickle

    error = NoDistribution.after(3, 2)
    assert isinstance(error, RuntimeError) and isinstance(error, FastSpecError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is NoDistribution and (str(again), again.row) == (str(error), 2)
