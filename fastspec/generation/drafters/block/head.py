"""Block heads (DFlash, DSpark, DFlash 2) as one module: the backbone, and the corrections that make a slot depend on the one before.

One pass drafts a block. The target's features of the text so far are fused once and enter every layer as keys and values only, never
the residual stream; the rows of the block are the anchor's embedding and the mask token's. The module holds no KV cache and no mask:
attention goes through the callback `attend` of whoever calls `states`, which puts the context's keys and values before the block's.

Letters: R texts, N blocks of a text, K rows of a block, D drafts of a block (K or K - 1), S context tokens, F taps, H width of head and
target, Hq / Hkv query / key heads, E head_dim, V vocabulary, V_d draft vocabulary, C candidates.

Sources: DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147, sections 3 and 4), DFlash 2 (inco.ai/blog/dflash2). Parameter names are
those of the checkpoints in circulation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastspec.generation.drafters.block.config import BlockConfig
from fastspec.generation.heads.module import RMSNorm, SwiGLU, rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
PARTS = (256, 128, 64, 32)
"""Sizes of the parts that a vocabulary is looked through in."""


class Attention(nn.Module):
    """Projections with norms of queries and keys per head. Context and block share those of keys and values."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        c = config
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., H] -> normed and rotated keys, and values, [..., Hkv, E]."""
        k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(k), cos, sin).to(v.dtype), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        k, v = self.keys_values(x, cos, sin)
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin).to(v.dtype)
        out: Tensor = self.o_proj(attend(q, k, v).flatten(-2))
        return out


class DynamicConvolution(nn.Module):
    """DFlash 2's convolution over a block's rows, causal, two taps: a learned base and a part that the sublayer's input decides.

    Side 0 stands before the sublayer, side 1 behind it; both parts are read from the same input. It begins as the identity.
    """

    def __init__(self, size: int, group: int) -> None:
        super().__init__()
        self.groups = size // group
        self.base_kernel = nn.Parameter(torch.stack((torch.ones(2, size), torch.zeros(2, size)), 1))
        self.kernel_projection = nn.Linear(size, 4 * self.groups, bias=False)

    def kernels(self, x: Tensor) -> Tensor:
        """The sublayer's input [..., K, H] -> kernels [..., K, 2 sides, 2 taps, H]."""
        change = self.kernel_projection(x).unflatten(-1, (2, 2, self.groups))
        wide: Tensor = self.base_kernel.to(change.dtype) + change.repeat_interleave(x.shape[-1] // self.groups, -1)
        return wide

    @staticmethod
    def apply_side(kernels: Tensor, side: int, y: Tensor) -> Tensor:
        """y [..., K, H] -> kernel 0 times each row plus kernel 1 times the row before it, zeros before the first."""
        before = F.pad(y, (0, 0, 1, 0))[..., :-1, :]
        return kernels[..., side, 0, :] * y + kernels[..., side, 1, :] * before


class Layer(nn.Module):
    """One pre-norm decoder layer over the block's rows."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        c = config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size)
        convolved = c.kind == "dflash2"
        self.attention_conv = DynamicConvolution(c.hidden_size, c.conv_group) if convolved else None
        self.mlp_conv = DynamicConvolution(c.hidden_size, c.conv_group) if convolved else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        x = x + _convolved(self.attention_conv, self.input_layernorm(x), lambda y: self.self_attn(y, cos, sin, attend))
        return x + _convolved(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def _convolved(conv: DynamicConvolution | None, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    if conv is None:
        return sublayer(x)
    kernels = conv.kernels(x)
    return conv.apply_side(kernels, 1, sublayer(conv.apply_side(kernels, 0, x)))


class MarkovHead(nn.Module):
    """DSpark's correction: a slot's logits get W2 . W1[token before]."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def forward(self, previous: Tensor) -> Tensor:
        """Target ids [...] -> what is added to logits [..., V_d]."""
        added: Tensor = self.markov_w2(self.markov_w1(previous))
        return added


class ConfidenceHead(nn.Module):
    """DSpark's logit of "accepted, given that all before were", from a slot's state and the token before it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        found: Tensor = self.proj(torch.cat((hidden, embedded.to(hidden.dtype)), -1)).squeeze(-1)
        return found


class CandidateSelector(nn.Module):
    """DFlash 2's edge scores between a predecessor and the candidates of a slot: sum over r of A[a, r] (W h)[r] C[b, r]."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, hidden: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """hidden [..., H], previous [..., W] and candidates [..., C] token ids -> edge scores [..., W, C]."""
        state = self.hidden_projection(hidden)
        a = F.embedding(previous, self.predecessor_codebook).to(state.dtype) * state.unsqueeze(-2)
        scores: Tensor = a @ F.embedding(candidates, self.successor_codebook).to(state.dtype).transpose(-1, -2)
        return scores


class BlockHead(nn.Module):
    """A block head; see the module's docstring. Call `bind` once before `states` or `unary`.

    The target's embedding (and LM head, where the head has none of its own) are held by reference: they are not parameters of the
    head, are not saved with it, and do not move with it.
    """

    d2t: Tensor

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        c = self.config = config
        self.fc = nn.Linear(len(c.taps) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False) if c.own_lm_head else None
        self.markov_head = MarkovHead(c.vocab_size, c.draft_vocab_size, c.rank) if c.kind == "dspark" else None
        self.confidence_head = ConfidenceHead(c.hidden_size + c.rank) if c.confidence else None
        self.candidate_selector = CandidateSelector(c.vocab_size, c.hidden_size, c.rank) if c.kind == "dflash2" else None
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64), persistent=c.own_lm_head)
        self.__dict__["_embed_tokens"] = None
        self.__dict__["_target_lm_head"] = None

    def bind(self, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        """Take the target's embedding and LM head. References are kept, nothing is copied."""
        self.__dict__["_embed_tokens"] = embed_tokens
        self.__dict__["_target_lm_head"] = lm_head

    def context(self, features: Tensor) -> Tensor:
        """The target's features [..., F * H] -> what every layer reads as context [..., H]."""
        fused: Tensor = self.hidden_norm(self.fc(features))
        return fused

    def context_keys_values(self, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of `context` [..., H] at positions [...]: the keys and values [..., Hkv, E] of every layer, which never change again."""
        cos, sin = self.rotary(positions)
        return [layer.self_attn.keys_values(context, cos, sin) for layer in self.layers]  # type: ignore[operator, union-attr]

    def states(self, anchors: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass: anchors [R, N] target ids at positions [R, N] -> the final states of the slots that draft [R, N, D, H].

        `attend(layer, q [R, N, K, Hq, E], k [R, N, K, Hkv, E], v the same) -> [R, N, K, Hq, E]` attends to the context and the block.
        """
        embed = self.__dict__["_embed_tokens"]
        if embed is None:
            raise RuntimeError("the head is not bound to a target: call head.bind(target.get_input_embeddings(), lm_head) first")
        c = self.config
        masks = anchors.new_full((*anchors.shape, c.block_size - 1), c.mask_token_id)
        x = embed(torch.cat((anchors[..., None], masks), -1)).to(self.fc.weight.dtype)
        cos, sin = self.rotary(positions[..., None] + torch.arange(c.block_size, device=positions.device))
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, _of_layer(attend, index))
        out: Tensor = self.norm(x)
        return out[..., c.block_size - c.drafts :, :]

    def unary(self, states: Tensor) -> Tensor:
        """Logits of slots by themselves [..., V_d]."""
        lm_head = self.lm_head if self.lm_head is not None else self.__dict__["_target_lm_head"]
        if lm_head is None:
            raise RuntimeError("the head is not bound to a target: call head.bind(embed_tokens, target.get_output_embeddings()) first")
        logits: Tensor = lm_head(states.to(lm_head.weight.dtype))
        return logits

    def edges(self, unary: Tensor, states: Tensor, previous: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores of a slot's tokens behind each of W predecessors, whose softmax is the draft's distribution.

        unary [..., V_d], states [..., H], previous [..., W] target ids -> scores [..., W, C] fp32 and the draft ids [..., C] that they
        are of; None for all of the draft vocabulary in order.
        """
        if self.candidate_selector is not None:
            ids = best_ids(unary.detach(), self.config.candidates)
            best = unary.gather(-1, ids)
            return best.float().unsqueeze(-2) + self.candidate_selector(states, previous, ids).float(), ids
        scores = unary.float().unsqueeze(-2)
        if self.markov_head is not None:
            return scores + self.markov_head(previous).float(), None
        return scores.expand(*previous.shape, scores.shape[-1]), None

    def confidence(self, states: Tensor, previous: Tensor) -> Tensor:
        """Logits [...] that slots [..., H] behind the tokens `previous` [...] are accepted; for heads that have them."""
        if self.confidence_head is None or self.markov_head is None:
            raise RuntimeError("this head has no confidence head: train it with kind dspark")
        found: Tensor = self.confidence_head(states, self.markov_head.markov_w1(previous))
        return found

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids -> the target's token ids; `d2t` holds offsets."""
        return draft_ids + self.d2t[draft_ids]

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 cos and sin [..., 1, E / 2] of positions [...]."""
        c = self.config
        exponent = torch.arange(0, c.head_dim, 2, device=positions.device).float() / c.head_dim
        angle = positions[..., None, None].float() / c.rope_theta**exponent
        return angle.cos(), angle.sin()


def best_ids(logits: Tensor, count: int) -> Tensor:
    """Places [..., count] of the largest of logits [..., V], the largest first.

    Where V divides into many parts only those with the largest maxima are ranked, as many as there are places: what other parts hold is
    not larger. Of equal logits any may be taken.
    """
    size = next((size for size in PARTS if logits.shape[-1] % size == 0 and logits.shape[-1] >= 4 * count * size), 0)
    best: Tensor
    if not size:
        best = logits.topk(count, -1).indices
        return best
    parts = logits.unflatten(-1, (-1, size))
    where = parts.amax(-1).topk(count, -1).indices
    found = parts.gather(-2, where[..., None].expand(*where.shape, size)).flatten(-2).topk(count, -1).indices
    best = where.gather(-1, found // size) * size + found % size
    return best


def _of_layer(attend: Attend, index: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: attend(index, q, k, v)
