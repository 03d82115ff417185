"""fastspec and vLLM side by side on one GPU, the same prompts as token ids to both: rows, and the table that is made of them.

    python benchmarks/peers.py --shapes llama-8b --out rows.jsonl             # random weights: 1 to 256 rows, long prompts, a head's rounds
    python benchmarks/peers.py --shapes qwen3-30b-a3b --memory 0.92 --cases 1x2048 8x512 --out rows.jsonl     # a mixture of experts
    python benchmarks/peers.py --prompts mt_bench.jsonl --out rows.jsonl      # SmolLM2's own answers, one at a time and all at once
    python benchmarks/peers.py --prompts mt_bench.jsonl --shapes llama-8b --budget 1500 --out rows.jsonl      # ends in 25 minutes
    python benchmarks/peers.py --table rows.jsonl                             # the table, in Markdown

Every part appends to the file. What matters most comes first: prompts, then every shape's cases in their order, then every shape's long
prompts (LONG tokens and more). With `--budget` a case is left out, in a line of its own, where it and what vLLM still owes to the cases
before it are not expected to fit; a case that fails is told and costs no other.

Seconds are those of a whole call, prefill included, the median of some calls (`runs`) behind some that compile and capture;
`tokens_per_second` counts new tokens of all rows, and `first_token_s`, of long prompts, are the seconds of a call of one token. Where
weights are random, answers have `new` tokens each and what is drafted is not accepted: rows with drafts, of the case `--round`, tell of
`round_ms`, the seconds beyond those of a call of one token, over its rounds. vLLM runs with its own compilation and CUDA graphs, without
prefixes kept from call to call, in a process of its own, after fastspec has left the device.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from budget import Budget, call_seconds
from full_size import SHAPES, make_head, make_model, timed
from peers_table import OURS, THEIRS, table

import fastspec
from fastspec.errors import FastSpecError
from fastspec.models import SMOLLM2, load_model
from fastspec.patches.assistants.heads import find_head
from fastspec.programs.bench.device import device_name, versions
from fastspec.programs.bench.measure import MeasuredAnswer, left_padded, until_end
from fastspec.programs.bench.peers import MEMORY, Peer, PeerJob, Way, answers, medians
from fastspec.programs.bench.prompts import encode_rows, read_rows
from fastspec.programs.bench.run import saved
from fastspec.programs.training.save import checkpoint_config

Row = dict[str, Any]
Case = tuple[int, int]
RUNS, LONG_RUNS, COMPILES = 3, 2, 2
LONG = 8192
"""Tokens before, from which on a prompt is a long one: measured behind all others, with LONG_RUNS calls, and one token alone too."""
CASES = ((1, 2048), (1, 512), (8, 512), (32, 512), (128, 512), (256, 512), (1, LONG), (1, 32768), (1, 130816))
"""(rows, tokens before) of a shape; the longest leaves room for an answer in 131,072 positions."""
ROUND = (1, 2048)
"""The case of a head's rounds, where it is among the cases."""
TOGETHER = 128
TREE, CHAINS = fastspec.Eagle3(depth=7, top_k=10, total_tokens=60), (3, 5)
STARTS = {"cuda": 150.0, "cpu": 5.0}
"""Seconds that a process of vLLM's takes before it answers."""
CAPTURES = {"cuda": 15.0, "cpu": 0.0}
"""Seconds of compiling and capturing for a case."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all parts of a run share; without a peer fastspec is measured alone."""

    peer: Peer | None
    device: str
    budget: Budget
    memory: float = MEMORY
    cache_bytes: int | None = None
    chains: tuple[int, ...] = CHAINS

    def tried(self, case: str, engine: str, expected: float, run: Callable[[], list[Row]], owed: float = 0.0) -> list[Row]:
        """The rows of a case; none where it and what is `owed` behind it do not fit, or where it fails."""
        if not self.budget.fits(case, self.budget.expects(engine, expected) + owed):
            return []
        try:
            with self.budget.spends(engine, expected):
                return run()
        except (torch.cuda.OutOfMemoryError, FastSpecError) as error:
            self.budget.fails(case, error)
        leave()
        return []

    def asked(self, job: PeerJob, way: Way) -> tuple[Row, list[MeasuredAnswer]]:
        """What vLLM says of itself, and its call of median time for every batch."""
        assert self.peer is not None
        left = self.budget.left
        told, found = answers(self.peer, job, way, timeout=None if math.isinf(left) else max(1.0, left))
        return told, list(medians(found))


