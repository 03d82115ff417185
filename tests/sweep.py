"""Every class of transformers' own mappings, tiny and random: what assisted decoding gives beside plain `generate`.

    python tests/sweep.py            # writes tests/results/models.tsv
    python tests/sweep.py gpt2 git   # prints the rows of these

A row is a model type and a mapping, and one of: `same` (autoregressive, nasd and trees of a draft model all give plain generate's tokens),
`patch` (refused by name there), `call` (refused by name at the first call), `plain fails`, `not built`, and what must not be: `differs`,
`raises`.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from helpers_sweep import TOKENS, tiny
from transformers.models.auto import modeling_auto

import fastspec

RESULTS = Path(__file__).parent / "results" / "models.tsv"
MAPPINGS = {
    "causal-lm": (transformers.AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "image-text": (transformers.AutoModelForImageTextToText, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
}
ASSISTANTS = "autoregressive", "nasd", fastspec.Speculative(gamma=3, branches=3)
NEW = 20


def row(kind: str, auto: Any) -> tuple[str, str, str]:
    """Class, outcome and reason of a model type."""
    try:
        model, draft = tiny(kind, auto), tiny(kind, auto)
    except Exception as error:
        return "-", "not built", _short(error)
    name = type(model).__name__
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(6, TOKENS - 7, (2, 12), generator=generator), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    call: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    call |= {"eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():  # a draft model that is nearly the target gives drafts that are accepted at times
        for weight in draft.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=1e-3)
    try:
        fastspec.patch(model, speculative=draft)
    except fastspec.Unsupported as error:
        return name, "patch", _short(error)
    try:
        expected = model.generate(**call).tolist()
    except Exception as error:
        return name, "plain fails", _short(error)
    for assistant in ASSISTANTS:
        try:
            got = model.generate(**call, assistant=assistant).tolist()
        except fastspec.FastSpecError as error:
            return name, "call", _short(error)
        except Exception as error:
            return name, "raises", f"{assistant}: {_short(error)}"
        if got != expected:
            return name, "differs", str(assistant)
    return name, "same", fastspec.report(model).mode


def _short(error: Exception) -> str:
    words = " ".join(str(error).split())[:160]
    return words if isinstance(error, fastspec.FastSpecError) else f"{type(error).__name__}: {words}"


def rows(kinds: Sequence[str] = ()) -> Iterator[tuple[str, ...]]:
    """Mapping, model type, class, outcome and reason of these model types, all of them where none are given."""
    for mapping, (auto, names) in MAPPINGS.items():
        for kind in names:
            if not kinds or kind in kinds:
                yield mapping, kind, *row(kind, auto)


def main() -> None:
    """Write the table, or print some rows of it."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    found = []
    for each in rows(sys.argv[1:]):
        print("\t".join(each), flush=True)
        found.append(each)
    if len(sys.argv) == 1:
        counts = Counter((mapping, outcome) for mapping, _, _, outcome, _ in found)
        head = [f"# transformers {transformers.__version__}, torch {torch.__version__}"]
        head += [f"# {mapping}: {outcome} {count}" for (mapping, outcome), count in sorted(counts.items())]
        RESULTS.write_text("\n".join([*head, "mapping\tmodel_type\tclass\toutcome\tmode or reason", *map("\t".join, found)]) + "\n")


if __name__ == "__main__":
    main()
