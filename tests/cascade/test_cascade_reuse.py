"""What a cascade keeps between its calls never shows in what it says: pad tokens in a text, and weights that
changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.cascade import cascaded, stages
from helpers.models import tiny_model

import fastspec
from fastspec.errors import Unsupported
from fastspec.patches.cascade.stages import check_kept, past_of
from fastspec.patches.hf.cache import kept_cache
from fastspec.patches.hf.changes import fingerprint
from fastspec.patches.session import session_of

HIGH = 1e9
"""A price at which every request goes to the last stage."""
GREEDY = {"max_new_tokens": 10, "do_sample": False}


def padded_text(length: int, seed: int) -> torch.Tensor:
    """A text [1, length] whose every fourth token or so is the pad token, 0, the last one never."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, 97, (1, length), generator=generator)
    ids[0, :-1][torch.rand(length - 1, generator=generator) < 0.25] = 0
    return ids


def emitted(model: Any, ids: torch.Tensor, **options: Any) -> list[int]:
    """A greedy answer to one row, all of it text."""
    return model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY, **options)[0].tolist()


@pytest.mark.some("0.0")
@pytest.mark.parametrize("price", [0.0, HIGH])
def test_pad_tokens_within_a_text_are_text(price: float) -> None:
    """The answers without a memory, over three turns each, from a first stage and from a last one."""
    kept, plain = (cascaded(stages(2), price=price, memory=memory) for memory in (10_000_000, None))
    for seed in range(4):
        ids = padded_text(24, seed)
        for turn in range(3):
            answer = emitted(kept, ids, assistant="cascade")
            assert answer == emitted(plain, ids, assistant="cascade")
            ids = torch.cat((torch.tensor([answer]), padded_text(6, 10 * seed + turn)), 1)


def load_others(model: Any) -> None:
    model.load_state_dict({name: each + 0.1 * torch.randn_like(each) for name, each in model.state_dict().items()})


def merge(model: Any) -> None:
    """As a LoRA adapter is merged: a product of low rank is added in place."""
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.add_(torch.randn(32, 2) @ torch.randn(2, 64))


def write_data(model: Any) -> None:
    """What neither an address nor a version counter tells."""
    model.model.layers[1].self_attn.v_proj.weight.data.mul_(1.5)


def replace_forward(model: Any) -> None:
    layer = model.model.layers[0].mlp
    own = layer.forward
    layer.forward = lambda x: 0.5 * own(x)


CHANGES = [load_others, merge, write_data, replace_forward]


@pytest.mark.some("replace_forward", "merge")
@pytest.mark.each_value
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", [0, 1])
def test_what_was_kept_before_a_change_of_weights_is_not_used(change: Any, which: int) -> None:
    torch.manual_seed(3)
    models = stages(2)
    model = cascaded(models, price=HIGH, memory=10_000_000)
    ids = torch.tensor([emitted(model, padded_text(24, 7), assistant="cascade")])
    change(models[which])
    turn = torch.cat((ids, padded_text(5, 8)), 1)
    hits = fastspec.report(model).memory.hits
    answer = emitted(model, turn, assistant="cascade")
    assert fastspec.report(model).memory.hits == hits + 1  # the other stage's
    session = session_of(model)
    assert answer == emitted(model, turn)
    for stage, held in enumerate(models):
        past = past_of(session.resources["cascade"].memory, stage, held, turn)
        expected = kept_cache(held(turn[:, :-1], attention_mask=torch.ones(1, turn.shape[1] - 1)))
        assert torch.allclose(past.layers[1].keys, expected.layers[1].keys, atol=1e-3), (
            stage
        )  # some hundred times fp32's rounding
    assert (
        emitted(model, turn, assistant="cascade") == answer and fastspec.report(model).memory.hits == hits + 5
    )  # two by `past_of`


def test_kept_keys_and_values_are_freed_when_asked() -> None:
    model = cascaded(stages(2), price=HIGH, memory=10_000_000)
    emitted(model, padded_text(24, 1), assistant="cascade")
    memory = session_of(model).resources["cascade"].memory
    assert memory.held(moved=False)
    fastspec.clear_memory(model)
    assert memory.held(moved=False) == 0
    with pytest.raises(Unsupported, match="not patched"):
        fastspec.clear_memory(tiny_model())
    with pytest.raises(Unsupported, match=r"keeps nothing.*memory=bytes"):
        fastspec.clear_memory(fastspec.patch(tiny_model()))


def test_a_fingerprint_is_of_the_values_and_tells_any_one_of_them() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = tiny_model(num_hidden_layers=2, vocab_size=2311).to(
            dtype
        )  # its embedding is summed by blocks, with a rest
        was = fingerprint(model)
        assert fingerprint(copy.deepcopy(model)) == was
        for weight in (
            model.model.embed_tokens.weight.data,
            model.model.layers[0].mlp.up_proj.weight.data,
            model.model.norm.weight.data,
        ):
            kept, flat = weight.clone(), weight.view(-1)
            for place in (0, len(flat) // 2, len(flat) - 1):
                flat[place : place + 1].view(torch.int16)[0] ^= 1  # the last bit of a value
                assert fingerprint(model) != was
                weight.copy_(kept)
            for other in (-kept, kept.flip(0), kept.roll(1), kept.roll(1, 0)):
                weight.copy_(other)
                assert fingerprint(model) != was or torch.equal(weight, kept)
                weight.copy_(kept)
        assert fingerprint(model) == was
        model.model.layers[0].self_attn._disable_adapters = True
        assert fingerprint(model) != was


def test_parameters_that_lie_anywhere_have_one_fingerprint() -> None:
    model = tiny_model(num_hidden_layers=2).to(torch.bfloat16)
    was = fingerprint(model)
    for parameter in model.parameters():  # at an odd address, and not in the order of its rows
        room = torch.empty(parameter.numel() + 3, dtype=parameter.dtype)[3:].view(parameter.shape[::-1]).movedim(0, -1)
        parameter.data = room.copy_(parameter.data)
    assert fingerprint(model) == was


def test_weights_that_are_not_in_memory_are_refused_by_name() -> None:
    with torch.device("meta"):
        model = tiny_model()
    with pytest.raises(Unsupported, match=r"LlamaForCausalLM.*meta.*memory=None"):
        check_kept(model)
