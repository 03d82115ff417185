"""Heads as their publishers export them: each reads back as the head that was written, or is refused by its name."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.generate import EAGLE1
from helpers.heads import (
    BASE,
    DEEPSPEC,
    LAYERS,
    PUBLISHED,
    as_angelslim,
    as_deepspec,
    as_eagle,
    as_eagle3,
    as_nemo,
    as_specforge,
    as_speculators,
    as_vllm,
    logits,
    make_head,
    published_by_amazon,
    published_by_nvidia,
    published_by_nvidia_for_llama4,
    published_by_red_hat,
    write,
)
from helpers.models import tiny_head, tiny_model
from safetensors.torch import save_file

import fastspec
from fastspec.errors import CheckpointError
from fastspec.generation.heads.bound import Sizes
from fastspec.generation.heads.checkpoint import HeadCheckpoint
from fastspec.generation.heads.load import Reading, build_head, fitted, is_copy, override, read_checkpoint, with_taps
from fastspec.generation.heads.module import Binding
from fastspec.patches.assistants.heads import inspect_head, load_head

SIZES = Sizes(BASE.vocab_size, BASE.hidden_size, LAYERS, BASE.hidden_size)


def read(folder: Path, config: dict, state: dict, layers: int = LAYERS) -> HeadCheckpoint:
    return with_taps(read_checkpoint(write(folder, config, state)), layers)


@pytest.mark.parametrize("publisher", PUBLISHED)
def test_a_head_of_each_publisher_reads_back_as_the_head_that_was_written(publisher, tmp_path):
    torch.manual_seed(1)
    writer, changes, dialect = PUBLISHED[publisher]
    head = make_head(**changes)
    if head.config.kind == "eagle":
        head.d2t.zero_()
    embedding = torch.randn(head.config.vocab_size, head.config.hidden_size)
    checkpoint = read(tmp_path, *writer(head, embedding))
    assert checkpoint.dialect == dialect
    assert replace(checkpoint.config, max_position_embeddings=2048) == replace(
        head.config, max_position_embeddings=2048
    )
    assert torch.equal(logits(build_head(checkpoint), embedding), logits(head, embedding))


WRAPPED = {
    "DDP": "module.{}",
    "compiled": "_orig_mod.{}",
    "compiled inside": "module._orig_mod.{}",
    "compiled outside": "_orig_mod.module.{}",
    "a trainer's part": "module.draft_model.{}",
    "PEFT": "base_model.model.{}",
    "PEFT within DDP, nemo's": "module.base_model.model.model.{}",
    "nemo's": "module.model.{}",
    "a model with images": "language_model.model.{}",
    "a model with images, outside": "module.model.language_model.{}",
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_names_of_trainers_wrappers_are_taken_off_the_keys(wrapped, tmp_path):
    head = make_head()
    config, state = as_eagle3(head, None)
    checkpoint = read(tmp_path, config, {WRAPPED[wrapped].format(key): each for key, each in state.items()})
    bare = WRAPPED[wrapped].removeprefix("module.").removeprefix("base_model.model.")
    assert checkpoint.dialect == ("nemo" if bare.startswith("model.") else "eagle3")
    embedding = torch.randn(37, 16)
    assert torch.equal(logits(build_head(checkpoint), embedding), logits(head, embedding))


def test_names_of_wrappers_around_a_layer_are_taken_off_and_no_key_stands_twice(tmp_path):
    head = make_head()
    config, state = as_eagle3(head, None)
    inner = {
        key.replace("midlayer.", "midlayer._fsdp_wrapped_module._checkpoint_wrapped_module."): each
        for key, each in state.items()
    }
    embedding = torch.randn(37, 16)
    assert torch.equal(logits(build_head(read(tmp_path, config, inner)), embedding), logits(head, embedding))
    with pytest.raises(CheckpointError, match=r"two keys mean 'd2t'"):
        read(tmp_path, config, state | {"module.d2t": state["d2t"].clone()})


def test_the_base_of_rotation_by_images_is_the_configurations_own(tmp_path):
    """AngelSlim's trainer rotates by another class there, which reads the field that its plain one ignores."""
    config, state = as_angelslim(make_head(), None)
    for more, theta in (({}, 1e4), ({"mrope_interleaved": True}, 5e6), ({"mrope_interleaved": False}, 1e4)):
        rope = {"type": "default", "rope_type": "default", "mrope_section": [1, 1, 2], **more}
        found = read(tmp_path, config | {"rope_scaling": rope, "rope_theta": 5e6}, state).config.rope_parameters
        assert found == {"rope_type": "default", "rope_theta": theta}
    mrope = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 1e6}
    assert read(tmp_path, config | mrope, state).config.rope_parameters["rope_theta"] == 1e6


