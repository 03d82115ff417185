"""The block head's parts, against transformers' Qwen3 layers and against their formulas written as loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3Model

from fastspec.generation.drafters.block.config import BlockConfig
from fastspec.generation.drafters.block.draft import BlockDrafter
from fastspec.generation.drafters.block.head import BlockHead, CandidateSelector, DynamicConvolution, MarkovHead, best_ids
from fastspec.training.blocks import BlockAttention

VOCAB, WIDTH = 40, 32
CONFIG = BlockConfig(
    kind="dflash", hidden_size=WIDTH, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=VOCAB,
    draft_vocab_size=VOCAB, num_target_layers=6, taps=(2, 4), mask_token_id=7, block_size=5, rope_theta=500.0,
)  # fmt: skip


def made(**changes: object) -> BlockHead:
    torch.manual_seed(0)
    head = BlockHead(replace(CONFIG, **changes)).requires_grad_(False)  # type: ignore[arg-type]
    for parameter in head.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    head.bind(nn.Embedding(VOCAB, WIDTH).requires_grad_(False), nn.Linear(WIDTH, VOCAB, bias=False).requires_grad_(False))
    return head


def qwen3(head: BlockHead) -> Qwen3Model:
    """The head's layers as transformers' own, whose names the checkpoints have."""
    c = head.config
    model = Qwen3Model(
        Qwen3Config(
            vocab_size=VOCAB, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_hidden_layers,
            num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim,
            rms_norm_eps=c.rms_norm_eps, rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    weights = {name: value for name, value in head.state_dict().items() if name.startswith(("layers.", "norm."))}
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert missing == ["embed_tokens.weight"] and not unknown
    return model


def test_layers_are_qwen3s_with_every_row_seeing_the_block() -> None:
    head = made()
    model = qwen3(head)
    at = torch.tensor([[11]])
    none = torch.zeros(1, 1, 2 * WIDTH)
    attend = BlockAttention(head.context_keys_values(head.context(none), torch.zeros(1, 1)), torch.zeros(1, 1))  # nothing is before 0
    found = head.states(torch.tensor([[3]]), at, attend)[0, 0]
    embedded = head.__dict__["_embed_tokens"](torch.tensor([[3, 7, 7, 7, 7]]))
    with torch.no_grad():
        wanted = model(inputs_embeds=embedded, attention_mask=torch.zeros(1, 1, 5, 5), position_ids=at + torch.arange(5)).last_hidden_state
    torch.testing.assert_close(found, wanted[0, 1:], rtol=1e-4, atol=1e-5)


def test_context_enters_as_keys_and_values_of_its_positions() -> None:
    """One layer by hand: the block's queries over the projections of fused features and of the block, rotated by transformers' RoPE."""
    head = made(num_hidden_layers=1)
    model = qwen3(head)
    layer = model.layers[0]
    features = torch.randn(6, 2 * WIDTH)
    context = head.context(features)
    torch.testing.assert_close(context, nn.functional.rms_norm(features @ head.fc.weight.T, (WIDTH,), head.hidden_norm.weight, 1e-6))
    drafter = BlockDrafter(head)
    drafter.append(features[:4])
    drafter.append(features[4:])
    x = head.__dict__["_embed_tokens"](torch.tensor([3, 7, 7, 7, 7]))
    normed = layer.input_layernorm(x)
    both = torch.cat((context, normed))
    cos, sin = model.rotary_emb(both[None], torch.arange(11)[None])

    def rotated(y: Tensor) -> Tensor:
        half = y.shape[-1] // 2
        return y * cos[0, -len(y) :, None] + torch.cat((-y[..., half:], y[..., :half]), -1) * sin[0, -len(y) :, None]

    attention = layer.self_attn
    q = rotated(attention.q_norm(attention.q_proj(normed).unflatten(-1, (-1, 8))))
    k = rotated(attention.k_norm(attention.k_proj(both).unflatten(-1, (-1, 8)))).repeat_interleave(2, 1)
    v = attention.v_proj(both).unflatten(-1, (-1, 8)).repeat_interleave(2, 1)
    weights = (torch.einsum("qhd,khd->hqk", q, k) * 8**-0.5).softmax(-1)
    x = x + attention.o_proj(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
    wanted = model.norm(x + layer.mlp(layer.post_attention_layernorm(x)))
    torch.testing.assert_close(drafter.draft(3).states, wanted[1:], rtol=1e-4, atol=1e-5)


def test_a_drafter_needs_a_context() -> None:
    with pytest.raises(RuntimeError, match="append"):
        BlockDrafter(made()).draft(3)


def test_convolutions_are_their_formula_and_begin_as_the_identity() -> None:
    torch.manual_seed(1)
    conv = DynamicConvolution(WIDTH, 16).requires_grad_(False)
    x, y = torch.randn(2, 5, WIDTH), torch.randn(2, 5, WIDTH)
    conv.kernel_projection.weight.zero_()
    for side in (0, 1):
        torch.testing.assert_close(conv.apply_side(conv.kernels(x), side, y), y, rtol=0, atol=0)
    conv.kernel_projection.weight.normal_()
    conv.base_kernel.normal_()
    change = x @ conv.kernel_projection.weight.T
    for side in (0, 1):
        found = conv.apply_side(conv.kernels(x), side, y)
        for block in range(2):
            for row in range(5):
                for channel in (0, 15, 16, 31):
                    wanted = 0.0
                    for tap in range(min(2, row + 1)):
                        part = (side * 2 + tap) * 2 + channel // 16
                        kernel = conv.base_kernel[side, tap, channel] + change[block, row, part]
                        wanted += float(kernel * y[block, row - tap, channel])
                    assert float(found[block, row, channel]) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_corrections_are_their_formulas() -> None:
    torch.manual_seed(2)
    markov = MarkovHead(VOCAB, 9, 4).requires_grad_(False)
    assert float(markov(torch.tensor(5))[2]) == pytest.approx(float(markov.markov_w2.weight[2] @ markov.markov_w1.weight[5]), rel=1e-5)
    selector = CandidateSelector(VOCAB, WIDTH, 4).requires_grad_(False)
    for parameter in selector.parameters():
        parameter.normal_()
    hidden, previous, candidates = torch.randn(3, WIDTH), torch.randint(VOCAB, (3, 2)), torch.randint(VOCAB, (3, 6))
    scores = selector(hidden, previous, candidates)
    for slot in range(3):
        for a in range(2):
            for b in range(6):
                left, right = selector.predecessor_codebook[previous[slot, a]], selector.successor_codebook[candidates[slot, b]]
                state = selector.hidden_projection.weight @ hidden[slot]
                assert float(scores[slot, a, b]) == pytest.approx(float((left * state * right).sum()), rel=1e-3, abs=1e-4)


def test_the_selector_scores_the_best_of_a_slot_and_nothing_else() -> None:
    head = made(kind="dflash2", rank=4, candidates=6)
    states, previous = torch.randn(3, WIDTH), torch.tensor([[1, 2], [3, 4], [5, 6]])
    unary = head.unary(states)
    scores, ids = head.edges(unary, states, previous)
    assert ids is not None and head.candidate_selector is not None and scores.shape == (3, 2, 6)
    for slot in range(3):
        assert set(ids[slot].tolist()) == set(unary[slot].topk(6).indices.tolist())
    added = head.candidate_selector(states, previous, ids)
    torch.testing.assert_close(scores, unary.gather(-1, ids)[:, None] + added, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [130, 256, 1000, 4096, 12_288, 32_000, 49_152])
def test_the_best_of_a_vocabulary_are_topks(size: int) -> None:
    """By parts where the size divides; with ties the logits are the same, and no place comes twice."""
    torch.manual_seed(size)
    logits = torch.randn(3, 5, size)
    logits[0, 0] = torch.arange(size).flip(0)  # all of the best in one part
    logits[0, 1] = torch.arange(size) % 61  # and one in every part
    found = best_ids(logits[1:], 16)
    assert torch.equal(found, logits[1:].topk(16, -1).indices)
    for ties in (logits, logits.bfloat16()):
        found = best_ids(ties, 16)
        assert torch.equal(ties.gather(-1, found), ties.topk(16, -1).values)
        assert all(len(set(row)) == 16 for row in found.flatten(0, 1).tolist())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "medusa"}, "dspark"), ({"taps": ()}, "hidden_states"), ({"taps": (7,)}, "1 to 6"), ({"rank": 3}, "no correction"),
        ({"block_size": 1}, "smallest is 2"), ({"mask_token_id": 40}, "0 to 39"), ({"draft_vocab_size": 41}, "exceeds"),
        ({"confidence": True}, "dspark"), ({"kind": "dspark"}, "rank 1"), ({"head_dim": 7}, "even"),
        ({"kind": "dflash2", "rank": 2, "draft_vocab_size": 39}, "whole vocabulary"),
        ({"kind": "dflash2", "rank": 2, "conv_group": 5}, "conv_group"),
    ],
)  # fmt: skip
def test_sizes_that_make_no_head_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)  # type: ignore[arg-type]
