"""Tokens of an answer, read into events: whatever pieces they come in, nothing is lost, and what is no call is text."""

from __future__ import annotations

import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

pytest.importorskip("openai")

from fastspec.programs.serving.answers import (
    AnswerReader,
    Content,
    Event,
    Reasoning,
    ResponseParser,
    ToolCall,
    merged,
)
from fastspec.programs.serving.structured import response_template
from fastspec.programs.texts import Detokenizer

QWEN, QWEN_3_5, GEMMA = (
    response_template(None, SimpleNamespace(model_type=kind)) for kind in ("qwen3", "qwen3_5_text", "gemma4")
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
PROMPT = "<|im_start|>user\nOslo?<|im_end|>\n<|im_start|>assistant\n"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and one that is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|im_end|>")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def cut(rng: random.Random, whole: Any) -> list[Any]:
    """The whole in pieces, single ones, halves or anything."""
    parts, at = [], 0
    most = rng.choice([1, 3, len(whole) + 1])
    while at < len(whole):
        count = rng.randint(1, most)
        parts.append(whole[at : at + count])
        at += count
    return parts


def events_of(reader: Any, parts: list[Any]) -> list[Event]:
    return list(merged([event for part in parts for event in reader.add(part)] + reader.finish()))


def parsed(tokenizer: Any, text: str, template: Any = QWEN, tools: Any = TOOLS, prompt: str = PROMPT) -> list[Event]:
    """The events of a text, the same in any pieces."""
    rng = random.Random(0)
    (first, *others) = [
        events_of(ResponseParser(template, tokenizer, tools, prompt), cut(rng, text)) for _ in range(12)
    ]
    assert all(other == first for other in others)
    return first


def call(arguments: Any, name: str = "weather") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_pieces_are_together_what_all_tokens_decode_to(tokenizer):
    """Cut characters at the end, and bytes that are none, among them."""
    rng = random.Random(1)
    for _ in range(200):
        text = "".join(rng.choice("ab é€😀\n<") for _ in range(rng.randint(0, 12)))
        tokens = tokenizer(text)["input_ids"]
        tokens = tokens[: rng.randint(0, len(tokens))] if rng.random() < 0.5 else tokens
        if rng.random() < 0.3:
            tokens.insert(rng.randint(0, len(tokens)), rng.choice([rng.randrange(256), tokenizer.eos_token_id]))
        for skips in (True, False):
            reader = Detokenizer(tokenizer, skip_special_tokens=skips)
            parts = [reader.add(part) for part in cut(rng, tokens)]
            assert "".join(parts) + reader.finish() == tokenizer.decode(tokens, skip_special_tokens=skips)


def test_a_character_comes_with_its_last_byte(tokenizer):
    reader = Detokenizer(tokenizer, skip_special_tokens=True)
    tokens = tokenizer("é€")["input_ids"]
    assert [reader.add([token]) for token in tokens] == ["", "é", "", "", "€"] and reader.finish() == ""
    reader.add(tokens[:1])
    assert reader.finish() == "\ufffd"


def test_reasoning_calls_and_text_are_told_apart(tokenizer):
    oslo = ToolCall("weather", '{"city": "Oslo"}')
    assert parsed(tokenizer, f"<think>\nHm.\n</think>\n\nSee:\n{call({'city': 'Oslo'})}<|im_end|>") == [
        Reasoning("Hm."),
        Content("See:"),
        oslo,
    ]
    both = call({"city": "Oslo"}) + "\n" + call({}, "time")
    assert parsed(tokenizer, both) == [oslo, ToolCall("time", "{}")]
    assert parsed(tokenizer, "</think> Hi <|im_end|>\n", prompt=f"{PROMPT}<think>\n") == [Content("Hi")]
    assert parsed(tokenizer, "Hm.\n</think>\n\nHi", prompt=f"{PROMPT}<think>\n") == [Reasoning("Hm."), Content("Hi")]
    assert parsed(tokenizer, "\n Hi\n\nyou \n<|im_end|>\n") == [Content("Hi\n\nyou")]
    assert parsed(tokenizer, "Hi", prompt="no such mark") == [Content("Hi")]


@pytest.mark.parametrize(
    "text",
    [
        call({"city": "Oslo"})[:-14],
        "<tool_call>",
        '<tool_call>\n{"name": "weather"}\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
        "<tool_call>\n{'name': 'weather', 'arguments': {'city': 'Oslo'}}\n</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "weather", "arguments": "Oslo"}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": ["Oslo"]}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"days": 1e999}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": "{\\"days\\": -1e999}"}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": "\\ud800"}</tool_call>',
        "<tool_call>5</tool_call> and more",
        "<tool_call></tool_call>",
        "A call stands in <tool_call> and </tool_call>.",
        "It ends in a <tool_call",
        '<tool_call>{"name": "weather", "arguments": ' + "[" * 5_000,
        "5 < 6 <",
    ],
)
@pytest.mark.parametrize("tools", [True, False])
def test_what_does_not_parse_is_text_as_it_stands(tokenizer, text, tools):
    assert parsed(tokenizer, text, tools=TOOLS if tools else None) == [Content(text)]
    assert parsed(tokenizer, f"Hi\n{text} ", tools=TOOLS if tools else None)[:1] == [Content(f"Hi\n{text}")]


