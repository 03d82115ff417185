"""Under autocast, under torch's global module hooks: the modules' own forward runs, as in plain `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.devices import CUDA
from helpers.generate import SHALLOW, TREE, free, prompts
from helpers.models import tiny_head, tiny_model
from torch.nn.modules import module as modules

import fastspec
from fastspec.generation.tree import TokenTree
from fastspec.patches.hf.factory import language_model

ROWS = prompts(5, 9)
ASSISTANTS = "autoregressive", "nasd", "speculative", TREE


DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])


def _patched(kind: str, device: str = "cpu", **over: Any) -> Any:
    model = tiny_model(kind, **over).to(device)
    draft = tiny_model(kind, seed=1, num_hidden_layers=2).to(device)
    return fastspec.patch(model, speculative=draft, eagle3=tiny_head(model).to(device))


def _rows(device: str) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in ROWS.items()}


@pytest.mark.some("mixtral", "gpt2")
@DEVICES
@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2", "opt"])
def test_fp16_autocast_gives_what_plain_generate_gives(kind: str, device: str) -> None:
    # fp16 rounds at 5e-4, below the gaps between the likeliest tokens of these texts
    model, rows = _patched(kind, device, num_hidden_layers=6), _rows(device)
    with torch.autocast(device, torch.float16):
        expected = free(model, rows)
        for assistant in ASSISTANTS:
            assert free(model, rows, assistant=assistant) == expected
        mode = fastspec.report(model).mode
    assert mode.startswith("generic")
    assert ("autocast" in mode) == (kind in ("llama", "mixtral"))
    assert fastspec.report(model).mode.startswith("adapter" if kind in ("llama", "mixtral") else "generic")


@DEVICES
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "falcon"])
@torch.no_grad()
def test_bf16_autocast_computes_in_bf16(kind: str, device: str) -> None:
    model, ids = tiny_model(kind).to(device), ROWS["input_ids"][1:].to(device)
    exact = model(ids).logits[:, -1]
    with torch.autocast(device, torch.bfloat16):
        plain = model(ids).logits[:, -1].float()
        from fastspec.patches.backends import TORCH

        target = language_model(model, None, rows=1, capacity=20, tail=1, taps=None, ops=TORCH)
        target.prefill(ids[:, :-1], torch.tensor([8], device=device))
        logits, _ = target.score(TokenTree.root_only(ids[:, -1]), 8)
    assert all(kind.k.dtype == kind.v.dtype == model.dtype for kind in target.state.kinds)
    # fp32 within autocast would be as far from bf16 as fp32 outside is; the same roundings in sums of another order are
    # nearer
    apart, rounding = (logits[:, 0].float() - plain).norm(), (exact - plain).norm()
    assert rounding > 0 and apart < 0.8 * rounding


@pytest.mark.some("gpt2", "qwen3_moe")
@pytest.mark.each_value
@DEVICES
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe"])
def test_bf16_autocast_raises_nothing(kind: str, backend: str, device: str) -> None:
    """Heads of every kind included: on a GPU, and with plain torch here, their own products are cast too."""
    model, rows = tiny_model(kind, **SHALLOW).to(device), _rows(device)
    first = tiny_head(model, kind="eagle", taps=(), own_lm_head=False).to(device)
    draft = tiny_model(kind, seed=2, **SHALLOW).to(device)
    fastspec.patch(
        model, eagle3=tiny_head(model).to(device), eagle2=first, eagle=first, speculative=draft, backend=backend
    )
    with torch.autocast(device, torch.bfloat16):
        for assistant in [*ASSISTANTS, "eagle", "eagle2", "speculative"]:
            assert [len(row) for row in free(model, rows, 9, assistant=assistant)] == [9, 9]


@contextmanager
def _halved(before: bool) -> Iterator[list[type]]:
    """With a global hook that halves what comes out of (or goes into) every linear layer."""
    seen: list[type] = []

    def after(module: Any, args: Any, out: Any) -> Any:
        seen.append(type(module))
        return out / 2 if isinstance(module, torch.nn.Linear) else None

    def ahead(module: Any, args: Any) -> Any:
        seen.append(type(module))
        return tuple(arg / 2 for arg in args) if isinstance(module, torch.nn.Linear) else None

    handle = modules.register_module_forward_pre_hook(ahead) if before else modules.register_module_forward_hook(after)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.some("llama", "falcon")
@pytest.mark.each_value
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "falcon"])
def test_global_module_hooks_are_honoured(kind: str, before: bool) -> None:
    model = _patched(kind, **SHALLOW)
    untouched = free(model, ROWS)
    with _halved(before) as seen:
        expected = free(model, ROWS)
        assert expected != untouched
        for assistant in ("autoregressive", "nasd", "speculative"):
            seen.clear()
            assert free(model, ROWS, assistant=assistant) == expected
            assert type(model) in seen
        assert ("global module hooks" in fastspec.report(model).mode) == (kind != "falcon")
    assert free(model, ROWS, assistant="nasd") == untouched


def test_global_module_hooks_refuse_an_encoder_decoder_model_by_name() -> None:
    from helpers.seq2seq import tiny_seq2seq

    model, ids = fastspec.patch(tiny_seq2seq("t5", d_ff=64)), torch.tensor([[7, 8, 9]])  # like no other test's
    with _halved(False), pytest.raises(fastspec.Unsupported, match="hook"):
        model.generate(ids, max_new_tokens=4, assistant="nasd")
    model.base_model._hf_hook = object()  # as accelerate leaves one
    with pytest.raises(fastspec.Unsupported, match="hook"):
        model.generate(ids, max_new_tokens=4, assistant="nasd")
    del model.base_model._hf_hook
    want = model.generate(ids, max_new_tokens=4, do_sample=False).tolist()
    assert model.generate(ids, max_new_tokens=4, do_sample=False, assistant="nasd").tolist() == want
