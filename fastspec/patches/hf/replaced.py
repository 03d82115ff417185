"""Functions that someone has replaced, and forwards that someone has wrapped, in the passes of a model's modules."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import _lru_cache_wrapper, partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastspec.patches.hf.compat import autocast_region
from fastspec.patches.hf.config_fields import attention_name

OWN = ("transformers", "torch", "torchvision", "accelerate", "kernels", "huggingface_hub", "typing_extensions")
OTHERS = ("numpy", "scipy", "PIL", "timm", "einops", "causal_conv1d", "fla", "flash_attn", "mamba_ssm")
KNOWN = frozenset((*OWN, *OTHERS, *sys.stdlib_module_names))
"""Packages whose functions transformers' modelling files import."""
CLASSES: tuple[tuple[type[nn.Module], tuple[str, ...]], ...] = (
    (nn.Module, ("__call__", "_call_impl")),
    (nn.Linear, ("__call__", "forward")),
    (nn.Embedding, ("__call__", "forward")),
    (nn.Conv1d, ("__call__", "forward", "_conv_forward")),
)
"""Methods of torch's that the backend's ops stand for in any model, beside all of `torch.nn.functional`."""


def replaced_functions(model: Any, modules: list[nn.Module]) -> list[tuple[str, Any]]:
    """(name, function) of each that a pass over these modules would call in place of transformers' or torch's own.

    Seen are the functions under the model's `attn_implementation`, masks too, those in the modelling files of the
    modules' classes, methods of these, those of torch's layers, and `torch.nn.functional`. A function's home is where
    its code was written, whatever `functools.wraps` says.
    """
    found = [*foreign_attention(model), *_strangers_in("torch.nn.functional", vars(functional))]
    for kind, names in CLASSES:
        found += _strangers_in(f"torch.nn.{kind.__name__}", {name: getattr(kind, name) for name in names})
    kinds = sorted({type(module) for module in modules}, key=lambda kind: kind.__qualname__)
    bases = {base: base.__module__ for kind in kinds for base in kind.__mro__}
    bases = {base: home for base, home in bases.items() if home.startswith("transformers.models.")}
    for base in bases:
        if not hasattr(base, "generate"):  # a whole model has methods for much else
            found += _strangers_in(base.__name__, vars(base))
    attention = (str(getattr(value, "__module__", None)) for _, value in attention_functions(model))
    for home in dict.fromkeys((*bases.values(), *(each for each in attention if each.startswith("transformers.")))):
        found += _strangers_in(home, vars(sys.modules[home]))
    return found


_SEEN: dict[str, tuple[dict[str, Any], list[tuple[str, Any]]]] = {}
"""Place -> what was last seen there, and which of it is someone else's: every call looks, and little changes."""


