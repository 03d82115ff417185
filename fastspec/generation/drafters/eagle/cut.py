"""A head cut over the processes that hold its target: each has some heads of its attention, some channels of its feed-forward and some
outputs of its LM head, and the passes are joined by two sums a layer and one join of logits. To read a large head takes longer than these
joins; small heads stay whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastspec.generation.heads.module import EagleHead, Layer
from fastspec.generation.layers.decoder import is_plain
from fastspec.generation.layers.mixers import Linear, Product
from fastspec.generation.ops import Ops
from fastspec.kernels.linear.reference import SILU, Addends, Later

LEAST_BYTES = 256 * 1024 * 1024
"""Weights of layers and LM head from which on a head is cut: a GPU with 3 TB/s reads as much in 85 us, and the joins of a pass take 40."""


@dataclass(frozen=True, slots=True)
class LayerCut:
    """What a process has of a layer of H channels: `qkv` of some heads [M, K], `out` [H, M], `gate_up` [2 * I, H] and `down` [H, I], with
    their biases; those of sums are the first process's to add."""

    qkv: tuple[Tensor, Tensor | None]
    out: tuple[Tensor, Tensor | None]
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cut:
    """What a process has of a head, as its weights are now; `lm_head` [V_d / processes, H] is None where the head has no plain one of
    its own, or one that does not divide."""

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
        """What the processes' heads add up to."""
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
        return lambda x: Addends(Later(x, weight, bias, multiply), group, ops.all_reduce)


_held: WeakKeyDictionary[EagleHead, tuple[object, Cut]] = WeakKeyDictionary()
"""The last cut of every head, made anew when its weights have changed."""


def cut_over(head: EagleHead, group: dist.ProcessGroup | None) -> Cut | None:
    """This process's part of a head, or None of one that stays whole: where one process holds the target, where the head is small, and
    where its heads or channels do not divide."""
    config = head.config
    if group is None or _bytes(head) < LEAST_BYTES:
        return None
    size = group.size()
    if config.num_attention_heads % size or config.num_key_value_heads % size or config.intermediate_size % size:
        return None
    weights = tuple((each.data_ptr(), 0 if each.is_inference() else each._version) for each in head.parameters())
    made_of = group, weights, head.lm_head is not None and is_plain(head.lm_head)
    known = _held.get(head)
    if known is None or known[0] != made_of:
        known = _held[head] = made_of, _cut(head, group)
    return known[1]


def _bytes(head: EagleHead) -> int:
    modules = (*head.layers, *(() if head.lm_head is None else (head.lm_head,)))
    return sum(parameter.nbytes for module in modules for parameter in module.parameters())


def _cut(head: EagleHead, group: dist.ProcessGroup) -> Cut:
    rank, size = group.rank(), group.size()

    def rows(*modules: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """Some outputs of each of these layers, side by side."""
        biases = [module.bias.detach().chunk(size)[rank] for module in modules if module.bias is not None]
        return torch.cat([module.weight.detach().chunk(size)[rank] for module in modules]), torch.cat(biases) if biases else None

    def columns(module: nn.Linear) -> tuple[Tensor, Tensor | None]:
        bias = None if module.bias is None or rank else module.bias.detach()
        return module.weight.detach().chunk(size, 1)[rank].contiguous(), bias

    layers = []
    for layer in cast(Iterable[Layer], head.layers):
        attn, mlp = layer.self_attn, layer.mlp
        layers.append(LayerCut(
            rows(attn.q_proj, attn.k_proj, attn.v_proj), columns(attn.o_proj), rows(mlp.gate_proj, mlp.up_proj), columns(mlp.down_proj)
        ))  # fmt: skip
    last = head.lm_head
    divides = last is not None and is_plain(last) and last.bias is None and head.config.draft_vocab_size % size == 0
    own = last.weight.detach().chunk(size)[rank] if last is not None and divides else None
    return Cut(group, tuple(layers), own)
