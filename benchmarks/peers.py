"""fastspec and vLLM side by side on one GPU, the same prompts as token ids to both: rows, and the table that is made of them.

    python benchmarks/peers.py --shapes llama-8b --out rows.jsonl             # random weights: 1 to 256 rows, long prompts, a head's rounds
    python benchmarks/peers.py --prompts mt_bench.jsonl --out rows.jsonl      # SmolLM2's own answers, one at a time and all at once
    python benchmarks/peers.py --prompts a_thousand.jsonl --out rows.jsonl    # a bulk job
    python benchmarks/peers.py --table rows.jsonl                             # the table, in Markdown

Every part appends to the file. Seconds are those of a whole call, prefill included, the median of RUNS calls behind some that compile and
capture; `tokens_per_second` counts new tokens of all rows. Where weights are random, answers have `new` tokens each and what is drafted is
not accepted: rows with drafts tell of `round_ms`, the seconds beyond those of a call of one token, over its rounds. vLLM runs with its own
compilation and CUDA graphs, without prefixes kept from call to call, in a process of its own, after fastspec has left the device.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from full_size import SHAPES, make_head, make_model, timed

import fastspec
from fastspec.bench.device import device_name, versions
from fastspec.bench.measure import left_padded, until_end
from fastspec.bench.peers import Job, Peer, Way, answers, medians
from fastspec.bench.prompts import encode_rows, read_rows
from fastspec.bench.run import saved
from fastspec.models import SMOLLM2, load_model
from fastspec.patches.assistants.heads import find_head
from fastspec.training.save import checkpoint_config

Row = dict[str, Any]
RUNS, COMPILES = 3, 2
CASES = ((1, 512), (8, 512), (32, 512), (128, 512), (256, 512), (1, 2048), (1, 8192), (1, 32768))
"""(rows, tokens before) of a shape."""
TOGETHER = 128
TREE, CHAIN = fastspec.Eagle3(depth=7, top_k=10, total_tokens=60), 5
OURS, THEIRS = "fastspec", "vllm"


def of_shape(name: str, new: int, cases: Sequence[tuple[int, int]], peer: Peer | None, device: str) -> Iterator[Row]:
    """The rows of a shape with random weights, ours first."""
    torch.manual_seed(0)
    model = make_model(name, device, torch.bfloat16 if device == "cuda" else torch.float32)
    head = make_head(model, 32000)
    prompts = [torch.randint(10, model.config.vocab_size, case, device=device) for case in cases]
    with fastspec.patched(model, eagle3=head):
        for (rows, before), ids in zip(cases, prompts, strict=True):
            yield {"rows": rows, "before": before, "engine": OURS, "method": "plain", **speed(seconds_of(model, ids, new), rows * new)}
        rows, before = cases[0]
        yield {"rows": rows, "before": before, "engine": OURS, "method": "eagle3", **round_of(model, prompts[0], new)}
    dtype = str(model.dtype).removeprefix("torch.")
    batches = [ids.tolist() for ids in prompts]
    with tempfile.TemporaryDirectory() as folder:
        target, drafts = Path(folder) / "target", Path(folder) / "head"
        model.config.save_pretrained(target)
        drafts.mkdir()
        (drafts / "config.json").write_text(json.dumps(checkpoint_config(head)))
        del model, head, prompts
        leave()
        if peer is None:
            return
        plain = Job(str(target), dtype, batches, new, exact_length=True, dummy=True, warmup=COMPILES, runs=RUNS)
        told, found = answers(peer, plain, Way(THEIRS))
        for (rows, before), answer in zip(cases, medians(found), strict=True):
            yield {"rows": rows, "before": before, "engine": THEIRS, "method": "plain", **speed(answer.seconds, rows * new), **told}
        twice = [batches[0]] * 2
        job = Job(str(target), dtype, twice, (new, 1), exact_length=True, head=str(drafts), dummy=True, warmup=COMPILES, runs=RUNS)
        told, found = answers(peer, job, Way(f"{THEIRS}-eagle3-{CHAIN}", CHAIN))
        long, short = medians(found)
        rounds = long.stats.row_rounds // len(batches[0])
        spent = 1e3 * (long.seconds - short.seconds) / rounds
        yield {"rows": cases[0][0], "before": cases[0][1], "engine": THEIRS, "method": "eagle3", "drafts": CHAIN,
               "acceptance_length": round(long.stats.acceptance_length, 3), "round_ms": round(spent, 3), **told}  # fmt: skip


def seconds_of(model: Any, ids: torch.Tensor, new: int, **more: Any) -> float:
    """Of one call of our own, the median of RUNS."""
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "assistant": "autoregressive", **more}
    for _ in range(COMPILES):
        model.generate(ids, max_new_tokens=new, **options)
    return statistics.median(timed(lambda: model.generate(ids, max_new_tokens=new, **options)) for _ in range(RUNS))


def round_of(model: Any, ids: torch.Tensor, new: int) -> Row:
    """A round with a tree of 60 nodes."""
    spent = seconds_of(model, ids, new, assistant=TREE)
    last = fastspec.report(model).last
    first = seconds_of(model, ids, 1, assistant=TREE)
    return {
        "drafts": 60, "acceptance_length": round(last.acceptance_length, 3), "round_ms": round(1e3 * (spent - first) / last.rounds, 3),
    }  # fmt: skip


def speed(seconds: float, tokens: int) -> Row:
    return {"seconds": round(seconds, 4), "tokens_per_second": round(tokens / seconds, 1)}


def of_prompts(path: Path, name: str, new: int, each: int | None, peer: Peer | None, device: str) -> Iterator[Row]:
    """The rows of a real model's answers to a file of prompts, one at a time and all at once; of more than TOGETHER prompts, all in one
    call, as a bulk job has them, of which that many are decoded together."""
    model, tokenizer = load_model(name, device)
    prompts = encode_rows(read_rows(path), tokenizer, model, each, new, print)
    found = [prompt.ids for prompt in prompts]
    config = model.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    said: dict[str, list[list[int]]] = {}
    fastspec.patch(model, eagle3=name)
    sizes = (1, len(found)) if len(found) <= TOGETHER else (len(found),)
    for rows, method in product(sizes, ("plain", "eagle3")):
        assistant: Any = "autoregressive" if method == "plain" else method
        assistant = assistant if rows <= TOGETHER else fastspec.ContinuousBatch(assistant, rows=TOGETHER)
        batches = [found[at : at + rows] for at in range(0, len(found), rows)]
        seconds, answered, emitted, rounds = 0.0, [], 0, 0
        for batch in batches:
            inputs = left_padded(batch, config, device)
            call = partial(model.generate, **inputs, max_new_tokens=new, do_sample=False, assistant=assistant)
            for _ in range(COMPILES if device == "cuda" else 0):
                call()
            out: list[torch.Tensor] = []
            seconds += timed(lambda call=call, out=out: out.append(call()))
            last = fastspec.report(model).last
            emitted, rounds = emitted + last.round_tokens, rounds + last.row_rounds
            answered += [until_end(row, ends) for row in out[0][:, inputs["input_ids"].shape[1] :].tolist()]
        said.setdefault("plain", answered)
        yield {"rows": rows, "engine": OURS, "method": method, **told_of(answered, seconds, said["plain"]),
               "acceptance_length": round(emitted / rounds, 3) if method != "plain" else None}  # fmt: skip
    fastspec.unpatch(model)
    model.to("cpu")
    leave()
    if peer is None:
        return
    with saved(name, model, tokenizer) as folder:
        parts = {rows: [found[at : at + rows] for at in range(0, len(found), rows)] for rows in sizes}
        batches = [batch for part in parts.values() for batch in part]
        job = Job(folder, str(model.dtype).removeprefix("torch."), batches, new, ends, head=str(find_head(name)))
        for chain in (None, 3, 5):
            told, made = answers(peer, job, Way(f"{THEIRS}-{chain}", chain))
            calls = medians(made)
            for rows, part in parts.items():
                answered_by = list(islice(calls, len(part)))
                answered = [row for answer in answered_by for row in answer.tokens]
                kept, drafted = (sum(getattr(answer.stats, name) for answer in answered_by) for name in ("round_tokens", "row_rounds"))
                yield {"rows": rows, "engine": THEIRS, "method": "eagle3" if chain else "plain", "drafts": chain,
                       **told_of(answered, sum(answer.seconds for answer in answered_by), said["plain"]),
                       "acceptance_length": round(kept / drafted, 3) if drafted else None, **told}  # fmt: skip


def told_of(answered: list[list[int]], seconds: float, plain: list[list[int]]) -> Row:
    """Speed, and the share of answers that are our plain ones."""
    same = sum(a == b for a, b in zip(answered, plain, strict=True)) / len(plain)
    return {**speed(seconds, sum(map(len, answered))), "new_tokens": sum(map(len, answered)), "same": round(same, 3)}


def leave() -> None:
    """Give the device's memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(rows: Sequence[Row]) -> str:
    """Markdown of the last rows of every case, vLLM's beside ours."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        key = row["model"], row.get("before"), row["rows"], row["method"]
        cases.setdefault(key, {})[row["engine"] + (f" {row['drafts']}" if row["engine"] == THEIRS and row.get("drafts") else "")] = row
    lines = ["| model | tokens before | rows | | fastspec | vLLM | ratio |", "|---|---|---|---|---|---|---|"]
    for (model, before, count, method), found in cases.items():
        for name, theirs in found.items():
            mine = found.get(OURS)
            if name == OURS or mine is None:
                continue
            what = "ms a round" if "round_ms" in mine else "tokens/s"
            a, b = (row.get("round_ms", row.get("tokens_per_second")) for row in (mine, theirs))
            ratio = b / a if "round_ms" in mine else a / b
            cells = [_cell(a, mine), _cell(b, theirs)]
            lines.append(f"| {model} | {before or 'prompts'} | {count} | {method}, {what} | {cells[0]} | {cells[1]} | {ratio:.2f} |")
    return "\n".join(lines)


def _cell(value: float, row: Row) -> str:
    """A figure, with the drafts of a round and the mean tokens that one gave where there are any."""
    if row["method"] == "plain":
        return f"{value:,.0f}"
    drafts = f"{row['drafts']} drafts, " if row.get("drafts") else ""
    return f"{value:,.{2 if 'round_ms' in row else 0}f} ({drafts}{row['acceptance_length']:.2f} tokens a round)"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[], choices=list(SHAPES))
    parser.add_argument("--cases", nargs="*", default=[f"{rows}x{before}" for rows, before in CASES], help="rows x tokens before: 8x512")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--model", default=SMOLLM2, help="of --prompts; it must have a head of that name")
    parser.add_argument("--each", type=int, help="prompts to take of every category")
    parser.add_argument("--new", type=int, default=128)
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
    cases = [tuple(map(int, case.split("x"))) for case in args.cases]
    parts = [(name, of_shape(name, args.new, cases, peer, device)) for name in args.shapes]
    if args.prompts:
        parts.append((args.model, of_prompts(args.prompts, args.model, args.new, args.each, peer, device)))
    where = {"device": device_name(torch.device(device)), **versions()}
    for name, rows in parts:
        for row in rows:
            row = {"model": name, "new": args.new, **row, **where}
            print({key: value for key, value in row.items() if key in ("model", "rows", "before", "engine", "method", "tokens_per_second",
                                                                       "round_ms", "acceptance_length", "same")}, flush=True)  # fmt: skip
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
