"""The last value of a request's field that is taken, and the first one that is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.training import small_target, small_tokenizer

from fastspec.programs.serving.fields import HARMLESS, KNOWN, NEUTRAL, SEQUENCES, SETTINGS, STOP_LENGTH
from fastspec.programs.serving.requests import (
    CHAT,
    COMPLETION,
    GREEDY_BELOW,
    RESPONSE,
    AnswerRequest,
    Limits,
    Refused,
    read,
)
from fastspec.programs.serving.server import Server
from fastspec.programs.serving.structured import chat_template

BOUNDS: list[tuple[str, Any, Any]] = [
    ("max_tokens", 1, 0),
    ("max_tokens", 50, 51),
    ("max_completion_tokens", 50, 51),
    ("max_output_tokens", 50, 51),
    ("stop", "w", ""),
    ("stop", ["w"] * 16, ["w"] * 17),
    ("stop", "w" * STOP_LENGTH, "w" * (STOP_LENGTH + 1)),
    ("stop", ["w" * 128] * 2, ["w" * 128, "w" * 129]),
    ("seed", -(2**63), -(2**63) - 1),
    ("seed", 2**63 - 1, 2**63),
    ("temperature", 0, -0.01),
    ("temperature", 100, 100.01),
    ("top_p", 0, -0.01),
    ("top_p", 1, 1.01),
    ("frequency_penalty", -2, -2.01),
    ("presence_penalty", 2, 2.01),
    ("min_p", 1, 1.01),
    ("logit_bias", {"5": -100}, {"5": -100.01}),
    ("logit_bias", {"5": 100}, {"5": 100.01}),
    ("n", 128, 129),
    ("n", 1, 0),
    ("seed", 1, True),
]


NEEDS: dict[Any, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "w5"}]},
    COMPLETION: {"prompt": "w5"},
    RESPONSE: {"input": "w5"},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return small_target()


def asked(model: Any, route: Any = COMPLETION, template: str = "", **fields: Any) -> AnswerRequest:
    return read({**NEEDS[route], **fields}, route, "id", Limits(tokens=50), "small", model, None, template)


@pytest.mark.parametrize(("name", "last", "first"), BOUNDS)
def test_what_a_field_may_hold_ends_where_it_says(model: Any, name: str, last: Any, first: Any) -> None:
    for route in NEEDS:
        if name in route.fields:
            asked(model, route, **{name: last})
            with pytest.raises(Refused, match=r"50" if first == 51 else name) as refused:
                asked(model, route, **{name: first})
            assert refused.value.status == 400
    assert any(name in route.fields for route in NEEDS)


@pytest.mark.parametrize("name", ["top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"])
def test_shares_in_a_generation_config_are_from_0_to_1(model: Any, name: str) -> None:
    for value, fits in ((0, True), (1, True), (-0.01, False), (1.01, False)):
        config = json.dumps({name: value})
        if fits:
            asked(model, generation_config=config)
        else:
            with pytest.raises(Refused, match=name):
                asked(model, generation_config=config)


def test_a_penalty_grows_from_a_place_on_by_a_factor_up_to_100(model: Any) -> None:
    name = "exponential_decay_length_penalty"
    for value in ([0, 1.5], [7, 0], [7, 100]):
        asked(model, generation_config=json.dumps({name: value}))
    for value in ([-1, 1.5], [0, 100.5], [0, -0.5], [0.5, 1], [7], [7, 1, 1], 7):
        with pytest.raises(Refused, match=name):
            asked(model, generation_config=json.dumps({name: value}))


def test_sequences_of_tokens_are_a_thousand_at_most(model: Any) -> None:
    """The scores of each are looked up at every token."""
    for name, each in (("bad_words_ids", [5]), ("sequence_bias", [[5], 1.0])):
        asked(model, generation_config=json.dumps({name: [each] * SEQUENCES}))
        with pytest.raises(Refused, match=name):
            asked(model, generation_config=json.dumps({name: [each] * (SEQUENCES + 1)}))


def test_every_setting_of_transformers_is_taken_or_refused_by_name(model: Any) -> None:
    """One that is not heeded is taken where it changes no token."""
    for name in KNOWN:
        heeded = name in SETTINGS or name in HARMLESS
        for value in (None, False, NEUTRAL.get(name), {"odd": [5]}):
            config = json.dumps({name: value})
            if name not in SETTINGS and (heeded or not value or value == NEUTRAL.get(name)):
                asked(model, generation_config=config)
            elif value == {"odd": [5]}:
                with pytest.raises(Refused, match=name):
                    asked(model, generation_config=config)


def test_every_field_of_openai_is_taken_or_refused_by_name(model: Any) -> None:
    """And none is ignored that might change an answer."""
    taken = set()
    for route in NEEDS:
        for name in route.fields - {*route.needs}:
            try:
                read({**NEEDS[route], name: {"odd": [5]}}, route, "id", Limits(), "small", model, None, "")
                taken.add(name)
            except Refused as refused:
                assert name in str(refused) and refused.status in (400, 404), name
    assert taken == {
        *("metadata", "client_metadata", "user", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "chat_template_kwargs"),
    }


def test_the_vocabulary_ends_before_its_size(model: Any) -> None:
    size = model.config.vocab_size
    for token, fits in (("0", True), (str(size - 1), True), (str(size), False)):
        given = {"logit_bias": {token: 1}, "temperature": GREEDY_BELOW}
        if fits:
            assert asked(model, **given).config.do_sample
        else:
            with pytest.raises(Refused, match=f"tokens are 0 to {size - 1}"):
                asked(model, **given)
    assert not asked(model, temperature=GREEDY_BELOW / 2).config.do_sample


def test_whole_numbers_may_be_written_with_a_fraction(model: Any) -> None:
    """As JSON of other languages has them; others than whole ones are refused."""
    settings = json.dumps({"max_new_tokens": 6.0, "top_k": 3.0, "do_sample": True})
    for given in ({"max_tokens": 5.0, "n": 2.0, "seed": 3.0, "top_k": 4.0}, {"generation_config": settings, "n": 2.0}):
        found = asked(model, **given)
        numbers = found.n, found.seed, found.config.max_new_tokens, found.config.top_k
        assert numbers == ((2, 3, 5, 50) if "seed" in given else (2, None, 6, 3))
        assert all(type(each) in (int, type(None)) for each in numbers)
    for name in ("max_tokens", "n", "seed"):
        for value in (5.5, float("nan"), 1e300):
            with pytest.raises(Refused, match=name):
                asked(model, **{name: value})


def test_a_refusal_is_the_text_of_its_message(model: Any) -> None:
    parts = [{"type": "text", "text": "w5"}, {"type": "refusal", "refusal": "w6"}]
    for message in ({"content": parts}, {"content": None, "refusal": "w5 w6"}, {"content": "w5 w6", "refusal": None}):
        assert asked(model, CHAT, messages=[{"role": "assistant", **message}]).messages[0]["content"] == "w5 w6"
    both = asked(model, CHAT, messages=[{"role": "assistant", "content": "w5", "refusal": "w6"}]).messages[0]
    assert both["content"] == "w5"
    for odd in ({"type": "refusal", "text": "w5"}, {"type": "image_url", "text": "w5"}, {"text": "w5"}, "w5"):
        with pytest.raises(Refused, match="part that is no text"):
            asked(model, CHAT, messages=[{"role": "assistant", "content": [odd]}])
    for odd in (0, False, {}):  # as empty as a text without characters, and none
        with pytest.raises(Refused, match=r"messages\[0\].content must be a text"):
            asked(model, CHAT, messages=[{"role": "assistant", "content": odd, "refusal": "w5"}])
    assert asked(model, CHAT, messages=[{"role": "user", "content": []}]).messages[0]["content"] == ""


def test_no_tools_are_given_where_none_may_be_chosen(model: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    flat = {"type": "function", "name": "f", "parameters": {}}
    for route, given in ((CHAT, tool), (RESPONSE, flat)):
        assert asked(model, route, tools=[given]).tools == [tool]
        assert asked(model, route, tools=[given], tool_choice="none").tools is None


def test_tools_that_are_not_allowed_stay_in_the_prompt(model: Any) -> None:
    tools = [{"type": "function", "name": name} for name in ("f", "g", "h")]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [*tools[2:], *tools[:1]]}
    some, every = asked(model, RESPONSE, tools=tools, tool_choice=choice), asked(model, RESPONSE, tools=tools)
    assert some.tools == every.tools and (some.allowed, every.allowed) == ({"f", "h"}, None)


def test_tools_of_a_namespace_have_one_name_for_the_model(model: Any) -> None:
    """In the tools, in calls that it made and in those that it is to make; as Codex gives them."""
    tools = [
        {
            "type": "namespace",
            "name": name,
            "description": "w4",
            "tools": [{"type": "function", **each} for each in held],
        }
        for name, held in (("mcp__a__", [{"name": "f", "description": "w5"}, {"name": "g"}]), ("b", [{"name": "f"}]))
    ]
    call = {"type": "function_call", "call_id": "c", "name": "f", "namespace": "mcp__a__", "arguments": "{}"}
    found = asked(model, RESPONSE, tools=[{"type": "function", "name": "f"}, *tools], input=[call])
    functions = [tool["function"] for tool in found.tools or ()]
    assert [each["name"] for each in functions] == ["f", "mcp__a__f", "mcp__a__g", "b__f"]
    assert [each.get("description") for each in functions] == [None, "w4\nw5", "", "w4"]
    assert found.spaces["mcp__a__f"] == {"name": "f", "namespace": "mcp__a__"} and "f" not in found.spaces
    assert found.messages[0]["tool_calls"][0]["function"]["name"] == "mcp__a__f"


def test_an_effort_is_a_variable_of_the_template(model: Any) -> None:
    both, efforts = "{{ reasoning_effort }}{{ enable_thinking }}", "{{ reasoning_effort }}"
    for route, given in (
        (CHAT, lambda effort: {"reasoning_effort": effort}),
        (RESPONSE, lambda effort: {"reasoning": {"effort": effort, "summary": "auto"}}),
    ):
        assert asked(model, route, both, **given("low")).variables == {"reasoning_effort": "low"}
        assert asked(model, route, both, **given("none")).variables == {"enable_thinking": False}
        assert asked(model, route, both, **given(None)).variables == {}
        own = {"chat_template_kwargs": {"reasoning_effort": "high"}}
        assert asked(model, route, both, **given("low"), **own).variables == {"reasoning_effort": "high"}
        for template, effort, name in ((efforts, "none", "enable_thinking"), ("", "low", "reasoning_effort")):
            with pytest.raises(Refused, match=f"{effort}.*no variable {name}"):
                asked(model, route, template, **given(effort))


def test_a_template_s_text_is_that_for_tools() -> None:
    for held, text in ((None, ""), ("a", "a"), ({"default": "a"}, "a"), ({"default": "a", "tool_use": "b"}, "b")):
        assert chat_template(SimpleNamespace(chat_template=held)) == text


def test_log_probabilities_of_a_response_come_where_they_are_included(model: Any) -> None:
    encrypted, scores = "reasoning.encrypted_content", "message.output_text.logprobs"
    for include, told in (([], None), ([encrypted], None), ([encrypted, scores], 0)):
        assert asked(model, RESPONSE, include=include).logprobs == told


def test_developers_are_systems(model: Any) -> None:
    """Most templates leave out a role that they do not know."""
    talk = [{"role": "developer", "content": "w4"}, {"role": "user", "content": "w5"}]
    for route, given in ((CHAT, {"messages": talk}), (RESPONSE, {"input": talk})):
        assert [message["role"] for message in asked(model, route, **given).messages] == ["system", "user"]


def test_the_input_of_responses_comes_to_messages(model: Any) -> None:
    """Reasoning and calls are parts of the assistant's message beside them."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "w5"}, {"type": "input_text", "text": "w6"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "w7"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""},
        {"type": "function_call", "call_id": "d", "name": "g", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "w8"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "w9"}]},
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
        for name, function, arguments in (("c", "f", {}), ("d", "g", {"a": 1}))
    ]
    assert asked(model, RESPONSE, input=items, instructions="w4").messages == [
        {"role": "system", "content": "w4"},
        {"role": "user", "content": "w5 w6"},
        {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "w7"},
        {"role": "tool", "tool_call_id": "c", "content": "w8"},
        {"role": "assistant", "content": "w9"},
    ]
    for held, known in (("fastspec:w7", "w7"), ("gAAAAAB", None), (None, None)):
        item = {"type": "reasoning", "summary": [], "encrypted_content": held}
        [message] = asked(model, RESPONSE, input=[item, {"role": "assistant", "content": "w9"}]).messages
        assert message.get("reasoning_content") == known
    both = [{"role": "system", "content": "w6"}, {"role": "user", "content": "w5"}]
    assert asked(model, RESPONSE, input=both, instructions="w4").messages[0]["content"] == "w4\n\nw6"
    both[0] = {"role": "developer", "content": [{"type": "input_text", "text": "w6"}]}
    assert asked(model, RESPONSE, input=both, instructions="w4").messages[0]["content"] == "w4\n\nw6"
    for number, odd in enumerate(({"type": "function_call_output"}, {"type": "other", "id": "x"}, {})):
        with pytest.raises(Refused, match=f"input: item {number} is no message"):
            asked(model, RESPONSE, input=[*[{"role": "user", "content": "w5"}] * number, odd])
    with pytest.raises(Refused, match="no response is kept here: with store: false"):
        asked(model, RESPONSE, input=[{"type": "item_reference", "id": "x"}])
    parts = [{"type": "input_text", "text": "w5"}]
    assert asked(model, RESPONSE, input=parts).messages == [{"role": "user", "content": "w5"}]


