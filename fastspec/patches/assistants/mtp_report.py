"""Report of a model's checkpoint: whether it has an MTP layer, how that is read, and what keeps it from drafting."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from fastspec.errors import CheckpointError, FastSpecError
from fastspec.generation.heads.checkpoint import is_model
from fastspec.models import check_hub, first_line
from fastspec.patches.assistants.heads import parts_of
from fastspec.patches.assistants.mtp import (
    adapter_of,
    files_of,
    fitted,
    found_mtp,
    layers_in,
    read_mtp,
    refuse_gemma4,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpReport:
    """Facts of a checkpoint's MTP layer to print, and why `fastspec.patch(model, mtp=...)` refuses it, or None."""

    facts: tuple[tuple[str, str], ...]
    refused: str | None

    def rows(self) -> list[tuple[str, str]]:
        """(name, value) pairs to print, in reading order."""
        return [*self.facts, *(() if self.refused is None else (("refused", self.refused),))]


def inspect_mtp(source: str | Path, target: PreTrainedConfig | None = None) -> MtpReport | None:
    """Report of the MTP layer of a model's checkpoint, for a target of another configuration than its own where one is
    given; headers of tensors are read, no values, which `patch` looks at too. None for a head's directory, or none."""
    where = str(source)
    try:
        check_hub(where)
        layers = layers_in(where) if target is None else target.get_text_config().num_hidden_layers
        found = found_mtp(where, layers, None)
        if found is None and not is_model(key for _, keys, _ in files_of(where, None) for key in keys):
            return None
    except (OSError, ValueError, CheckpointError):  # `inspect_head` says
        return None
    facts, refused = [("source", where)], None
    if found is None:
        facts.append(("kind", "a language model without MTP weights"))
    else:
        form, by_file, steps = found
        side = "after the target's final norm"
        facts += [
            ("kind", "MTP, in the checkpoint of a model"),
            ("layers", str(max(1, len(steps)))),
            ("tensors", str(sum(len(names) for _, names in by_file))),
            ("hidden states", f"{side}, unless a probe shows otherwise" if form.disputed else side),
            ("norm before the LM head", "yes" if form.final else "no"),
        ]
    try:
        model = _blank(where, target)
        if found is None and target is None:
            refuse_gemma4(model.config)
        read, state = read_mtp(where, layers, values=False)
        row = adapter_of(model)
        fitted(read, state, where, model, row, parts_of(model, layers=True))
        facts.append((model.config.get_text_config().model_type, f'assistant="mtp", by the adapter {row.model_type}'))
    except FastSpecError as error:
        refused = str(error)
    return MtpReport(facts=tuple(facts), refused=refused)


def _blank(where: str, config: Any) -> Any:
    """A model without values, of a configuration or of that in a checkpoint. Raises CheckpointError where transformers
    makes none."""
    try:
        config = config or AutoConfig.from_pretrained(where)
        kind = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
        with torch.device("meta"):
            return kind.from_config(config).eval()
    except Exception as error:  # of any kind: the configuration may be anybody's
        raise CheckpointError(
            f"transformers makes no model of the config.json of {where}: {first_line(error)}"
        ) from error
