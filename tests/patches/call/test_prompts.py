"""Which tokens of a call's prompts are real, and which prompts are refused: the last that is taken, and the first that
is not."""

from __future__ import annotations

import pytest
import torch
from helpers.models import tiny_model
from transformers import DynamicCache

from fastspec.errors import Unsupported
from fastspec.generation.target import compact
from fastspec.patches.call.prompts import OwnPrefill, real_tokens
from fastspec.patches.call.refusals import refuse_prompts

IDS = torch.arange(1, 7)[None]
WHOLE = torch.ones(1, 6, dtype=torch.bool)


def test_a_text_that_the_cache_holds_whole_brings_no_token() -> None:
    model = tiny_model()
    refuse_prompts(model, IDS, WHOLE, 5)
    with pytest.raises(Unsupported, match="holds 6 tokens and input_ids brings no further ones"):
        refuse_prompts(model, IDS, WHOLE, 6)


def test_a_prompt_may_take_all_positions_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    for rows, fits in ((6, True), (5, False), (None, True)):
        monkeypatch.setattr("fastspec.patches.call.refusals.position_rows", lambda model, rows=rows: rows)
        monkeypatch.setattr(model.config, "max_position_embeddings", rows or 5)
        if fits:
            refuse_prompts(model, IDS, WHOLE, 0)
        else:
            with pytest.raises(Unsupported, match="the prompt has 6 tokens and the model's positions end at 5"):
                refuse_prompts(model, IDS, WHOLE, 0)
    with pytest.raises(Unsupported, match="ends in padding"):
        refuse_prompts(model, IDS, WHOLE & (IDS < 6), 0)
    with pytest.raises(Unsupported, match=r"rows \[1\] have no token.*leave these rows out"):
        refuse_prompts(model, IDS.repeat(2, 1), torch.cat((WHOLE, ~WHOLE)), 0)
    with pytest.raises(Unsupported, match="2 rows for 1 rows"):
        refuse_prompts(model, IDS, WHOLE.expand(2, -1), 0)


def test_a_mask_holds_for_every_answer_to_its_prompt() -> None:
    ids, mask = torch.arange(12).view(4, 3), torch.tensor([[0, 1, 1], [1, 1, 1]])
    keep = real_tokens(None, ids, mask, None, 0)
    assert keep.tolist() == [[False, True, True]] * 2 + [[True] * 3] * 2
    moved, counts = compact(ids, keep)
    assert (
        counts.tolist() == [2, 2, 3, 3]
        and moved[:2, :2].tolist() == [[1, 2], [4, 5]]
        and moved[2].tolist() == [6, 7, 8]
    )
    past = torch.ones(1, 5, dtype=torch.long)
    assert real_tokens(None, ids[:1], past, None, 2).shape == (1, 5)
    with pytest.raises(Unsupported, match="attention_mask is 5 wide and input_ids 3"):
        real_tokens(None, ids[:1], past, None, 0)


@pytest.mark.parametrize("keys", [5, 6])
def test_a_prompt_that_takes_more_places_in_the_cache_than_it_has_tokens_is_refused(keys: int) -> None:
    """As where a model puts images in front of the text by itself."""
    model, cache, held = tiny_model(), DynamicCache(), torch.ones(1, 2, keys, 16)
    cache.update(held, held, 0)
    prefill = OwnPrefill(model, model.generation_config, IDS[:, :5], WHOLE[:, :5], {})
    if keys == 5:
        prefill._check(cache, 1)
    else:
        with pytest.raises(Unsupported, match="keeps 6 keys in a layer behind a text of 5 tokens"):
            prefill._check(cache, 1)
