"""Options that several commands of the command line share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(help="float32 on the CPU and bfloat16 on CUDA by default."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; by default CUDA where there is a device.")]
Backend = Annotated[
    Literal["auto", "torch", "cpp", "triton"],
    typer.Option(
        help="Kernels: auto (the device's), torch, cpp (the CPU, with a compiler), or triton (CUDA). See "
        "docs/patching.md."
    ),
]
