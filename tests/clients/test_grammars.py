"""Programs that hold answers to a grammar, through processors of their own that remember where each row stands."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.clients import MARKS, answers, asked, drafting
from torch import Tensor
from transformers import LogitsProcessor

pytestmark = MARKS

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPTS = (
    "Give me a person as JSON.",
    "Describe Alice, 30, as JSON.",
    "Bob is 41 years old. JSON please.",
    "Who are you?",
)


class Guided(LogitsProcessor):
    """llguidance's matchers, one a row, in the way its documentation shows for transformers."""

    def __init__(self, tokenizer: Any, grammar: str) -> None:
        self.tokenizer, self.grammar, self.matchers = tokenizer, grammar, []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        import llguidance.torch
        from llguidance import LLMatcher

        if not self.matchers:
            self.matchers = [LLMatcher(self.tokenizer, self.grammar) for _ in input_ids]
            self.mask = llguidance.torch.allocate_token_bitmask(len(input_ids), self.tokenizer.vocab_size)
        else:
            for matcher, token in zip(self.matchers, input_ids[:, -1].tolist(), strict=True):
                if not matcher.is_stopped():
                    matcher.consume_token(token)
        for row, matcher in enumerate(self.matchers):
            llguidance.torch.fill_next_token_bitmask(matcher, self.mask, row)
        llguidance.torch.apply_token_bitmask_inplace(scores, self.mask)
        return scores


def xgrammar(tokenizer: Any, size: int) -> Callable[[], dict[str, Any]]:
    import xgrammar as xgr

    grammar = xgr.GrammarCompiler(xgr.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)).compile_json_schema(
        json.dumps(SCHEMA)
    )
    return lambda: {"logits_processor": [xgr.contrib.hf.LogitsProcessor(grammar)]}


def llguidance(tokenizer: Any, size: int) -> Callable[[], dict[str, Any]]:
    import llguidance.hf

    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(SCHEMA), overrides={"whitespace_flexible": False}
    )
    known = llguidance.hf.from_tokenizer(tokenizer, n_vocab=size)
    return lambda: {"logits_processor": [Guided(known, grammar)]}


def lm_format_enforcer(tokenizer: Any, size: int) -> Callable[[], dict[str, Any]]:
    import transformers

    # Its integration imports the class from where transformers 4 had it.
    transformers.tokenization_utils.PreTrainedTokenizerBase = transformers.PreTrainedTokenizerBase
    from lmformatenforcer import JsonSchemaParser
    from lmformatenforcer.integrations.transformers import (
        build_token_enforcer_tokenizer_data,
        build_transformers_prefix_allowed_tokens_fn,
    )

    data = build_token_enforcer_tokenizer_data(tokenizer)
    return lambda: {
        "prefix_allowed_tokens_fn": build_transformers_prefix_allowed_tokens_fn(data, JsonSchemaParser(SCHEMA))
    }


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("client", [xgrammar, llguidance, lm_format_enforcer], ids=lambda client: client.__name__)
def test_a_grammar_holds(pair, tokenizer, client, rows):
    original, served = pair
    inputs, fresh = asked(tokenizer, *PROMPTS[:rows]), client(tokenizer, original.config.vocab_size)
    expected = answers(original, inputs, 30, **fresh())
    with drafting(served, calls=1):
        assert answers(served, inputs, 30, **fresh()) == expected
    assert set(json.loads(tokenizer.decode(expected[0], skip_special_tokens=True))) == {"name", "age"}


@pytest.mark.parametrize("backend", ["outlines_core", "xgrammar", "llguidance"])
def test_outlines(pair, tokenizer, backend):
    """One prompt and a batch of four, of a regular expression short enough for rows to end at different steps."""
    import outlines
    from outlines.types import Regex

    form = Regex(r'\{"name": "[A-Z][a-z]{2,8}", "age": [1-9][0-9]?\}')

    def made(model: Any) -> list[str]:
        generator = outlines.Generator(outlines.from_transformers(model, tokenizer), form, backend=backend)
        return [generator(PROMPTS[0], max_new_tokens=30), *generator.batch(list(PROMPTS), max_new_tokens=30)]

    original, served = pair
    expected = made(original)
    with drafting(served, calls=2):
        assert made(served) == expected
    assert all(set(json.loads(text)) == {"name", "age"} for text in expected)


def test_a_seed_draws_plain_decodings_tokens_under_a_grammar(pair, tokenizer):
    """A processor with a state is shown plain decoding's calls, and what is drawn behind it is drawn as plain decoding
    draws it."""
    original = pair[0]
    inputs, fresh = asked(tokenizer, *PROMPTS[:2]), xgrammar(tokenizer, original.config.vocab_size)
    emitted = []
    for model in pair:
        torch.manual_seed(5)
        emitted.append(model.generate(**inputs, max_new_tokens=20, do_sample=True, temperature=0.7, **fresh()).tolist())
    assert emitted[0] == emitted[1]
