"""Times of a model that several GPUs hold together, with random weights: the sums between them, and rounds beside
transformers' own decoding with `tp_plan` in the same run.

With `--stage SHAPE` a row of `what` "cascade" says how long calls take that such a model, whole in the first process,
answers, or that go on to the one that all hold, by stage.

Every row of `what` "sum" is one way to add up `rows` rows of `width`, checked first and then timed inside a CUDA graph
of 64 of them (off CUDA one by one); "gather" joins logits, or keys of the likeliest tokens; "norm" is a sum with what
stands behind it in a layer. Every row of `what` "round" is one of `full_size.py`, over `processes` of them; its
`read_bytes` and `kept_bytes` are those that one process reads. Rounds of one process are the first's, while the others
wait. `launches` says by which tables kernels ran: with `--tune` rounds are measured again by those that `fastspec.tune`
finds, which the cache folder keeps: name an empty one by FASTSPEC_CACHE.

    torchrun --nproc-per-node 2 benchmarks/parallel.py --shapes llama-8b,llama-70b --out rows.jsonl
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import full_size
import torch
import torch.distributed as dist
from common import Row, captured, free_memory, milliseconds, place, timed, write
from full_size import config_of, kept_bytes, make_head, make_model, ours, peer, read_bandwidth, shape_parser
from torch import Tensor
from transformers.distributed import DistributedConfig

import fastspec
from fastspec.cascade import records
from fastspec.cascade.predictor import Predictor
from fastspec.generation.drafters import head_program
from fastspec.kernels.parallel import reference, symmetric
from fastspec.patches.assistants.speculative import read_parameters
from fastspec.patches.hf.parallel import local_part, processes_of
from fastspec.programs.bench.report import quantiles

ROWS = (1, 8, 16, 61, 128, 512)
SUMS = 64
WHOLE = "-whole"
REPEATS = 30


def make_cut(name: str, dtype: torch.dtype, processes: int) -> Any:
    """A model of a shape with random weights over so many processes."""
    model = full_size.make_empty(name, dtype)
    wanted, device, mesh = model.prepare_distribute_model(DistributedConfig(tp_size=processes, tp_plan="auto"))
    return full_size.made_whole(model.maybe_distribute_model(model, wanted, mesh), device)


def ways(group: dist.ProcessGroup, x: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """The ways to sum a message, by name."""
    found: dict[str, Callable[[Tensor], Tensor]] = {"library": lambda y: reference.all_reduce(y, group)}
    if x.is_cuda and x.nbytes <= symmetric.TWO_SHOT_BYTES:
        space = symmetric._space(group, x.device).view(x.dtype)[: x.numel()]
        name = group.group_name

        def one_shot(y: Tensor) -> Tensor:
            return torch.ops.symm_mem.one_shot_all_reduce_copy(space, y.view(-1), "sum", name).view_as(y)

        def two_shot(y: Tensor) -> Tensor:
            space.copy_(y.view(-1))
            return torch.ops.symm_mem.two_shot_all_reduce_out(space, "sum", name, torch.empty_like(space)).view_as(y)

        found |= {"one-shot": one_shot, "two-shot": two_shot, "chosen": lambda y: symmetric.all_reduce(y, group)}
    return found


def microseconds(run: Callable[[], Any], device: torch.device) -> list[float]:
    """Microseconds of one of SUMS runs in a graph, or, off CUDA, of each by itself: the 20, 50 and 80 % quantiles."""
    run()
    if device.type == "cuda":
        graph = captured([run] * SUMS)
        return quantiles([1e3 * spent / SUMS for spent in milliseconds(graph.replay, REPEATS + 1)[1:]])
    return quantiles([1e6 * timed(run) for _ in range(REPEATS)])


def row_of(what: str, method: str, rows: int, width: int, times: list[float]) -> Row:
    return {"what": what, "method": method, "rows": rows, "width": width, "us": times[1], "us_quantiles": times}


def sums(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, width: int, vocabulary: int) -> list[Row]:
    """Rows of sums and joins. Raises RuntimeError for a sum that is wrong."""
    found = []
    for rows in ROWS:
        drawn = torch.randint(-8, 9, (rows, width), generator=torch.Generator().manual_seed(rows))
        x = drawn.to(device, dtype)  # sums are exact
        mine = x * (group.rank() + 1)
        for name, run in ways(group, mine).items():
            if not torch.equal(run(mine.clone()), x * sum(range(1, group.size() + 1))):
                raise RuntimeError(f"the sum of {rows} rows by {name} is wrong")
            scratch = torch.zeros_like(mine)
            found.append(row_of("sum", name, rows, width, microseconds(partial(run, scratch), device)))
        part = torch.zeros(rows, reference.share(vocabulary, group.size()), device=device, dtype=dtype)
        keys = torch.zeros(rows, 1, device=device, dtype=torch.long)
        for name, sent, joined in (("logits", part, vocabulary), ("keys", keys, group.size())):
            times = microseconds(partial(reference.all_gather, sent, joined, group), device)
            found.append(row_of("gather", name, rows, joined, times))
    return found


def norms(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, width: int) -> list[dict[str, Any]]:
    """Rows of a sum with the residual and the norm behind it, in one launch where that is taken, and in two. Raises
    RuntimeError where they differ."""
    from fastspec.kernels.layer import norms as layer
    from fastspec.kernels.linear.reference import DeferredSum
    from fastspec.kernels.parallel import reduced_norm, words

    def apart(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return layer.rms_norm(symmetric.all_reduce(x, group), weight, 1e-5, residual)

    def fused(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return reduced_norm.rms_norm(DeferredSum(x, group, symmetric.all_reduce), weight, 1e-5, residual)

    found = []
    for rows in (each for each in ROWS if each <= words.ROWS):
        generator = torch.Generator().manual_seed(rows)
        residual = torch.randn(1, rows, width, generator=generator).to(device, dtype)
        own = torch.randint(-8, 9, (1, rows, width), generator=generator).to(device, dtype)  # sums are exact
        weight, mine = torch.ones(width, device=device, dtype=dtype), own * (group.rank() + 1)
        given = mine, residual, weight
        chosen = reduced_norm.OWNED_BYTES
        ways = [("two launches", apart, chosen), ("one launch", fused, chosen)]
        if group.size() > 2:
            ways += [("one launch, all to all", fused, 1 << 62), ("one launch, owners", fused, 0)]
        for name, way, least in ways:
            with patch.object(reduced_norm, "OWNED_BYTES", least):
                if not all(map(torch.equal, way(*given), apart(*given))):
                    raise RuntimeError(f"the norm of the sum of {rows} rows in {name} is wrong")
                found.append(row_of("norm", name, rows, width, microseconds(partial(way, *given), device)))
    return found


def rounds(model: Any, head: Any, ids: Tensor, added: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of rounds of one model, as they are measured: transformers' own, plain ones, and those with a head."""
    read = sum(local_part(parameter).nbytes for parameter in read_parameters(model))
    kept = kept_bytes(model, ids.shape[1], len(ids)) // processes_of(model)
    base = {"what": "round", "sums": added, "read_bytes": read, "kept_bytes": kept}
    if args.peer:
        yield base | {"method": "transformers", **peer(model, ids, min(args.tokens, 24), args.calls)}
    big = fastspec.Eagle3(depth=7, top_k=10, total_tokens=60)
    with fastspec.patched(model, eagle3=head, backend=args.backend, exact=added == "exact"):

        def asked(when: str) -> Iterator[dict[str, Any]]:
            for method in args.methods.split(","):
                name = method.removesuffix(WHOLE)
                least = 1 << 62 if method.endswith(WHOLE) else head_program.LEAST_BYTES
                with patch.object(head_program, "LEAST_BYTES", least):  # a head of fewer is not cut
                    assistant = big if name == "eagle3" and ids.is_cuda else name
                    row = ours(model, ids, assistant, args.tokens, args.calls)
                yield base | {"method": method, "launches": when, **row}

        yield from asked(fastspec.report(model).tables)
        if args.tune:
            tuned = fastspec.tune(model, length=ids.shape[1], minutes=args.tune)
            if dist.get_rank() == 0:
                print(tuned, flush=True)
            yield from asked(fastspec.report(model).tables)


