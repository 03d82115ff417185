"""A decoder layer as data, run by a backend's ops: the target's layers and those of an EAGLE head are one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

from torch import Tensor, nn

from fastspec.generation.layers.mixers import Product, SequenceMixer, Summed
from fastspec.generation.layers.packing import Weights, joint
from fastspec.generation.ops import Ops
from fastspec.kernels.linear.reference import SILU, Gate

Norm = Callable[..., tuple[Tensor, Tensor]]
"""(x, residual=None, out=None, total=None) -> (the norm of their sum, the sum), as `Ops.rms_norm`; a model's own norms without `out`."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One decoder layer: its norms, what mixes the tokens, and its feed-forward. Some families norm what the mixer and the feed-forward
    add as well."""

    input_norm: Norm | None
    mixer: SequenceMixer
    mlp_norm: Norm | None
    """None: the feed-forward reads what the mixer reads, and both are added at once."""
    mlp: Product
    mixer_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None
    beside: Callable[[Tensor, Tensor], Tensor] | None = None
    """What the feed-forward gives, and what its norm has read, [B, N, H] each -> the same with a second feed-forward's [B, N, H]."""
    after: Callable[[Tensor, Tensor | None], Tensor] | None = None
    """What becomes of the layer's output [B, N, H], with the layer's own input of every token [B, N, P] where it has one."""


class Normed(Protocol):
    """A norm: weight [H]."""

    @property
    def weight(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """A root-mean-square norm through the backend, see `Ops.rms_norm`, by the weight that its module has at the time."""

    ops: Ops
    module: Normed
    eps: float
    offset: float | None = None

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None, total: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(x, residual=None, out=None, total=None) -> (the norm of their sum, the sum)."""
        return self.ops.rms_norm(x, self.module.weight, self.eps, residual, out, total, self.offset)


@dataclass(frozen=True, slots=True)
class Linears:
    """Plain linear layers over one input, their outputs side by side."""

    ops: Ops
    layers: tuple[Weights, ...]
    parts: bool
    """Whether the result goes to a norm, which takes the parts of a product as well."""
    packed: tuple[Tensor, Tensor | None] | None
    """Weight and bias of all as one product, where they lie so."""

    def __call__(self, x: Tensor) -> Any:
        """x [..., K] -> [..., M]."""
        one = self.one()
        if one is None:
            return self.ops.linears(x, *self.apart())
        multiply = self.ops.linear_parts if self.parts and self.ops.linear_parts is not None else self.ops.linear
        return multiply(x, *one)

    def one(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of one product, or None where there are several."""
        return (self.layers[0].weight, self.layers[0].bias) if len(self.layers) == 1 else self.packed

    def apart(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Weights and biases one by one, as they are now."""
        return [layer.weight for layer in self.layers], [layer.bias for layer in self.layers]


@dataclass(frozen=True, slots=True)
class Gated:
    """A gated feed-forward: the products of the gates and of what they open, in this order or as one layer's, and what follows."""

    gate_up: Linears
    out: Product
    kind: Gate = SILU

    def __call__(self, x: Tensor) -> Summed:
        """x [..., K] -> [..., M]."""
        ops, one = self.gate_up.ops, self.gate_up.one()
        if one is None:
            return self.out(ops.linears(x, *self.gate_up.apart(), self.kind))
        return self.out(ops.gate_up(x, *one, self.kind))


def product(ops: Ops, layers: Sequence[Weights], *, parts: bool = False) -> Linears:
    """Plain linear layers over one input, their outputs side by side; one product where their weights are packed.

    With `parts` the result goes to a norm, which takes the parts of a product as well.
    """
    weight = joint([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias = joint(biases) if biases else None
    whole = (bias is not None) == bool(biases) and len(biases) in (0, len(layers))
    return Linears(ops, tuple(layers), parts, (weight, bias) if weight is not None and whole else None)


def gated(ops: Ops, gate: Weights, up: Weights, out: Product, kind: Gate = SILU) -> Product:
    """The gated feed-forward of plain linear layers, or of parts of them; `out` is the product behind it."""
    return Gated(product(ops, (gate, up)), out, kind)


def gated_as_one(ops: Ops, gate_up: nn.Linear, down: nn.Linear, kind: Gate = SILU) -> Product:
    """The same where gate and up are one linear layer, the gates first."""
    return Gated(product(ops, (gate_up,)), product(ops, (down,), parts=True), kind)


def is_plain(module: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Whether a module is torch's own class of this kind, and its forward neither hooked nor replaced."""
    hooks = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return type(module) is kind and type(module.weight) is nn.Parameter and not hooks and _is_torchs_own(kind)


def _is_torchs_own(kind: type[nn.Module]) -> bool:
    """Whether a class's `forward` and `__call__` are torch's, wherever `functools.wraps` says that they are from."""
    methods = kind.forward, kind.__call__
    return all(isinstance(each, FunctionType) and each.__globals__["__name__"].startswith("torch.") for each in methods)
