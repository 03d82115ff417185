"""Which tree suits a device: tokens per second of `eagle3` over tree shapes, one row of JSON per shape and prompt.

    python benchmarks/cpu_tree.py --prompts mt_bench.jsonl humaneval.jsonl --each 3 --shapes 6,3,2 16,3,4 --out rows.jsonl
    python benchmarks/cpu_tree.py --backend cpp --runs 3 --out rows.jsonl                             # the demo's prompts

A shape is total_tokens,depth,top_k. A prompt file has `prompt` or `turns` in each row; `--each` takes the first rows of
every file. Each output is compared with transformers' own generate. Every shape is timed on a prompt before the next
prompt comes, so that a machine's slow spell hits all shapes. The lines printed give the median over prompts and the
tokens per second over all of them, which is what `DEFAULT_TREES` is chosen by.

On a shared machine `others` in a row is the number of cores that other processes took while it, or transformers' run of
the prompt, was timed, whichever is more; `--alone 0.1` prints no rows with more than that. With OMP_NUM_THREADS=1 and
`--clock process` other processes hardly count.

An AVX-512 processor is held to AVX2 by ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 in
the environment; `isa` in the rows is what torch uses.
"""  # noqa: E501

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from common import parser_of, place, tree_of, write

import fastspec
from fastspec.models import SMOLLM2, load_model
from fastspec.programs.demo import PROMPTS
from fastspec.programs.texts import encode, first_turn
from fastspec.programs.training.data import read_prompts

KEYS = ("total_tokens", "depth", "top_k")
SHAPES = ("4,2,2", "6,3,2", "10,3,4", "16,3,4", "16,4,4", "24,5,6", "32,5,8", "60,7,10")


def busy() -> float:
    """Seconds that all cores together have worked for other processes than this one; 0 where that is not Linux."""
    if not Path("/proc/stat").exists():
        return 0.0
    user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - time.process_time()


CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


def measure(model, inputs, assistant, tokens: int, clock: str = "wall") -> tuple[list[int], float, float]:
    """New tokens of one greedy call, its seconds, and how many cores other processes took meanwhile."""
    kwargs = {} if assistant is None else {"assistant": assistant}
    now, began, others = CLOCKS[clock], time.perf_counter(), busy()
    start = now()
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **kwargs)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = now() - start
    others = max(0.0, busy() - others) / (time.perf_counter() - began)
    return out[0, inputs["input_ids"].shape[1] :].tolist(), seconds, others


@contextmanager
def beside(count: int) -> Iterator[None]:
    """So many programs run that do nothing but keep a core busy each."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--head", default=SMOLLM2)
    parser.add_argument("--prompts", nargs="+", default=[], type=Path, help="jsonl files; else the demo's prompts")
    parser.add_argument("--each", type=int, default=3, help="prompts to take from each file")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--runs", type=int, default=1, help="how often every prompt is answered by every method")
    parser.add_argument("--alone", type=float, default=float("inf"), help="cores that others may take, to be printed")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="process: with OMP_NUM_THREADS=1")
    parser.add_argument("--busy", type=int, default=0, help="programs beside it that keep a core busy each")
    options = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(options.model, device)
    where = place(device, model.dtype) | {"threads": torch.get_num_threads(), "busy": options.busy}
    where["isa"] = torch.backends.cpu.get_cpu_capability() if device == "cpu" else None
    texts = [(path.stem, first_turn(row)) for path in options.prompts for row in read_prompts(path)[: options.each]]
    texts = texts or [("demo", prompt) for _, prompt in PROMPTS]
    prompts = [(name, encode(tokenizer, text, device)) for name, text in texts]
    fastspec.patch(model, eagle3=options.head, backend=options.backend)
    where["backend"] = fastspec.report(model).backend
    methods = [None, fastspec.Autoregressive(), *map(tree_of, options.shapes)]
    for method in methods:
        measure(model, prompts[0][1], method, 8)
    rows: list[dict] = []
    with beside(options.busy):
        for prompt in prompts * options.runs:
            for row in on_prompt(model, *prompt, methods, options.tokens, options.clock):
                rows.append(row | where)
                write(options.out, rows[-1], ())
    summarise([row for row in rows if row["others"] <= options.alone])


def on_prompt(model, name: str, inputs, methods: list, tokens: int, clock: str) -> list[dict]:
    """One row per method on one prompt; the first method is transformers' own."""
    rows: list[dict] = []
    expected, plain, first = measure(model, inputs, methods[0], tokens, clock)
    for method in methods:
        said, seconds, others = measure(model, inputs, method, tokens, clock) if rows else (expected, plain, first)
        row = {"prompts": name, "method": "transformers" if method is None else type(method).__name__.lower()}
        row |= {key: getattr(method, key, None) for key in KEYS}
        row |= {"tokens": len(said), "seconds": round(seconds, 4), "identical": said == expected, "clock": clock}
        row |= {"ratio": round(plain / seconds * len(said) / len(expected), 3), "others": round(max(others, first), 2)}
        if method is not None:
            last = fastspec.report(model).last
            row["acceptance_length"] = round(last.acceptance_length, 3)
            phases = {name: 1e3 * spent / max(1, last.rounds) for name, spent in last.phases.items()}
            row["ms_per_round"] = {name: round(spent, 2) for name, spent in phases.items() if name != "prefill"}
        rows.append(row)
    return rows


def summarise(rows: list[dict]) -> None:
    """One line per method: medians over the prompts, and tokens per second over all of them."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["method"], *(row[key] for key in KEYS)), []).append(row)
    for (method, *shape), group in groups.items():
        cost = statistics.median(sum(row.get("ms_per_round", {}).values()) for row in group)
        total = sum(row["tokens"] for row in group) / sum(row["seconds"] for row in group)
        ratios = [row["ratio"] for row in group]
        length = statistics.mean(row.get("acceptance_length", 1.0) for row in group)
        name = f"{method} {','.join(map(str, shape)) if shape[0] else '':>8}"
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        same = all(row["identical"] for row in group)
        told = f"ratio {spread}, {length:.2f} tokens in {cost:.1f} ms a round, same {same}"
        print(f"{name}: {total:6.1f} tokens/s, {told}")


if __name__ == "__main__":
    main()
