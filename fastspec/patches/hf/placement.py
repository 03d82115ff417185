"""Where the layers of a model compute that accelerate has laid over several devices in turn (`device_map="auto"`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastspec.errors import Unsupported
from fastspec.patches.hf.compat import device_of, layer_count
from fastspec.patches.hf.walk import every_module


def devices_of(model: Any) -> list[str]:
    """The devices that a model's parameters are on, in order of their names; those that are loaded for a pass count as none."""
    found = {each.device for module in every_module(model) for each in module._parameters.values() if each is not None}
    return sorted(str(device) for device in found if device.type != "meta")


def is_spread(model: Any) -> bool:
    """Whether a model's parameters are on several devices of this process."""
    return len(devices_of(model)) > 1


def check_placement(model: Any) -> None:
    """Raise `Unsupported`, naming the reason, for a model on several devices whose layers are not each on one, by accelerate's hooks."""
    devices = devices_of(model)
    if len(devices) < 2:
        return
    name, told = type(model).__name__, f"spread over {', '.join(devices)}"
    if not any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise Unsupported(
            f"{name} is {told}; without accelerate's hooks nothing moves its states from one to the next: load it with device_map='auto', "
            "on one device (device_map='cuda:0'), or cut over processes (tp_plan='auto', under torchrun)"
        )
    layer_devices(model)


def layer_devices(model: Any) -> list[torch.device]:
    """Where each layer of a decoder computes, and so where what it keeps belongs. Raises Unsupported where one layer is on several
    devices."""
    count = layer_count(model.config)
    if not is_spread(model):
        return [device_of(model)] * count
    stacks = [module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    if not stacks:
        raise Unsupported(
            f"{type(model).__name__} is spread over {', '.join(devices_of(model))}, and its {count} layers are not found in its decoder: "
            "load it on one device (device_map='cuda:0')"
        )
    return [_device_of_layer(model, layer, index) for index, layer in enumerate(stacks[0])]


def _device_of_layer(model: Any, layer: nn.Module, index: int) -> torch.device:
    found = {each.device for each in layer.parameters() if each.device.type != "meta"}
    if not found:  # its weights are moved to where its modules compute
        places = (getattr(getattr(module, "_hf_hook", None), "execution_device", None) for module in layer.modules())
        found = {next((torch.device(place) for place in places if place is not None), device_of(model))}
    if len(found) > 1:
        raise Unsupported(
            f"layer {index} of {type(model).__name__} is itself spread over {', '.join(sorted(map(str, found)))}: lay whole layers on a "
            "device (device_map='auto' does)"
        )
    return found.pop()
