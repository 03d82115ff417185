"""Training a head of the original EAGLE-1/2 format: its loss by plain loops, its start, its files, and what it
drafts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers.examples import examples
from helpers.models import tiny_head
from helpers.training import VOCAB, save_with_tokenizer, settings, small_target, small_texts, write_prompts
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

import fastspec
from fastspec.errors import Unsupported
from fastspec.generation.heads.load import read_checkpoint
from fastspec.generation.heads.module import EagleHead
from fastspec.patches.assistants.heads import load_head
from fastspec.programs.cli.app import app
from fastspec.programs.training.data import TextBatch, Texts, batches
from fastspec.programs.training.heads import head_for, start_from_features
from fastspec.programs.training.target import TargetReader
from fastspec.programs.training.trainer import Trainer
from fastspec.programs.training.ttt import FEATURE_LOSS, TrainingTimeTest

Material = tuple[LlamaForCausalLM, Texts, Texts]


def eagle(folder: Path, **changes: object) -> Any:
    return settings(folder, **{"kind": "eagle", "draft_vocab_size": 0, "decay": 0.8, **changes})


def bent_target(seed: int = 0) -> LlamaForCausalLM:
    """A target whose layers weigh more than its embedding, so that no linear guess of its features is right."""
    model = small_target(seed, peak=0.25)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.mul_(60)
        layer.mlp.up_proj.weight.mul_(8)
    return model


def made_head(model: LlamaForCausalLM, seed: int, scale: float = 0.1) -> EagleHead:
    torch.manual_seed(seed)
    head = EagleHead(head_for(eagle(Path("none"), intermediate_size=48), model, VOCAB)).requires_grad_(False)
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=scale)
    head.bind(model.get_input_embeddings(), model.get_output_embeddings())
    return head


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    model = bent_target()
    config = eagle(tmp_path_factory.mktemp("texts"))
    return model, small_texts(model, 160, config), small_texts(model, 24, config)


@pytest.fixture(scope="module")
def trained(material: Material, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, float]:
    """A finished run, and its acceptance before the first step."""
    config = eagle(tmp_path_factory.mktemp("head"), epochs=2.0, learning_rate=1e-2)
    trainer = Trainer(config, *material, Accelerator(cpu=True))
    before = trainer.validate()["top1"]
    trainer.run()
    trainer.finish()
    return trainer, before


class Plain:
    """An attention that keeps every key and value, with a dense causal mask."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.kept.append((k, v))
        group = q.shape[2] // k.shape[2]
        keys, values = (
            torch.cat(parts, 1).repeat_interleave(group, 2).transpose(1, 2) for parts in zip(*self.kept, strict=True)
        )
        count, seen = q.shape[1], keys.shape[2]
        mask = torch.ones(count, seen, dtype=torch.bool).tril(seen - count)
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask).transpose(1, 2)


def row_by_row(
    head: EagleHead, model: LlamaForCausalLM, ids: Tensor, where: list[int], steps: int
) -> tuple[list[float], list[list[bool]]]:
    """The loss and the hits of every step for one text ids [T], every drafting row by itself.

    Row t drafts from the pairs (token s + 1, true feature of s) for s <= t, then from its own states, at positions t +
    1, t + 2 and so on.
    """
    out = model.model(ids[None]).last_hidden_state[0]
    logits = model.lm_head(out)
    sums, used, hits = [0.0] * steps, [0] * steps, [[False] * len(where) for _ in range(steps)]
    for t in range(len(ids) - 1):
        attend = Plain()
        state = head.step(ids[None, 1 : t + 2], out[None, : t + 1], torch.arange(t + 1)[None], attend)[:, -1:]
        for step, meant in enumerate(range(t + 1, min(t + 1 + steps, len(ids)))):
            if step:
                state = head.step(ids[None, meant : meant + 1], state, torch.tensor([[meant - 1]]), attend)
            if meant not in where:
                continue
            ours = model.lm_head(state[0, 0]).log_softmax(-1)
            cross = -(logits[meant].softmax(-1) * ours).sum()
            far = (state[0, 0] - out[meant]).abs()
            distance = torch.where(far < 1, far**2 / 2, far - 0.5).mean()
            sums[step] += float(cross + FEATURE_LOSS * distance)
            used[step] += 1
            hits[step][where.index(meant)] = bool(ours.argmax() == logits[meant].argmax())
    return [total / max(1, count) for total, count in zip(sums, used, strict=True)], hits


