"""fastspec and vLLM side by side on one GPU, the same prompts as token ids to both.

    python benchmarks/peers.py --shapes llama-8b --out rows.jsonl       # 1 to 256 rows, long prompts, a head's rounds
    python benchmarks/peers.py --shapes qwen3-30b-a3b --memory 0.92 --cases 1x2048 8x512 --out rows.jsonl
    python benchmarks/peers.py --shapes llama-8b --processes 2 --cases 1x2048 --new 60 --out rows.jsonl

Weights are random: answers have `new` tokens each, and drafts are not accepted. Seconds are those of a whole call, its
prefill included: the median of some calls (`runs`) after some that compile and capture. `tokens_per_second` counts the
new tokens of all rows. `first_token_s`, of long prompts (LONG tokens and more), are the seconds of a call of one token.
`round_ms`, of rows with drafts (the case `--round`), are the seconds beyond those of such a call, over the rounds. vLLM
runs without prefixes kept from call to call, in a process of its own, after fastspec has left the device.

With `--processes` vLLM alone runs, over so many GPUs; every row has its `round_ms`, beside those of parallel.py. It
must not set up NVLink multicast where the host's other users share the switch: start this with `NCCL_NVLS_ENABLE=0` and
`VLLM_ALLREDUCE_USE_SYMM_MEM=0` there. `fastspec bench --peer vllm` compares both on a model's own answers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Row, device_here, free_memory, parser_of, place, timed, tree_of, write
from full_size import SHAPES, STORED, config_of, make_empty, make_head, make_model

import fastspec
from fastspec.errors import FastSpecError
from fastspec.programs.bench.peers import MEMORY, Peer, PeerJob, answers
from fastspec.programs.compare import median_answer
from fastspec.programs.training.heads import checkpoint_config

Case = tuple[int, int]
OURS, THEIRS = "fastspec", "vllm"
RUNS, LONG_RUNS, COMPILES = 3, 2, 2
LONG = 8192
"""Tokens before, from which on a prompt is a long one: LONG_RUNS calls, and one token alone too."""
CASES = ((1, 2048), (1, 512), (8, 512), (32, 512), (128, 512), (256, 512), (1, LONG), (1, 32768), (1, 130816))
"""(rows, tokens before) of a shape; the longest leaves room for an answer in 131,072 positions."""
ROUND = (1, 2048)
"""The case of a head's rounds, where it is among them."""
TREE = tree_of("60,7,10")


@dataclass(slots=True)
class Run:
    """What all cases share, and those that failed; without a peer fastspec is measured alone."""

    args: argparse.Namespace
    peer: Peer | None
    failed: list[str] = field(default_factory=list)

    def tried(self, case: str, run: Callable[[], list[Row]]) -> list[Row]:
        """The rows of a case; none where it fails."""
        try:
            return run()
        except (torch.cuda.OutOfMemoryError, FastSpecError) as error:
            print(f"failed: {case}: {error}", flush=True)
            self.failed.append(case)
            free_memory()
            return []


def of_shape(name: str, run: Run) -> Iterator[Row]:
    """The rows of a shape, ours first: of every case, and of a head's rounds, which come second."""
    torch.manual_seed(0)
    args, (device, dtype) = run.args, device_here()
    todo: list[tuple[str, Case]] = [("plain", case) for case in args.cases]
    if not args.no_round:
        todo.insert(1, ("eagle3", args.round or (ROUND if ROUND in args.cases else args.cases[0])))
    batches = {each: torch.randint(10, config_of(name).vocab_size, each[1], device=device) for each in todo}
    with tempfile.TemporaryDirectory() as folder:
        model = make_empty(name, dtype) if args.processes > 1 else make_model(name, device, dtype)
        head = make_head(model, args.draft_vocab)
        if args.processes == 1:
            STORED[args.fp8 or "dense"](model)
            with fastspec.patched(model, eagle3=head, stored=bool(args.fp8) or None):
                for method, case in list(batches):
                    shown = f"{name}, {method}, {case[0]} x {case[1]}"
                    found = run.tried(shown, partial(own_rows, model, batches[method, case], method, args.new))
                    if not found:
                        del batches[method, case]
                    yield from found
        target, drafts = write_configs(model, head, Path(folder))
        del model, head
        free_memory()
        for method, chain in (("plain", None), *(("eagle3", chain) for chain in args.chains)):
            ids = {case: batch.tolist() for (of, case), batch in batches.items() if of == method}
            if run.peer is not None and ids:
                shown = f"{name}, {THEIRS} {method}"
                yield from run.tried(shown, partial(their_rows, target, drafts, str(dtype)[6:], ids, chain, run))


def write_configs(model: Any, head: Any, folder: Path) -> tuple[str, str]:
    """Folders with the configurations of a model and of its head, as vLLM reads them: (target, head)."""
    target, drafts = folder / "target", folder / "head"
    model.config.architectures = [type(model).__name__]  # which vLLM chooses its class by
    model.config.save_pretrained(target)
    drafts.mkdir()
    (drafts / "config.json").write_text(json.dumps(checkpoint_config(head)))
    return str(target), str(drafts)


