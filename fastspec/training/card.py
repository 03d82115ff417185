"""The model card that travels with a trained head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastspec.distribution import DISTRIBUTION
from fastspec.generation.drafters.block.config import BlockConfig
from fastspec.generation.heads.module import HeadConfig
from fastspec.training.config import TrainConfig

NAMES = {"dspark": "DSpark", "dflash": "DFlash", "dflash2": "DFlash 2"}


def model_card(
    config: TrainConfig, head: HeadConfig | BlockConfig, *, steps: int, processes: int, coverage: float, texts: int,
    validation: dict[str, Any] | None,
) -> str:  # fmt: skip
    """README.md of a head: what it belongs to, how it was trained, how to use it."""
    name = Path(config.target).name if Path(config.target).exists() else config.target
    shared = [
        f"| texts | {texts}, answers by the target itself |",
        *([f"| start | the weights of {Path(config.start_from).name} |"] if config.start_from else []),
        f"| steps | {steps} of {processes * config.batch_tokens} padded tokens, AdamW, peak learning rate {config.learning_rate:g} |",
    ]
    if isinstance(head, BlockConfig):
        return _block_card(config, head, name, coverage, shared, validation)
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
        *shared,
        f"| training-time test | {config.ttt_steps} steps, weights {config.slot_decay:g}^i, loss {config.loss_name} |",
    ]
    if validation is not None:
        lines.append(f"| held-out chain of {config.ttt_steps}, tokens a round | {validation['top1']} |")
    return "\n".join([*lines, "", f"Format: {form}.", ""])


def _block_card(
    config: TrainConfig, head: BlockConfig, name: str, coverage: float, shared: list[str], validation: dict[str, Any] | None
) -> str:
    vocabulary = "the whole, through the LM head of the target"
    if head.own_lm_head:
        vocabulary = f"{head.draft_vocab_size} of {head.vocab_size}, {coverage:.1%} of the answers' tokens"
    correction = {
        "dspark": f"Markov matrices of rank {head.rank}, confidence",
        "dflash": "none",
        "dflash2": f"convolutions, a selector of rank {head.rank} over {head.candidates} candidates",
    }[head.kind]
    lines = [
        f"# {NAMES[head.kind]} head for {name}",
        "",
        "A head that drafts a block of tokens in one pass. fastspec trains and measures such heads, and does not decode with them yet:",
        "`fastspec.generation.drafters.block.checkpoint.load_block_head` reads this folder.",
        "",
        "| | |",
        "|---|---|",
        f"| layers, hidden, intermediate | {head.num_hidden_layers}, {head.hidden_size}, {head.intermediate_size} |",
        f"| target layers (0-based) | {', '.join(str(tap - 1) for tap in head.taps)} |",
        f"| block, drafts | {head.block_size}, {head.drafts} |",
        f"| correction | {correction} |",
        f"| mask token | {head.mask_token_id} |",
        f"| draft vocabulary | {vocabulary} |",
        *shared,
        f"| loss | {config.loss_name}, weights {config.slot_decay:.3g}^k, {config.anchors} blocks a text |",
    ]
    if validation is not None:
        lines.append(f"| held-out chain of {head.drafts}, tokens a round | {validation['top1']} |")
    return "\n".join([*lines, "", "Format: z-lab's DFlash layout with the keys of its kind.", ""])
