"""Events of an answer in its text's order, which whole and streamed answers of all routes are written from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal

from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import chat_parsing
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from fastspec.cascade.decisions import Visit
from fastspec.generation.verify import TokenLogprob
from fastspec.patches.call.processors import StreamedRound
from fastspec.programs.serving.requests import parse
from fastspec.programs.texts import ACCEPTED, OWN, Detokenizer, own_mark

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a response template's field for reasoning."""


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call of a tool; `arguments` is a JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class NamedToken:
    """Token of an answer as its bytes, with its log-probability, the likeliest tokens in its place, and where its text
    begins. The first token of a prompt has no log-probability."""

    piece: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float], ...]
    offset: int


class Beside:
    """Event beside the text of an answer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Logprobs(Beside):
    """Tokens of the text that follows."""

    tokens: tuple[NamedToken, ...]


@dataclass(frozen=True, slots=True)
class NamedRound(Beside):
    """Round of an answer as a JSON object: its `tokens`, the `texts` and `marks` (`fastspec.programs.texts`) of these,
    how many drafts it had (`drafted`) and, where it had some, their `tree`: `tokens` of its nodes, node 0 the last one
    before the round, their `texts` and `parents`, and the accepted `path` as node numbers. The answer of a cascade's
    stage with other tokens or another prompt is one round, which tells of no drafts."""

    told: dict[str, Any]


@dataclass(frozen=True, slots=True)
class NamedStage(Beside):
    """Part of a cascade's stage in an answer as a JSON object: `name`, `outcome` ("answered", "sent_on" or "left_out"),
    `acceptable` (the probability that its answer is) and `cost` in milliseconds, each null where nothing tells it."""

    told: dict[str, Any]

    @classmethod
    def of(cls, visit: Visit) -> NamedStage:
        """A stage's part in an answer, as a request that asks for the rounds is told it."""
        acceptable = visit.quality[0] if visit.quality else None
        return cls({"name": visit.name, "outcome": visit.outcome, "acceptable": acceptable, "cost": visit.cost})


@dataclass(frozen=True, slots=True)
class End:
    """End of the answer, with its tokens, and of its drafts those among them. `stop` is the stop string that ended it,
    `cached` the prompt's tokens that were not read; it began `first`, and ended `seconds`, after the request."""

    reason: Literal["stop", "length", "tool_calls"]
    tokens: int
    accepted: int = 0
    drafted: int = 0
    stop: str | None = None
    cached: int = 0
    first: float = 0.0
    seconds: float = 0.0


Event = Content | Reasoning | ToolCall | Beside | End


def merged(events: Iterable[Event]) -> Iterator[Event]:
    """The events, neighbouring texts of one kind as one."""
    kind: Any
    for kind, group in groupby(events, type):
        alike = list(group)
        texts = [each.text for each in alike if isinstance(each, (Content, Reasoning))]
        yield from [kind("".join(texts))] if texts else alike


