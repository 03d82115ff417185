"""Heads for a model: found, checked against it, bound, inspected, probed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.heads import BASE, as_speculators, logits, make_head, write
from helpers.models import tiny_head, tiny_model
from helpers.training import save_with_tokenizer
from typer.testing import CliRunner

from fastspec.errors import CheckpointError
from fastspec.generation.heads.bound import BoundHead, followed
from fastspec.generation.heads.module import EagleHead
from fastspec.patches.assistants import heads as heads_module
from fastspec.patches.assistants.heads import find_head, inspect_head, load_head, parts_of, scaled_rope
from fastspec.patches.assistants.probe import ProbeRow, _causal, probe_head
from fastspec.programs.cli.app import app
from fastspec.programs.cli.heads import verdict


@pytest.fixture
def make_target():
    """The factory of tiny Llamas that `fitting` heads fit."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    return lambda **changes: tiny_model("llama", **{**sizes, **changes})


def fitting(**changes) -> EagleHead:
    return make_head(**{"hidden_size": 32, "target_hidden_size": 32, "vocab_size": 97, "taps": (1, 2, 3), **changes})


def test_load_head_shares_the_target_s_embedding_unless_the_head_s_differs(tmp_path, make_target):
    target, head = make_target(), fitting()
    same = target.get_input_embeddings().weight.detach().clone()
    loaded = load_head(write(tmp_path, *as_speculators(head, same)), target)
    assert loaded.bound.embedding is target.get_input_embeddings()
    assert torch.equal(logits(loaded, same), logits(head, same))
    loaded = load_head(write(tmp_path, *as_speculators(head, same + 1)), target)
    assert torch.equal(loaded.bound.embedding.weight, same + 1)
    narrow, own = fitting(hidden_size=16), torch.randn(97, 16)
    loaded = load_head(write(tmp_path, *as_speculators(narrow, own)), target)
    assert torch.equal(loaded.bound.embedding.weight, own)


def test_load_head_takes_the_target_s_dtype_and_keeps_fp32_frequencies(tmp_path, make_target):
    target = make_target().to(torch.bfloat16)
    loaded = load_head(write(tmp_path, *as_speculators(fitting(), torch.zeros(97, 32))), target, rope_theta=500.0)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert loaded.inv_freq.dtype == torch.float32
    assert loaded.config.rope_parameters["rope_theta"] == 500.0


def test_load_head_takes_a_module_as_it_is(make_target):
    target, head = make_target(), fitting()
    bound = load_head(head, target)
    assert all(a is b for a, b in zip(bound.parameters(), head.parameters(), strict=True))
    assert bound.bound.embedding is target.get_input_embeddings()
    with pytest.raises(CheckpointError, match=r"call head\.to"):
        load_head(fitting().to(torch.float16), target)
    with pytest.raises(CheckpointError, match="vocabulary of 2000"):
        load_head(fitting(vocab_size=2000), target)


@pytest.mark.parametrize("source", ["./nowhere", "nowhere", "/no/where", Path("no/where")])
def test_a_source_that_is_nowhere_is_refused(source):
    with pytest.raises(CheckpointError, match="no directory, and no hub id"):
        find_head(source)


