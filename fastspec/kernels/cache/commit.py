"""What a commit computes besides moving keys and values: the slots of the accepted path, and the emitted tokens. One launch each, one
program per row.

B rows (sequences), N nodes of a row's tree, P nodes of the longest path.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.launch import dependent


@triton.jit(do_not_specialize=["steps", "bound", "s_lengths", "s_path_b", "s_path_p", "s_accepted", "s_active"])
def _commit_slots_kernel(
    p_lengths, p_path, p_accepted, p_active, p_source, p_target, steps, bound, s_lengths, s_path_b, s_path_p, s_accepted, s_active,
    SP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, SP)
    m_p = o_p < steps
    length = tl.load(p_lengths + row * s_lengths)
    accepted = tl.load(p_accepted + row * s_accepted)
    active = tl.load(p_active + row * s_active)
    b_path = tl.load(p_path + row * s_path_b + o_p * s_path_p, mask=m_p, other=0)
    tl.store(p_source + row * steps + o_p, length + b_path, mask=m_p)
    tl.store(p_target + row * steps + o_p, length + o_p, mask=m_p)
    tl.debug_barrier()  # another thread may be about to read the length
    tl.store(p_lengths + row * s_lengths, tl.minimum(length + tl.where(active != 0, accepted + 1, 0), bound))


def commit_slots(lengths: Tensor, path: Tensor, accepted: Tensor, active: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """`reference.commit_slots`: lengths [B], which grow in place, path [B, P], accepted [B] int64, active [B] bool, any strides."""
    batch, steps = path.shape
    _check("commit_slots", batch, active, lengths=lengths, path=path[:, 0], accepted=accepted)
    source, target = torch.empty(2, batch, steps, dtype=torch.int64, device=path.device)
    if batch > 0:
        _commit_slots_kernel[(batch,)](
            lengths, path, accepted, active.view(torch.uint8), source, target, steps, bound,
            lengths.stride(0), *path.stride(), accepted.stride(0), active.stride(0),
            max(2, triton.next_power_of_2(steps)), num_warps=1, **dependent(path.device),
        )  # fmt: skip
    return source, target


@triton.jit(do_not_specialize=["steps", "s_tokens_b", "s_tokens_n", "s_path_b", "s_path_p", "s_accepted", "s_bonus", "s_active", "s_root"])
def _emit_kernel(
    p_tokens, p_path, p_accepted, p_bonus, p_active, p_root, p_packed, steps,
    s_tokens_b, s_tokens_n, s_path_b, s_path_p, s_accepted, s_bonus, s_active, s_root, SP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, SP)
    m_p = o_p < steps
    accepted = tl.load(p_accepted + row * s_accepted)
    drawn = tl.load(p_bonus + row * s_bonus)
    bonus = tl.maximum(drawn, 0)
    active = tl.load(p_active + row * s_active)
    b_next = tl.load(p_path + row * s_path_b + tl.minimum(o_p + 1, steps - 1) * s_path_p, mask=m_p, other=0)
    b_token = tl.load(p_tokens + row * s_tokens_b + b_next * s_tokens_n, mask=m_p, other=0)
    p_out = p_packed + row * (steps + 1)
    tl.store(p_out, tl.where(drawn < 0, -1 - accepted, accepted))
    tl.store(p_out + 1 + o_p, tl.where(o_p == accepted, bonus, b_token), mask=m_p)
    tl.debug_barrier()  # the tokens of a tree of roots alone are the root's own memory, and other threads may be about to read the bonus
    tl.store(p_bonus + row * s_bonus, bonus)
    tl.store(p_root + row * s_root, bonus, mask=active != 0)


def emit(tokens: Tensor, path: Tensor, accepted: Tensor, bonus: Tensor, active: Tensor, root: Tensor) -> Tensor:
    """`reference.emit`: tokens [B, N], path [B, P], accepted, bonus, root [B] int64, active [B] bool, any strides -> [B, 1 + P].
    A bonus below 0 becomes 0 in place."""
    batch, steps = path.shape
    _check("emit", batch, active, tokens=tokens[:, 0], path=path[:, 0], accepted=accepted, bonus=bonus, root=root)
    packed = torch.empty(batch, 1 + steps, dtype=torch.int64, device=path.device)
    if batch > 0:
        _emit_kernel[(batch,)](
            tokens, path, accepted, bonus, active.view(torch.uint8), root, packed, steps,
            *tokens.stride(), *path.stride(), accepted.stride(0), bonus.stride(0), active.stride(0), root.stride(0),
            max(2, triton.next_power_of_2(steps)), num_warps=1, **dependent(path.device),
        )  # fmt: skip
    return packed


def _check(op: str, batch: int, active: Tensor, **given: Tensor) -> None:
    """The first column of each tensor of a row's: [B] int64; active: [B] bool."""
    for name, x, dtype in (("active", active, torch.bool), *((name, x, torch.int64) for name, x in given.items())):
        if x.shape != (batch,) or x.dtype != dtype:
            raise ValueError(f"{op}: {name} has rows {list(x.shape)} of {x.dtype}; accepted is {dtype} with the rows of path, [{batch}]")
