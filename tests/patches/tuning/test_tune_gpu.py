"""`fastspec.tune` on a GPU: what is tried there is right or refused, and a model says afterwards what it said
before."""

from __future__ import annotations

import pytest
import torch
from helpers.devices import ON_CUDA
from helpers.generate import prompts
from helpers.models import tiny_head, tiny_model

import fastspec
from fastspec import files
from fastspec.kernels import tuned_launches
from fastspec.kernels.quantised.launches import StoredKind, place_of
from fastspec.kernels.quantised.reference import E4M3, INT8, NF4, PACKED4

pytestmark = ON_CUDA
HALF = torch.bfloat16
BYTES = StoredKind(INT8, (1, 0), torch.float32, None, 0, False)
FLOAT8 = StoredKind(E4M3, (128, 128), torch.float32, None, 0, False)
FOUR = StoredKind(PACKED4, (1, 128), HALF, torch.int32, 0, False)
TABLE = StoredKind(NF4, (1, 64), torch.uint8, None, 256, False)
STORED = [
    (op, place_of(*about), about)
    for op, about in (
        ("stored", (1, (4096, 1024, 1024), 4096, HALF, BYTES)),
        ("stored_gate_up", (1, (14336, 14336), 4096, HALF, FOUR)),
        ("stored", (1, (4096,), 4096, HALF, TABLE)),
        ("stored_gate_up", (60, (14336, 14336), 4096, HALF, FLOAT8)),
        ("stored_parts", (60, (4096,), 14336, HALF, FOUR)),
        ("stored", (10, (32000,), 4096, HALF, BYTES)),
    )
]
PLACES = [
    *STORED,
    ("linear", (1, 960, 576, HALF), (1, 960, 576, HALF)),
    ("linear", (64, 6144, 4096, HALF), (61, 6144, 4096, HALF)),
    ("gate_up", (16, 14336, 4096, HALF), (10, 14336, 4096, HALF)),
    ("linear_parts", (64, 4096, 14336, HALF), (61, 4096, 14336, HALF)),
    ("few_attention", (HALF, 128, 4, 1, 2048), (1, 1, 32, 8, 128, 2048, True, HALF)),
    ("tree_attention", (HALF, 64, 3, 256, 1024), (1, 61, 9, 3, 64, 1024, False, HALF)),
]


@pytest.mark.parametrize("each", PLACES, ids=lambda each: f"{each[0]} {each[2][:3]}")
def test_what_is_tried_is_right_or_does_not_fit(each):
    from fastspec.patches.tuning import candidates, tune

    made = candidates.trial(*each, torch.device("cuda"))
    found = tune.tune_place(made, torch.device("cuda"))
    assert not [told for told in found.refused if "OutOfResources" not in told and "out of resource" not in told], (
        found.refused
    )
    assert 0 < found.best_us <= found.before_us < 1e5 and len(found.refused) < max(1, found.tried / 2)


def test_a_tuned_model_gives_the_same_tokens(tmp_path, monkeypatch):
    monkeypatch.setenv(files.SETTING, str(tmp_path))
    model = tiny_model(num_hidden_layers=3).to("cuda", torch.float16)
    inputs = {name: ids.cuda() for name, ids in prompts(9).items()}
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    fastspec.patch(model, eagle3=tiny_head(model).to("cuda", torch.float16))
    before = model.generate(**inputs, **options, assistant="eagle3")
    try:
        found = fastspec.tune(model, length=64, minutes=1.0)
        assert len(found.places) > 5 and found.seconds < 200
        kept = sum(each.kept for each in found.places)
        assert (fastspec.report(model).tables == "tuned") == (kept > 0) == bool(list(tmp_path.rglob("tuned/*.json")))
        after = model.generate(**inputs, **options, assistant="eagle3")
        assert after.shape == before.shape and fastspec.report(model).last.replays > 0
    finally:
        from fastspec.patches.tuning import store

        store.forget()
        assert not tuned_launches.installed(tuned_launches.name_of(torch.device("cuda")))
