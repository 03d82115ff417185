"""`patch(exact=True)`: in bf16 and fp16 drafts change no token, no score and no row's answer, on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.gptq import packed_layers
from helpers.models import tiny_model

pytest.importorskip("triton")

from helpers.devices import ON_CUDA

import fastspec
from fastspec.devices import MEASURED
from fastspec.errors import Unsupported
from fastspec.generation.heads.rounded_linear import RoundedLinear
from fastspec.generation.tree import TokenTree
from fastspec.kernels.attention.hopper import LONG
from fastspec.kernels.linear.launches import MAX_ROWS
from fastspec.patches.hf.exact import WIDE

pytestmark = ON_CUDA
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
PROMPT, LIMIT = 37, 90


class HalfRight:
    """An assistant that knows the answer, and draws trees whose path follows it for a drawn number of tokens."""

    name, taps, nodes, max_path = "half right", None, 14, 14

    def __init__(self, text: list[int], vocabulary: int) -> None:
        self.text, self.vocabulary, self.generator = text, vocabulary, torch.Generator().manual_seed(0)
        self.rounds = self.emitted = 0

    def drafter(self, **_: Any) -> HalfRight:
        return self

    def begin(self, ids: Any, counts: Any, features: Any, root: Any) -> None:
        self.at = int(counts[0])

    def propose(self, extent: int) -> TokenTree:
        parents = [0, *(int(torch.randint(0, node, (1,), generator=self.generator)) for node in range(1, self.nodes))]
        tokens = torch.randint(0, self.vocabulary, (self.nodes,), generator=self.generator).tolist()
        right, node, depth = int(torch.randint(0, 8, (1,), generator=self.generator)), 0, 0
        tokens[0] = self.text[self.at]
        while depth < right and (children := [each for each in range(node + 1, self.nodes) if parents[each] == node]):
            node, depth = children[-1], depth + 1
            tokens[node] = (self.text + [0] * self.nodes)[self.at + depth]
        return TokenTree.from_parents(torch.tensor([tokens]).cuda(), torch.tensor([parents]).cuda())

    def observe(self, tree: Any, verdict: Any, *_: Any) -> None:
        self.at += int(verdict.accepted[0]) + 1
        self.rounds, self.emitted = self.rounds + 1, self.emitted + int(verdict.accepted[0]) + 1


def model_of(kind: str, dtype: torch.dtype, **over: Any) -> Any:
    return tiny_model(kind, **over).to("cuda", dtype)


def rounded_layers(model: Any) -> Any:
    """The model with the linear layers of its decoder in 8 bits, a scale for each line."""
    for parent in list(model.model.layers.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is torch.nn.Linear:
                setattr(parent, name, RoundedLinear.of(layer))
    return model


STORED = {
    "8 bits": rounded_layers,
    "4 bits, groups of 128": partial(packed_layers, group=128),
    "4 bits, groups of 32": packed_layers,
}


def prompts_of(model: Any, rows: int) -> torch.Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(3, vocabulary, (rows, PROMPT), generator=torch.Generator().manual_seed(rows)).cuda()


OPTIONS: dict[str, Any] = {
    "do_sample": False,
    "max_new_tokens": LIMIT,
    "min_new_tokens": LIMIT,
    "return_dict_in_generate": True,
    "output_logits": True,
}


MIXTURES = ["qwen3_moe", "mixtral", "glm4_moe", "qwen2_moe", "gpt_oss", "dots1", "llama4_text"]


@HALVES
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", *MIXTURES])
def test_trees_and_batches_say_and_score_what_one_token_at_a_time_does(kind: str, dtype: torch.dtype) -> None:
    """Tokens and logits, bit for bit."""
    model = model_of(kind, dtype)
    ids = prompts_of(model, 4)
    with fastspec.patched(model):
        assert not fastspec.report(model).exact and "patch(model, exact=True)" in fastspec.report(model).why_inexact
    with fastspec.patched(model, exact=True):
        assert fastspec.report(model).exact and "bits of autoregressive" in str(fastspec.report(model))
        alone = [model.generate(row[None], assistant="autoregressive", **OPTIONS) for row in ids]
        for row, plain in zip(ids, alone, strict=True):
            drafter = HalfRight(plain.sequences[0].tolist(), model.config.get_text_config().vocab_size)
            drafted = model.generate(row[None], assistant=drafter, **OPTIONS)
            assert drafter.emitted > 1.5 * drafter.rounds
            assert drafted.sequences.equal(plain.sequences)
            assert all(a.equal(b) for a, b in zip(drafted.logits, plain.logits, strict=True))
        for assistant in ("autoregressive", "nasd"):
            together = model.generate(ids, assistant=assistant, **OPTIONS)
            assert together.sequences.equal(torch.cat([plain.sequences for plain in alone]))
            for at, plain in enumerate(alone):
                assert all(a[at].equal(b[0]) for a, b in zip(together.logits, plain.logits, strict=True))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_wide_models_are_held_by_themselves(kind: str) -> None:
    """Where that was measured; not by `exact=False`, and not where a layer has become another."""
    model = model_of(kind, torch.bfloat16, hidden_size=WIDE, num_attention_heads=12, num_key_value_heads=4)
    ids = prompts_of(model, 1)
    with fastspec.patched(model, exact=False):
        assert "exact=False" in fastspec.report(model).why_inexact
    with fastspec.patched(model):
        if torch.cuda.get_device_name() not in MEASURED:
            assert "was not measured" in fastspec.report(model).why_inexact
            return
        assert fastspec.report(model).exact
        plain = model.generate(ids, assistant="autoregressive", **OPTIONS)
        drafter = HalfRight(plain.sequences[0].tolist(), model.config.vocab_size)
        drafted = model.generate(ids, assistant=drafter, **OPTIONS)
        assert drafter.emitted > 1.5 * drafter.rounds and drafted.sequences.equal(plain.sequences)
        assert all(a.equal(b) for a, b in zip(drafted.logits, plain.logits, strict=True))
        layer = model.model.layers[0].self_attn
        layer.q_proj = torch.nn.Sequential(layer.q_proj)
        assert "projections" in fastspec.report(model).why_inexact
        assert model.generate(ids, assistant="nasd", **OPTIONS).sequences.shape == plain.sequences.shape


@pytest.mark.parametrize("rows", [1, 3])
def test_trees_after_a_long_text_say_what_one_token_at_a_time_does(rows: int) -> None:
    """After so many slots that runs are read by Hopper's own kernel, the third round as well as the first."""
    heads = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128}
    model = model_of("llama", torch.bfloat16, **heads, max_position_embeddings=32768)
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(3, model.config.vocab_size, (rows, LONG + 77), generator=generator).cuda()
    options = OPTIONS | {"max_new_tokens": 40, "min_new_tokens": 40}
    with fastspec.patched(model, exact=True):
        plain = model.generate(ids, assistant="autoregressive", **options)
        if rows > 1:
            drafted = model.generate(ids, assistant="nasd", **options)
        else:
            drafter = HalfRight(plain.sequences[0].tolist(), model.config.vocab_size)
            drafter.nodes = 40  # so that a key head's queries fill a tile
            drafted = model.generate(ids, assistant=drafter, **options)
            assert drafter.emitted > 1.5 * drafter.rounds
        assert drafted.sequences.equal(plain.sequences)
        assert all(a.equal(b) for a, b in zip(drafted.logits, plain.logits, strict=True))


