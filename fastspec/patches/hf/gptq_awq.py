"""GPTQ and AWQ checkpoints, read without the packages that write them: `PackedLinear` holds a layer's tensors, and
transformers' own loading builds a model of such layers by `packed_loading.PackedQuantizer`.

K input channels, M output channels, G groups of input channels, each with a scale and a zero point for every output
channel; a weight is (code - zero point) * scale. Codes of 4 or 8 bits lie in words of 32, the first one lowest.

| tensor | in a file | in memory |
|---|---|---|
| qweight | int32 [K * bits / 32, M], words along K; AWQ: [K, M / 8], along M, interleaved | [M, K * bits / 32] |
| qzeros | int32 [G, M * bits / 32], words along M; AWQ: interleaved; GPTQ v1: each is 1 less | [M * bits / 32, G] |
| scales | [G, M] | [M, G] |
| g_idx | GPTQ: int32 [K], the group of each input channel; where it is missing they come in turn | the same |

Sources: AutoGPTQ 0.7.1, GPTQModel (v2; of v1 it subtracts from whole words), AutoAWQ 0.2.7, auto-round 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastspec.errors import Unsupported
from fastspec.kernels.quantised import reference
from fastspec.kernels.quantised.reference import PACKED4, PACKED8, StoredWeight, halves
from fastspec.patches.hf.checkpoint_files import FLOATS, Header, MissingWeight, headers_of
from fastspec.patches.hf.compat import change_count, names_of_weights

KINDS = {4: PACKED4, 8: PACKED8}
ONES = {bits: sum(1 << at for at in range(0, 32, bits)) for bits in KINDS}
"""Word of codes that are 1."""
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Places of 8 output channels in a word of AWQ."""
CHANNELS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output channels that these places hold."""
TURNED = ("qweight", "qzeros", "scales")
TENSORS = (*TURNED, "g_idx")


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a file's tensors."""

    name: str
    interleaved: bool = False
    """True of AWQ's."""
    one_less: bool = False
    """True where zero points are written as 1 less."""