@pytest.mark.parametrize("apart", ["self_attn.q_proj.lora_A.default.weight", "self_attn.q_proj.base_layer.weight"])
def test_adapters_beside_a_heads_weights_are_refused_by_name(apart, tmp_path):
    config, state = as_eagle3(make_head(), None)
    state = {f"base_model.model.{key}": each for key, each in state.items()}
    with pytest.raises(CheckpointError, match=r"PEFT's adapters beside its weights.*merge_and_unload"):
        read(tmp_path, config, state | {f"base_model.model.midlayer.{apart}": torch.ones(4, 16)})


def test_a_bias_that_only_config_json_has_is_not_there(tmp_path):
    head, embedding = make_head(**EAGLE1, draft_vocab_size=37, target_hidden_size=16), torch.randn(37, 16)
    head.d2t.zero_()
    config, state = as_eagle(head, embedding)
    assert config["bias"] is True and "fc.bias" not in state
    checkpoint = read(tmp_path, config, state)
    assert not checkpoint.config.fc_bias and any("no fc.bias" in note for note in checkpoint.notes)
    assert torch.equal(logits(build_head(checkpoint), embedding), logits(head, embedding))
    assert not any("fc.bias" in note for note in read(tmp_path, config | {"bias": False}, state).notes)


def test_a_map_of_another_name_is_not_called_quantised(tmp_path):
    config, state = as_eagle3(make_head(), None)
    state["other.d2t"] = state.pop("d2t")
    with pytest.raises(CheckpointError, match=r"other\.d2t is torch\.int64, and of those a head has d2t and t2d alone"):
        read(tmp_path, config, state)


def test_a_map_that_is_missing_is_read_from_what_t2d_marks(tmp_path):
    head, embedding = make_head(), torch.randn(37, 16)
    config, state = as_eagle3(head, None)
    del state["d2t"]
    checkpoint = read(tmp_path, config, state)
    assert any("t2d marks" in note for note in checkpoint.notes)
    assert torch.equal(checkpoint.state["d2t"], head.d2t)
    assert torch.equal(logits(build_head(checkpoint), embedding), logits(head, embedding))
    state["t2d"][state["t2d"].nonzero()[0]] = False  # one token fewer than the head drafts
    with pytest.raises(CheckpointError, match="missing d2t"):
        read(tmp_path, config, state)


def test_sizes_within_text_config_are_read_where_the_top_has_none(tmp_path):
    head = make_head()
    config, state = as_eagle3(head, None)
    for outer in ({"model_type": "qwen3_vl"}, {"draft_vocab_size": config["draft_vocab_size"]}):
        within = {name: value for name, value in config.items() if name not in outer or name == "model_type"}
        assert read(tmp_path, outer | {"text_config": within}, state).config == read(tmp_path, config, state).config
    beside = config | {"text_config": {"hidden_size": 32, "vocab_size": 99}}
    assert read(tmp_path, beside, state).config == read(tmp_path, config, state).config