def own_rows(model: Any, ids: torch.Tensor, method: str, new: int) -> list[Row]:
    """The row of a case of ours."""
    rows, before = ids.shape
    runs = LONG_RUNS if before >= LONG else RUNS
    assistant: Any = TREE if method == "eagle3" else "autoregressive"
    seconds = seconds_of(model, ids, new, assistant, COMPILES, runs)
    last = fastspec.report(model).last
    row: Row = {"rows": rows, "before": before, "new": new, "engine": OURS, "method": method, "runs": runs}
    first = seconds_of(model, ids, 1, assistant, 1, runs) if method == "eagle3" or before >= LONG else None
    drafts = TREE.total_tokens if method == "eagle3" else None
    row |= figures(row, seconds, first, last.rounds, drafts, last.acceptance_length)
    told = {"assistant": "autoregressive"} if drafts is None else {"assistant": "eagle3", **asdict(TREE)}
    settings = {"backend": fastspec.report(model).backend, "dtype": str(model.dtype).removeprefix("torch."), **told}
    return [row | {"engine_version": fastspec.__version__, "engine_settings": settings}]


def seconds_of(model: Any, ids: torch.Tensor, new: int, assistant: Any, compiles: int, runs: int) -> float:
    """Of one call of our own, the median of several."""
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "assistant": assistant}
    spent = [timed(lambda: model.generate(ids, **options, max_new_tokens=new)) for _ in range(compiles + runs)]
    return statistics.median(spent[compiles:])


def their_rows(
    target: str, head: str, dtype: str, cases: dict[Case, list[list[int]]], chain: int | None, run: Run
) -> list[Row]:
    """vLLM's rows of cases of one method, from one process for the long prompts and one for the others."""
    args, made = run.args, []
    assert run.peer is not None
    for long in (False, True):
        chosen = {case: ids for case, ids in cases.items() if (case[1] >= LONG) == long}
        if not chosen:
            continue
        twice, runs = long or chain is not None or args.processes > 1, LONG_RUNS if long else RUNS
        counts = (args.new, 1) if twice else (args.new,)
        batches = [ids for ids in chosen.values() for _ in counts]
        sizes = {"memory": args.memory, "processes": args.processes, "quantization": args.fp8}
        sizes |= {"cache_bytes": None if args.cache_gib is None else int(args.cache_gib * 2**30)}
        asked = {"exact_length": True, "head": head, "dummy": True, "warmup": COMPILES, "runs": runs}
        job = PeerJob(target, dtype, batches, counts * len(chosen), **asked, **sizes)
        told, found = answers(run.peer, job, chain)
        calls = map(median_answer, found)
        for rows, before in chosen:
            whole = next(calls)
            first = next(calls).seconds if twice else None
            row: Row = {"rows": rows, "before": before, "new": args.new, "engine": THEIRS}
            row |= {"method": "plain" if chain is None else "eagle3", "runs": runs, "processes": args.processes}
            rounds = args.new - 1 if chain is None else whole.stats.row_rounds // rows
            of_round = chain or (0 if args.processes > 1 else None)
            row |= figures(row, whole.seconds, first, rounds, of_round, whole.stats.acceptance_length if chain else 1.0)
            made.append(row | told)
    return made


def figures(row: Row, seconds: float, first: float | None, rounds: int, drafts: int | None, length: float) -> Row:
    """The columns of a call's seconds: of a round where there are `drafts` (0: none, and a round is asked for)."""
    found: Row = {} if first is None else {"first_token_s": round(first, 4)}
    if drafts is not None and first is not None:
        round_ms = round(1e3 * (seconds - first) / rounds, 3)
        return found | {"drafts": drafts or None, "acceptance_length": round(length, 3), "round_ms": round_ms}
    speed = round(row["rows"] * row["new"] / seconds, 1)
    return found | {"seconds": round(seconds, 4), "tokens_per_second": speed}


def read_case(text: str) -> Case:
    """ "8x512" -> 8 rows, 512 tokens before."""
    rows, _, before = text.partition("x")
    return int(rows), int(before)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="*", default=[], choices=list(SHAPES))
    parser.add_argument("--cases", nargs="+", type=read_case, default=list(CASES), help="rows x tokens before: 8x512")
    parser.add_argument("--round", type=read_case, help="a head's rounds; else 1x2048, or the first case")
    parser.add_argument("--no-round", action="store_true", help="leave a head's rounds out")
    parser.add_argument("--new", type=int, default=128, help="new tokens")
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--chains", nargs="*", type=int, default=[5], help="drafts of vLLM's chains")
    parser.add_argument("--fp8", action="store_const", const="fp8", help="weights in FP8, and vLLM's activations")
    parser.add_argument("--memory", type=float, default=MEMORY, help="share of the device that vLLM takes")
    parser.add_argument("--cache-gib", type=float, help="vLLM's keys and values; by default all that it finds free")
    parser.add_argument("--processes", type=int, default=1, help="GPUs that hold the model: vLLM alone")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--peer-python", default=sys.executable)
    args = parser.parse_args(arguments)
    peer = None if args.no_peer else Peer(THEIRS, args.peer_python)
    if peer is not None and not peer.is_installed():
        raise SystemExit(f"{THEIRS} is not installed for {peer.python}: name another with --peer-python, or --no-peer")
    run, where = Run(args, peer), place(*device_here())
    shown = ("model", "rows", "before", "engine", "method", "tokens_per_second", "first_token_s", "round_ms")
    for name in args.shapes:
        for row in of_shape(name, run):
            write(args.out, {"model": name + ("-fp8" if args.fp8 else ""), **row, **where}, shown)
    if run.failed:
        raise SystemExit(f"failed: {'; '.join(run.failed)}")


if __name__ == "__main__":
    main()
