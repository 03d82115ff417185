"""Models that are not what their configurations or classes say: left-over settings, pruned heads, hooked dropouts,
forwards without names, attention that was changed after `patch`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.families import recurrent
from helpers.generate import answer, prompts, shallow_model
from helpers.models import tiny_head
from helpers.seq2seq import tiny_seq2seq
from torch import Tensor, nn
from transformers import DynamicCache

import fastspec
from fastspec import Unsupported
from fastspec.patches.hf.cache import CACHE, kept_cache

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
PADDED = prompts(4, 7)


@pytest.mark.each_value  # one check reads all of them
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi", "opt"])
@pytest.mark.parametrize(("setting", "value"), [("num_kv_shared_layers", 1), ("kv_lora_rank", 8), ("v_head_dim", 8)])
def test_a_setting_that_the_class_does_not_know_is_not_read(family, setting, value):
    """transformers keeps any key of a `config.json`."""
    model = shallow_model(family, **{setting: value})
    assert getattr(model.config, setting) == value
    expected = answer(model, PADDED, **OPTIONS)
    with fastspec.patched(model):
        for assistant in ("autoregressive", "nasd"):
            assert torch.equal(model.generate(**PADDED, **OPTIONS, assistant=assistant), expected)


def prune_keys(model: Any) -> None:
    """One key head less in a layer, as pruners leave it."""
    attention = model.model.layers[1].self_attn
    for name in ("k_proj", "v_proj"):
        whole = getattr(attention, name)
        setattr(attention, name, nn.Linear(64, 16, bias=False))
        getattr(attention, name).weight.data.copy_(whole.weight.data[:16])
    attention.num_key_value_groups = 4


def say_less(model: Any) -> None:
    """Sizes by which keys and values would be kept too short for what the layers write."""
    model.config.head_dim = 8


@pytest.mark.parametrize("change", [prune_keys, say_less])
@pytest.mark.parametrize("late", [False, True])
def test_heads_of_other_sizes_than_the_configuration_says_are_refused_by_name(change, late):
    model = shallow_model()
    if late:
        fastspec.patch(model)
    change(model)
    expected = answer(model, PADDED, **OPTIONS)
    if not late:
        fastspec.patch(model)
    for assistant in ("autoregressive", "nasd"):
        with pytest.raises(
            Unsupported, match=r"LlamaAttention gives \d+ channels in heads of 16, and its configuration"
        ):
            model.generate(**PADDED, **OPTIONS, assistant=assistant)
    assert torch.equal(answer(model, PADDED, **OPTIONS), expected)


@pytest.mark.parametrize("setting", ["linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_value_heads"])
def test_recurrent_layers_of_other_sizes_are_refused_by_name(setting):
    model = fastspec.patch(recurrent())
    setattr(model.config, setting, getattr(model.config, setting) + 1)
    with pytest.raises(
        Unsupported, match=r"Qwen3_5GatedDeltaNet has value heads.* of \(4, 8, 12, 4, 80\), and its conf"
    ):
        model.generate(**PADDED, **OPTIONS, assistant="nasd")


def test_norms_of_queries_and_keys_that_add_unlike_numbers_are_refused_by_name():
    model = fastspec.patch(shallow_model("qwen3"))
    model.model.layers[1].self_attn.k_norm.variance_epsilon = 0.5
    with pytest.raises(Unsupported, match=r"queries and keys of Qwen3Attention add 1e-06 and 0.5 \(variance_epsilon\)"):
        model.generate(**PADDED, **OPTIONS, assistant="nasd")


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, inputs, output: output * 1.5)


def replace_forward(module: nn.Module) -> None:
    module.forward = lambda x: x * 1.5


@pytest.mark.parametrize(
    ("family", "name"),
    [("phi3", "resid_attn_dropout"), ("phi3", "resid_mlp_dropout"), ("phi", "resid_dropout"), ("stablelm", "dropout")],
)
@pytest.mark.parametrize("change", [hook, replace_forward])
def test_a_dropout_that_someone_else_has_a_say_in_is_run(family, name, change: Callable[[nn.Module], None]):
    model = shallow_model(family)
    before = answer(model, PADDED, **OPTIONS)
    with fastspec.patched(model):
        change(model.model.layers[1].get_submodule(name))
        expected = answer(model, PADDED, **OPTIONS)
        assert not torch.equal(expected, before)
        assert fastspec.report(model).mode.startswith("generic (Dropout has a forward")
        assert torch.equal(model.generate(**PADDED, **OPTIONS, assistant="nasd"), expected)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_attention_without_masks_that_is_set_after_patch_is_refused_before_it_runs(family):
    """On the CPU torch's flex attention reads and writes past the end of a mask that is none of its own."""
    model = fastspec.patch(shallow_model(family))
    model.set_attn_implementation("flex_attention")
    if family == "llama":
        hook(model.model.layers[1])  # its adapter brings its own attention
    for assistant in ("autoregressive", "nasd"):
        with pytest.raises(Unsupported, match="needs 4-D masks in generic mode, and flex_attention takes none"):
            model.generate(**PADDED, **OPTIONS, assistant=assistant)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_5_text", "opt", "gpt2"])
