"""Training an MTP layer: its steps are those that it drafts with, its files are a checkpoint's, and what it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from helpers.models import tiny_model
from helpers.mtp import KINDS, loaded
from helpers.training import settings, small_target, small_texts

import fastspec
from fastspec.default_trees import TreeShape
from fastspec.errors import Unsupported
from fastspec.generation.drafters.head_drafter import EagleDrafter
from fastspec.patches.assistants.mtp import load_mtp, new_mtp, saved_mtp
from fastspec.patches.backends import TORCH
from fastspec.programs.training.trainer import Trainer
from fastspec.programs.training.ttt import UnrolledAttention


def mtp(folder: Path, **changes: object) -> Any:
    return settings(folder, **{"kind": "mtp", "draft_vocab_size": 0, "intermediate_size": 0, **changes})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ernie4_5_moe"])
@torch.no_grad()
def test_an_unrolled_layer_gives_the_drafts_of_a_chain(kind: str, tmp_path: Path) -> None:
    """Step i at row t has the state from which draft i + 1 of a chain behind token t + 1 is taken."""
    model, _ = loaded(kind, tmp_path)
    bound = load_mtp(True, model)
    head, ids = bound.as_module(), torch.randint(6, 90, (1, 11), generator=torch.Generator().manual_seed(1))
    states = model(ids, output_hidden_states=True).hidden_states[-1]
    for end in (4, 9):
        drafter = EagleDrafter(bound, TreeShape(4, 2, 1), rows=1, capacity=40, ops=TORCH)
        drafter.begin(ids[:, :end], torch.tensor([end]), states[:, :end], ids[:, end])
        chain = drafter.propose(end).tokens[0, 1:]
        attend, hidden, places = UnrolledAttention(), head.fuse(states[:, :end]), torch.arange(end)[None]
        text = torch.cat((ids[0, : end + 1], chain))
        for step, draft in enumerate(chain):
            hidden = head.step(text[None, step + 1 : step + 1 + end], hidden, places + step, attend)
            assert int(head.logits(hidden)[0, -1].argmax()) == int(draft)


def test_a_layer_learns_and_drafts_from_its_folder(tmp_path: Path) -> None:
    """Of a model that has none; the run is taken up, and a second one goes on from what the first wrote."""
    model = small_target()
    config = mtp(tmp_path / "head", epochs=1.2, learning_rate=1e-2)
    material = small_texts(model, 120, config), small_texts(model, 16, config)
    trainer = Trainer(config, model, *material, Accelerator(cpu=True))
    before = trainer.validate()["top1"]
    trainer.run()
    trainer.finish()
    after = trainer.validate()["top1"]
    assert after > before + 0.5
    again = Trainer(config, model, *material, Accelerator(cpu=True))
    assert again.progress.done(config) == 1 and again.validate()["top1"] == pytest.approx(after, abs=1e-6)
    ids = torch.tensor([[7, 8, 9]])
    plain = model.generate(ids, max_new_tokens=30, do_sample=False)
    with fastspec.patched(model, mtp=tmp_path / "head"):
        assert torch.equal(plain, model.generate(ids, max_new_tokens=30, do_sample=False, assistant="mtp"))
        assert fastspec.report(model).last.acceptance_length > 1.5
    further = mtp(tmp_path / "more", start_from=str(tmp_path / "head"), epochs=0.2)
    begun = Trainer(further, model, *material, Accelerator(cpu=True))
    assert begun.validate()["top1"] == pytest.approx(after, abs=0.1)
    assert "patch(model, mtp=" in (tmp_path / "head" / "README.md").read_text()


def test_a_checkpoints_own_layer_is_tuned(tmp_path: Path) -> None:
    model, _ = loaded("qwen3_5_text", tmp_path / "model", vocab_size=128)
    config = mtp(tmp_path / "head", start_from=str(tmp_path / "model"), epochs=1.0, max_length=64)
    texts = small_texts(model, 12, config)
    trainer = Trainer(config, model, texts, texts, Accelerator(cpu=True))
    held = {name: each.clone() for name, each in trainer.head.state_dict().items()}
    trainer.run()
    changed = {name for name, each in trainer.head.state_dict().items() if not torch.equal(each, held[name])}
    assert {"fc.weight", "layer.self_attn.q_proj.weight", "norm.weight", "token_norm.weight"} <= changed
    mine, theirs = load_mtp(tmp_path / "head", model).module.state_dict(), trainer.head.state_dict()
    assert all(torch.equal(mine[name], each.bfloat16().float()) for name, each in theirs.items())


def test_what_cannot_be_trained_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'kind "mtp" take taps.*leave out draft_vocab_size, intermediate_size'):
        settings(tmp_path, kind="mtp")
    model, _ = loaded("ernie4_5_moe", tmp_path / "ernie")
    with pytest.raises(Unsupported, match="has no norm before the LM head"):
        saved_mtp(load_mtp(True, model).as_module())
    with pytest.raises(Unsupported, match="runs in generic mode"):
        new_mtp(tiny_model("deepseek_v3"))
    windowed = tiny_model("gemma2", sliding_window=8)
    with pytest.raises(Unsupported, match=r"does not run layers|cannot be trained"):
        head = new_mtp(windowed)
        head.step(torch.tensor([[7]]), torch.zeros(1, 1, 64), torch.zeros(1, 1).long(), UnrolledAttention())
