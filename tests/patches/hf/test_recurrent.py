"""Models most of whose layers keep a recurrent state: assisted calls give what the unpatched model gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.devices import CUDA
from helpers.families import recurrent
from helpers.generate import Oracle, OwnProcessor, conversation, free, prompts
from helpers.models import tiny_head, tiny_model

import fastspec
from fastspec import Unsupported
from fastspec.generation.tree import TokenTree
from fastspec.patches.hf.cache import kept_cache

NEW = 16
ROWS = prompts(5, 11)
KINDS = "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"


class Branches(Oracle):
    """Trees whose last branch is right for the rows that it knows: siblings that are rejected stand between a node and
    its parent."""

    name, nodes, max_path = "branches", 13, 5

    def propose(self, extent: int) -> TokenTree:
        rows, parents = [], [0, *([0] * 3), *([3] * 3), *([6] * 3), *([9] * 3)]
        for row, place in enumerate(self.place.tolist()):
            ahead = (self.texts[row][place : place + 4] + [7] * 4)[:4]
            right = [token if row in self.known else (token + 1) % 97 for token in ahead]
            rows.append([each for token in right for each in ((token + 2) % 97, (token + 3) % 97, token)])
        return TokenTree.from_parents(
            torch.cat((self.root[:, None], torch.tensor(rows)), 1), torch.tensor(parents).expand(len(rows), -1)
        )


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_models_give_the_same_tokens(kind: str, device: str) -> None:
    model, inputs = recurrent(kind).to(device), {name: each.to(device) for name, each in ROWS.items()}
    expected = free(model, inputs, NEW)
    fastspec.patch(model, speculative=tiny_model(num_hidden_layers=2).to(device), eagle3=tiny_head(model).to(device))
    tree = fastspec.Eagle3(depth=4, top_k=4, total_tokens=16)
    for assistant in ("autoregressive", "nasd", fastspec.Speculative(gamma=3, branches=3), tree):
        assert free(model, inputs, NEW, assistant=assistant) == expected, assistant
    assert f"adapter {kind}" in str(fastspec.report(model))


@pytest.mark.each_value  # a state is committed alike, whatever tree was walked
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("assistant", [Oracle, Branches])
def test_what_was_accepted_is_in_the_state_and_what_was_rejected_is_not(kind: str, assistant: type[Oracle]) -> None:
    model = recurrent(kind)
    expected = free(model, ROWS, NEW)
    texts = [row[-NEW:] for row in expected]
    fastspec.patch(model)
    for known in ({0, 1}, {1}, set()):
        assert free(model, ROWS, NEW, assistant=assistant(texts, known)) == expected, known
        accepted = fastspec.report(model).last.acceptance_length
        assert accepted > 1.4 if known else accepted == 1


@pytest.mark.parametrize("doubled", [True, False])
def test_eigenvalues_are_negative_where_the_configuration_says_so(doubled: bool) -> None:
    options = {
        "max_new_tokens": 2,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    model = recurrent("olmo_hybrid", linear_allow_neg_eigval=doubled)
    otherwise = recurrent("olmo_hybrid", linear_allow_neg_eigval=not doubled)
    plain, other = (torch.stack(each.generate(**ROWS, **options).logits) for each in (model, otherwise))
    with fastspec.patched(model):
        got = torch.stack(model.generate(**ROWS, **options, assistant="autoregressive").logits)
    # As in test_recurrent_forms.py: three orders of a sum are at most 0.01 apart.
    assert float((got - plain).abs().max()) < 0.01 < 0.1 < float((other - plain).abs().max())


def test_prompts_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a prompt and the systems of tokens within them end anywhere in the shorter row."""
    monkeypatch.setattr("fastspec.generation.target.NARROW", 7)
    monkeypatch.setattr("fastspec.kernels.recurrent.reference.CHUNK", 4)
    model, inputs = recurrent(), prompts(3, 9, 23)
    expected = free(model, inputs, 6)
    fastspec.patch(model)
    for assistant in ("autoregressive", fastspec.ContinuousBatch("nasd", rows=2)):
        assert free(model, inputs, 6, assistant=assistant) == expected


