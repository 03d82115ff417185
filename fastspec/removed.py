"""Removed parts of fastspec: the line that tells a caller of one where it went."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

BLOCK_HEADS = (
    "block heads (DFlash, DSpark, DFlash 2) left fastspec, which trained them and never decoded with them; docs/drafters.md has what they "
    "measured, and the repository's tag `laboratory` their code"
)
BLOCK_KINDS = ("dspark", "dflash", "dflash2")
BLOCK_LOSSES = ("ce", "ce+l1", "kl+l1", "dpace")
BLOCK_SETTINGS = ("layers", "block_size", "anchors", "rank", "mask_token")
"""Kinds, losses and settings of `TrainConfig` and `fastspec train` that block heads alone had."""

MODULES = {
    "fastspec.generation.drafters.block": BLOCK_HEADS,
    "fastspec.generation.drafters.eagle.head": "it is fastspec.generation.heads.module",
    "fastspec.generation.drafters.eagle.checkpoint": "it is fastspec.generation.heads.load, with a file beside it for each step",
    "fastspec.generation.drafters.eagle.dialects": "it is fastspec.generation.heads.dialects",
    "fastspec.generation.drafters.eagle.lowered": "it is fastspec.generation.heads.lowered",
    "fastspec.generation.drafters.eagle.rope": "its functions are in fastspec.generation.heads.module",
    "fastspec.patches.assistants.binding": "it is fastspec.generation.heads.bound",
    "fastspec.bench": "it is fastspec.programs.bench",
    "fastspec.bulk": "it is fastspec.programs.bulk",
    "fastspec.chat": "it is fastspec.programs.chat",
    "fastspec.cli": "it is fastspec.programs.cli.app; `python -m fastspec` runs it",
    "fastspec.demo": "it is fastspec.programs.demo",
    "fastspec.jsonl": "it is fastspec.programs.texts",
    "fastspec.programs.jsonl": "it is fastspec.programs.texts",
    "fastspec.programs.chat.columns": "it is part of fastspec.programs.chat.view",
    "fastspec.programs.training.acceptance": "it is part of fastspec.programs.training.trainer",
    "fastspec.programs.training.card": "it is part of fastspec.programs.training.save",
    "fastspec.programs.training.compiled": "it is part of fastspec.programs.training.ttt",
    "fastspec.serving": "it is fastspec.programs.serving",
    "fastspec.training": "it is fastspec.programs.training",
    "fastspec.kernels.drafting.fused_phases": "it is fastspec.kernels.drafting.fused.phases",
    "fastspec.kernels.drafting.fused_attention": "it is fastspec.kernels.drafting.fused.attention",
    "fastspec.generation.drafters.eagle.fused": "the one-launch drafter is fastspec.patches.assistants.fused",
    "fastspec.patches.checks.fused": "a draft phase is checked by fastspec.patches.checks.phase",
}
"""Removed module or package -> where it went."""


class RemovedModules(MetaPathFinder):
    """Finder of removed modules: importing one raises ModuleNotFoundError with its line of `MODULES`.

    It is asked before Python's own finders, to which a folder that holds compiled files alone is still a package.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"{name}: {MODULES[name]}", name=name)
