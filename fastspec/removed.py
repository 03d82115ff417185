"""Removed parts of fastspec: the line that tells a caller of one where it went."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

BLOCK_HEADS = (
    "block heads (DFlash, DSpark, DFlash 2) left fastspec, which trained them and never decoded with them; "
    "docs/maintainers/drafters.md has what they "
    "measured, and the repository's tag `laboratory` their code"
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
    "fastspec.programs.jsonl": "it is fastspec.programs.texts",
    "fastspec.programs.tables": "it is in fastspec.programs.terminal",
    "fastspec.programs.cli.demo": "it is in fastspec.programs.cli.answers",
    "fastspec.programs.chat.columns": "it is part of fastspec.programs.chat.view",
    "fastspec.programs.training.acceptance": "it is part of fastspec.programs.training.trainer",
    "fastspec.programs.training.card": "it is part of fastspec.programs.training.save",
    "fastspec.programs.training.compiled": "it is part of fastspec.programs.training.ttt",
    "fastspec.programs.serving.handlers": "routes are in fastspec.programs.serving.app, fields in its fields",
    "fastspec.programs.serving.manager": "it is fastspec.programs.serving.server",
    "fastspec.programs.cascades": "it is in fastspec.programs.heads",
    "fastspec.programs.marks": "it is in fastspec.programs.texts",
    "fastspec.programs.chat.own": "it is in fastspec.programs.chat.settings",
    "fastspec.programs.training.features": "it is in fastspec.programs.training.target",
    "fastspec.programs.training.enlarge": "it is in fastspec.programs.training.regenerate",
    "fastspec.programs.serving.page": "it is in fastspec.programs.serving.app",
    "fastspec.programs.serving.tokens": "it is in fastspec.programs.serving.app",
    "fastspec.serving": "it is fastspec.programs.serving",
    "fastspec.training": "it is fastspec.programs.training",
    "fastspec.kernels.drafting.fused_phases": "it is fastspec.kernels.drafting.fused.phases",
    "fastspec.kernels.drafting.fused_attention": "it is fastspec.kernels.drafting.fused.attention",
    "fastspec.patches.checks.fused": "a draft phase is checked by fastspec.patches.checks.phase",
    "fastspec.patches.assistants.packaged_heads": "it is in fastspec.patches.assistants.heads",
    "fastspec.generation.heads.lowered": "it is in fastspec.generation.heads.bound",
    "fastspec.generation.heads.fields": "it is in fastspec.generation.heads.files",
    "fastspec.generation.heads.others": "it is in fastspec.generation.heads.checkpoint",
    "fastspec.gguf_reading": "it is in fastspec.models",
    "fastspec.programs.chat.resources": "it is in fastspec.programs.chat.settings",
    "fastspec.programs.training.shards": "it is in fastspec.programs.training.data",
    "fastspec.programs.training.cascade_judging": "it is in fastspec.programs.training.cascade_answers",
    "fastspec.patches.pool": "it is in fastspec.patches.session",
    "fastspec.programs.bench.measure": "it is in fastspec.programs.bench.run",
    "fastspec.programs.cli.progress": "it is in fastspec.programs.terminal",
    "fastspec.programs.cli.chat": "it is in fastspec.programs.cli.answers",
    "fastspec.programs.cli.bench": "it is in fastspec.programs.cli.answers",
    "fastspec.programs.training.losses": "it is in fastspec.programs.training.ttt",
    "fastspec.programs.chat.saved": "it is in fastspec.programs.chat.session",
    "fastspec.cache_folder": "it is in fastspec.files",
    "fastspec.cascade.deferral": "it is in fastspec.cascade.decisions",
    "fastspec.cascade.explain": "it is in fastspec.cascade.decisions",
    "fastspec.cascade.features": "it is in fastspec.cascade.records",
    "fastspec.cascade.stopping": "it is in fastspec.cascade.decisions",
    "fastspec.generation.drafters.contract": "it is in fastspec.generation.drafters.base",
    "fastspec.generation.drafters.cost": "it is in fastspec.generation.drafters.policy",
    "fastspec.generation.drafters.draft_model": (
        "its modules are fastspec.generation.drafters.chain, fastspec.generation.drafters.staged and "
        "fastspec.generation.drafters.retokenized"
    ),
    "fastspec.generation.drafters.eagle": (
        "heads are in fastspec.generation.heads, what drafts with them in fastspec.generation.drafters.head_drafter "
        "and "
        "head_program, and the one-launch drafter in fastspec.patches.assistants.fused"
    ),
    "fastspec.generation.drafters.ngram": (
        "its modules are fastspec.generation.drafters.ngram_arrays, fastspec.generation.drafters.nasd and "
        "fastspec.generation.drafters.ngram_storage"
    ),
    "fastspec.generation.encoder_source": "it is in fastspec.generation.target",
    "fastspec.generation.engine.fallback": "it is in fastspec.generation.engine.call",
    "fastspec.generation.engine.loop": "it is in fastspec.generation.engine.rounds",
    "fastspec.generation.engine.round_state": "it is in fastspec.generation.engine.call",
    "fastspec.generation.engine.row_counts": "it is in fastspec.generation.engine.open_batch",
    "fastspec.generation.engine.row_rules": "it is in fastspec.generation.engine.own_rules",
    "fastspec.generation.layers": "its modules are fastspec.generation.decoder_layer and "
    "fastspec.generation.whole_layers",
    "fastspec.generation.lockstep": "it is in fastspec.generation.verify",
    "fastspec.generation.profile": "it is in fastspec.generation.stats",
    "fastspec.generation.prompt_parts": "it is in fastspec.generation.target",
    "fastspec.generation.random_numbers": "it is in fastspec.generation.verify",
    "fastspec.generation.state": "its modules are fastspec.generation.layer_state and "
    "fastspec.generation.sequence_state",
    "fastspec.kernels.cache.kv_block_copy": "it is in fastspec.kernels.cache.commit",
    "fastspec.kernels.drafting.head_input": "it is in fastspec.kernels.drafting.inputs",
    "fastspec.kernels.drafting.head_pairs": "it is in fastspec.kernels.drafting.pairs",
    "fastspec.kernels.drafting.next_frontier": "it is in fastspec.kernels.drafting.inputs",
    "fastspec.kernels.drafting.tree_input": "it is in fastspec.kernels.drafting.inputs",
    "fastspec.kernels.layer.gated": "it is in fastspec.kernels.layer.norms",
    "fastspec.kernels.layer.rms_norm": "it is in fastspec.kernels.layer.norms",
    "fastspec.kernels.linear.onednn": "it is in fastspec.kernels.linear.cpu",
    "fastspec.kernels.linear.parts": "it is in fastspec.kernels.linear.linear",
    "fastspec.kernels.linear.quickest": "it is in fastspec.kernels.linear.cpu",
    "fastspec.kernels.linear.routing": "it is in fastspec.kernels.linear.experts",
    "fastspec.kernels.parallel.look_up": "it is in fastspec.kernels.parallel.joins",
    "fastspec.kernels.recurrent.blocks": "it is in fastspec.kernels.recurrent.tree",
    "fastspec.kernels.recurrent.commit": "it is in fastspec.kernels.recurrent.conv",
    "fastspec.patches.assistants.frontier": "it is in fastspec.patches.assistants.fused",
    "fastspec.patches.assistants.mixtures": "it is in fastspec.patches.assistants.speculative",
    "fastspec.patches.call.in_step": "it is in fastspec.patches.call.ranks",
    "fastspec.patches.call.inputs": "it is in fastspec.patches.call.prompts",
    "fastspec.patches.call.settled": "it is in fastspec.patches.call.one_prompt",
    "fastspec.patches.call.steps": "it is in fastspec.patches.call.processors",
    "fastspec.patches.call.windows": "it is in fastspec.patches.call.prompts",
    "fastspec.patches.cascade.fingerprint": "it is in fastspec.patches.hf.changes",
    "fastspec.patches.cascade.kept_caches": "it is in fastspec.patches.cascade.stages",
    "fastspec.patches.checks.layers": "it is in fastspec.patches.checks.inputs",
    "fastspec.patches.checks.phase": "it is in fastspec.patches.checks.compare",
    "fastspec.patches.hf.cache_names": "it is in fastspec.patches.hf.cache",
    "fastspec.patches.hf.expert_rows": "it is in fastspec.patches.hf.families",
    "fastspec.patches.hf.placement": "it is in fastspec.patches.hf.parallel",
    "fastspec.patches.hf.rotary": "it is in fastspec.patches.hf.layers",
    "fastspec.patches.hf.shards": "it is in fastspec.patches.hf.parallel",
    "fastspec.patches.hf.spans": "it is in fastspec.patches.hf.limits",
    "fastspec.patches.hf.states": "it is in fastspec.patches.hf.cache",
    "fastspec.patches.hf.stop_strings": "it is in fastspec.patches.hf.ends",
    "fastspec.patches.hf.walk": "it is in fastspec.patches.hf.compat",
    "fastspec.patches.hf.watch": "it is in fastspec.patches.hf.changes",
    "fastspec.patches.hf.wrappers": "it is in fastspec.patches.hf.replaced",
    "fastspec.patches.inspection": "it is in fastspec.patches.api",
    "fastspec.patches.made_of": "it is in fastspec.patches.hf.changes",
    "fastspec.patches.notices": "it is in fastspec.patches.backends",
    "fastspec.patches.tuning.in_calls": "it is in fastspec.patches.tuning.tune",
    "fastspec.reading": "it is in fastspec.files",
}
"""Removed module or package -> where it went."""


class RemovedModules(MetaPathFinder):
    """Finder of removed modules: importing one raises ModuleNotFoundError with its line of `MODULES`.

    It is asked before Python's own finders, to which a folder that holds compiled files alone is still a package.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"{name}: {MODULES[name]}", name=name)
