"""No class of transformers' mappings gives other tokens with an assistant than without, or an error that is no refusal."""

from __future__ import annotations

import pytest
import sweep


@pytest.mark.parametrize("mapping", sweep.MAPPINGS)
@pytest.mark.slow
def test_every_class_gives_the_same_or_is_refused_by_name(mapping: str) -> None:
    auto, names = sweep.MAPPINGS[mapping]
    found = {kind: sweep.row(kind, auto) for kind in names}
    wrong = {kind: each for kind, each in found.items() if each[1] in ("differs", "raises")}
    assert not wrong
    assert sum(each[1] == "same" for each in found.values()) > len(names) / 3


TEXT = "llava", "qwen2_vl", "internvl", "mllama", "paligemma"


@pytest.mark.parametrize("kind", TEXT)
def test_a_vision_language_model_takes_text(kind: str) -> None:
    assert sweep.row(kind, sweep.MAPPINGS["image-text"][0])[1] == "same"