def of_shape(name: str, new: int, cases: Sequence[Case], round_case: Case | None, long: bool, setup: Setup) -> Iterator[Row]:
    """The rows of a shape with random weights, ours first."""
    torch.manual_seed(0)
    device, budget = setup.device, setup.budget
    model = make_model(name, device, torch.bfloat16 if device == "cuda" else torch.float32)
    head = make_head(model, 32000)
    measured: list[tuple[str, Case, list[list[int]], float]] = []
    todo = [("plain", case) for case in cases]
    if round_case is not None:
        todo.insert(1, ("eagle3", round_case))
    with fastspec.patched(model, eagle3=head):
        for method, case in todo:
            own, other = expected(model, case, new, method, long)
            starts = STARTS[device] * len({method, *(each[0] for each in measured)})
            owed = budget.expects(THEIRS, starts + other + sum(each[-1] for each in measured)) if setup.peer else 0.0
            ids = torch.randint(10, model.config.vocab_size, case, device=device)
            found = setup.tried(told_case(name, method, case), OURS, own, partial(own_rows, model, ids, method, new, long), owed)
            if found:
                measured.append((method, case, ids.tolist(), other))
            yield from found
    dtype = str(model.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as folder:
        target, drafts = write_configs(model, head, Path(folder))
        del model, head
        leave()
        if setup.peer is None:
            return
        for method in ("plain", "eagle3"):
            chosen, seconds = [], STARTS[device]
            for _, case, batch, other in (each for each in measured if each[0] == method):
                if budget.fits(told_case(name, f"{THEIRS} {method}", case), budget.expects(THEIRS, seconds + other)):
                    chosen.append((case, batch))
                    seconds += other
            if chosen:
                rows = partial(their_rows, target, drafts, dtype, chosen, method, new, long, setup)
                yield from setup.tried(f"{name}, {THEIRS} {method}", THEIRS, seconds, rows)


def write_configs(model: Any, head: Any, folder: Path) -> tuple[str, str]:
    """Folders with the configurations of a model and of its head, without weights, as vLLM reads them: (target, head)."""
    target, drafts = folder / "target", folder / "head"
    model.config.architectures = [type(model).__name__]  # which vLLM chooses its class by
    model.config.save_pretrained(target)
    drafts.mkdir()
    (drafts / "config.json").write_text(json.dumps(checkpoint_config(head)))
    return str(target), str(drafts)


def told_case(name: str, method: str, case: Case) -> str:
    """A case in words."""
    return f"{name}, {method}, {case[0]} x {case[1]}"


def expected(model: Any, case: Case, new: int, method: str, long: bool) -> tuple[float, float]:
    """Seconds of a case that we, and that vLLM, may take, a start of its process left out."""
    whole, first = (call_seconds(model, *case, count) for count in (new, 1))
    runs = LONG_RUNS if long else RUNS
    calls = whole * (COMPILES + runs) + (first * (COMPILES + runs) if method == "eagle3" or long else 0.0)
    return calls + CAPTURES[model.device.type], calls


def own_rows(model: Any, ids: torch.Tensor, method: str, new: int, long: bool) -> list[Row]:
    """The row of a case of ours."""
    rows, before = ids.shape
    runs = LONG_RUNS if long else RUNS
    assistant: Any = TREE if method == "eagle3" else "autoregressive"
    spent, last = seconds_of(model, ids, new, assistant, COMPILES, runs)
    row: Row = {"rows": rows, "before": before, "new": new, "engine": OURS, "method": method, "runs": runs}
    if method == "eagle3" or long:
        first, _ = seconds_of(model, ids, 1, assistant, 1, runs)
        row |= {"first_token_s": round(first, 4)}
    if method == "eagle3":
        round_ms = round(1e3 * (spent - first) / last.rounds, 3)
        row |= {"drafts": TREE.total_tokens, "acceptance_length": round(last.acceptance_length, 3), "round_ms": round_ms}
    else:
        row |= speed(spent, rows * new)
    return [row | own_settings(model, assistant)]


def seconds_of(model: Any, ids: torch.Tensor, new: int, assistant: Any, compiles: int, runs: int) -> tuple[float, Any]:
    """Of one call of our own, the median of several; and the statistics of the last."""
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "assistant": assistant, "max_new_tokens": new}
    for _ in range(compiles):
        model.generate(ids, **options)
    spent = statistics.median(timed(lambda: model.generate(ids, **options)) for _ in range(runs))
    return spent, fastspec.report(model).last


