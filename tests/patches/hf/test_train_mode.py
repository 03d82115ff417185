"""Models in train mode: what a pass adds there at random, dropout above all, assisted calls add too, or say why not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.generate import NEVER, prompts, shallow_model
from helpers.models import tiny_head, tiny_model
from helpers.open import texts, told
from helpers.seq2seq import sources, tiny_seq2seq

import fastspec
from fastspec.patches.hf.families import ADAPTERS
from fastspec.patches.hf.modes import mode_for

CALL: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": NEVER, "pad_token_id": 0}
FAMILIES = sorted(
    set(ADAPTERS)
    & {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "phi",
        "phi3",
        "stablelm",
        "starcoder2",
        "seed_oss",
        "granite",
        "olmo2",
        "gpt_oss",
        "mixtral",
        "glm4_moe",
        "smollm3",
        "nemotron",
    }
)
DROPS = {"attention_dropout": 0.4}
BESIDE = {
    "phi": {"resid_pdrop": 0.3, "embd_pdrop": 0.2},
    "phi3": {"resid_pdrop": 0.3},
    "stablelm": {"hidden_dropout": 0.3},
    "starcoder2": {"residual_dropout": 0.3, "embedding_dropout": 0.2},
    "seed_oss": {"residual_dropout": 0.3},
}
"""Families with dropout of hidden states, which draws as many numbers in an assisted pass as in a plain one."""


def said(model: Any, seed: int, **options: Any) -> list[list[int]]:
    torch.manual_seed(seed)
    found: list[list[int]] = model.generate(**prompts(6), **{**CALL, **options})[:, 6:].tolist()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_with_dropout_in_train_mode_runs_by_its_own_forward(family):
    for sizes in (DROPS, BESIDE.get(family, DROPS)):
        model = tiny_model(family, num_hidden_layers=2, **{"attention_dropout": 0.0, **sizes})
        assert mode_for(model).adapter is not None and "in train mode" in str(mode_for(model.train()).why)


@pytest.mark.some("gemma2", "gpt_oss")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "phi3"])
def test_dropout_of_train_mode_stays_on(family):
    """In generic mode, which is said once; in evaluation mode the adapter runs, and gives plain's tokens."""
    model = tiny_model(family, num_hidden_layers=2, **DROPS)
    expected = said(model, 0)
    fastspec.patch(model.train())
    with pytest.warns(UserWarning, match=r"generic mode.*attention_dropout=0\.4 in the \w+ of a model in train mode"):
        drawn = {str(said(model, seed, assistant="autoregressive")) for seed in range(4)}
    assert len(drawn) > 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert said(model, 0, assistant="nasd") is not None
        model.eval()
        assert mode_for(model).adapter is not None
        assert said(model, 1, assistant="autoregressive") == said(model, 2, assistant="nasd") == expected


@pytest.mark.some("phi", "seed_oss", "starcoder2")
@pytest.mark.parametrize("family", sorted(BESIDE))
def test_dropout_of_hidden_states_is_plain_generates(family):
    """By the same random numbers, so to the same tokens."""
    sizes = {"num_hidden_layers": 2, "attention_dropout": 0.0, **BESIDE[family]}
    plain, model = (tiny_model(family, **sizes).train() for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        fastspec.patch(model)
        found = [said(model, seed, assistant="autoregressive") for seed in range(3)]
    assert found == [said(plain, seed) for seed in range(3)] and found[0] != found[1]


def test_heads_and_draws_run_in_train_mode():
    """What TRL's rollouts do: every assistant, sampled, beside dropout."""
    model = shallow_model(attention_dropout=0.3).train()
    fastspec.patch(model, eagle3=tiny_head(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for assistant in ("autoregressive", "nasd", "eagle3"):
            assert len({str(said(model, seed, assistant=assistant)) for seed in range(4)}) > 1
            assert len(said(model, 0, assistant=assistant, do_sample=True)[0]) == 10
    assert "dropout" in fastspec.report(model).mode


def test_train_mode_without_noise_keeps_the_adapter():
    """TRL's default for most families: no dropout to honour, and the fast way."""
    model = shallow_model()
    expected = said(model, 0)
    fastspec.patch(model.train())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert mode_for(model).adapter is not None and said(model, 0, assistant="nasd") == expected


def test_the_noise_of_a_router_is_noise_too():
    model = tiny_model("mixtral", num_hidden_layers=2, router_jitter_noise=0.2)
    assert mode_for(model).adapter is not None
    assert "jitter_noise=0.2" in str(mode_for(model.train()).why)


def test_an_open_batch_sees_that_the_model_went_into_train_mode():
    model = fastspec.patch(shallow_model(attention_dropout=0.5))
    [ids] = texts(6)
    with fastspec.continuous(model, "autoregressive", rows=2) as batch, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        still = told([batch.submit(ids, **CALL) for _ in range(3)])
        model.train()
        noisy = [told([batch.submit(ids, **CALL)])[0] for _ in range(4)]
        model.eval()
        again = told([batch.submit(ids, **CALL)])
    assert len(set(map(str, still))) == 1 and len(set(map(str, noisy))) > 1 and again == still[:1]


def test_an_encoder_decoder_model_is_refused_by_name():
    model = fastspec.patch(tiny_seq2seq("bart", dropout=0.1))
    call = {**sources(5), "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**call)
    with pytest.raises(
        fastspec.Unsupported, match=r"dropout=0\.1 in the \w+ of this BartFor.* in train mode.*model\.eval\(\)"
    ):
        model.train().generate(**call, assistant="nasd")
    assert torch.equal(model.eval().generate(**call, assistant="nasd"), expected)


@pytest.mark.parametrize(("family", "loses"), [("gpt2", True), ("gpt_neox", False), ("llama", False)])
def test_gradient_checkpointing_that_leaves_the_cache_out_is_refused(family, loses):
    """Where the decoder's own forward reads the switch; transformers' layers ask for gradients too."""
    model = fastspec.patch(shallow_model(family)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    want = said(model.eval(), 0)
    switches = [each for each in model.train().modules() if hasattr(each, "gradient_checkpointing")]
    for each in switches:
        each.gradient_checkpointing = True
    for assistant in ("autoregressive", "nasd"):
        if loses:
            with pytest.raises(fastspec.Unsupported, match="leaves its cache out under gradient checkpointing"):
                said(model, 0, assistant=assistant)
        else:
            assert said(model, 0, assistant=assistant) == want
    for each in switches:
        each.gradient_checkpointing = False
    assert said(model, 0, assistant="nasd") == want