GPTQ, GPTQ_V2, AWQ = Layout("GPTQ", one_less=True), Layout("GPTQ v2"), Layout("AWQ", interleaved=True)
LAYOUTS = {
    ("gptq", "gptq"): GPTQ,
    ("gptq", "gptq_v2"): GPTQ_V2,
    ("awq", "gemm"): AWQ,
    ("auto-round", "auto_round:auto_gptq"): GPTQ,
    ("auto-round", "auto_round:gptqmodel"): GPTQ_V2,
    ("auto-round", "auto_round"): GPTQ_V2,
    ("auto-round", "auto_round:auto_awq"): AWQ,
    ("auto-round", "auto_round:gptq"): GPTQ,
    ("auto-round", "auto_round:awq"): AWQ,
    ("auto-round", "auto"): GPTQ,
}
"""(quant_method, format) -> layout."""
RUNS_BY = re.compile(":(exllamav2|triton|tritonv2|cuda|gemm)$")
"""The kernel that auto-round before 0.5 wrote behind a format."""
FORMAT_FIELDS = {  # where a configuration names its format, and what holds where it does not
    "gptq": (("checkpoint_format", "format"), "gptq"),
    "awq": (("version", "checkpoint_format", "format"), "gemm"),
    "auto-round": (("packing_format", "backend"), "auto_round:auto_gptq"),
}
OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files of a directory that describe its weights where config.json does not -> method."""


def moved(words: Tensor, places: Sequence[int]) -> Tensor:
    """Words of codes of 4 bits [R, W] with those that they have at these places."""
    codes = halves(words.contiguous().view(torch.uint8), PACKED4).unflatten(1, (-1, 8))[..., list(places)].flatten(1)
    return (codes[:, ::2] | codes[:, 1::2] << 4).contiguous().view(torch.int32)


def along_inputs(words: Tensor) -> Tensor:
    """AWQ's words int32 [K, M / 8] -> words along K, [M, K / 8]."""
    (depth, columns), even, odd = words.shape, words[::2], words[1::2]
    octets = torch.empty(columns, 8, depth // 2, dtype=torch.uint8, device=words.device)
    for channel, place in enumerate(PLACES):
        pairs = (even >> 4 * place) & 15 | ((odd >> 4 * place) & 15) << 4
        octets[:, channel] = pairs.to(torch.uint8).t()
    return octets.flatten(0, 1).view(torch.int32)


def along_outputs(words: Tensor) -> Tensor:
    """Words along K int32 [M, K / 8] -> AWQ's words [K, M / 8]."""
    octets = words.view(torch.uint8).unflatten(0, (-1, 8))
    made = torch.zeros(octets.shape[2], 2, octets.shape[0], dtype=torch.int32, device=words.device)
    for channel, place in enumerate(PLACES):
        pairs = octets[:, channel].t().contiguous().int()
        made[:, 0] |= (pairs & 15) << 4 * place
        made[:, 1] |= (pairs >> 4) << 4 * place
    return made.flatten(0, 1)


def from_file(name: str, tensor: Tensor, layout: Layout, bits: int) -> Tensor:
    """A tensor of a file as it lies in memory."""
    if name == "qweight" and layout.interleaved:
        return along_inputs(tensor)
    if name == "qzeros":
        tensor = moved(tensor, PLACES) if layout.interleaved else tensor
        tensor = tensor + ONES[bits] if layout.one_less else tensor
    return tensor.t().contiguous()


def for_file(name: str, tensor: Tensor, layout: Layout, bits: int) -> Tensor:
    """Tensor of a file: what `from_file` was given."""
    if name == "qweight" and layout.interleaved:
        return along_outputs(tensor)
    tensor = tensor.t()
    if name == "qzeros":
        tensor = tensor - ONES[bits] if layout.one_less else tensor
        tensor = moved(tensor, CHANNELS) if layout.interleaved else tensor
    return tensor


class NoWeight:
    """Stand-in for a packed layer's dense weight: tells PEFT its device and dtype, and refuses all else by name."""

    _is_hf_initialized = True
    """True for transformers, so that it draws no values for it."""

    def __init__(self, layer: PackedLinear) -> None:
        self.device, self.dtype = layer.scales.device, layer.scales.dtype
        self.told = f"{layer.bits}-bit {layer.layout.name} weights"

    def __getattr__(self, name: str) -> Any:
        raise MissingWeight(
            f"a layer of {self.told} has no dense weight ({name}): an adapter stays beside it, and is not merged into "
            "it or made of it, as merge_adapter, merge_and_unload, PiSSA, OLoRA, AdaLoRA or HRA would: use a LoRA that "
            "stays apart, or load the model dense"
        )


class PackedLinear(nn.Linear):
    """A linear layer of packed tensors alone, dequantised in each pass; its `state_dict` has the file's tensors."""

    qweight: nn.Parameter
    qzeros: nn.Parameter
    scales: nn.Parameter
    g_idx: nn.Parameter | None

    def __init__(
        self, layout: Layout, bits: int, group_size: int, depth: int, channels: int, tensors: Mapping[str, Tensor]
    ) -> None:
        """`tensors` are those of the file, bias [M] among them; on the meta device they are yet to be loaded."""
        nn.Module.__init__(self)
        self.layout, self.bits, self.group_size = layout, bits, group_size
        self.in_features, self.out_features = depth, channels
        for name in (*TENSORS, "bias"):
            held = tensors.get(name)
            self.register_parameter(name, None if held is None else nn.Parameter(held, requires_grad=False))
        self.turned = False
        """True once the tensors lie as in memory."""
        self._tables: tuple[object, tuple[Tensor | None, Tensor | None]] | None = None
        if not self.qweight.is_meta:
            self.turn()

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            return NoWeight(self) if self.turned else None
        return super().__getattr__("qweight" if name == "W_q" else name)

    def turn(self) -> None:
        """Lay the tensors of the file as they are read. Raises Unsupported for groups that are none."""
        groups = self.g_idx
        if groups is not None and not 0 <= int(groups.min()) <= int(groups.max()) < len(self.scales):
            raise Unsupported(f"its g_idx names groups up to {int(groups.max())}, and it has {len(self.scales)} scales")
        for name in TURNED:
            held = from_file(name, getattr(self, name).detach(), self.layout, self.bits)
            setattr(self, name, nn.Parameter(held, requires_grad=False))
        self.turned = True
        self._zeros_and_groups()

    def stored(self) -> StoredWeight:
        """The weight as views of the module's tensors."""
        zeros, groups = self._zeros_and_groups()
        codes, block = self.qweight.detach().view(torch.uint8), (1, self.group_size)
        kind, scales = KINDS[self.bits], self.scales.detach()
        return StoredWeight(codes, kind, scales, block, self.in_features, None, zeros=zeros, groups=groups)

    def dequantize(self) -> Tensor:
        """The dense weight [M, K]. PEFT's DoRA takes norms of it, and asks layers with a `W_q`, as HQQ's have."""
        return reference.dequantised(self.stored(), self.scales.dtype)

    def _zeros_and_groups(self) -> tuple[Tensor | None, Tensor | None]:
        """Zero points and groups, None where all are the usual; looked at once for each change."""
        held = self.qzeros, self.g_idx
        state = tuple((each.data_ptr(), change_count(each)) for each in held if each is not None)
        if self._tables is None or self._tables[0] != state:
            zeros, groups = (None if each is None else each.detach() for each in held)
            assert zeros is not None
            middle = ONES[self.bits] << self.bits - 1  # of words, which are signed
            if bool((zeros == middle - (1 << 32)).all()):
                zeros = None
            if groups is not None:
                turns = torch.arange(self.in_features, dtype=groups.dtype, device=groups.device) // self.group_size
                groups = None if torch.equal(groups, turns) else groups
            self._tables = state, (zeros, groups)
        return self._tables[1]

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K] -> [..., M]."""
        return reference.linear(input, self.stored(), self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        """Scales stay in the file's dtype: a cast of the model is one of what it multiplies."""
        scales = self.scales.detach()
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:
            self.scales = nn.Parameter(scales.to(self.scales.device), requires_grad=False)
        return self

    def extra_repr(self) -> str:
        """Sizes and format."""
        return f"{super().extra_repr()}, {self.layout.name}, bits={self.bits}, group_size={self.group_size}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.turned:
            for name in TURNED:
                key = prefix + name
                destination[key] = for_file(name, destination[key], self.layout, self.bits)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if self.turned:
            given = {name: state_dict[prefix + name] for name in TURNED if prefix + name in state_dict}
            made = {prefix + name: from_file(name, each, self.layout, self.bits) for name, each in given.items()}
            state_dict = {**state_dict, **made}
        super()._load_from_state_dict(state_dict, prefix, *rest)