def test_p_eagle_is_refused_by_its_name(tmp_path):
    config, state = published_by_amazon(make_head(), None)
    with pytest.raises(CheckpointError, match=r"P-EAGLE head, which drafts all tokens in one pass.*fastspec train"):
        read(tmp_path, config, state)
    for field in ("parallel_drafting", "ptd_token_id"):
        del config[field]
    with pytest.raises(CheckpointError, match="P-EAGLE"):
        read(tmp_path, config, state)
    with pytest.raises(CheckpointError, match="P-EAGLE"):
        read(tmp_path, config | {"speculators_model_type": "peagle"}, as_eagle3(make_head(), None)[1])


def test_layers_that_deepspec_names_are_as_many_as_fc_reads_and_its_head_for_gemma_4_is_refused(tmp_path):
    config, state = as_deepspec(make_head(**DEEPSPEC), torch.randn(37, 16))
    with pytest.raises(CheckpointError, match=r"target_layer_ids is \[1, 3\]; fc.weight reads 5 layers"):
        read(tmp_path, config | {"target_layer_ids": [1, 3]}, state)
    with pytest.raises(CheckpointError, match=r"a head with Gemma 4's layer .*does not run in heads"):
        read(tmp_path, config | {"architectures": ["Gemma4Eagle3Model"]}, state)


@pytest.mark.parametrize("fed_back", [False, True])
def test_norm_output_says_what_a_specforge_head_feeds_back(fed_back, tmp_path):
    head = make_head(norm_output=fed_back)
    checkpoint = read(tmp_path, *as_specforge(head, None))
    assert checkpoint.config.norm_output is fed_back
    assert torch.equal(logits(build_head(checkpoint), torch.ones(37, 16)), logits(head, torch.ones(37, 16)))
    assert any("May to September 2026" in note for note in checkpoint.notes) is fed_back
    assert override(checkpoint, Reading(norm_output=not fed_back)).config.norm_output is not fed_back
    config, state = published_by_nvidia(head, None)  # TensorRT-LLM's name for it
    config["eagle_config"]["return_hidden_post_norm"] = fed_back
    assert read(tmp_path, config, state).config.norm_output is fed_back


def nested(ids: list[int] | None) -> dict:
    return {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}


TAPS = (
    ([1, 5, 8], (2, 6, 9), False, False),
    ([2, 6, 9], (2, 6, 9), False, False),
    ([3, 6, 9], (4, 7, 10), False, True),
    ([0, 6, 11], (1, 7, 12), True, True),
    ([4, 8, 12], (4, 8, 12), True, True),
    ([2, 8, 12], (2, 8, 12), True, False),
    (None, (2, 6, 9), False, True),
)


@pytest.mark.parametrize(("ids", "taps", "before_norm", "assumed"), TAPS, ids=str)
def test_nested_ids_are_counted_by_what_fits_the_target(ids, taps, before_norm, assumed, tmp_path):
    config, state = as_eagle3(make_head(), None)
    checkpoint = read(tmp_path, config | nested(ids), state)
    assert checkpoint.config.taps == taps and checkpoint.flags["taps"].value == taps
    assert checkpoint.config.last_tap_before_norm is before_norm
    assert (checkpoint.assumed is not None) is assumed
    assert not assumed or (
        f"{taps}" in checkpoint.assumed and "inspect --probe" in checkpoint.assumed and "taps=" in checkpoint.assumed
    )
    given = fitted(read_checkpoint(tmp_path), SIZES, Reading(taps=(3, 7, 12)))
    assert given.config.taps == (3, 7, 12) and given.config.last_tap_before_norm and given.assumed is None


@pytest.mark.parametrize("config", [{}, {"trained_by": "fastspec"}], ids=["original", "fastspec"])
def test_unnamed_taps_are_the_rule_of_the_original_formats(config, tmp_path):
    plain, state = as_eagle3(make_head(), None)
    assert read(tmp_path, plain | config, state).assumed is None


def test_the_last_tap_of_a_head_that_fastspec_trained_is_after_the_norm_as_it_was_trained(tmp_path):
    config, state = as_eagle3(make_head(), None)
    more = {"trained_by": "fastspec", "eagle_aux_hidden_state_layer_ids": [2, 6, LAYERS]}
    assert not read(tmp_path, config | more, state).config.last_tap_before_norm


