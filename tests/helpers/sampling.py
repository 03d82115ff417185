"""The exact distribution of short sampled texts, and the chi-square test that compares a sample with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

VOCAB, ROWS, CALLS = 97, 512, 8
SIGNIFICANCE = 1e-4
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.4},
    "all four": {"temperature": 1.7, "top_k": 8, "top_p": 0.9, "min_p": 0.02},
    "top-p": {"temperature": 1.4, "top_p": 0.8},
    "min-p": {"temperature": 1.4, "min_p": 0.3},
    "history": {"temperature": 1.7, "top_k": 5, "repetition_penalty": 1.8},
}


def processors(options: dict[str, Any]) -> LogitsProcessorList:
    """The processors in transformers' order."""
    makers = {
        "repetition_penalty": lp.RepetitionPenaltyLogitsProcessor,
        "temperature": lp.TemperatureLogitsWarper,
        "top_k": lp.TopKLogitsWarper,
        "top_p": lp.TopPLogitsWarper,
        "min_p": lp.MinPLogitsWarper,
    }
    return LogitsProcessorList([make(options[name]) for name, make in makers.items() if name in options])


@torch.no_grad()
def distribution(model: Any, ids: Tensor, options: dict[str, Any], length: int) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of `length` tokens."""
    found = {(): 1.0}
    for _ in range(length):
        texts = list(found)
        rows = torch.cat((ids.expand(len(texts), -1), torch.tensor(texts, dtype=torch.long).view(len(texts), -1)), 1)
        chances = processors(options)(rows, model(rows).logits[:, -1].float()).double().softmax(-1)
        found = {
            (*text, token): found[text] * chance
            for text, row in zip(texts, chances.tolist(), strict=True)
            for token, chance in enumerate(row)
            if chance > 0
        }
    return found


def p_value(expected: dict[tuple[int, ...], float], texts: list[tuple[int, ...]]) -> float:
    """Of Pearson's statistic, with texts expected fewer than eight times taken together (Wilson-Hilferty's
    approximation)."""
    total, observed = len(texts), dict.fromkeys(expected, 0)
    for text in texts:
        observed[text] += 1  # a text of probability 0 is a KeyError
    often = [text for text, chance in expected.items() if chance * total >= 8]
    bins = [(observed[text], expected[text] * total) for text in often]
    rest = total - sum(want for _, want in bins)
    if rest >= 8:
        bins.append((total - sum(have for have, _ in bins), rest))
    assert len(bins) > 3
    freedom = len(bins) - 1
    statistic = sum((have - want) ** 2 / want for have, want in bins)
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    return float(0.5 * torch.erfc(torch.tensor(z / 2**0.5, dtype=torch.float64)))


def sample(model: Any, ids: Tensor, options: dict[str, Any], assistant: Any, length: int) -> list[tuple[int, ...]]:
    texts: list[tuple[int, ...]] = []
    for seed in range(CALLS if "repetition_penalty" not in options else CALLS // 2):
        torch.manual_seed(seed)
        settings = {
            "top_k": 0,
            "do_sample": True,
            "num_return_sequences": ROWS,
            "max_new_tokens": length,
            "eos_token_id": 0,
        }
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **{**settings, **options}, assistant=assistant)
        texts += map(tuple, out[:, ids.shape[1] :].tolist())
    return texts


def padded(text: tuple[int, ...]) -> tuple[int, ...]:
    """As `generate` returns it: token 0 ends a text and fills it up."""
    return text[: text.index(0)] + (0,) * (len(text) - text.index(0)) if 0 in text else text


def check_distribution(model: Any, options: dict[str, Any], assistant: Any) -> None:
    """Short sampled texts of an assistant follow the exact distribution."""
    ids, length = torch.tensor([[17, 44, 61, 9]]), 3 if "top_k" in options else 2
    expected: dict[tuple[int, ...], float] = {}
    for text, chance in distribution(model, ids, options, length).items():
        expected[padded(text)] = expected.get(padded(text), 0.0) + chance
    assert p_value(expected, sample(model, ids, options, assistant, length)) > SIGNIFICANCE