@examples(12)
@given(data=st.data())
@torch.no_grad()
def test_loss_equals_drafting_row_by_row(data: st.DataObject) -> None:
    seed, length, steps = (data.draw(st.integers(*bounds)) for bounds in ((0, 99), (3, 13), (1, 5)))
    where = sorted(data.draw(st.sets(st.integers(1, length - 2), min_size=1)))
    model = small_target(seed)
    head, ids = made_head(model, seed + 1), torch.randint(2, VOCAB, (1, length))
    padded = torch.cat((ids, ids.new_zeros(1, data.draw(st.integers(0, 4)))), 1)
    teacher = TargetReader(model, (), torch.arange(VOCAB), chunk=3).read(padded, torch.tensor(where))
    total, losses, hits = TrainingTimeTest(head, steps, 0.7)(padded, teacher, data.draw(st.integers(0, where[0])))
    expected, right = row_by_row(head, model, ids[0], where, steps)
    # Sums of a few hundred fp32 terms of size 1 to 10, in another order.
    torch.testing.assert_close(losses.tolist(), expected, rtol=2e-4, atol=2e-4)
    assert hits.tolist() == right
    assert float(total) == pytest.approx(sum(0.7**i * loss for i, loss in enumerate(expected)), rel=2e-4, abs=2e-4)


@examples(20)
@given(data=st.data())
def test_rows_before_every_answer_may_be_left_out(data: st.DataObject) -> None:
    """Of a batch with GQA, right-padded: the loss, what hits, and every gradient."""
    steps, first = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    model = small_target(data.draw(st.integers(0, 9)))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    head = tiny_head(model, taps=(1, 3), num_key_value_heads=data.draw(st.sampled_from([1, 2, 4])))
    head.requires_grad_(True).bind(model.get_input_embeddings(), None)
    ids = torch.randint(2, VOCAB, (3, 18))
    judged = torch.zeros(3, 18, dtype=torch.bool)
    for row, end in enumerate((17, 14, 16)):
        judged[row, first + row % 2 : end] = True
    where = judged.flatten().nonzero().flatten()
    teacher = TargetReader(model, (1, 3), torch.arange(head.config.draft_vocab_size)).read(ids, where)
    unrolled = TrainingTimeTest(head, steps, 0.8)
    found = []
    for least in (0, first):
        head.zero_grad()
        loss, losses, hits = unrolled(ids, teacher, least)
        loss.backward()
        found.append(
            [
                loss.detach(),
                losses,
                hits,
                *[parameter.grad for parameter in head.parameters() if parameter.grad is not None],
            ]
        )
    for whole, less in zip(*found, strict=True):
        torch.testing.assert_close(less, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "eagle3, shared LM head, norms", "eagle"])