def layout_of(given: Mapping[str, Any]) -> Layout | None:
    """Layout that a `quantization_config` names, None for another method. Raises Unsupported for what is not read."""
    method = str(given.get("quant_method", "")).lower().removeprefix("intel/")
    if method not in FORMAT_FIELDS:
        return None
    fields, usual = FORMAT_FIELDS[method]
    name = next((str(given[field]).lower() for field in fields if given.get(field)), usual)
    name = RUNS_BY.sub("", name) if method == "auto-round" else name
    name = "marlin" if given.get("is_marlin_format") else name
    layout = LAYOUTS.get((method, name))
    if layout is None:
        known = ", ".join(each for other, each in LAYOUTS if other == method)
        raise Unsupported(
            f"its weights are {method} in the format {name!r}, which is not read: accepted are {known}; write the "
            "checkpoint anew in one of them, or as compressed-tensors with llm-compressor"
        )
    for field, read in (("act_bits", (16, 32)), ("rotation", ()), ("rotation_config", ()), ("adapter", ())):
        if given.get(field) and given[field] not in read:
            raise Unsupported(
                f"its quantization_config has {field}={given[field]!r}, which is more than packed weights and not read"
            )
    return layout


def replace_layers(model: Any, given: Mapping[str, Any], files: Sequence[str]) -> None:
    """Put a `PackedLinear` in place of each layer that files pack. Raises Unsupported for a tensor of another form."""
    layout, headers = layout_of(given), headers_of(files)
    assert layout is not None
    unread = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]  # draft layers, above all
    headers = {key: each for key, each in headers.items() if not any(left.search(key) for left in unread)}
    packed = {key.removesuffix(".qweight") for key in headers if key.endswith(".qweight")}
    if not packed:
        raise Unsupported(f"its quantization_config says {layout.name}, and no file has a qweight")
    for key in headers:
        layer, _, name = key.rpartition(".")
        if (name in TENSORS) if layer not in packed else (name not in (*TENSORS, "bias")):
            raise Unsupported(f"its files have {key}, which is no tensor of a {layout.name} layer that is read")
    names = names_of_weights(model, [f"{layer}.weight" for layer in sorted(packed)])
    head = model.get_output_embeddings()
    for layer in sorted(packed):
        name = names.get(f"{layer}.weight", "").removesuffix(".weight")
        module = model.get_submodule(name) if name else None
        if type(module) is not nn.Linear:
            held = f"a {type(module).__name__}" if module is not None else "no layer of its own"
            raise Unsupported(f"its files pack {layer}, which is {held} in {type(model).__name__}, not a Linear")
        if module is head and model.config.get_text_config().tie_word_embeddings:
            raise Unsupported(
                f"its files pack {layer}, and its config.json ties it to the embedding: set tie_word_embeddings to "
                "false there"
            )
        own = {key: headers[f"{layer}.{key}"] for key in (*TENSORS, "bias") if f"{layer}.{key}" in headers}
        try:
            made = _packed_layer(layout, given, module, own)
        except Unsupported as error:
            raise Unsupported(f"its files pack {layer} otherwise than {layout.name}'s are read: {error}") from error
        model.set_submodule(name, made)