@pytest.mark.parametrize("kind", ["sliding_attention", "linear_attention"])
def test_windows_of_the_target_in_a_configuration_of_nemos_are_not_the_heads(kind, tmp_path):
    config, state = as_nemo(make_head(), None)
    config |= {"layer_types": [kind, "full_attention"], "sliding_window": 8, "model_type": "mistral"}
    with pytest.raises(CheckpointError, match=kind):
        read(tmp_path, config, state)
    checkpoint = read(tmp_path, config | {"architectures": ["LlamaEagle3DraftModel"]}, state)
    assert any("a copy of the target's" in note for note in checkpoint.notes)


def test_weights_decide_how_many_layers_and_key_value_heads_there_are(tmp_path):
    head = make_head()
    config, state = as_eagle3(head, None)
    del config["num_key_value_heads"]
    checkpoint = read(tmp_path, config | {"num_hidden_layers": 40}, state)
    assert (checkpoint.config.num_hidden_layers, checkpoint.config.num_key_value_heads) == (1, 2)
    assert "num_hidden_layers 40" in checkpoint.notes[0]
    two = make_head(num_hidden_layers=2)
    config, state = as_speculators(two, torch.zeros(37, 16))
    config["transformer_layer_config"]["num_hidden_layers"] = 1
    assert read(tmp_path, config, state).config.num_hidden_layers == 2


class Interleaved(torch.nn.Module):
    """Llama 4's rotation by complex numbers, of neighbouring channels."""

    def __init__(self, frequencies):
        super().__init__()
        self.frequencies = frequencies

    def forward(self, x, positions):
        turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        angle = positions[..., None, None].double() * self.frequencies.double()
        return torch.view_as_real(turned * torch.polar(torch.ones_like(angle), angle)).flatten(-2).to(x.dtype)


@pytest.mark.parametrize("more", [{}, {"qk_norm": True, "attention_bias": True}], ids=str)
def test_a_llama_4_head_rotates_neighbouring_channels_and_has_its_own_size_of_the_feed_forward(more, tmp_path):
    torch.manual_seed(4)
    head = make_head(head_dim=8, **more)
    checkpoint = read(tmp_path, *published_by_nvidia_for_llama4(head, None))
    assert checkpoint.config.intermediate_size == head.config.intermediate_size
    loaded, rotate = build_head(checkpoint), Interleaved(head.inv_freq)
    x, positions = torch.randn(1, 5, 32), torch.arange(5)[None]
    one, zero = torch.ones(1, 5, 1, 4), torch.zeros(1, 5, 1, 4)
    q, k, v = head.layers[0].self_attn.heads(x, one, zero)  # turned by nothing
    expected = torch.einsum("bqhd,bkhd->bhqk", rotate(q, positions)[:, :, ::2], rotate(k, positions))
    q, k, values = loaded.layers[0].self_attn.heads(x, *loaded.rotary(positions))
    torch.testing.assert_close(torch.einsum("bqhd,bkhd->bhqk", q[:, :, ::2], k), expected)  # sums of another order
    assert torch.equal(values, v)
    halves = build_head(override(checkpoint, Reading(rope_interleaved=False)))
    assert torch.equal(logits(halves, torch.ones(37, 16)), logits(head, torch.ones(37, 16)))


LLAMA4 = {
    "use_qk_norm norms queries and keys without weights": {"use_qk_norm": True},
    "no_rope_layers names a layer without rotation": {"no_rope_layers": [0]},
}


@pytest.mark.parametrize("message", LLAMA4)
def test_other_layers_of_llama_4_are_refused_by_name(message, tmp_path):
    config, state = published_by_nvidia_for_llama4(make_head(), None)
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, config | LLAMA4[message], state)


