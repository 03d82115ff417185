"""Compile what a call launches on a GPU that need not be there, ahead and in parallel, and print a row for each program
of the call.

    python tests/compile_ahead.py 90 smollm2-135m eagle3        # 8B: llama-8b needs 16 GB of memory
    FASTSPEC_COMPILE_WORKERS=1 python tests/compile_ahead.py 90 tiny autoregressive

The model lies on the CPU and its kernels are not launched: the programs that a GPU would capture are run without data,
as they are before their first run there. TRITON_CACHE_DIR names the cache that is filled; without it an empty one is
made.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from compile_targets import pretend
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.runtime.jit import JITFunction

sys.path[:0] = [str(Path(__file__).parents[1] / "benchmarks")]
os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())


def zeros(value: Any) -> Any:
    """A result without data as one of zeros."""
    if isinstance(value, Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, tuple):
        return tuple(map(zeros, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: zeros(getattr(value, field.name)) for field in fields(value)})
    return value


def main(capability: int, shape: str, assistant: str) -> None:
    """A call of a few tokens; see above."""
    pretend(capability)
    import full_size

    import fastspec
    from fastspec.generation import capture
    from fastspec.generation.engine import schedule
    from fastspec.kernels import ahead
    from fastspec.patches import api, session
    from fastspec.patches.backends import triton_ops

    launch, outside = JITFunction.run, []

    def run(self: JITFunction, *args: Any, warmup: bool, **options: Any) -> Any:
        """Launches outside of the programs are passed over."""
        if not warmup:
            outside.append(self.__name__)
            return None
        return launch(self, *args, warmup=True, **options)

    class Programs(capture.Captured):
        """Compiles ahead in place of running."""

        def __call__(self, program: Callable[[], Any], key: Any) -> Any:
            lines: list[str] = []
            began = time.perf_counter()
            compiled = ahead.compile_ahead(program, lines.append)
            row = {"compiled": compiled, "seconds": round(time.perf_counter() - began, 3), "said": lines}
            gc.collect()
            row["left"] = sum(isinstance(each, FakeTensor) for each in gc.get_objects())
            looked, collector = time.perf_counter(), ahead.Collector()
            with ahead._background(collector):
                ahead._look(program, collector)
            row |= {"again": len(collector.jobs), "look_seconds": round(time.perf_counter() - looked, 3)}
            print(json.dumps(row), flush=True)
            with ahead._restored(program), ahead._noted(ahead.Collector()), FakeTensorMode(allow_non_fake_inputs=True):
                result = program()
            return zeros(result)

    JITFunction.run = run
    capture.Captured = schedule.Captured = Programs
    ops = replace(triton_ops(), captures=True, packs=True)
    api.choose_backend = session.choose_backend = lambda *args, **options: ops
    model = full_size.make_model(shape, "cpu", torch.bfloat16)
    fastspec.patch(model, eagle3=full_size.make_head(model, 32000))
    ids = torch.arange(5, 25)[None]
    chosen = fastspec.Eagle3() if assistant == "eagle3" else assistant
    model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, assistant=chosen
    )
    print(json.dumps({"outside": outside, "process": os.getpid()}))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
