"""Templates of a model: of its prompts (`chat_template`), and of its answers, which tells reasoning and calls of tools
apart, in the form of transformers' `tokenizer.response_template`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers.cli.serving.utils import get_response_template

NOTE = "\u2042 a note \u2042"


def chat_template(tokenizer: Any) -> str:
    """The text of a tokenizer's chat template, empty where it has none; of several that for tools."""
    found = getattr(tokenizer, "chat_template", None) or ""
    return str(found.get("tool_use") or found.get("default") or "") if isinstance(found, dict) else str(found)


def takes_notes(tokenizer: Any) -> bool:
    """Whether a model's chat template writes messages of role system that come after others."""
    talk = [{"role": role, "content": NOTE if role == "system" else "a"} for role in ("user", "assistant", "system")]
    try:
        text: str = tokenizer.apply_chat_template([{"role": "system", "content": "a"}, *talk], tokenize=False)
    except Exception:  # of any kind: a template raises what it likes
        return False
    return NOTE in text


def folded(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template that takes a system's first alone: later ones end the one before, or are a user's."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "system" or not found:
            found.append(message)
        elif found[-1]["role"] in ("system", "user"):
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n\n{message['content']}"}
        else:
            found.append({**message, "role": "user"})
    return found


def response_template(tokenizer: Any, config: Any) -> dict[str, Any] | None:
    """The template of a tokenizer, else of the model's family in transformers' own server, else None."""
    kinds = (config.model_type, config.model_type.removesuffix("_text"))  # transformers 5.17 names the latter alone
    models = (SimpleNamespace(config=SimpleNamespace(model_type=kind)) for kind in kinds)
    return next(filter(None, (get_response_template(tokenizer, model) for model in models)), None)