def test_rope_of_one_type_of_layer_is_read_and_of_several_only_where_they_agree(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 5e5}
    config, state = published_by_red_hat(make_head(rope_parameters=rope), torch.zeros(37, 16))
    assert read(tmp_path, config, state).config.rope_parameters == rope
    layer = config["transformer_layer_config"]
    layer["rope_parameters"] = {"sliding_attention": rope, "full_attention": rope | {"rope_theta": 1e6}}
    assert read(tmp_path, config, state).config.rope_parameters == rope
    layer["layer_types"] = ["full_attention"]
    assert read(tmp_path, config, state).config.rope_parameters["rope_theta"] == 1e6
    layer["layer_types"] = ["full_attention"]
    layer["rope_parameters"] = {"sliding_attention": rope}
    with pytest.raises(
        CheckpointError, match=r"rope_parameters are of \['sliding_attention'\], the head's layers \['full_attention'\]"
    ):
        read(tmp_path, config, state)


def whole_model(config: dict, state: dict) -> None:
    for name in ("fc.weight", "midlayer.hidden_norm.weight", "d2t", "t2d"):
        del state[name]
    state |= {re_named(name): state.pop(name) for name in list(state)}


def whole_mixture(config: dict, state: dict) -> None:
    whole_model(config, state)
    state |= {"model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(2, 2), "mtp.fc.weight": torch.ones(2, 4)}


def re_named(name: str) -> str:
    return "model." + name.replace("midlayer.", "layers.0.")


def medusa(config: dict, state: dict) -> None:
    state.clear()
    state |= {"0.0.linear.weight": torch.ones(16, 16), "0.1.weight": torch.ones(37, 16)}


def mtp(config: dict, state: dict) -> None:
    state.clear()
    state |= {
        "mtp.fc.weight": torch.ones(16, 32),
        "mtp.pre_fc_norm_hidden.weight": torch.ones(16),
        "mtp.norm.weight": torch.ones(16),
    }


def without_states(config: dict, state: dict) -> None:
    config["eagle_config"] = {"use_aux_hidden_state": False}
    del state["fc.weight"]


def eight_bit(config: dict, state: dict) -> None:
    for name in ("fc.weight", "lm_head.weight"):
        state[name] = state[name].to(torch.float8_e4m3fn)
        state[name + "_scale"] = torch.ones(())


def of_experts(config: dict, state: dict) -> None:
    state["midlayer.mlp.experts.0.up_proj.weight"] = state.pop("midlayer.mlp.up_proj.weight")


OTHERS = {
    r"a language model of its own and no head: .*speculative=draft_model.*--draft-model": whole_model,
    r"a language model of its own": whole_mixture,
    r"Medusa heads, which draft every position from one hidden state.*fastspec train": medusa,
    r"Medusa heads": lambda config, state: config.update({"medusa_num_heads": 4}),
    r"an MTP module, which drafts for the model that it comes with: fastspec.patch\(model, mtp=PATH\)": mtp,
    r"an EAGLE-4 head": lambda config, state: config.update({"architectures": ["LlamaForCausalLMEagle4"]}),
    r"Gemma 4's assistant, which reads the keys and values": lambda config, state: config.update(
        {"model_type": "gemma4_assistant"}
    ),
    r"head without auxiliary hidden states \(use_aux_hidden_state is false\).*reads intermediate layers": without_states,  # noqa: E501
    r"heads without auxiliary hidden states, which fastspec does not run, have none": lambda config, state: state.pop(
        "fc.weight"
    ),
    r"float8_e4m3fn; quantised heads are not supported": eight_bit,
    r"mixture of experts": of_experts,
    r"a ViSpec head, which reads features of images": lambda config, state: state.update(
        {"img_adaptor.query": torch.ones(2, 2, 8)}
    ),
    r"multi-head latent attention": lambda config, state: config.update(
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}
    ),
}


@pytest.mark.parametrize("message", OTHERS)
def test_other_drafting_modules_are_refused_by_their_name_with_the_way_to_go(message, tmp_path):
    config, state = as_eagle3(make_head(), None)
    OTHERS[message](config, state)
    with pytest.raises(CheckpointError, match=message) as raised:
        read(tmp_path, config, state)
    assert "download" not in str(raised.value)


