"""Settings that transformers' `generate` has prepared before, so that a prompt which brings the same ones need not go through it again.

A server hands an open batch many prompts a second, nearly all with the settings of earlier ones, and preparing one takes `generate`
milliseconds of Python. What it makes of settings is kept where nothing of it depends on the prompt but the length: no processors, or
temperature, top-k, top-p and min-p, and no criteria but the length and end tokens. Anything else goes through `generate` each time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerationMixin
from transformers.generation import utils as plain
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from fastspec.generation.drafters.base import Process
from fastspec.kernels.verification.reference import SamplingSettings
from fastspec.patches.call.processors import FILTERS

KEPT = 16
GIVEN = frozenset({"input_ids", "generation_config", "attention_mask", "streamer", "tokenizer"})
"""Arguments of `generate` that settings are kept beside; the tokenizer is read for stop strings alone."""
METHODS = {
    name: getattr(GenerationMixin, name) for name, value in vars(GenerationMixin).items()
    if name[0] == "_" and name[1] != "_" and isinstance(value, (FunctionType, staticmethod))
}  # fmt: skip
"""What `generate` prepares a call by. One of someone else's, or of a family's own, may look at the prompt: nothing is kept there."""
MADE_OF = {
    kind: (vars(kind).get("__init__"), vars(kind).get("__call__")) for kind in (*FILTERS.values(), MaxLengthCriteria, EosTokenCriteria)
}  # fmt: skip
"""The processors and criteria that are made of settings, which `generate` finds by their names, and how they work."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What `generate` made of settings: end tokens, and how tokens are chosen (see `Rule`); `positions` are those that the model has,
    None where it has any."""

    asked: str
    ends: frozenset[int]
    sample: bool
    settings: SamplingSettings | None
    process: Process | None
    positions: int | None


class SettledSettings:
    """The last settings that were prepared."""

    def __init__(self) -> None:
        self.known: deque[Settled] = deque(maxlen=KEPT)

    def find(self, model: Any, original: Any, given: dict[str, Any]) -> Settled | None:
        """What was made of the settings of a call, whose prompt is one row of tokens on the CPU, none of them padding; or None."""
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        if not isinstance(ids, Tensor) or ids.device.type != "cpu" or ids.dtype != torch.long or ids.dim() != 2 or len(ids) != 1:
            return None
        if not isinstance(mask, Tensor) or mask.device.type != "cpu" or mask.shape != ids.shape or not bool(mask.all()):
            return None
        asked = settings_of(model, original, given)
        for each in tuple(self.known):
            if each.asked == asked and 0 < ids.shape[1] <= (each.positions or ids.shape[1]):
                return each
        return None

    def keep(self, settled: Settled) -> None:
        """Keep what was made of settings."""
        if all(each.asked != settled.asked for each in tuple(self.known)):
            self.known.appendleft(settled)


def settings_of(model: Any, original: Any, given: dict[str, Any]) -> str | None:
    """What a call's settings depend on, as text, the length of the answer left out; None for a call whose settings are not kept."""
    config: Any = given.get("generation_config")
    if type(config) is not GenerationConfig or type(model.generation_config) is not GenerationConfig or not given.keys() <= GIVEN:
        return None
    if type(config.max_new_tokens) is not int or config.max_new_tokens < 1 or not _is_transformers_own(model, original):
        return None
    asked = {name: value for name, value in vars(config).items() if name != "max_new_tokens"}, vars(model.generation_config)
    return repr(asked) if _is_text(asked) else None


def _is_transformers_own(model: Any, original: Any) -> bool:
    """Whether nobody else has a part in preparing a call."""
    kind, own = type(model), vars(model)
    return (
        getattr(original, "__func__", None) is GenerationMixin.generate
        and all(getattr(kind, name, None) is value and name not in own for name, value in METHODS.items())
        and all(
            getattr(plain, made.__name__, None) is made and (vars(made).get("__init__"), vars(made).get("__call__")) == how
            for made, how in MADE_OF.items()
        )
    )  # fmt: skip


def _is_text(value: Any) -> bool:
    """Whether a value is wholly told by its text: not so a tensor, nor an object of someone's."""
    if type(value) in (dict, list, tuple):
        return all(map(_is_text, value.values() if type(value) is dict else value))
    return value is None or type(value) in (bool, int, float, str)


def settles(processors: Sequence[Any], criteria: Iterable[Any], settings: SamplingSettings | None) -> bool:
    """Whether nothing of what `generate` made is the prompt's own but the length; `settings` are all that processors do, None if more."""
    lengths = (MaxLengthCriteria, EosTokenCriteria)
    return (settings is not None or not processors) and all(type(each) in lengths for each in criteria)
