"""Milliseconds of rounds by the number of nodes: as a model's weights foretell them, and as they were measured, which a
file keeps for a device, a model's shape and the versions of torch, triton and fastspec."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastspec import files
from fastspec.default_trees import TreeShape
from fastspec.generation.drafters.base import Decoding
from fastspec.generation.drafters.dynamic_tree import SizedDecoding
from fastspec.generation.drafters.policy import COSTS
from fastspec.generation.drafters.tree_sizes import Milliseconds, TreeSizes
from fastspec.generation.ops import Ops
from fastspec.patches.assistants.speculative import read_parameters
from fastspec.patches.hf.compat import device_of, dtype_of
from fastspec.patches.session import PatchSession

FOLDER = "rounds"
LEVEL = {"cpu": 0.2, "cuda": 0.045}
"""Milliseconds of one level of a draft phase, by the kind of device, beside reading the head."""


def tree_sizes(
    model: Any, session: PatchSession, decoding: Decoding, ops: Ops, rows: int, timed: bool
) -> TreeSizes | None:
    """Chooser of the sizes of a decoding's trees in rounds of so many rows, one for all calls of a kind; None where
    their size is fixed. Without `timed` it has no clock in a call."""
    if not isinstance(decoding, SizedDecoding) or decoding.steps is None:
        return None
    device, dtype = device_of(model), dtype_of(model)
    key = decoding.steps, rows, device, dtype, decoding.temperature
    if key not in session.trees:
        shapes, first = decoding.sizes(rows, ops)
        head = sum(weight.nbytes for module in decoding.modules for weight in module.parameters())
        kind = f"{model.config.to_json_string()}{shapes}"
        path = path_of(device, kind, str(dtype), ops.name, decoding.name, head, rows)
        session.trees[key] = TreeSizes(
            shapes,
            first,
            prior_times(model, device, shapes, head, rows),
            known=read_times(path),
            captures=ops.captures,
            switch=COSTS.get(device.type, COSTS["cuda"]).host if ops.captures else 0.0,
            timed=timed,
            keep=partial(keep_times, path),
        )
    return session.trees[key]


def experts_share(model: Any) -> float:
    """Share of a layer's experts that a token chooses; 1 without a mixture."""
    config = model.config.get_text_config()
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    total = next((count for count in counts if count), 1)
    return min(1.0, (getattr(config, "num_experts_per_tok", None) or total) / total)


def expert_bytes(model: Any) -> tuple[int, int, float]:
    """Bytes that every pass reads, those of all experts, and the share of the experts that a token chooses."""
    experts = {id(weight) for name, weight in model.named_parameters() if ".experts." in name}
    weights = list(read_parameters(model))
    among = sum(weight.nbytes for weight in weights if id(weight) in experts)
    return sum(weight.nbytes for weight in weights) - among, among, experts_share(model)


def prior_times(
    model: Any, device: torch.device, shapes: Sequence[TreeShape], head_bytes: int, rows: int
) -> list[float]:
    """Milliseconds of a round without drafts and of one of each shape: of reading the weights, of which tokens choose
    experts independently, and of drafting. Asynchronous rounds do not wait for the host."""
    cost, level = COSTS.get(device.type, COSTS["cuda"]), LEVEL.get(device.type, LEVEL["cuda"])
    whole, experts, share = expert_bytes(model)
    host = cost.host if cost.asynchronous else 0.0

    def scored(nodes: int) -> float:
        return cost.of(nodes, round(whole + experts * (1 - (1 - share) ** nodes))) - host

    drafted = [(shape.depth + 1) * (level + head_bytes / cost.bytes_per_ms) for shape in shapes]
    passes = [scored(rows * shape.total_tokens) for shape in shapes]
    return [scored(rows), *(ms + more for ms, more in zip(passes, drafted, strict=True))]


def path_of(device: torch.device, kind: str, *words: object) -> Path:
    """The file of one kind of rounds: of a model's configuration and shapes of trees, and of further words."""
    from fastspec.kernels.tuned_launches import name_of

    shape = hashlib.sha256(kind.encode()).hexdigest()[:16]
    name = name_of(device) if device.type == "cuda" else f"{device.type}-{torch.get_num_threads()}"
    return files.cache_folder() / FOLDER / files.file_name(name, shape, *map(str, words), *files.versions().values())


def read_times(path: Path) -> Milliseconds:
    """Times that a file has kept; none where it is missing or, with a warning, damaged."""
    found = files.read(path)
    if found is None:
        return {}
    try:
        return {
            int(length): {int(nodes): float(ms) for nodes, ms in spent.items()}
            for length, spent in found["round_ms"].items()
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        files.ignore(path, f"no times of rounds: {type(error).__name__}: {error}")
        return {}


def keep_times(path: Path, known: Milliseconds) -> None:
    """Keep what was measured."""
    files.write(path, {**files.versions(), "round_ms": known})
