"""Makers of tiny random encoder-decoder models and their sources: fp32, evaluated on the CPU."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PretrainedConfig

import fastspec
from helpers.generate import kept

torch.set_num_threads(1)  # models this small lose time to more, and workers share the cores

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 128,
    "init_std": 0.3,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "initializer_factor": 1.0,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 5,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
    "scale_embedding": False,
    "tie_word_embeddings": False,
}
T5_LIKE = ("t5", "mt5")
STRENGTHS = {"shared": 1.0, "embed_tokens": 1.0, "embed_positions": 1.0, "lm_head": 0.5}
T5_STRENGTHS = {"shared": 0.3, "embed_tokens": 0.3, "relative_attention_bias": 2.0, "lm_head": 0.5}
"""Module -> the spread of its random weights: with these the texts vary, and every module has a say in them."""


def tiny_seq2seq_config(model_type: str, **over: Any) -> PretrainedConfig:
    """A configuration of two layers on either side, 64 wide, over 97 tokens; `over` replaces any of it."""
    config = AutoConfig.for_model(model_type)
    known = {*config.to_dict(), *over, "decoder_start_token_id"}
    return type(config)(**{name: value for name, value in (SIZES | over).items() if name in known})


def tiny_seq2seq(model_type: str, seed: int | None = None, **over: Any) -> Any:
    """A random model of a family, with logits peaked enough for texts to vary, and a bias by distance and by token that
    tells.

    The global generator is left as it was.
    """
    state = torch.random.get_rng_state()
    relative = model_type in T5_LIKE
    torch.manual_seed((3 if relative else 1) if seed is None else seed)
    model = AutoModelForSeq2SeqLM.from_config(tiny_seq2seq_config(model_type, **over), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.normal_()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and parameter.requires_grad:
                linear = (0.4 if relative else 0.12) / (2 if "encoder_attn" in name or "EncDec" in name else 1)
                parameter.normal_(std=(T5_STRENGTHS if relative else STRENGTHS).get(name.split(".")[-2], linear))
    torch.random.set_rng_state(state)
    return model


def near(target: Any) -> Any:
    """A draft model that is often right and often wrong."""
    draft = copy.deepcopy(target)
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    with torch.no_grad():
        draft.lm_head.weight.add_(0.15 * draft.lm_head.weight.std() * torch.randn_like(draft.lm_head.weight))
    torch.random.set_rng_state(state)
    return draft


def patched(target: Any, draft: Any = None) -> Any:
    """The target with a draft model, which may be as large as it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*drafting will not pay")
        return fastspec.patch(target, speculative=near(target) if draft is None else draft)


@cache
def pair_of(kind: str) -> tuple[Any, Any]:
    """(the unpatched model, which is only read, the same patched); "bart scale_embedding" sets this to True."""
    kind, *settings = kind.split()
    over = dict.fromkeys(settings, True)
    return kept(tiny_seq2seq(kind, **over)), patched(tiny_seq2seq(kind, **over))


def sources(*lengths: int, side: str = "right", seed: int = 0) -> dict[str, Tensor]:
    """Sources of these lengths, padded on one side."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        at = slice(0, length) if side == "right" else slice(width - length, width)
        ids[row, at] = torch.randint(6, 97, (length,), generator=generator)
        mask[row, at] = 1
    return {"input_ids": ids, "attention_mask": mask}
