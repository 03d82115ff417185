"""What a round of each way would take, from measured parts of rounds and the bytes that a draft pass reads. For drafters.py.

Measured, from `results/redesign_h200.jsonl` (`code` "after", full_size.py, batch 1, bf16, one H200): scoring one node and scoring 60, every
pass of EAGLE-3's draft phase, and choosing, committing and feeding the accepted pairs. The head measured there is as wide as the target's
layers and drafts MEASURED_VOCABULARY tokens; of a head that has the target's width the bytes that it reads more or less are counted in.
Between 1 and 60 nodes the time of scoring grows as that of a stack of the same layers does in `results/stack_nodes_h200.jsonl` (stack.py at
1, 5, 9, 32 and 60 nodes, another H200). A block head's pass was never measured: its floor is its bytes over the read bandwidth of the
same rows, its estimate adds what a layer of that target takes beyond its own floor, per layer of the head, and LINK for each slot of a
correction.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastspec.generation.drafters.block.config import BlockConfig
from fastspec.generation.heads.module import HeadConfig

ROWS = Path(__file__).parent / "results" / "redesign_h200.jsonl"
STACK = Path(__file__).parent / "results" / "stack_nodes_h200.jsonl"
LINK = 0.002
"""Milliseconds of one slot's correction inside one small kernel: 10 to 20 us are expected of eight slots."""
BYTES = 2
MEASURED_VOCABULARY = 32_000
"""Tokens that the measured EAGLE-3 heads draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A target as `full_size.py` names it, and the widths that a head for it has."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    layers: int
    cut: int
    """Draft vocabulary of a head that has one."""


SHAPES = (
    Shape(
        name="smollm2-135m", hidden=576, intermediate=1536, heads=9, key_value_heads=3, head_dim=64, vocabulary=49152, layers=30, cut=10240,
    ),
    Shape(
        name="llama-8b", hidden=4096, intermediate=14336, heads=32, key_value_heads=8, head_dim=128, vocabulary=128256, layers=32,
        cut=32000,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds of the parts of a round on one shape."""

    score: tuple[float, float]
    """One node and 60."""
    stack: tuple[tuple[int, float], ...]
    """Nodes, ascending, and milliseconds of a stack's pass over so many."""
    passes: tuple[float, ...]
    """EAGLE-3's draft passes, one a depth, the first with the pairs' last row."""
    other: float
    feed: float
    gb_per_s: float
    weight_bytes: int

    @classmethod
    def of(cls, shape: str, path: Path = ROWS, stack: Path = STACK) -> Measured:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        mine = {row["method"]: row for row in rows if row.get("code") == "after" and row.get("shape") == shape and row.get("batch") == 1}
        plain, tree = mine["autoregressive"], mine["eagle3"]
        parts = {name: values[1] for name, values in tree["parts_ms"].items()}
        passes = [json.loads(line) for line in stack.read_text(encoding="utf-8").splitlines()]
        return cls(
            score=(plain["parts_ms"]["score"][1], parts["score"]),
            stack=tuple(sorted((row["nodes"], row["replay_ms"]) for row in passes if row["shape"] == shape and row["way"] == "base")),
            passes=tuple(parts[f"draft {level}"] for level in range(8)),
            other=parts["choose"] + parts["commit"] + parts["draft"],
            feed=parts["observe"],
            gb_per_s=tree["read_gb_per_s"],
            weight_bytes=tree["weight_bytes"],
        )

    def scoring(self, nodes: int) -> float:
        """Milliseconds of scoring so many nodes, the root counted."""
        counts, times = zip(*self.stack, strict=True)
        (one, sixty), passed = self.score, np.interp([1, nodes, 60], counts, times)
        return float(one + (sixty - one) * (passed[1] - passed[0]) / (passed[2] - passed[0]))

    def reading(self, count: float) -> float:
        """Milliseconds of reading so many bytes."""
        return count / self.gb_per_s / 1e6


def block_bytes(config: BlockConfig, shape: Shape) -> int:
    """Bytes that one draft pass of such a head reads on a shape: `fc` for accepted tokens, its layers, the LM head over its vocabulary, and
    the correction's matrix once (a slot's second look finds it in the cache). Gathered rows and the context's keys are left out."""
    s = shape
    vocabulary = s.cut if config.own_lm_head else s.vocabulary
    attention = 2 * s.hidden * s.head_dim * (s.heads + s.key_value_heads)
    layer = attention + 3 * s.hidden * s.intermediate
    if config.kind == "dflash2":
        layer += 2 * 4 * (s.hidden // config.conv_group) * s.hidden
    correction = {"dspark": vocabulary * config.rank, "dflash2": s.hidden * config.rank, "dflash": 0}[config.kind]
    return BYTES * (len(config.taps) * s.hidden**2 + config.num_hidden_layers * layer + vocabulary * s.hidden + correction)


def more_bytes(config: HeadConfig, shape: Shape) -> int:
    """What a pass of an EAGLE-3 head reads beyond the one that was measured on a shape; 0 for a head of another target's width."""
    if config.hidden_size != shape.hidden:
        return 0
    layer = 3 * (config.intermediate_size - shape.intermediate)
    return BYTES * shape.hidden * (layer + config.draft_vocab_size - min(MEASURED_VOCABULARY, shape.vocabulary))


def predicted(config: BlockConfig | HeadConfig, acceptance: float, drafts: int, nodes: int) -> dict[str, dict[str, Any]]:
    """By shape: milliseconds of drafting and scoring and of a round, and tokens per second at this acceptance length.

    `drafts` are the depths that are drafted, `nodes` those scored. A block head has two: by its floor and by its estimate.
    """
    found: dict[str, dict[str, Any]] = {}
    for shape in SHAPES:
        m = Measured.of(shape.name)
        score = m.scoring(nodes)
        if isinstance(config, BlockConfig):
            floor = m.reading(block_bytes(config, shape))
            overhead = (m.score[0] - m.reading(m.weight_bytes)) / shape.layers
            links = LINK * drafts if config.kind != "dflash" else 0.0
            draft = {"floor": floor, "estimate": floor + overhead * config.num_hidden_layers + links}
        else:
            draft = {"measured": sum(m.passes[:drafts]) + drafts * m.reading(more_bytes(config, shape))}
        found[shape.name] = {"score_ms": round(score, 4)}
        for name, spent in draft.items():
            whole = spent + score + m.other + m.feed
            found[shape.name] |= {
                f"draft_ms_{name}": round(spent, 4), f"round_ms_{name}": round(whole, 4),
                f"tokens_per_second_{name}": round(1e3 * acceptance / whole, 1),
            }  # fmt: skip
    return found
