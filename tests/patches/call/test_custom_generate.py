"""`custom_generate=` with the folder of the package, through transformers' own loader."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path

import pytest
from helpers.generate import TREE, prompts
from helpers.models import tiny_head, tiny_model

import fastspec
from fastspec.cascade import config
from fastspec.generation.engine.engine import Engine
from fastspec.patches.session import session_of

OPTIONS = {
    "max_new_tokens": 12,
    "do_sample": False,
    "custom_generate": fastspec.CUSTOM_GENERATE,
    "trust_remote_code": True,
}


@pytest.fixture
def model(tmp_path, monkeypatch):
    """An unpatched model; transformers copies the folder's file to its cache of modules, here a temporary one."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    return tiny_model()


def test_an_assistant_serves_one_call(model, monkeypatch):
    """The output is plain decoding's, rounds were drafted, and the model is left as it was."""
    drafted: list[int] = []
    step = Engine.step

    def counted(self, *args, **kwargs):
        packed = step(self, *args, **kwargs)
        drafted.append(self.last.tree.tokens.shape[1] - 1)
        return packed

    monkeypatch.setattr(Engine, "step", counted)
    want = tiny_model().generate(**prompts(6, 3), max_new_tokens=12, do_sample=False)
    assert model.generate(**prompts(6, 3), **OPTIONS).tolist() == want.tolist()
    assert model.generate(**prompts(6, 3), **OPTIONS, assistant=TREE, eagle3=tiny_head(model)).tolist() == want.tolist()
    assert drafted[-1] == 11 and session_of(model) is None and "generate" not in model.__dict__


def test_settings_of_a_patch_are_those_of_the_call(model, monkeypatch):
    """All that `patch` takes, beside the assistant."""
    names = set(inspect.signature(fastspec.patch).parameters) - {"model", "assistant"}
    asked, patched = [], fastspec.patched
    monkeypatch.setattr(fastspec, "patched", lambda model, **given: asked.append(given) or patched(model, **given))
    given = dict.fromkeys(names - {"backend"}) | {"backend": "torch", "stored": True, "head_bits": 16}
    model.generate(**prompts(6), **OPTIONS, **given)
    assert asked == [given]


def test_lists_of_what_a_patch_takes_are_its_parameters():
    """Those of a cascade's stages, and of the folder's file, which stands alone; settings have the same names there."""
    names = set(inspect.signature(fastspec.patch).parameters) - {"model", "assistant"}
    alone = runpy.run_path(str(Path(fastspec.CUSTOM_GENERATE) / "custom_generate" / "generate.py"))
    assert set(alone["RESOURCES"]) == names == {*config.RESOURCES, "cascade"}
    assert alone["SETTINGS"] == config.SETTINGS


def test_what_cannot_be_combined_is_refused(model):
    with pytest.raises(fastspec.Unsupported, match="num_beams=2"):
        model.generate(**prompts(6), **OPTIONS, num_beams=2)
    assert session_of(model) is None


def test_the_folder_is_a_repository_for_transformers():
    """What the loader asks for, and what a hub repository shows."""
    folder = Path(fastspec.CUSTOM_GENERATE)
    assert (folder / "custom_generate" / "generate.py").is_file() and "custom_generate" in (
        folder / "README.md"
    ).read_text()
