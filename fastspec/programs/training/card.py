"""The model card that travels with a trained head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastspec.distribution import DISTRIBUTION
from fastspec.generation.heads.module import HeadConfig
from fastspec.programs.training.config import TrainConfig


def model_card(
    config: TrainConfig, head: HeadConfig, *, steps: int, processes: int, coverage: float, texts: int,
    validation: dict[str, Any] | None,
) -> str:  # fmt: skip
    """README.md of a head: what it belongs to, how it was trained, how to use it."""
    name = Path(config.target).name if Path(config.target).exists() else config.target
    eagle3 = head.kind == "eagle3"
    assistant = "eagle3" if eagle3 else "eagle2"
    taps = f"taps (`hidden_states`) | {', '.join(map(str, head.taps))}" if eagle3 else "feature | the last hidden state, after the norm"
    vocabulary = f"{head.draft_vocab_size} of {head.vocab_size}, {coverage:.1%} of the answers' tokens"
    form = "the original EAGLE-3 one (`midlayer.*`, `d2t` as offsets)" if eagle3 else "the original EAGLE-1 and EAGLE-2 one"
    if head.norm_output:
        form += "; with EAGLE-3.1's norms (`fc_norm`, `norm_output`)"
    if head.target_rows:
        form += "; for an LM head the target's rows of the drafted tokens behind `lm_head_map.weight`, which only fastspec reads"
    lines = [
        f"# {'EAGLE-3' if eagle3 else 'EAGLE-1/2'} head for {name}",
        "",
        "A drafting head: with it the target generates several tokens per forward pass, the same ones as without it.",
        "",
        "```python",
        f"import fastspec  # {DISTRIBUTION}, installed from a checkout; the package index's fastspec is another project's",
        f'fastspec.patch(model, {assistant}="path/of/this/folder")',
        f'model.generate(**inputs, assistant="{assistant}")',
        "```",
        "",
        "| | |",
        "|---|---|",
        f"| hidden, intermediate | {head.hidden_size}, {head.intermediate_size} |",
        f"| {taps} |",
        f"| draft vocabulary | {vocabulary if eagle3 else 'the whole, through the LM head of the target'} |",
        f"| texts | {texts}, answers by the target itself |",
        *([f"| start | the weights of {Path(config.start_from).name} |"] if config.start_from else []),
        f"| steps | {steps} of {processes * config.batch_tokens} padded tokens, AdamW, peak learning rate {config.learning_rate:g} |",
        f"| training-time test | {config.ttt_steps} steps, weights {config.decay:g}^i, loss {config.loss} |",
    ]
    if validation is not None:
        lines.append(f"| held-out chain of {config.ttt_steps}, tokens a round | {validation['top1']} |")
    return "\n".join([*lines, "", f"Format: {form}.", ""])