@HALVES
def test_a_second_turn_begins_with_the_same_bits(dtype: torch.dtype) -> None:
    """Keys and values that rounds leave are those of plain decoding, and of the text read at once."""
    model = model_of("llama", dtype)
    ids = prompts_of(model, 1)
    with fastspec.patched(model, exact=True):
        plain = model.generate(ids, assistant="autoregressive", **OPTIONS)
        drafted = model.generate(
            ids, assistant=HalfRight(plain.sequences[0].tolist(), model.config.vocab_size), **OPTIONS
        )
        once = OPTIONS | {"max_new_tokens": 1, "min_new_tokens": 1}
        text = plain.sequences[:, :-1]
        shown = torch.ones_like(text)  # an answer may hold the padding token
        whole = model.generate(text, attention_mask=shown, assistant="autoregressive", **once)
        length = text.shape[1]
        for layer in range(model.config.num_hidden_layers):
            kept = [cache.past_key_values.layers[layer] for cache in (plain, drafted, whole)]
            for a in kept[1:]:
                assert a.keys[:, :, :length].equal(kept[0].keys[:, :, :length])
                assert a.values[:, :, :length].equal(kept[0].values[:, :, :length])


@HALVES
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_text_scores_by_the_bits_that_generation_had(kind: str, dtype: torch.dtype) -> None:
    """Rows of other lengths beside it, which end before it does."""
    model = model_of(kind, dtype)
    ids = prompts_of(model, 3)
    with fastspec.patched(model, exact=True):
        said = model.generate(ids, assistant="nasd", **OPTIONS | {"do_sample": True, "temperature": 0.7})
        drawn = (torch.stack(said.logits, 1) / 0.7).log_softmax(-1)
        drawn = drawn.gather(-1, said.sequences[:, PROMPT:, None])[..., 0]
        mask = torch.ones_like(said.sequences)
        mask[1, -30:] = mask[2, :20] = 0
        scored = fastspec.log_probs(model, said.sequences, mask, temperature=0.7)[:, PROMPT - 1 :]
    assert scored[0].equal(drawn[0]) and scored[1, :-30].equal(drawn[1, :-30])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("form", STORED)
