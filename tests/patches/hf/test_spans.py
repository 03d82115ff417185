"""Windows and chunks in a configuration: believed where the decoder's forward reads them, and nowhere else."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from helpers.generate import NEVER, free, prompts, shallow_model
from helpers.models import FAMILIES, tiny_head, tiny_model
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import create_causal_mask

import fastspec
from fastspec.kernels.attention.reference import Span
from fastspec.patches.hf.cache import CACHE, kept_cache, kept_lengths
from fastspec.patches.hf.limits import dropped_spans, layer_spans

WINDOW, NEW = 8, 14
ROWS = prompts(5, 13)
TREE = fastspec.Eagle3(depth=4, top_k=4, total_tokens=16)
GENERIC = "gpt2", "gpt_neox", "opt", "hunyuan_v1_dense", "granite_swa", "mimo_v2_flash", "bert", "roberta"


def left_over(kind: str, **settings: Any) -> Any:
    """A model whose configuration was given settings afterwards, as a file does that was made from another family's."""
    model = shallow_model(kind)
    for name, value in settings.items():
        setattr(model.config, name, value)
    return model


@pytest.mark.parametrize("kind", [*FAMILIES, *GENERIC])
@torch.no_grad()
def test_a_window_is_read_where_the_forward_reads_it(kind: str) -> None:
    more = {"is_decoder": True} if kind in ("bert", "roberta") else {}
    model = tiny_model(kind, num_hidden_layers=2, **more)
    ids = torch.randint(6, 97, (1, 12), generator=torch.Generator().manual_seed(0))
    logits = []
    for size in (4, 400):
        model.config.sliding_window = size
        logits.append(model(ids, use_cache=False).logits[:, -1])
    assert any(span == Span(400) for span in layer_spans(model)) == (not torch.equal(*logits))


UNREAD: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"sliding_window": WINDOW}),
    "said to be off": ("llama", {"sliding_window": WINDOW, "use_sliding_window": False}),
    "chunks": ("llama", {"attention_chunk_size": WINDOW}),
    "layer types": ("llama", {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 3}),
    "mixture": ("glm4_moe", {"sliding_window": WINDOW}),
    "norms elsewhere": ("olmo2", {"sliding_window": WINDOW}),
    "parallel": ("phi", {"sliding_window": WINDOW}),
    "generic": ("gpt_neox", {"sliding_window": WINDOW}),
    "generic, said to be off": ("gpt2", {"sliding_window": WINDOW, "use_sliding_window": False}),
}
READ: dict[str, tuple[str, dict[str, Any]]] = {
    "said to be off": ("qwen3_moe", {"sliding_window": WINDOW, "use_sliding_window": False}),
    "full layer types": ("mistral", {"sliding_window": WINDOW, "layer_types": ["full_attention"] * 3}),
}
"""What nobody reads -> a family and its settings, and what a forward reads against what is written beside it."""


@pytest.mark.some("llama", "said to be off", "chunks", "mixture", "generic")
@pytest.mark.parametrize("case", UNREAD)
def test_a_window_that_no_forward_reads_is_what_the_cache_makes_of_it(case: str) -> None:
    """Plain decoding sees the whole of a prompt, and behind it what transformers' cache has kept."""
    model = left_over(UNREAD[case][0], **UNREAD[case][1])
    assert layer_spans(model) == [None] * 3 and dropped_spans(model) == (Span(WINDOW),) * 3
    expected = free(model, ROWS, NEW)
    with fastspec.patched(model, eagle3=tiny_head(model), speculative=shallow_model("llama", 1, sliding_window=WINDOW)):
        more = "autoregressive", "speculative", fastspec.ContinuousBatch("nasd", rows=1)
        for assistant in ("nasd", TREE, *(more if case in ("llama", "generic") else ())):
            assert free(model, ROWS, NEW, assistant=assistant) == expected, assistant
        assert _on(DynamicCache(), model, assistant="nasd") == _on(DynamicCache(), model)  # which keeps all
        with fastspec.continuous(model, "nasd", rows=2) as batch:
            answer = batch.submit(
                ROWS["input_ids"][1:], max_new_tokens=NEW, do_sample=False, eos_token_id=NEVER
            ).result(300)
        assert answer[0, -NEW:].tolist() == expected[1]
    assert expected != free(shallow_model(UNREAD[case][0]), ROWS, NEW)  # so that it matters


@pytest.mark.parametrize("case", READ)
def test_a_window_that_the_forward_reads_is_believed_against_what_stands_beside_it(case: str) -> None:
    model = left_over(READ[case][0], **READ[case][1])
    assert layer_spans(model) == [Span(WINDOW)] * 3 and not any(dropped_spans(model))
    expected = free(model, ROWS, NEW)
    with fastspec.patched(model, eagle3=tiny_head(model)):
        for assistant in ("autoregressive", TREE):
            assert free(model, ROWS, NEW, assistant=assistant) == expected, assistant
        assert _on(None, model, assistant=TREE) == _on(None, model)


