"""How transformers has cut a model over processes: what depends on its version, as `compat.py` has it of all else."""

from __future__ import annotations

import enum
from typing import Any

import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fastspec.errors import Unsupported


class ParallelStyle(enum.Enum):
    """How transformers has cut a module over processes, by what goes in and what comes out."""

    COLUMN = "by outputs, which stay apart"
    COLUMN_JOINED = "by outputs, which are joined"
    ROW = "by inputs, which come apart"
    ROW_WHOLE = "by inputs, which come whole"
    EMBEDDING_ROWS = "by tokens"
    EMBEDDING_COLUMNS = "by width"
    EXPERTS = "every expert by its channels, whose answers are added up"
    OTHER = "otherwise"


def parallel_style(module: nn.Module) -> ParallelStyle | None:
    """How transformers' tensor parallelism has cut a module, or None where it has put no forward of its own there.

    Since 5.21 a style replaces `module.forward` and keeps itself in the closure; delete when a module says what its style is.
    """
    code = getattr(module.__dict__.get("forward"), "__code__", None)
    if code is None or code.co_name != "tp_forward":
        return None
    cells = dict(zip(code.co_freevars, module.__dict__["forward"].__closure__, strict=True))
    style: Any = cells["self"].cell_contents if "self" in cells else None
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


def local_part(parameter: Tensor) -> Tensor:
    """What lies here of a parameter: itself, or its part of one that is cut; to move that moves the parameter's, which it would not do to
    what `to_local` gives of a parameter since torch 2.13, a view."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def processes_of(model: Any) -> int:
    """Over how many processes transformers has cut a model."""
    return getattr(model, "_tp_size", None) or 1


def local_heads(model: Any, heads: int) -> int:
    """How many of a layer's key heads this process keeps. Raises Unsupported where they cannot be divided."""
    size = processes_of(model)
    if size == 1:
        return heads
    try:
        from transformers.distributed.tensor_parallel import get_kv_heads_per_rank  # since 5.21; whole models need none
    except ImportError as error:
        raise Unsupported(
            f"{type(model).__name__} was loaded over {size} processes by transformers {transformers.__version__}; fastspec reads what 5.21 "
            "and later make of tp_plan: install one of them"
        ) from error

    found = get_kv_heads_per_rank(model.tp_plan, heads, size)
    if found is None:
        raise Unsupported(
            f"{type(model).__name__} has {heads} key heads, which {size} processes cannot divide: load it over a number of processes that "
            f"divides {heads}"
        )
    return found