def test_so_do_weights_that_are_multiplied_as_stored(form: str, dtype: torch.dtype) -> None:
    """Tokens, logits, and the keys that a text of more rows than one launch takes leaves behind."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    model = STORED[form](model_of("llama", dtype, **sizes, max_position_embeddings=2048))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (3, MAX_ROWS + 90), generator=generator).cuda()
    with fastspec.patched(model, exact=True, stored=True):
        assert fastspec.report(model).exact and sum(fastspec.report(model).stored.values()) >= 7
        alone = [model.generate(row[None], assistant="autoregressive", **OPTIONS) for row in ids]
        drafter = HalfRight(alone[0].sequences[0].tolist(), model.config.vocab_size)
        drafted = model.generate(ids[:1], assistant=drafter, **OPTIONS)
        assert drafter.emitted > 1.5 * drafter.rounds
        assert drafted.sequences.equal(alone[0].sequences)
        assert all(a.equal(b) for a, b in zip(drafted.logits, alone[0].logits, strict=True))
        together = model.generate(ids, assistant="nasd", **OPTIONS)
        assert together.sequences.equal(torch.cat([plain.sequences for plain in alone]))
        for at, plain in enumerate(alone):
            assert all(a[at].equal(b[0]) for a, b in zip(together.logits, plain.logits, strict=True))
        once = OPTIONS | {"max_new_tokens": 1, "min_new_tokens": 1}
        text = alone[0].sequences[:, :-1]
        shown = torch.ones_like(text)  # an answer may hold the padding token
        whole = model.generate(text, attention_mask=shown, assistant="autoregressive", **once)
        length = text.shape[1]
        for kept, grown in zip(whole.past_key_values.layers, drafted.past_key_values.layers, strict=True):
            assert kept.keys[:, :, :length].equal(grown.keys[:, :, :length])


def test_open_batches_say_what_one_row_says() -> None:
    model = model_of("llama", torch.bfloat16)
    ids = prompts_of(model, 6)
    with fastspec.patched(model, exact=True):
        options = {"do_sample": False, "max_new_tokens": LIMIT, "min_new_tokens": LIMIT}
        alone = [model.generate(row[None], assistant="autoregressive", **options)[0, PROMPT:].tolist() for row in ids]
        with fastspec.continuous(model, "nasd", rows=3) as batch:
            asked = [batch.submit(row, **options) for row in ids]
            assert [each.result()[0, PROMPT:].tolist() for each in asked] == alone


@pytest.mark.parametrize(
    ("kind", "dtype", "told"),
    [
        ("llama", torch.float32, "bfloat16 and float16"),
        ("olmoe", torch.bfloat16, "projections of attention"),
        ("qwen3_next", torch.bfloat16, "layer 0"),
        ("granite", torch.bfloat16, "norms of its own"),
        ("gpt2", torch.bfloat16, "runs on 'torch'"),
    ],
)
def test_what_has_no_such_kernels_is_refused_by_name(kind: str, dtype: torch.dtype, told: str) -> None:
    model = model_of(kind, dtype)
    with pytest.raises(Unsupported, match=told):
        fastspec.patch(model, exact=True)
    assert "generate" not in model.__dict__
