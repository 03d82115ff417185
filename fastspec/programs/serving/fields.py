"""Values that the fields of a request and the settings of its generation_config may hold.

A field that would change an answer and is not heeded is left out, or refused by name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationConfig

Fits = Callable[[Any], bool]
Check = tuple[Fits, str]
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


def _whole(low: float, high: float = 2**63 - 1) -> Check:
    most = f" to {high}" if high < 2**62 or low < 0 else ""
    said = f"{low}" if low == high else f"a whole number from {low} on{most}"
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high, said


def as_whole(value: Any) -> Any:
    """The whole number that some programs write in JSON with a fraction, as 5.0; other values as they are."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(low: float, high: float) -> Check:
    said = f"{low:g}" if low == high else f"a number from {low:g} to {high:g}"
    low, high = max(low, -sys.float_info.max), min(high, sys.float_info.max)  # a JSON text may have longer ones
    return lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high, said


def instance(kind: type | tuple[type, ...]) -> Fits:
    return lambda value: isinstance(value, kind)


def one_of(*values: Any) -> Fits:
    return lambda value: value in values


def either(*kinds: Fits) -> Fits:
    return lambda value: any(fits(value) for fits in kinds)


def list_of(fits: Fits, least: int = 0, most: float = math.inf) -> Fits:
    return lambda value: isinstance(value, list) and least <= len(value) <= most and all(map(fits, value))


def object_of(needs: Mapping[str, Fits], may: Mapping[str, Fits] | None = None) -> Fits:
    """True for objects that have the fields `needs`; of others those of `may` alone, where that is given."""
    known = {**needs, **(may or {})}

    def accepts(value: Any) -> bool:
        if not isinstance(value, dict) or not needs.keys() <= value.keys():
            return False
        fits = all(known[name](each) for name, each in value.items() if name in known)
        return fits and (may is None or value.keys() <= known.keys())

    return accepts


def nothing(instead: str = "") -> Check:
    return lambda value: not value, f"left out{instead}"


IS_TEXT, IS_TRUTH, IS_OBJECT = map(instance, (str, bool, dict))
IS_TOKEN = _whole(0)[0]
NAMED = object_of({"name": IS_TEXT})
TOKEN_IDS = list_of(IS_TOKEN, 1)
OBJECTS = list_of(IS_OBJECT, 1)
OF_SCHEMA = dict.fromkeys(("type", "name", "description", "strict"), lambda value: True)
IS_SCHEMA = one_of("json_schema")
PLAIN_FORMAT = object_of({"type": one_of("text", "json_object")}, {})
NESTED_FORMAT = object_of({"type": IS_SCHEMA, "json_schema": object_of({"schema": IS_OBJECT}, OF_SCHEMA)}, {})
FLAT_FORMAT = object_of({"schema": IS_OBJECT, "type": IS_SCHEMA}, OF_SCHEMA)


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return list_of(lambda each: IS_TEXT(each) and each != "", 0, 16)(texts) and len("".join(texts)) <= STOP_LENGTH


def _is_bias(value: Any) -> bool:
    numbers = isinstance(value, dict) and all(name.isascii() and name.isdecimal() for name in value)
    return numbers and len(value) <= SEQUENCES and all(map(_number(-100, 100)[0], value.values()))


def _is_tool(value: Any) -> bool:
    return object_of({"type": one_of("function")})(value) and NAMED(value.get("function", value))


def _is_allowed(value: Any) -> bool:
    held = object_of({"mode": one_of("auto", "required"), "tools": list_of(_is_tool, 1)})
    return object_of({"type": one_of("allowed_tools")})(value) and held(value.get("allowed_tools", value))


SPACE = object_of({"name": IS_TEXT, "type": one_of("namespace"), "tools": list_of(_is_tool, 1)})
EFFORTS = one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _is_truths(value: Any) -> bool:
    return isinstance(value, dict) and all(map(either(IS_TRUTH, one_of(None)), value.values()))


def _is_outputs(value: Any) -> bool:
    kinds = {"json": instance((dict, str)), "regex": IS_TEXT, "grammar": IS_TEXT, "choice": instance(list)}
    return object_of({}, {**kinds, "json_object": lambda held: held is True})(value) and len(value) == 1


