"""`generate(assistant=...)` says what an unpatched model says, with every argument of transformers' `generate` that it
keeps."""

from __future__ import annotations

import pytest
import torch
from helpers.generate import NEVER, TREE, Oracle, free, prompts, same, shallow_model, stats
from transformers import GenerationConfig

import fastspec
from fastspec.generation import target


def test_the_two_drafters_differ_as_the_cases_need(pairs):
    """The perfect head fills every path; the random one is seldom right."""
    for kind, least, most in (("random", 1.0, 2.0), ("bigram", 4.0, 6.0)):
        same(pairs[kind], TREE, prompts(9), max_new_tokens=48, eos_token_id=NEVER)
        assert least <= stats(pairs[kind][1]).acceptance_length <= most


@pytest.mark.parametrize("lengths", [(1,), (7,), (9, 9), (3, 12, 1, 7)])
def test_greedy(pair, assistant, lengths):
    same(pair, assistant, prompts(*lengths), eos_token_id=NEVER)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 13])
def test_length_limits_are_exact(pair, assistant, count):
    inputs = prompts(4, 8)
    out = same(pair, assistant, inputs, max_new_tokens=count, eos_token_id=NEVER)
    assert out.shape[1] == 8 + count
    same(pair, assistant, inputs, max_new_tokens=None, max_length=8 + count, eos_token_id=NEVER)
    report = stats(pair[1])
    assert report.emitted == 2 * count
    assert report.round_tokens >= report.emitted - 2


@pytest.mark.parametrize("place", range(6))
def test_end_tokens_at_every_place_of_a_round(pair, assistant, place):
    inputs = prompts(5, 3, 8)
    texts = free(pair[0], inputs)
    ends = [texts[0][place], texts[1][2 * place]]
    same(pair, assistant, inputs, eos_token_id=ends)
    same(pair, assistant, inputs, eos_token_id=ends[0], pad_token_id=96)
    same(pair, assistant, {k: v[:1] for k, v in inputs.items()}, eos_token_id=ends)


@pytest.mark.each_value
def test_min_new_tokens_holds_the_end_back(pair, assistant):
    inputs = prompts(5, 3)
    ends = [row[2] for row in free(pair[0], inputs)]
    out = same(pair, assistant, inputs, eos_token_id=ends, min_new_tokens=9)
    assert out.shape[1] - 5 >= 9
    same(pair, assistant, inputs, eos_token_id=ends, min_length=9)


@pytest.mark.each_value
def test_labels_of_a_trainers_batch_are_taken_and_not_read(pair, assistant):
    inputs = prompts(5, 3)
    out = same(pair, assistant, inputs | {"labels": inputs["input_ids"]}, eos_token_id=NEVER)
    assert out.tolist() == same(pair, assistant, inputs, eos_token_id=NEVER).tolist()


@pytest.mark.each_value
@pytest.mark.parametrize("spread", [2, 3])
def test_num_return_sequences(pair, assistant, spread):
    out = same(pair, assistant, prompts(4, 6), do_sample=True, top_k=1, num_return_sequences=spread, eos_token_id=NEVER)
    assert out.shape[0] == 2 * spread


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options", [{}, {"repetition_penalty": 1.3}, {"do_sample": True, "top_k": 1, "temperature": 0.7}]
)
def test_scores_and_logits(pair, assistant, options):
    """Equal within the rounding of fp32 sums taken in another order over 97 logits of size about 10."""
    inputs = prompts(5, 3, 8)
    ends = [row[2 + 3 * i] for i, row in enumerate(free(pair[0], inputs))]
    options = {
        "do_sample": False,
        "max_new_tokens": 12,
        "eos_token_id": ends,
        "return_dict_in_generate": True,
        **options,
    }
    wanted = {"output_scores": True, "output_logits": True}
    expected = pair[0].generate(**inputs, **options, **wanted)
    got = pair[1].generate(**inputs, **options, **wanted, assistant=assistant)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert type(got) is type(expected)
    for name in ("scores", "logits"):
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert len(ours) == len(theirs) == got.sequences.shape[1] - 8
        for a, b in zip(
            ours, theirs, strict=True
        ):  # of rows that have ended too: they read padding, as in plain decoding
            assert a.dtype == torch.float32
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
    lean = pair[1].generate(**inputs, **options, assistant=assistant)
    assert lean.scores is None and lean.logits is None
    assert lean.fastspec.assistant == getattr(assistant, "name", assistant)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "assistant",
    ["autoregressive", "nasd", fastspec.Speculative(early_exit=1), fastspec.ContinuousBatch("nasd", rows=1)],
)
def test_scores_and_logits_of_every_step_are_in_fp32(dtype, assistant):
    """The type in which plain decoding gives them, whatever the model computes in."""
    model = fastspec.patch(shallow_model().to(dtype))
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    out = model.generate(**prompts(4, 7), **asked, do_sample=False, max_new_tokens=5, assistant=assistant)
    assert {each.dtype for each in (*out.scores, *out.logits)} == {torch.float32}


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}, {"top_k": 20, "top_p": 0.9}])
def test_a_seed_decides_the_sample(pairs, assistant, options):
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        out = pairs["random"][1].generate(
            **prompts(5, 3),
            do_sample=True,
            temperature=3.0,
            max_new_tokens=12,
            assistant=assistant,
            eos_token_id=NEVER,
            **options,
        )
        texts.append(out.tolist())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.each_value
def test_a_generation_config_and_inputs_by_name(pair, assistant):
    plain, patched = pair
    ids = prompts(7)["input_ids"]
    config = GenerationConfig(
        max_new_tokens=11, do_sample=False, repetition_penalty=1.1, eos_token_id=NEVER, pad_token_id=0
    )
    expected = plain.generate(inputs=ids, generation_config=config).tolist()
    assert patched.generate(inputs=ids, generation_config=config, assistant=assistant).tolist() == expected
    assert patched.generate(ids, config, assistant=assistant).tolist() == expected


@pytest.mark.each_value
def test_padding_is_inferred_from_the_pad_token(pair, assistant):
    inputs = prompts(4, 9)
    same(pair, assistant, {"input_ids": inputs["input_ids"]}, eos_token_id=NEVER)


@pytest.mark.each_value
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_prompts_of_several_prefill_chunks(pair, assistant, chunk, monkeypatch):
    for name in ("NARROW", "WIDE"):
        monkeypatch.setattr(target, name, chunk)
    same(pair, assistant, prompts(33, 5, 17), eos_token_id=NEVER)


@pytest.mark.each_value
def test_texts_longer_than_a_bucket_of_attended_slots(pair, assistant):
    same(pair, assistant, prompts(120, 3), max_new_tokens=40, eos_token_id=NEVER)


@pytest.mark.each_value
@pytest.mark.parametrize("known", [{0}, {1}, {0, 1}, set()])
@pytest.mark.parametrize("count", [1, 2, 5, 7, 15])
def test_a_row_that_runs_past_its_limit_while_others_lag(pair, known, count):
    inputs = prompts(6, 6)
    oracle = Oracle(free(pair[0], inputs, 40), known)
    same(pair, oracle, inputs, max_new_tokens=count, eos_token_id=NEVER)
    if count == 15 and known == {0, 1}:
        assert stats(pair[1]).acceptance_length == 7.0
