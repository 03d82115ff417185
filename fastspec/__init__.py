"""fastspec: several tokens per forward pass for Hugging Face models, without changing what they say.

    fastspec.patch(model, eagle3=head)
    model.generate(**inputs, assistant="eagle3")
    fastspec.unpatch(model)
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastspec.cascade.config import Cascade, Stage
from fastspec.config import Autoregressive, ContinuousBatch, Eagle1, Eagle2, Eagle3, Nasd, Speculative, TreeShape
from fastspec.errors import CheckpointError, FastSpecError, PatchConflict, Unsupported

if TYPE_CHECKING:
    from fastspec.generation.drafters.base import Decoding, Drafter
    from fastspec.generation.ngram import NgramStorage
    from fastspec.generation.profile import Profile
    from fastspec.generation.suffix import SuffixStorage
    from fastspec.generation.tree import TokenTree
    from fastspec.patches.api import Report, clear_memory, patch, patched, profile, report, unpatch
    from fastspec.patches.frontier import frontier_generate
    from fastspec.patches.heads import load_head

__version__ = "0.1.0"
CUSTOM_GENERATE = str(Path(__file__).with_name("hub"))
"""The folder that `model.generate(custom_generate=fastspec.CUSTOM_GENERATE, trust_remote_code=True, assistant=...)` takes."""

_LAZY = {
    "patch": "fastspec.patches.api", "unpatch": "fastspec.patches.api", "patched": "fastspec.patches.api",
    "report": "fastspec.patches.api", "Report": "fastspec.patches.api", "load_head": "fastspec.patches.heads",
    "frontier_generate": "fastspec.patches.frontier", "NgramStorage": "fastspec.generation.ngram",
    "SuffixStorage": "fastspec.generation.suffix", "profile": "fastspec.patches.api", "Profile": "fastspec.generation.profile",
    "clear_memory": "fastspec.patches.api", "Drafter": "fastspec.generation.drafters.base",
    "Decoding": "fastspec.generation.drafters.base", "TokenTree": "fastspec.generation.tree",
}  # fmt: skip

__all__ = [
    "CUSTOM_GENERATE",
    "Autoregressive", "Cascade", "CheckpointError", "ContinuousBatch", "Decoding", "Drafter", "Eagle1", "Eagle2", "Eagle3",
    "FastSpecError", "Nasd", "NgramStorage", "PatchConflict", "Profile", "Report", "Speculative", "Stage", "SuffixStorage",
    "TokenTree", "TreeShape", "Unsupported", "__version__", "clear_memory", "frontier_generate", "load_head", "patch", "patched",
    "profile", "report", "unpatch",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fastspec' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