def _as_text(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Field of a response template whose value is its text; of a call of tools with what opens and closes it."""
    named = ("open", "open_pattern", "close", "close_pattern")
    delimiters: dict[str, Any] = {key: spec[key] for key in named if key in spec}
    plain = {"content": "text", "content_args": {"strip": False}, "repeats": True, "transform": "{content}"}
    if name != "tool_calls":
        return {**delimiters, **plain}
    found = {}
    for key, form in (("open", "(?P<opening>{})"), ("close", "(?<={})")):  # what closes stays part of the text
        texts = delimiters.get(key, ())
        literals = sorted([texts] if isinstance(texts, str) else texts, key=len, reverse=True)
        pattern = delimiters.get(f"{key}_pattern") or "|".join(map(re.escape, literals))
        if pattern:
            found[f"{key}_pattern"] = form.format(pattern)
    return {**found, **plain, "transform": {"opening": "{opening}", "text": "{content}"}}


@lru_cache(8)
def _plain(template: str, tools: bool) -> ResponseTemplate:
    """A response template, with calls of tools or without, whose fields' values are their texts."""
    found = parse(template)
    fields = {name: _as_text(name, spec) for name, spec in found["fields"].items() if tools or name != "tool_calls"}
    return load_response_template({**found, "fields": fields})


class ResponseParser:
    """Parser of an answer's text by a response template, whatever pieces it comes in.

    Calls are parsed where `tools` are given, and `most` of them are told (None: all); a text that opens as one and is
    none, or is not `allowed` (None: all are), is content. Blanks around content and reasoning are left out. `prompt` is
    the text before the answer, of which templates write a part (`<think>`).
    """

    def __init__(
        self,
        template: dict[str, Any],
        tokenizer: Any,
        tools: list[dict[str, Any]] | None,
        prompt: str,
        most: int | None = None,
        allowed: frozenset[str] | None = None,
    ) -> None:
        self.allowed = allowed
        self.template, self.tokenizer, self.tools, self.most = template, tokenizer, tools, most
        self.parser = chat_parsing.ResponseParser(_plain(json.dumps(template), bool(tools)), prefix=prompt)
        self.called = 0
        self.blanks: dict[type[Content] | type[Reasoning], str | None] = {Content: None, Reasoning: None}
        """Blanks at the end of what was given, which are left out if nothing follows; None before anything was."""

    def add(self, text: str) -> list[Event]:
        return [found for told in self.parser.feed(text) for found in self._events(told)]

    def finish(self) -> list[Event]:
        return [found for told in self.parser.finalize()[1] for found in self._events(told)]

    def _events(self, told: dict[str, Any]) -> Iterator[Event]:
        name = told["field"]
        if told["type"] == "region_chunk" and (name == "content" or name in REASONING):
            strips = self.template["fields"][name].get("content_args", {}).get("strip", True)
            yield from self._stripped(Content if name == "content" else Reasoning, told["text"], strips)
        elif told["type"] == "region_close" and name == "tool_calls":  # the text of a call waits for its end
            raw = told["value"]["opening"] + told["value"]["text"]
            calls = self._calls(raw)
            yield from calls[: None if self.most is None else max(0, self.most - self.called)]
            self.called += len(calls)
            if not calls:
                yield from self._stripped(Content, raw, True)

    def _stripped(self, kind: type[Content] | type[Reasoning], text: str, strips: bool) -> Iterator[Event]:
        before = self.blanks[kind]
        text = (before or "") + text
        if strips and before is None:
            text = text.lstrip()
        kept = text.rstrip() if strips else text
        if kept:
            yield kind(kept)
        self.blanks[kind] = text[len(kept) :] if kept or before is not None else None

    def _calls(self, raw: str) -> list[ToolCall]:
        """The allowed calls in a text that opens as one; none where it does not parse."""
        fields = {"tool_calls": self.template["fields"]["tool_calls"]}
        try:
            found = self.tokenizer.parse_response(raw, self.template | {"fields": fields}, prefix="", tools=self.tools)
            calls = [each for held in _listed(found["tool_calls"]) for each in _listed(held)]
            made = [_call(each["function"]) for each in calls]
            return [call for call in made if self.allowed is None or call.name in self.allowed]
        except (ValueError, KeyError, TypeError, RecursionError):  # of a model's own text, which may be anything
            return []


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _call(function: dict[str, Any]) -> ToolCall:
    """Raises KeyError, TypeError or ValueError for a call without a name, or without arguments that are an object."""
    name, arguments = function["name"], function["arguments"]
    text = arguments or "{}" if isinstance(arguments, str) else json.dumps(arguments)
    held = parse(text)
    if not isinstance(name, str) or not isinstance(held, dict):
        raise TypeError(name)
    name.encode()
    json.dumps(held, allow_nan=False)  # JSON has no infinite number
    return ToolCall(name, text)


class CallsParser:
    """Parser of an answer that a grammar holds to a list of calls, or to the arguments of the `tool` alone."""

    def __init__(self, tool: str | None) -> None:
        self.tool, self.text = tool, ""

    def add(self, text: str) -> list[Event]:
        """Nothing: calls are given whole."""
        self.text += text
        return []

    def finish(self) -> list[Event]:
        """The calls, or the text as it stands where the limit has cut it."""
        try:
            found = parse(self.text)
            calls = found if self.tool is None else [{"name": self.tool, "arguments": found}]
            return [_call(each) for each in calls]
        except (ValueError, KeyError, TypeError):
            return [Content(self.text)] if self.text else []


class StructureParser:
    """Parser of an answer that a grammar holds to a structure or to calls of tools: one that begins with the `opening`
    is read by the parser of `calls`, any other is content as it stands."""

    def __init__(self, opening: str, calls: ResponseParser) -> None:
        self.opening, self.calls, self.held = opening, calls, ""
        self.called: bool | None = None
        """None while the answer is a part of the opening."""

    def add(self, text: str) -> list[Event]:
        if self.called is None:
            self.held += text
            if len(self.held) < len(self.opening) and self.opening.startswith(self.held):
                return []
            self.called, text = self.held.startswith(self.opening), self.held
        if self.called:
            return self.calls.add(text)
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return self.calls.finish() if self.called else [Content(self.held)] if self.called is None and self.held else []


class StopCut:
    """Cut of a text, which comes in pieces, where the first of some strings begins."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.strings, self.held = strings, ""
        self.found: str | None = None
        """The string that was found."""

    def add(self, text: str) -> str:
        """The text that is certain with this piece: no end of it may be the beginning of a string."""
        if self.found is not None:
            return ""
        text = self.held + text
        places = [(text.index(string), string) for string in self.strings if string in text]
        if places:
            at, self.found = min(places)
            self.held = ""
            return text[:at]
        longest = min(len(text), max(map(len, self.strings), default=1) - 1)
        kept = next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self.strings)), 0)
        self.held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        rest, self.held = self.held, ""
        return rest


class TokenNames:
    """Bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.known = tokenizer, dict[int, bytes]()
        self.special = frozenset(tokenizer.all_special_ids)
        decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
        kinds = {each["type"] for each in decoder.get("decoders", [decoder]) if "type" in each}
        self.letters = {letter: byte for byte, letter in bytes_to_unicode().items()} if "ByteLevel" in kinds else None

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for; its name where it is special."""
        if token not in self.known:
            self.known[token] = self._bytes_of(self.tokenizer.convert_ids_to_tokens(token) or "", token)
        return self.known[token]

    def _bytes_of(self, piece: str, token: int) -> bytes:
        if token in self.special:
            return piece.encode()
        if self.letters is not None and all(letter in self.letters for letter in piece):
            return bytes(self.letters[letter] for letter in piece)
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()

    def named(self, scored: TokenLogprob, offset: int) -> NamedToken:
        """A token whose text begins there."""
        top = tuple((self.bytes_of(token), logprob) for token, logprob in scored.top)
        return NamedToken(self.bytes_of(scored.token), scored.logprob, top, offset)


class RoundNames:
    """Names of the rounds of one answer, in their order."""

    def __init__(self, tokenizer: Any, names: TokenNames) -> None:
        self.texts, self.names = Detokenizer(tokenizer, skip_special_tokens=True), names

    def named(self, round: StreamedRound) -> NamedRound:
        texts, tree, own = [self.texts.add([token]) for token in round.tokens], round.tree, OWN
        found: dict[str, Any] | None = None
        if tree is not None:
            own = own_mark(tree.tokens, tree.parents, tree.path, round.tokens[-1])
            pieces = [self.names.bytes_of(token).decode(errors="replace") for token in tree.tokens]
            found = {"tokens": tree.tokens, "texts": pieces, "parents": tree.parents, "path": tree.path}
        accepted, drafted = (0, 0) if tree is None else (round.accepted, round.drafted)
        marks = [ACCEPTED] * accepted + [own] * (len(texts) - accepted)
        told = {"tokens": round.tokens, "texts": texts, "marks": marks, "drafted": drafted, "tree": found}
        return NamedRound(told)


class AnswerReader:
    """Reader of an answer's tokens, which come in pieces, into its events but the end. `ends` are special tokens that
    are no text; the text ends where one of the strings `stop` begins. `names` are for log-probabilities."""

    def __init__(
        self,
        tokenizer: Any,
        parser: ResponseParser | CallsParser | StructureParser | None,
        ends: frozenset[int] = frozenset(),
        stop: tuple[str, ...] = (),
        names: TokenNames | None = None,
    ) -> None:
        self.parser, self.texts = parser, Detokenizer(tokenizer, skip_special_tokens=parser is None)
        self.ends, self.cut, self.names = ends, StopCut(stop), names
        self.before = self.length = 0
        """Characters of a prompt that is part of the answer, and of the answer that are certain."""
        self.held: list[NamedToken] = []
        """Tokens whose text is not."""

    def echo(self, text: str, ids: Sequence[int], scored: list[TokenLogprob]) -> list[Event]:
        """A prompt as the beginning of its answer, its tokens scored from the second on."""
        self.before = self.length = len(text)
        if self.names is None:
            return [Content(text)]
        texts, found = Detokenizer(self.texts.whole, skip_special_tokens=True), list[NamedToken]()
        for token, each in zip(ids, [TokenLogprob(ids[0], 0.0, ()), *scored], strict=True):
            found.append(self.names.named(each, min(texts.length, len(text))))
            texts.add([token])
        return [Logprobs((replace(found[0], logprob=None), *found[1:])), Content(text)]

    def add(self, tokens: list[int], scored: list[TokenLogprob] | None = None) -> list[Event]:
        if scored is None or self.names is None:
            return self._events(self.cut.add(self._text(tokens)))
        events: list[Event] = []
        for token, each in zip(tokens, scored, strict=True):  # one by one: each comes with its text
            self.held.append(self.names.named(each, self.before + self.texts.length))
            events += self._events(self.cut.add(self._text([token])))
        return events

    def finish(self) -> list[Event]:
        found = self._events(self.cut.add(self.texts.finish()) + self.cut.finish(), ending=True)
        return found if self.parser is None else found + self.parser.finish()

    def _text(self, tokens: list[int]) -> str:
        return self.texts.add([token for token in tokens if token not in self.ends])

    def _events(self, text: str, ending: bool = False) -> list[Event]:
        """The events of a certain text, with the tokens that begin in it."""
        self.length += len(text)
        rest = ending and self.cut.found is None
        certain = [each for each in self.held if rest or each.offset < self.length]
        self.held = self.held[len(certain) :]
        events: list[Event] = [Logprobs(tuple(certain))] if certain else []
        if self.parser is not None:
            return events + self.parser.add(text)
        return [*events, Content(text)] if text else events
