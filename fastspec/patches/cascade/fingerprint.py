"""A number that tells a model's weights from any others: what was computed with a model is good for as long as it is the same.

Every byte of every parameter and buffer is read, since nothing cheaper is sure: `param.data.copy_(...)` changes neither the address nor
the version counter of a parameter. On a CPU that costs about what one or two decoding steps do, which read the same bytes; on a GPU some
ten milliseconds, for the many small calls.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from fastspec.errors import Unsupported
from fastspec.patches.hf.compat import CAPTURING_FLAG, is_capturing_hook

BLOCK = 63
"""Words of 8 bytes whose sum stands for them in a large tensor. Odd: where a bit flips in every word the sum changes too."""
SMALL = 1 << 14
"""Words up to which every one counts by itself."""
SKIPPED = frozenset(vars(nn.Module())) - {"training"} | {CAPTURING_FLAG}
"""Attributes that torch gives every module and transformers some, which say nothing of what it computes."""
GOLDEN, FACTOR = -0x61C8864680B583EB, -0x40A7B892E31B1A47  # odd numbers of 64 bits from splitmix64, as signed ones


def fingerprint(model: nn.Module) -> Hashable:
    """What a model's passes follow from: names, shapes, dtypes, device types and bytes of its parameters and buffers, hooks and
    replaced forwards, and the modules' own switches (training, active adapters and their scales).

    Equal for equal models, wherever the weights lie. Any one value that changes is seen, and any change of many but by a chance of about
    2^-64, or where values of a tensor of more than 128 KiB change places within 504 bytes. Raises `Unsupported` for weights that are not
    in memory.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    check_present(model)
    layout = tuple((name, tuple(each.shape), str(each.dtype), each.device.type) for name, each in tensors.items())
    places = sorted({each.device for each in tensors.values()}, key=str)
    with torch.inference_mode():
        sums = tuple(_checksum([each for each in tensors.values() if each.device == place]) for place in places)
    return layout, sums, tuple(_switches(name, module) for name, module in model.named_modules())


def check_present(model: nn.Module) -> None:
    """Raise `Unsupported` for a model whose weights are not in memory between its passes."""
    absent = next((name for name, each in model.named_parameters() if each.is_meta), None)
    if absent is not None:
        raise Unsupported(
            f"the weights of {type(model).__name__} are not in memory between passes ({absent} is on the device meta), so that a change of "
            "them would not be seen: load it without offloading, or keep nothing between calls (Cascade: memory=None)"
        )


def _checksum(tensors: list[Tensor]) -> int:
    """One number of 64 bits for the bytes of tensors on one device, and their places."""
    sums = torch.cat([part for each in tensors for part in _sums(each)])
    mixed = sums + torch.arange(1, len(sums) + 1, device=sums.device) * GOLDEN
    mixed = (mixed ^ (mixed >> 32)) * FACTOR
    return int((mixed ^ (mixed >> 29)).sum())


def _sums(tensor: Tensor) -> list[Tensor]:
    """The words of a tensor, or sums over blocks of them, and the bytes behind its last word, int64. As few calls as can be: on a GPU it is
    these that take the time."""
    held = tensor if tensor.is_contiguous() else tensor.contiguous()
    flat, ends = held.view(-1), tensor.nbytes % 8
    if held.data_ptr() % 8 or held.storage_offset() * held.itemsize % 8:
        flat = flat.clone()
    if ends:
        octets = flat.view(torch.uint8)
        words, rest = octets[:-ends].view(torch.int64), [octets[-ends:].long()]
    else:
        words, rest = flat.view(torch.int64), []
    count = tensor.nbytes // 8
    if count <= SMALL:
        return [words, *rest]
    blocks = count // BLOCK
    return [words[: blocks * BLOCK].view(blocks, BLOCK).sum(1), words[blocks * BLOCK :], *rest]


def _switches(name: str, module: nn.Module) -> Hashable:
    """A module's class, what hooks into it, and its plain attributes."""
    hooks = [hook for hook in module._forward_hooks.values() if not is_capturing_hook(hook)]
    own = module.__dict__.get("forward")
    told = [(key, value) for key, value in vars(module).items() if key not in SKIPPED and _is_plain(value)]
    return name, type(module).__qualname__, *map(id, (*hooks, *module._forward_pre_hooks.values(), own)), repr(told)


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, or lists and dictionaries of these."""
    if isinstance(value, (bool, int, float, str)):
        return True
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    return isinstance(value, (list, tuple, set)) and all(map(_is_plain, value))