def _packed_layer(
    layout: Layout, given: Mapping[str, Any], module: nn.Linear, own: Mapping[str, Header]
) -> PackedLinear:
    """A layer on the meta device for these headers, which have bits and groups. Raises Unsupported for others."""
    depth, count = module.in_features, module.out_features
    lost = [name for name in TURNED if name not in own]
    if lost:
        raise Unsupported(f"it has no {lost[0]}")
    if any(len(own[name].shape) != 2 for name in TURNED):
        raise Unsupported(f"its {', '.join(TURNED)} are not all matrices")
    words, groups = own["qweight"].shape, own["scales"].shape[0]
    bits = 32 * words[1] / count if layout.interleaved else 32 * words[0] / depth
    if bits not in ((4,) if layout.interleaved else KINDS):
        raise Unsupported(f"{bits:g} bits a weight (accepted: {'4' if layout.interleaved else '4, 8'})")
    per = 32 // int(bits)
    wanted = {
        "qweight": (depth, count // per) if layout.interleaved else (depth // per, count),
        "qzeros": (groups, count // per),
        "scales": (groups, count),
        "g_idx": (depth,),
        "bias": (count,),
    }
    for name, header in own.items():
        dtypes = ("I32",) if name in ("qweight", "qzeros", "g_idx") else tuple(FLOATS)
        if header.shape != wanted[name] or header.dtype not in dtypes or depth % per or count % per:
            raise Unsupported(
                f"{name} is {header.dtype} {list(header.shape)}, not {' or '.join(dtypes)} {list(wanted[name])}, of "
                f"{depth} input and {count} output channels"
            )
    named = given.get("group_size") or given.get("q_group_size")
    size = depth // max(1, groups)
    if isinstance(named, int) and named > 0 and -(-depth // named) == groups > 1:
        size = named
    if not 0 < groups <= depth or -(-depth // size) != groups:
        raise Unsupported(f"{groups} groups do not fit {depth} input channels")
    meta = {
        name: torch.empty(header.shape, dtype=FLOATS.get(header.dtype, torch.int32), device="meta")
        for name, header in own.items()
    }
    return PackedLinear(layout, int(bits), size, depth, count, meta)
