"""Formats of quantised weights, a row of FORMATS each, by the class that a library gives a module, its weight or
scheme.

A reader gives the weight as views of the module's own tensors, or the reason for which it keeps its own forward. No
library is imported, and nothing waits for a device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fastspec.kernels.quantised.reference import (
    E4M3,
    FP4,
    INT8,
    NF4,
    PACKED4,
    PACKED8,
    Codes,
    Nested,
    StoredExperts,
    StoredWeight,
)
from fastspec.patches.hf.compat import change_count, dequantised_method, hooks_of, is_capturing_hook, local_part
from fastspec.patches.hf.parallel import LINEAR_STYLES, own_part, parallel_style, stored_share

StoredMixture = tuple[StoredExperts, StoredExperts]
"""Weights of experts, of gate and up [E, 2 * I, H] and down [E, H, I]."""
Read = StoredWeight | StoredMixture | str
"""A weight, or that of experts, or why it is not read as stored."""
OTHERS = "compressed-tensors of 8 and 4 bits, GPTQ and AWQ are"
UNPACKED = "fastspec.models.load_model unpacks a GGUF when it loads it, to a plain model"
LOADED = "fastspec.models.load_model reads the files without them"
GPTQ_LIBRARIES = "gptqmodel", "auto_gptq", "awq", "auto_round_extension"
PLAIN_CODES = {torch.int8: INT8, torch.float8_e4m3fn: E4M3}
PACKED_CODES = {4: PACKED4, 8: PACKED8}
TABLE_CODES = {"nf4": NF4, "fp4": FP4}


@dataclass(frozen=True, slots=True)
class Format:
    """A format: its name, what has a class of the library ("": any; the module, or its attribute `at`), and the
    reader, or why there is none."""

    name: str
    library: str
    kind: str
    read: Callable[[Any], Read] | str
    at: str = ""
    unpacked: bool = False
    """True where the library unpacks all weights of a model at its first forward pass."""
    cut: bool = False
    """True where what a process has of a layer that transformers has cut is read."""
    rounds: Callable[[Any], bool] = lambda module: False
    """True of a module whose own forward rounds activations too."""

    def holds(self, module: nn.Module) -> bool:
        """True of a module in this format."""
        held: Any = module
        if self.at:
            held = module._parameters.get(self.at) if self.at == "weight" else module.__dict__.get(self.at)
        named = self.kind in ("", type(held).__name__)
        return named and type(held).__module__.partition(".")[0] == self.library


def octets(codes: Tensor) -> Tensor:
    """Codes of any dtype as bytes [M, B], in place, without another library's class of tensors: torch 2.11 takes no
    operation on one where kernels are compiled ahead (kernels/ahead.py)."""
    return codes.as_subclass(Tensor).detach().view(torch.uint8)


def whole(weight: StoredWeight) -> Read:
    """The weight, where its tensors lie and have the shapes as the kernels read them."""
    (count, depth), (m, k) = weight.shape, weight.block
    wanted = -(-count // m), -(-depth // k)
    columns = weight.scales.shape[1] if weight.groups is not None else wanted[1]
    tables = [each for each in (weight.scales, weight.zeros) if each is not None]
    if tuple(weight.scales.shape) != (wanted[0], columns):
        return f"scales {tuple(weight.scales.shape)} of blocks {m} x {k} do not fit a weight {count} x {depth}"
    if weight.codes.stride(-1) != 1 or not all(table.is_contiguous() for table in tables):
        return "its tensors are not contiguous"
    if weight.codes.shape[1] * 8 < depth * weight.kind.bits:
        return f"{weight.codes.shape[1]} bytes a line are too few for {depth} codes"
    return weight


def _torchao(module: Any) -> Read:
    weight = module.weight
    codes, shape = weight.qdata.detach(), weight.qdata.shape
    if codes.dim() != 2 or codes.dtype not in PLAIN_CODES:
        return f"codes are {codes.dtype} of {codes.dim()} dimensions, not int8 or e4m3 of two"
    if getattr(weight, "act_pre_scale", None) is not None:
        return "activations are scaled before they are multiplied (act_pre_scale)"
    block: tuple[int, int] = tuple(weight.block_size or shape)
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    if weight.scale.numel() != grid[0] * grid[1]:
        return f"{weight.scale.numel()} scales are not one for each block of {block[0]} x {block[1]}"
    sums = type(weight).__name__ == "Int8Tensor" and block[1] >= shape[1]  # whose forward reads no zero points then
    zeros = None if sums else getattr(weight, "zero_point", None)
    if zeros is not None and zeros.dtype != torch.int8:
        return f"zero points are {zeros.dtype}, not int8"
    zeros = None if zeros is None else zeros.detach().reshape(grid)
    if zeros is not None and block[0] != 1:
        return "lines share zero points"
    kind, scales, on_sums = PLAIN_CODES[codes.dtype], weight.scale.detach().reshape(grid), block[0] in (1, shape[0])
    made = octets(codes), kind, scales, block, shape[1], weight.dtype
    return whole(StoredWeight(*made, zeros=zeros, on_sums=sums and on_sums))


def _compressed(module: Any) -> Read:
    """compressed-tensors' module between loading and its first forward pass."""
    args, held = module.quantization_scheme.weights, module._parameters
    packed, scales, zeros = held.get("weight_packed"), held.get("weight_scale"), held.get("weight_zero_point")
    codes = held.get("weight") if packed is None else packed
    if args is None or scales is None or codes is None or held.get("weight_global_scale") is not None:
        return f"its format has other tensors than codes, scales and zero points: {OTHERS}"
    if packed is not None and (codes.dtype != torch.int32 or args.num_bits not in PACKED_CODES or args.type != "int"):
        return f"weights are packed as {args.type} of {args.num_bits} bits: those of 4 and 8 bits are read"
    if packed is None and codes.dtype not in PLAIN_CODES:
        return f"the weight is {codes.dtype}: compressed-tensors has unpacked it"
    kind: Codes = PLAIN_CODES[codes.dtype] if packed is None else PACKED_CODES[args.num_bits]
    count, depth, strategy = module.out_features, module.in_features, args.strategy
    blocks = {"tensor": (count, depth), "channel": (1, depth), "group": (1, args.group_size)}
    block = blocks.get(strategy, tuple(args.block_structure or ()))
    if len(block) != 2:
        return f"scales of strategy {strategy!r} are not read"
    grid, scales = (-(-count // block[0]), -(-depth // block[1])), scales.detach()
    scales = scales.reshape(grid) if scales.numel() == grid[0] * grid[1] else scales
    zeros = None if args.symmetric or zeros is None else zeros.detach()
    if zeros is not None and block[0] != 1:
        return "lines share zero points"
    groups = getattr(module, "weight_g_idx", None)
    groups = None if groups is None else groups.detach().int()
    return whole(StoredWeight(octets(codes), kind, scales, block, depth, scales.dtype, zeros=zeros, groups=groups))


_made_scales: Any = WeakIdKeyDictionary()
"""Tensors of libraries -> (their place and torch's count of their changes, the scales made of them)."""


def _kept(held: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Scales made of a library's tensor, once: a kernel may read them while the one in front of it runs."""
    known, state = _made_scales.get(held), (held.device, held.data_ptr(), change_count(held))
    if known is None or known[0] != state:
        _made_scales[held] = known = (state, make(held.detach()))
    return known[1]


def _float8(module: Any) -> Read:
    """transformers' own FP8 modules, whose activations are rounded to FP8 too: here they are not."""
    weight, fine = module.weight.detach(), hasattr(module, "weight_scale_inv")
    scales = (module.weight_scale_inv if fine else module.weight_scale).detach()
    if weight.dtype != torch.float8_e4m3fn:
        return f"the weight is {weight.dtype}, not e4m3"
    count, depth = weight.shape
    sizes = getattr(module, "block_size", None) or ((count, depth) if scales.numel() == 1 else (1, depth))
    grid = -(-count // sizes[0]), -(-depth // sizes[1])
    if scales.numel() != grid[0] * grid[1]:
        return f"{scales.numel()} scales are not one for each block of {sizes[0]} x {sizes[1]}"
    if scales.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        scales = _kept(module.weight_scale_inv if fine else module.weight_scale, lambda held: held.float())
    return whole(StoredWeight(octets(weight), E4M3, scales.reshape(grid), (sizes[0], sizes[1]), depth, None))


def _bitsandbytes(module: Any) -> Read:
    weight, state = module.weight, getattr(module.weight, "quant_state", None) or module.quant_state
    if state is None:
        return "it is not quantised yet"
    if getattr(state, "packing_format_for_cpu", False):
        return "bitsandbytes has laid it anew for this CPU (AVX512-BF16)"
    count, depth = module.out_features, module.in_features
    if tuple(state.shape) != (count, depth) or depth % state.blocksize or not weight.is_contiguous():
        return f"blocks of {state.blocksize} go over the ends of its lines of {depth}"
    kind = TABLE_CODES.get(state.quant_type)
    if kind is None:
        return f"its table {state.quant_type!r} is not read: those of {', '.join(TABLE_CODES)} are"
    codes, scales = octets(weight).view(count, depth // 2), state.absmax.view(count, -1)
    inner = state.state2 if state.nested else None
    nested = None if inner is None else Nested(inner.code, inner.absmax, state.offset, inner.blocksize)
    return whole(StoredWeight(codes, kind, scales, (1, state.blocksize), depth, state.dtype, nested=nested))


def _bitsandbytes8(module: Any) -> Read:
    """LLM.int8, whose activations are rounded too, but for those beyond its threshold: here none are."""
    weight, state = module.weight, module.state
    largest = state.SCB if weight.SCB is None else weight.SCB
    if weight.dtype != torch.int8 or largest is None:
        return "it is not quantised yet"
    scales, depth = _kept(largest, lambda held: held.view(-1, 1) / 127), weight.shape[1]
    return whole(StoredWeight(octets(weight), INT8, scales, (1, depth), depth, None))


def _mxfp4(module: Any) -> Read:
    parts = module.stored("gate_up_proj"), module.stored("down_proj")
    why = next((found for part in parts if isinstance(found := whole(part.lines), str)), None)
    return parts if why is None else why


def _always(module: Any) -> bool:
    return True


def _torchao_rounds(module: Any) -> bool:
    names = "act_quant_kwargs", "act_quant_scale", "activation_quantization"
    return any(getattr(module.weight, name, None) is not None for name in names)


def _other(module: Any) -> str:
    return f"{type(module.weight).__name__} is not read: int8, float8 and intx in int8 are"


NOT_LOADED = "its tensors are not loaded yet"
FORMATS = (
    Format("torchao int8", "torchao", "Int8Tensor", _torchao, "weight", cut=True, rounds=_torchao_rounds),
    Format("torchao float8", "torchao", "Float8Tensor", _torchao, "weight", cut=True, rounds=_torchao_rounds),
    Format("torchao intx", "torchao", "IntxUnpackedToInt8Tensor", _torchao, "weight", cut=True, rounds=_torchao_rounds),
    Format(
        "compressed-tensors",
        "compressed_tensors",
        "QuantizationScheme",
        _compressed,
        "quantization_scheme",
        unpacked=True,
        rounds=lambda module: module.quantization_scheme.input_activations is not None,
    ),
    Format("fine-grained FP8", "transformers", "FP8Linear", _float8, cut=True, rounds=_always),
    Format("compressed-tensors FP8", "transformers", "CompressedTensorsFP8Linear", _float8, rounds=_always),
    Format("bitsandbytes 4 bits", "bitsandbytes", "Linear4bit", _bitsandbytes),
    Format(
        "GPTQ, AWQ", "fastspec", "PackedLinear", lambda layer: whole(layer.stored()) if layer.turned else NOT_LOADED
    ),
    Format("draft heads in 8 bits", "fastspec", "RoundedLinear", lambda layer: whole(layer.weight)),
    Format("bitsandbytes int8", "bitsandbytes", "Linear8bitLt", _bitsandbytes8, rounds=_always),
    Format("torchao", "torchao", "", _other, "weight", rounds=_torchao_rounds),
    Format("optimum-quanto", "optimum", "QLinear", "its tensors are not read: torchao's int8 are"),
    Format("HQQ", "hqq", "HQQLinear", "its tensors are not read: bitsandbytes' 4 bits are"),
    *(Format("GPTQ, AWQ", library, "", f"modules of {library} are not read: {LOADED}") for library in GPTQ_LIBRARIES),
    Format("NVFP4", "transformers", "NVFP4Linear", f"its tensors are not read: {OTHERS}"),
    Format("GGUF", "transformers", "GgufLinear", f"its blocks are not read: {UNPACKED}"),
    Format("GGUF", "transformers", "GgufExperts", f"experts are not read: {UNPACKED}"),
    Format("Gemma's QAT", "transformers", "QuantizedLinear", f"its codes are not read: {OTHERS}", rounds=_always),
    Format(
        "fine-grained FP8",
        "transformers",
        "FP8Experts",
        "experts are not read: FineGrainedFP8Config(dequantize=True) loads dense ones",
        rounds=_always,
    ),
    Format("MXFP4", "fastspec", "PackedExperts", _mxfp4),
    Format(
        "MXFP4",
        "transformers",
        "Mxfp4GptOssExperts",
        "its experts are laid anew: those of fastspec.models.load_model(..., packed=True) are read",
    ),
)
KEPT = {
    "fp8": "; a GPU of compute capability 8.9 or later keeps them as they are",
    "mxfp4": "; fastspec.models.load_model(..., packed=True) keeps them as they are, and so do a GPU of compute "
    "capability 7.5 or later and the package kernels",
}
"""Method -> what keeps weights from being dequantised."""


def format_of(module: nn.Module) -> Format | None:
    """The format of a module's weight, or None of any that no row knows."""
    return next((row for row in FORMATS if row.holds(module)), None)


def told_dequantised(model: Any) -> str | None:
    """For `report`: the method of a model's files whose weights transformers dequantised, and what prevents it."""
    method = dequantised_method(model)
    return None if method is None else f"{method}, by transformers when it loaded them{KEPT.get(method, '')}"


def read(module: Any) -> Read:
    """A module's weight as stored, or why it keeps its own forward."""
    row = format_of(module)
    if row is None:
        return "no format of fastspec.patches.hf.quantised"
    if isinstance(module, nn.Embedding):
        return "it is an embedding"
    if not all(map(is_capturing_hook, hooks_of(module))):
        return "a hook is on it"
    forward, style = module.__dict__.get("forward"), parallel_style(module)
    if style is not None and not (row.cut and style in LINEAR_STYLES):
        return "it is cut over processes"
    if style is None and forward is not None and not (row.unpacked and _is_of(forward, row.library)):
        return "its forward is replaced"
    found = row.read if isinstance(row.read, str) else row.read(own_part(module))
    if style is not None and isinstance(found, StoredWeight) and stored_share(module, found) is None:
        return "the processes do not divide its blocks"
    return found


def _is_of(forward: Any, library: str) -> bool:
    """True of a function that a library's own module defines, whatever `functools.wraps` says."""
    code = getattr(forward, "__func__", forward)
    return getattr(code, "__globals__", {}).get("__name__", "").partition(".")[0] == library


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A linear layer whose weight, or what this process has of it, is multiplied as stored: it is read of the module as
    it is at the time."""

    module: Any

    @property
    def weight(self) -> StoredWeight:
        """[M, K]."""
        found = read(self.module)
        if not isinstance(found, StoredWeight):
            raise RuntimeError(f"a weight was changed while it was read as stored: {found}")
        return found

    @property
    def bias(self) -> Tensor | None:
        """[M]."""
        held = self.module.bias
        return None if held is None else local_part(held)


@dataclass(frozen=True, slots=True)
class StoredHalf(StoredLinear):
    """The first or the second half of such a layer's outputs, `at` 0 or 1."""

    at: int

    @property
    def weight(self) -> StoredWeight:
        """[M / 2, K]."""
        whole = StoredLinear(self.module).weight
        half = whole.shape[0] // 2
        found = whole.lines(self.at * half, half)
        assert found is not None  # `stored_halves` has looked
        return found

    @property
    def bias(self) -> Tensor | None:
        """[M / 2]."""
        held = StoredLinear(self.module).bias
        return None if held is None else held.chunk(2)[self.at]


def stored_halves(module: Any) -> tuple[StoredHalf, StoredHalf] | None:
    """Halves of a layer's outputs, gates and what they open, or None where it is not read, or cut over processes, or
    they share a scale."""
    found = read(module)
    if not isinstance(found, StoredWeight) or parallel_style(module) is not None:
        return None
    half = found.shape[0] // 2
    divided = found.shape[0] == 2 * half and found.lines(0, half) and found.lines(half, half)
    return (StoredHalf(module, 0), StoredHalf(module, 1)) if divided else None


LORA = "peft.tuners.lora."


def base_of(module: Any) -> Any:
    """The layer inside one of PEFT's LoRA layers, whose forward adds products to that; the module itself where it is
    none, or reads more of the layer (DoRA, merged weights to be taken apart)."""
    base = module._modules.get("base_layer")
    if base is None or not type(module).__module__.startswith(LORA):
        return module
    apart = module.merged and module.disable_adapters
    others = hooks_of(module) or "forward" in module.__dict__ or module.lora_variant
    return module if others or apart else base


class AdaptedLinear:
    """A LoRA layer by its own forward, with `product`, x [..., K] -> [..., M], for the layer inside."""

    def __init__(self, module: Any, product: Callable[[Tensor], Tensor]) -> None:
        self.module, self.product = module, product

    def __call__(self, x: Tensor) -> Tensor:
        twin = copy.copy(self.module)
        twin._modules = {**self.module._modules, "base_layer": self.product}
        return twin(x)


def stored_whole(module: nn.Module) -> StoredWeight | None:
    """A layer's weight as stored, or None where it is not read, or cut over processes."""
    found = read(module) if parallel_style(module) is None else None
    return found if isinstance(found, StoredWeight) else None


def stored_layers(modules: Sequence[Any]) -> tuple[StoredLinear, ...] | None:
    """Layers whose weights are read as stored, or None where one of them is not."""
    if not all(isinstance(read(module), StoredWeight) for module in modules):
        return None
    return tuple(map(StoredLinear, modules))
