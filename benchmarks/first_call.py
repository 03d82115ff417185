"""What a first call costs: the time to the first token in a process of its own, with nothing compiled yet, and again
with what that left.

Every row is one process. "cold" finds empty caches (Triton's and fastspec's), "warm" those that the cold one filled;
with `--workers 0 16` both are measured with kernels that compile one after another at their first launch (0), and ahead
in so many processes. Seconds, by phase:

    import, load, move, patch   before the call: libraries, the model in the CPU's memory, its way to the device, patching
    header, dequantise    parts of the load of a GGUF: reading its header, and unpacking its weights
    first_round           from the first token to the end of the round behind it
    first_token           from the call's begin to its first token: reading the prompt, with what is compiled and captured for it
    call                  the whole first call, of --tokens tokens: with the first round's compilation and the second's capture
    again                 the same call once more
    ahead, first_runs, captures   parts of the call: kernels foreseen and compiled, first runs (these included), and captures
    foreseen, compiled, from_disk   kernels that were compiled ahead, those that Triton compiled at their launch, and those that it read

    python benchmarks/first_call.py --out first_call.jsonl              # the demo's model, unpacked from its file
    python benchmarks/first_call.py --shapes smollm2-135m llama-8b --out first_call.jsonl
    python benchmarks/first_call.py --shapes tiny --tokens 4            # also without CUDA
    python benchmarks/first_call.py --demo --out first_call.jsonl       # `fastspec demo`, the whole command, instead of a call

Shapes are those of full_size.py, with random weights, made on the device, and a head of the published EAGLE-3 shape.
"""  # noqa: E501

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

ASSISTANTS = ("autoregressive", "eagle3")


class Clock:
    """Seconds by phase, each from the end of the one before."""

    def __init__(self) -> None:
        self.last, self.seconds = time.perf_counter(), {}

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase], self.last = round(now - self.last, 3), now


def watch(found: dict[str, Any]) -> None:
    """Count what Triton compiles and reads, and time what is compiled ahead."""
    from fastspec.generation import capture

    prepare = capture._prepare
    if prepare is None:  # nothing is compiled on this device
        return
    import triton

    def listen(*, cache_hit: bool, **rest: Any) -> None:
        found["from_disk" if cache_hit else "compiled"] += 1

    def timed(program: Any) -> None:
        began = time.perf_counter()
        found["foreseen"] += prepare(program)
        found["ahead"] += time.perf_counter() - began

    triton.knobs.compilation.listener = listen
    capture.prepare_with(timed)


