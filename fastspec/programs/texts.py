"""Prompts and answers of programs: JSON lines, chat templates, padding, ends of answers, marks of their tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from fastspec.errors import Unsupported
from fastspec.files import parse_json
from fastspec.patches.cascade.settings import left_padded
from fastspec.patches.hf.ends import end_tokens


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every line that is not blank. Raises Unsupported for a file that cannot be read
    or is no UTF-8, and for a line that is no JSON object."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise Unsupported(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise Unsupported(f"could not read {path}: {error}") from error
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON texts may hold U+2028 and the like
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise Unsupported(f"{path}, line {number} is no JSON object: {error}") from error
        if not isinstance(row, dict):
            raise Unsupported(f"{path}, line {number} is no JSON object: {line[:60]}")
        yield number, row


def first_turn(row: dict[str, Any]) -> Any:
    """The first user turn of a row with `prompt` or `turns`; None where it has neither."""
    turns = row.get("turns")
    return row.get("prompt", turns[0] if isinstance(turns, list) and turns else None)


def read_prompts(path: str | Path) -> Iterator[tuple[int, dict[str, Any], str]]:
    """(line number, row, first user turn) of a jsonl file. Raises Unsupported for a row without `prompt` or `turns`."""
    for number, row in read_jsonl(path):
        text = first_turn(row)
        if not isinstance(text, str):
            raise Unsupported(f'{path}, line {number}: not a row with "prompt" or "turns"')
        yield number, row, text


SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character, or a byte of a command line that is no UTF-8."""


def refuse_torn(name: str, value: Any) -> None:
    """Raise Unsupported where a text in a value, which may be nested, has a part that is no character."""
    if isinstance(value, str):
        torn = SURROGATE.search(value)
        if torn is not None:
            raise Unsupported(f"{name} has {torn[0]!a} at position {torn.start()}, which is no character: give UTF-8")
    elif isinstance(value, (list, dict)):
        for each in value if isinstance(value, list) else [*value, *value.values()]:
            refuse_torn(name, each)


TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a message's content that are texts."""
FIELDS_OF_PARTS = {**dict.fromkeys(TEXT_PARTS, "text"), "refusal": "refusal"}
"""Type of a part of a message's content -> the field that holds its text."""


def as_messages(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation as chat templates read it: contents are texts, arguments of calls objects, null fields left out,
    and the role `developer` is `system`. Raises Unsupported, by the message's number, for what is no text."""
    return [_as_message(f"messages[{number}]", message) for number, message in enumerate(talk)]


def _as_message(name: str, message: dict[str, Any]) -> dict[str, Any]:
    found = {field: value for field, value in message.items() if value is not None}
    content = found.get("content", "")
    content = found.get("refusal", "") if content == "" else content
    if not isinstance(found.get("role"), str):
        raise Unsupported(f"{name}.role must be a text")
    if found["role"] == "developer":
        found["role"] = "system"
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        found_in = [part.get(FIELDS_OF_PARTS.get(str(part.get("type")), "")) for part in parts]
        texts = [text for text in found_in if isinstance(text, str)]
        if len(texts) < len(content):
            raise Unsupported(f"{name}.content has a part that is no text: parts of type text are accepted")
        content = " ".join(texts)
    if not isinstance(content, str):
        raise Unsupported(f"{name}.content must be a text, or a list of parts of type text")
    found["content"] = content
    if "tool_calls" in found:
        found["tool_calls"] = _as_calls(f"{name}.tool_calls", found["tool_calls"])
    return found


def _as_calls(name: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise Unsupported(f"{name} must be a list")
    found = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unsupported(f"{name}[{number}] must be an object with a function that has a name and arguments")
        arguments = function.get("arguments")
        try:  # a call without arguments has an empty text in some programs
            arguments = parse_json(arguments or "{}") if isinstance(arguments, str) else arguments
        except ValueError as error:
            raise Unsupported(f"{name}[{number}].function.arguments is no JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise Unsupported(f"{name}[{number}].function.arguments must be a JSON text of an object")
        refuse_torn(f"{name}[{number}].function.arguments", arguments)
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def encode(
    tokenizer: Any, prompt: str | list[dict[str, Any]], device: Any = "cpu", *, chat: bool = True
) -> dict[str, Any]:
    """A prompt or a conversation by the chat template, as tensors `input_ids` and `attention_mask` [1, T]. With `chat`
    False or without a template a prompt is the text itself, and a conversation Unsupported, as is a prompt of which a
    part is no character."""
    chat = chat and getattr(tokenizer, "chat_template", None) is not None
    if isinstance(prompt, list) and not chat:
        raise Unsupported("a conversation needs a tokenizer with a chat template")
    talk = as_messages(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}])
    refuse_torn("the prompt", talk)
    if chat:
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        return dict(tokenizer.apply_chat_template(talk, **options).to(device))
    return dict(tokenizer(prompt, return_tensors="pt").to(device))


def padded_inputs(batch: Sequence[Sequence[int]], config: Any, device: Any) -> dict[str, Any]:
    """Prompts as `input_ids` and `attention_mask` [B, T], padded on the left, and the config's `pad_token_id`."""
    pad = config.pad_token_id
    if pad is None:
        pad = min(end_tokens(config), default=0)
    ids, mask = left_padded(batch, pad, device)
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": pad}


def until_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """New tokens up to the first end token, that one included."""
    return tokens[: next((at for at, token in enumerate(tokens) if token in ends), len(tokens)) + 1]


BEGUN = "\ufffd"
"""Stands in a decoded text for bytes that are no character, or not yet."""


class Detokenizer:
    """Text of tokens that come in pieces; a character comes with the last of its bytes, or at the end as U+FFFD."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        self.whole, self.skip = tokenizer, skip_special_tokens
        self.tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)  # the faster of the two
        self.tokens: list[int] = []
        """The last ones: what a token decodes to depends on the one before it."""
        self.known = self.said = self.length = 0
        """Tokens, and characters of what `tokens` decode to, that have been given; characters in all."""

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=self.skip))

    def add(self, tokens: list[int]) -> str:
        """The text that is certain with these tokens."""
        self.tokens += tokens
        text = self._decode(self.tokens)
        certain = text.rstrip(BEGUN)
        new, self.said = certain[self.said :], max(self.said, len(certain))
        self.length += len(new)
        if certain == text and new:
            self.tokens = self.tokens[self.known :]
            self.known, self.said = len(self.tokens), len(self._decode(self.tokens))
        return new

    def finish(self) -> str:
        return self._decode(self.tokens)[self.said :]


ACCEPTED, RECOVERED, BONUS, OWN = "accepted", "recovered", "bonus", "own"
"""OWN is a token of the target with no draft beside it: the first of an answer, and all of plain decoding."""


def own_mark(tokens: Sequence[int], parents: Sequence[int], path: Sequence[int], last: int) -> str:
    """Mark of the target's token `last` after an accepted path: recovered in a rejected draft's place, else a bonus."""
    beside = [tokens[node] for node in range(1, len(tokens)) if parents[node] == path[-1]]
    if len(tokens) == 1:
        return OWN
    # an end token ends the walk although it was drafted
    return RECOVERED if beside and last not in beside else BONUS
