"""Loading of packed checkpoints through transformers, by `PackedQuantizer`: packed modules stand in before weights are
read; of compressed-tensors' zero points by `ZeroedQuantizer`. Of gpt-oss, whose experts are MXFP4 (OCP Microscaling
Formats 1.0), `PackedExperts` holds the tensors as the files have them.

E experts, M output channels, G groups of 32 input channels. A weight is an e2m1 code times the power of 2 of its group.

| tensor | |
|---|---|
| `gate_up_proj_blocks`, `down_proj_blocks` | uint8 [E, M, G, 16]: two codes in a byte, the low half first |
| `gate_up_proj_scales`, `down_proj_scales` | uint8 [E, M, G]: exponents, 127 for 1 (e8m0) |
| `gate_up_proj_bias`, `down_proj_bias` | [E, M]; channels of gate and up take turns |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
from transformers.utils import is_kernels_available
from transformers.utils.quantization_config import CompressedTensorsConfig, QuantizationConfigMixin

from fastspec.errors import Unsupported
from fastspec.files import parse_json
from fastspec.kernels.quantised.reference import MXFP4, StoredExperts, StoredWeight
from fastspec.patches.hf import gptq_awq
from fastspec.patches.hf.checkpoint_files import Header, MissingWeight, headers_of

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


METHOD = "fastspec-packed"
"""Name under which transformers knows `PackedQuantizer`."""


@register_quantization_config(METHOD)
class PackedConfig(QuantizationConfigMixin):
    """The `quantization_config` that a checkpoint has, for transformers' loading."""

    def __init__(self, quant_method: str, given: dict[str, Any]) -> None:
        self.quant_method, self.given = quant_method, given  # type: ignore[assignment]


@register_quantizer(METHOD)
class PackedQuantizer(HfQuantizer):
    """Loading of a model whose packed layers are `PackedLinear`, or whose packed experts `PackedExperts`."""

    requires_calibration = True

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        given = self.quantization_config.given
        replace = replace_experts if is_mxfp4(given) else gptq_awq.replace_layers
        replace(model, given, kwargs["checkpoint_files"])

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        model.config.quantization_config = self.quantization_config.given
        for name, module in model.named_modules():
            ours = isinstance(module, (gptq_awq.PackedLinear, PackedExperts))
            if ours and any(each.is_meta for each in module.parameters()):
                raise Unsupported(f"{name} is offloaded, and packed layers are not: leave it on a device")
            if isinstance(module, gptq_awq.PackedLinear):
                try:
                    module.turn()
                except Unsupported as error:
                    raise Unsupported(f"{name}: {error}") from error

    def dequantize(self, model: Any, dtype: Any = None) -> Any:
        """Raises Unsupported: a packed model is not made dense in its place."""
        raise Unsupported(
            f"{type(model).__name__} has packed weights, which are not dequantised in their place: load a dense model "
            "(of MXFP4 by load_model(..., packed=False))"
        )

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Its files are written as they were read."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters beside its layers are."""
        return True


ZEROED = "fastspec-compressed-tensors"
"""Name under which transformers knows `ZeroedQuantizer`."""
register_quantization_config(ZEROED)(PackedConfig)


@register_quantizer(ZEROED)
class ZeroedQuantizer(CompressedTensorsHfQuantizer):
    """Loading of compressed-tensors' weights with packed zero points. Of a model on the meta device compressed-tensors
    0.20 packs weights alone, so that transformers refuses zero points for their shapes; delete it once it packs both.
    """

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(CompressedTensorsConfig.from_dict(quantization_config.given), **kwargs)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        super()._process_model_before_weight_loading(model, **kwargs)
        for module in model.modules():
            held = module._parameters
            words, zeros = held.get("weight_packed"), held.get("weight_zero_point")
            if words is not None and zeros is not None and zeros.dtype != torch.int32:
                lines, groups = zeros.shape
                shape = -(-lines * module.quantization_scheme.weights.num_bits // 32), groups
                made = torch.empty(shape, dtype=torch.int32, device=zeros.device)
                module.weight_zero_point = nn.Parameter(made, requires_grad=False)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        super()._process_model_after_weight_loading(model, **kwargs)
        model.config.quantization_config = self.quantization_config


def has_zero_points(given: Mapping[str, Any]) -> bool:
    """True of a `quantization_config` of compressed-tensors' packed weights with zero points."""
    groups = (given.get("config_groups") or {}).values()
    ours = given.get("quant_method") == "compressed-tensors" and not given.get("dequantize")
    weights = [group.get("weights") or {} for group in groups if isinstance(group, dict)]  # else a preset's targets
    return ours and any(each.get("symmetric") is False for each in weights)


def take_over(config: Any, source: str, *, experts: bool, subfolder: str = "", **_: Any) -> bool:
    """Let transformers load a model of GPTQ's or AWQ's weights, or with `experts` of MXFP4, by `PackedQuantizer`, or
    one of compressed-tensors' by `ZeroedQuantizer` -> True where it does. Raises Unsupported for a format of theirs
    that is not read."""
    given = quantisation_of(config)
    for name, method in gptq_awq.OWN_FILES.items():
        if given is None and (path := Path(source, subfolder, name)).is_file():
            given = {"quant_method": method, **parse_json(path.read_text(encoding="utf-8"))}
    if isinstance(given, dict) and has_zero_points(given):
        config.quantization_config = {"quant_method": ZEROED, "given": given}
        return True
    if not isinstance(given, dict) or not ((experts and is_mxfp4(given)) or gptq_awq.layout_of(given) is not None):
        return False
    config.quantization_config = {"quant_method": METHOD, "given": given}
    return True


def dequantises(config: Any, device: str) -> bool:
    """True of a model of `config` whose MXFP4 experts transformers dequantises when it loads them for a device."""
    given = quantisation_of(config)
    kept = is_kernels_available() and not device.startswith("cpu")
    return isinstance(given, dict) and is_mxfp4(given) and not kept


def quantisation_of(config: Any) -> Any:
    """The `quantization_config` of a model or of its decoder, or None."""
    whole, decoder = (
        getattr(each, "quantization_config", None) for each in (config, config.get_text_config(decoder=True))
    )
    return whole or decoder


def refuse_missing(missing: Sequence[str]) -> None:
    """Raise Unsupported where transformers did not find tensors of packed layers under their names."""
    lost = sorted(key for key in missing if key.rpartition(".")[2] in (*gptq_awq.TENSORS, *TENSORS))
    if lost:
        raise Unsupported(f"transformers looks for {lost[0]} ({len(lost)} such), and its files name it otherwise")
