"""Values that the fields of a request and the settings of its generation_config may hold.

A field that would change an answer and is not heeded is left out, or refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig

Check = tuple[Callable[[Any], bool], str]
"""True where a field may hold a value, and what it may hold in words."""
STOP_LENGTH = 256
"""Characters of a request's stop strings: transformers compares each with every token of the vocabulary first."""
LIKELIEST = 20
"""Tokens at most that are named beside each of an answer, with their log-probabilities."""
ANSWERS = 128
"""Answers to a prompt at most, and prompts of a request."""
SEQUENCES = 1024
"""Sequences of tokens in a setting: the scores of each are looked up at every token."""
TEXT = {"type": "text"}
OUTPUTS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "ebnf"}
"""vLLM's names in `structured_outputs` -> those of `fastspec.Grammar`."""
LENGTHS = "max_output_tokens", "max_tokens", "max_completion_tokens"
"""Fields for the new tokens at most; the last one counts."""


def _whole(low: int, high: int = 2**63 - 1) -> Check:
    said = f"{low}" if low == high else f"a whole number from {low} on" + (f" to {high}" if high < 2**62 else "")
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high, said


def _number(low: float, high: float) -> Check:
    def accepts(value: Any) -> bool:
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        return numeric and math.isfinite(value) and low <= value <= high

    return accepts, f"{low:g}" if low == high else f"a number from {low:g} to {high:g}"


def _instance(kind: type, said: str) -> Check:
    return lambda value: isinstance(value, kind), said


def _one_of(*values: Any) -> Check:
    return lambda value: value in values, " or ".join(map(repr, values))


def nothing(instead: str = "") -> Check:
    """Fields that would be ignored."""
    return lambda value: not value, f"left out{instead}"


def _is_stop(value: Any) -> bool:
    found = [value] if isinstance(value, str) else value
    fits = isinstance(found, list) and len(found) <= 16 and all(isinstance(each, str) and each for each in found)
    return fits and sum(map(len, found)) <= STOP_LENGTH


def _is_bias(value: Any) -> bool:
    numbers = isinstance(value, dict) and all(name.isascii() and name.isdecimal() for name in value)
    return numbers and len(value) <= SEQUENCES and all(map(_number(-100, 100)[0], value.values()))


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _is_tools(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_tool, value))


def _is_tool(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("type") != "function":
        return False
    function = value.get("function", value)
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _is_schema(value: Any) -> bool:
    named = isinstance(value, dict) and isinstance(value.get("schema"), dict)
    return named and not value.keys() - {"type", "name", "description", "schema", "strict"}


def _is_format(value: Any, nested: bool = False) -> bool:
    if value == TEXT or value == {"type": "json_object"}:
        return True
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return False
    return value.keys() == {"type", "json_schema"} and _is_schema(value["json_schema"]) if nested else _is_schema(value)


def _is_outputs(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) != 1:
        return False
    [(name, held)] = value.items()
    kinds: dict[str, Any] = {"json": (dict, str), "regex": str, "grammar": str, "choice": list}
    return held is True if name == "json_object" else name in kinds and isinstance(held, kinds[name])


def _is_tool_choice(value: Any) -> bool:
    if value in ("auto", "none", "required"):
        return True
    named = value.get("function", value) if isinstance(value, dict) and value.get("type") == "function" else None
    return isinstance(named, dict) and isinstance(named.get("name"), str)


def _is_text_format(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and (value.get("format") is None or _is_format(value["format"]))
        and value.get("verbosity") in (None, "medium")
        and not value.keys() - {"format", "verbosity"}
    )


def _is_stream_options(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, bool) for each in value.values())


def _is_extension(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() <= {"rounds"}
        and all(isinstance(each, bool) for each in value.values())
    )


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_whole(0)[0], value))


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str) or _are_token_ids(value):
        return True
    prompts = isinstance(value, list) and 0 < len(value) <= ANSWERS
    return prompts and all(isinstance(each, str) or _are_token_ids(each) for each in value)


