"""Generic mode is checked on the model itself before it is relied on, once, and without a trace."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from helpers.generate import free, prompts
from helpers.models import tiny_model
from transformers import (
    GitConfig,
    GitForCausalLM,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    ImageGPTConfig,
    ImageGPTForCausalImageModeling,
)

import fastspec
from fastspec.patches.hf import tree_check
from fastspec.patches.hf.cache import CACHE

SIZES = {"vocab_size": 97, "initializer_range": 0.3}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(tree_check, "_VERDICTS", {})


class Deaf(GPT2LMHeadModel):
    """Stands for classes that make positions of their own from the cache's length."""

    def forward(
        self,
        input_ids: Any = None,
        cache: Any = None,
        past_key_values: Any = None,
        position_ids: Any = None,
        **kwargs: Any,
    ):
        """As of GPT-2, whatever the positions; the cache by either name."""
        return super().forward(input_ids, **{CACHE: past_key_values if cache is None else cache}, **kwargs)


def _deaf(dtype: torch.dtype = torch.float32) -> Any:
    return Deaf(tiny_model("gpt2").config).to(dtype).eval()


def _git() -> Any:
    part = {"num_hidden_layers": 1, "num_attention_heads": 4}
    vision = {**part, "hidden_size": 32, "intermediate_size": 32, "image_size": 32, "patch_size": 16}
    sizes = {**SIZES, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    return GitForCausalLM(GitConfig(**sizes, vision_config=vision, max_position_embeddings=512)).eval()


def _gpt_neo(window: int = 256, kinds: tuple[str, ...] = ("global", "local")) -> Any:
    sizes = {**SIZES, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 1024}
    return GPTNeoForCausalLM(GPTNeoConfig(**sizes, attention_types=[[list(kinds), 1]], window_size=window)).eval()


def _image_gpt() -> Any:
    return ImageGPTForCausalImageModeling(
        ImageGPTConfig(**SIZES, n_embd=64, n_layer=2, n_head=4, n_positions=512)
    ).eval()


@pytest.mark.parametrize("make", [_git, _image_gpt, _deaf, lambda: _deaf(torch.bfloat16)])
def test_a_class_that_reads_positions_or_masks_in_its_own_way_is_refused(make: Any) -> None:
    torch.manual_seed(0)
    model = make()
    for assistant in ("autoregressive", "nasd"):
        with (
            fastspec.patched(model),
            pytest.raises(fastspec.Unsupported, match=f"{type(model).__name__} scores the nodes.* otherwise"),
        ):
            model.generate(**prompts(5, 9), max_new_tokens=8, do_sample=False, assistant=assistant)


@pytest.mark.each_value  # one check reads all of them
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gpt2", "falcon", "jetmoe"])
def test_a_class_that_reads_them_as_given_is_not(kind: str, dtype: torch.dtype) -> None:
    model = fastspec.patch(tiny_model(kind).to(dtype))
    assert model.generate(**prompts(5, 9), max_new_tokens=4, assistant="autoregressive").shape == (2, 13)


@pytest.mark.parametrize(("apart", "texts"), [([0.0], 1), ([0.1, 0.0], 2), ([0.1, 0.2, 0.0], 3), ([0.1, 0.1, 0.1], 3)])
def test_a_text_whose_router_is_undecided_is_not_the_last_one(apart: list[float], texts: int, monkeypatch) -> None:
    """A node that rounding sends to another expert is far off in one text, a class that reads masks in its own way in
    every one."""
    found, seen = [0.0, *apart], []  # the first is of a prompt alone
    monkeypatch.setattr(tree_check, "_apart", lambda got, want, dtype: seen.append(want) or found[len(seen) - 1])
    model = fastspec.patch(tiny_model("gpt2", n_positions=77 + len(apart) + texts + int(10 * apart[-1])))
    options = {**prompts(5), "max_new_tokens": 3, "assistant": "autoregressive"}
    if apart[-1]:
        with pytest.raises(fastspec.Unsupported, match="otherwise"):
            model.generate(**options)
    else:
        model.generate(**options)
    assert len(seen) == 1 + texts and all(
        not torch.equal(one, other) for one, other in itertools.combinations(seen[1:], 2)
    )


def test_a_draft_model_is_checked_too() -> None:
    target = fastspec.patch(tiny_model("llama"), speculative=_deaf())
    with pytest.raises(fastspec.Unsupported, match="Deaf scores the nodes"):
        target.generate(**prompts(5), max_new_tokens=8, assistant="speculative")


def test_an_error_of_the_model_becomes_a_refusal_by_name() -> None:
    class Strict(GPT2LMHeadModel):
        def forward(
            self,
            input_ids: Any = None,
            cache: Any = None,
            past_key_values: Any = None,
            position_ids: Any = None,
            **kwargs: Any,
        ):
            if kwargs["attention_mask"].dim() == 4:
                raise RuntimeError("no such mask")
            return super().forward(
                input_ids, **{CACHE: past_key_values if cache is None else cache}, position_ids=position_ids, **kwargs
            )

    model = fastspec.patch(Strict(tiny_model("gpt2").config).eval())
    with pytest.raises(fastspec.Unsupported, match=r"Strict does not run as fastspec has to run it.*no such mask"):
        model.generate(**prompts(5), max_new_tokens=8, assistant="autoregressive")


@pytest.mark.parametrize("spoiled", ["weights", "forward"])
def test_a_refusal_that_says_nothing_of_the_class_is_not_kept(spoiled: str, monkeypatch) -> None:
    """NaN in one model's weights, or an error that passes: a sound model of the class is decoded with, and so is that
    one once it is whole."""
    broken, sound = (fastspec.patch(tiny_model("gpt2")) for _ in range(2))
    call = {**prompts(5), "max_new_tokens": 4, "assistant": "autoregressive"}
    norm = broken.transformer.ln_f
    with monkeypatch.context() as during:
        if spoiled == "weights":
            norm.weight.data[3] = torch.nan
        else:
            during.setattr(
                "fastspec.patches.hf.model.SlotCache", lambda *_: (_ for _ in ()).throw(RuntimeError("a passing fault"))
            )
        with pytest.raises(
            fastspec.Unsupported,
            match={"weights": "GPT2LMHeadModel gives logits that are NaN"}.get(spoiled, "a passing"),
        ):
            broken.generate(**call)
        if spoiled == "weights":
            sound.generate(**call)
    norm.weight.data[3] = 1.0
    assert torch.equal(broken.generate(**call), sound.generate(**call))


def drop_first(model: Any) -> None:
    model.transformer.h = model.transformer.h[1:]


def shorten_positions(model: Any) -> None:
    model.transformer.wpe.weight = torch.nn.Parameter(model.transformer.wpe.weight[:3].clone())


@pytest.mark.parametrize("change", [drop_first, shorten_positions])
def test_a_refusal_of_one_model_is_not_that_of_another(change) -> None:
    """What someone did to a model is no matter of its class and configuration."""
    changed, sound = (fastspec.patch(tiny_model("gpt2")) for _ in range(2))
    call = {**prompts(5), "max_new_tokens": 4}
    change(changed)
    with pytest.raises(fastspec.Unsupported):
        changed.generate(**call, assistant="nasd")
    assert torch.equal(sound.generate(**call, assistant="nasd"), sound.generate(**call))


def test_the_check_leaves_no_trace() -> None:
    model = fastspec.patch(tiny_model("gpt2"))
    seen: list[Any] = []
    model.transformer.h[1].register_forward_hook(lambda *_: seen.append(1))
    model.transformer.h[0].train()
    model.generation_config.num_beams = 3
    before = [(module, dict(vars(module))) for module in model.modules()]
    tensors = copy.deepcopy(model.state_dict())
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    tree_check.check_trust(model)
    assert tree_check._VERDICTS and not seen
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(vars(module) == held for module, held in before)
    assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())


