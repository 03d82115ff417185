"""Trainers that put a forward of their own on the model and change its weights: TRL at its defaults, and accelerate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.clients import HEAD, MARKS, QUESTIONS, agree, answers, asked, drafting
from helpers.page import shown

import fastspec

pytestmark = [*MARKS, pytest.mark.usefixtures("one_process")]
COUNT = 16


@pytest.fixture
def served(smollm2) -> Any:
    """A patched copy of SmolLM2, to be trained."""
    return fastspec.patch(copy.deepcopy(smollm2[0]), eagle3=HEAD, assistant="eagle3")


def settings(path: Any, **over: Any) -> dict[str, Any]:
    """Two steps on the CPU; all else, bf16=True included, is the trainer's default."""
    made = {"output_dir": str(path), "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-4, "seed": 0}
    return {**made, "use_cpu": True, "report_to": "none", "save_strategy": "no", **over}


def twin(smollm2: Any, trained: Any) -> Any:
    """An unpatched model with a trained one's weights and the forward that a trainer has left on it."""
    fastspec.unpatch(trained)
    made = copy.deepcopy(trained)
    fastspec.patch(trained, eagle3=HEAD, assistant="eagle3")
    return made


def moved(model: Any, before: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_sft(served, smollm2, tokenizer, tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    inputs = asked(tokenizer, *QUESTIONS[:2])
    rows = [
        {"messages": [{"role": "user", "content": "What are you?"}, {"role": "assistant", "content": "A parrot."}]}
    ] * 4
    trainer = SFTTrainer(
        model=served,
        args=SFTConfig(**settings(tmp_path)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    assert trainer.args.bf16
    assert fastspec.report(served).mode == "adapter llama"  # TRL's forward calls the original
    trainer.train()
    assert moved(served, smollm2[0].state_dict())
    weights = trainer.accelerator.unwrap_model(served, keep_fp32_wrapper=False).eval()
    assert weights is served
    expected = answers(twin(smollm2, served), inputs, COUNT)
    with drafting(served, calls=1):
        assert answers(served, inputs, COUNT) == expected
    assert fastspec.report(served).mode == "adapter llama"


def test_grpo(served, smollm2, tokenizer, tmp_path):
    """The page's snippet: each step's rollouts are drafted, under bf16 autocast, while the weights change, and so is
    the call behind it."""
    inputs = asked(tokenizer, *QUESTIONS[:1])
    names = {"model": served, "tokenizer": tokenizer, "questions": QUESTIONS, "inputs": inputs, "folder": str(tmp_path)}
    with drafting(served, calls=3):
        exec(shown("GRPOTrainer"), names)
    assert names["config"].bf16 and names["config"].max_steps == 2
    assert names["model"] is served and moved(served, smollm2[0].state_dict())
    expected = twin(smollm2, served).generate(**inputs, max_new_tokens=24, do_sample=False)
    assert torch.equal(names["answer"], expected)


def test_accelerate_prepare(served, smollm2, tokenizer):
    from accelerate import Accelerator

    inputs, accelerator = asked(tokenizer, *QUESTIONS[:2]), Accelerator(cpu=True, mixed_precision="no")
    prepared = accelerator.prepare(served)
    with drafting(prepared, calls=1):
        assert answers(prepared, inputs, COUNT) == answers(smollm2[0], inputs, COUNT)


def test_accelerate_prepare_in_bf16(served, tokenizer):
    """Every pass runs under autocast there, in plain transformers too; the mode that it puts assisted calls into is
    named."""
    from accelerate import Accelerator

    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(served)
    with pytest.warns(UserWarning, match="generic mode, which is slower: LlamaForCausalLM has a forward .*accelerate"):
        agree(prepared, asked(tokenizer, QUESTIONS[0]), COUNT)
