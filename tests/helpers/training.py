"""A target that can be learned in seconds, a tokenizer with a chat template for it, and settings to train on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fastspec.programs.training import TrainConfig
from fastspec.programs.training.data import Texts
from fastspec.programs.training.regenerate import answer

VOCAB, END = 128, 1
TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<bot> ' }}{{ m.content + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bot>' }}{% endif %}"
)


def small_target(seed: int = 0, peak: float = 0.3, layers: int = 4, key_heads: int = 2) -> LlamaForCausalLM:
    """A Llama whose next token follows mostly from the last one: its LM head is a shifted embedding, times `peak`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=key_heads,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=END,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    embed = torch.randn(VOCAB, 64)
    model.model.embed_tokens.weight.copy_(embed)
    follow = torch.randperm(VOCAB)
    model.lm_head.weight[follow] = embed * peak
    return model


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Words w4 to w127 by their number, and four marks; the chat template closes every turn with <end>."""
    marks = ["<start>", "<end>", "<user>", "<bot>"]
    words = {word: number for number, word in enumerate([*marks, *(f"w{i}" for i in range(len(marks), VOCAB))])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<start>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", unk_token="<start>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_with_tokenizer(model: Any, folder: Path) -> None:
    """A model in a folder, with the `small_tokenizer`."""
    for part in (model, small_tokenizer()):
        part.save_pretrained(folder)


def write_prompts(path: Path, count: int) -> str:
    """A jsonl file of prompts of 5 to 15 words."""
    rng = np.random.default_rng(count)
    prompts = [" ".join(f"w{i}" for i in rng.integers(4, VOCAB, size=rng.integers(5, 16))) for _ in range(count)]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return str(path)


def small_texts(model: LlamaForCausalLM, count: int, config: TrainConfig, ends: tuple[int, ...] = ()) -> Texts:
    rng = np.random.default_rng(count)
    prompts = [rng.integers(2, VOCAB, size=int(rng.integers(9, 20))).tolist() for _ in range(count)]
    return answer(model, prompts, rng.random(count) < 0.5, config, ends)


def settings(folder: Path, **changes: object) -> TrainConfig:
    base = {
        "target": "small",
        "output": str(folder),
        "answers": ("none",),
        "draft_vocab_size": 96,
        "intermediate_size": 64,
        "epochs": 6.0,
        "batch_tokens": 512,
        "length_multiple": 16,
        "max_length": 256,
        "ttt_steps": 4,
        "learning_rate": 3e-3,
        "warmup_steps": 5,
        "mixed_precision": "no",
        "new_tokens": 32,
        "checkpoint_minutes": 0,
        "validate_every": 0,
        "progress": False,
    }
    return TrainConfig(**{**base, **changes})  # type: ignore[arg-type]


def whole_run(tmp_path: Path, output: str, **changes: object) -> Any:
    prompts, heldout = write_prompts(tmp_path / "prompts.jsonl", 60), write_prompts(tmp_path / "heldout.jsonl", 8)
    kinds = {"continue_cut": True, "second_answers": True, "follow_ups": True}
    options = {"answers": (), "prompts": prompts, "heldout": heldout, "shard_texts": 16, "epochs": 2.0, **kinds}
    return settings(tmp_path / output, **{**options, **changes})
