"""SmolLM2 as compressed-tensors writes it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def packed(folder: Path, bits: int) -> Path:
    """A directory that compressed-tensors wrote: weights rounded to the nearest, in groups of 64, and packed."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=bits, strategy="group", group_size=64)
    )
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    for layer in model.modules():
        if hasattr(layer, "quantization_scheme"):
            groups = layer.weight.data.unflatten(1, (-1, 64))
            scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), layer.quantization_scheme.weights)
            layer.weight_scale.data.copy_(scale)
    packer, path = ModelCompressor.from_pretrained_model(model), folder.parent / f"packed{bits}"
    packer.compress_model(model)
    model.save_pretrained(path)
    packer.update_config(path)
    return path
