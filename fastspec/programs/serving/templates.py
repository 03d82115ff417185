"""Response templates of model families: how the text of an answer tells reasoning and calls of tools apart, in the form
of transformers' `tokenizer.response_template`, for tokenizers that bring none."""

from __future__ import annotations

from typing import Any

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THINK = {"open": "<think>", "close": "</think>", "content": "text"}
_QWEN: dict[str, Any] = {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n"}

TEMPLATES: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (
        (
            *("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl"),
            *("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"),
        ),
        _QWEN
        | {
            "fields": {
                "reasoning_content": _THINK,
                "tool_calls": {
                    "open_pattern": r"\s*<tool_call>",
                    "close": "</tool_call>",
                    "repeats": True,
                    "content": "json",
                    "transform": {"type": "function", "function": "{content}"},
                },
                "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>)", "content": "text"},
            }
        },
    ),
    (
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        _QWEN
        | {
            "fields": {
                "reasoning_content": _THINK,
                "tool_calls": {
                    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                    "close_pattern": r"</function>\s*</tool_call>",
                    "repeats": True,
                    "content": "xml-inline",
                    "content_args": {
                        "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
                    },
                    "transform": _CALL,
                },
                "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"},
            }
        },
    ),
    (
        ("gemma4",),
        {
            "defaults": {"role": "assistant"},
            "start_anchor": ["<|turn>model\n", "<tool_response|>"],
            "fields": {
                "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
                "tool_calls": {
                    "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                    "close": "<tool_call|>",
                    "repeats": True,
                    "content": "json",
                    "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                    "transform": _CALL,
                },
                "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"], "content": "text"},
            },
        },
    ),
]
"""`model_type`s of configurations, and their template."""


NOTE = "\u2042 a note \u2042"


def chat_template(tokenizer: Any) -> str:
    """The text of a tokenizer's chat template, empty where it has none; of several that for tools, as transformers
    takes it."""
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
    """The messages for a template that takes a system's at the beginning alone: a later one ends the system's or user's
    message before it, or is a user's."""
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
    """The template of a tokenizer, else of the model's family; None where neither has one: its texts are not parsed."""
    own: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    return own or next((each for types, each in TEMPLATES if config.model_type in types), None)
