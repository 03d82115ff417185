"""Answers in OpenAI's forms, each written from the same events whether it is whole or a stream. Tests hold all that is
written to the types of the openai package."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fastspec.programs.serving import answers as events_of
from fastspec.programs.serving.answers import Beside, Content, End, Event, NamedToken, Reasoning, ToolCall, merged
from fastspec.programs.serving.fields import MARK
from fastspec.programs.serving.middleware import error_body
from fastspec.programs.serving.requests import AnswerRequest

JsonObject = dict[str, Any]
"""JSON object of an answer, or of an event of its stream."""


@dataclass
class Form(ABC):
    """Form of the answers to one request, whose prompts have so many tokens."""

    done: ClassVar[bool] = True
    """True where a stream ends with `[DONE]`."""
    ping: ClassVar[str] = ": keep-alive\n\n"
    """Line of a stream that has nothing else to say: a comment, which clients skip."""
    asked: AnswerRequest
    model: str
    prompt_tokens: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    @abstractmethod
    def whole(self, answers: Sequence[Iterable[Event]]) -> JsonObject:
        """The answers."""

    @abstractmethod
    def begin(self) -> list[JsonObject]:
        """Beginning of a stream."""

    @abstractmethod
    def add(self, event: Event, index: int = 0) -> list[JsonObject]:
        """Lines that a stream has of one event of this answer."""

    def failed(self, message: str, status: int) -> list[JsonObject]:
        """Lines that a stream has of an error, which ends it."""
        return [error_body(message, status)]

    def timings(self, ends: Mapping[int, End]) -> JsonObject:
        """Times and counts of all answers together, as llama.cpp's server has them, by their ends."""
        cached = sum(end.cached for index, end in ends.items() if index % self.asked.n == 0)
        first, last = min(end.first for end in ends.values()), max(end.seconds for end in ends.values())
        new, drafted, accepted = map(sum, zip(*((e.tokens, e.drafted, e.accepted) for e in ends.values()), strict=True))
        return {
            **{"cache_n": cached, "prompt_n": self.prompt_tokens - cached, "prompt_ms": round(1e3 * first, 3)},
            **{"predicted_n": new, "predicted_ms": round(1e3 * (last - first), 3)},
            **{"draft_n": drafted, "draft_n_accepted": accepted},
        }


@dataclass
class Choices(Form):
    """Form with a choice for each answer: what chats and completions share."""

    whole_kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"
    ends: dict[int, End] = field(default_factory=dict)
    held: dict[int, list[Beside]] = field(default_factory=dict)
    """Of each answer what the next chunk has of it beside its text."""

    @abstractmethod
    def part(self, event: Event, index: int) -> JsonObject:
        """The fields that a choice has of a chunk's event."""

    @abstractmethod
    def joined(self, events: list[Event], index: int) -> JsonObject:
        """The fields that a choice has of all texts and calls of an answer."""

    @abstractmethod
    def logprobs(self, tokens: list[NamedToken]) -> JsonObject:
        """The log-probabilities of a choice."""

    def made(self, kind: str, choices: list[JsonObject], usage: bool = False) -> JsonObject:
        """An answer or a chunk, with the counts of tokens and the times or without."""
        made = {"id": self.asked.request_id, "object": kind, "created": self.created, "model": self.model}
        return {**made, "choices": choices, **(self.counts() if usage else {})}

    def counts(self) -> JsonObject:
        """Tokens as OpenAI counts them, and `timings`."""
        timings, before = self.timings(self.ends), self.prompt_tokens
        new, accepted = timings["predicted_n"], timings["draft_n_accepted"]
        drafts = {"accepted": accepted, "rejected": timings["draft_n"] - accepted}
        usage = {
            **{"prompt_tokens": before, "completion_tokens": new, "total_tokens": before + new},
            "prompt_tokens_details": {"cached_tokens": timings["cache_n"]},
            "completion_tokens_details": {f"{how}_prediction_tokens": count for how, count in drafts.items()},
        }
        return {"usage": usage, "timings": timings}

    def choice(self, index: int, **fields: Any) -> JsonObject:
        found: JsonObject = {"index": index, "finish_reason": None, "logprobs": None, **fields}
        held = self.held.pop(index, [])
        if self.asked.logprobs is not None:
            tokens = [token for each in held if isinstance(each, events_of.Logprobs) for token in each.tokens]
            found["logprobs"] = self.logprobs(tokens)
        if self.asked.rounds:
            stages = [each.told for each in held if isinstance(each, events_of.NamedStage)]
            rounds = [each.told for each in held if isinstance(each, events_of.NamedRound)]
            found["fastspec"] = {"rounds": rounds, **({"stages": stages} if stages else {})}
        return found

    def add(self, event: Event, index: int = 0) -> list[JsonObject]:
        """A chunk; the last one has the counts unless the request says where it wants them."""
        if self._hold(event, index):
            return []
        choice = self.choice(index, **self.part(event, index))
        if not isinstance(event, End):
            return [self.made(self.chunk_kind, [choice])]
        self.ends[index], usage = event, self.asked.usage
        last = len(self.ends) == self.asked.count
        chunk = self.made(self.chunk_kind, [{**choice, "finish_reason": event.reason}], last and usage is None)
        return [chunk, self.made(self.chunk_kind, [], True)] if last and usage else [chunk]

    def _hold(self, event: Event, index: int) -> bool:
        """True for what the next chunk has of the answer beside its text: that is kept until then."""
        if isinstance(event, Beside):
            self.held.setdefault(index, []).append(event)
        return isinstance(event, Beside)

    def whole(self, answers: Sequence[Iterable[Event]]) -> JsonObject:
        choices = []
        for index, answer in enumerate(answers):
            events: list[Event] = []
            for event in answer:
                if isinstance(event, End):
                    self.ends[index] = event
                elif not self._hold(event, index):
                    events.append(event)
            reason = self.ends[index].reason
            choices.append(self.choice(index, **self.joined(events, index), finish_reason=reason))
        return self.made(self.whole_kind, choices, True)