def test_more_layers_than_there_are_are_refused_by_name(family):
    model = fastspec.patch(recurrent() if family == "qwen3_5_text" else shallow_model(family))
    model.config.num_hidden_layers += 2
    with pytest.raises(Unsupported, match=r"has \d layers, and its configuration says \d \(num_hidden_layers\)"):
        model.generate(**PADDED, **OPTIONS, assistant="nasd")


def keep_layers(model: Any, *numbers: int) -> None:
    """These layers alone, with the numbers that they had, as pruners leave them."""
    decoder = model.get_decoder()
    name = next(name for name in ("layers", "block", "h") if hasattr(decoder, name))
    layers = getattr(decoder, name)
    setattr(decoder, name, nn.ModuleList([layers[number] for number in numbers]))


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_5_text", "opt", "gpt2", "bart", "t5"])
@pytest.mark.parametrize(("numbers", "told"), [((1, 2), "1, 2"), ((0, 2), "0, 2"), ((0, 1, 1), "0, 1")])
def test_layers_that_are_numbered_otherwise_are_refused_by_name(family, numbers, told):
    """Plain decoding keeps states by the layers' numbers, and takes a text's length from number 0."""
    sizes = {"decoder_layers": 3, "num_decoder_layers": 3}
    if family in ("bart", "t5"):
        model = tiny_seq2seq(family, **sizes)
    else:
        model = recurrent(family) if family == "qwen3_5_text" else shallow_model(family)
    fastspec.patch(model)
    keep_layers(model, *numbers)
    model.config.num_hidden_layers = 3
    twice = "a layer of its decoder stands there more than once"  # where a state is recurrent
    message = rf"layers of \w+ are numbered {told} \(layer_idx\)|{twice}"
    with pytest.raises(Unsupported, match=message):
        model.generate(**PADDED, **OPTIONS, assistant="nasd")


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("assistant", ["nasd", "eagle3"])
def test_layers_in_another_order_keep_their_places_in_a_cache(family, assistant):
    """Caches go by a layer's number, and hidden states by its place."""
    model = shallow_model(family)
    keep_layers(model, 2, 0, 1)
    options = OPTIONS | {"eos_token_id": None, "return_dict_in_generate": True}
    more = prompts(3, 3, seed=2)["input_ids"]
    first = answer(model, PADDED, **options)
    ids = torch.cat((first.sequences, more), 1)
    turn = {"input_ids": ids, "attention_mask": torch.cat((PADDED["attention_mask"], torch.ones_like(ids[:, 7:])), 1)}
    second = answer(model, turn, **options).sequences
    with fastspec.patched(model, eagle3=tiny_head(model)):
        found = model.generate(**PADDED, **options, assistant=assistant)
        assert torch.equal(found.sequences, first.sequences)
        for cache, named in ((kept_cache(found), None), (kept_cache(first), assistant)):
            given = {CACHE: copy.deepcopy(cache)}
            assert torch.equal(model.generate(**turn, **options, **given, assistant=named).sequences, second)


def test_a_decoder_of_more_layers_than_its_configuration_says_is_refused_by_name():
    """T5 runs all of them."""
    model = fastspec.patch(tiny_seq2seq("t5"))
    model.config.num_decoder_layers = 1
    with pytest.raises(Unsupported, match=r"layers of T5Stack are numbered 0, 1 \(layer_idx\).* says that there are 1"):
        model.generate(**PADDED, **OPTIONS, assistant="nasd")


def test_a_head_of_more_layers_than_there_are_by_now_is_refused_by_name():
    model = shallow_model()
    fastspec.patch(model, eagle3=tiny_head(model))
    model.config.num_hidden_layers = 2
    expected = answer(model, PADDED, **OPTIONS)
    assert torch.equal(model.generate(**PADDED, **OPTIONS, assistant="nasd"), expected)
    with pytest.raises(Unsupported, match=r"reads what layer 3 of the model gives, which has 2 by now"):
        model.generate(**PADDED, **OPTIONS, assistant="eagle3")


