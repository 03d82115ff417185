"""The drafting heads of EAGLE-1, EAGLE-2 and EAGLE-3, as one module.

A head turns the target's hidden state at position t and the token at t + 1 into an estimate of the hidden state at t + 1, again and
again. It holds no KV cache and no mask: every attention goes through the callback `attend` of whoever calls `step`. Training and tests run
this module; drafting runs its weights through a backend's ops (`program.py`).

Letters: B rows, T positions, H head width, H_t target width, Hq / Hkv query / key heads, D head_dim, V vocabulary, V_d draft vocabulary.

Sources: EAGLE (arXiv 2401.15077, section 4), EAGLE-3 (arXiv 2503.01840, section 3). Parameter names follow the checkpoints in
circulation, with `layers.0.` for what the original EAGLE-3 format calls `midlayer.`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from fastspec.errors import CheckpointError
from fastspec.generation.drafters.eagle.rope import rope_frequencies, rotate

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
READABLE = "load the target without quantising or offloading its LM head, or use another head"
SAME = 0.01
"""Relative distance up to which a product in half precision is taken for the one that it was made of."""
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Halves = tuple[Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]], Callable[..., Tensor]]


def _default_rope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Sizes and switches of one head; every checkpoint dialect is read into this one form.

    `kind` is "eagle3", or "eagle" for EAGLE-1/2 heads (the two share their weights). `taps` are indices into transformers'
    `hidden_states` (index i is the output of layer i - 1); for kind "eagle" they are empty: the feature is the last hidden state
    after the target's final norm. `own_lm_head` is False for heads that use the target's LM head: whole, or with `target_rows`
    its rows of the drafted tokens, behind a matrix [H, H] of the head's own.
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
    rope_parameters: dict[str, Any] = field(default_factory=_default_rope)
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

    def __post_init__(self) -> None:
        if self.kind not in ("eagle3", "eagle"):
            raise ValueError(f'HeadConfig.kind is {self.kind!r}; accepted are "eagle3" and "eagle" (EAGLE-1 and EAGLE-2 heads)')
        sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
        for name in (*sizes, "draft_vocab_size", "target_hidden_size", "num_hidden_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"HeadConfig.{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size ({self.draft_vocab_size}) exceeds vocab_size ({self.vocab_size})")
        if self.kind == "eagle":
            self._check_eagle()
        else:
            self._check_eagle3()

    def _check_eagle(self) -> None:
        if self.taps:
            raise ValueError(f'taps is {self.taps}; heads of kind "eagle" read the last hidden state, so taps must be ()')
        if self.hidden_size != self.target_hidden_size or self.draft_vocab_size != self.vocab_size:
            raise ValueError('heads of kind "eagle" use the target\'s LM head: hidden_size and draft_vocab_size must be the target\'s')
        if self.fc_norm or self.input_norm or self.norm_output or self.norm_before_residual:
            raise ValueError('fc_norm, input_norm, norm_output and norm_before_residual belong to kind "eagle3"')
        if self.target_rows:
            raise ValueError('target_rows belongs to kind "eagle3"; heads of kind "eagle" use the target\'s whole LM head')

    def _check_eagle3(self) -> None:
        if not self.taps or min(self.taps) < 0:
            raise ValueError(f"taps is {self.taps}; give the indices into hidden_states that the head reads, such as (2, 16, 29)")
        if self.fc_norm and self.input_norm:
            raise ValueError("fc_norm and input_norm exclude each other")
        whole = self.target_rows or self.draft_vocab_size == self.vocab_size
        if not self.own_lm_head and not (whole and self.hidden_size == self.target_hidden_size):
            raise ValueError("own_lm_head=False uses the target's LM head: draft_vocab_size and hidden_size must be the target's")
        if self.target_rows and self.own_lm_head:
            raise ValueError("target_rows=True uses the target's LM head: own_lm_head must be False")


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
    """One decoder layer. The first layer of an EAGLE-3 head reads the token's embedding beside the hidden state; the first layer of
    an EAGLE-1 head has no input norm; all others are ordinary pre-norm layers."""

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
        self, hidden: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        halves: Halves | None = None,
    ) -> Tensor:  # fmt: skip
        """`halves` are `Layer.before` and `Layer.behind` as they are to be run: compiled, say."""
        before, behind = halves or (Layer.before, Layer.behind)
        q, k, v, residual = before(self, hidden, embedded, cos, sin)
        return behind(self, attend(q, k, v), residual)

    def before(self, hidden: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What comes before attention: queries, keys, values [B, T, heads, D], and the residual [B, T, H]."""
        residual = hidden
        if self.hidden_norm is not None and self.input_layernorm is not None:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            x = torch.cat((self.input_layernorm(embedded), normed), -1)
        else:
            x = hidden if self.input_layernorm is None else self.input_layernorm(hidden)
        return *self.self_attn.heads(x, cos, sin), residual

    def behind(self, mixed: Tensor, residual: Tensor) -> Tensor:
        """What comes behind it, from its output [B, T, Hq, D]: the layer's output [B, T, H]."""
        hidden = residual + self.self_attn.o_proj(mixed.flatten(-2))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class EagleHead(nn.Module):
    """A drafting head; see the module's docstring. Call `bind` once before `step` or `logits`.

    The target's embedding (and LM head, where the head has none of its own) are held by reference: they are not parameters of the
    head, are not saved with it, and do not move with it.
    """

    d2t: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        c = self.config = config
        eagle3 = c.kind == "eagle3"
        self.fc = nn.Linear(len(c.taps) * c.target_hidden_size if eagle3 else 2 * c.hidden_size, c.hidden_size, bias=c.fc_bias)
        self.input_norm = RMSNorm(len(c.taps) * c.target_hidden_size, c.rms_norm_eps) if c.input_norm else None
        self.fc_norm = nn.ModuleList(RMSNorm(c.target_hidden_size, c.rms_norm_eps) for _ in c.taps) if c.fc_norm else None
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps) if eagle3 else None
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False) if eagle3 and c.own_lm_head else None
        self.lm_head_map = nn.Linear(c.hidden_size, c.hidden_size, bias=False) if c.target_rows else None
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))
        self.inv_freq = rope_frequencies(c.rope_parameters, c.head_dim)
        self.rope_scale = 1.0
        self.__dict__["_embed_tokens"] = None
        self.__dict__["_target_lm_head"] = None
        self.__dict__["_joined"] = None

    def bind(self, embed_tokens: nn.Module, lm_head: nn.Module | None) -> None:
        """Take the target's embedding and, for heads without their own, its LM head. References are kept, nothing is copied.

        Raises CheckpointError where the head drafts with rows of the LM head and that has none to give.
        """
        if self.lm_head is None and lm_head is None:
            raise ValueError("this head has no LM head of its own: call bind(embed_tokens, lm_head) with the target's LM head")
        reason = no_rows(lm_head, self.d2t, self.config.hidden_size) if self.lm_head_map is not None else None
        if reason is not None:
            raise CheckpointError(f"{reason}: {READABLE}")
        if lm_head is not self.__dict__["_target_lm_head"]:
            self.__dict__["_joined"] = None
        self.__dict__["_embed_tokens"] = embed_tokens
        self.__dict__["_target_lm_head"] = lm_head if self.lm_head is None else None

    def set_rope(self, inv_freq: Tensor, scale: float) -> None:
        """Use these rotary frequencies (fp32, at most head_dim / 2 of them) and this factor on cos and sin, for scaled RoPE."""
        if inv_freq.ndim != 1 or not 0 < inv_freq.numel() <= self.config.head_dim // 2:
            raise ValueError(f"inv_freq has shape {tuple(inv_freq.shape)}; expected one dimension of at most {self.config.head_dim // 2}")
        self.inv_freq = inv_freq.detach().to(self.fc.weight.device if not self.fc.weight.is_meta else "cpu", torch.float32)
        self.rope_scale = float(scale)

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [B, T, taps * H_t] -> hidden states [B, T, H] that `step` takes; the identity for kind "eagle"."""
        if self.config.kind == "eagle":
            return features
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        hidden: Tensor = self.fc(features)
        return hidden

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, halves: Halves | None = None) -> Tensor:
        """One pass of the head.

        tokens [B, T] target ids, hidden [B, T, H] (from `fuse`, or what the last `step` returned), positions [B, T] int64.
        `attend(layer, q [B, T, Hq, D], k [B, T, Hkv, D], v [B, T, Hkv, D]) -> [B, T, Hq, D]` stores k and v where it likes and attends;
        q and k come normed and rotated. `halves`: see `Layer.forward`.
        Returns [B, T, H]: what `logits` takes and what is fed back into the next step.
        """
        embed = self.__dict__["_embed_tokens"]
        if embed is None:
            raise RuntimeError("the head is not bound to a target: call head.bind(target.get_input_embeddings(), lm_head) first")
        embedded = embed(tokens).to(hidden.dtype)
        cos, sin = self.rotary(positions)
        if self.config.kind == "eagle":
            hidden = self.fc(torch.cat((embedded, hidden), -1))
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, embedded, cos, sin, _of_layer(attend, index), halves)
        return self.norm(hidden) if self.norm is not None and self.config.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """What `step` returned -> logits over the draft vocabulary [..., V_d]."""
        if self.norm is not None and not self.config.norm_output:
            hidden = self.norm(hidden)
        lm_head = self.lm_head if self.lm_head is not None else self.__dict__["_target_lm_head"]
        if lm_head is None:
            raise RuntimeError("the head is not bound to a target: call head.bind(embed_tokens, target.get_output_embeddings()) first")
        if self.lm_head_map is not None:
            mapped = self.lm_head_map(hidden)
            return F.linear(mapped, self._rows(lm_head).to(mapped))
        logits: Tensor = lm_head(hidden)
        return logits

    def readout(self) -> Any:
        """The module that drafting reads logits with: the head's own LM head or the target's, or one made of the target's rows and the
        head's matrix. None where the head needs the target's and is not bound."""
        lm_head: Any = self.__dict__["_target_lm_head"]
        if self.lm_head_map is None or lm_head is None:
            return lm_head if self.lm_head is None else self.lm_head
        made, like = self.__dict__["_joined"], self.fc.weight
        if made is None or (made.weight.device, made.weight.dtype) != (like.device, like.dtype):
            weight = self._product(lm_head)
            made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            made.weight = nn.Parameter(weight, requires_grad=False)
            self.__dict__["_joined"] = made
        return made

    @torch.no_grad()
    def renew(self, *, exactly: bool = False) -> None:
        """Make what `readout` is made of anew, in place, where the target's rows or the head's matrix have changed since: what they make of
        one vector tells, unless it is to be exact. Where the target's LM head cannot be read any more it stays as it is."""
        made, lm_head, between = self.__dict__["_joined"], self.__dict__["_target_lm_head"], self.lm_head_map
        if made is None or between is None or no_rows(lm_head, self.d2t, self.config.hidden_size) is not None:
            return
        if not exactly:
            probe = torch.randn(made.weight.shape[1], generator=torch.Generator().manual_seed(0), device="cpu").to(made.weight)
            mapped, whole = between.weight.float() @ probe.to(between.weight.device).float(), lm_head.weight.detach()
            if whole.dtype is torch.float32 and not isinstance(whole, DTensor):  # rows are gathered in three times the time of a product
                now = (whole @ mapped.to(whole.device))[self._drafted().to(whole.device)]
            else:
                rows = self._rows(lm_head).float()
                now = rows @ mapped.to(rows.device)
            far = (made.weight @ probe).to(now.device, torch.float32) - now
            if float(far.norm()) <= SAME * float(now.norm()):
                return
        made.weight.copy_(self._product(lm_head))

    @torch.inference_mode(False)  # what is made in one call is written to in others
    @torch.no_grad()
    def _product(self, lm_head: Any) -> Tensor:
        reason = no_rows(lm_head, self.d2t, self.config.hidden_size)
        if reason is not None:
            raise CheckpointError(f"{reason}: {READABLE}")
        rows = self._rows(lm_head).float()
        assert self.lm_head_map is not None
        product: Tensor = (rows @ self.lm_head_map.weight.to(rows.device, torch.float32)).to(self.fc.weight)
        return product

    def _rows(self, lm_head: Any) -> Tensor:
        """The rows [V_d, H] of the target's LM head for the drafted tokens; of all processes that hold it together."""
        weight = lm_head.weight.detach()
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        rows: Tensor = weight[self._drafted().to(weight.device)]
        return rows

    def _drafted(self) -> Tensor:
        """The target's ids [V_d] of the drafted tokens."""
        return self.to_target(torch.arange(len(self.d2t), device=self.d2t.device))

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids -> the target's token ids; `d2t` holds offsets."""
        return draft_ids + self.d2t[draft_ids]

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 cos and sin [..., 1, R / 2] of positions [...]."""
        if self.inv_freq is None:
            kind = self.config.rope_parameters.get("rope_type")
            raise RuntimeError(f"rope_type {kind!r} needs its frequencies: call head.set_rope(inv_freq, scale) first")
        angle = positions[..., None, None].to(torch.float32) * self.inv_freq
        return angle.cos() * self.rope_scale, angle.sin() * self.rope_scale

    def __getstate__(self) -> dict[str, Any]:
        """Without the twin that drafts for it (`lowered`), which copies make anew."""
        return self.__dict__ | {"_lowered": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EagleHead:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's own is untyped
        # The frequencies follow the head to its device but stay fp32: half-precision ones corrupt long contexts.
        if self.inv_freq is not None and not self.fc.weight.is_meta:
            self.inv_freq = self.inv_freq.to(self.fc.weight.device)
        return self


def no_rows(lm_head: nn.Module | None, d2t: Tensor, width: int) -> str | None:
    """Why a target's LM head has no rows [width] in plain floating point for the tokens that `d2t` names, or None where it has."""
    weight = getattr(lm_head, "weight", None)
    if not isinstance(weight, Tensor) or type(weight) not in (Tensor, nn.Parameter, DTensor):
        found = type(lm_head if weight is None else weight).__name__
    elif weight.is_meta or weight.dtype not in FLOATS:
        found = "on the device meta, without values" if weight.is_meta else str(weight.dtype)
    else:
        last = int((d2t + torch.arange(len(d2t), device=d2t.device)).max())
        if weight.ndim == 2 and weight.shape[0] > last and weight.shape[1] == width:
            return None
        found = f"of shape {list(weight.shape)}"
    return f"the head drafts with rows [{width}] of the target's LM head, in plain floating point, and that is {found}"


def _of_layer(attend: Attend, index: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: attend(index, q, k, v)