@dataclass
class ChatForm(Choices):
    """Form of `/v1/chat/completions`."""

    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    calls: dict[int, int] = field(default_factory=dict)
    """Calls of tools of each answer so far."""

    def part(self, event: Event, index: int) -> JsonObject:
        return {"delta": self._delta(event, index)}

    def _delta(self, event: Event, index: int) -> JsonObject:
        if isinstance(event, ToolCall):
            function, number = {"name": event.name, "arguments": event.arguments}, self.calls.get(index, 0)
            self.calls[index] = number + 1
            answer = f"_{index}" if index else ""
            name = f"{self.asked.request_id}{answer}_tool_call_{number}"
            return {"tool_calls": [{"index": number, "id": name, "type": "function", "function": function}]}
        if isinstance(event, (Content, Reasoning)):
            return {"reasoning_content" if isinstance(event, Reasoning) else "content": event.text}
        return {}

    def logprobs(self, tokens: list[NamedToken]) -> JsonObject:
        return {"content": [named_token(token) for token in tokens], "refusal": None}

    def joined(self, events: list[Event], index: int) -> JsonObject:
        found: JsonObject = {}
        for event in events:
            for name, value in self._delta(event, index).items():
                found[name] = found[name] + value if name in found else value
        for call in found.get("tool_calls", ()):
            del call["index"]
        return {"message": {"role": "assistant", "content": None if "tool_calls" in found else "", **found}}

    def begin(self) -> list[JsonObject]:
        delta = {"role": "assistant", "content": ""}
        return [self.made(self.chunk_kind, [self.choice(index, delta=delta)]) for index in range(self.asked.count)]