def own_settings(model: Any, assistant: Any) -> Row:
    """Our version and settings, as vLLM's rows have its own."""
    if isinstance(assistant, str):
        told = {"assistant": assistant}
    elif isinstance(assistant, fastspec.ContinuousBatch):
        told = {"assistant": assistant.assistant, "rows": assistant.rows}
    else:
        told = {"assistant": type(assistant).name} | asdict(assistant)
    settings = {"backend": fastspec.report(model).backend, "dtype": str(model.dtype).removeprefix("torch."), **told}
    return {"engine_version": fastspec.__version__, "engine_settings": settings}


def their_rows(
    target: str, head: str, dtype: str, cases: Sequence[tuple[Case, list[list[int]]]], method: str, new: int, long: bool, setup: Setup
) -> list[Row]:  # fmt: skip
    """vLLM's rows of cases of one method, from one process."""
    twice, eagle = method == "eagle3" or long, method == "eagle3"
    runs, counts = (LONG_RUNS if long else RUNS), (new, 1) if twice else (new,)
    batches = [batch for _, batch in cases for _ in counts]
    job = PeerJob(
        target, dtype, batches, counts * len(cases), exact_length=True, head=head, dummy=True, warmup=COMPILES, runs=runs,
        memory=setup.memory, cache_bytes=setup.cache_bytes,
    )  # fmt: skip
    chain = setup.chains[-1] if eagle else None
    told, found = setup.asked(job, Way(f"{THEIRS}-eagle3-{chain}" if eagle else THEIRS, chain))
    made, calls = [], iter(found)
    for (rows, before), _ in cases:
        whole = next(calls)
        row: Row = {"rows": rows, "before": before, "new": new, "engine": THEIRS, "method": method, "runs": runs}
        if twice:
            first = next(calls)
            row |= {"first_token_s": round(first.seconds, 4)}
        if eagle:
            round_ms = round(1e3 * (whole.seconds - first.seconds) / (whole.stats.row_rounds // rows), 3)
            row |= {"drafts": chain, "acceptance_length": round(whole.stats.acceptance_length, 3), "round_ms": round_ms}
        else:
            row |= speed(whole.seconds, rows * new)
        made.append(row | told)
    return made


def speed(seconds: float, tokens: int) -> Row:
    return {"seconds": round(seconds, 4), "tokens_per_second": round(tokens / seconds, 1)}


def of_prompts(path: Path, name: str, new: int, each: int | None, setup: Setup) -> Iterator[Row]:
    """The rows of a real model's answers to a file of prompts, one at a time and all at once; of more than TOGETHER prompts, all in one
    call, as a bulk job has them, of which that many are decoded together."""
    device = setup.device
    model, tokenizer = load_model(name, device)
    found = [prompt.ids for prompt in encode_rows(read_rows(path), tokenizer, model, each, new, print)]
    config = model.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    said: dict[str, list[list[int]]] = {}
    fastspec.patch(model, eagle3=name)
    sizes = (1, len(found)) if len(found) <= TOGETHER else (len(found),)
    before = max(map(len, found))
    costs = {rows: call_seconds(model, min(rows, TOGETHER), before, new) * math.ceil(len(found) / min(rows, TOGETHER)) for rows in sizes}
    theirs = STARTS[device] + 2 * sum(costs.values())  # a warm-up and one run of every call, of each way
    measured = []
    for rows, method in product(sizes, ("plain", "eagle3")):
        own = costs[rows] * ((COMPILES if device == "cuda" else 0) + 1) + CAPTURES[device]
        owed = setup.budget.expects(THEIRS, theirs) if setup.peer else 0.0
        parts = [found[at : at + rows] for at in range(0, len(found), rows)]
        run = partial(own_answers, model, parts, method, new, ends, said)
        made = setup.tried(f"{name}, {method}, {rows} of {len(found)} prompts", OURS, own, run, owed)
        measured += [rows] if made else []
        yield from made
    fastspec.unpatch(model)
    model.to("cpu")
    leave()
    if setup.peer is None or not measured:
        return
    sizes = tuple(dict.fromkeys(measured))
    with saved(name, model, tokenizer) as folder:
        for chain in (None, *setup.chains):
            run = partial(their_answers, folder, model, name, found, sizes, chain, new, ends, said, setup)
            yield from setup.tried(f"{name}, {THEIRS}, chain {chain}", THEIRS, theirs, run)


def own_answers(
    model: Any, batches: Sequence[list[list[int]]], method: str, new: int, ends: list[int], said: dict[str, list[list[int]]]
) -> list[Row]:  # fmt: skip
    """The row of our answers to all prompts, batch by batch."""
    rows = len(batches[0])
    assistant: Any = "autoregressive" if method == "plain" else method
    assistant = assistant if rows <= TOGETHER else fastspec.ContinuousBatch(assistant, rows=TOGETHER)
    seconds, answered, emitted, rounds = 0.0, [], 0, 0
    for batch in batches:
        inputs = left_padded(batch, model.generation_config, str(model.device))
        call = partial(model.generate, **inputs, max_new_tokens=new, do_sample=False, assistant=assistant)
        for _ in range(COMPILES if model.device.type == "cuda" else 0):
            call()
        out: list[torch.Tensor] = []
        seconds += timed(lambda call=call, out=out: out.append(call()))
        last = fastspec.report(model).last
        emitted, rounds = emitted + last.round_tokens, rounds + last.row_rounds
        answered += [until_end(row, ends) for row in out[0][:, inputs["input_ids"].shape[1] :].tolist()]
    said.setdefault("plain", answered)
    row = {"rows": rows, "new": new, "engine": OURS, "method": method, "runs": 1, **told_of(answered, seconds, said["plain"])}
    row["acceptance_length"] = round(emitted / rounds, 3) if method != "plain" else None
    return [row | own_settings(model, assistant)]


def their_answers(
    folder: str, model: Any, name: str, found: list[list[int]], sizes: Sequence[int], chain: int | None, new: int, ends: list[int],
    said: dict[str, list[list[int]]], setup: Setup,
) -> list[Row]:  # fmt: skip
    """The rows of vLLM's answers, of every size of batch, from one process."""
    parts = {rows: [found[at : at + rows] for at in range(0, len(found), rows)] for rows in sizes}
    batches = [batch for part in parts.values() for batch in part]
    dtype = str(model.dtype).removeprefix("torch.")
    job = PeerJob(folder, dtype, batches, new, ends, head=str(find_head(name)), memory=setup.memory, cache_bytes=setup.cache_bytes)
    told, median = setup.asked(job, Way(f"{THEIRS}-{chain}", chain))
    made, calls = [], iter(median)
    for rows, part in parts.items():
        answers_of = list(islice(calls, len(part)))
        answered = [row for answer in answers_of for row in answer.tokens]
        kept, drafted = (sum(getattr(answer.stats, count) for answer in answers_of) for count in ("round_tokens", "row_rounds"))
        row: Row = {"rows": rows, "new": new, "engine": THEIRS, "method": "eagle3" if chain else "plain", "runs": 1, "drafts": chain}
        row |= told_of(answered, sum(answer.seconds for answer in answers_of), said["plain"])
        made.append(row | {"acceptance_length": round(kept / drafted, 3) if drafted else None} | told)
    return made


def told_of(answered: list[list[int]], seconds: float, plain: list[list[int]]) -> Row:
    """Speed, and the share of answers that are our plain ones."""
    same = sum(a == b for a, b in zip(answered, plain, strict=True)) / len(plain)
    return {**speed(seconds, sum(map(len, answered))), "new_tokens": sum(map(len, answered)), "same": round(same, 3)}


def leave() -> None:
    """Give the device's memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def read_case(text: str) -> Case:
    """ "8x512" -> 8 rows, 512 tokens before."""
    rows, _, before = text.partition("x")
    return int(rows), int(before)


def make_parts(args: argparse.Namespace, setup: Setup) -> Iterator[tuple[str, Iterator[Row]]]:
    """The parts of a run, those that matter most first."""
    if args.prompts:
        yield args.model, of_prompts(args.prompts, args.model, args.prompt_new, args.each, setup)
    cases: list[Case] = args.cases
    head_case = args.round or (ROUND if ROUND in cases else cases[0])
    for long in (False, True):
        chosen = [case for case in cases if (case[1] >= LONG) == long]
        rounds = head_case if not args.no_round and (head_case[1] >= LONG) == long else None
        if chosen or rounds:
            for name in args.shapes:
                yield name, of_shape(name, args.new, chosen, rounds, long, setup)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and append rows; exit status 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[], choices=list(SHAPES))
    parser.add_argument("--cases", nargs="+", type=read_case, default=list(CASES), help="rows x tokens before, first what matters: 8x512")
    parser.add_argument("--round", type=read_case, help="the case of a head's rounds; 1x2048 where it is among the cases, else the first")
    parser.add_argument("--new", type=int, default=128, help="new tokens of shapes")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--prompt-new", type=int, default=256, help="new tokens of --prompts, at the most")
    parser.add_argument("--model", default=SMOLLM2, help="of --prompts; it must have a head of that name")
    parser.add_argument("--each", type=int, help="prompts to take of every category")
    parser.add_argument("--budget", type=float, help="seconds that the run may take; what does not fit is left out")
    parser.add_argument("--memory", type=float, default=MEMORY, help="share of the device that vLLM takes")
    parser.add_argument("--cache-gib", type=float, help="of vLLM's keys and values; by default what it finds free, alone on the device")
    parser.add_argument("--chains", nargs="+", type=int, default=CHAINS, help="drafts of vLLM's chains; a round has the last")
    parser.add_argument("--no-round", action="store_true", help="leave a head's rounds out")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args(arguments)
    if args.table:
        print(table([json.loads(line) for line in args.table.read_text(encoding="utf-8").splitlines()]))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    peer = None if args.no_peer else Peer(THEIRS, args.peer_python)
    if peer is not None and not peer.is_installed():
        raise SystemExit(f"{THEIRS} is not installed for {peer.python}: name another with --peer-python, or give --no-peer")
    cache_bytes = None if args.cache_gib is None else int(args.cache_gib * 2**30)
    setup = Setup(peer, device, Budget(args.budget), args.memory, cache_bytes, tuple(args.chains))
    where = {"device": device_name(torch.device(device)), **versions()}
    shown = ("model", "rows", "before", "engine", "method", "tokens_per_second", "first_token_s", "round_ms", "acceptance_length", "same")
    for name, rows in make_parts(args, setup):
        for row in rows:
            row = {"model": name, **row, **where}
            print({key: row[key] for key in shown if key in row}, flush=True)
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    if setup.budget.left_out:
        print(f"left out in all: {'; '.join(setup.budget.left_out)}")
    if setup.budget.failed:
        raise SystemExit(f"failed: {'; '.join(setup.budget.failed)}")


if __name__ == "__main__":
    main()
