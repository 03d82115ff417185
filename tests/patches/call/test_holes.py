"""Masks with holes: padding in the middle of a row, which plain decoding counts among the tokens of a window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.cascade import NAMED, cascaded, trained
from helpers.examples import examples
from helpers.generate import shallow_model
from helpers.models import tiny_head
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastspec
from fastspec.kernels.attention.reference import Span
from fastspec.patches.call.prompts import _differs
from fastspec.patches.hf.cache import CACHE, kept_cache

WINDOW, WIDE = 8, 48
TREE = fastspec.Eagle3(depth=4, top_k=4, total_tokens=16)
SOME = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {},
    "phi3": {},
    "gemma2": SOME,
    "cohere2": SOME,
    "exaone4": SOME,
    "cwm": SOME,
    "vaultgemma": SOME,
    "gpt_oss": SOME,
    "granite_swa": SOME,
    "gemma4_text": {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "llama4_text": {},
}
"""Families whose layers see windows or chunks, all or some of them; one of them has no adapter."""


def windowed(kind: str, size: int = WINDOW) -> Any:
    name = "attention_chunk_size" if kind == "llama4_text" else "sliding_window"
    return shallow_model(kind, **{name: size, **WINDOWED[kind]})


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(6, 97, shape, generator=torch.Generator().manual_seed(seed))


def said(model: Any, ids: Tensor, mask: Any, new: int = 6, **options: Any) -> Any:
    """What a model generates under a mask, when nothing ends it."""
    settings = {
        "max_new_tokens": new,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
    }
    return model.generate(ids, attention_mask=torch.as_tensor(mask), **settings, **options)


def turns(
    model: Any,
    mask: list[list[int]],
    ends: tuple[int, ...],
    more: list[list[int]],
    first: Any = None,
    second: Any = None,
) -> list[list[int]]:
    """Two turns: six tokens behind prompts, of which ends[b] are kept for row b, and the second on the cache of the
    first; each with an assistant, or none."""
    out = said(model, drawn(len(mask), len(mask[0])), mask, **({} if first is None else {"assistant": first}))
    emitted = torch.arange(6) < torch.tensor(ends)[:, None]
    whole = torch.cat((torch.tensor(mask), emitted, torch.tensor(more)), 1)
    ids = torch.cat((out.sequences, drawn(*torch.tensor(more).shape, seed=1)), 1)
    return said(
        model, ids, whole, **{CACHE: kept_cache(out)}, **({} if second is None else {"assistant": second})
    ).sequences.tolist()


EARLY: dict[str, Any] = {"mask": [[0, 1, 1, 1], [1, 1, 1, 1]], "ends": (3, 6), "more": [[1, 1], [1, 1]]}
"""Row 0 ended early, and its padding is hidden in the second turn."""


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_turn_behind_a_row_that_ended_early(kind: str) -> None:
    """It is refused where a window reaches over the padding, and else as plain decoding has it."""
    model, sees = windowed(kind), "chunks" if kind == "llama4_text" else "a window"
    refused = rf"row 0 of attention_mask has 3 zeros .* sees {sees} of 8 tokens.* padded on the left"
    with fastspec.patched(model), pytest.raises(fastspec.Unsupported, match=refused):
        turns(model, **EARLY, second="nasd")
    model = windowed(kind, WIDE)
    plain = turns(model, **EARLY)
    with fastspec.patched(model):
        for first, second in ((None, fastspec.Nasd(stop_if_unknown=False)), ("autoregressive", None)):
            assert turns(model, **EARLY, first=first, second=second) == plain, (first, second)


def test_a_default_leaves_such_a_turn_to_transformers() -> None:
    model = windowed("mistral")
    plain = turns(model, **EARLY)
    with fastspec.patched(model, assistant="nasd"), pytest.warns(UserWarning, match=r"row 0 of attention_mask"):
        assert turns(model, **EARLY) == plain


def test_padding_that_no_query_sees_over_is_no_hindrance() -> None:
    """Whether it is out of sight already, or will not be counted by any token that is read."""
    model = windowed("mistral")
    behind = {"mask": [[1, 0, 0, 1, *[1] * 8]], "ends": (6,), "more": [[1, 1]]}
    expected = turns(model, **behind)
    ids, mask = drawn(1, 7), [[1, 1, 1, 0, 0, 1, 1]]
    shorter = {new: said(model, ids, mask, new).sequences.tolist() for new in (1, 2, 3)}
    with fastspec.patched(model):
        assert turns(model, **behind, second="nasd") == expected
        for new in (1, 2):  # the token that the second one follows is the eighth
            assert said(model, ids, mask, new, assistant="nasd").sequences.tolist() == shorter[new]
        with pytest.raises(fastspec.Unsupported, match=r"row 0 .* 2 zeros"):
            said(model, ids, mask, 3, assistant="nasd")
    with fastspec.patched(chunks := windowed("llama4_text")):  # whole chunks of padding leave the others as they are
        ids, mask = drawn(1, 20), [[0, 0, *[1] * 8, *[0] * 8, 1, 1]]
        assert (
            said(chunks, ids, mask, assistant="nasd").sequences.tolist() == said(chunks, ids, mask).sequences.tolist()
        )


@pytest.mark.parametrize(
    "assistant", ["autoregressive", fastspec.ContinuousBatch("nasd", rows=1)], ids=["batch", "continuous"]
)
def test_a_hole_in_a_prompt_is_refused_under_a_window(assistant: Any) -> None:
    model = windowed("mistral")
    ids, mask = drawn(2, 10), [[1] * 10, [1, 1, 1, 0, 0, 0, 0, 1, 1, 1]]
    with (
        fastspec.patched(model),
        pytest.raises(fastspec.Unsupported, match=r"row 1 of attention_mask has 4 zeros behind its first token"),
    ):
        said(model, ids, mask, assistant=assistant)


def test_open_batches_and_cascades_refuse_such_a_prompt_too() -> None:
    model = windowed("mistral")
    ids, mask = drawn(1, 10), torch.tensor([[1, 1, 1, 0, 0, 0, 0, 1, 1, 1]])
    fastspec.patch(model)
    with (
        fastspec.continuous(model, "nasd", rows=1) as batch,
        pytest.raises(fastspec.Unsupported, match=r"row 0 .* 4 zeros"),
    ):
        batch.submit(ids, attention_mask=mask, max_new_tokens=2).result(300)
    fastspec.unpatch(model)
    models = [shallow_model(num_hidden_layers=1), windowed("mistral")]
    cascaded(models, predictor=trained(NAMED[1:]), stages=[fastspec.Stage(models[0], name="medium")])
    with pytest.raises(fastspec.Unsupported, match=r"row 0 .* 4 zeros"):
        said(models[-1], ids, mask, assistant="cascade")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_cache_keeps_a_prompt_where_its_mask_says(kind: str) -> None:
    """What sees the whole text counts no padding, and a cache that is handed back has the columns of the mask."""
    model = shallow_model(kind)
    holes = {
        "mask": [[0, 1, 0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 0, 0, 1], [1] * 8],
        "ends": (6, 2, 4),
        "more": [[1, 0, 1], [0, 0, 1], [1, 1, 1]],
    }
    plain = turns(model, **holes)
    with fastspec.patched(model, eagle3=tiny_head(model), speculative=windowed("mistral")):
        for first, second in (("nasd", None), (TREE, "speculative"), (None, TREE), ("speculative", "nasd")):
            assert turns(model, **holes, first=first, second=second) == plain, (first, second)


def test_a_recurrent_state_goes_on_over_holes() -> None:
    """Those that it has read already are in the state that the cache holds."""
    model, ids = shallow_model("qwen3_next", num_hidden_layers=2), drawn(2, 12)
    hidden = [[1, 0, 0, *[1] * 9], [0, *[1] * 11]]

    def again(**options: Any) -> list[list[int]]:
        return said(
            model, ids, hidden, **{CACHE: kept_cache(said(model, ids[:, :5], [[1] * 5] * 2, 5))}, **options
        ).sequences.tolist()

    plain = again()
    with fastspec.patched(model):
        assert again(assistant="nasd") == plain
        with pytest.raises(
            fastspec.Unsupported, match=r"row 0 .* 3 zeros .* recurrent states of Qwen3NextForCausalLM go on"
        ):
            turns(model, **EARLY, second="nasd")  # the last token of a turn is read by the next
        with pytest.raises(fastspec.Unsupported, match=r"row 0 .* 2 zeros"):
            said(model, drawn(1, 6), [[1, 1, 0, 0, 1, 1]], assistant="nasd")


@given(
    st.lists(st.booleans(), min_size=2, max_size=16).map(lambda keep: [*keep, True]),
    st.integers(0, 16),
    st.integers(1, 12),
    st.integers(1, 9),
    st.booleans(),
)
@examples(120)
def test_what_differs_is_what_some_query_would_see(
    keep: list[bool], begin: int, limit: int, size: int, chunk: bool
) -> None:
    slots = torch.tensor(keep).nonzero()[:, 0]
    slots = slots - slots[0]
    begin = min(begin, len(slots))
    every = torch.cat((slots, slots[-1] + 1 + torch.arange(limit - 1)))
    number, span = torch.arange(len(every)), Span(size, chunk)
    seen = [(span.sees(at[:, None], at[None]) & (at[:, None] >= at[None]))[begin:] for at in (every, number)]
    assert _differs(slots, begin, limit, span) == (not torch.equal(*seen))
