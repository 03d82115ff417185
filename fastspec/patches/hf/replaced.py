"""Functions that plain decoding would call and that someone else has put in the place of transformers' or torch's own."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

KNOWN = frozenset({
    "transformers", "torch", "torchvision", "accelerate", "kernels", "huggingface_hub", "typing_extensions", "numpy", "scipy", "PIL",
    "timm", "einops", "causal_conv1d", "fla", "flash_attn", "mamba_ssm", *sys.stdlib_module_names,
})  # fmt: skip
"""Packages whose functions transformers' modelling files import."""
CLASSES = nn.Linear, nn.Embedding


def replaced_functions(model: Any, modules: list[nn.Module]) -> list[tuple[str, Any]]:
    """(name, function) of each that a pass over these modules of a model would call in place of transformers' or torch's own.

    Seen are the functions under the model's `attn_implementation`, its mask's too, the functions in the modelling files that the modules'
    classes come from, and `forward` and `__call__` of torch's linear layers and embeddings. A function's home is where its code was
    written: a decorator that copies names, as `functools.wraps` does, does not hide it.
    """
    found = [*_of_attention(model), *_of_torch()]
    homes = {each.__module__ for kind in {type(module) for module in modules} for each in kind.__mro__}
    for home in sorted(home for home in homes if home.startswith("transformers.models.")):
        found += [(f"{home}.{name}", value) for name, value in vars(sys.modules[home]).items() if _is_foreign(value)]
    return found


def has_foreign_attention(model: Any) -> bool:
    """Whether the model's attention function is someone else's."""
    return bool(_of_attention(model))


def attention_functions(model: Any) -> list[tuple[str, Any]]:
    """The functions under a model's `attn_implementation` in transformers' registries, by what they are for."""
    name = getattr(model.config.get_text_config(), "_attn_implementation", None)
    tables = ("attention", ALL_ATTENTION_FUNCTIONS), ("mask", ALL_MASK_ATTENTION_FUNCTIONS)
    return [(f"the {what} function {name!r}", table[name]) for what, table in tables if name in table]


def _of_attention(model: Any) -> list[tuple[str, Any]]:
    return [(name, function) for name, function in attention_functions(model) if _is_foreign(function)]


def _of_torch() -> list[tuple[str, Any]]:
    parts = [(kind, name, getattr(kind, name)) for kind in CLASSES for name in ("forward", "__call__")]
    return [(f"torch.nn.{kind.__name__}.{name}", function) for kind, name, function in parts if _is_foreign(function)]


def _is_foreign(value: Any) -> bool:
    """Whether a value is a function whose code none of the known packages holds."""
    return isinstance(value, FunctionType) and str(value.__globals__.get("__name__")).split(".")[0] not in KNOWN
