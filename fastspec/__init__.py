"""fastspec: several tokens per forward pass for Hugging Face models, without changing their output.

fastspec.patch(model, eagle3=head)
model.generate(**inputs, assistant="eagle3")
fastspec.unpatch(model)
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastspec.cascade.config import Cascade, Stage
from fastspec.config import (
    Autoregressive,
    ContinuousBatch,
    Eagle1,
    Eagle2,
    Eagle3,
    Mtp,
    Nasd,
    Speculative,
    Storage,
)
from fastspec.default_trees import TreeShape
from fastspec.distribution import warn_of_stranger
from fastspec.errors import CheckpointError, FastSpecError, NoDistribution, PatchConflict, Unsupported
from fastspec.removed import RemovedModules

if TYPE_CHECKING:
    from fastspec.generation.drafters.base import Decoding, Drafter
    from fastspec.generation.drafters.ngram_storage import NgramStorage, SuffixStorage
    from fastspec.generation.stats import Profile
    from fastspec.generation.tree import TokenTree
    from fastspec.patches.api import clear_memory, continuous, patch, patched, profile, unpatch
    from fastspec.patches.assistants.fused import frontier_generate
    from fastspec.patches.assistants.heads import load_head
    from fastspec.patches.call.grammar import Grammar
    from fastspec.patches.continuous_batch import Continuous
    from fastspec.patches.report import Report, report
    from fastspec.patches.scoring import log_probs
    from fastspec.patches.tuning.tune import Tuned, Tuning, tune
    from fastspec.patches.warmup import warmup

sys.meta_path.insert(0, RemovedModules())
warn_of_stranger()

__version__ = "0.1.0"
CUSTOM_GENERATE = str(Path(__file__).with_name("hub"))
"""The folder that `model.generate(custom_generate=fastspec.CUSTOM_GENERATE, trust_remote_code=True, assistant=...)`
takes."""

_PLACES = {
    "generation.drafters.base": "Decoding Drafter",
    "generation.drafters.ngram_storage": "NgramStorage SuffixStorage",
    "generation.stats": "Profile",
    "generation.tree": "TokenTree",
    "patches.continuous_batch": "Continuous",
    "patches.call.grammar": "Grammar",
    "patches.report": "Report report",
    "patches.api": "clear_memory continuous patch patched profile unpatch",
    "patches.assistants.fused": "frontier_generate",
    "patches.assistants.heads": "load_head",
    "patches.scoring": "log_probs",
    "patches.tuning.tune": "Tuned Tuning tune",
    "patches.warmup": "warmup",
}
"""Module -> its public names, which load on first use."""
_LAZY = {name: f"fastspec.{module}" for module, names in _PLACES.items() for name in names.split()}

__all__ = [
    "CUSTOM_GENERATE",
    "Autoregressive",
    "Cascade",
    "CheckpointError",
    "Continuous",
    "ContinuousBatch",
    "Decoding",
    "Drafter",
    "Eagle1",
    "Eagle2",
    "Eagle3",
    "FastSpecError",
    "Grammar",
    "Mtp",
    "Nasd",
    "NgramStorage",
    "NoDistribution",
    "PatchConflict",
    "Profile",
    "Report",
    "Speculative",
    "Stage",
    "Storage",
    "SuffixStorage",
    "TokenTree",
    "TreeShape",
    "Tuned",
    "Tuning",
    "Unsupported",
    "__version__",
    "clear_memory",
    "continuous",
    "frontier_generate",
    "load_head",
    "log_probs",
    "patch",
    "patched",
    "profile",
    "report",
    "tune",
    "unpatch",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fastspec' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
