"""An LM head in a dtype of its own, as TRL casts it: with an embedding tied to it, `model.dtype` is not the layers'."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.generate import TREE, prompts, same, shallow_model
from helpers.models import tiny_head

import fastspec


def cast_head(tied: bool) -> Any:
    model = shallow_model(tie_word_embeddings=tied)
    model.lm_head.double()
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].double(), *args[1:]))
    if tied:
        model.get_input_embeddings().register_forward_hook(lambda _, args, out: out.float())
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["its own", "tied"])
@pytest.mark.parametrize("assistant", ["nasd", TREE], ids=str)
def test_an_lm_head_that_was_cast_by_itself_leaves_the_tokens_as_they_are(tied, assistant):
    plain = cast_head(tied)
    patched = fastspec.patch(cast_head(tied), eagle3=tiny_head(shallow_model()).to(plain.dtype))
    same((plain, patched), assistant, prompts(9, 5))