def test_a_head_of_a_package_is_found_by_name_and_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(heads_module, "HEADS", ("some-head", "far-head"))
    monkeypatch.setattr(heads_module, "PACKAGE", "some_package")
    (tmp_path / "some_package" / "some-head").mkdir(parents=True)
    (tmp_path / "some_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_head("some-head") == tmp_path / "some_package" / "some-head"
    with pytest.raises(CheckpointError, match=r"heads that have a name: some-head, far-head$"):
        find_head("other-head")
    monkeypatch.setattr(heads_module, "PACKAGE", "far_package")
    command = rf"pip install \./packages/{heads_module.DISTRIBUTION}"
    with pytest.raises(CheckpointError, match=rf"which is not installed: in a checkout of fastspec, {command}"):
        find_head("far-head")
    with pytest.raises(CheckpointError, match=rf"heads that have a name: some-head, far-head \({command}\)"):
        find_head("other-head")


def test_a_head_that_was_removed_says_where_it_is():
    with pytest.raises(CheckpointError, match="commit `c0f133b`"):
        find_head("smollm2-135m-instruct-wide")


def test_a_hub_that_does_not_answer_is_refused(monkeypatch):
    def refuse(*args, **kwargs):
        raise heads_module.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(heads_module, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=r"the hub does not give it \(offline\)"):
        find_head("owner/name")


ROPES = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"factor": 2.0},
    "linear": {"factor": 2.0},
}


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rope_is_transformers_own(kind, tmp_path, make_target):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    target = make_target(rope_parameters={"rope_type": kind, "rope_theta": 5e5, **ROPES[kind]})
    config, state = as_speculators(fitting(head_dim=8), torch.zeros(97, 32))
    config["transformer_layer_config"] |= {
        "rope_scaling": {"type": kind, **ROPES[kind]},
        "rope_theta": 5e5,
        "max_position_embeddings": 512,
    }
    loaded = load_head(write(tmp_path, config, state), target)
    expected = LlamaRotaryEmbedding(target.config)
    assert torch.equal(loaded.inv_freq, expected.inv_freq)
    assert loaded.rope_scale == expected.attention_scaling


def test_a_rope_type_that_nobody_knows_is_refused():
    with pytest.raises(CheckpointError, match="rope_type is 'odd'; accepted are default"):
        scaled_rope(replace(BASE, rope_parameters={"rope_type": "odd", "rope_theta": 1.0}))
    with pytest.raises(CheckpointError, match=r"'dynamic' is incomplete.*factor"):
        scaled_rope(replace(BASE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}))


def test_inspect_says_how_each_switch_was_decided(tmp_path, make_target):
    head = fitting(norm_before_residual=True)
    config, state = as_speculators(head, torch.zeros(97, 32))
    del config["norm_before_residual"]
    write(tmp_path, config | {"auto_map": {"AutoModel": "evil.Model"}}, state)
    report = inspect_head(tmp_path, make_target())
    rows = report.rows()
    assert ("norm_before_residual", "True (absent, default of speculators)") in rows
    assert ("fits the target", "yes") in rows
    assert any("never executed" in note for note in report.notes)
    misfit = inspect_head(tmp_path, make_target(vocab_size=65).config)
    last = int(head.drafted().max())
    reason = f"it drafts tokens up to {last}: use the head made for this target"
    assert misfit.misfits == (f"the head was made for a vocabulary of 97, the target's has 65, and {reason}",)