@pytest.mark.parametrize(
    ("waiting", "count", "status"),
    [(2, 1, None), (3, 1, 429), (0, 5, None), (0, 6, 400), (2, 3, None), (2, 4, 429), (3, 2, 429)],
)
def test_as_many_wait_as_the_queue_holds_and_come_at_once_as_rows_and_queue_hold(
    model: Any, waiting: int, count: int, status: int | None
) -> None:
    stats, info = SimpleNamespace(rows=2), {"assistant": "nasd"}
    batch = SimpleNamespace(max_length=20, model=model, waiting=waiting, stats=stats, info=info)
    made = Server(batch, small_tokenizer(), "small", Limits(queue=3))  # type: ignore[arg-type]
    if status is None:
        made._refuse_full(count)
    else:
        with pytest.raises(Refused) as refused:
            made._refuse_full(count)
        assert refused.value.status == status


def test_a_prompt_of_all_the_room_leaves_none_for_an_answer(model: Any) -> None:
    batch = SimpleNamespace(max_length=20, model=model, waiting=0, info={"assistant": "nasd"})
    made = Server(batch, small_tokenizer(), "small", Limits())  # type: ignore[arg-type]
    for length, fits in ((19, True), (20, False)):
        _, (prompt,) = made._read(asked(model, prompt="w5 " * length))
        assert len(prompt.ids) == length
        if fits:
            made._fit(asked(model), length)
        else:
            with pytest.raises(Refused, match="has 20 tokens, and this server takes 19 at most"):
                made._fit(asked(model), length)
    with pytest.raises(Refused, match="has 107 tokens or more, and this server takes 19 at most"):
        made._read(asked(model, prompt="w5 " * 10_000))
