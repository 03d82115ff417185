"""Sizes and switches of a block head."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("dspark", "dflash", "dflash2")
"""The corrections behind one backbone: Markov with confidence, none, convolutions with a candidate selector."""

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "num_hidden_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """Sizes of one block head. Its width is the target's, whose embedding it uses, and whose LM head where it has none of its own.

    `taps` are indices into transformers' `hidden_states` (index i is the output of layer i - 1). A pass reads `block_size` rows: the
    anchor, which is the last emitted token, and `mask_token_id` in the others. With `sample_from_anchor` every row drafts, row k the
    token k + 1 behind the anchor; without it the anchor's row drafts nothing, and row k the token k behind the anchor.
    `draft_vocab_size` below `vocab_size` means an LM head of its own over that many tokens.

    `rank` is that of the correction: DSpark's Markov matrices or DFlash 2's selector, whose candidates are the `candidates` best of a
    slot. DFlash has none, rank 0. Convolutions have two taps over groups of `conv_group` channels.
    """

    kind: str
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    num_target_layers: int
    taps: tuple[int, ...]
    mask_token_id: int
    num_hidden_layers: int = 2
    block_size: int = 8
    sample_from_anchor: bool = False
    rank: int = 0
    candidates: int = 16
    confidence: bool = False
    conv_group: int = 16
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"BlockConfig.kind is {self.kind!r}; accepted are {', '.join(KINDS)}")
        for name in (*SIZES, "draft_vocab_size", "num_target_layers", "candidates", "conv_group"):
            if getattr(self, name) < 1:
                raise ValueError(f"BlockConfig.{name} is {getattr(self, name)}; it must be at least 1")
        if not self.taps or min(self.taps) < 1 or max(self.taps) > self.num_target_layers:
            raise ValueError(f"taps is {self.taps}; give indices into hidden_states from 1 to {self.num_target_layers}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")
        if self.drafts < 1:
            raise ValueError(f"block_size is {self.block_size}: no row of it drafts; the smallest is {2 - self.sample_from_anchor}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id is {self.mask_token_id}; it must be a token of the target, 0 to {self.vocab_size - 1}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size ({self.draft_vocab_size}) exceeds vocab_size ({self.vocab_size})")
        self._check_kind()

    def _check_kind(self) -> None:
        if (self.kind == "dflash") != (self.rank == 0):
            accepted = "no correction: rank 0" if self.kind == "dflash" else "one of rank 1 or more"
            raise ValueError(f"rank is {self.rank}; {self.kind} heads have {accepted}")
        if self.confidence and self.kind != "dspark":
            raise ValueError(f"the confidence head belongs to dspark, this head is {self.kind}")
        if self.kind != "dflash2":
            return
        if self.draft_vocab_size != self.vocab_size:
            raise ValueError("the selector of dflash2 picks from the whole vocabulary: draft_vocab_size must be vocab_size")
        if self.hidden_size % self.conv_group:
            raise ValueError(f"hidden_size ({self.hidden_size}) must be a multiple of conv_group ({self.conv_group})")
        if self.candidates > self.vocab_size:
            raise ValueError(f"candidates ({self.candidates}) exceeds vocab_size ({self.vocab_size})")

    @property
    def drafts(self) -> int:
        """Tokens that one pass drafts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def own_lm_head(self) -> bool:
        return self.draft_vocab_size < self.vocab_size
