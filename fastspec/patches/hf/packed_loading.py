"""Loading of packed checkpoints through transformers: packed modules stand in before weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils import is_kernels_available
from transformers.utils.quantization_config import QuantizationConfigMixin

from fastspec.errors import Unsupported
from fastspec.files import parse_json
from fastspec.patches.hf import gptq_awq, mxfp4
from fastspec.patches.hf.gptq_awq import OWN_FILES, PackedLinear, layout_of
from fastspec.patches.hf.mxfp4 import PackedExperts

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
        replace = mxfp4.replace_experts if mxfp4.is_mxfp4(given) else gptq_awq.replace_layers
        replace(model, given, kwargs["checkpoint_files"])

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        model.config.quantization_config = self.quantization_config.given
        for name, module in model.named_modules():
            ours = isinstance(module, (PackedLinear, PackedExperts))
            if ours and any(each.is_meta for each in module.parameters()):
                raise Unsupported(f"{name} is offloaded, and packed layers are not: leave it on a device")
            if isinstance(module, PackedLinear):
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


def take_over(config: Any, source: str, *, experts: bool, subfolder: str = "", **_: Any) -> bool:
    """Let transformers load a model of GPTQ's or AWQ's weights, or with `experts` of MXFP4, by `PackedQuantizer` ->
    True where it does. Raises Unsupported for a format of theirs that is not read."""
    given = quantisation_of(config)
    for name, method in OWN_FILES.items():
        if given is None and (path := Path(source, subfolder, name)).is_file():
            given = {"quant_method": method, **parse_json(path.read_text(encoding="utf-8"))}
    if not isinstance(given, dict) or not ((experts and mxfp4.is_mxfp4(given)) or layout_of(given) is not None):
        return False
    config.quantization_config = {"quant_method": METHOD, "given": given}
    return True


def dequantises(config: Any, device: str) -> bool:
    """True of a model of `config` whose MXFP4 experts transformers dequantises when it loads them for a device."""
    given = quantisation_of(config)
    kept = is_kernels_available() and not device.startswith("cpu")
    return isinstance(given, dict) and mxfp4.is_mxfp4(given) and not kept


def quantisation_of(config: Any) -> Any:
    """The `quantization_config` of a model or of its decoder, or None."""
    whole, decoder = (
        getattr(each, "quantization_config", None) for each in (config, config.get_text_config(decoder=True))
    )
    return whole or decoder


def refuse_missing(missing: Sequence[str]) -> None:
    """Raise Unsupported where transformers did not find tensors of packed layers under their names."""
    lost = sorted(key for key in missing if key.rpartition(".")[2] in (*gptq_awq.TENSORS, *mxfp4.TENSORS))
    if lost:
        raise Unsupported(f"transformers looks for {lost[0]} ({len(lost)} such), and its files name it otherwise")