@pytest.mark.each_value
@pytest.mark.parametrize("lengths", [(5,), (5, 11)])
@pytest.mark.parametrize(
    "options", [{}, {"eos_token_id": list(range(0, 97, 9))}, {"logits_processor": [OwnProcessor()]}]
)
def test_turns_go_on_from_a_cache(lengths: tuple[int, ...], options: dict[str, Any]) -> None:
    """The cache that a call leaves, and what the next says behind it, where rows end anywhere in a round or before the
    others."""
    model = recurrent()
    expected = texts_and_states(model, lengths, [options] * 3)
    fastspec.patch(model)
    widths = [max(lengths), *(len(texts[0]) + 3 for texts, _ in expected)]
    oracles = [
        Branches([text[width:] for text in texts], set(range(len(lengths))))
        for (texts, _), width in zip(expected, widths, strict=False)
    ]
    for first, last in (("nasd", "nasd"), (oracles[0], oracles[2])):
        turns = [{**options, "assistant": first}, options, {**options, "assistant": last}]
        found = texts_and_states(model, lengths, turns)
        for (text, cache), (wanted, wanted_cache) in zip(found, expected, strict=True):
            assert text == wanted
            for mine, theirs in zip(cache, wanted_cache, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def texts_and_states(model: Any, lengths: tuple[int, ...], turns: list[dict[str, Any]]) -> list[Any]:
    """Texts and the cache's tensors after each turn."""
    found = []
    for out in conversation(model, prompts(*lengths), turns):
        layers = kept_cache(out).layers
        held = [(layer.conv_states[0], layer.recurrent_states[0]) for layer in layers if hasattr(layer, "conv_states")]
        held += [(layer.keys, layer.values) for layer in layers if hasattr(layer, "keys")]
        found.append((out.sequences.tolist(), [each.clone() for pair in held for each in pair]))
    return found


def test_sampling_draws_what_plain_sampling_draws() -> None:
    model = recurrent()
    fastspec.patch(model)
    drawn = []
    for assistant in ("autoregressive", "nasd"):
        torch.manual_seed(3)
        drawn.append(
            model.generate(
                **ROWS, max_new_tokens=8, do_sample=True, assistant=assistant, eos_token_id=None, pad_token_id=0
            ).shape
        )
    assert drawn[0] == drawn[1] == (2, 19)


def test_a_recurrent_model_cannot_draft() -> None:
    model = tiny_model(num_hidden_layers=2)
    with pytest.raises(
        Unsupported, match="keeps a recurrent state, which cannot be taken back when a draft of its own is rejected"
    ):
        fastspec.patch(model, speculative=recurrent())
    model = recurrent()
    fastspec.patch(model)
    with pytest.raises(Unsupported, match=r"early_exit: .* keeps a recurrent state"):
        free(model, ROWS, 3, assistant=fastspec.Speculative(early_exit=1))


def test_without_its_adapter_a_recurrent_model_is_refused_and_the_default_leaves_it_to_transformers() -> None:
    model = recurrent()
    expected = free(model, ROWS, 4)
    fastspec.patch(model, assistant="nasd")
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: None)
    with pytest.raises(
        Unsupported, match=r"keeps a recurrent state, .* it cannot run now: Qwen3_5Attention has a forward hook"
    ):
        free(model, ROWS, 4, assistant="nasd")
    with pytest.warns(UserWarning, match="keeps a recurrent state"):
        assert free(model, ROWS, 4) == expected


@pytest.mark.parametrize(
    "kind, act", [*((kind, "silu") for kind in KINDS), *((kind, "gelu") for kind in KINDS), ("qwen3_5_text", "relu")]
)
def test_what_follows_the_convolution_is_the_model_s_own(kind: str, act: str) -> None:
    """Its `hidden_act`. By scores: of small numbers GELU and SiLU differ by less than what parts two tokens."""
    model = recurrent(kind, hidden_act=act)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    expected = model.generate(**ROWS, **options)
    with fastspec.patched(model):
        for assistant in ("autoregressive", "nasd"):
            found = model.generate(**ROWS, **options, assistant=assistant)
            for mine, wanted in zip(found.scores, expected.scores, strict=True):
                torch.testing.assert_close(mine, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
