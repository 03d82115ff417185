"""A head's weights run by a backend's ops, whole or cut over the processes that hold its target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastspec.generation.decoder_layer import (
    FullAttention,
    Gated,
    LayerFamily,
    LayerParts,
    Linear,
    Nodes,
    Norm,
    Product,
    RmsNorm,
    StoredLinears,
    Summed,
    for_heads,
    gated,
    is_plain,
    joint,
    one_by_one,
    pack,
    product,
)
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.heads.module import DraftHead, EagleHead, Layer, MtpHead, RMSNorm
from fastspec.generation.heads.rounded_linear import RoundedLinear
from fastspec.generation.layer_state import FullAttentionState
from fastspec.generation.ops import Ops
from fastspec.generation.whole_layers import WholeLayers
from fastspec.kernels.drafting.reference import Candidates, InputWeights
from fastspec.kernels.linear.reference import SILU, DeferredProduct, DeferredSum, joined

LEAST_BYTES = 256 * 1024 * 1024
"""Weights from which on a head is cut: a GPU with 3 TB/s reads as much in 85 us, and the joins of a pass take 40."""


@dataclass(frozen=True, slots=True)
class LayerCut:
    """A process's part of a layer of H channels: `qkv` of some heads [M, K], `out` [H, M], `gate_up` [2 * I, H] and
    `down` [H, I], with biases; those of sums are the first process's to add."""

    qkv: tuple[Tensor, Tensor | None]
    out: tuple[Tensor, Tensor | None]
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cut:
    """A process's part of a head; `lm_head` [V_d / processes, H] is None where the head has no plain one of its own, or
    one that does not divide."""

    group: dist.ProcessGroup
    layers: tuple[LayerCut, ...]
    lm_head: Tensor | None

    def __repr__(self) -> str:
        return f"Cut over {self.group.size()} processes"  # the same in all, which compare their calls

    def qkv(self, index: int, ops: Ops) -> Linear:
        """Queries, keys and values of this process's heads."""
        weight, bias = self.layers[index].qkv
        return lambda x: ops.linear(x, weight, bias)

    def out(self, index: int, ops: Ops) -> Product:
        """The sum of the processes' heads."""
        return self._sum(*self.layers[index].out, ops)

    def mlp(self, index: int, ops: Ops) -> Product:
        """The gated feed-forward."""
        weight, bias = self.layers[index].gate_up
        down = self._sum(*self.layers[index].down, ops)
        return lambda x: down(ops.gate_up(x, weight, bias, SILU))

    def vocabulary(self, ops: Ops) -> Linear:
        """Logits over the whole draft vocabulary."""
        weight, group = self.lm_head, self.group
        assert weight is not None
        wide = weight.shape[0] * group.size()
        return lambda x: ops.all_gather(ops.linear(x, weight, None), wide, group)

    def _sum(self, weight: Tensor, bias: Tensor | None, ops: Ops) -> Product:
        group, multiply = self.group, ops.linear_parts or ops.linear
        return lambda x: DeferredSum(DeferredProduct(x, weight, bias, multiply), group, ops.all_reduce)


_cuts: WeakKeyDictionary[DraftHead, tuple[object, Cut]] = WeakKeyDictionary()
"""The last cut of every head, made anew when its weights have changed."""


def cut_over(head: DraftHead, group: dist.ProcessGroup | None) -> Cut | None:
    """This process's part of a head, or None of one that stays whole: one process holds the target, the head is small,
    its heads or channels do not divide, or its layer is of the target's own class."""
    config = head.config
    if not isinstance(head, EagleHead):
        return None
    modules = (*head.layers, *(() if head.lm_head is None else (head.lm_head,)))
    if group is None or sum(each.nbytes for module in modules for each in module.parameters()) < LEAST_BYTES:
        return None
    size = group.size()
    if config.num_attention_heads % size or config.num_key_value_heads % size or config.intermediate_size % size:
        return None
    weights = tuple((each.data_ptr(), 0 if each.is_inference() else each._version) for each in head.parameters())
    made_of = group, weights, head.lm_head is not None and is_plain(head.lm_head)
    known = _cuts.get(head)
    if known is None or known[0] != made_of:
        known = _cuts[head] = made_of, _cut(head, group)
    return known[1]


