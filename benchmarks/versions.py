"""Two versions of fastspec beside each other: rounds of every assistant and way of calling, and whether the tokens are
the same.

    git worktree add ../before COMMIT
    python benchmarks/versions.py --code before=../before --code after=. --shape smollm2-135m --out rows.jsonl

Each version decodes all cases in a process of its own with the same random weights, in turns (`--turns`), so that a
slow spell of the machine hits both. A row has a case, the version, milliseconds a round (the prefill taken off; the
median of all calls of all turns), rounds, and a digest of the tokens. The last lines are the ratios and the cases whose
tokens differ; the status is 1 where any do.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CALLS = 5
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 50}}
WAYS |= {"penalty": {"repetition_penalty": 1.1}, "lockstep": {}}
"""Ways of calling: the likeliest tokens, draws, a processor that looks at the tokens so far, and one of unknown
type."""


def cases() -> list[tuple[str, str]]:
    """(assistant, way), each of them in one row or several."""
    every = [(name, way) for name in ("autoregressive", "eagle3", "nasd", "early exit", "draft model") for way in WAYS]
    greedy = ("eagle3, 4 rows", "eagle", "eagle2", "continuous", "cascade, token", "cascade, lossless")
    return [*every, *((name, "greedy") for name in (*greedy, "encoder-decoder, nasd"))]


def measure(shape: str, device: str, dtype_name: str, new: int, only: list[str]) -> list[dict[str, Any]]:
    """The rows of this process' version of fastspec, of the cases whose name has one of `only` in it."""
    import torch
    from transformers import AutoModelForCausalLM, LogitsProcessorList, T5Config, T5ForConditionalGeneration

    import fastspec

    dtype = getattr(torch, dtype_name)
    torch.manual_seed(0)
    sys.path.insert(0, str(Path(fastspec.__file__).parent.parent / "benchmarks"))  # this process' version's
    full_size = importlib.import_module("full_size")
    sys.path.pop(0)
    target = full_size.make_model(shape, device, dtype)
    config = target.config
    small = AutoModelForCausalLM.from_config(type(config)(**{**config.to_dict(), "num_hidden_layers": 2}), dtype=dtype)
    small = small.to(device).eval().requires_grad_(False)
    small.generation_config = target.generation_config
    head = full_size.make_head(target, 8192)
    old = dataclasses.replace(head.config, kind="eagle", own_lm_head=False, taps=(), draft_vocab_size=config.vocab_size)
    eagle = type(head)(old).to(device, dtype).requires_grad_(False)
    for parameter in eagle.parameters():
        parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    torch.manual_seed(1)
    ids = torch.randint(10, min(60, config.vocab_size), (8, 96), device=device)  # few tokens: some of it recurs

    def unchanged(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """A processor of a type that nobody knows: it may have a state."""
        return scores

    tree = fastspec.Eagle3(depth=5, top_k=8, total_tokens=32)
    small_tree = fastspec.Eagle2(depth=4, top_k=6, total_tokens=24)
    named: dict[str, Any] = {"autoregressive": "autoregressive", "nasd": "nasd", "eagle": "eagle", "eagle2": small_tree}
    named |= {"eagle3": tree, "eagle3, 4 rows": tree, "continuous": fastspec.ContinuousBatch(tree, rows=4)}
    named |= {"early exit": fastspec.Speculative(early_exit=2, gamma=3), "draft model": fastspec.Speculative(gamma=3)}
    rows: list[dict[str, Any]] = []

    def decode(model: Any, case: str, way: str, ids: torch.Tensor, assistant: Any) -> None:
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if not any(each in f"{case}, {way}" for each in only):
            return
        walls, digest, last = [], "", None
        for call in range(CALLS + 2):  # the first two compile and capture
            torch.manual_seed(7)
            processors = {"logits_processor": LogitsProcessorList([unchanged])} if way == "lockstep" else {}
            options = {"do_sample": False, **WAYS[way], **processors}
            out = model.generate(**inputs, assistant=assistant, max_new_tokens=new, **options)
            last = fastspec.report(model).last
            digest = hashlib.sha256(str(out.tolist()).encode()).hexdigest()[:16]
            if call > 1:
                walls.append(1e3 * (last.seconds - last.phases["prefill"]) / last.rounds)
        assert last is not None
        row = {"assistant": case, "way": way, "round_ms": [round(wall, 4) for wall in walls], "rounds": last.rounds}
        row |= {"tokens": digest, "acceptance_length": round(last.acceptance_length, 3), "replays": last.replays}
        rows.append(row)

    resources = {"eagle3": head, "eagle": eagle, "eagle2": eagle, "speculative": small}
    with fastspec.patched(target, **resources):
        for case, way in cases():
            if case.startswith(("cascade", "encoder")):
                continue
            count = 8 if case == "continuous" else 4 if "4 rows" in case else 1
            decode(target, case, way, ids[:count], named[case])
    for mode in ("token", "lossless"):
        alpha = 1.0 if mode == "token" else "lossless"
        cascade = fastspec.Cascade(stages=[small], mode=mode, rule="token_v2", alpha=alpha, gamma=3)
        with fastspec.patched(target, cascade=cascade):
            decode(target, f"cascade, {mode}", "greedy", ids[:1], "cascade")
    sizes = {"d_model": 256, "d_kv": 32, "d_ff": 512, "num_layers": 4, "num_heads": 8, "vocab_size": 512}
    torch.manual_seed(2)
    t5 = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).to(device, dtype).eval()
    t5.generation_config.eos_token_id = None
    with fastspec.patched(t5):
        decode(t5, "encoder-decoder, nasd", "greedy", ids[:1], "nasd")
    return rows