def watch_gguf() -> dict[str, float]:
    """Time what the load of a GGUF is made of, from now on -> seconds by part; zeros where nothing is unpacked."""
    spent = {"header": 0.0, "dequantise": 0.0}
    if importlib.util.find_spec("gguf") is None:
        return spent
    import gguf

    def timed(part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*given: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return run(*given, **options)
            finally:
                spent[part] += time.perf_counter() - began

        return timing

    gguf.GGUFReader.__init__ = timed("header", gguf.GGUFReader.__init__)  # type: ignore[method-assign]
    gguf.dequantize = timed("dequantise", gguf.dequantize)
    return spent


def child(shape: str, assistant: str, prompt: int, tokens: int) -> dict[str, Any]:
    """One first call in this process."""
    clock = Clock()
    import torch

    import fastspec
    from fastspec.devices import device_name
    from fastspec.models import SMOLLM2, load_model
    from fastspec.programs.bench.device import versions

    clock.mark("import")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cuda":
        torch.cuda.synchronize()
        clock.mark("start")
    parts = watch_gguf()
    if shape == SMOLLM2:
        model, head = load_model(shape, "cpu", dtype)[0], shape
    else:
        import full_size

        model = full_size.make_model(shape, device, dtype)
        head = full_size.make_head(model, 32000)
    clock.mark("load")
    model.to(device)
    if device == "cuda":
        torch.cuda.synchronize()
    clock.mark("move")
    fastspec.patch(model, **({"eagle3": head} if assistant == "eagle3" else {}))
    clock.mark("patch")
    found: dict[str, Any] = {"ahead": 0.0, "foreseen": 0, "compiled": 0, "from_disk": 0}
    watch(found)
    from common import FirstTokens

    ids = torch.randint(5, 500, (1, prompt), generator=torch.Generator().manual_seed(0)).to(device)
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    clock.last, streamer = time.perf_counter(), FirstTokens()
    model.generate(input_ids=ids, **options, assistant=assistant, streamer=streamer)
    clock.mark("call")
    stats = fastspec.report(model).last
    model.generate(input_ids=ids, **options, assistant=assistant)
    clock.mark("again")
    found["ahead"] = round(found["ahead"], 3)
    row = {"shape": shape, "assistant": assistant, "prompt_tokens": prompt, "tokens": tokens, **clock.seconds}
    row |= {part: round(spent, 3) for part, spent in parts.items()}
    row |= {"first_token": round(sum(streamer.seconds[:2]), 3)}
    row |= {"first_round": round(streamer.seconds[2], 3) if len(streamer.seconds) > 2 else None}
    row |= {"first_runs": round(stats.first_run_seconds, 3), "captures": round(stats.capture_seconds, 3), **found}
    row |= {"rounds": stats.rounds, "backend": fastspec.report(model).backend, "cores": os.cpu_count()}
    return row | {"device": device_name(model.device), **versions()}


def both(command: list[str], setting: dict[str, str]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Run a command with empty caches and with those that it left -> (caches and seconds, its last line)."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "FASTSPEC_CACHE": f"{folder}/fastspec"}
        root = str(Path(__file__).parents[1])
        path = {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
        for caches_are in ("cold", "warm"):
            began = time.perf_counter()
            done = subprocess.run(command, env=os.environ | caches | path | setting, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)}: {done.stderr[-3000:]}")
            seconds = round(time.perf_counter() - began, 3)
            yield {"caches": caches_are, "process": seconds}, json.loads(done.stdout.splitlines()[-1])


def measure(shape: str, assistant: str, workers: int | None, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of a first call with empty caches, and one with those that it left."""
    command = [sys.executable, __file__, "--child", shape, assistant]
    command += [f"--prompt={options.prompt}", f"--tokens={options.tokens}"]
    for begun, found in both(command, {} if workers is None else {"FASTSPEC_COMPILE_WORKERS": str(workers)}):
        yield begun | {"workers": workers} | found


def measure_demo() -> Iterator[dict[str, Any]]:
    """The same of the demo's command, with the figures of its methods by their names."""
    import torch

    from fastspec.devices import device_name
    from fastspec.programs.bench.device import versions

    for begun, found in both([sys.executable, "-m", "fastspec", "demo", "--json"], {}):
        methods = {row.pop("method"): row for row in found.pop("rows")}
        found["device"] = device_name(torch.device(found["device"]))
        row = begun | {"command": "demo", "prompts": len(found.pop("prompts"))} | found
        yield row | {"methods": methods, "cores": os.cpu_count(), **versions()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["smollm2-135m-instruct"])
    parser.add_argument("--assistants", nargs="+", default=list(ASSISTANTS), choices=ASSISTANTS)
    parser.add_argument("--workers", nargs="+", type=int, help="processes that compile; else fastspec's default")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens")
    parser.add_argument("--demo", action="store_true", help="time `fastspec demo` instead of a call")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(child(*options.child, options.prompt, options.tokens)))
        return
    from common import write  # not by a child, whose imports are timed

    calls = product(options.shapes, options.assistants, options.workers or [None])
    for row in measure_demo() if options.demo else chain.from_iterable(measure(*call, options) for call in calls):
        write(options.out, row)


if __name__ == "__main__":
    main()