def test_compilation_changes_neither_loss_nor_gradients(kind: str, tmp_path: Path) -> None:
    """Over batches of several shapes: parts are compiled once for any number of rows, and a second time for a first
    diagonal and for a batch whose prompts' rows are left out."""
    model = small_target()
    more = {"eagle": {"kind": "eagle", "draft_vocab_size": 0, "decay": 0.8}, "eagle3": {"taps": (1, 2, 4)}}
    shared = {"taps": (1, 2, 4), "share_lm_head": True, "norms": True, "loss": "hybrid"}
    config = settings(tmp_path, ttt_steps=4, **more.get(kind, shared))
    texts = small_texts(model, 60, config)
    trainer = Trainer(config, model, texts, texts, Accelerator(cpu=True))
    torch._dynamo.reset()
    counted = CompileCounterWithBackend("inductor")
    shapes = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=counted))
        compiled = TrainingTimeTest(trainer.head, 4, 0.8, loss=config.loss, compile=True)
        for batch in (
            *batches(trainer.texts, trainer._plan(0)[:6], 16),
            *batches(trainer.texts, [np.arange(3), np.arange(9)], 16),
        ):
            shapes.add(tuple(batch.ids.shape))
            inputs = (batch.ids, trainer.reader.read(batch.ids, batch.where), batch.first)
            found = []
            for module in (trainer.module, compiled):
                trainer.head.zero_grad()
                loss, losses, hits = module(*inputs)
                loss.backward()
                found.append(
                    [loss.detach(), losses, hits, *(p.grad for p in trainer.head.parameters() if p.grad is not None)]
                )
            for mine, theirs in zip(*found, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    assert len(shapes) > 3 and counted.frame_count <= 10


def test_start_is_the_best_linear_guess() -> None:
    model = bent_target(1)
    torch.manual_seed(0)
    ids = torch.randint(2, VOCAB, (40, 16))
    where = torch.arange(ids.numel()).view_as(ids)[:, 3:-1].flatten()
    head = made_head(model, 0)
    start_from_features(
        head,
        model,
        [
            TextBatch(ids[:13], where[: 12 * 13], np.arange(13)),
            TextBatch(ids[13:], where[12 * 13 :] - 13 * 16, np.arange(13, len(ids))),
        ],
    )
    with torch.no_grad():
        features = model.model(ids).last_hidden_state
        known = torch.cat((model.model.embed_tokens(ids[:, 3:-1]), features[:, 2:-2]), -1).flatten(0, 1)
        goal = features[:, 3:-1].flatten(0, 1)
        weight = head.fc.weight.clone()

        def error(change: Tensor) -> float:
            return float((known @ (weight + change).T - goal).square().sum())

        best = torch.linalg.lstsq(known.double(), goal.double()).solution.T
        # A ridge of 1 % of the mean square costs little beside the exact least squares, and no direction improves on it
        # by much.
        assert error(torch.zeros_like(weight)) < 1.05 * error(best.float() - weight)
        assert error(torch.zeros_like(weight)) < 0.9 * float((goal - goal.mean(0)).square().sum())


def test_acceptance_rises_and_drafting_gets_it(material: Material, trained: tuple[Trainer, float]) -> None:
    trainer, before = trained
    assert trainer.validate()["top1"] > before + 0.3
    model = material[0]
    ids = torch.stack([torch.from_numpy(material[2].text(i)[0][:9]).long() for i in range(4)])
    plain = model.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    lengths = {}
    for name, source in (("trained", trainer.folder), ("random", made_head(model, 5))):
        with fastspec.patched(model, eagle=source, eagle2=source):
            for assistant in ("eagle2", "eagle"):
                found = model.generate(
                    ids, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0, assistant=assistant
                )
                assert torch.equal(found, plain), "a head changes how fast the answer comes, never the answer"
                lengths[name, assistant] = fastspec.report(model).last.acceptance_length
    for assistant in ("eagle2", "eagle"):
        assert lengths["trained", assistant] > lengths["random", assistant] + 0.5


def test_files_hold_the_head(material: Material, trained: tuple[Trainer, float]) -> None:
    trainer, _ = trained
    checkpoint = read_checkpoint(trainer.folder)
    assert checkpoint.dialect == "fastspec" and checkpoint.config == trainer.head.config
    assert not checkpoint.notes
    for name, value in trainer.head.state_dict().items():
        torch.testing.assert_close(checkpoint.state[name], value if name == "d2t" else value.bfloat16(), rtol=0, atol=0)
    loaded = load_head(trainer.folder, material[0])
    assert loaded.lm_head is None and loaded.norm is None
    raw = json.loads((trainer.folder / "config.json").read_text())
    assert raw["bias"] is False and "draft_vocab_size" not in raw and "eagle_config" not in raw
    card = (trainer.folder / "README.md").read_text()
    assert "eagle2=" in card and "tokens a round" in card and "taps" not in card


@pytest.mark.slow
def test_resumed_run_equals_one_run(material: Material, tmp_path: Path) -> None:
    Trainer(eagle(tmp_path / "one", epochs=1.5), *material, Accelerator(cpu=True)).run()
    first = Trainer(eagle(tmp_path / "two", epochs=1.5), *material, Accelerator(cpu=True))
    assert first.run(limit=1e-6).done(first.config) < 1
    Trainer(first.config, *material, Accelerator(cpu=True)).run()
    a, b = (torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("one", "two"))
    assert a["progress"]["step"] == b["progress"]["step"] > 0
    torch.testing.assert_close(a["head"], b["head"], rtol=0, atol=0)
    torch.testing.assert_close(a["optimizer"]["state"], b["optimizer"]["state"], rtol=0, atol=0)
    with pytest.raises(Unsupported, match="kind 'eagle'"):
        Trainer(settings(tmp_path / "one", epochs=1.5), *material, Accelerator(cpu=True))


@pytest.mark.parametrize(
    "bad", [{"taps": (1, 2)}, {"hidden_size": 32}, {"hidden_size": 64}, {"draft_vocab_size": 96}, {"kind": "eagle2"}]
)
def test_settings_that_cannot_be_are_refused(bad: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="eagle"):
        eagle(tmp_path, **bad)


def test_the_command_trains_it(tmp_path: Path) -> None:
    save_with_tokenizer(small_target(), tmp_path / "model")
    options = {
        "target": tmp_path / "model",
        "kind": "eagle",
        "prompts": write_prompts(tmp_path / "prompts.jsonl", 40),
        "epochs": 1,
        "output": tmp_path / "head",
        "new-tokens": 16,
        "max-length": 128,
        "batch-tokens": 512,
        "mixed-precision": "no",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    done = CliRunner().invoke(app, ["train", *arguments])
    assert done.exit_code == 0 and "head written to" in done.output, done.output
    fits = CliRunner().invoke(app, ["inspect", str(tmp_path / "head"), "--target", str(tmp_path / "model")])
    assert fits.exit_code == 0 and "EAGLE-1/2" in fits.output
    refused = CliRunner().invoke(app, ["train", *arguments, "--draft-vocab-size", "96"])
    assert refused.exit_code == 2 and "from the target" in refused.output