FORMATS = "an object of type text, json_object or json_schema, the last with a name and a schema"
STOP: Check = (_is_stop, f"a text or up to 16 of them, none empty, of {STOP_LENGTH} characters together")
TRUTH: Check = (IS_TRUTH, "true or false")
ANY: Check = (lambda value: True, "")
ACCEPTED: dict[str, Check] = {
    **dict.fromkeys(LENGTHS, _whole(1)),
    "seed": _whole(-(2**63)),
    "temperature": _number(0, 100),
    "top_p": _number(0, 1),
    "top_k": _whole(-1),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(1e-6, 100),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "price": (_number(0, math.inf)[0], "a number of milliseconds from 0 on: what a bad answer of a cascade costs"),
    "logit_bias": (_is_bias, f"an object of up to {SEQUENCES} token numbers and what their scores get, -100 to 100"),
    "stop": STOP,
    "stream": TRUTH,
    "stream_options": (_is_truths, "an object of true and false"),
    "messages": (OBJECTS, "a list of objects with role and content, a text or parts of type text"),
    "prompt": (
        either(IS_TEXT, TOKEN_IDS, list_of(either(IS_TEXT, TOKEN_IDS), 1, ANSWERS)),
        f"a text, a list of token numbers, or a list of up to {ANSWERS} of these",
    ),
    "echo": TRUTH,
    "assistant": (IS_TEXT, "a text"),
    "fastspec": (object_of({}, {"rounds": IS_TRUTH}), "an object with rounds, true or false"),
    "input": (either(IS_TEXT, OBJECTS), "a text, or a list of messages, texts and calls of functions"),
    "instructions": (IS_TEXT, "a text"),
    "n": _whole(1, ANSWERS),
    "best_of": _whole(1, 1),
    "chat_template_kwargs": (IS_OBJECT, "an object"),
    "generation_config": (IS_TEXT, 'a JSON text of an object, {"max_new_tokens": 64} in quotes'),
    "tools": (list_of(_is_tool), "a list of tools of type function, each with a name"),
    "tool_choice": (
        either(one_of("auto", "none", "required"), _is_tool, _is_allowed),
        "'auto', 'none', 'required', a tool of type function by its name, or allowed_tools with a mode and such tools",
    ),
    "parallel_tool_calls": TRUTH,
    "response_format": (either(PLAIN_FORMAT, NESTED_FORMAT), FORMATS),
    "structured_outputs": (_is_outputs, f"an object with one of {', '.join(OUTPUTS)} and json_object"),
    "text": (
        object_of({}, {"format": either(one_of(None), PLAIN_FORMAT, FLAT_FORMAT), "verbosity": one_of(None, "medium")}),
        f'an object with format, {FORMATS}, and verbosity "medium"',
    ),
    "verbosity": (one_of("medium"), "'medium'"),
    "modalities": (one_of(["text"]), "['text']"),
    "truncation": (one_of("disabled"), "'disabled'"),
    "functions": nothing(": tools are"),
    "function_call": nothing(": tool_choice is"),
    "reasoning_effort": (EFFORTS, "none, minimal, low, medium, high, xhigh or max"),
    "web_search_options": (lambda value: False, "left out"),  # an empty one asks for a search too
    **dict.fromkeys(("model", "metadata", "client_metadata", "user", "store", "service_tier"), ANY),
    **dict.fromkeys(("safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), ANY),
}
"""Fields -> what they may hold where they are given; a route's other fields must be left out, or hold nothing."""
OF_CHATS: dict[str, Check] = {"logprobs": TRUTH, "top_logprobs": _whole(0, LIKELIEST)}
OF_COMPLETIONS: dict[str, Check] = {"logprobs": _whole(0, LIKELIEST), "max_tokens": _whole(0)}
REPEATED = (
    *("instructions", "max_output_tokens", "metadata", "temperature", "top_p"),
    *("tools", "tool_choice", "parallel_tool_calls"),
)
INCLUDED, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""What a response may include. The second is the reasoning in a form that clients give back, which its text is not in
all of them: here the text with a mark before it."""
MARK = "fastspec:"
OF_RESPONSES: dict[str, Check] = {
    "top_logprobs": _whole(0, LIKELIEST),
    "include": (list_of(one_of(INCLUDED, ENCRYPTED)), f"a list of {INCLUDED} and {ENCRYPTED}"),
    "reasoning": (
        object_of(
            {},
            {
                "effort": either(one_of(None), EFFORTS),
                "context": one_of(None, "auto"),
                **dict.fromkeys(("summary", "generate_summary"), one_of(None, "auto", "concise", "detailed")),
            },
        ),
        "an object with effort, and a summary, in whose place the whole reasoning comes",
    ),
    "tools": (list_of(either(_is_tool, SPACE)), "a list of tools of type function, each with a name, or namespaces"),
}
"""The same of fields that hold something else on one route."""


def _pair_of(first: Fits, second: Fits) -> Fits:
    return lambda value: isinstance(value, list) and len(value) == 2 and first(value[0]) and second(value[1])


IS_WHOLE = _whole(-math.inf, math.inf)[0]
SEQUENCE = list_of(IS_WHOLE, 1)


def tokens_of(name: str, value: Any) -> list[int]:
    each = [pair[0] for pair in value] if name == "sequence_bias" else value if isinstance(value, list) else [value]
    return [token for held in each for token in (held if isinstance(held, list) else [held])]


TOKEN: Check = (IS_WHOLE, "a token number")
TOKENS: Check = (list_of(IS_WHOLE), "a list of token numbers")
ENDS: Check = (either(IS_TOKEN, TOKEN_IDS), "a token number, or a list of them")
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
    "exponential_decay_length_penalty": (
        _pair_of(IS_TOKEN, _number(0, 100)[0]),
        "a list of a token's place and a factor up to 100",
    ),
    "stop_strings": STOP,
    "bad_words_ids": (list_of(SEQUENCE, 0, SEQUENCES), f"a list of up to {SEQUENCES} lists of token numbers"),
    "sequence_bias": (
        list_of(_pair_of(SEQUENCE, _number(-math.inf, math.inf)[0]), 0, SEQUENCES),
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
HARMLESS = {
    *("transformers_version", "early_stopping", "length_penalty", "low_memory", "disable_compile"),
    *("output_scores", "output_logits", "output_attentions", "output_hidden_states", "return_dict_in_generate"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
}
"""Settings that change no token of an answer, of beams and of what `generate` returns."""
KNOWN = frozenset(name for name in GenerationConfig().to_dict() if name[0] != "_")
"""Settings of transformers' GenerationConfig."""
OF_TOKENS = (
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"),
    *("forced_bos_token_id", "forced_eos_token_id"),
)
"""Settings that name tokens whose scores are changed, which must be there."""
