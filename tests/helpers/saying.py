"""A model that answers every turn with one text."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import fastspec
from fastspec.programs.serving.structured import response_template
from helpers.training import END, small_target, small_tokenizer

FIRST = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bergen"}}\n</tool_call>'
QWEN: dict[str, Any] = response_template(None, SimpleNamespace(model_type="qwen3")) or {}
"""Response template of a family."""
ANSWERS = {
    "a call": FIRST,
    "all": f"<think>\nHm, 5 < 6.\n</think>\n\nTwo é€:\n{FIRST}\n{SECOND}\nThat is all. ",
    "no name": '<tool_call>\n{"arguments": {}}\n</tool_call>',
    "a mention": "Write <tool_call> before a call.",
    "blanks": "\n\n Hi \n you \n",
}


def saying(text: str, opening: str = "") -> tuple[Any, PreTrainedTokenizerFast]:
    """A model that answers every turn with a text, and its tokenizer: each token is there once, and the one behind it
    follows from it alone. Tokens are bytes, and may end within a character; the `opening` of the text is an added
    one."""
    spelt = "".join(part for part, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text))
    pieces, spelt = [opening][: len(opening)], spelt.removeprefix(opening)
    while spelt:
        count = next((count for count in range(1, len(spelt) + 1) if spelt[:count] not in pieces), 0)
        if not count:  # no other token is left for the end
            pieces[-1] += spelt
            break
        pieces.append(spelt[:count])
        spelt = spelt[count:]
    words = dict.fromkeys(["<start>", "<end>", "<user>", "<bot>", *pieces])
    words = {word: number for number, word in enumerate(words)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<start>"))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.WhitespaceSplit(), decoders.ByteLevel()
    plain.add_tokens([AddedToken(opening)] if opening else [])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", unk_token="<start>")
    tokenizer.chat_template = small_tokenizer().chat_template
    tokenizer.response_template = {**QWEN, "start_anchor": "<bot>"}
    model = small_target(layers=1)
    model.lm_head.weight.zero_()
    for before, after in pairwise([words["<bot>"], *(words[piece] for piece in pieces), END]):
        model.lm_head.weight[after] = model.model.embed_tokens.weight[before]
    for layer in model.model.layers:  # the last token alone decides
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return fastspec.patch(model), tokenizer
