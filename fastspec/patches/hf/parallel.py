"""Models over several devices: layers in turn (`device_map`), or cut over processes by transformers' tensor
parallelism.

`from_pretrained(..., tp_plan="auto")` under torchrun makes a planned parameter a DTensor, and puts a forward of its own
on the module. A pass of fastspec reads the local parts of the weights instead, and issues the sums and joins between
the processes by itself.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fastspec.errors import Unsupported
from fastspec.generation.decoder_layer import Linear, Product, Summed, Weights, is_plain, product
from fastspec.generation.ops import Ops
from fastspec.kernels.linear.reference import DeferredProduct, DeferredSum, Parts
from fastspec.kernels.parallel.reference import share
from fastspec.kernels.quantised.reference import StoredWeight
from fastspec.patches.hf.compat import (
    device_of,
    every_module,
    hooked_device,
    hooks_of,
    local_part,
    own_parameters,
    placing_hook,
    processes_of,
    with_parameters,
)
from fastspec.patches.hf.config_fields import layer_count, layer_shapes


def devices_of(model: Any) -> list[str]:
    """The devices that a model's parameters are on, in order of their names; those that are loaded for a pass count as
    none."""
    found = {each.device for module in every_module(model) for each in own_parameters(module).values()}
    return sorted(str(device) for device in found if device.type != "meta")


def is_spread(model: Any) -> bool:
    """True where a model's parameters are on several devices of this process."""
    return len(devices_of(model)) > 1


def check_placement(model: Any) -> None:
    """Raise `Unsupported`, naming the reason, for a model on several devices whose layers are not each on one, by
    accelerate's hooks."""
    devices = devices_of(model)
    if len(devices) < 2:
        return
    name, told = type(model).__name__, f"spread over {', '.join(devices)}"
    if not any(placing_hook(module) is not None for module in model.modules()):
        raise Unsupported(
            f"{name} is {told}; without accelerate's hooks nothing moves its states from one to the next: load it "
            "with device_map='auto', "
            "on one device (device_map='cuda:0'), or cut over processes (tp_plan='auto', under torchrun)"
        )
    layer_devices(model)


