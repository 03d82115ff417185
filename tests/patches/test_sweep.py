"""No class of transformers' mappings gives other tokens with an assistant than without, or an error that is no refusal."""

from __future__ import annotations

import pytest
import sweep

import fastspec


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


def test_images_are_refused_by_name_before_anything_runs() -> None:
    model = sweep.tiny("llava", sweep.MAPPINGS["image-text"][0])
    ids, image = sweep.torch.randint(6, 90, (1, 9)), sweep.torch.zeros(1, 3, 32, 32)
    ran: list[object] = []
    model.model.vision_tower.register_forward_hook(lambda *_: ran.append(1))
    with fastspec.patched(model), pytest.raises(fastspec.Unsupported, match="pixel_values cannot be combined"):
        model.generate(ids, pixel_values=image, max_new_tokens=4, assistant="nasd")
    assert not ran
