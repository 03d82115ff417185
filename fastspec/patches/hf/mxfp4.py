"""Checkpoints of gpt-oss, whose experts are MXFP4 (OCP Microscaling Formats 1.0): `PackedExperts` holds the tensors as
the files have them, and transformers' own loading builds a model of such experts by `packed_loading.PackedQuantizer`.

E experts, M output channels, G groups of 32 input channels. A weight is an e2m1 code times the power of 2 of its group.

| tensor | |
|---|---|
| `gate_up_proj_blocks`, `down_proj_blocks` | uint8 [E, M, G, 16]: two codes in a byte, the low half first |
| `gate_up_proj_scales`, `down_proj_scales` | uint8 [E, M, G]: exponents, 127 for 1 (e8m0) |
| `gate_up_proj_bias`, `down_proj_bias` | [E, M]; channels of gate and up take turns |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from fastspec.errors import Unsupported
from fastspec.kernels.quantised.reference import MXFP4, StoredExperts, StoredWeight
from fastspec.patches.hf.packed_files import Header, MissingWeight, headers_of

PRODUCTS = ("gate_up_proj", "down_proj")
PARTS = ("blocks", "scales")
TENSORS = tuple(f"{product}_{part}" for product in PRODUCTS for part in PARTS)
GROUP = 32
"""Input channels that share a scale."""


class PackedExperts(nn.Module):
    """Experts of a gpt-oss layer as its file has them; each pass computes as `GptOssExperts`, one by one."""

    gate_up_proj_bias: nn.Parameter
    down_proj_bias: nn.Parameter

    def __init__(self, experts: GptOssExperts) -> None:
        """In the place of `experts`, with blocks and scales that are yet to be loaded, on the meta device."""
        super().__init__()
        self.num_experts, self.hidden_size = experts.num_experts, experts.hidden_size
        self.alpha, self.limit = float(experts.alpha), float(experts.limit)
        for name in PRODUCTS:
            count, depth, channels = getattr(experts, name).shape
            for part, more in (("blocks", (GROUP // 2,)), ("scales", ())):
                held = torch.empty(count, channels, depth // GROUP, *more, dtype=torch.uint8, device="meta")
                self.register_parameter(f"{name}_{part}", nn.Parameter(held, requires_grad=False))
            self.register_parameter(f"{name}_bias", getattr(experts, f"{name}_bias"))

    def __getattr__(self, name: str) -> Any:
        if name in PRODUCTS:
            raise MissingWeight(
                f"experts of MXFP4 have no dense weight ({name}): an adapter of them, merging and training need one; "
                "load the model dense by load_model(..., packed=False) or from_pretrained"
            )
        return super().__getattr__(name)

    def stored(self, name: str) -> StoredExperts:
        """A product's weights as views of the module's tensors."""
        blocks, scales = (getattr(self, f"{name}_{part}").detach() for part in PARTS)
        count, _, groups = scales.shape
        codes, powers = blocks.flatten(2).flatten(0, 1), scales.flatten(0, 1).view(torch.float8_e8m0fnu)
        return StoredExperts(StoredWeight(codes, MXFP4, powers, (1, GROUP), groups * GROUP, None), count)

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """Tokens [T, H], each one's experts [T, K] and their shares [T, K] -> [T, H]."""
        out, (gate_up, down) = torch.zeros_like(hidden_states), map(self.stored, PRODUCTS)
        for expert in router_indices.unique().tolist():
            token, place = torch.where(router_indices == expert)
            both = hidden_states[token] @ gate_up.dense(expert, out.dtype).t() + self.gate_up_proj_bias[expert]
            inner = GptOssExperts._apply_gate(self, both)
            answer = inner @ down.dense(expert, out.dtype).t() + self.down_proj_bias[expert]
            out.index_add_(0, token, (answer * routing_weights[token, place, None]).to(out.dtype))
        return out

    def extra_repr(self) -> str:
        """Sizes and format."""
        return f"{self.num_experts} experts of {self.hidden_size} channels, MXFP4"


def is_mxfp4(given: Mapping[str, Any]) -> bool:
    """True of a `quantization_config` of MXFP4."""
    return str(given.get("quant_method", "")).lower() == "mxfp4"


def replace_experts(model: Any, given: Mapping[str, Any], files: Sequence[str]) -> None:
    """Put `PackedExperts` in place of all experts that files pack. Raises Unsupported for a tensor that is not read."""
    headers = headers_of(files)
    packed = {key.removesuffix("_blocks").rpartition(".")[0] for key in headers if key.endswith("_blocks")}
    if not packed:
        raise Unsupported("its quantization_config says MXFP4, and no file has blocks of it")
    held = {name: module for name, module in model.named_modules() if type(module) is GptOssExperts}
    for name in sorted(packed):
        if name not in held:
            raise Unsupported(f"its files pack {name}, which is no GptOssExperts in {type(model).__name__}")
        made = PackedExperts(held[name])
        for key in TENSORS:
            wanted, found = Header(tuple(getattr(made, key).shape), "U8"), headers.get(f"{name}.{key}")
            if found != wanted:
                told = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
                raise Unsupported(f"{name}.{key} is {told}, not {wanted.dtype} {list(wanted.shape)}")
        model.set_submodule(name, made)