def _cut(head: EagleHead, group: dist.ProcessGroup) -> Cut:
    rank, size = group.rank(), group.size()

    def rows(*modules: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """Some outputs of each of these layers, side by side."""
        biases = [module.bias.detach().chunk(size)[rank] for module in modules if module.bias is not None]
        weight = torch.cat([module.weight.detach().chunk(size)[rank] for module in modules])
        return weight, torch.cat(biases) if biases else None

    def columns(module: nn.Linear) -> tuple[Tensor, Tensor | None]:
        bias = None if module.bias is None or rank else module.bias.detach()
        return module.weight.detach().chunk(size, 1)[rank].contiguous(), bias

    layers = []
    for layer in cast(Iterable[Layer], head.layers):
        attn, mlp = layer.self_attn, layer.mlp
        layers.append(
            LayerCut(
                rows(attn.q_proj, attn.k_proj, attn.v_proj),
                columns(attn.o_proj),
                rows(mlp.gate_proj, mlp.up_proj),
                columns(mlp.down_proj),
            )
        )
    last = head.lm_head
    divides = last is not None and is_plain(last) and last.bias is None and head.config.draft_vocab_size % size == 0
    own = last.weight.detach().chunk(size)[rank] if last is not None and divides else None
    return Cut(group, tuple(layers), own)


class HeadProgram:
    """Passes of one head, or of this process's `cut` of it, whose layers keep their keys and values in `state`."""

    def __init__(self, bound: BoundHead, ops: Ops, state: FullAttentionState, cut: Cut | None = None) -> None:
        config, head = bound.config, bound.module
        self.head, self.binding, self.ops, self.d2t = head, bound.binding, ops, bound.d2t
        self.config, self.state, self.cut = config, state, cut
        if cut is None and ops.packs and not isinstance(head.fc, RoundedLinear):
            self._pack()
        self.layers = [self._parts(index) for index in range(config.num_hidden_layers)]
        # `feed` norms what the first layer reads
        self.whole = WholeLayers([replace(self.layers[0], input_norm=None), *self.layers[1:]], ops)
        self.fc = self._product((head.fc,))
        self.norm = None if head.norm is None else self._norm(head.norm)
        readout = bound.readout()
        self.vocabulary: Callable[[Tensor], Tensor] = (
            self._product((readout,)) if isinstance(readout, RoundedLinear) else readout
        )
        """The product that logits are read with."""
        self.weight = cast(Tensor, readout.weight).detach() if is_plain(readout) and readout.bias is None else None
        if cut is not None and cut.lm_head is not None:
            self.weight, self.vocabulary = None, cut.vocabulary(ops)
        self.look_up: Callable[[Tensor], Tensor] | None = None
        """The embedding where several processes hold the target together; None: the bound module."""

    @property
    def _eagle(self) -> EagleHead:
        return cast(EagleHead, self.head)

    def _layer(self, index: int) -> Layer:
        return cast(Layer, self._eagle.layers[index])

    def _pack(self) -> None:
        for layer in cast(Iterable[Layer], self._eagle.layers):
            attn, mlp = layer.self_attn, layer.mlp
            pack((attn.q_proj, attn.k_proj, attn.v_proj))
            pack((mlp.gate_proj, mlp.up_proj))

    def _norm(self, module: Any) -> Norm:
        return RmsNorm(self.ops, module, module.eps)

    def _product(self, layers: tuple[Any, ...], *, parts: bool = False) -> Any:
        """`product` of plain layers, or of those in 8 bits."""
        if not isinstance(layers[0], RoundedLinear):
            return product(self.ops, layers, parts=parts)
        return StoredLinears(self.ops, layers, parts=parts)

    def _mlp(self, gate: Any, up: Any, down: Product) -> Product:
        """`gated` of plain layers, or of those in 8 bits."""
        if not isinstance(gate, RoundedLinear):
            return gated(self.ops, gate, up, down)
        return Gated(StoredLinears(self.ops, (gate, up), SILU), down)

    def _parts(self, index: int) -> LayerParts:
        layer, ops, cut = self._layer(index), self.ops, self.cut
        attn, mlp, config = layer.self_attn, layer.mlp, self.config
        down = self._product((mlp.down_proj,), parts=True)
        return LayerParts(
            input_norm=None if layer.input_layernorm is None else self._norm(layer.input_layernorm),
            mixer=FullAttention(
                ops,
                self.state,
                index,
                scale=config.head_dim**-0.5,
                eps=config.rms_norm_eps,
                qkv=for_heads(self._product((attn.q_proj, attn.k_proj, attn.v_proj)))
                if cut is None
                else cut.qkv(index, ops),
                out=self._product((attn.o_proj,), parts=True) if cut is None else cut.out(index, ops),
                q_norm=None if attn.q_norm is None else attn.q_norm.weight,
                k_norm=None if attn.k_norm is None else attn.k_norm.weight,
            ),
            mlp_norm=self._norm(layer.post_attention_layernorm),
            mlp=self._mlp(mlp.gate_proj, mlp.up_proj, down) if cut is None else cut.mlp(index, ops),
        )

    def packed(self) -> tuple[Tensor, Tensor] | None:
        """The first layer's packed query-key-value and gate-up weights, or None where they lie apart."""
        layer = self._layer(0)
        attn, mlp = layer.self_attn, layer.mlp
        groups = (attn.q_proj, attn.k_proj, attn.v_proj), (mlp.gate_proj, mlp.up_proj)
        qkv, gate_up = (joint([each.weight for each in group]) for group in groups)
        return None if qkv is None or gate_up is None else (qkv, gate_up)

    def tables(self, count: int) -> tuple[Tensor, Tensor]:
        """fp32 cos and sin [count, R / 2] of the first positions."""
        cos, sin = self._eagle.rotary(torch.arange(count, device=self.head.like.device))
        return cos[:, 0].contiguous(), sin[:, 0].contiguous()

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [B, T, F] -> hidden states [B, T, H], as `EagleHead.fuse`."""
        head = self._eagle
        if self.config.kind == "eagle":
            return features
        if head.input_norm is not None:
            features = self._norm(head.input_norm)(features)[0]
        if head.fc_norm is not None:
            normed = torch.empty_like(features)
            width = self.config.target_hidden_size
            for index, module in enumerate(cast(Iterable[RMSNorm], head.fc_norm)):
                part = slice(index * width, (index + 1) * width)
                self._norm(module)(features[..., part], out=normed[..., part])
            features = normed
        fused: Tensor = self.fc(features)
        return fused

    def feed(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The first layer's normed input of tokens [B, T] and hidden [B, T, H], and its residual [B, T, H]."""
        table = self._table(hidden)
        if table is not None:
            return self._first(self.ops.head_input(tokens, hidden, self._input_weights(table)), hidden)
        embedded = (self.look_up or self.binding.embedding)(tokens).to(hidden.dtype)
        if self.config.kind == "eagle":
            hidden = self.fc(torch.cat((embedded, hidden), -1))
            return hidden, hidden
        width = hidden.shape[-1]
        x = hidden.new_empty(*hidden.shape[:-1], 2 * width)
        of_tokens, of_states = self._first_norms()
        self._norm(of_tokens)(embedded, out=x[..., :width])
        self._norm(of_states)(hidden, out=x[..., width:])
        return self._first(x, hidden)

    def feed_frontier(
        self, tokens: Tensor, index: Tensor, hidden: Tensor, words: Tensor, slot: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`feed` of the nodes of `Ops.next_frontier`, and their ancestors."""
        table = self._table(hidden)
        if table is None:
            tokens, hidden, words = self.ops.next_frontier(tokens.contiguous(), index.contiguous(), hidden, words, slot)
            return *self.feed(tokens, hidden), words
        x, hidden, words = self.ops.frontier_input(tokens, index, hidden, words, slot, self._input_weights(table))
        return *self._first(x, hidden), words

    def _table(self, hidden: Tensor) -> Tensor | None:
        """The embedding's table [V, H] where the ops may look tokens up themselves; not for kind "eagle"."""
        embed = self.binding.embedding
        if self.config.kind == "eagle" or not is_plain(embed, nn.Embedding) or embed.max_norm is not None:
            return None
        table: Tensor = embed.weight.detach()
        return table if table.dtype == hidden.dtype and table.is_contiguous() else None

    def _input_weights(self, table: Tensor) -> InputWeights:
        """Weights that `Ops.head_input` reads: the embedding's table, and the first layer's norms."""
        of_tokens, of_states = self._first_norms()
        return InputWeights(table, of_tokens.weight, of_states.weight, self.config.rms_norm_eps)

    def _first_norms(self) -> tuple[RMSNorm, RMSNorm]:
        """The first layer's norms of embeddings and of states, which EAGLE-3 heads have."""
        layer = self._layer(0)
        assert layer.input_layernorm is not None and layer.hidden_norm is not None
        return layer.input_layernorm, layer.hidden_norm

    def _first(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """A joined input x [B, T, 2 * H], whose second half are the normed states, and the residual."""
        layer = self._layer(0)
        return x, x[..., hidden.shape[-1] :] if layer.norm_before_residual else hidden

    @property
    def writes(self) -> FullAttention | None:
        """The mixer of a head's only layer, which needs nothing but keys and values of a token after which nothing is
        drafted; None of a head that has more layers, or another mixer."""
        mixer = self.layers[0].mixer
        return mixer if len(self.layers) == 1 and isinstance(mixer, FullAttention) and mixer.owns else None

    def step(self, x: Tensor, total: Tensor, nodes: Nodes) -> tuple[Tensor, Tensor]:
        """One pass over the result of `feed` -> the states fed back, and those that the LM head reads, [B, T, H]."""
        change, total = self.whole(total, nodes, x=x) or one_by_one(self.layers, total, None, nodes, {}, x)
        if self.norm is None:
            state = total if change is None else total + joined(change)
            return state, state
        normed, state = self.norm(total) if change is None else self.norm(change, total)
        return (normed if self.config.norm_output else state), normed

    def logits(self, readout: Tensor) -> Tensor:
        """The second result of `step` -> logits over the draft vocabulary [..., V_d]."""
        if self.weight is not None:
            return self.ops.linear(readout, self.weight, None)
        return self.vocabulary(readout)

    def expand(
        self, readout: Tensor, scores: Tensor, count: int, out: Candidates
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`Ops.topk_expand` of readout [B, M, H] with the head's LM head, or with a foreign one's logits."""
        x = readout if self.weight is not None else self.logits(readout)
        return self.ops.topk_expand(x, self.weight, scores, count, self.d2t, out)  # type: ignore[return-value]


class MtpProgram(HeadProgram):
    """Passes of an MTP head, whose layer and norms its target's family runs."""

    head: MtpHead

    def __init__(self, bound: BoundHead, ops: Ops, state: FullAttentionState, cut: Cut | None = None) -> None:
        assert bound.binding.family is not None  # who makes such a head sees to it
        self.family: LayerFamily = bound.binding.family
        super().__init__(bound, ops, state, cut)
        self.fc = self._product((self.head.fc,), parts=True)
        self.token_norm, self.state_norm = self._norm(self.head.token_norm), self._norm(self.head.state_norm)

    def _pack(self) -> None:
        self.family.pack(self.head.layer)

    def _norm(self, module: Any) -> Norm:
        return self.family.norm(module, self.ops)

    def _parts(self, index: int) -> LayerParts:
        return self.family.layer(self.head.layer, self.ops, self.state)

    def tables(self, count: int) -> tuple[Tensor, Tensor]:
        return self.family.tables(count)

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def feed(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self._table(hidden) is not None:
            return super().feed(tokens, hidden)
        embedded = (self.look_up or self.binding.embedding)(tokens).to(hidden.dtype)
        return self._first(torch.cat((self.token_norm(embedded)[0], self.state_norm(hidden)[0]), -1), hidden)

    def _table(self, hidden: Tensor) -> Tensor | None:
        forms = {(each.eps, each.offset) for each in (self.token_norm, self.state_norm) if isinstance(each, RmsNorm)}
        both = isinstance(self.token_norm, RmsNorm) and isinstance(self.state_norm, RmsNorm)
        return super()._table(hidden) if both and len(forms) == 1 else None

    def _input_weights(self, table: Tensor) -> InputWeights:
        of_tokens, of_states = cast(RmsNorm, self.token_norm), cast(RmsNorm, self.state_norm)
        return InputWeights(table, of_tokens.module.weight, of_states.module.weight, of_tokens.eps, of_tokens.offset)

    def _first(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """A joined input x [B, T, 2 * H], fused and normed, and the residual."""
        fused: Summed = self.fc(x)
        norm = self.layers[0].input_norm
        if norm is not None:
            return norm(fused)
        total = joined(fused)
        return total, total


def program_of(bound: BoundHead, ops: Ops, state: FullAttentionState, cut: Cut | None) -> HeadProgram:
    """The program of a head."""
    return (MtpProgram if isinstance(bound.module, MtpHead) else HeadProgram)(bound, ops, state, cut)
