"""Weights that a library quantised: the layers' own forward multiplies, in every round."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.clients import HEAD, MARKS, QUESTIONS, agree, answers, asked, drafting, own_spread
from helpers.page import PAGE
from helpers.quantised import packed
from transformers import AutoModelForCausalLM

import fastspec

pytestmark = MARKS
COUNT = 20


def load(folder: Path, config: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=config, device_map="cpu"
    ).eval()


def torchao(kind: str) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        from torchao import quantization as ao
        from transformers import TorchAoConfig

        kinds = {
            "int8 weights": lambda: ao.Int8WeightOnlyConfig(),
            "int4 weights": lambda: ao.IntxWeightOnlyConfig(
                weight_dtype=torch.int4, granularity=ao.granularity.PerGroup(32)
            ),
            "int8 activations": lambda: ao.Int8DynamicActivationInt8WeightConfig(),
        }
        return load(folder, TorchAoConfig(kinds[kind]()))

    return make


def quanto(folder: Path) -> Any:
    from optimum.quanto import freeze, qint8, quantize

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    quantize(model, weights=qint8, exclude="lm_head")
    freeze(model)
    return model


def bitsandbytes(**options: Any) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        from transformers import BitsAndBytesConfig

        return load(folder, BitsAndBytesConfig(**options))

    return make


def compressed_tensors(bits: int) -> Callable[[Path], Any]:
    """The first pass unpacks the weights."""
    return lambda folder: AutoModelForCausalLM.from_pretrained(packed(folder, bits)).eval()


WEIGHTS = {
    "torchao int8": torchao("int8 weights"),
    "torchao int4": torchao("int4 weights"),
    "quanto int8": quanto,
    "bitsandbytes 4-bit": bitsandbytes(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
    "compressed-tensors 8 bits": compressed_tensors(8),
    "compressed-tensors 4 bits": compressed_tensors(4),
}
ACTIVATIONS = {"torchao int8": torchao("int8 activations"), "bitsandbytes 8-bit": bitsandbytes(load_in_8bit=True)}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_quantised_weights(folder, tokenizer, kind):
    """Loaded twice: a first pass may leave the layers otherwise than it found them, as compressed-tensors' unpacks
    them."""
    inputs = asked(tokenizer, *QUESTIONS[:2])
    before = answers(WEIGHTS[kind](folder), inputs, COUNT)
    model = WEIGHTS[kind](folder)
    with fastspec.patched(model, eagle3=HEAD, assistant="eagle3"), drafting(model, calls=1):
        assert answers(model, inputs, COUNT) == before
    assert answers(model, inputs, COUNT) == before


def told_spread() -> tuple[float, float]:
    """What docs/guide/clients.md says that logits differ by: with quantised activations, and in fp32."""
    numbers = re.search(
        r"differ by up to ([\d.]+) here, where in fp32 they differ by up to ([\d.]+)\. ", " ".join(PAGE.split())
    )
    assert numbers
    return float(numbers[1]), float(numbers[2])


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_quantised_activations(folder, tokenizer, kind):
    """They are rounded by what else is in the pass, and by how it was summed."""
    model = ACTIVATIONS[kind](folder)
    with fastspec.patched(model, eagle3=HEAD, assistant="eagle3"):
        assert agree(model, asked(tokenizer, QUESTIONS[0]), COUNT) <= told_spread()[0]


def test_fp32_rounds_little(smollm2, tokenizer):
    spread, _ = own_spread(smollm2[0], asked(tokenizer, QUESTIONS[0]), COUNT)
    assert float(spread.max()) <= told_spread()[1]
