"""lm-eval's HFLM with a patched model: generated answers and log-likelihoods."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.clients import MARKS, drafting
from helpers.lm_eval import answered, evaluated, task
from helpers.mtp import loaded

import fastspec

pytestmark = MARKS


def chosen() -> Any:
    return task(
        "chosen",
        output_type="multiple_choice",
        doc_to_target="label",
        doc_to_choice=["four", "Paris", "blue", "five"],
        metric_list=[{"metric": "acc"}],
    )


@pytest.mark.parametrize("batch", [1, 4])
def test_generated_answers_and_scores(pair, tokenizer, batch):
    """`until` is a criterion that remembers which rows are done: in a batch it must see every step of all rows."""
    original, served = pair
    expected = evaluated(original, tokenizer, [answered()], batch)
    with drafting(served, calls=4 // batch):
        assert evaluated(served, tokenizer, [answered()], batch) == expected
    lengths = [len(sample[0][0]) for sample in expected[0]["answered"]]
    assert len(set(lengths)) > 1  # rows end at different steps


def test_log_likelihoods_are_the_models_own(pair, tokenizer):
    original, served = pair
    assert evaluated(served, tokenizer, [chosen()], 4) == evaluated(original, tokenizer, [chosen()], 4)


def test_the_draft_layer_of_a_models_own_checkpoint(tokenizer, tmp_path):
    """`assistant="mtp"` as the default of a model that was loaded from files."""
    model, _ = loaded("qwen3_5_text", tmp_path, vocab_size=len(tokenizer))
    expected = evaluated(model, tokenizer, [answered()], 4)
    with fastspec.patched(model, assistant="mtp"), drafting(model, calls=1):
        assert evaluated(model, tokenizer, [answered()], 4) == expected


def test_a_server_answers_its_local_completions_model(pair, tokenizer):
    """Four requests at a time through `fastspec serve`: each is what `generate` gives alone, cut where a stop
    begins."""
    from helpers.serve import NAME, served
    from lm_eval import simple_evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    original, model = pair
    until, asked = ["\n\n", "Question:", "2017-01-01 2"], answered()

    def cut(text: str) -> str:
        return min((text.split(stop)[0] for stop in until), key=len)

    with served(model, rows=4, max_length=100, assistant="eagle3", tokenizer=tokenizer) as server:
        lm = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            model=NAME,
            tokenizer_backend=None,
            tokenized_requests=False,
            num_concurrent=4,
            max_retries=1,
        )
        found = simple_evaluate(lm, tasks=[asked], bootstrap_iters=0)
        assert server.metric("fastspec_acceptance_length") > 1
    for sample in found["samples"]["answered"]:
        ids = tokenizer(f"Question: {sample['doc']['q']}\nAnswer:", return_tensors="pt").input_ids
        emitted = original.generate(ids, max_new_tokens=24, do_sample=False, stop_strings=until, tokenizer=tokenizer)[
            0, ids.shape[1] :
        ]
        assert cut(sample["resps"][0][0]) == cut(tokenizer.decode(emitted, skip_special_tokens=True))


def test_a_server_s_log_likelihoods_are_those_of_the_hf_backend(pair, folder, tokenizer):
    """Of choices and of whole texts, by echoed prompts with their log-probabilities, as tokens and as texts."""
    from helpers.serve import NAME, served
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    original, model = pair
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_target": "{{q}}"}
    words = task("words", **rolling, metric_list=[{"metric": "word_perplexity"}])

    def scores(lm: Any) -> list[list[tuple[float, bool]]]:
        known = TaskManager(include_defaults=False)  # reading lm-eval's own tasks takes minutes
        found = simple_evaluate(lm, tasks=[chosen(), words], bootstrap_iters=0, task_manager=known)
        return [
            [resp[0] if isinstance(resp, list) else resp for resp in sample["resps"]]
            for name in ("chosen", "words")
            for sample in found["samples"][name]
        ]

    wanted = scores(HFLM(pretrained=original, tokenizer=tokenizer, batch_size=1))
    with served(model, rows=4, max_length=100, assistant="eagle3", tokenizer=tokenizer) as server:
        for tokenized in (True, False):
            lm = LocalCompletionsAPI(
                base_url=f"{server.url}/v1/completions",
                model=NAME,
                tokenizer_backend="huggingface",
                tokenizer=str(folder),
                tokenized_requests=tokenized,
                batch_size=2 if tokenized else 1,
                num_concurrent=2,
                max_length=99,
                max_retries=1,
            )
            got = scores(lm)
            assert len(got) == len(wanted) == 8
            for mine, theirs in zip(got, wanted, strict=True):
                for one, other in zip(mine, theirs, strict=True):
                    if isinstance(one, tuple):
                        assert one[1] == other[1]
                        one, other = one[0], other[0]
                    assert one == pytest.approx(other, abs=1e-3)
