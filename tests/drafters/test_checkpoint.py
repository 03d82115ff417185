"""Drafting heads on disk: every dialect reads back as the head that was written, and whatever is wrong is refused by
name."""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.examples import examples
from helpers.heads import DIALECTS, LAYERS, as_eagle3, as_speculators, logits, make_head, write
from helpers.pages import ROOT
from hypothesis import given
from hypothesis import strategies as st

from fastspec.errors import CheckpointError
from fastspec.generation.heads import dialects
from fastspec.generation.heads.bound import Sizes
from fastspec.generation.heads.load import Reading, build_head, fitted, override, read_checkpoint, with_taps


@pytest.fixture
def written(tmp_path):
    """A plain EAGLE-3 head as (folder, config, state), to damage."""
    torch.manual_seed(3)
    config, state = as_eagle3(make_head(), None)
    return write(tmp_path, config, state), config, state


@pytest.mark.parametrize("form", ["safetensors", "bin", "safetensors-sharded", "bin-sharded"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_dialect_reads_back_as_the_head_that_was_written(dialect, form, tmp_path):
    torch.manual_seed(1)
    as_dialect, changes = DIALECTS[dialect]
    head = make_head(**changes)
    if head.config.kind == "eagle":
        head.d2t.zero_()
    embedding = torch.randn(head.config.vocab_size, head.config.hidden_size)
    checkpoint = with_taps(read_checkpoint(write(tmp_path, *as_dialect(head, embedding), form)), LAYERS)
    assert checkpoint.dialect == dialect
    assert checkpoint.config == replace(head.config, rope_parameters=checkpoint.config.rope_parameters)
    assert checkpoint.config.rope_parameters == head.config.rope_parameters
    assert (checkpoint.embedding is not None) == (dialect in ("speculators", "deepspec"))
    assert checkpoint.num_parameters == sum(p.numel() for p in head.parameters())
    loaded = build_head(checkpoint)
    assert torch.equal(loaded.d2t, head.d2t)
    assert torch.equal(logits(loaded, embedding), logits(head, embedding))


def test_every_dialect_has_a_writer_and_a_line_of_the_page():
    page = (ROOT / "docs/train/formats.md").read_text(encoding="utf-8")
    assert {*dialects.DIALECTS} == {*DIALECTS, dialects.OWN}
    assert [name for name in dialects.DIALECTS if f"\n| `{name}` | " not in page] == []


@examples(25)
@given(data=st.data())
def test_sizes_and_flags_survive_the_round_trip(data):
    draw, heads = data.draw, data.draw(st.sampled_from([1, 2, 3]))
    vocab, hidden = draw(st.sampled_from([7, 63, 65])), draw(st.sampled_from([6, 12]))
    norm = draw(st.sampled_from(["fc_norm", "input_norm", None]))
    flags = {
        name: draw(st.booleans())
        for name in ("attention_bias", "mlp_bias", "fc_bias", "qk_norm", "norm_before_residual", "norm_output")
    }
    changes = flags | ({norm: True} if norm else {})
    head = make_head(
        **changes,
        hidden_size=hidden,
        intermediate_size=draw(st.sampled_from([1, 7])),
        num_key_value_heads=heads,
        num_attention_heads=heads * draw(st.sampled_from([1, 2])),
        head_dim=draw(st.sampled_from([2, 4, 10])),
        vocab_size=vocab,
        draft_vocab_size=draw(st.integers(1, vocab)),
        target_hidden_size=draw(st.sampled_from([hidden, 10])),
        num_hidden_layers=draw(st.sampled_from([1, 2])),
        taps=tuple(sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=4)))),
    )
    embedding = torch.randn(vocab, hidden)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = read_checkpoint(write(Path(folder), *as_speculators(head, embedding)))
    assert checkpoint.config == head.config
    assert torch.equal(logits(build_head(checkpoint), embedding), logits(head, embedding))


def test_the_target_s_lm_head_serves_a_head_without_one(written):
    folder, config, _ = written
    state = as_eagle3(make_head(draft_vocab_size=37), None)[1]
    for key in ("lm_head.weight", "d2t", "t2d"):
        del state[key]
    write(folder, config | {"draft_vocab_size": None}, state)
    checkpoint = with_taps(read_checkpoint(folder), LAYERS)
    assert not checkpoint.config.own_lm_head
    assert build_head(checkpoint).lm_head is None


def test_qwen2_layers_have_no_bias_on_the_output_projection(written):
    folder = written[0]
    config, state = as_eagle3(make_head(attention_bias=True), None)
    del state["midlayer.self_attn.o_proj.bias"]
    write(folder, config, state)
    assert not build_head(with_taps(read_checkpoint(folder), LAYERS)).layers[0].self_attn.o_proj.bias.any()
    del state["midlayer.self_attn.k_proj.bias"]
    write(folder, config, state)
    with pytest.raises(CheckpointError, match=r"missing layers\.0\.self_attn\.k_proj\.bias"):
        read_checkpoint(folder)


