"""Processes of one GPU each: sums, norms, look-ups and joins between them."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastspec.generation.capture import recorded
from fastspec.kernels import ahead
from fastspec.kernels.layer import norms
from fastspec.kernels.linear.linear import linear
from fastspec.kernels.linear.reference import DeferredProduct, DeferredSum
from fastspec.kernels.parallel import joins, reduced_norm, reference, symmetric
from helpers.words import near

WIDTH = 4096
WAYS = {1: "one-shot", 61: "one-shot", 128: "two-shot", 512: "two-shot", 1024: "two-shot"}
"""Rows in bf16, and how they are summed."""
NORMS = [
    (torch.bfloat16, 4096, 1),
    (torch.bfloat16, 4096, 61),
    (torch.bfloat16, 576, 8),
    (torch.float32, 64, 3),
    (torch.bfloat16, 8192, 60),
    (torch.bfloat16, 4096, 128),
    (torch.float16, 5120, 2),
]
"""dtypes, widths and rows of norms."""


def drawn(rows: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def replayed(run: Callable[[Tensor], Tensor], x: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """What a run makes of the inputs one after another, from one graph that reads x; the first run, on x, is a real
    one."""
    run(x.clone())
    graph = torch.cuda.CUDAGraph()
    with recorded(graph):
        out = run(x.clone())
    made = []
    for each in inputs:
        x.copy_(each)
        graph.replay()
        made.append(out.clone())
    return made


def begin(rank: int, size: int, folder: str, backend: str, device: int = 0) -> dist.ProcessGroup:
    """The group of so many processes, which they may be already."""
    if not dist.is_initialized():
        torch.cuda.set_device(device)
        store, limit = f"file://{Path(folder) / 'store'}", datetime.timedelta(seconds=120)
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=limit)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def together(rank: int, size: int, folder: str, apart: bool = True) -> dist.ProcessGroup:
    """The group of processes with a GPU each, or, without `apart` or as many GPUs, on one GPU, where they see each
    other's memory as GPUs over NVLink do."""
    if apart and torch.cuda.device_count() >= size:
        return begin(rank, size, folder, "nccl", rank)
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    symmetric.reachable = lambda group: True  # type: ignore[assignment]  # each counts as a GPU of its own
    return begin(rank, size, folder, "gloo")


def end() -> None:
    """Wait for the others."""
    torch.cuda.synchronize()
    dist.barrier()


def shared(rank: int, folder: str) -> None:
    """One of two processes on one GPU, which see each other's memory as GPUs over NVLink do."""
    group = together(rank, 2, folder, apart=False)
    for dtype in (torch.bfloat16, torch.float32):
        for rows, way in WAYS.items():
            if dtype is torch.bfloat16:
                assert symmetric.way_of(rows * WIDTH * 2, dtype, True) == way
            if rows * WIDTH * dtype.itemsize > symmetric.TWO_SHOT_BYTES:
                continue
            parts = [[drawn(rows, 10 * turn + each, dtype) for each in range(2)] for turn in range(4)]
            want = [first + second for first, second in parts]  # of two addends any order gives the same bits
            mine = [pair[rank] for pair in parts]
            for x, total in zip(mine, want, strict=True):
                assert torch.equal(symmetric.all_reduce(x.clone(), group), total), (rows, dtype)
            made = replayed(lambda x: symmetric.all_reduce(x, group), mine[0].clone(), mine)
            assert all(map(torch.equal, made, want)), (rows, dtype)
    end()


def alike(group: dist.ProcessGroup, made: list[Tensor]) -> bool:
    """Whether all processes have the same bits."""
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, [each.cpu().view(torch.uint8) for each in made], group=group)
    return all(all(map(torch.equal, told[0], each)) for each in told[1:])