def _strangers_in(place: str, held: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(place.name, value) of what a class or a module holds that is someone else's."""
    before, found = _SEEN.get(place, ({}, []))
    if len(before) != len(held) or any(before.get(name, held) is not value for name, value in held.items()):
        before, found = dict(held), [(f"{place}.{name}", value) for name, value in held.items() if is_strangers(value)]
        _SEEN[place] = before, found
    return found


def has_replaced_methods(kind: type[nn.Module]) -> bool:
    """True where a module's class has a method of someone else's in the place of one of transformers' own."""
    bases = (base for base in kind.__mro__ if base.__module__.startswith("transformers.models."))
    return any(_strangers_in(base.__name__, vars(base)) for base in bases)


def attention_functions(model: Any) -> list[tuple[str, Any]]:
    """The functions under a model's `attn_implementation` in transformers' registries, by what they are for."""
    name = attention_name(model.config)
    tables = ("attention", ALL_ATTENTION_FUNCTIONS), ("mask", ALL_MASK_ATTENTION_FUNCTIONS)
    return [(f"the {what} function {name!r}", table[name]) for what, table in tables if name in table]


def foreign_attention(model: Any) -> list[tuple[str, Any]]:
    """Those that are someone else's, objects that can be called included."""
    return [(name, value) for name, value in attention_functions(model) if is_strangers(value)]


def is_strangers(value: Any) -> bool:
    """True for a function whose code, or that of one that it wraps, none of the known packages holds, or an object that
    can be called whose class none of them holds."""
    while value is not None:
        owner = getattr(value, "__self__", None)
        if isinstance(owner, type) and _is_unknown(owner.__module__):  # `apply` of an autograd function
            return True
        value = getattr(value, "__func__", value)
        if isinstance(value, partial):
            value = value.func
            continue
        home = value.__globals__.get("__name__") if isinstance(value, FunctionType) else _maker_of(value)
        if _is_unknown(home):
            return True
        value = getattr(value, "__wrapped__", None) if isinstance(value, (FunctionType, _lru_cache_wrapper)) else None
    return False


CARRIERS = frozenset({"torch._ops", "torch._library.custom_ops", "torch.jit", "torch.jit._script", "unittest.mock"})
"""Homes of classes that call anyone's code; of transformers' own only scripted functions, which name their home."""


def _maker_of(value: Any) -> str | None:
    """Home of what can be called, its own or its class's; "" where nobody can tell, None of anything else."""
    if isinstance(value, type) or not callable(value):
        return None
    if isinstance(value, BuiltinFunctionType):
        return getattr(value, "__module__", None)
    if isinstance(value, torch.jit.ScriptFunction):  # GPT-BigCode's masks are made by some until 5.22
        return value.qualified_name.removeprefix("__torch__.")
    home = type(value).__module__
    return "" if home in CARRIERS else home


def _is_unknown(home: Any) -> bool:
    return home is not None and str(home).split(".")[0] not in KNOWN


def calls_original(model: nn.Module) -> bool:
    """True where `forward` in a model's own `__dict__` calls the class's with the same arguments and returns its
    outputs.

    Followed is what is really called: TRL's forward with a fused LM head, whose own loss is for training, and
    accelerate's conversion of outputs to fp32, which generation does anyway. Not followed are an autocast region, and
    tensor parallelism that changes what comes in or out. Where accelerate takes its wrappers off again, it goes down to
    the function inside the class's own decorators.
    """
    own = [type(model).forward]
    while hasattr(own[-1], "__wrapped__"):
        own.append(own[-1].__wrapped__)
    forward: Any = model.__dict__.get("forward")
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        if function in own:
            return True
        forward = _called(function)
    return False


def autocast_inside(model: nn.Module) -> torch.dtype | None:
    """Dtype of the autocast region that an own `forward` opens, as accelerate's in mixed precision, or None."""
    forward: Any = model.__dict__.get("forward")
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        if (region := autocast_region(function)) is not None:
            dtype, enabled = region
            return dtype if enabled else None
        forward = _called(function)
    return None


def home_of(function: Any) -> str:
    """The name of the module that a function or a callable object comes from; one that `exec` made may have none."""
    return getattr(function, "__module__", None) or type(function).__module__


def where_defined(forward: Any) -> str:
    """A function's place in its file, which decorators do not change."""
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return type(forward).__name__ if code is None else f"{code.co_name}, {code.co_filename}:{code.co_firstlineno}"


def _called(function: Any) -> Any:
    """Function that a known wrapper calls, or None."""
    kind = type(function)
    if (kind.__module__, kind.__name__) == ("accelerate.utils.operations", "ConvertOutputsToFp32"):
        return function.model_forward
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    cells = dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    home = function.__globals__["__name__"], code.co_name
    if home == ("trl.trainer.utils", "_fused_forward"):
        return cells.get("original_forward")
    if home == ("transformers.distributed.tensor_parallel", "tp_forward"):
        # Styles that leave inputs and outputs as they are: of a norm within heads, and of a module that has a cut
        # parameter of its own.
        leaves = "self" not in cells or type(cells["self"]).__name__ in ("LocalParamsParallel", "TensorParallelLayer")
        return cells["original_forward"] if leaves else None
    return cells.get("model_forward") if home == ("accelerate.utils.operations", "forward") else None
