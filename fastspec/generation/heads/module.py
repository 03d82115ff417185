"""Drafting heads of EAGLE-1, EAGLE-2 and EAGLE-3, as one module, and those that come with a checkpoint (MTP).

A head turns the target's hidden state at position t and the token at t + 1 into an estimate of the hidden state at t +
1. It holds no KV cache and no mask: attention is the callback `attend` of `step`. Training and tests run this module;
drafting runs its weights through a backend's ops (`generation/drafters/head_program.py`).

Letters: B rows, T positions, H head width, H_t target width, Hq / Hkv query / key heads, D head_dim, V vocabulary, V_d
draft vocabulary.

Sources: EAGLE (arXiv 2401.15077, section 4), EAGLE-3 (arXiv 2503.01840, section 3). Parameter names follow the
checkpoints in circulation, with `layers.0.` for what the original EAGLE-3 format calls `midlayer.`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from fastspec.generation.decoder_layer import Attend, LayerFamily
from fastspec.generation.heads.rounded_linear import RoundedLinear
from fastspec.kernels.quantised.reference import StoredWeight

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Halves = tuple[Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]], Callable[..., Tensor]]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, T, heads, D] in the half-split order, in fp32, by cos and sin [B, T, 1, R / 2]."""
    half = cos.shape[-1]
    wide = x.float()
    a, b = wide[..., :half], wide[..., half : 2 * half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, wide[..., 2 * half :]), -1).to(x.dtype)


