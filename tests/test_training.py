"""Training on the CPU: a small target that can be learned, a head that learns it, and a run that goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from fastspec.training.config import TrainConfig
from fastspec.training.data import Texts, draft_vocabulary, plan_batches
from fastspec.training.regenerate import answer
from fastspec.training.trainer import Trainer

VOCAB = 128


def small_target(seed: int = 0) -> LlamaForCausalLM:
    """A Llama whose next token follows mostly from the last one: its LM head is tied to a shifted embedding."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    embed = torch.randn(VOCAB, 64)
    model.model.embed_tokens.weight.copy_(embed)
    follow = torch.randperm(VOCAB)
    model.lm_head.weight[follow] = embed * 0.3
    return model


def small_texts(model: LlamaForCausalLM, count: int, config: TrainConfig) -> Texts:
    rng = np.random.default_rng(count)
    prompts = [rng.integers(2, VOCAB, size=int(rng.integers(9, 20))).tolist() for _ in range(count)]
    return answer(model, prompts, rng.random(count) < 0.5, config, eos=None)


def settings(folder: Path, **changes: object) -> TrainConfig:
    base = {
        "target": "small", "output": str(folder), "answers": ("none",), "draft_vocab_size": 96, "intermediate_size": 64, "epochs": 6.0,
        "batch_tokens": 512, "length_multiple": 16, "max_length": 256, "ttt_steps": 4, "learning_rate": 3e-3, "warmup_steps": 5,
        "mixed_precision": "no", "new_tokens": 32, "checkpoint_every": 0, "validate_every": 0, "progress": False,
    }  # fmt: skip
    return TrainConfig(**{**base, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Texts, Texts]:
    model = small_target()
    config = settings(tmp_path_factory.mktemp("texts"))
    return model, small_texts(model, 160, config), small_texts(model, 24, config)


def test_acceptance_rises(material: tuple[LlamaForCausalLM, Texts, Texts], tmp_path: Path) -> None:
    model, texts, heldout = material
    trainer = Trainer(settings(tmp_path), model, texts, heldout, Accelerator(cpu=True))
    before = trainer.validate()["top1"]
    trainer.run()
    after = trainer.validate()["top1"]
    print(before, after)
    assert after > before + 0.5
    assert {p.name for p in tmp_path.iterdir()} >= {"model.safetensors", "config.json", "README.md", "state.pt"}


def test_resumed_run_equals_one_run(material: tuple[LlamaForCausalLM, Texts, Texts], tmp_path: Path) -> None:
    model, texts, heldout = material
    one = Trainer(settings(tmp_path / "one", epochs=1.0), model, texts, heldout, Accelerator(cpu=True))
    one.run()
    first = Trainer(settings(tmp_path / "two", epochs=1.0), model, texts, heldout, Accelerator(cpu=True))
    first.run(limit=0.3)
    stopped = first.progress.step
    second = Trainer(settings(tmp_path / "two", epochs=1.0), model, texts, heldout, Accelerator(cpu=True))
    assert second.progress.step == stopped
    second.run()
    assert second.progress.step == one.progress.step
    for a, b in zip(one.head.parameters(), second.head.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_answers_equal_generate() -> None:
    model = small_target(3)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB, size=n).tolist() for n in (1, 7, 12, 5)]
    config = settings(Path("unused"), new_tokens=40)
    texts = answer(model, prompts, np.zeros(4, bool), config, eos=1)
    for index, prompt in enumerate(prompts):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=1, pad_token_id=0)[0].tolist()
        assert texts.text(index)[0].tolist() == expected


def test_texts_survive_saving(tmp_path: Path) -> None:
    texts = Texts.of([([1, 2, 3], [False, True, True]), ([4], [False]), ([5, 60000], [False, True])])
    texts.save(tmp_path / "x.npz")
    again = Texts.load(tmp_path / "x.npz")
    for name in ("tokens", "lengths", "answer"):
        np.testing.assert_array_equal(getattr(texts, name), getattr(again, name))
    vocabulary, share = draft_vocabulary(again, 2, 60001)
    assert vocabulary.tolist() == [2, 3] and share == pytest.approx(2 / 3)


def test_plan_covers_every_text_once() -> None:
    lengths = np.random.default_rng(1).integers(1, 300, size=257)
    groups = plan_batches(lengths, 1024, 64, np.random.default_rng(0))
    assert sorted(np.concatenate(groups).tolist()) == list(range(257))
    for group in groups:
        width = -(-lengths[group].max() // 64) * 64
        assert len(group) == 1 or width * len(group) <= 1024
