"""`/v1/messages`: requests in Anthropic's form as those of a chat, and answers in that form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastspec.programs.serving import fields
from fastspec.programs.serving.answers import Beside, Content, End, Event, Reasoning, ToolCall, merged
from fastspec.programs.serving.fields import IS_OBJECT, IS_TEXT, either, list_of, object_of, one_of
from fastspec.programs.serving.forms import Form, JsonObject
from fastspec.programs.serving.middleware import message_error
from fastspec.programs.serving.requests import Body, Refused, Route

STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
CHOICES = {"auto": "auto", "none": "none", "any": "required"}
THINKING = "disabled", "adaptive", "enabled"


def _is_text_or_blocks(value: Any) -> bool:
    return isinstance(value, str) or list_of(IS_OBJECT)(value)


def _is_tool(value: Any) -> bool:
    return object_of({"name": IS_TEXT, "input_schema": IS_OBJECT})(value) and value.get("type") in (None, "custom")


FORMAT = object_of({"type": one_of("json_schema"), "schema": IS_OBJECT}, {})
FIELDS: dict[str, fields.Check] = {
    "system": (_is_text_or_blocks, "a text, or a list of blocks of type text"),
    "stop_sequences": fields.STOP,
    "tools": (list_of(_is_tool), "a list of tools, each with a name and an input_schema"),
    "tool_choice": (object_of({"type": one_of(*CHOICES, "tool")}), "an object of type auto, none, any or tool"),
    "thinking": (object_of({"type": one_of(*THINKING)}), "an object of type disabled, adaptive or enabled"),
    "output_config": (
        object_of({}, {"format": either(one_of(None), FORMAT), "effort": either(one_of(None), fields.EFFORTS)}),
        "an object with format, of type json_schema with a schema, and effort",
    ),
    "context_management": (
        object_of({}, {"edits": list_of(one_of({"type": "clear_thinking_20251015", "keep": "all"}))}),
        "an object with edits that keep all",
    ),
    **dict.fromkeys(("cache_control", "thread"), fields.ANY),
}
SAME = "model", "max_tokens", "temperature", "top_p", "top_k", "stream", "metadata", "service_tier", "price"
"""Fields that a chat has too."""
REFUSED = "container", "diagnostics", "inference_geo", "mcp_servers", "speed"
BILLING = "x-anthropic-billing-header:"
"""Begins a block that Claude Code puts before its system text: it is for Anthropic's servers, and another with each
request, so that no two prompts would begin alike."""


def as_chat(body: Body) -> Body:
    """The fields of a chat that a checked request comes to. Raises Refused for what no chat has."""
    if "thread" in body:  # the package goes on without one where it is told so by this code
        raise Refused(
            "thread is not accepted: no conversation is kept here, send all its messages",
            code="thread_unsupported_request",
        )
    found = {name: body[name] for name in SAME if name in body}
    found["messages"] = _system(body.get("system")) + _messages(body["messages"])
    if body.get("stop_sequences"):
        found["stop"] = body["stop_sequences"]
    if body.get("tools"):
        found["tools"] = [_tool(tool) for tool in body["tools"]]
    choice = body.get("tool_choice")
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.get("name")}}
        found["tool_choice"] = CHOICES.get(choice["type"], named)
        if choice.get("disable_parallel_tool_use"):
            found["parallel_tool_calls"] = False
    thinking = body.get("thinking", {}).get("type")
    if thinking in ("disabled", "enabled"):
        found["chat_template_kwargs"] = {"enable_thinking": thinking == "enabled"}
    effort, form = (body.get("output_config", {}).get(name) for name in ("effort", "format"))
    if effort not in (None, "high"):  # which is the default there
        found["reasoning_effort"] = effort
    if form is not None:
        found["response_format"] = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    return found


def _route(*needs: str) -> Route:
    names = frozenset((*SAME, *FIELDS, *REFUSED, "messages"))
    return Route(needs, names, FIELDS | {"messages": fields.ACCEPTED["messages"]}, as_chat)


MESSAGE, COUNTED = _route("messages", "max_tokens"), _route("messages")
"""Routes of an answer, and of the count of a prompt's tokens."""


def _tool(tool: Body) -> Body:
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _text(blocks: Any, place: str) -> str:
    if blocks is None or isinstance(blocks, str):
        return blocks or ""
    listed = blocks if isinstance(blocks, list) else [blocks]
    return "\n".join(_block_text(block, f"{place}[{number}]") for number, block in enumerate(listed))


def _system(system: Any) -> list[Body]:
    if isinstance(system, list):
        system = [block for block in system if not str(block.get("text")).startswith(BILLING)]
    return [{"role": "system", "content": _text(system, "system")}] if system else []


