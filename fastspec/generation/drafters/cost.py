"""The time of a round by the number of its nodes, from measurements. Drafters on the host use it to decide how far to draft."""

from __future__ import annotations

from dataclasses import dataclass

SMOLLM2_BYTES = 269_030_016
"""What a pass of SmolLM2-135M reads in bf16; a drafter that is not given a model takes it for this one."""


@dataclass(frozen=True, slots=True)
class Cost:
    """How long a round takes by the number of its nodes, in milliseconds: `host` for the host, the weights at `bytes_per_ms`, and `one` for
    what else a pass over one node takes. A pass over several nodes adds `several` once and `each` for every node; both are pairs
    (milliseconds, share of the time that reading the weights takes)."""

    nodes: int
    """The largest tree."""
    bytes_per_ms: float
    host: float
    one: float
    several: tuple[float, float]
    each: tuple[float, float]
    drafted: float = 0.0
    """The host's milliseconds for each token that a draft model writes; estimated."""
    reread: float = 1.5
    """The host's milliseconds for encoding a round's text anew for a draft model, and its drafts for the target; estimated."""
    asynchronous: bool = False
    """Whether rounds without look-ups are asynchronous, and so do not wait for the host."""

    def of(self, nodes: int, weight_bytes: int) -> float:
        """Milliseconds of a round of so many nodes, of all rows together."""
        read = weight_bytes / self.bytes_per_ms
        one = self.host + self.one + read
        return one if nodes == 1 else one + self.several[0] + self.several[1] * read + nodes * (self.each[0] + self.each[1] * read)

    def check(self, weight_bytes: int) -> float:
        """How much more a pass over several nodes costs than one over a single node, in such passes, without what every node adds."""
        read = weight_bytes / self.bytes_per_ms
        return (self.several[0] + self.several[1] * read) / (self.one + read)

    def look(self, weight_bytes: int) -> float:
        """How much more a round with a look-up costs than one without, in passes over a single node."""
        return self.host / (self.one + weight_bytes / self.bytes_per_ms) if self.asynchronous else 0.0


COSTS = {
    "cpu": Cost(16, 17e6, host=0.6, one=0.0, several=(0.0, 0.19), each=(0.0, 0.0075)),
    "cuda": Cost(32, 4.4e9, host=0.42, one=0.35, several=(0.35, 0.0), each=(0.0013, 0.0017), drafted=0.15, asynchronous=True),
}
"""By device type. "cpu" is fitted to benchmarks/results/cpu_tree.jsonl, its host to the `draft` and `commit` of `nasd` in bench_cpu.jsonl;
"cuda" to the stacks of 1, 8, 16 and 61 nodes of three models in stack_steps_h200.jsonl, its host to `draft` and `observe` in
bench_steps_h200.jsonl. There 8 nodes of SmolLM2 take 1.8 times as long as one, 10 of a model of 8 billion weights 1.06 times."""
LAYERS = 30
"""Layers of the models that `Cost.one` was measured on. It grows with the number of layers."""
