"""Answers in OpenAI's forms, each written from the same events whether it is whole or a stream. Tests hold all that is
written to the types of the openai package."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from fastspec.programs.serving.answers import Content, End, Event, Reasoning, ToolCall, merged
from fastspec.programs.serving.middleware import error_body
from fastspec.programs.serving.requests import AnswerRequest

JsonObject = dict[str, Any]
"""JSON object of an answer, or of an event of its stream."""


class Form(ABC):
    """Form of one answer."""

    done = True
    """True where a stream ends with `[DONE]`."""

    def __init__(self, asked: AnswerRequest, model: str) -> None:
        self.asked, self.model, self.created = asked, model, int(time.time())

    @abstractmethod
    def whole(self, events: Iterable[Event]) -> JsonObject:
        """The answer."""

    @abstractmethod
    def begin(self) -> list[JsonObject]:
        """What a stream begins with."""

    @abstractmethod
    def add(self, event: Event) -> list[JsonObject]:
        """What a stream has of one event."""

    def failed(self, message: str, status: int) -> list[JsonObject]:
        """What a stream has of an error, which ends it."""
        return [error_body(message, status)]


class Choices(Form):
    """Form with one choice: what chats and completions share."""

    whole_kind = chunk_kind = "text_completion"

    def made(self, kind: str, choices: list[JsonObject], end: End | None = None) -> JsonObject:
        """An answer or a chunk, with the counts of tokens where an end is given."""
        head = {"id": self.asked.request_id, "object": kind, "created": self.created, "model": self.model}
        if end is None:
            return {**head, "choices": choices}
        counts = {"prompt_tokens": end.prompt_tokens, "completion_tokens": end.tokens}
        return {**head, "choices": choices, "usage": {**counts, "total_tokens": end.prompt_tokens + end.tokens}}

    def chunk(self, end: End | None = None, **choice: Any) -> JsonObject:
        """A chunk with a choice of these fields."""
        return self.made(self.chunk_kind, [{"index": 0, "finish_reason": None, **choice}], end)

    def ended(self, end: End, **choice: Any) -> list[JsonObject]:
        """The last chunk, with the counts unless the request says where it wants them."""
        usage = self.asked.usage
        last = self.chunk(end if usage is None else None, **{**choice, "finish_reason": end.reason})
        return [last, self.made(self.chunk_kind, [], end)] if usage else [last]


class ChatForm(Choices):
    """Form of `/v1/chat/completions`."""

    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    calls = 0

    def _delta(self, event: Event) -> JsonObject:
        if isinstance(event, ToolCall):
            function = {"name": event.name, "arguments": event.arguments}
            self.calls += 1
            name = f"{self.asked.request_id}_tool_call_{self.calls - 1}"
            call = {"index": self.calls - 1, "id": name, "type": "function", "function": function}
            return {"tool_calls": [call]}
        if isinstance(event, End):
            return {}
        return {"reasoning_content" if isinstance(event, Reasoning) else "content": event.text}

    def whole(self, events: Iterable[Event]) -> JsonObject:
        """The message that the chunks come to."""
        found: JsonObject = {}
        for event in events:
            for name, value in self._delta(event).items():
                found[name] = found[name] + value if name in found else value
        assert isinstance(event, End)
        for call in found.get("tool_calls", ()):
            del call["index"]
        message = {"role": "assistant", "content": None if "tool_calls" in found else "", **found}
        return self.made(self.whole_kind, [{"index": 0, "message": message, "finish_reason": event.reason}], event)

    def begin(self) -> list[JsonObject]:
        """The role."""
        return [self.chunk(delta={"role": "assistant", "content": ""})]

    def add(self, event: Event) -> list[JsonObject]:
        """A chunk."""
        delta = self._delta(event)
        return self.ended(event, delta=delta) if isinstance(event, End) else [self.chunk(delta=delta)]


class CompletionForm(Choices):
    """Form of `/v1/completions`, whose chunks are of the kind of the whole answer."""

    def whole(self, events: Iterable[Event]) -> JsonObject:
        """The text that the chunks come to."""
        *texts, end = events
        assert isinstance(end, End)
        text = "".join(each.text for each in texts if isinstance(each, Content))
        return self.chunk(end, text=text, logprobs=None, finish_reason=end.reason)

    def begin(self) -> list[JsonObject]:
        """Nothing."""
        return []

    def add(self, event: Event) -> list[JsonObject]:
        """A chunk."""
        if isinstance(event, End):
            return self.ended(event, text="", logprobs=None)
        return [self.chunk(text=event.text, logprobs=None)] if isinstance(event, Content) else []


class ResponseForm(Form):
    """Form of `/v1/responses`: a list of items, each opened, written and closed by messages with its own index."""

    done = False

    def __init__(self, asked: AnswerRequest, model: str) -> None:
        super().__init__(asked, model)
        self.items: list[JsonObject] = []
        self.inside: type[Event] | None = None
        """Kind of the text that the last item is still given."""
        self.text, self.sent = "", 0

    def whole(self, events: Iterable[Event]) -> JsonObject:
        """The response that a stream ends with."""
        for event in merged(events):
            messages = self.add(event)
        response: JsonObject = messages[-1]["response"]
        return response

    def begin(self) -> list[JsonObject]:
        """A response without items."""
        return [self._message(kind, response=self._response("in_progress")) for kind in ("created", "in_progress")]

    def add(self, event: Event) -> list[JsonObject]:
        """The messages of one event; another kind than the last one's closes its item."""
        messages = self._close() if self.inside is not None and type(event) is not self.inside else []
        if isinstance(event, ToolCall):
            return messages + self._call(event)
        if isinstance(event, End):
            if all(item["type"] == "reasoning" for item in self.items):
                messages += self._open(Content) + self._close()
            status = "incomplete" if event.reason == "length" else "completed"
            return [*messages, self._message(status, response=self._response(status, event))]
        if self.inside is None:
            messages += self._open(type(event))
        self.text += event.text
        if isinstance(event, Reasoning):
            return [*messages, self._within("reasoning_text.delta", content_index=0, delta=event.text)]
        return [*messages, self._within("output_text.delta", content_index=0, delta=event.text, logprobs=[])]

    def failed(self, message: str, status: int) -> list[JsonObject]:
        """The error, and the response with it."""
        error = {"code": "server_error", "message": message}
        self.sent += 1
        first = {"type": "error", "sequence_number": self.sent - 1, "param": None, **error}
        return [first, self._message("failed", response=self._response("failed", error=error))]

    def _open(self, kind: type[Event]) -> list[JsonObject]:
        self.inside, self.text = kind, ""
        if kind is Reasoning:
            return [self._item("added", "rs", type="reasoning", summary=[], content=[])]
        added = self._item("added", "msg", type="message", role="assistant", content=[])
        return [added, self._within("content_part.added", content_index=0, part=self._part())]

    def _part(self) -> JsonObject:
        return {"type": "output_text", "text": self.text, "annotations": []}

    def _close(self) -> list[JsonObject]:
        kind, self.inside = self.inside, None
        if kind is Reasoning:
            done = self._within("reasoning_text.done", content_index=0, text=self.text)
            return [done, self._item("done", content=[{"type": "reasoning_text", "text": self.text}])]
        return [
            self._within("output_text.done", content_index=0, text=self.text, logprobs=[]),
            self._within("content_part.done", content_index=0, part=self._part()),
            self._item("done", content=[self._part()]),
        ]

    def _call(self, call: ToolCall) -> list[JsonObject]:
        name = f"{self.asked.request_id}_tool_call_{len(self.items)}"
        return [
            self._item("added", "fc", type="function_call", call_id=name, name=call.name, arguments=""),
            self._within("function_call_arguments.delta", delta=call.arguments),
            self._within("function_call_arguments.done", arguments=call.arguments, name=call.name),
            self._item("done", arguments=call.arguments),
        ]

    def _message(self, kind: str, **more: Any) -> JsonObject:
        self.sent += 1
        return {"type": f"response.{kind}", "sequence_number": self.sent - 1, **more}

    def _item(self, kind: str, prefix: str = "", **fields: Any) -> JsonObject:
        """A message that adds an item, or closes the last one."""
        if kind == "added":
            name = f"{prefix}_{self.asked.request_id}_{len(self.items)}"
            self.items.append({"id": name, "status": "in_progress", **fields})
        else:
            self.items[-1] = {**self.items[-1], "status": "completed", **fields}
        return self._message(f"output_item.{kind}", output_index=len(self.items) - 1, item=self.items[-1])

    def _within(self, kind: str, **more: Any) -> JsonObject:
        """A message within the last item."""
        return self._message(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **more)

    def _response(self, status: str, end: End | None = None, **more: Any) -> JsonObject:
        if end is not None:
            more["usage"] = {
                "input_tokens": end.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": end.tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": end.prompt_tokens + end.tokens,
            }
        if status == "incomplete":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        return {
            "id": f"resp_{self.asked.request_id}",
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "output": list(self.items),
            **{"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
            **more,
        }
