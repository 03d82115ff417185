"""What a patch must leave as it was."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def snapshot(model: Any, values: bool = True) -> dict[str, Any]:
    """Everything that `unpatch` promises to leave as it was, by identity where that can be; without `values` where none
    are held."""
    modules = list(model.modules())
    return {
        "attributes": {
            name: {key: id(value) for key, value in vars(module).items()} for name, module in model.named_modules()
        },
        "parts": {
            name: {
                kind: {key: id(value) for key, value in vars(module)[kind].items()}
                for kind in ("_modules", "_parameters", "_buffers")
            }
            for name, module in model.named_modules()
        },
        "hooks": [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in modules],
        "storage": {key: (value.data_ptr(), value.dtype, value.shape) for key, value in model.state_dict().items()},
        "values": {key: value.clone() for key, value in model.state_dict().items() if values},
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
        "classes": {
            cls: {key: id(value) for key, value in vars(cls).items()}
            for module in modules
            for cls in type(module).__mro__
        },
        "signature": inspect.signature(model.generate),
        "forward": model.forward,
        "training": [module.training for module in modules],
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for key in before:
        if key == "values":
            assert all(torch.equal(value, after[key][name]) for name, value in before[key].items())
        else:
            assert before[key] == after[key], key