FORMATS = "an object of type text, json_object or json_schema, the last with a name and a schema"
TEMPLATED = ": chat_template_kwargs tells the model's template"
STOP: Check = (_is_stop, f"a text or up to 16 of them, none empty, of {STOP_LENGTH} characters together")
TRUTH = _instance(bool, "true or false")
ANY: Check = (lambda value: True, "")
ACCEPTED: dict[str, Check] = {
    **dict.fromkeys(LENGTHS, _whole(1)),
    "seed": _whole(-(2**63)),
    "temperature": _number(0, 100),
    "top_p": _number(1e-6, 1),
    "top_k": _whole(-1),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(1e-6, 100),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "price": (_number(0, math.inf)[0], "a number of milliseconds from 0 on: what a bad answer of a cascade costs"),
    "logit_bias": (
        _is_bias,
        f"an object of up to {SEQUENCES} token numbers and what is added to their scores, -100 to 100",
    ),
    "stop": STOP,
    "stream": TRUTH,
    "stream_options": (_is_stream_options, "an object of true and false"),
    "messages": (_are_objects, "a list of objects with role and content, a text or parts of type text"),
    "prompt": (_is_prompt, f"a text, a list of token numbers, or a list of up to {ANSWERS} of these"),
    "echo": TRUTH,
    "assistant": _instance(str, "a text"),
    "fastspec": (_is_extension, "an object with rounds, true or false"),
    "input": (
        lambda value: isinstance(value, str) or _are_objects(value),
        "a text, or a list of messages, texts and calls of functions",
    ),
    "instructions": _instance(str, "a text"),
    "n": _whole(1, ANSWERS),
    "best_of": _whole(1, 1),
    "chat_template_kwargs": _instance(dict, "an object"),
    "generation_config": _instance(str, 'a JSON text of an object, {"max_new_tokens": 64} in quotes'),
    "tools": (_is_tools, "a list of tools of type function, each with a name"),
    "tool_choice": (_is_tool_choice, "'auto', 'none', 'required' or a tool of type function by its name"),
    "parallel_tool_calls": (lambda value: value is True, "true"),
    "response_format": (lambda value: _is_format(value, nested=True), FORMATS),
    "structured_outputs": (_is_outputs, f"an object with one of {', '.join(OUTPUTS)} and json_object"),
    "text": (_is_text_format, f'an object with format, {FORMATS}, and verbosity "medium"'),
    "verbosity": _one_of("medium"),
    "modalities": _one_of(["text"]),
    "truncation": _one_of("disabled"),
    "functions": nothing(": tools are"),
    "function_call": nothing(": tool_choice is"),
    "reasoning_effort": nothing(TEMPLATED),
    "reasoning": nothing(TEMPLATED),
    **dict.fromkeys(
        (
            *("model", "metadata", "user", "store", "service_tier", "safety_identifier"),
            *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        ),
        ANY,
    ),
}
"""Fields -> what they may hold where they are given; a route's other fields must be left out, or hold nothing."""
OF_CHATS: dict[str, Check] = {"logprobs": TRUTH, "top_logprobs": _whole(0, LIKELIEST)}
OF_COMPLETIONS: dict[str, Check] = {"logprobs": _whole(0, LIKELIEST), "max_tokens": _whole(0)}
INCLUDED = "message.output_text.logprobs"
OF_RESPONSES: dict[str, Check] = {
    "top_logprobs": _whole(0, LIKELIEST),
    "include": (lambda value: value in ([], [INCLUDED]), f"a list of {INCLUDED} alone"),
}
"""The same of fields that hold something else on one route."""


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_token, value))


def _ends(value: Any) -> bool:
    ends = value if isinstance(value, list) else [value]
    return bool(ends) and all(map(_whole(0)[0], ends))


def _are_sequences(value: Any) -> bool:
    fits = isinstance(value, list) and len(value) <= SEQUENCES
    return fits and all(_are_tokens(each) and each for each in value)


def _is_sequence_bias(value: Any) -> bool:
    pairs = isinstance(value, list) and all(isinstance(each, list) and len(each) == 2 for each in value)
    finite = _number(-math.inf, math.inf)[0]
    return pairs and _are_sequences([each[0] for each in value]) and all(finite(each[1]) for each in value)


def tokens_of(name: str, value: Any) -> list[int]:
    """The token numbers in a checked setting."""
    each = [pair[0] for pair in value] if name == "sequence_bias" else value if isinstance(value, list) else [value]
    return [token for held in each for token in (held if isinstance(held, list) else [held])]


def _is_decay(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _whole(0)[0](value[0]) and _number(0, 100)[0](value[1])


TOKEN: Check = (_is_token, "a token number")
TOKENS: Check = (_are_tokens, "a list of token numbers")
ENDS: Check = (_ends, "a token number, or a list of them")
SETTINGS: dict[str, Check] = {
    **dict.fromkeys(("max_new_tokens", "max_length"), _whole(1)),
    **dict.fromkeys(("min_new_tokens", "min_length", "top_k"), _whole(0)),
    **dict.fromkeys(("do_sample", "renormalize_logits", "remove_invalid_values"), TRUTH),
    **dict.fromkeys(("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"), _number(0, 1)),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), _whole(0)),
    "forced_bos_token_id": TOKEN,
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), TOKENS),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), ENDS),
    "max_time": _number(0, math.inf),
    "temperature": _number(0, 100),
    "repetition_penalty": _number(0, math.inf),
    "no_repeat_ngram_size": _whole(0, 64),
    "exponential_decay_length_penalty": (_is_decay, "a list of a token's place and a factor up to 100"),
    "stop_strings": STOP,
    "bad_words_ids": (_are_sequences, f"a list of up to {SEQUENCES} lists of token numbers"),
    "sequence_bias": (
        _is_sequence_bias,
        f"a list of up to {SEQUENCES} lists, each of a list of token numbers with a bias",
    ),
}
"""Settings of a generation_config that are heeded, and what they may hold; they may be null too."""
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale"), 1.0),
    "use_cache": True,
}
"""Settings that are not heeded -> the value that changes nothing, besides null, false and 0."""
HARMLESS = frozenset(
    (
        *("transformers_version", "early_stopping", "length_penalty", "low_memory", "disable_compile"),
        *("output_scores", "output_logits", "output_attentions", "output_hidden_states", "return_dict_in_generate"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    )
)
"""Settings that change no token of an answer, of beams and of what `generate` returns."""
KNOWN = frozenset(name for name in GenerationConfig().to_dict() if name[0] != "_")
"""Settings of transformers' GenerationConfig."""
OF_TOKENS = (
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"),
    *("forced_bos_token_id", "forced_eos_token_id"),
)
"""Settings that name tokens whose scores are changed, which must be there."""
