"""What cannot be had from an encoder-decoder model with an assistant is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.models import tiny_head, tiny_model
from helpers.seq2seq import pair_of, sources, tiny_seq2seq
from transformers import BartForConditionalGeneration

import fastspec
from fastspec.patches.hf.cache import CACHE, kept_cache

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "head by name": ({"assistant": "eagle3"}, "'eagle3' drafts with a head .*BartForConditionalGeneration"),
    "head by config": ({"assistant": fastspec.Eagle1()}, "'eagle' drafts with a head"),
    "early exit": ({"assistant": fastspec.Speculative(early_exit=1)}, "early_exit needs a model with an adapter"),
    "decoder mask": ({"decoder_attention_mask": torch.ones(2, 1)}, "decoder_attention_mask cannot be combined"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "hidden states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "beams": ({"num_beams": 2}, "num_beams=2"),
    "chunks": ({"prefill_chunk_size": 8}, "prefill_chunk_size=8 cannot be combined .* cuts the mask of the source"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_an_assistant_cannot_honour_is_refused_by_name(what):
    options, message = REFUSED[what]
    with pytest.raises(fastspec.Unsupported, match=message):
        pair_of("bart")[1].generate(**{**sources(7, 3), "assistant": "nasd", "max_new_tokens": 4, **options})


def test_a_users_cache_and_a_third_partys_features_are_refused():
    model = pair_of("bart")[1]
    past = kept_cache(model.generate(**sources(7), max_new_tokens=2, return_dict_in_generate=True))
    with pytest.raises(fastspec.Unsupported, match=f"{CACHE} cannot be combined"):
        model.generate(**sources(7), **{CACHE: past}, max_new_tokens=4, assistant="nasd")

    class Reads:
        name, taps = "mine", (1,)

        def drafter(self, **_: Any) -> None:
            return None

    with pytest.raises(fastspec.Unsupported, match="'mine' drafts from hidden states"):
        model.generate(**sources(7), max_new_tokens=4, assistant=Reads())


class Own(BartForConditionalGeneration):
    """A user's model with a forward of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_models_and_drafts_that_cannot_work_are_refused():
    bart = tiny_seq2seq("bart")
    cases = [
        (bart, {"eagle3": tiny_head(tiny_model())}, "'eagle3' drafts with a head"),
        (bart, {"speculative": tiny_model()}, "a decoder-only model and the target an encoder-decoder"),
        (tiny_model(), {"speculative": bart}, "an encoder-decoder model and the target a decoder-only"),
        (bart, {"speculative": bart}, "the target itself"),
        (Own(bart.config), {}, "Own of Own has a hook or a forward of someone else's"),
    ]
    for model, options, message in cases:
        before = dict(vars(model))
        with pytest.raises(fastspec.Unsupported, match=message):
            fastspec.patch(model, **options)
        assert dict(vars(model)) == before
    hooked = tiny_seq2seq("t5")
    fastspec.patch(hooked)
    hooked.decoder.register_forward_hook(lambda *_: None)
    with pytest.raises(fastspec.Unsupported, match="T5Stack of T5ForConditionalGeneration has a hook"):
        hooked.generate(**sources(7), max_new_tokens=4, assistant="nasd")
    layered = tiny_seq2seq("t5")
    layered.decoder.block[0].register_forward_hook(lambda module, args, out: (-out[0], *out[1:]))
    expected = layered.generate(**sources(7), max_new_tokens=12)
    assert torch.equal(fastspec.patch(layered).generate(**sources(7), max_new_tokens=12, assistant="nasd"), expected)
