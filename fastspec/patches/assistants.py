"""From `assistant=` to a decoding: names, config objects, or an object with a `drafter` method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastspec.config import Autoregressive, Eagle3, TreeShape
from fastspec.errors import Unsupported
from fastspec.generation.eagle.drafter import EagleDrafter
from fastspec.generation.eagle.head import EagleHead
from fastspec.generation.protocols import Ops
from fastspec.patches.heads import moved

NAMES = {"autoregressive": Autoregressive, "eagle3": Eagle3}


@dataclass(frozen=True, slots=True)
class Plain:
    """Decoding without a drafter."""

    name: str = "autoregressive"
    taps: None = None

    def drafter(self, **_: Any) -> None:
        """There is none: every round is one token."""
        return None


@dataclass(frozen=True, slots=True)
class EagleDecoding:
    """Decoding with an EAGLE head and a dynamic tree."""

    name: str
    head: EagleHead
    shape: TreeShape

    @property
    def taps(self) -> tuple[int, ...]:
        """The hidden states that the head reads."""
        return self.head.config.taps

    def drafter(self, *, rows: int, capacity: int, device: Any, ops: Ops, process: Any) -> EagleDrafter:
        """The drafter of one call."""
        return EagleDrafter(self.head, self.shape, rows=rows, capacity=capacity, ops=ops)


def resolve(assistant: Any, resources: dict[str, Any], model: Any) -> Any:
    """The decoding that an `assistant=` asks for. Raises Unsupported for an unknown name or a missing resource."""
    if isinstance(assistant, str):
        if assistant not in NAMES:
            raise Unsupported(f"assistant={assistant!r} is unknown: accepted are {', '.join(map(repr, NAMES))}, or a config object")
        assistant = NAMES[assistant]()
    if isinstance(assistant, Autoregressive):
        return Plain()
    if isinstance(assistant, Eagle3):
        head = resources.get("eagle3")
        if head is None:
            raise Unsupported("assistant 'eagle3' has no head: fastspec.patch(model, eagle3=path_or_hub_id_or_head) supplies it")
        if head.fc.weight.device != model.device or head.fc.weight.dtype != model.dtype:
            head = resources["eagle3"] = moved(head, model)  # the model was moved or cast since it was patched
        shape = assistant.shape(model.device.type)
        if shape.top_k > head.config.draft_vocab_size:
            raise Unsupported(f"top_k={shape.top_k} exceeds the head's draft vocabulary of {head.config.draft_vocab_size}")
        return EagleDecoding("eagle3", head, shape)
    if callable(getattr(assistant, "drafter", None)) and isinstance(getattr(assistant, "name", None), str):
        return assistant
    raise Unsupported(
        f"assistant={assistant!r} is neither a name ({', '.join(map(repr, NAMES))}), nor a config such as fastspec.Eagle3(), nor an "
        "object with `name`, `taps` and `drafter` (fastspec.generation.protocols.Decoding)"
    )
