"""Programs that compare: in bf16 on a GPU lm-eval's scores hang on no assistant, and a trainer's log-probabilities are
those of generation, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.clients import HEAD, MARKS, QUESTIONS, asked, chats
from helpers.devices import ON_CUDA
from helpers.lm_eval import answered, evaluated, task

import fastspec

pytestmark = [*MARKS, *ON_CUDA, pytest.mark.usefixtures("one_process")]
SUBJECTS = "rivers", "numbers", "birds", "trains", "glass", "bread", "tides", "maps"
ROWS = [{"q": f"Write {count} short lines about {subject}.", "label": 0} for subject in SUBJECTS for count in (2, 3, 5)]


@pytest.fixture(scope="module")
def model(smollm2) -> Any:
    return copy.deepcopy(smollm2[0]).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("batch", [1, 8])
def test_lm_eval_gives_the_same_scores_with_and_without_an_assistant(model, tokenizer, batch):
    told = answered(rows=ROWS, tokens=96)
    likely = task(
        "likely",
        rows=ROWS,
        output_type="loglikelihood_rolling",
        doc_to_target="{{q}}",
        metric_list=[{"metric": "word_perplexity"}],
    )
    found = {}
    for assistant in ("autoregressive", "eagle3", "nasd"):
        with fastspec.patched(model, eagle3=HEAD, assistant=assistant, exact=True):
            assert fastspec.report(model).exact
            found[assistant] = evaluated(model, tokenizer, [told, likely], batch)
            calls = fastspec.report(model).calls
            if assistant == "eagle3":
                assert sum(call.round_tokens for call in calls) > 1.5 * sum(call.row_rounds for call in calls)
    assert found["eagle3"] == found["nasd"] == found["autoregressive"]


def test_grpo_s_rollouts_have_the_log_probabilities_that_a_text_is_scored_with(model, tokenizer, tmp_path):
    """After every step, of which each has changed the weights."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    inputs = {name: each.cuda() for name, each in asked(tokenizer, *QUESTIONS[:2]).items()}
    seen: list[tuple[torch.Tensor, bool]] = []

    class Compare(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            training = served.training
            served.eval()
            said = served.generate(
                **inputs, max_new_tokens=24, do_sample=True, return_dict_in_generate=True, output_logits=True
            )
            served.train(training)
            start = inputs["input_ids"].shape[1]
            drawn = torch.stack(said.logits, 1).float().log_softmax(-1)
            drawn = drawn.gather(-1, said.sequences[:, start:, None])[..., 0]
            mask = torch.cat((inputs["attention_mask"], torch.ones_like(said.sequences[:, start:])), 1)
            scored = fastspec.log_probs(served, said.sequences, mask)[:, start - 1 :]
            rows = said.sequences[:, start:] != tokenizer.pad_token_id
            seen.append((served.lm_head.weight.detach().clone(), scored[rows].equal(drawn[rows])))

    served = fastspec.patch(copy.deepcopy(model), eagle3=HEAD, assistant="eagle3", exact=True)
    sizes = {"max_steps": 3, "per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 24}
    config = GRPOConfig(
        output_dir=str(tmp_path), report_to="none", save_strategy="no", bf16=False, learning_rate=1e-3, **sizes
    )
    rows = Dataset.from_list([{"prompt": chat} for chat in chats(*QUESTIONS)])
    trainer = GRPOTrainer(
        model=served,
        reward_funcs=lambda completions, **_: [float(len(set(chat[0]["content"]))) for chat in completions],
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[Compare()],
    )
    trainer.train()
    assert len(seen) == 3 and all(equal for _, equal in seen)
    assert not seen[0][0].equal(seen[-1][0])
    assert fastspec.report(served).calls