def test_a_kind_of_model_is_checked_once(monkeypatch) -> None:
    judged: list[Any] = []
    monkeypatch.setattr(tree_check, "_judge", lambda model, reads_source, adapter: judged.append(model) is None)
    for seed in (0, 1):
        model = fastspec.patch(tiny_model("gpt2", seed=seed))
        model.generate(**prompts(5), max_new_tokens=4, assistant="autoregressive")
        model.generate(**prompts(5), max_new_tokens=4, assistant="nasd")
    assert len(judged) == 1
    for other in (tiny_model("gpt2", num_hidden_layers=2), tiny_model("gpt2").to(torch.bfloat16), tiny_model("falcon")):
        fastspec.patch(other).generate(**prompts(5), max_new_tokens=4, assistant="autoregressive")
    assert len(judged) == 4
    fastspec.patch(tiny_model("llama")).generate(**prompts(5), max_new_tokens=4, assistant="autoregressive")
    assert len(judged) == 4  # an adapter is not generic mode


def test_gpt_neo_works_within_its_local_window_and_is_refused_past_it() -> None:
    torch.manual_seed(0)
    model, inputs = _gpt_neo(), prompts(5, 9)
    expected = free(model, inputs)
    with fastspec.patched(model):
        assert free(model, inputs, assistant="nasd") == expected
        with pytest.raises(fastspec.Unsupported, match=r"window of 256 slots.*at most"):
            free(model, inputs, 300, assistant="nasd")