def layer_devices(model: Any) -> list[torch.device]:
    """Device that each layer of a decoder computes on, and so where what it keeps belongs. Raises Unsupported where one
    layer is on several devices."""
    count = layer_count(model.config)
    if not is_spread(model):
        return [device_of(model)] * count
    stacks = [
        module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not stacks:
        raise Unsupported(
            f"{type(model).__name__} is spread over {', '.join(devices_of(model))}, and its {count} layers are not "
            "found in its decoder: load it on one device (device_map='cuda:0')"
        )
    return [_device_of_layer(model, layer, index) for index, layer in enumerate(stacks[0])]


def _device_of_layer(model: Any, layer: nn.Module, index: int) -> torch.device:
    found = {each.device for each in layer.parameters() if each.device.type != "meta"}
    if not found:  # its weights are moved to where its modules compute
        found = {hooked_device(layer.modules()) or device_of(model)}
    if len(found) > 1:
        raise Unsupported(
            f"layer {index} of {type(model).__name__} is itself spread over {', '.join(sorted(map(str, found)))}: lay "
            "whole layers on a device (device_map='auto' does)"
        )
    return found.pop()


class ParallelStyle(enum.Enum):
    """Style by which transformers has cut a module over processes, by what goes in and what comes out."""

    COLUMN = "by outputs, which stay apart"
    COLUMN_JOINED = "by outputs, which are joined"
    ROW = "by inputs, which come apart"
    ROW_WHOLE = "by inputs, which come whole"
    EMBEDDING_ROWS = "by tokens"
    EMBEDDING_COLUMNS = "by width"
    EXPERTS = "every expert by its channels, whose answers are added up"
    OTHER = "otherwise"


def _held_by_forward(module: nn.Module) -> dict[str, Any] | None:
    """Values by name that a forward of transformers' tensor parallelism keeps, or None of a module without one."""
    code = getattr(module.__dict__.get("forward"), "__code__", None)
    if code is None or code.co_name != "tp_forward":
        return None
    cells = zip(code.co_freevars, module.__dict__["forward"].__closure__, strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def parallel_style(module: nn.Module) -> ParallelStyle | None:
    """Style by which transformers' tensor parallelism has cut a module, or None where it has put no forward of its own
    there.

    Since 5.21 a style replaces `module.forward` and keeps itself in the closure; delete when a module says what its
    style is.
    """
    held = _held_by_forward(module)
    if held is None:
        return None
    style: Any = held.get("self")
    kind = type(style).__name__
    if kind == "ColwiseParallel":
        return ParallelStyle.COLUMN_JOINED if isinstance(style.output_layouts, Replicate) else ParallelStyle.COLUMN
    if kind == "RowwiseParallel":
        return ParallelStyle.ROW_WHOLE if isinstance(style.input_layouts, Replicate) else ParallelStyle.ROW
    if kind == "EmbeddingParallel":
        return ParallelStyle.EMBEDDING_COLUMNS if style.shard_dim else ParallelStyle.EMBEDDING_ROWS
    return ParallelStyle.EXPERTS if kind == "MoeExpertsParallel" else ParallelStyle.OTHER


def mesh_of(parameter: Tensor) -> DeviceMesh | None:
    """The processes that hold a parameter together, or None of a plain one."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def local_heads(model: Any, heads: int) -> int:
    """Number of a layer's key heads that this process keeps. Raises Unsupported where they cannot be divided."""
    size = processes_of(model)
    if size == 1:
        return heads
    try:
        from transformers.distributed.tensor_parallel import get_kv_heads_per_rank  # since 5.21; whole models need none
    except ImportError as error:
        raise Unsupported(
            f"{type(model).__name__} was loaded over {size} processes by transformers {transformers.__version__}; "
            "fastspec reads what 5.21 and later make of tp_plan: install one of them"
        ) from error

    found = get_kv_heads_per_rank(model.tp_plan, heads, size)
    if found is None:
        raise Unsupported(
            f"{type(model).__name__} has {heads} key heads, which {size} processes cannot divide: load it over a "
            f"number of processes that divides {heads}"
        )
    return found


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes that hold a model together, or None where one holds all of it."""
    if processes_of(model) == 1:
        return None
    mesh = next((found for found in map(mesh_of, model.parameters()) if found is not None), None)
    return None if mesh is None else mesh.get_group()


@dataclass(frozen=True, slots=True)
class Share:
    """Share that this process has of a linear layer: `weight` [M, K], a tensor or a `StoredWeight`, and `bias` [M].
    `style` says how it was cut."""

    weight: Any
    bias: Tensor | None
    style: ParallelStyle
    group: dist.ProcessGroup
    wide: int
    """Outputs of the whole layer where it was cut by outputs, else its inputs."""

    @overload
    def run(self, ops: Ops) -> Linear: ...
    @overload
    def run(self, ops: Ops, *, parts: bool) -> Product: ...
    def run(self, ops: Ops, *, parts: bool = False) -> Any:
        """The layer's product as the plan has it: x [..., K] -> [..., M], of which a `COLUMN` share gives its own part.
        With `parts` a sum over the processes is left to the norm behind it."""
        if self.style is ParallelStyle.COLUMN:
            return lambda x: self.times(ops, x, self.bias)
        if self.style is ParallelStyle.COLUMN_JOINED:
            return lambda x: ops.all_gather(self.times(ops, x, self.bias), self.wide, self.group)
        return Reduced(ops, self, parts)

    def times(self, ops: Ops, x: Tensor, bias: Tensor | None) -> Tensor:
        """This process's product."""
        if isinstance(self.weight, Tensor):
            return ops.linear(x, self.weight, bias)
        assert ops.stored_linears is not None  # who makes one sees to it
        return ops.stored_linears(x, (self.weight,), (bias,))

    def addend(self, ops: Ops, x: Tensor) -> Tensor | Parts | DeferredProduct:
        """The same without a bias, for a norm that adds up what the processes have."""
        if not isinstance(self.weight, Tensor):
            multiply = ops.stored_parts or ops.stored_linears
            assert multiply is not None
            return multiply(x, (self.weight,), (None,))
        multiply = ops.linear_parts or ops.linear
        # a norm that multiplies by itself does so by units of its own
        return multiply(x, self.weight, None) if ops.exact else DeferredProduct(x, self.weight, None, multiply)

    def likeliest(self, ops: Ops, change: Callable[[Tensor], Tensor]) -> Linear:
        """Of a layer whose outputs the plan joins, the places [..., 1] int64 of the highest, after `change`."""
        group, bias = self.group, self.bias
        first = group.rank() * share(self.wide, group.size())
        return lambda x: ops.likeliest(change(self.times(ops, x, bias)), first, group)

    def own(self, x: Tensor) -> Tensor:
        """This process's inputs of a layer that was cut by them."""
        if self.style is ParallelStyle.ROW:
            return x
        first = self.group.rank() * share(self.wide, self.group.size())
        return x[..., first : first + self.weight.shape[1]]


@dataclass(frozen=True, slots=True)
class Reduced:
    """Product of a layer that was cut by inputs: x [..., K], whole or this process's part of it, -> [..., M], the same
    for all. With `parts` the sum is left to the norm behind it."""

    ops: Ops
    share: Share
    parts: bool

    def __call__(self, x: Tensor) -> Summed:
        ops, group, bias = self.ops, self.share.group, self.share.bias
        x = self.share.own(x)
        if bias is not None or not self.parts:
            found = ops.all_reduce(self.share.times(ops, x, None), group)
            return found if bias is None else found + bias
        return DeferredSum(self.share.addend(ops, x), group, ops.all_reduce)


def product_of_shares(shares: Sequence[Share], ops: Ops, *, parts: bool) -> Product:
    """Layers over one input, their outputs side by side: the processes' own of them, or, where the plan joins outputs,
    all of them by one join; `parts` as in `Share.run`."""
    styles, size = {share.style for share in shares}, shares[0].group.size()
    if len(shares) == 1:
        return shares[0].run(ops, parts=parts)
    if styles == {ParallelStyle.COLUMN}:
        return product(ops, shares)
    if styles != {ParallelStyle.COLUMN_JOINED} or any(each.wide % size for each in shares):
        runs = [each.run(ops) for each in shares]
        return lambda x: torch.cat([run(x) for run in runs], -1)
    own, group, wide = product(ops, shares), shares[0].group, sum(each.wide for each in shares)
    places = (
        torch.arange(wide, device=shares[0].weight.device)
        .view(size, -1)
        .split([each.wide // size for each in shares], 1)
    )
    order = torch.cat([place.flatten() for place in places])
    return lambda x: ops.all_gather(own(x), wide, group).index_select(-1, order)


def share_of(module: nn.Module) -> Share | None:
    """Share that this process has of a linear layer that transformers has cut, or None of any other module."""
    style = parallel_style(module)
    if style is None or type(module) is not nn.Linear or hooks_of(module):
        return None
    weight = own_parameters(module).get("weight")  # which a packed layer has not
    mesh = None if weight is None else mesh_of(weight)
    if mesh is None or style is ParallelStyle.OTHER:
        return None
    by_outputs = style in (ParallelStyle.COLUMN, ParallelStyle.COLUMN_JOINED)
    bias = None if module.bias is None else local_part(module.bias)
    return Share(
        local_part(module.weight),
        bias,
        style,
        mesh.get_group(),
        module.out_features if by_outputs else module.in_features,
    )


LINEAR_STYLES = ParallelStyle.COLUMN, ParallelStyle.COLUMN_JOINED, ParallelStyle.ROW, ParallelStyle.ROW_WHOLE


def gives_own_outputs(modules: Sequence[Any]) -> bool:
    """True of linear layers that are not cut, or all by outputs which stay apart."""
    return {parallel_style(module) for module in modules} in ({None}, {ParallelStyle.COLUMN})


def own_part(module: Any) -> Any:
    """A linear layer of any class that transformers has cut, with what this process has of its tensors and the
    library's own forward; the module itself where it is not cut."""
    if parallel_style(module) not in LINEAR_STYLES:
        return module
    held = {
        name: nn.Parameter(local_part(each), False) if isinstance(each, DTensor) else each
        for name, each in module._parameters.items()
    }
    return with_parameters(module, held)


def stored_share(module: Any, weight: StoredWeight) -> Share | None:
    """Share of a cut linear layer whose part here is read as `weight`, or None where the processes do not divide its
    blocks."""
    style, held = parallel_style(module), _held_by_forward(module)
    if style not in LINEAR_STYLES or held is None or "mesh" not in held:
        return None
    group, by_outputs = held["mesh"].get_group(), style in LINEAR_STYLES[:2]
    wide, (own, block) = (
        (module.out_features, (weight.shape[0], weight.block[0]))
        if by_outputs
        else (module.in_features, (weight.shape[1], weight.block[1]))
    )
    whole = own * group.size() == wide and (own % block == 0 or block >= wide)
    bias = None if module.bias is None else local_part(module.bias)
    return Share(weight, bias, style, group, wide) if whole else None


def weights_of(modules: Sequence[Any], *, behind: bool = False) -> Sequence[Weights] | None:
    """Weights that the ops may read of linear layers: themselves where they are plain, or what this process has of them
    where each has outputs of its own (or, `behind` such, inputs); else None."""
    if all(map(is_plain, modules)):
        return modules
    shares = [share for share in map(share_of, modules) if share is not None]
    apart = ParallelStyle.ROW if behind else ParallelStyle.COLUMN
    return shares if len(shares) == len(modules) and all(share.style is apart for share in shares) else None


def share_of_experts(held: nn.Module) -> tuple[Tensor, Tensor, dist.ProcessGroup] | None:
    """Share that this process has of experts without biases that transformers has cut: gate and up [E, 2 * I, H] and
    down [E, H, I] of I channels of its own, whose answers are addends of the experts', and the processes that have the
    rest; None of any other module."""
    if parallel_style(held) is not ParallelStyle.EXPERTS or hooks_of(held):
        return None
    weights = dict(held.named_parameters())
    meshes = {mesh_of(weight) for weight in weights.values()}
    if weights.keys() != {"gate_up_proj", "down_proj"} or None in meshes:
        return None
    gate_up, down = (local_part(weights[name]) for name in ("gate_up_proj", "down_proj"))
    mesh = meshes.pop()
    return (gate_up, down, mesh.get_group()) if mesh is not None and gate_up.shape[1] == 2 * down.shape[2] else None


def embedding_of(module: nn.Module, ops: Ops) -> Callable[[Tensor], Tensor]:
    """An embedding's look-up, tokens [...] int64 -> [..., H]: the module itself, or this process's part of it and the
    others'."""
    style = parallel_style(module)
    if style not in (ParallelStyle.EMBEDDING_ROWS, ParallelStyle.EMBEDDING_COLUMNS) or not isinstance(
        module, nn.Embedding
    ):
        return module
    mesh = mesh_of(module.weight)
    assert mesh is not None
    group, rows, width = mesh.get_group(), module.num_embeddings, module.embedding_dim
    weight = nn.Parameter(local_part(module.weight), requires_grad=False)
    own = with_parameters(module, {"weight": weight})  # some classes scale what they look up
    own.padding_idx = None
    if style is ParallelStyle.EMBEDDING_COLUMNS:
        return lambda tokens: ops.all_gather(own(tokens), width, group)
    first, table = group.rank() * share(rows, group.size()), own.weight
    if is_plain(own, nn.Embedding) and own.max_norm is None:
        return lambda tokens: ops.look_up(tokens, table, first, group)

    def look_up(tokens: Tensor) -> Tensor:
        other = (tokens < first) | (tokens >= first + len(table))
        return ops.all_reduce(own((tokens - first).clamp(0, len(table) - 1)).masked_fill(other[..., None], 0), group)

    return look_up


def check_shares(model: Any) -> None:
    """Raise `Unsupported`, naming the reason, for a model that is spread over processes in a way that fastspec does not
    know."""
    name, size = type(model).__name__, processes_of(model)
    if size == 1:
        return
    if group_of(model) is None:
        raise Unsupported(
            f"{name} was loaded over {size} processes, and none of its parameters is a DTensor: fastspec reads what "
            "transformers 5.21 and later make of tp_plan"
        )
    config = getattr(model.config, "distributed_config", None)
    others = [kind for kind in ("ep_size", "pp_size", "fsdp_size") if (getattr(config, kind, None) or 1) > 1]
    if others:
        raise Unsupported(
            f"{name} was loaded with {' and '.join(others)} above 1; fastspec takes a model that is cut by tp_plan "
            "alone"
        )
    for heads in {heads for heads, *_ in layer_shapes(model.config)}:
        local_heads(model, heads)
    if model.config.is_encoder_decoder:
        raise Unsupported(f"{name} is an encoder-decoder model over {size} processes; fastspec takes decoder-only ones")
    meshes = {mesh for mesh in map(mesh_of, model.parameters()) if mesh is not None}
    if len(meshes) > 1 or any(mesh.ndim > 1 for mesh in meshes):
        raise Unsupported(
            f"{name} is cut over several meshes of processes: load it with tp_plan='auto' and no other parallelism"
        )