def added(parts: list[Tensor]) -> Tensor:
    """The sum in fp32 in the order of the processes, rounded once."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for each in parts:
        total += each.float()
    return total.to(parts[0].dtype)


def normed(rank: int, folder: str, size: int = 2) -> None:
    """One of some processes, on a GPU of its own where there are so many: norms of sums in one launch, eager and
    replayed, with other numbers and widths of rows in turn, are those of two launches, whoever is late."""
    group = together(rank, size, folder)
    graphs = []
    for turn, (dtype, width, rows) in enumerate(NORMS * 2):
        parts = [
            torch.randn(rows, width, generator=torch.Generator().manual_seed(10 * turn + each)).to("cuda", dtype)
            for each in range(size + 1)
        ]
        own, residual, weight = parts[rank].clone(), parts[-1], torch.ones(width, device="cuda", dtype=dtype)
        run = partial(
            lambda x, w, r, **more: reduced_norm.rms_norm(
                DeferredSum(x, group, symmetric.all_reduce), w, 1e-5, r, **more
            ),
            own,
            weight,
            residual,
        )
        want = norms.rms_norm(added(parts[:-1]), weight, 1e-5, residual)
        if rank:
            time.sleep(0.01 * (turn % 3))
        found = run()
        assert near(found, want) and alike(group, [*found]), (dtype, width, rows)
        assert all(map(torch.equal, run(ordered=True), want)), (dtype, width, rows)
        graph = torch.cuda.CUDAGraph()
        with recorded(graph):
            made = run()
        graphs.append((graph, made, own, parts, residual, weight))
    for turn in range(40):
        for graph, made, own, parts, residual, weight in graphs:
            own.copy_(parts[rank] * (turn + 1))
            graph.replay()
            if turn % 8 == rank:
                torch.cuda.synchronize()
            want = norms.rms_norm(added([each * (turn + 1) for each in parts[:-1]]), weight, 1e-5, residual)
            assert near(made, want), turn
    assert alike(group, [each for _, made, *_ in graphs for each in made])
    end()


def sent(rank: int, folder: str) -> None:
    """One of two processes, as `normed` has them: products of one row that send themselves give, eager and replayed,
    among norms that send what stands, what the product and the norm give apart."""
    group = together(rank, 2, folder)
    launch_of, told = reduced_norm.sending_launch, []
    reduced_norm.sending_launch = lambda own: told.append(launch_of(own)) or told[-1]  # type: ignore[func-returns-value]
    for dtype, width, depth in ((torch.bfloat16, 4096, 2048), (torch.bfloat16, 576, 1536), (torch.float16, 1024, 24)):
        drawn = torch.Generator().manual_seed(width)
        x, residual = (
            [torch.randn(1, 1, size, generator=drawn).to("cuda", dtype) for _ in range(2)] for size in (depth, width)
        )
        weights = [torch.randn(width, depth, generator=drawn).to("cuda", dtype) / depth**0.5 for _ in range(2)]
        scale, mine, other = torch.ones(width, device="cuda", dtype=dtype), x[rank].clone(), x[rank].clone()

        def run(
            mine: Tensor = mine,
            other: Tensor = other,
            weight: Tensor = weights[rank],
            scale: Tensor = scale,
            r: list[Tensor] = residual,
        ) -> list[tuple[Tensor, Tensor]]:
            own = [DeferredProduct(mine, weight, None, linear), r[1], DeferredProduct(other, weight, None, linear)]
            made = [(mine, r[0])]
            for each in own:
                made.append(
                    reduced_norm.rms_norm(DeferredSum(each, group, symmetric.all_reduce), scale, 1e-5, made[-1][1])
                )
            return made[1:]

        def wanted(
            turn: int, x: list[Tensor] = x, w: list[Tensor] = weights, scale: Tensor = scale, r: list[Tensor] = residual
        ) -> list[tuple[Tensor, Tensor]]:
            summed = linear(x[0] * turn, w[0], None) + linear(x[1] * turn, w[1], None)
            first = norms.rms_norm(summed, scale, 1e-5, r[0])
            then = norms.rms_norm(r[1] + r[1], scale, 1e-5, first[1])
            return [first, then, norms.rms_norm(summed, scale, 1e-5, then[1])]

        assert all(map(near, run(), wanted(1)))
        graph = torch.cuda.CUDAGraph()
        with recorded(graph):
            made = run()
        for turn in range(1, 30):
            mine.copy_(x[rank] * turn)
            other.copy_(mine)
            graph.replay()
            if turn % 8 == rank:
                torch.cuda.synchronize()
            assert all(map(near, made, wanted(turn))), turn
        assert alike(group, [each for pair in made for each in pair])
    reduced_norm.sending_launch = launch_of
    assert sum(each is not None for each in told) == 12 and len(told) == 18  # eager and captured, two of three
    end()


def found(rank: int, folder: str) -> None:
    """One of two processes, as `normed` has them: what tokens stand for in a table of which each has half, columns side
    by side, and the likeliest of tokens, eager and replayed; a look at a program before its first run asks nobody."""
    group = together(rank, 2, folder)
    draws = torch.Generator().manual_seed(3)
    for dtype, width in ((torch.bfloat16, 4096), (torch.float32, 64), (torch.float16, 576)):
        table = torch.randn(101, width, generator=draws).to("cuda", dtype)
        mine, cut = table.split(51)[rank].clone(), 5000
        for rows in (1, 10, 60, 128):
            tokens = [torch.randint(101, (1, rows), generator=draws).cuda() for _ in range(12)]
            look = partial(joins.look_up, table=mine, first=51 * rank, group=group)
            ahead._look(partial(look, tokens[0]), ahead.Collector())
            made = replayed(look, tokens[0].clone(), tokens)
            assert all(torch.equal(each, table[index]) for each, index in zip(made, tokens, strict=True)), (dtype, rows)
            logits = [torch.randint(-9, 9, (1, rows, 2 * cut - 1), generator=draws).to("cuda", dtype) for _ in range(4)]
            own = [each[..., rank * cut : (rank + 1) * cut].contiguous() for each in logits]
            made = replayed(partial(joins.likeliest, first=rank * cut, group=group), own[0].clone(), own)
            want = [(each == each.amax(-1, keepdim=True)).int().argmax(-1, keepdim=True) for each in logits]
            assert all(map(torch.equal, made, want)), (dtype, rows)
            if rows <= 10:  # more go through NCCL
                made = replayed(partial(joins.all_gather, width=2 * cut - 1, group=group), own[0].clone(), own)
                assert all(map(torch.equal, made, logits)), (dtype, rows)
    end()


def alone(rank: int, folder: str) -> None:
    """The only process of a group of NCCL's: nothing is added, and its launches are captured."""
    group = begin(rank, 1, folder, "nccl")
    inputs = [drawn(61, turn, torch.bfloat16) for turn in range(3)]
    for run in (lambda x: reference.all_reduce(x, group), lambda x: reference.all_gather(x, WIDTH, group)):
        assert all(map(torch.equal, replayed(run, inputs[-1].clone(), inputs), inputs))
    long = [drawn(1025, turn, torch.bfloat16) for turn in range(3)]  # longer than what goes through symmetric memory
    assert all(map(torch.equal, replayed(lambda x: symmetric.all_reduce(x, group), long[-1].clone(), long), long))
    torch.cuda.synchronize()


WORK: dict[str, tuple[Callable[[int, str], None], int]] = {
    "symmetric memory": (shared, 2),
    "norms": (normed, 2),
    "norms of four": (partial(normed, size=4), 4),
    "sent": (sent, 2),
    "look-ups and joins": (found, 2),
    "NCCL": (alone, 1),
}


def once(rank: int, name: str, folder: str) -> None:
    """One of them in a process of its own."""
    WORK[name][0](rank, folder)
    dist.destroy_process_group()


def case(load: Any, name: str) -> list[Any]:
    """One of them in processes that have a GPU each already."""
    del load
    WORK[name][0](dist.get_rank(), "")
    return []
