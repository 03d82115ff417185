"""Removed parts of fastspec: the line that tells a caller of one where it went."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

BLOCK_HEADS = (
    "block heads (DFlash, DSpark, DFlash 2) left fastspec, which trained them and never decoded with them; "
    "docs/maintainers/drafters.md has what they measured, and the repository's commit `c0f133b` their code"
)
BLOCK_KINDS = ("dspark", "dflash", "dflash2")
BLOCK_LOSSES = ("ce", "ce+l1", "kl+l1", "dpace")
BLOCK_SETTINGS = ("layers", "block_size", "anchors", "rank", "mask_token")
"""Kinds, losses and settings of `TrainConfig` and `fastspec train` that block heads alone had."""

MODULES = {
    "fastspec.generation.drafters.block": BLOCK_HEADS,
    "fastspec.patches.assistants.binding": "it is fastspec.generation.heads.bound",
    "fastspec.bench": "it is fastspec.programs.bench",
    "fastspec.bulk": "it is fastspec.programs.bulk",
    "fastspec.chat": "it is fastspec.programs.chat",
    "fastspec.cli": "it is fastspec.programs.cli.app; `python -m fastspec` runs it",
    "fastspec.demo": "it is fastspec.programs.demo",
    "fastspec.jsonl": "it is fastspec.programs.texts",
    "fastspec.serving": "it is fastspec.programs.serving",
    "fastspec.training": "it is fastspec.programs.training",
    "fastspec.programs.training.save": "it is in fastspec.programs.training.heads",
    "fastspec.patches.assistants.packaged_heads": "it is in fastspec.patches.assistants.heads",
    "fastspec.generation.heads.lowered": "it is in fastspec.generation.heads.bound",
    "fastspec.generation.heads.fields": "it is in fastspec.generation.heads.files",
    "fastspec.generation.heads.fit": "it is in fastspec.generation.heads.load",
    "fastspec.generation.heads.others": "it is in fastspec.generation.heads.checkpoint",
    "fastspec.gguf_reading": "it is in fastspec.models",
    "fastspec.cache_folder": "it is in fastspec.files",
    "fastspec.cascade.deferral": "it is in fastspec.cascade.decisions",
    "fastspec.cascade.explain": "it is in fastspec.cascade.decisions",
    "fastspec.cascade.features": "it is in fastspec.cascade.records",
    "fastspec.cascade.stopping": "it is in fastspec.cascade.decisions",
    "fastspec.generation.heads.rounded": "it is in fastspec.generation.heads.bound",
    "fastspec.generation.drafters.contract": "it is in fastspec.generation.drafters.base",
    "fastspec.generation.drafters.cost": "it is in fastspec.generation.drafters.policy",
    "fastspec.generation.drafters.draft_model": (
        "its modules are fastspec.generation.drafters.chain, fastspec.generation.drafters.staged and "
        "fastspec.generation.drafters.retokenized"
    ),
    "fastspec.generation.drafters.eagle": (
        "heads are in fastspec.generation.heads, what drafts with them in fastspec.generation.drafters.head_drafter "
        "and head_program, and the one-launch drafter in fastspec.patches.assistants.fused"
    ),
    "fastspec.generation.drafters.ngram": (
        "its modules are fastspec.generation.drafters.ngram_arrays, fastspec.generation.drafters.nasd and "
        "fastspec.generation.drafters.ngram_storage"
    ),
    "fastspec.generation.profile": "it is in fastspec.generation.stats",
    "fastspec.patches.continuous": "it is in fastspec.patches.api",
    "fastspec.patches.cascade.fingerprint": "it is in fastspec.patches.hf.changes",
    "fastspec.patches.cascade.kept_caches": "it is in fastspec.patches.cascade.stages",
    "fastspec.patches.hf.mxfp4": "it is in fastspec.patches.hf.packed_loading",
    "fastspec.patches.hf.stop_strings": "it is in fastspec.patches.hf.ends",
    "fastspec.patches.inspection": "it is in fastspec.patches.api",
    "fastspec.reading": "it is in fastspec.files",
}
"""Removed module or package that other programs could import -> where it went."""


class RemovedModules(MetaPathFinder):
    """Finder of removed modules: importing one raises ModuleNotFoundError with its line of `MODULES`.

    It is asked before Python's own finders, to which a folder that holds compiled files alone is still a package.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"{name}: {MODULES[name]}", name=name)