def with_nan(state):
    state["fc.weight"][0, 0] = float("nan")


def with_repeated_ids(state):
    state["d2t"][1] = state["d2t"][0] - 1


def with_ids_past_the_end(state):
    state["d2t"][-1] = 37


def with_the_first_id_past_the_end(state):
    state["d2t"][-1] = 37 - (len(state["d2t"]) - 1)


def with_wrong_t2d(state):
    state["t2d"] = ~state["t2d"]


def with_one_more_in_t2d(state):
    state["t2d"][(~state["t2d"]).nonzero()[0]] = True


def misnamed(state):
    state["midlayer.mlp.gate.weight"] = state.pop("midlayer.mlp.gate_proj.weight")


DAMAGE = {
    "fc.weight contains NaN": with_nan,
    "do not increase at draft id 1": with_repeated_ids,
    "vocabulary has 37": with_ids_past_the_end,
    "to 37, the vocabulary has 37": with_the_first_id_past_the_end,
    "disagrees with t2d": with_wrong_t2d,
    "it disagrees with t2d": with_one_more_in_t2d,
    r"missing layers\.0\.mlp\.gate_proj\.weight; unknown layers\.0\.mlp\.gate\.weight": misnamed,
    r"missing d2t, which says which \d+ of the target's 37 tokens .*target id - draft id": lambda state: [
        state.pop(name) for name in ("d2t", "t2d")
    ],
    r"missing layers\.0\.hidden_norm\.weight": lambda state: state.pop("midlayer.hidden_norm.weight"),
    r"norm\.weight has shape \[15\] where config.json wants \[16\]": lambda state: state.update(
        {"norm.weight": torch.ones(15)}
    ),
    r"int8; quantised": lambda state: state.update({"fc.weight": state["fc.weight"].to(torch.int8)}),
    r"lm_head\.weight has shape \[\]": lambda state: state.update({"lm_head.weight": torch.ones(())}),
    "fc.weight is missing": lambda state: state.pop("fc.weight"),
    "two keys mean": lambda state: state.update({"model.norm.weight": state["norm.weight"].clone()}),
    "multi-head latent attention": lambda state: state.update({"midlayer.self_attn.kv_b_proj.weight": torch.ones(2)}),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_weights_are_refused_by_name(message, written):
    folder, config, state = written
    DAMAGE[message](state)
    write(folder, config, state)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder)


@pytest.mark.parametrize("extra", [1, 3, 4])
def test_rows_of_signals_that_drafting_does_not_use_are_cut_off(extra, written):
    folder, config, state = written
    whole = state["fc.weight"]
    state["fc.weight"] = torch.cat((whole, torch.ones(extra, whole.shape[1])))
    write(folder, config | {"architectures": ["Eagle3LlamaForCausalLM"]}, state)
    if extra == 4:
        with pytest.raises(CheckpointError, match=r"fc\.weight has shape"):
            read_checkpoint(folder)
        return
    read = read_checkpoint(folder)
    assert torch.equal(read.state["fc.weight"], whole) and f"{extra} extra output row" in " ".join(read.notes)


def test_scales_of_a_cache_alone_are_left_out(written):
    """As llm-compressor and ModelOpt write them beside plain weights."""
    folder, config, state = written
    names = ["midlayer.self_attn.k_scale", "midlayer.self_attn.v_proj.v_scale"]
    write(folder, config, state | {name: torch.ones(shape) for name, shape in zip(names, ((), (1,)), strict=True)})
    read = read_checkpoint(folder)
    assert not [name for name in read.state if "scale" in name]
    assert "layers.0.self_attn.k_scale, layers.0.self_attn.v_proj.v_scale is left out" in " ".join(read.notes)


def test_what_sections_rotation_by_images_leaves_no_trace(written):
    folder, config, state = written
    rope = {"rope_type": "mrope", "rope_theta": 1e6, "mrope_section": [1, 1, 2], "mrope_interleaved": True}
    write(folder, config | {"rope_parameters": rope}, state)
    assert read_checkpoint(folder).config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


CONFIGS = {
    "sliding_attention, 64 tokens": {"layer_types": ["sliding_attention"], "sliding_window": 64},
    "linear_attention": {"layer_types": ["linear_attention"]},
    "hidden_act is 'gelu'": {"hidden_act": "gelu"},
    "use_aux_hidden_state is false": {"eagle_config": {"use_aux_hidden_state": False}},
    "3 layer numbers are expected": {"eagle_aux_hidden_state_layer_ids": [2, 6]},
    "no norm before its LM head": {"eagle_config": {"use_last_layernorm": False}},
    "speculators_model_type is 'mlp'": {"speculators_model_type": "mlp"},
    "hidden_size is None": {"hidden_size": None},
    "num_attention_heads is 'many'": {"num_attention_heads": "many"},
    "multiple of num_key_value_heads": {"num_key_value_heads": 3},
    "rope_theta is -1; expected a positive number": {"rope_theta": -1},
    "missing fc_norm.0.weight": {"fc_norm": True},
}