@pytest.mark.parametrize(
    ("family", "part", "name"),
    [("stablelm", "", "use_parallel_residual"), ("phi", "self_attn", "qk_layernorm")],
)
def test_a_switch_of_one_layer_costs_the_adapter(family, part, name):
    """A forward reads what its layer holds, and not the configuration."""
    model = shallow_model(family)
    layer = model.model.layers[1]
    layer.self_attn.q_layernorm, layer.self_attn.k_layernorm = nn.LayerNorm(16), nn.LayerNorm(16)
    before = answer(model, PADDED, **OPTIONS)
    with fastspec.patched(model):
        assert fastspec.report(model).mode == f"adapter {family}"
        setattr(layer.get_submodule(part), name, True)
        expected = answer(model, PADDED, **OPTIONS)
        assert fastspec.report(model).mode == f"generic (its {name} is set)"
        assert torch.equal(model.generate(**PADDED, **OPTIONS, assistant="nasd"), expected)
    assert not torch.equal(expected, before)


def test_a_head_that_its_rotation_makes_wider_is_refused_by_name():
    """Of one rotated channel StableLM's own forward makes two."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    model = shallow_model("stablelm", hidden_size=24, rope_parameters=rope)
    assert answer(model, PADDED, **OPTIONS).shape[1] > PADDED["input_ids"].shape[1]
    fastspec.patch(model)
    with pytest.raises(Unsupported, match="key heads of size 7, its config says 2 of 6"):
        model.generate(**PADDED, **OPTIONS, assistant="nasd")
    assert "turns an odd number of channels" in fastspec.report(model).mode


@pytest.mark.parametrize("family", ["opt", "gpt2", "llama"])
def test_a_forward_that_hides_its_positions(family):
    """transformers prepares positions for a forward that names them. OPT's counts them by the mask then, GPT-2's by the
    cache, and a rotation does not ask where a text begins."""
    model, inputs = shallow_model(family), prompts(7, 7)
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    expected = answer(model, inputs, **OPTIONS)
    padded = answer(model, PADDED, **OPTIONS)
    with fastspec.patched(model):
        assert torch.equal(model.generate(**inputs, **OPTIONS, assistant="nasd"), expected)
        if family == "llama":
            assert torch.equal(model.generate(**PADDED, **OPTIONS, assistant="nasd"), padded)
            return
        with pytest.raises(Unsupported, match=r"someone else's \(<lambda>.* names no position_ids"):
            model.generate(**PADDED, **OPTIONS, assistant="nasd")


@pytest.mark.parametrize(
    "mask", [torch.tensor([[1, 1, 1, 2, 2, 2, 2]]), torch.full((1, 7), 0.5)], ids=["packed", "half"]
)
def test_a_mask_of_other_numbers_is_refused_by_name(mask: Tensor):
    """Plain decoding adds them up to positions."""
    model = fastspec.patch(shallow_model())
    with pytest.raises(Unsupported, match="attention_mask has numbers besides 0 and 1"):
        model.generate(prompts(7)["input_ids"], attention_mask=mask, **OPTIONS, assistant="nasd")
    with (
        fastspec.continuous(model, "autoregressive", rows=1) as batch,
        pytest.raises(Unsupported, match="besides 0 and 1"),
    ):
        batch.submit(prompts(7)["input_ids"], attention_mask=mask, **OPTIONS)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("own", [False, True])
def test_a_turn_that_shows_what_was_padding_is_refused_by_name(family, own):
    """Plain decoding leaves keys of padding in its cache, an assisted call none: a later mask may not show them."""
    model = shallow_model(family, sliding_window=16) if family == "mistral" else shallow_model()
    more = prompts(3, 3, seed=2)["input_ids"]
    options = OPTIONS | {"eos_token_id": None}
    with fastspec.patched(model):
        cache = {CACHE: DynamicCache(config=model.config)} if own else {}
        first = model.generate(**PADDED, **options, **cache, assistant="nasd", return_dict_in_generate=True)
        ids = torch.cat((first.sequences, more), 1)
        ones = torch.ones_like(ids)
        with pytest.raises(Unsupported, match=r"shows tokens of rows \[0\] that \w+ holds nothing of"):
            model.generate(ids, attention_mask=ones, **options, **{CACHE: kept_cache(first)}, assistant="nasd")
        mask = torch.cat((PADDED["attention_mask"], ones[:, 7:]), 1)
        two = model.generate(ids, attention_mask=mask, **options, **{CACHE: kept_cache(first)}, assistant="nasd")
        assert torch.equal(two, answer(model, {"input_ids": ids, "attention_mask": mask}, **options))


def test_a_turn_that_shows_a_hole_is_refused_by_name_until_it_is_cropped():
    """A token within a prompt that is the padding token, which transformers hides where no mask is given."""
    model = fastspec.patch(shallow_model())
    ids = prompts(7, 7)["input_ids"]
    ids[0, 4] = 0
    options = OPTIONS | {"eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    first = model.generate(ids, **options, assistant="nasd")
    cache, more = kept_cache(first), prompts(3, 3, seed=2)["input_ids"]
    longer = torch.cat((first.sequences, more), 1)
    shown = torch.ones_like(longer)
    with pytest.raises(Unsupported, match=r"shows tokens of rows \[0\] that \w+ holds nothing of"):
        model.generate(longer, attention_mask=shown, **options, **{CACHE: copy.deepcopy(cache)}, assistant="nasd")
    hidden = shown.clone()
    hidden[0, 4] = 0
    two = model.generate(longer, attention_mask=hidden, **options, **{CACHE: cache}, assistant="nasd")
    again = torch.cat((two.sequences, more), 1)
    with pytest.raises(Unsupported, match=r"shows tokens of rows \[0\] that \w+ holds nothing of"):
        model.generate(again, attention_mask=torch.ones_like(again), **options, **{CACHE: cache}, assistant="nasd")
    cache.crop(4 - int(cache.get_seq_length()))
    found = model.generate(again, attention_mask=torch.ones_like(again), **options, **{CACHE: cache}, assistant="nasd")
    expected = answer(model, {"input_ids": again, "attention_mask": torch.ones_like(again)}, **options)
    assert torch.equal(found.sequences, expected.sequences)
    longer = torch.cat((found.sequences, more), 1)
    model.generate(longer, attention_mask=torch.ones_like(longer), **options, **{CACHE: cache}, assistant="nasd")


UNPADDED = r"shows tokens of rows \[{}\] that \w+ holds nothing of"


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("default", [True, False])
def test_a_plain_turn_that_shows_what_was_padding_is_refused_by_name(masked, default):
    """Plain decoding would attend to the zeros that an assisted call leaves in place of padding, a padding token that
    the first turn hid by itself among it."""
    model = fastspec.patch(shallow_model(), assistant="nasd" if default else None)
    options = OPTIONS | {"eos_token_id": None, "return_dict_in_generate": True}
    ids = prompts(4, 7)["input_ids"].masked_fill(PADDED["attention_mask"] == 0, 0)
    first = model.generate(ids, **options, pad_token_id=0, assistant="nasd")
    longer = torch.cat((first.sequences, prompts(3, 3, seed=2)["input_ids"]), 1)
    turn = {"input_ids": longer, **options, **({} if default else {"assistant": None})}
    # a default leaves calls that choose by more than one text to transformers
    turn |= {"num_beams": 2, "num_return_sequences": 1} if default else {}
    shown = {"attention_mask": torch.ones_like(longer)} if masked else {"pad_token_id": 95}
    cache = kept_cache(first)
    if default:
        cache.batch_repeat_interleave(1)
    with pytest.raises(Unsupported, match=UNPADDED.format(0)):
        model.generate(**turn, **shown, **{CACHE: cache})
    if not default:  # and as the first turn was
        found = model.generate(**turn, pad_token_id=0, **{CACHE: cache})
        assert torch.equal(found.sequences, answer(model, {"input_ids": longer}, **options, pad_token_id=0).sequences)


def test_weights_of_attention_may_not_show_padding_that_a_cache_lacks():
    """Falcon leaves SDPA for them and adds its mask as numbers, so that padding is seen whatever the mask hides."""
    model = fastspec.patch(shallow_model("falcon"))
    options = OPTIONS | {"eos_token_id": None, "return_dict_in_generate": True}
    first = model.generate(**PADDED, **options, assistant="nasd")
    ids = torch.cat((first.sequences, prompts(3, 3, seed=2)["input_ids"]), 1)
    mask = torch.cat((PADDED["attention_mask"], torch.ones_like(ids[:, 7:])), 1)
    turn = {"input_ids": ids, "attention_mask": mask, **options, "output_attentions": True, "assistant": None}
    with pytest.raises(Unsupported, match=r"output_attentions=True.*FalconForCausalLM.*beside padding"):
        model.generate(**turn, **{CACHE: copy.deepcopy(kept_cache(first))})
    model.config._attn_implementation = "eager"  # which hides it; Falcon has no other way once it is loaded
    found = model.generate(**turn, **{CACHE: kept_cache(first)})
    assert torch.equal(found.sequences, model.generate(**turn).sequences)


def test_beams_go_on_from_a_cache_with_padding_and_may_not_see_it():
    model = fastspec.patch(shallow_model())
    options = OPTIONS | {"eos_token_id": None, "return_dict_in_generate": True}
    found = []
    for assistant in (None, "nasd"):
        first = model.generate(**PADDED, **options, assistant=assistant)
        ids = torch.cat((first.sequences, prompts(3, 3, seed=2)["input_ids"]), 1)
        mask = torch.cat((PADDED["attention_mask"], torch.ones_like(ids[:, 7:])), 1)
        cache = kept_cache(first)
        cache.batch_repeat_interleave(2)
        turn = {"input_ids": ids, "num_beams": 2, **options, "assistant": None}
        if assistant is not None:
            with pytest.raises(Unsupported, match=UNPADDED.format("0, 1")):
                model.generate(**turn, attention_mask=torch.ones_like(ids), **{CACHE: copy.deepcopy(cache)})
        found.append(model.generate(**turn, attention_mask=mask, **{CACHE: cache}).sequences)
    assert torch.equal(*found)


def test_what_was_padding_is_found_where_a_cache_was_reordered_and_repeated():
    model = fastspec.patch(shallow_model())
    options = OPTIONS | {"eos_token_id": None, "return_dict_in_generate": True}
    first = model.generate(**PADDED, **options, assistant="nasd")
    order = torch.tensor([1, 0, 1])
    cache, ids = kept_cache(first), first.sequences[order]
    cache.batch_select_indices(order)
    cache.batch_repeat_interleave(2)
    ids = torch.cat((ids, prompts(3, 3, 3, seed=2)["input_ids"]), 1).repeat_interleave(2, 0)
    ones = torch.ones_like(ids)
    for assistant in ("nasd", None):
        with pytest.raises(Unsupported, match=UNPADDED.format("2, 3")):
            model.generate(ids, attention_mask=ones, **options, **{CACHE: cache}, assistant=assistant)
    mask = ones.clone()
    mask[:, :7] = PADDED["attention_mask"][order].repeat_interleave(2, 0)
    two = model.generate(ids, attention_mask=mask, **options, **{CACHE: cache}, assistant="nasd")
    expected = answer(model, {"input_ids": ids, "attention_mask": mask}, **options)
    assert torch.equal(two.sequences, expected.sequences)


def test_what_a_later_turn_hides_may_be_shown_again():
    model = fastspec.patch(shallow_model())
    options = OPTIONS | {"eos_token_id": None, "return_dict_in_generate": True}
    found = []
    for assistant in (None, "nasd"):
        out = model.generate(**prompts(7, 7), **options, assistant=assistant)
        for hides in (True, False):
            ids = torch.cat((out.sequences, prompts(3, 3, seed=2)["input_ids"]), 1)
            mask = torch.ones_like(ids)
            mask[1, 5] = not hides
            cache = {CACHE: kept_cache(out)}
            out = model.generate(ids, attention_mask=mask, **options, **cache, assistant=assistant)
        found.append(out.sequences)
    assert torch.equal(*found)


def test_padding_behind_an_early_end_may_be_shown():
    """Windows that see nothing but padding whose embedding is zero leave keys of zero in plain decoding too."""
    model, inputs = shallow_model("mistral", sliding_window=3), prompts(6, 6)
    new = answer(model, inputs, **OPTIONS, eos_token_id=None)[:, 6:].tolist()
    options = OPTIONS | {"eos_token_id": new[0][0], "max_new_tokens": 24}
    more, found = prompts(3, 3, seed=2)["input_ids"], []
    assert model.get_input_embeddings().weight[0].count_nonzero() == 0
    fastspec.patch(model)
    for assistant in (None, "nasd"):
        cache = DynamicCache()  # which keeps everything
        first = model.generate(**inputs, **options, **{CACHE: cache}, assistant=assistant)
        assert cache.layers[-1].keys[0, 0, -1].count_nonzero() == 0
        ids = torch.cat((first, more), 1)
        found.append(
            model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS, **{CACHE: cache}, assistant=assistant)
        )
    assert torch.equal(*found)