@pytest.mark.parametrize("wrapped", [True, False])
def test_norms_that_vllm_skips_in_eagle_1_heads_are_left_out_and_others_refused(wrapped, tmp_path):
    config, state = (as_vllm if wrapped else as_eagle)(
        make_head(**EAGLE1, draft_vocab_size=37, target_hidden_size=16), torch.ones(37, 16)
    )
    norms = {
        f"{'model.' * wrapped}{name}": torch.ones(16) for name in ("layers.0.input_layernorm.weight", "norm.weight")
    }
    if wrapped:
        checkpoint = read(tmp_path, config, state | norms)
        assert checkpoint.dialect == "vllm" and checkpoint.config.kind == "eagle"
        assert ["norm.weight is left out" in note for note in checkpoint.notes].count(True) == 2
        config["model"]["skip_prenorm"] = False
    with pytest.raises(
        CheckpointError, match=r"EAGLE-1/2 head with norms of its own \(layers\.0\.input_layernorm.*train"
    ):
        read(tmp_path, config, state | norms)


@pytest.mark.parametrize("norms", [("enorm", "hnorm"), ("embed_layernorm", "hidden_layernorm", "lm_head_layernorm")])
def test_eagle_1_heads_with_norms_around_their_layer_are_refused_as_such(norms, tmp_path):
    config, state = as_vllm(make_head(**EAGLE1, draft_vocab_size=37, target_hidden_size=16), torch.ones(37, 16))
    config["model"]["add_para_norm"] = norms[0] == "enorm"
    with pytest.raises(CheckpointError, match=r"EAGLE-1/2 head with norms of its own.*add_para_norm.*EAGLE-3 head"):
        read(tmp_path, config, state | {f"{name}.weight": torch.ones(16) for name in norms})


@pytest.mark.parametrize("named", [True, False])
def test_a_narrow_head_says_what_it_lacks(named, tmp_path):
    config, state = as_specforge(make_head(target_hidden_size=32), None)
    if named:
        config["target_hidden_size"] = 32
    checkpoint = read(tmp_path, config, state)
    assert checkpoint.config.target_hidden_size == 32
    with pytest.raises(CheckpointError, match=r"16 wide and has no embedding.*export it with its embed_tokens\.weight"):
        fitted(checkpoint, Sizes(37, 32, LAYERS, 32), Reading())
    fitted(
        read(tmp_path, config, state | {"embed_tokens.weight": torch.ones(37, 16)}),
        Sizes(37, 32, LAYERS, 32),
        Reading(),
    )


def test_a_target_with_added_tokens_takes_a_head_whose_drafts_are_among_them(tmp_path):
    more, fewer, last = Sizes(40, 16, LAYERS, 16), Sizes(30, 16, LAYERS, 16), "drafts tokens up to"
    head = make_head()
    checkpoint = read(tmp_path, *as_eagle3(head, None))
    assert fitted(checkpoint, more, Reading()).config.vocab_size == 37
    with pytest.raises(CheckpointError, match=last):
        fitted(checkpoint, Sizes(int(head.drafted().max()), 16, LAYERS, 16), Reading())
    fitted(checkpoint, Sizes(int(head.drafted().max()) + 1, 16, LAYERS, 16), Reading())
    with pytest.raises(
        CheckpointError, match="vocabulary of 37, the target's has 2000: use the head made for this target"
    ):
        fitted(checkpoint, Sizes(2000, 16, LAYERS, 16), Reading())
    own = read(tmp_path, *as_speculators(head, torch.ones(37, 16)))
    with pytest.raises(CheckpointError, match=r"no rows for the tokens from 37 on.*own_embedding=False"):
        fitted(own, more, Reading())
    fitted(own, more, Reading(own_embedding=False))
    writer, changes, _ = PUBLISHED["yuhuili, EAGLE-1/2"]
    old = read(tmp_path, *writer(make_head(**changes), torch.ones(37, 16)))
    for sizes in (more, fewer):
        with pytest.raises(CheckpointError, match="whole LM head"):
            fitted(old, sizes, Reading())


