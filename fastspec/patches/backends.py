"""Which kernels a model gets: the backend is named once, at `patch` time."""

from __future__ import annotations

from dataclasses import replace

from fastspec.errors import Unsupported
from fastspec.generation.protocols import Ops
from fastspec.kernels import cpu, reference

TORCH = Ops(
    name="torch",
    attention_layout=reference.attention_layout,
    tree_attention=reference.tree_attention,
    cache_write=reference.cache_write,
    kv_block_copy=reference.kv_block_copy,
    linear=reference.linear,
    rope=reference.rope,
    topk_expand=reference.topk_expand,
    tree_build=reference.tree_build,
    posterior_walk=reference.posterior_walk,
    categorical=reference.categorical,
)

TORCH_ONEDNN = replace(TORCH, name="torch+onednn", linear=cpu.linear)
"""Plain torch, with the linear layers of the CPU through oneDNN."""


def choose_backend(name: str, device_type: str) -> Ops:
    """The kernels of a backend name; "auto" is plain torch on CUDA and torch with oneDNN on the CPU, where torch carries it.

    Raises Unsupported for an unknown name.
    """
    if name not in ("auto", "torch"):
        raise Unsupported(f'backend={name!r} on {device_type}: accepted are "auto" and "torch"')
    return TORCH_ONEDNN if name == "auto" and device_type == "cpu" and cpu.available() else TORCH