def _messages(given: list[Body]) -> list[Body]:
    """The messages of a chat; results of tools are messages of their own before the text beside them."""
    found: list[Body] = []
    for number, message in enumerate(given):
        content: Any = message.get("content")
        role, place = message.get("role"), f"messages[{number}].content"
        if role not in ("user", "assistant", "system") or not _is_text_or_blocks(content):
            raise Refused(
                f"messages[{number}] must have a role (user, assistant, system) and content, a text or blocks"
            )
        if isinstance(content, str):
            found.append({"role": role, "content": content})
        elif role == "user":
            found += _from_user(content, place)
        elif role == "system":
            found.append({"role": role, "content": _text(content, place)})
        else:
            found.append(_from_assistant(content, place))
    return found


def _from_user(blocks: list[Any], place: str) -> list[Body]:
    results, texts = [], []
    for number, block in enumerate(blocks):
        if block.get("type") == "tool_result" and isinstance(block.get("tool_use_id"), str):
            content = _text(block.get("content"), f"{place}[{number}].content")
            if block.get("is_error"):  # which no template has a place for
                content = f"Error: {content}"
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
        else:
            texts.append(_block_text(block, f"{place}[{number}]"))
    return results + ([{"role": "user", "content": "\n".join(texts)}] if texts or not results else [])


def _from_assistant(blocks: list[Any], place: str) -> Body:
    texts, calls, thoughts = [], [], []
    for number, block in enumerate(blocks):
        if block.get("type") == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif block.get("type") == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif block.get("type") == "redacted_thinking":  # Anthropic's models alone can read it
            continue
        else:
            texts.append(_block_text(block, f"{place}[{number}]"))
    found: Body = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        found["tool_calls"] = calls
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    return found


def _block_text(block: Any, place: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text" or not isinstance(block.get("text"), str):
        raise Refused(f"{place} of type {str(kind)[:40]!r} is not read: text is, thinking and tools where they belong")
    return str(block["text"])


@dataclass
class MessageForm(Form):
    """Form of `/v1/messages`: blocks, each opened, written and closed by events with its own index."""

    done, ping = False, 'event: ping\ndata: {"type": "ping"}\n\n'
    content: list[JsonObject] = field(default_factory=list)
    inside: type[Event] | None = None
    """Kind of the text that the last block is still given."""

    def message(self, **more: Any) -> JsonObject:
        return {
            **{"id": f"msg_{self.asked.request_id}", "type": "message", "role": "assistant", "model": self.model},
            **{"content": list(self.content), "stop_reason": None, "stop_sequence": None},
            "usage": {"input_tokens": self.prompt_tokens, "output_tokens": 0},
            **more,
        }

    def whole(self, answers: Sequence[Iterable[Event]]) -> JsonObject:
        for event in merged(answers[0]):
            messages = self.add(event)
        *_, ended, _ = messages
        return self.message(**ended["delta"], usage=ended["usage"], timings=ended["timings"])

    def begin(self) -> list[JsonObject]:
        return [{"type": "message_start", "message": self.message()}, {"type": "ping"}]

    def add(self, event: Event, index: int = 0) -> list[JsonObject]:
        """The messages of one event; another kind than the last one's closes its block."""
        if isinstance(event, Beside):
            return []
        messages = self._close() if self.inside is not None and type(event) is not self.inside else []
        if isinstance(event, End):
            reason = "stop_sequence" if event.stop is not None and event.reason == "stop" else STOPS[event.reason]
            delta = {"stop_reason": reason, "stop_sequence": event.stop if reason == "stop_sequence" else None}
            read = self.prompt_tokens - event.cached
            usage = {"input_tokens": read, "cache_read_input_tokens": event.cached, "output_tokens": event.tokens}
            last = {"type": "message_delta", "delta": delta, "usage": usage, "timings": self.timings({0: event})}
            return [*messages, last, {"type": "message_stop"}]
        if isinstance(event, ToolCall):
            name = f"toolu_{self.asked.request_id}_{len(self.content)}"
            messages += self._open(type="tool_use", id=name, name=event.name, input={})
            messages.append(self._delta("input_json_delta", partial_json=event.arguments))
            self.content[-1]["input"] = json.loads(event.arguments)
            return messages + self._close()
        name = "thinking" if isinstance(event, Reasoning) else "text"
        if self.inside is None:
            more = {"signature": ""} if isinstance(event, Reasoning) else {}
            messages += self._open(type=name, **{name: ""}, **more)
            self.inside = type(event)
        assert isinstance(event, (Content, Reasoning))
        self.content[-1][name] += event.text
        return [*messages, self._delta(f"{name}_delta", **{name: event.text})]

    def failed(self, message: str, status: int) -> list[JsonObject]:
        return [message_error(message, status)]

    def _open(self, **block: Any) -> list[JsonObject]:
        self.content.append(block)
        return [{"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}]

    def _delta(self, kind: str, **more: Any) -> JsonObject:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": {"type": kind, **more}}

    def _close(self) -> list[JsonObject]:
        self.inside = None
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]