def cascade(model: Any, name: str, ids: Tensor, args: argparse.Namespace) -> list[Row]:
    """Rows of calls that the small stage answers, and of those that the large one answers after it."""
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (64, 2), generator=draws).float()
    told = [torch.randn(64, len(records.NAMES), generator=draws) for _ in range(2)]
    tokens = torch.full((64, 2), float(args.tokens))
    predictor = Predictor.fit(("small", "large"), told, labels, tokens, torch.zeros(64, 2), seed=0)
    stage = fastspec.Stage(make_model(name, ids.device.type, model.dtype), name="small", assistant="autoregressive")
    settings = {"stages": [stage], "label": "large", "predictor": predictor, "costs": [1.0, 4.0]}
    going = fastspec.Cascade(**settings, assistant="autoregressive", thresholds=[0.0])
    found: list[Row] = []
    with fastspec.patched(model, cascade=going):
        for answers, threshold in (("small", 0.0), ("large", 1.0)):
            options = {"assistant": replace(going, thresholds=[threshold]), "attention_mask": torch.ones_like(ids)}
            call = partial(model.generate, ids, **options, max_new_tokens=args.tokens, do_sample=False)
            call(), call()
            walls, visits = [], []
            for _ in range(args.calls):
                walls.append(1e3 * timed(call))
                visits.append(fastspec.report(model).last.explanations[0].visits)
            if {visit[-1].name for visit in visits} != {answers}:
                raise RuntimeError(f"the stage {answers!r} did not answer")
            spent = {each.name: [run[at].milliseconds for run in visits] for at, each in enumerate(visits[0])}
            stages = {stage: statistics.median(times) for stage, times in spent.items()}
            row: Row = {"what": "cascade", "small": name, "answers": answers, "ms": statistics.median(walls)}
            found.append(row | {"stage_ms": stages})
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = shape_parser(__doc__)
    parser.add_argument("--processes", default="1,all", help="1, all or both: how many hold the model")
    parser.add_argument("--methods", default="autoregressive,eagle3", help=f"with {WHOLE!r}: its head is not cut")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="without transformers' own decoding")
    parser.add_argument("--tune", type=float, default=0.0, metavar="MINUTES", help="measure again with tuned launches")
    parser.add_argument("--stage", choices=full_size.SHAPES, help="shape of a cascade's small stage, in its own calls")
    parser.add_argument("--no-sums", action="store_true")
    args = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(minutes=30))
    group, dtype = dist.group.WORLD, getattr(torch, args.dtype)
    assert group is not None
    bandwidth = read_bandwidth(device.type)
    shared = place(device, args.dtype)

    def tell(rows: Iterable[dict[str, Any]], **more: Any) -> None:
        for row in ({**shared, **more, **row} for row in rows):
            if bandwidth and "read_bytes" in row:
                row["floor_ms"] = round(1e3 * (row["read_bytes"] + row["kept_bytes"]) / bandwidth, 4)
            if rank == 0:
                write(args.out, row, [name for name in row if name not in shared])

    for name in args.shapes.split(","):
        config = config_of(name)
        if not args.no_sums:
            tell(sums(group, device, dtype, config.hidden_size, config.vocab_size), shape=name, processes=group.size())
            if cuda:
                tell(norms(group, device, dtype, config.hidden_size), shape=name, processes=group.size())
        for count in args.processes.split(","):
            if count == "all" or rank == 0:
                torch.manual_seed(rank)
                model = make_cut(name, dtype, group.size()) if count == "all" else make_model(name, device.type, dtype)
                torch.manual_seed(1)
                head = make_head(model, args.draft_vocab)
                for prefix, batch, added in product(args.prefix, args.batch, args.sums.split(",")):
                    drawn = torch.Generator().manual_seed(0)
                    ids = torch.randint(10, config.vocab_size, (batch, prefix), generator=drawn).to(device)
                    where = {"processes": group.size() if count == "all" else 1, "prefix": prefix, "batch": batch}
                    tell(rounds(model, head, ids, added, args), shape=name, **where)
                    if args.stage:
                        tell(cascade(model, args.stage, ids, args), shape=name, new_tokens=args.tokens, **where)
                del model, head
            free_memory()
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