def run(name: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one version, from a process of its own."""
    options = [f"--{option}={getattr(args, option)}" for option in ("shape", "dtype", "device", "new", "only")]
    command = [sys.executable, __file__, "--worker", *options]
    environment = os.environ | {"PYTHONPATH": f"{folder.resolve()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} ({folder}) failed:\n{done.stderr[-3000:]}")
    print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", action="append", default=[], help="NAME=FOLDER of a checkout, twice")
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--new", type=int, default=48, help="new tokens of a call")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--only", default="", help="parts of cases' names, such as 'nasd, penalty;eagle'")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.worker:
        sys.path.remove(str(Path(__file__).parent))  # transformers looks for packages by names that files here may have
        for row in measure(args.shape, args.device, args.dtype, args.new, args.only.split(";")):
            print(json.dumps(row), flush=True)
        return
    from common import place, write  # not by a worker, which takes its own version's

    folders = dict(each.split("=", 1) for each in args.code)
    if len(folders) != 2:
        parser.error("two --code NAME=FOLDER are compared")
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for _ in range(args.turns):
        for name, folder in folders.items():
            for row in run(name, Path(folder), args):
                of = found.setdefault((row["assistant"], row["way"]), {})
                of.setdefault(name, {**row, "round_ms": []})["round_ms"] += row["round_ms"]
    shared = {"shape": args.shape, **place(args.device, args.dtype)}
    before, after = folders
    different = []
    for (case, way), rows in found.items():
        for name, row in rows.items():
            row["round_ms"] = round(statistics.median(row["round_ms"]), 4)
            write(args.out, row | {"code": name, "turns": args.turns, **shared}, ())
        one, other = rows[before], rows[after]
        same = one["tokens"] == other["tokens"]
        different += [] if same else [f"{case}, {way}"]
        ratio = other["round_ms"] / one["round_ms"]
        times = f"{one['round_ms']:8.3f} -> {other['round_ms']:8.3f} ms  {ratio:5.3f}"
        print(f"{case:24} {way:9} {times}  {'same' if same else 'DIFFERENT'} tokens")
    if different:
        raise SystemExit(f"other tokens in {', '.join(different)}")


if __name__ == "__main__":
    main()