@pytest.mark.parametrize("message", CONFIGS)
def test_configs_that_cannot_be_run_are_refused_by_name(message, written):
    folder, config, state = written
    write(folder, config | CONFIGS[message], state)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder)


FIELDS = [
    "architectures",
    "auto_map",
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "fc_norm",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "layer_types",
    "max_position_embeddings",
    "model",
    "model_type",
    "norm_before_residual",
    "norm_output",
    "num_hidden_layers",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "speculators_model_type",
    "target_hidden_size",
    "transformer_layer_config",
    "vocab_size",
]
SCALARS = (
    st.none() | st.booleans() | st.integers(-2, 40) | st.floats() | st.sampled_from(["", "eagle", "yarn", "mistral"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FIELDS, "factor", "type"]), inner),
)


@examples(100)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3))
def test_no_config_makes_reading_fail_otherwise(changes):
    config, state = as_eagle3(make_head(), None)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), config | changes, state)
        try:
            checkpoint = read_checkpoint(Path(folder))
        except CheckpointError as error:
            assert folder in str(error)
        else:
            assert build_head(override(checkpoint, Reading(taps=(2, 6, 9)))).config.hidden_size == 16


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_truncated_files_are_refused(form, keep, tmp_path):
    write(tmp_path, *as_eagle3(make_head(), None), form)
    path = next(tmp_path.glob(f"*.{form}"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        read_checkpoint(tmp_path)


class Payload:
    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickled_code_is_refused_and_not_executed(written):
    folder, _, state = written
    (folder / "model.safetensors").unlink()
    payload = Payload()
    payload.path = str(folder / "executed")
    torch.save(state | {"extra": payload}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="never executes"):
        read_checkpoint(folder)
    assert not (folder / "executed").exists()


def test_missing_files_are_refused(written):
    folder, config, state = written
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds 0 weight files"):
        read_checkpoint(folder)
    write(folder, config, state, "safetensors-sharded")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002.* is missing"):
        read_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"fc.weight": "../outside.safetensors"}})
    )
    with pytest.raises(CheckpointError, match="beside their index"):
        read_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="JSON"):
        read_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        read_checkpoint(folder)


def test_taps_left_to_the_target_s_depth(written):
    checkpoint = read_checkpoint(written[0])
    assert not checkpoint.taps_known
    assert with_taps(checkpoint, 32).config.taps == (2, 16, 29)
    with pytest.raises(CheckpointError, match="at least 7 layers, not 6"):
        with_taps(checkpoint, 6)
    with pytest.raises(CheckpointError, match="names no taps"):
        build_head(checkpoint)
    assert override(checkpoint, Reading(taps=(0, 1, 2))).taps_known
    with pytest.raises(CheckpointError, match="reads 3 layers"):
        override(checkpoint, Reading(taps=(0, 1)))


def test_a_head_of_other_sizes_does_not_fit(written):
    checkpoint = read_checkpoint(written[0])
    fitted(checkpoint, Sizes(37, 16, LAYERS, 16), Reading())
    with pytest.raises(
        CheckpointError, match=r"size 16, the target's have size 32.*vocabulary of 37, the target's has 3700"
    ):
        fitted(checkpoint, Sizes(3700, 32, LAYERS, 32), Reading())
    with pytest.raises(CheckpointError, match=r"taps hidden_states\[2, 6, 9\], the target has 8 layers"):
        fitted(checkpoint, Sizes(37, 16, 8, 16), Reading(taps=(2, 6, 9)))
    fitted(checkpoint, Sizes(37 + 1024, 16, LAYERS, 16), Reading())
    with pytest.raises(CheckpointError, match=r"vocabulary of 37, the target's has 1062"):
        fitted(checkpoint, Sizes(37 + 1025, 16, LAYERS, 16), Reading())


def test_an_embedding_of_its_own_must_have_the_added_tokens(tmp_path):
    head = make_head()
    checkpoint = read_checkpoint(write(tmp_path, *as_speculators(head, torch.randn(37, 16))))
    with pytest.raises(CheckpointError, match=r"no rows for the tokens from 37 on"):
        fitted(checkpoint, Sizes(38, 16, LAYERS, 16), Reading())
    assert fitted(checkpoint, Sizes(38, 16, LAYERS, 16), Reading(own_embedding=False)).own_embedding is None
