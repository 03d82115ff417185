"""The table of transformers' stateless processors and criteria: with each of them a batch gives plain decoding's
tokens, row by row."""

from __future__ import annotations

import math
from typing import Any

import pytest
from helpers.generate import LENGTH, TREE, free, prompts, shallow_model, stats
from helpers.models import tiny_head
from helpers.tokenizers import TARGET
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as lp
from transformers.generation import stopping_criteria as sc

import fastspec
from fastspec.patches.call import processors
from fastspec.patches.call import processors as selection
from fastspec.patches.call.grammar import Grammar, GrammarOfCall
from fastspec.patches.call.processors import CRITERIA, ROWWISE, TokenPenalties, are_known
from fastspec.patches.hf.ends import StopStrings

WIDTH = 9
MADE: dict[type, Any] = {
    lp.TemperatureLogitsWarper: lambda: lp.TemperatureLogitsWarper(0.6),
    lp.TopKLogitsWarper: lambda: lp.TopKLogitsWarper(5),
    lp.TopPLogitsWarper: lambda: lp.TopPLogitsWarper(0.8),
    lp.MinPLogitsWarper: lambda: lp.MinPLogitsWarper(0.05),
    lp.TypicalLogitsWarper: lambda: lp.TypicalLogitsWarper(0.9),
    lp.EpsilonLogitsWarper: lambda: lp.EpsilonLogitsWarper(3e-3),
    lp.EtaLogitsWarper: lambda: lp.EtaLogitsWarper(3e-3),
    lp.LogitNormalization: lambda: lp.LogitNormalization(),
    lp.InfNanRemoveLogitsProcessor: lambda: lp.InfNanRemoveLogitsProcessor(),
    lp.SuppressTokensLogitsProcessor: lambda: lp.SuppressTokensLogitsProcessor(list(range(6, 40))),
    lp.RepetitionPenaltyLogitsProcessor: lambda: lp.RepetitionPenaltyLogitsProcessor(1.6),
    lp.NoRepeatNGramLogitsProcessor: lambda: lp.NoRepeatNGramLogitsProcessor(2),
    lp.NoBadWordsLogitsProcessor: lambda: lp.NoBadWordsLogitsProcessor([[token] for token in range(10, 30)]),
    lp.SequenceBiasLogitsProcessor: lambda: lp.SequenceBiasLogitsProcessor(
        [[[token], -6.0] for token in range(10, 30)]
    ),
    lp.MinLengthLogitsProcessor: lambda: lp.MinLengthLogitsProcessor(WIDTH + 12, list(range(6, 97, 2))),
    lp.MinNewTokensLengthLogitsProcessor: lambda: lp.MinNewTokensLengthLogitsProcessor(
        WIDTH, 12, list(range(6, 97, 2))
    ),
    lp.ForcedBOSTokenLogitsProcessor: lambda: lp.ForcedBOSTokenLogitsProcessor(8),
    lp.ForcedEOSTokenLogitsProcessor: lambda: lp.ForcedEOSTokenLogitsProcessor(WIDTH + LENGTH, 7),
    lp.SuppressTokensAtBeginLogitsProcessor: lambda: lp.SuppressTokensAtBeginLogitsProcessor(list(range(6, 60)), WIDTH),
    lp.ExponentialDecayLengthPenalty: lambda: lp.ExponentialDecayLengthPenalty((3, 1.4), 7, WIDTH),
    TokenPenalties: lambda: TokenPenalties(0.7, 0.5, WIDTH),
    sc.MaxLengthCriteria: lambda: sc.MaxLengthCriteria(WIDTH + 7),
    sc.EosTokenCriteria: lambda: sc.EosTokenCriteria(list(range(6, 12))),
    sc.MaxTimeCriteria: lambda: sc.MaxTimeCriteria(math.inf),
    sc.StopStringCriteria: lambda: sc.StopStringCriteria(TARGET, ["a", "b"]),
    StopStrings: lambda: StopStrings(TARGET, ["a", "b"]),
}


@pytest.fixture(scope="module")
def both():
    """(the unpatched model, the same patched)."""
    model = shallow_model()
    return shallow_model(), fastspec.patch(model, eagle3=tiny_head(model))


def test_every_type_of_the_table_is_here():
    assert set(MADE) | {Grammar, GrammarOfCall} == {*ROWWISE, *CRITERIA}  # grammars: test_grammar.py


@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
def test_a_known_type_is_decoded_row_by_row(both, monkeypatch, kind):
    """Greedily, with rows that end at different steps; no step of plain decoding is made, so that rows do not wait for
    each other."""
    plain, model = both
    inputs = prompts(6, 2, WIDTH)
    texts = free(plain, inputs)
    ends = {"eos_token_id": [texts[0][3], texts[1][11]]} if kind is not sc.EosTokenCriteria else {}
    options = {"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 0, **ends}

    def given() -> dict[str, Any]:
        made = MADE[kind]()
        if isinstance(made, lp.LogitsProcessor):
            return {"logits_processor": LogitsProcessorList([made])}
        return {"stopping_criteria": StoppingCriteriaList([made])}

    want = plain.generate(**inputs, **options, **given())
    monkeypatch.setattr(processors.PlainSteps, "__call__", lambda *args: pytest.fail("in lockstep"))
    assert model.generate(**inputs, **options, **given(), assistant=TREE).tolist() == want.tolist()
    assert stats(model).drafted > 0


def test_a_type_that_is_derived_from_a_known_one_is_not_known():
    """It may keep anything."""

    class Own(lp.TemperatureLogitsWarper):
        pass

    class Ends(sc.EosTokenCriteria):
        pass

    assert not are_known([Own(0.5)], []) and not are_known([], [Ends([1])]) and are_known([], [])
    assert selection.unknown_types([Own(0.5), lp.LogitNormalization()], [Ends([1])]) == "Own, Ends"