def rope_frequencies(rope: Mapping[str, Any], head_dim: int) -> Tensor | None:
    """fp32 frequencies [R / 2] of the default and linear types; None for those that `EagleHead.set_rope` supplies."""
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear"):
        return None
    size = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    exponent = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float() / size
    inv_freq: Tensor = 1.0 / (rope.get("rope_theta", 10000.0) ** exponent)
    return inv_freq / rope["factor"] if kind == "linear" else inv_freq


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Sizes and switches of one head, whatever its dialect. Raises ValueError where they do not fit each other.

    `kind` is "eagle3", "eagle" for EAGLE-1/2 heads (the two share their weights), or "mtp". `taps` are indices into
    transformers' `hidden_states` (index i is the output of layer i - 1); where they are empty, as for kind "eagle",
    the feature is the last hidden state after the target's final norm. `last_tap_before_norm`: a tap after the
    target's last layer is before that norm, where `hidden_states` has it after the norm. `own_lm_head` is False for
    heads that use the target's LM head: whole, or with `target_rows` its rows of the drafted tokens, after a matrix
    [H, H] of the head's own.
    """

    kind: str = "eagle3"
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    num_hidden_layers: int = 1
    taps: tuple[int, ...] = ()
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    qk_norm: bool = False
    fc_norm: bool = False
    input_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    own_lm_head: bool = True
    target_rows: bool = False
    last_tap_before_norm: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("eagle3", "eagle", "mtp"):
            raise ValueError(
                f'HeadConfig.kind is {self.kind!r}; accepted are "eagle3", "eagle" (EAGLE-1/2 heads) and "mtp"'
            )
        sizes = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size"
        for name in (*sizes.split(), "draft_vocab_size", "target_hidden_size", "num_hidden_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"HeadConfig.{name} is {getattr(self, name)}; it must be at least 1")
        for holds, mistake in self._mistakes():
            if holds:
                raise ValueError(mistake)

    def _mistakes(self) -> list[tuple[bool, str]]:
        """Conditions under which sizes and switches do not fit each other, in words."""
        mistakes: list[tuple[bool, str]] = [
            (
                self.num_attention_heads % self.num_key_value_heads > 0,
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})",
            ),
            (self.head_dim % 2 > 0, f"head_dim is {self.head_dim}; rotary embedding needs an even one"),
            (
                self.draft_vocab_size > self.vocab_size,
                f"draft_vocab_size ({self.draft_vocab_size}) exceeds vocab_size ({self.vocab_size})",
            ),
        ]
        whole = self.draft_vocab_size == self.vocab_size
        as_wide = self.hidden_size == self.target_hidden_size
        if self.kind == "eagle":
            norms = "fc_norm", "input_norm", "norm_output", "norm_before_residual"
            switches = *norms, "target_rows", "last_tap_before_norm"
            mistakes += [
                (
                    bool(self.taps),
                    f'taps is {self.taps}; heads of kind "eagle" read the last hidden state, so taps must be ()',
                ),
                (
                    not (whole and as_wide),
                    'heads of kind "eagle" use the target\'s LM head: hidden_size and draft_vocab_size must be the '
                    "target's",
                ),
                (any(getattr(self, name) for name in switches), f'{", ".join(switches)} belong to kind "eagle3"'),
            ]
        elif self.kind == "eagle3":
            mistakes += [
                (
                    not self.taps or min(self.taps) < 0,
                    f"taps is {self.taps}; give the indices into hidden_states that the head reads, such as "
                    "(2, 16, 29)",
                ),
                (self.fc_norm and self.input_norm, "fc_norm and input_norm exclude each other"),
                (
                    not self.own_lm_head and not ((whole or self.target_rows) and as_wide),
                    "own_lm_head=False uses the target's LM head: draft_vocab_size and hidden_size must be the "
                    "target's",
                ),
                (
                    self.target_rows and self.own_lm_head,
                    "target_rows=True uses the target's LM head: own_lm_head must be False",
                ),
            ]
        return mistakes


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32 and returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Projections, q/k norm and rotary embedding; the attention itself is the caller's."""

    def __init__(self, config: HeadConfig, input_size: int) -> None:
        super().__init__()
        c, d = config, config.head_dim
        self.head_dim = d
        self.q_proj = nn.Linear(input_size, c.num_attention_heads * d, bias=c.attention_bias)
        self.k_proj = nn.Linear(input_size, c.num_key_value_heads * d, bias=c.attention_bias)
        self.v_proj = nn.Linear(input_size, c.num_key_value_heads * d, bias=c.attention_bias)
        self.o_proj = nn.Linear(c.num_attention_heads * d, c.hidden_size, bias=c.attention_bias and c.kind == "eagle3")
        self.q_norm = RMSNorm(d, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(d, c.rms_norm_eps) if c.qk_norm else None

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed and rotated queries and keys, and values, [B, T, heads, D] of x [B, T, input_size]."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v


class SwiGLU(nn.Module):
    """The gated feed-forward of the Llama family."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm decoder layer. The first of an EAGLE-3 head reads the token's embedding beside the hidden state, the
    first of an EAGLE-1 head has no input norm."""

    def __init__(self, config: HeadConfig, index: int) -> None:
        super().__init__()
        c = config
        self.joins_embedding = c.kind == "eagle3" and index == 0
        self.norm_before_residual = c.norm_before_residual
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps) if self.joins_embedding else None
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps) if c.kind == "eagle3" or index > 0 else None
        joined = 2 * c.hidden_size if self.joins_embedding else c.hidden_size
        self.self_attn = Attention(c, joined)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        halves: Halves | None = None,
    ) -> Tensor:
        """`halves` are `Layer.before` and `Layer.after` as they are to be run: compiled, say."""
        before, after = halves or (Layer.before, Layer.after)
        q, k, v, residual = before(self, hidden, embedded, cos, sin)
        return after(self, attend(q, k, v), residual)

    def before(
        self, hidden: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values [B, T, heads, D], and the residual [B, T, H]."""
        residual = hidden
        if self.hidden_norm is not None and self.input_layernorm is not None:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            x = torch.cat((self.input_layernorm(embedded), normed), -1)
        else:
            x = hidden if self.input_layernorm is None else self.input_layernorm(hidden)
        return *self.self_attn.heads(x, cos, sin), residual

    def after(self, mixed: Tensor, residual: Tensor) -> Tensor:
        """The layer's output [B, T, H], from that of its attention [B, T, Hq, D]."""
        hidden = residual + self.self_attn.o_proj(mixed.flatten(-2))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def drafted_ids(d2t: Tensor) -> Tensor:
    """The target's ids [V_d] of drafted tokens, of the offsets d2t [V_d] to them."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


ReadStored = Callable[[nn.Module], StoredWeight | None]
"""Reader of a linear layer's weight as it is stored, which gives None where it is not read."""


@dataclass(frozen=True, eq=False)
class Binding:
    """Modules that a head uses, no parameters of it: `embedding` is the target's, or one that the head brought
    (`own_embedding`); `lm_head` is the target's, None for a head with one of its own; `family` runs its layer, and
    `stored` reads a packed LM head."""

    embedding: nn.Module
    lm_head: nn.Module | None
    own_embedding: bool = False
    family: LayerFamily | None = None
    stored: ReadStored | None = None


class DraftHead(nn.Module):
    """Parts of all drafting heads: a fusion `fc` of what they read, a final norm or none, an LM head or the target's,
    and the map `d2t` of their draft vocabulary, whose values are offsets."""

    config: HeadConfig
    fc: nn.Linear
    norm: nn.Module | None
    lm_head: nn.Linear | None
    lm_head_map: nn.Linear | None
    d2t: Tensor
    binding: Binding | None

    @property
    def like(self) -> Tensor:
        """A tensor on the head's device and in its dtype."""
        fc: nn.Module = self.fc
        return fc.like if isinstance(fc, RoundedLinear) else self.fc.weight

    @property
    def is_rounded(self) -> bool:
        """True where the head's products are read in 8 bits."""
        fc: nn.Module = self.fc
        return isinstance(fc, RoundedLinear)

    def bind(self, embed_tokens: nn.Module, lm_head: nn.Module | None) -> None:
        """Take the target's embedding and, for heads without their own, its LM head, by reference."""
        if self.lm_head is None and lm_head is None:
            raise ValueError(
                "this head has no LM head of its own: call bind(embed_tokens, lm_head) with the target's LM head"
            )
        self.binding = Binding(embed_tokens, lm_head if self.lm_head is None else None)

    @property
    def bound(self) -> Binding:
        """The modules that `bind` was given. Raises RuntimeError before that."""
        if self.binding is None:
            raise RuntimeError(
                "the head is not bound to a target: call head.bind(target.get_input_embeddings(), lm_head) first"
            )
        return self.binding

    def target_rows(self, lm_head: nn.Module, ids: Tensor | None = None) -> Tensor:
        """Rows [V_d, H] of the target's LM head, of all its processes, for the drafted tokens, or for `ids`."""
        weight = cast(Tensor, lm_head.weight).detach()
        ids = (self.drafted() if ids is None else ids).to(weight.device)
        if not isinstance(weight, DTensor):
            return weight[ids]
        rows = F.embedding(DTensor.from_local(ids, weight.device_mesh, run_check=False), weight)
        return cast(DTensor, rows).full_tensor()

    @property
    def readout(self) -> nn.Module:
        """The LM head, its own or the target's."""
        lm_head = self.bound.lm_head if self.lm_head is None else self.lm_head
        assert lm_head is not None  # `bind` sees to it
        return lm_head

    def drafted(self) -> Tensor:
        """The target's ids [V_d] of the drafted tokens."""
        return drafted_ids(self.d2t)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids -> the target's token ids."""
        return draft_ids + self.d2t[draft_ids]


class MtpHead(DraftHead):
    """The multi-token prediction layer of a target's own checkpoint (DeepSeek-V3, arXiv 2412.19437, section 2.2): norms
    of the token's embedding and of the hidden state, their fusion, one layer of the target's own class, a final norm.

    `layer` and the norms, which `norm` makes, are modules of the target's family, which runs them.
    """

    def __init__(self, config: HeadConfig, layer: nn.Module, norm: Callable[[], nn.Module], *, final: bool) -> None:
        super().__init__()
        width = config.hidden_size
        self.config, self.layer = config, layer
        self.token_norm, self.state_norm = norm(), norm()
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.norm = norm() if final else None
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False) if config.own_lm_head else None
        self.lm_head_map = None
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64, device="cpu"), False)
        self.binding = None
        self.source: tuple[str, str | None] | None = None
        """The directory or hub id, and the revision there, that holds the weights."""
        self.told = False
        """True once it was said that an adapter changed the target."""

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden states [B, T, H] of `step`: the target's last ones, after its final norm."""
        return features

    def step(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, halves: Halves | None = None
    ) -> Tensor:
        """One pass with gradients, as `EagleHead.step`; there are no `halves` of a family's layer."""
        family = self.bound.family
        assert family is not None  # who makes such a head sees to it
        embedded = self.bound.embedding(tokens).to(hidden.dtype)
        total = self.fc(torch.cat((self.token_norm(embedded), self.state_norm(hidden)), -1))
        out = family.forward(self.layer, total, positions, attend)
        return out if self.norm is None else self.norm(out)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of `step` -> logits [..., V]."""
        logits: Tensor = self.readout(hidden)
        return logits


class EagleHead(DraftHead):
    """Drafting head of the EAGLE family, a plain module. Call `bind` once before `step` or `logits`."""

    norm: RMSNorm | None
    input_norm: RMSNorm | None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        c = self.config = config
        eagle3 = c.kind == "eagle3"
        self.fc = nn.Linear(
            len(c.taps) * c.target_hidden_size if eagle3 else 2 * c.hidden_size, c.hidden_size, bias=c.fc_bias
        )
        self.input_norm = RMSNorm(len(c.taps) * c.target_hidden_size, c.rms_norm_eps) if c.input_norm else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(c.target_hidden_size, c.rms_norm_eps) for _ in c.taps) if c.fc_norm else None
        )
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps) if eagle3 else None
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False) if eagle3 and c.own_lm_head else None
        self.lm_head_map = nn.Linear(c.hidden_size, c.hidden_size, bias=False) if c.target_rows else None
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))
        self.inv_freq = rope_frequencies(c.rope_parameters, c.head_dim)
        self.rope_scale = 1.0
        self.binding = None

    def set_rope(self, inv_freq: Tensor, scale: float) -> None:
        """Use these rotary frequencies (fp32, head_dim / 2 at most) and this factor on cos and sin."""
        if inv_freq.ndim != 1 or not 0 < inv_freq.numel() <= self.config.head_dim // 2:
            raise ValueError(
                f"inv_freq has shape {tuple(inv_freq.shape)}; expected one dimension of at most "
                f"{self.config.head_dim // 2}"
            )
        place = "cpu" if self.like.is_meta else self.like.device
        self.inv_freq = inv_freq.detach().to(place, torch.float32)
        self.rope_scale = float(scale)

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [B, T, taps * H_t] -> hidden states [B, T, H] of `step`; the identity for kind "eagle"."""
        if self.config.kind == "eagle":
            return features
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        hidden: Tensor = self.fc(features)
        return hidden

    def step(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, halves: Halves | None = None
    ) -> Tensor:
        """One pass of the head over tokens [B, T] (target ids), hidden [B, T, H] (of `fuse` or the last `step`), and
        positions [B, T] int64 -> [B, T, H], which `logits` and the next step take.

        `attend(layer, q [B, T, Hq, D], k [B, T, Hkv, D], v [B, T, Hkv, D]) -> [B, T, Hq, D]` stores k and v where it
        likes and attends; q and k come normed and rotated. `halves` are those of `Layer.forward`.
        """
        embedded = self.bound.embedding(tokens).to(hidden.dtype)
        cos, sin = self.rotary(positions)
        if self.config.kind == "eagle":
            hidden = self.fc(torch.cat((embedded, hidden), -1))
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, embedded, cos, sin, partial(attend, index), halves)
        return self.norm(hidden) if self.norm is not None and self.config.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of `step` -> logits over the draft vocabulary [..., V_d]."""
        if self.norm is not None and not self.config.norm_output:
            hidden = self.norm(hidden)
        if self.lm_head_map is not None:
            mapped = self.lm_head_map(hidden)
            return F.linear(mapped, self.target_rows(self.readout).to(mapped))
        logits: Tensor = self.readout(hidden)
        return logits

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 cos and sin [..., 1, R / 2] of positions [...]."""
        if self.inv_freq is None:
            kind = self.config.rope_parameters.get("rope_type")
            raise RuntimeError(f"rope_type {kind!r} needs its frequencies: call head.set_rope(inv_freq, scale) first")
        angle = positions[..., None, None].to(torch.float32) * self.inv_freq
        return angle.cos() * self.rope_scale, angle.sin() * self.rope_scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EagleHead:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's own is untyped
        # The frequencies follow the head to its device but stay fp32: half-precision ones corrupt long contexts.
        if self.inv_freq is not None and not self.like.is_meta:
            self.inv_freq = self.inv_freq.to(self.like.device)
        return self
