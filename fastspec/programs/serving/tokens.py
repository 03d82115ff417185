"""Routes that count and name tokens, and decode none."""

from __future__ import annotations

from typing import Any

from fastspec.programs.serving.fields import TOKENS, TRUTH, Check
from fastspec.programs.serving.messages import COUNTED
from fastspec.programs.serving.requests import CHAT, Body, Refused, Route, check, check_tokens, read
from fastspec.programs.serving.server import Server

TEXT: Check = (lambda value: isinstance(value, str), "a text")
FLAGS: dict[str, Check] = dict.fromkeys(("add_special_tokens", "add_generation_prompt", "return_token_strs"), TRUTH)
OF_TEMPLATES = "messages", "tools", "chat_template_kwargs"
TOKENIZE = Route((), frozenset((*FLAGS, *OF_TEMPLATES, "model", "prompt")), {**FLAGS, "prompt": TEXT})
DETOKENIZE = Route(("tokens",), frozenset(("model", "tokens")), {"tokens": TOKENS})


def tokenize(server: Server, body: Any) -> Body:
    """The tokens of a text, or of what the model's template makes of a conversation."""
    body = check(body, TOKENIZE, server.name)
    if ("prompt" in body) == ("messages" in body):
        raise Refused("one of prompt and messages is needed")
    if "prompt" in body:
        ids = server.ids(body["prompt"], special=body.get("add_special_tokens", True))
    else:
        given = {name: body[name] for name in OF_TEMPLATES if name in body}
        asked = read(given, CHAT, "", server.limits, server.name, server.batch.model)
        ids = server.templated(asked, body.get("add_generation_prompt", True)).ids
    names = server.tokenizer.convert_ids_to_tokens(ids) if body.get("return_token_strs") else None
    return {"count": len(ids), "max_model_len": server.batch.max_length, "tokens": ids, "token_strs": names}


def detokenize(server: Server, body: Any) -> Body:
    """The text of tokens, special ones included."""
    ids = check(body, DETOKENIZE, server.name)["tokens"]
    check_tokens("tokens", ids, server.batch.model.config.get_text_config().vocab_size)
    return {"prompt": server.tokenizer.decode(ids)}


def count_tokens(server: Server, body: Any) -> Body:
    """The tokens of the prompt that a request in Anthropic's form comes to."""
    asked = read(body, COUNTED, "", server.limits, server.name, server.batch.model)
    return {"input_tokens": len(server.templated(asked).ids)}
