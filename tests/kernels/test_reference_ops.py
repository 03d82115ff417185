"""Every reference op against a naive computation, for drawn shapes and odd sizes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers.examples import examples
from helpers.models import tiny_model
from helpers.trees import random_parents
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, MixtralConfig
from transformers.models.ernie4_5.modeling_ernie4_5 import apply_rotary_pos_emb as in_pairs
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from fastspec.generation.tree import TokenTree, Verdict
from fastspec.kernels.attention import reference as attention_reference
from fastspec.kernels.cache import reference as cache_reference
from fastspec.kernels.drafting import reference as drafting_reference
from fastspec.kernels.layer import reference as layer_reference
from fastspec.kernels.linear import reference as linear_reference
from fastspec.kernels.verification import reference as verification_reference
from fastspec.patches.hf.families import ADAPTERS
from fastspec.patches.hf.layers import position_factor

SIZES = st.sampled_from([1, 2, 7, 63, 65, 130])
SEEDS = st.integers(0, 2**31)
DRAWN = examples(25)


def dense_mask(parents: list[int]) -> Tensor:
    """The mask of one row, as the docstring of TokenTree rebuilds it."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        mask[node] = mask[parent] if node else False
        mask[node, node] = True
    return mask


def bits(words: Tensor, count: int) -> Tensor:
    """words [N, W] -> [N, count] bool."""
    return torch.stack([(words[:, j // 64] >> (j % 64)) & 1 == 1 for j in range(count)], 1)


@given(SIZES, st.integers(1, 3), SEEDS)
@DRAWN
def test_ancestor_words(nodes, rows, seed):
    parents = random_parents(rows, nodes, torch.Generator().manual_seed(seed))
    words = drafting_reference.ancestor_words(parents, nodes)
    assert words.shape == (rows, nodes, -(-nodes // 64))
    for row in range(rows):
        assert torch.equal(bits(words[row], nodes), dense_mask(parents[row].tolist()))
    tree = TokenTree.from_parents(parents, parents)
    assert torch.equal(tree.ancestors, words)
    assert torch.equal(tree.depths[0], dense_mask(parents[0].tolist()).sum(1) - 1)


@pytest.mark.parametrize("nodes", [2, 64, 65, 256])
def test_ancestor_words_of_a_chain(nodes):
    parents = (torch.arange(nodes) - 1).clamp(min=0)[None]
    assert torch.equal(
        bits(drafting_reference.ancestor_words(parents, nodes)[0], nodes), torch.ones(nodes, nodes).tril().bool()
    )


@given(
    SIZES,
    st.lists(st.integers(0, 70), min_size=1, max_size=3),
    st.sampled_from([(1, 1), (2, 1), (3, 3)]),
    st.booleans(),
    SEEDS,
)
@DRAWN
def test_tree_attention(nodes, prefixes, groups, chain, seed):
    """Against a dense computation in float64. The tolerance is fp32 rounding over at most 200 values of size 1."""
    generator = torch.Generator().manual_seed(seed)
    group, kv_heads = groups
    rows, size, extent = len(prefixes), 8, max(prefixes) + nodes + 3
    q = torch.randn(rows, nodes, group * kv_heads, size, generator=generator)
    k, v = (torch.randn(rows, kv_heads, extent + 5, size, generator=generator) for _ in range(2))
    parents = random_parents(rows, nodes, generator)
    words = None if chain else drafting_reference.ancestor_words(parents, nodes)
    layout = attention_reference.attention_layout(torch.tensor(prefixes), words, nodes, nodes, extent, group)
    got = attention_reference.tree_attention(q, k, v, layout, size**-0.5)
    for row, prefix in enumerate(prefixes):
        tail = torch.ones(nodes, nodes).tril().bool() if chain else dense_mask(parents[row].tolist())
        mask = torch.cat((torch.ones(nodes, prefix, dtype=torch.bool), tail), 1)
        for head in range(group * kv_heads):
            keys, values = (x[row, head // group, : prefix + nodes].double() for x in (k, v))
            scores = (q[row, :, head].double() @ keys.T * size**-0.5).masked_fill(~mask, -torch.inf)
            torch.testing.assert_close(got[row, :, head].double(), scores.softmax(-1) @ values, rtol=1e-5, atol=1e-5)


def test_what_lies_behind_the_tail_is_not_read():
    k = torch.full((1, 1, 12, 4), torch.nan)
    k[:, :, :5] = 1.0
    layout = attention_reference.attention_layout(torch.tensor([2]), None, 3, 3, 5)
    assert torch.equal(
        attention_reference.tree_attention(torch.ones(1, 3, 1, 4), k, k, layout, 0.5), torch.ones(1, 3, 1, 4)
    )


@pytest.mark.parametrize("span", [None, attention_reference.Span(6), attention_reference.Span(4, chunk=True)], ids=str)
@pytest.mark.parametrize("extra", ["sinks", "cap"])
def test_sinks_and_caps_are_those_of_the_models(extra, span):
    """Transformers' own attention of gpt-oss and Gemma 2 under the same mask, whose lowest number stands for what is
    not seen."""
    generator = torch.Generator().manual_seed(0)
    nodes, kv_heads, group, size, extent = 7, 2, 3, 8, 20
    q = 4 * torch.randn(2, nodes, kv_heads * group, size, generator=generator)
    k, v = (torch.randn(2, kv_heads, extent, size, generator=generator) for _ in range(2))
    parents = random_parents(2, nodes, generator)
    words = drafting_reference.ancestor_words(parents, nodes)
    depths = torch.stack([dense_mask(row.tolist()).sum(1) - 1 for row in parents])
    layout = attention_reference.attention_layout(
        torch.tensor([3, 13]), words, nodes, nodes, extent, group, span=span, depths=depths
    )
    sinks = torch.randn(kv_heads * group, generator=generator)
    mask = torch.zeros(layout.visible.shape).masked_fill(~layout.visible, torch.finfo(torch.float32).min)
    module = SimpleNamespace(num_key_value_groups=group, sinks=sinks, training=False)
    operands = module, q.transpose(1, 2), k, v, mask
    if extra == "sinks":
        wanted, _ = modeling_gpt_oss.eager_attention_forward(*operands, scaling=0.3)
        got = attention_reference.tree_attention(q, k, v, layout, 0.3, sinks=sinks)
    else:
        wanted, _ = modeling_gemma2.eager_attention_forward(*operands, scaling=0.3, softcap=1.5)
        got = attention_reference.tree_attention(q, k, v, layout, 0.3, cap=1.5)
    torch.testing.assert_close(
        got, wanted, rtol=1e-5, atol=1e-5
    )  # some dozens of roundings of fp32, of numbers of size 1
    assert (got - attention_reference.tree_attention(q, k, v, layout, 0.3)).abs().max() > 0.1


def test_a_sink_that_is_no_weight_and_a_cap_that_caps_nothing_change_nothing():
    """In fp64, and where a node sees nothing."""
    q, k = torch.randn(1, 3, 2, 4, dtype=torch.float64), torch.randn(1, 1, 5, 4, dtype=torch.float64)
    words = torch.tensor([[[1], [0], [5]]])
    layout = attention_reference.attention_layout(torch.tensor([0]), words, 3, 3, 5, 2)
    plain = attention_reference.tree_attention(q, k, k, layout, 0.5)
    sinks = torch.full((2,), -torch.inf)
    for extras in ({"sinks": sinks}, {"cap": 1e6}, {"sinks": sinks, "cap": 1e6}):
        got = attention_reference.tree_attention(q, k, k, layout, 0.5, **extras)
        torch.testing.assert_close(got, plain, rtol=1e-9, atol=1e-9)
        assert not got[:, 1].any() and got[:, 0].all()


@given(st.sampled_from([1, 7, 63]), st.integers(1, 3), SEEDS)
@DRAWN
def test_cache_write(nodes, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    caches = [torch.randn(rows, 2, 70, 4, generator=generator) for _ in range(2)]
    new = [torch.randn(rows, nodes, 2, 4, generator=generator) for _ in range(2)]
    slots = torch.stack([torch.randperm(70, generator=generator)[:nodes] for _ in range(rows)])
    wanted = [cache.clone() for cache in caches]
    for cache, values in zip(wanted, new, strict=True):
        for row in range(rows):
            for node in range(nodes):
                cache[row, :, slots[row, node]] = values[row, node]
    cache_reference.cache_write(*caches, *new, slots)
    assert all(torch.equal(a, b) for a, b in zip(caches, wanted, strict=True))


@given(st.integers(1, 9), st.integers(1, 3), SEEDS)
@DRAWN
def test_kv_block_copy_with_overlap(steps, rows, seed):
    """Every slot gets what its source held before the move."""
    generator = torch.Generator().manual_seed(seed)
    caches = [torch.randn(2, rows, 2, 20, 4, generator=generator) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    base = torch.randint(0, 6, (rows, 1), generator=generator)
    source = base + torch.stack([torch.randperm(12, generator=generator)[:steps] for _ in range(rows)]).sort(1).values
    target = base + torch.arange(steps)
    cache_reference.kv_block_copy(*caches, source, target)
    for cache, old in zip(caches, before, strict=True):
        for row in range(rows):
            for a, b in zip(source[row].tolist(), target[row].tolist(), strict=True):
                assert torch.equal(cache[:, row, :, b], old[:, row, :, a])
            rest = sorted(set(range(20)) - set(target[row].tolist()))
            assert torch.equal(cache[:, row, :, rest], old[:, row, :, rest])


@given(st.integers(1, 40), st.integers(1, 40), SEEDS)
@DRAWN
def test_stable_topk_prefers_the_lower_index(size, count, seed):
    scores = torch.randint(0, 4, (3, size), generator=torch.Generator().manual_seed(seed)).float()
    values, ids = drafting_reference.stable_topk(scores, min(count, size))
    for row in range(3):
        wanted = sorted(range(size), key=lambda i: (-scores[row, i], i))[: min(count, size)]
        assert ids[row].tolist() == wanted
        assert torch.equal(values[row], scores[row, wanted])


@given(st.sampled_from([3, 7, 63, 65]), st.integers(1, 3), st.floats(0.1, 60.0), SEEDS)
@DRAWN
def test_topk_logprobs(vocab, count, scale, seed):
    logits = torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    values, ids = drafting_reference.topk_logprobs(logits, count)
    wanted = logits.double().log_softmax(-1)
    torch.testing.assert_close(values.double(), wanted.gather(-1, ids), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(values.double(), wanted.topk(count).values, rtol=1e-5, atol=1e-4)
    assert values.dtype == torch.float32 and values.max() <= 0.0


@given(st.sampled_from([7, 63, 65]), st.integers(1, 4), st.integers(1, 3), st.booleans(), SEEDS)
@DRAWN
def test_topk_expand_ranks_the_children_of_a_frontier(vocab, nodes, count, product, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(2, nodes, 5, generator=generator), torch.randn(vocab, 5, generator=generator)
    scores, d2t = -torch.rand(2, nodes, generator=generator), torch.randint(0, 40, (vocab,), generator=generator)
    logits = hidden @ weight.T
    children, tokens, best, index = drafting_reference.topk_expand(
        *((hidden, weight) if product else (logits, None)), scores, count, d2t
    )
    logp = logits.double().log_softmax(-1)
    for row in range(2):
        grown = []
        for node in range(nodes):
            values, ids = logp[row, node].topk(count)
            generated = zip(values.tolist(), ids.tolist(), strict=True)
            grown += [(float(scores[row, node]) + value, token + int(d2t[token])) for value, token in generated]
        torch.testing.assert_close(
            children[row].double(), torch.tensor([g[0] for g in grown]).double(), rtol=1e-5, atol=1e-5
        )
        assert tokens[row].tolist() == [g[1] for g in grown]
        order = sorted(range(len(grown)), key=lambda i: -float(children[row, i]))[:count]
        assert index[row].tolist() == order and torch.equal(best[row], children[row, order])


def candidates(
    rows: int, top_k: int, depth: int, steps: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores with many ties, tokens, parents and depths of grown candidates: a child never outscores its parent."""
    scores = -torch.randint(0, steps, (rows, top_k), generator=generator).float()
    frontier, parents = torch.arange(top_k).expand(rows, -1), torch.full((rows, top_k), -1)
    depths, everything = torch.ones(top_k, dtype=torch.long), scores
    for level in range(depth):
        lower = -torch.randint(0, steps, (rows, top_k, top_k), generator=generator).float()
        children = (scores[:, :, None] + lower).flatten(1)
        parents = torch.cat((parents, frontier.repeat_interleave(top_k, 1)), 1)
        everything, depths = (
            torch.cat((everything, children), 1),
            torch.cat((depths, torch.full((top_k**2,), level + 2))),
        )
        scores, best = drafting_reference.stable_topk(children, top_k)
        frontier = top_k + level * top_k**2 + best
    tokens = torch.randint(0, 97, everything.shape, generator=generator)
    return everything, tokens, parents, depths


@given(st.integers(1, 6), st.integers(0, 7), st.integers(1, 3), st.data(), SEEDS)
@DRAWN
def test_tree_build(top_k, depth, steps, data, seed):
    """Against a rebuild by hand: kept by score then index, each below its own parent, breadth first, with its depth."""
    grown = candidates(2, top_k, depth, steps, torch.Generator().manual_seed(seed))
    scores, tokens, parents, depths = grown
    nodes = data.draw(st.integers(2, min(256, scores.shape[1] + 1)))
    built = drafting_reference.tree_build(*grown, torch.tensor([3, 4]), nodes)
    for row in range(2):
        kept = sorted(sorted(range(scores.shape[1]), key=lambda i: (-scores[row, i], i))[: nodes - 1])
        above = [int(parents[row, i]) for i in kept]
        assert set(above) - {-1} <= set(kept)
        wanted = [0, *(0 if up < 0 else kept.index(up) + 1 for up in above)]
        assert built[1][row].tolist() == wanted
        assert built[0][row].tolist() == [3 + row, *tokens[row, kept].tolist()]
        assert built[2][row].tolist() == [0, *depths[kept].tolist()] == (dense_mask(wanted).sum(1) - 1).tolist()
        assert built[2][row].tolist() == sorted(built[2][row].tolist())
        assert torch.equal(bits(built[3][row], nodes), dense_mask(wanted))


def test_tree_build_of_256_nodes():
    grown = candidates(2, 8, 5, 2, torch.Generator().manual_seed(0))
    tokens, parents, _, words = drafting_reference.tree_build(*grown, torch.tensor([1, 2]), 256)
    assert tokens.shape == (2, 256) and words.shape == (2, 256, 4)
    assert all(torch.equal(bits(words[row], 256), dense_mask(parents[row].tolist())) for row in range(2))


@given(SIZES, st.integers(1, 3), SEEDS)
@DRAWN
def test_posterior_walk(nodes, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    parents = random_parents(rows, nodes, generator)
    parents[:, 1:] = parents[:, 1:].sort(1).values if seed % 2 else parents[:, 1:]
    tokens = torch.arange(nodes).expand(rows, -1) % 50
    picks = torch.randint(0, 50, (rows, nodes), generator=generator)
    for row in range(rows):  # half of the picks name a child
        for child in range(1, nodes):
            if torch.rand((), generator=generator) < 0.5:
                picks[row, parents[row, child]] = tokens[row, child]
    tree = TokenTree.from_parents(tokens, parents)
    path, accepted, bonus = verification_reference.posterior_walk(tokens, tree.parents, picks, tree.max_path)
    emitted = Verdict(path, accepted, bonus).tokens(tree)
    for row in range(rows):
        node, walked = 0, [0]
        while True:
            pick = int(picks[row, node])
            child = next((c for c in range(1, nodes) if parents[row, c] == node and tokens[row, c] == pick), None)
            if child is None:
                break
            node = child
            walked.append(node)
        count = len(walked)
        assert path[row].tolist() == walked + [node] * (tree.max_path - count)
        assert (int(accepted[row]), int(bonus[row])) == (count - 1, pick)
        assert emitted[row, :count].tolist() == [*tokens[row, walked[1:]].tolist(), pick]


@given(st.integers(1, 9), st.sampled_from([2, 8, 16]), SEEDS, st.booleans())
@DRAWN
def test_rope_cache_rotates_as_transformers_does_and_fills_the_slots(nodes, size, seed, interleaved):
    generator = torch.Generator().manual_seed(seed)
    heads = [torch.randn(2, nodes, count, size, generator=generator) for count in (4, 2, 2)]
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=4 * size, num_attention_heads=4, head_dim=size))
    positions = torch.randint(0, 400, (2, nodes), generator=generator)
    cos, sin = rotary(heads[0], torch.arange(400)[None])
    rotate = in_pairs if interleaved else apply_rotary_pos_emb
    wanted = rotate(*(x.transpose(1, 2) for x in heads[:2]), *rotary(heads[0], positions))
    tables = cos[0, :, : size // 2], sin[0, :, : size // 2]
    slots = torch.stack([torch.randperm(12, generator=generator)[:nodes] for _ in range(2)])
    row = torch.arange(2)[:, None]
    for extra in (0, 2):  # channels behind the rotated ones stay
        wide = [torch.cat((x, x[..., :extra] + 1), -1) for x in heads]
        k, v = (torch.full((2, 2, 12, size + extra), torch.nan) for _ in range(2))
        qkv = torch.cat([x.flatten(2) for x in wide], -1)
        q = layer_reference.rope_cache(qkv, *tables, positions, k, v, slots, interleaved=interleaved)
        assert torch.equal(q[..., :size], wanted[0].transpose(1, 2)) and torch.equal(q[..., size:], wide[0][..., size:])
        assert torch.equal(k[row, :, slots][..., :size], wanted[1].transpose(1, 2)) and torch.equal(
            v[row, :, slots], wide[2]
        )
        assert int(torch.isfinite(k[:, 0, :, 0]).sum()) == 2 * nodes


def test_queries_are_scaled_by_their_positions_as_transformers_does():
    generator = torch.Generator().manual_seed(0)
    model, row = tiny_model("ministral3"), ADAPTERS["ministral3"].position_factor
    positions = torch.tensor([[3, 15, 16, 90]])
    rope = model.config.rope_parameters
    scale = get_llama_4_attn_scale(positions, rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])
    assert scale.flatten().unique().numel() == 3
    q, k, v = (torch.randn(1, 4, count, 16, generator=generator) for count in (4, 2, 2))
    cos, sin = model.model.rotary_emb(q, torch.arange(100)[None])
    wanted = (
        apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *model.model.rotary_emb(q, positions))[0] * scale
    )
    caches = torch.zeros(2, 1, 2, 4, 16)
    found = layer_reference.rope_cache(
        torch.cat([each.flatten(2) for each in (q, k, v)], -1),
        cos[0, :, :8],
        sin[0, :, :8],
        positions,
        *caches,
        torch.arange(4)[None],
        factor=position_factor(model, row, 100),
    )
    assert torch.equal(found, wanted.transpose(1, 2))
    rounded = position_factor(model.bfloat16(), row, 100)  # as transformers does before it multiplies
    assert torch.equal(rounded[positions].flatten(), scale.flatten().bfloat16().float())


@given(st.sampled_from([1, 7, 64]), st.booleans(), SEEDS)
@DRAWN
def test_rms_norm_is_that_of_transformers(size, summed, seed):
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(2, 3, size, generator=generator) for _ in range(2))
    theirs = LlamaRMSNorm(size, 1e-5)
    theirs.weight.data = torch.randn(size, generator=generator)
    whole = x + residual if summed else x
    wide = torch.full((2, 3, size + 4), torch.nan)
    for out, where in ((None, None), (wide[..., 2 : 2 + size], torch.full_like(x, torch.nan))):
        normed, total = layer_reference.rms_norm(
            x, theirs.weight.detach(), 1e-5, residual if summed else None, out, where
        )
        assert (
            torch.equal(normed, theirs(whole).detach())
            and torch.equal(total, whole)
            and (where is None or total is where)
        )
    assert torch.equal(wide[..., 2 : 2 + size], normed) and bool(wide[..., :2].isnan().all())


@given(st.sampled_from([1, 5, 16]), SEEDS)
@DRAWN
def test_swiglu_and_experts_are_those_of_transformers(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    config = MixtralConfig(hidden_size=12, intermediate_size=20, num_local_experts=5, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    theirs = MixtralExperts(config)
    for parameter in theirs.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    x = torch.randn(tokens, 12, generator=generator)
    weights, chosen = torch.randn(tokens, 5, generator=generator).softmax(-1).topk(2)
    got = linear_reference.experts(x, theirs.gate_up_proj.detach(), theirs.down_proj.detach(), chosen, weights)
    torch.testing.assert_close(
        got, theirs(x, chosen, weights).detach(), rtol=1e-5, atol=1e-5
    )  # fp32 sums in another order
    gate, up = (torch.randn(tokens, 20, generator=generator) for _ in range(2))
    wanted = torch.nn.functional.silu(gate) * up  # vectorised otherwise: an ulp of each factor
    got = linear_reference.swiglu(torch.cat((gate, up), -1))
    torch.testing.assert_close(got, wanted, rtol=4 * torch.finfo(torch.float32).eps, atol=0.0)