def test_arguments_may_be_a_text_of_an_object(tokenizer):
    for arguments, text in (('{"city": "Oslo"}', '{"city": "Oslo"}'), ("", "{}"), ({}, "{}")):
        assert parsed(tokenizer, call(arguments)) == [ToolCall("weather", text)]


def test_a_call_is_text_where_no_tools_were_given(tokenizer):
    text = f"<think>\nHm.\n</think>\n\n{call({'city': 'Oslo'})}"
    assert parsed(tokenizer, text, tools=None) == [Reasoning("Hm."), Content(call({"city": "Oslo"}))]


def test_other_families_calls(tokenizer):
    values = "<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>"
    text = f"<tool_call>\n<function=weather>\n{values}\n</function>\n</tool_call>"
    assert parsed(tokenizer, text, QWEN_3_5) == [ToolCall("weather", '{"city": "Oslo", "days": 3}')]
    assert parsed(tokenizer, "<tool_call>\nno function", QWEN_3_5) == [Content("<tool_call>\nno function")]
    text = '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>'
    assert parsed(tokenizer, text, GEMMA, prompt="<|turn>model\n") == [ToolCall("weather", '{"city": "Oslo"}')]
    several = {"name": "f", "arguments": {}}
    listed = {
        "start_anchor": "<bot>",
        "fields": {
            "tool_calls": {
                "open": "[TOOL_CALLS]",
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
                "transform_each": True,
            },
            "content": {"content": "text"},
        },
    }
    text = f"Hi [TOOL_CALLS]{json.dumps([several, several])}"
    assert parsed(tokenizer, text, listed) == [Content("Hi"), ToolCall("f", "{}"), ToolCall("f", "{}")]


def test_a_reader_without_a_template_gives_all_text_and_no_special_token(tokenizer):
    tokens = [*tokenizer("\n Hi <tool_call> ")["input_ids"], tokenizer.eos_token_id]
    assert events_of(AnswerReader(tokenizer, None), [tokens[:4], tokens[4:]]) == [Content("\n Hi <tool_call> ")]
    parser = ResponseParser(QWEN, tokenizer, None, PROMPT)
    assert events_of(AnswerReader(tokenizer, parser), [tokens[:4], tokens[4:]]) == [Content("Hi <tool_call>")]


@pytest.mark.parametrize("opening", ["<think>\n", "<tool_call>\n"])
def test_an_end_token_is_no_part_of_what_it_ends(tokenizer, opening):
    tokens = [*tokenizer(f"{opening}Hm")["input_ids"], tokenizer.eos_token_id]
    reader = AnswerReader(tokenizer, ResponseParser(QWEN, tokenizer, TOOLS, PROMPT), frozenset(tokens[-1:]))
    ended = Reasoning("Hm") if "think" in opening else Content(f"{opening}Hm")
    assert events_of(reader, [tokens[:4], tokens[4:]]) == [ended]


def test_a_tokenizers_own_template_comes_before_its_family(tokenizer):
    class Config:
        model_type = "qwen3"

    assert response_template(tokenizer, Config) is QWEN
    Config.model_type = "llama"
    assert response_template(tokenizer, Config) is None
    tokenizer.response_template = GEMMA
    assert response_template(tokenizer, Config) is GEMMA


def test_without_transformers_own_server_tokenizers_own_templates_are_left(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.cli.serving.utils", None)
    assert response_template(SimpleNamespace(), SimpleNamespace(model_type="qwen3")) is None
    assert response_template(SimpleNamespace(response_template=GEMMA), SimpleNamespace(model_type="qwen3")) is GEMMA