def test_probe_measures_every_reading(tmp_path, make_target):
    torch.manual_seed(5)
    target, head = (
        make_target(),
        fitting(draft_vocab_size=97, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    )
    embedding = target.get_input_embeddings().weight.detach()
    write(tmp_path, *as_speculators(head, embedding.clone()))
    prompt = torch.tensor([[1, 5, 9, 11]])
    rows = probe_head(tmp_path, target, prompt)
    assert len(rows) == 2 * 3 * 2 * 2
    assert [row.score for row in rows] == sorted((row.score for row in rows), reverse=True)
    declared = next(row for row in rows if row.declared)
    assert (declared.taps, declared.rope_theta, declared.norm_before_residual) == ((1, 2, 3), 500.0, False)
    assert load_head(tmp_path, target, **rows[0].overrides()).config.taps == rows[0].taps

    ids = target.generate(prompt, max_new_tokens=64, do_sample=False)
    head.bind(target.get_input_embeddings(), None)
    hits, later = [], []
    with torch.no_grad():
        out = target(ids, output_hidden_states=True)
        features = torch.cat([out.hidden_states[i] for i in (1, 2, 3)], -1)
        for t in range(2, ids.shape[1] - 1):  # draft from tokens up to t + 1 what the target picks after them
            positions = torch.arange(t + 1)[None]
            cache = {}

            def attend(layer, q, k, v, cache=cache):  # a cache of the pairs so far, as drafting has it
                k, v = (
                    torch.cat((cache[name], new), 1) if name in cache else new for name, new in (("k", k), ("v", v))
                )
                cache |= {"k": k, "v": v}
                return _causal(layer, q, k, v) if q.shape[1] > 1 else attend_one(q, k, v)

            hidden = head.step(ids[:, 1 : t + 2], head.fuse(features[:, : t + 1]), positions, attend)
            hits.append(
                int(head.to_target(head.logits(hidden[:, -1]).argmax(-1))) == int(out.logits[0, t + 1].argmax())
            )
            if t + 2 == ids.shape[1]:
                break
            on = head.step(ids[:, t + 2 : t + 3], hidden[:, -1:], positions[:, -1:] + 1, attend)
            later.append(int(head.to_target(head.logits(on[:, -1]).argmax(-1))) == int(out.logits[0, t + 2].argmax()))
    assert declared.tokens == len(hits)
    assert declared.agreement == pytest.approx(sum(hits) / len(hits))
    assert declared.second == pytest.approx(sum(later) / len(later))


def attend_one(q, k, v):
    """Attention of one query [B, 1, Hq, D] over all keys [B, T, Hkv, D]."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    weights = (torch.einsum("bqhd,bthd->bhqt", q, k) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("bhqt,bthd->bqhd", weights, v)


def test_one_head_on_two_models_reads_each_models_own_embedding_and_stays_as_it_was() -> None:
    first, second = tiny_model(seed=1), tiny_model(seed=2)
    head = tiny_head(first)
    dtype = head.fc.weight.dtype
    heads = [load_head(head, model) for model in (first, second)]
    for bound, model in zip(heads, (first, second), strict=True):
        assert bound.binding.embedding is model.get_input_embeddings()
        assert bound.fc.weight is head.fc.weight
    cast = followed(BoundHead.of(heads[1]), parts_of(second.to(torch.float64)))
    assert cast.module.fc.weight.dtype == torch.float64 and head.fc.weight.dtype == dtype
    assert cast.binding.embedding is second.get_input_embeddings() and head.binding is None


VERDICTS = (
    (0.70, 0.66, "read it as declared (66% of 64 drafts are the target's, 66% of those after them)"),
    (0.70, 0.30, "fastspec.load_head('heads/x', model, rope_theta=1e4, norm_before_residual=True))"),
    (0.15, 0.02, "no reading drafts well (15% at best): this head was trained for another target, too little, or"),
)


@pytest.mark.parametrize(("best", "declared", "words"), VERDICTS)
def test_a_verdict_follows_the_probe(best, declared, words):
    found = {"taps": (1, 2, 3), "tokens": 64, "norm_output": False}
    rows = [
        ProbeRow(rope_theta=1e4, norm_before_residual=True, agreement=best, second=best, declared=False, **found),
        ProbeRow(
            rope_theta=5e5, norm_before_residual=False, agreement=declared, second=declared, declared=True, **found
        ),
    ]
    assert words.replace("1e4", "10000.0") in verdict("heads/x", rows)


def test_a_verdict_names_the_state_fed_back_where_the_second_step_alone_tells():
    found = {"rope_theta": 1e5, "taps": (2, 15, 27), "norm_before_residual": False, "agreement": 0.492, "tokens": 65}
    rows = [
        ProbeRow(norm_output=True, second=0.391, declared=False, **found),
        ProbeRow(norm_output=False, second=0.172, declared=True, **found),
    ]
    assert "fastspec.load_head('heads/x', model, norm_output=True))" in verdict("heads/x", rows)


def test_inspect_prints_the_verdict_behind_the_readings(tmp_path, make_target):
    target, head = make_target(), fitting()
    save_with_tokenizer(target, tmp_path / "target")
    (tmp_path / "head").mkdir()
    write(tmp_path / "head", *as_speculators(head, target.get_input_embeddings().weight.detach().clone()))
    arguments = [
        "inspect",
        str(tmp_path / "head"),
        "--target",
        str(tmp_path / "target"),
        "--probe",
        "--probe-prompt",
        "w9 w12",
    ]
    done = CliRunner().invoke(app, [*arguments, "--device", "cpu"], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "as declared" in done.output.split("verdict:")[0] and "draft" in done.output.split("verdict:")[1]