def _on(cache: Any, model: Any, turns: int = 2, **options: Any) -> list[list[int]]:
    """The text after turns on a cache, or on the one that the first hands back."""
    ids, mask = ROWS["input_ids"], ROWS["attention_mask"]
    for _ in range(turns):
        options |= {
            "max_new_tokens": 4,
            "do_sample": False,
            "eos_token_id": None,
            "return_dict_in_generate": True,
            CACHE: cache,
        }
        out = model.generate(ids, attention_mask=mask, **options)
        ids, cache = torch.cat((out.sequences, ROWS["input_ids"][:, -3:]), 1), kept_cache(out)
        mask = torch.cat((mask, torch.ones(2, ids.shape[1] - mask.shape[1], dtype=torch.long)), 1)
    return out.sequences.tolist()


@pytest.mark.parametrize("held", [WINDOW - 1, WINDOW])
def test_the_first_token_that_a_cache_drops_counts(held: int) -> None:
    model = left_over("llama", sliding_window=WINDOW)
    options = {"do_sample": False, "eos_token_id": None}
    first = model.generate(prompts(held - 3)["input_ids"], **options, max_new_tokens=4, return_dict_in_generate=True)
    assert kept_cache(first).get_seq_length() == held
    call = {"input_ids": torch.cat((first.sequences, prompts(3)["input_ids"]), 1), "max_new_tokens": 6, **options}
    expected = model.generate(**call, **{CACHE: copy.deepcopy(kept_cache(first))})
    with fastspec.patched(model):
        call |= {CACHE: kept_cache(first), "assistant": "nasd"}
        if held == WINDOW:
            with pytest.raises(fastspec.Unsupported, match=r"the 8 tokens of .* in windows of 8"):
                model.generate(**call)
        else:
            assert torch.equal(model.generate(**call), expected)


def test_what_goes_by_more_than_a_cache_keeps_is_refused() -> None:
    model = left_over("llama", sliding_window=WINDOW)
    plain = _on(None, model)
    static = StaticCache(config=model.config, max_cache_len=40)
    with fastspec.patched(model):
        with pytest.raises(
            fastspec.Unsupported, match=r"the 16 tokens of .* in windows of 8, .* of LlamaForCausalLM .* set it to None"
        ):
            _on(None, model, assistant="nasd")
        with pytest.raises(fastspec.Unsupported, match="prefill_chunk_size=4 reads"):
            free(model, ROWS, 3, assistant="nasd", prefill_chunk_size=4)
        with pytest.raises(fastspec.Unsupported, match="a StaticCache brings masks"):
            _on(static, model, 1, assistant="nasd")
        with (
            fastspec.continuous(model, "nasd", rows=1) as batch,
            pytest.raises(fastspec.Unsupported, match="prefill_chunk_size=4 reads"),
        ):
            batch.submit(ROWS["input_ids"][1:], max_new_tokens=2, prefill_chunk_size=4).result(300)
    with fastspec.patched(model, assistant="nasd"), pytest.warns(UserWarning, match="kept in windows"):
        assert _on(None, model) == plain
        assert len(fastspec.report(model).unassisted) == 1
    model.config.sliding_window = 20  # more than the first turn keeps
    plain = _on(None, model)
    with fastspec.patched(model):
        assert _on(None, model, assistant="nasd") == plain


def test_static_caches_that_are_handed_in_keep_the_windows_of_layers() -> None:
    model = left_over("gemma2", sliding_window=WINDOW)
    made = [StaticCache(config=model.config, max_cache_len=60) for _ in range(2)]
    assert kept_lengths(made[0], 3) == [WINDOW, None, WINDOW]
    with fastspec.patched(model):
        assert _on(made[0], model, 3, assistant="nasd") == _on(made[1], model, 3)


def test_a_subclass_that_calls_its_familys_forward_reads_what_that_reads() -> None:
    """One with masks of its own is taken at its configuration's word."""
    model = shallow_model("mistral", sliding_window=WINDOW)
    kind = type(model.model)

    class Calls(kind):  # type: ignore[misc,valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Own(nn.Module):
        def forward(self, *args: Any) -> Any:
            return args

    model.model.__class__ = Calls
    assert layer_spans(model) == [Span(WINDOW)] * 3
    plain = shallow_model("llama")
    plain.config.sliding_window = WINDOW
    plain.get_decoder = partial(Own)
    assert layer_spans(plain) == [Span(WINDOW)] * 3


class Helped(nn.Module):
    """A decoder whose forward leaves its masks to a method."""

    def forward(self, *args: Any) -> Any:
        return self.masks(*args)

    def masks(self, config: Any, embedded: Tensor, mask: Tensor) -> Any:
        return create_causal_mask(config, embedded, mask, None)


def test_masks_that_a_forward_has_made_for_it_are_its_own() -> None:
    model = left_over("llama", sliding_window=WINDOW)
    model.get_decoder = partial(Helped)
    assert layer_spans(model) == [None] * 3
