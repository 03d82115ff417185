"""The model card that travels with a trained head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastspec.distribution import DISTRIBUTION
from fastspec.generation.drafters.eagle.head import HeadConfig
from fastspec.training.config import TrainConfig


def model_card(
    config: TrainConfig, head: HeadConfig, *, steps: int, processes: int, coverage: float, texts: int, validation: dict[str, Any] | None
) -> str:
    """README.md of a head: what it belongs to, how it was trained, how to use it."""
    eagle3 = head.kind == "eagle3"
    assistant = "eagle3" if eagle3 else "eagle2"
    taps = f"taps (`hidden_states`) | {', '.join(map(str, head.taps))}" if eagle3 else "feature | the last hidden state, after the norm"
    vocabulary = f"{head.draft_vocab_size} of {head.vocab_size}, {coverage:.1%} of the answers' tokens"
    form = "the original EAGLE-3 one (`midlayer.*`, `d2t` as offsets)" if eagle3 else "the original EAGLE-1 and EAGLE-2 one"
    name = Path(config.target).name if Path(config.target).exists() else config.target
    lines = [
        f"# {'EAGLE-3' if eagle3 else 'EAGLE-1/2'} head for {name}",
        "",
        "A drafting head: with it the target generates several tokens per forward pass, and says exactly what it would have said.",
        "",
        "```python",
        f"import fastspec  # pip install {DISTRIBUTION}; the package index's fastspec is another project's",
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
        f"| steps | {steps} of {processes * config.batch_tokens} padded tokens, AdamW, peak learning rate {config.learning_rate:g} |",
        f"| training-time test | {config.ttt_steps} steps, weights {config.decay:g}^i |",
    ]
    if validation is not None:
        lines.append(f"| held-out chain of {config.ttt_steps}, tokens a round | {validation['top1']} |")
    return "\n".join([*lines, "", f"Format: {form}.", ""])
