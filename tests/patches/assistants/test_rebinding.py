"""Models that change after the patch: another embedding or LM head, another size of vocabulary, a move; and models that
are pickled."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from helpers.generate import shallow_model
from helpers.heads import as_eagle3, make_head, write
from helpers.models import tiny_head, tiny_model
from torch import nn

import fastspec
from fastspec.generation.heads.bound import followed
from fastspec.patches.assistants.heads import parts_of
from fastspec.patches.session import session_of

PROMPT = torch.tensor([[7, 8, 9, 10]])
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def same(model: Any, prompt: torch.Tensor = PROMPT) -> list[int]:
    """The greedy answer, which is the same with the head."""
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)[0].tolist()
    assert (
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY, assistant="eagle3")[0].tolist()
        == expected
    )
    return expected


def patched(tied: bool = False, **head: Any) -> Any:
    model = shallow_model(tie_word_embeddings=tied)
    return fastspec.patch(model, eagle3=tiny_head(model, **head))


@pytest.mark.filterwarnings("ignore")  # transformers tells how it makes the new rows
@pytest.mark.parametrize("tied", [False, True])
def test_a_larger_vocabulary_is_decoded_with_the_same_head(tied: bool) -> None:
    """The target says the new tokens too, which the head is then shown: in the embedding as it is now."""
    model = patched(tied)
    model.resize_token_embeddings(105)
    with torch.no_grad():
        model.lm_head.weight[97:] += 3 * model.lm_head.weight[:8].roll(1, 0)
    emitted = same(model, torch.tensor([[7, 8, 100, 104]]))
    assert max(emitted[4:]) >= 97


class Params4bit(nn.Parameter):
    """bitsandbytes' weight, as far as its class is asked for."""


def test_another_embedding_beside_a_packed_lm_head_is_taken() -> None:
    """Whose weight [V * H / 2, 1] does not say how wide it is."""
    model = shallow_model(tie_word_embeddings=False)
    fastspec.patch(model, eagle=tiny_head(model, kind="eagle", taps=(), own_lm_head=False))
    session = session_of(model)
    assert session is not None
    words = torch.zeros(model.lm_head.weight.numel() // 2, 1, dtype=torch.uint8)
    model.lm_head.weight = Params4bit(words, requires_grad=False)
    model.set_input_embeddings(copy.deepcopy(model.get_input_embeddings()))
    head = followed(session.resources["eagle"], parts_of(model))
    assert head.binding.embedding is model.get_input_embeddings() and head.binding.lm_head is model.lm_head


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cast", [False, True])
def test_a_smaller_vocabulary_is_refused_by_name_and_can_be_changed_back(tied: bool, cast: bool) -> None:
    model = patched(tied)
    if cast:
        model.to(torch.float64)
    model.resize_token_embeddings(50)
    with pytest.raises(
        fastspec.Unsupported,
        match=r"97 and 97 tokens then, 50 and 50 now.*tokens up to 96.*resize_token_embeddings\(97\)",
    ):
        model.generate(PROMPT, **GREEDY, assistant="eagle3")
    model.resize_token_embeddings(97)
    same(model)


@pytest.mark.filterwarnings("ignore")
def test_a_head_that_drafts_with_the_models_lm_head_needs_its_size() -> None:
    model = tiny_model()
    fastspec.patch(model, eagle3=tiny_head(model, own_lm_head=False))
    same(model)
    model.resize_token_embeddings(105)
    with pytest.raises(
        fastspec.Unsupported, match=r"97 and 97 tokens then, 105 and 105 now.*LM head, of 97 tokens.*unpatch"
    ):
        model.generate(PROMPT, **GREEDY, assistant="eagle3")


@pytest.mark.filterwarnings("ignore")
def test_the_way_back_is_to_what_was_there_at_the_patch(tmp_path: Any) -> None:
    """Of a target with added tokens, that is more than the head was made for; where no number changed, none is
    named."""
    config, state = as_eagle3(make_head(own_lm_head=True), None)
    write(tmp_path, config, state)
    model = tiny_model(vocab_size=37, hidden_size=16, num_hidden_layers=12)
    model.resize_token_embeddings(52)
    fastspec.patch(model, eagle3=tmp_path)
    model.resize_token_embeddings(20)
    with pytest.raises(fastspec.Unsupported, match=r"52 and 52 tokens then, 20 and 20 now.*embeddings\(52\)"):
        model.generate(PROMPT, **GREEDY, assistant="eagle3")

    model = patched()
    model.set_input_embeddings(nn.Embedding(97, 32))
    with pytest.raises(
        fastspec.Unsupported, match=r"since fastspec\.patch, and its head.*64 wide\. Change them back, or fastspec"
    ):
        model.generate(PROMPT, **GREEDY, assistant="eagle3")


@pytest.mark.parametrize("own", [False, True])
def test_an_embedding_and_lm_head_that_were_replaced_are_the_heads_too(own: bool) -> None:
    """As many tokens drafted as by a patch of the model as it is now."""
    model = patched(own_lm_head=own)
    same(model)
    generator = torch.Generator().manual_seed(5)
    for make, put in (
        (nn.Linear(64, 97, bias=False), model.set_output_embeddings),
        (nn.Embedding(97, 64), model.set_input_embeddings),
    ):
        make.weight.data.normal_(0, 0.3, generator=generator)
        put(make.requires_grad_(False))
        same(model)
        head = session_of(model).resources["eagle3"]
        assert head.binding.embedding is model.get_input_embeddings()
        assert own or head.binding.lm_head is model.get_output_embeddings()


def test_a_heads_own_embedding_moves_with_it(tmp_path: Any) -> None:
    head = make_head(own_lm_head=True)
    config, state = as_eagle3(head, None)
    write(tmp_path, config, state | {"embed_tokens.weight": torch.randn(37, 16)})
    model = tiny_model(vocab_size=37, hidden_size=16, num_hidden_layers=12)
    fastspec.patch(model, eagle3=tmp_path)
    held = session_of(model).resources["eagle3"]
    assert held.binding.embedding is not model.get_input_embeddings()
    model.to(torch.float64)
    assert followed(held, parts_of(model)).binding.embedding.weight.dtype == torch.float64
    assert held.binding.embedding.weight.dtype == torch.float32
    same(model)


@pytest.mark.parametrize("over", [{}, {"own_lm_head": False}])
def test_a_head_as_wide_as_opts_states_is_refused_where_its_embedding_is_narrower(over: dict[str, Any]) -> None:
    model = tiny_model("opt", word_embed_proj_dim=32)
    with pytest.raises(
        fastspec.CheckpointError, match=r"64 wide and has no embedding of its own, the target's is 32 wide"
    ):
        fastspec.patch(model, eagle3=tiny_head(model, **over))
    assert "generate" not in vars(model)
    plain = tiny_model("opt")
    fastspec.patch(plain, eagle3=tiny_head(plain, **over))
    same(plain)


@pytest.mark.parametrize("kind", ["gpt_neox", "llama"])
def test_a_patched_model_is_pickled_after_a_call(kind: str) -> None:
    """In generic mode transformers puts hooks on the layers that cannot be pickled."""
    model = tiny_model(kind)
    fastspec.patch(model, eagle3=tiny_head(model))
    expected = same(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.generate(PROMPT, **GREEDY)[0].tolist() == expected
    same(model)
