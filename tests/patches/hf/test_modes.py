"""Where the decoder of a model stands in it."""

from __future__ import annotations

from helpers.models import tiny_model
from helpers.vision import seeing

from fastspec.patches.hf.modes import decoder_of, is_wrapped


def test_a_model_of_images_has_more_in_front_of_its_decoder_than_tokens() -> None:
    text, images = tiny_model(num_hidden_layers=1), seeing("llava")
    assert not is_wrapped(text) and decoder_of(text) is text.model
    assert is_wrapped(images) and decoder_of(images) is images.model.language_model