class CompletionForm(Choices):
    """Form of `/v1/completions`, whose chunks are of the kind of the whole answer."""

    def part(self, event: Event, index: int) -> JsonObject:
        return {"text": event.text if isinstance(event, Content) else ""}

    def logprobs(self, tokens: list[NamedToken]) -> JsonObject:
        """The tokens, their log-probabilities, the likeliest in their places with them, and where their texts begin."""
        top = []
        for token in tokens:
            found = {_said(piece): logprob for piece, logprob in reversed(token.top)}
            if token.logprob is not None:
                found.setdefault(_said(token.piece), token.logprob)
            top.append(found or None)
        return {
            "tokens": [_said(token.piece) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": top,
            "text_offset": [token.offset for token in tokens],
        }

    def joined(self, events: list[Event], index: int) -> JsonObject:
        return {"text": "".join(each.text for each in events if isinstance(each, Content))}

    def begin(self) -> list[JsonObject]:
        return []


def _said(piece: bytes) -> str:
    """A token's text, or its bytes where these are no text, in OpenAI's way."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def named_token(token: NamedToken) -> JsonObject:
    """A token as text and bytes, with its log-probability and the likeliest in its place."""

    def named(piece: bytes, logprob: float | None) -> JsonObject:
        return {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}

    return {**named(token.piece, token.logprob), "top_logprobs": [named(*each) for each in token.top]}


@dataclass
class ResponseForm(Form):
    """Form of `/v1/responses`: a list of items, each opened, written and closed by messages with its own index."""

    done = False
    items: list[JsonObject] = field(default_factory=list)
    inside: type[Event] | None = None
    """Kind of the text that the last item is still given."""
    text: str = ""
    sent: int = 0
    tokens: list[NamedToken] = field(default_factory=list)
    """Tokens whose text has not come."""
    logprobs: list[JsonObject] = field(default_factory=list)
    """Log-probabilities of the last item's text so far."""

    def whole(self, answers: Sequence[Iterable[Event]]) -> JsonObject:
        for event in merged(answers[0]):
            messages = self.add(event)
        response: JsonObject = messages[-1]["response"]
        return response

    def begin(self) -> list[JsonObject]:
        return [self._message(kind, response=self._response("in_progress")) for kind in ("created", "in_progress")]

    def add(self, event: Event, index: int = 0) -> list[JsonObject]:
        """The messages of one event; another kind than the last one's closes its item."""
        if isinstance(event, events_of.Logprobs):
            self.tokens += event.tokens
        if isinstance(event, Beside):
            return []
        tokens, self.tokens = self.tokens, []
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
        scored = [named_token(token) for token in tokens]
        self.logprobs += scored
        return [*messages, self._within("output_text.delta", content_index=0, delta=event.text, logprobs=scored)]

    def failed(self, message: str, status: int) -> list[JsonObject]:
        error = {"code": "server_error", "message": message}
        self.sent += 1
        first = {"type": "error", "sequence_number": self.sent - 1, "param": None, **error}
        return [first, self._message("failed", response=self._response("failed", error=error))]

    def _open(self, kind: type[Event]) -> list[JsonObject]:
        self.inside, self.text, self.logprobs = kind, "", []
        if kind is Reasoning:
            return [self._item("added", "rs", type="reasoning", summary=[], content=[])]
        added = self._item("added", "msg", type="message", role="assistant", content=[])
        return [added, self._within("content_part.added", content_index=0, part=self._part())]

    def _part(self) -> JsonObject:
        scored = {} if self.asked.logprobs is None else {"logprobs": self.logprobs}
        return {"type": "output_text", "text": self.text, "annotations": [], **scored}

    def _close(self) -> list[JsonObject]:
        kind, self.inside = self.inside, None
        if kind is Reasoning:
            done = self._within("reasoning_text.done", content_index=0, text=self.text)
            more = {"encrypted_content": MARK + self.text} if self.asked.encrypted else {}
            return [done, self._item("done", content=[{"type": "reasoning_text", "text": self.text}], **more)]
        return [
            self._within("output_text.done", content_index=0, text=self.text, logprobs=self.logprobs),
            self._within("content_part.done", content_index=0, part=self._part()),
            self._item("done", content=[self._part()]),
        ]

    def _call(self, call: ToolCall) -> list[JsonObject]:
        name = f"{self.asked.request_id}_tool_call_{len(self.items)}"
        named = self.asked.spaces.get(call.name, {"name": call.name})
        return [
            self._item("added", "fc", type="function_call", call_id=name, **named, arguments=""),
            self._within("function_call_arguments.delta", delta=call.arguments),
            self._within("function_call_arguments.done", arguments=call.arguments, name=named["name"]),
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
        return self._message(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **more)

    def _response(self, status: str, end: End | None = None, **more: Any) -> JsonObject:
        if end is not None:
            more["usage"] = {
                "input_tokens": self.prompt_tokens,
                "input_tokens_details": {"cached_tokens": end.cached, "cache_write_tokens": 0},
                "output_tokens": end.tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.prompt_tokens + end.tokens,
            }
            more["timings"] = self.timings({0: end})
        if status == "incomplete":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        return {
            "id": f"resp_{self.asked.request_id}",
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "output": list(self.items),
            **{"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, **self.asked.repeated},
            **more,
        }