@pytest.mark.parametrize("own", [False, True])
def test_a_head_that_was_loaded_fits_the_target_that_it_was_loaded_for(own, tmp_path):
    """With added tokens too, where `patch` takes the module of `load_head`; an embedding without their rows is
    refused."""
    model = tiny_model()
    model.resize_token_embeddings(101, mean_resizing=False)
    made = tiny_head(model, vocab_size=97, draft_vocab_size=40)
    embedding = torch.ones(97, 64)
    write(tmp_path, *as_speculators(made, embedding) if own else as_eagle3(made, embedding))
    head = load_head(tmp_path, model, taps=(0, 1, 2), **({"own_embedding": False} if own else {}))
    fastspec.unpatch(fastspec.patch(model, eagle3=head))
    head.binding = Binding(torch.nn.Embedding(97, 64), None, True)
    with pytest.raises(CheckpointError, match="no rows for the tokens from 97 on"):
        fastspec.patch(model, eagle3=head)


def test_the_embedding_of_a_head_is_kept_or_left_as_asked(tmp_path):
    checkpoint = read(tmp_path, *as_speculators(make_head(), torch.ones(37, 16)))
    assert override(checkpoint, Reading(own_embedding=False)).embedding is None
    assert override(checkpoint, Reading(own_embedding=True)).embedding is checkpoint.embedding
    with pytest.raises(CheckpointError, match="brought no embedding"):
        override(read(tmp_path, *as_eagle3(make_head(), None)), Reading(own_embedding=True))


DTYPES = ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float16))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_a_copy_in_another_dtype_is_a_copy(dtypes):
    wide = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    own, shared = (wide.to(dtype) for dtype in dtypes)
    assert is_copy(own, shared) and not is_copy(own + 1, shared) and not is_copy(own[1:], shared)


def test_a_head_that_nvidia_names_by_boundaries_warns_of_nothing_else(tmp_path):
    head = make_head(input_norm=True, taps=(2, 8, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint = read(tmp_path, *published_by_nvidia(head, None))
    assert checkpoint.assumed is None and checkpoint.config.last_tap_before_norm


def adapter(folder: Path, *modules: str, whole: tuple[str, ...] = ()) -> None:
    """PEFT's file for modules of a model, which ModelOpt writes beside a head that it trained together with them;
    those of `whole` are saved as they are."""
    names = [f"base_model.model.{module}.lora_{each}.weight" for module in modules for each in "AB"]
    names += [f"base_model.model.{module}.weight" for module in whole]
    save_file({name: torch.ones(2, 2) for name in names}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": null}')


def test_an_adapter_for_the_target_beside_a_head_is_told(tmp_path):
    model = tiny_model("llama", num_hidden_layers=7)
    head = tiny_head(model, taps=(2, 3, 4))
    write(tmp_path, *as_specforge(head, None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_head(tmp_path, model)
        assert not inspect_head(tmp_path).notes
    adapter(tmp_path, *(f"model.layers.{layer}.self_attn.q_proj" for layer in range(7)))
    with pytest.warns(UserWarning, match=r"adapter for the target.*PeftModel\.from_pretrained"):
        load_head(tmp_path, model)
    with pytest.warns(UserWarning, match="adapter for the target"):
        fastspec.unpatch(fastspec.patch(model, eagle3=tmp_path))
    assert ["adapter for the target" in note for note in inspect_head(tmp_path, model).notes] == [True]
    model.peft_config = {"default": None}  # as PEFT sets it on the model that an adapter was put into
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_head(tmp_path, model)


def test_an_adapter_for_the_head_itself_in_a_file_of_its_own_is_refused(tmp_path):
    write(tmp_path, *as_eagle3(make_head(), None))
    adapter(tmp_path, "midlayer.self_attn.q_proj", "fc", whole=("lm_head",))
    with pytest.raises(CheckpointError, match=r"PEFT's adapters beside its weights.*merge_and_unload"):
        read_checkpoint(tmp_path)
