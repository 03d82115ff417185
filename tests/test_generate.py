"""`generate(assistant=...)` says what an unpatched model says, with every argument of transformers' `generate` that it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_models import tiny_head, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

import fastspec
from fastspec.generation.eagle import drafter as drafter_module
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.patches import hf_model

LENGTH = 20
NEVER = 1000  # an end token outside the vocabulary
TREE = fastspec.Eagle3(depth=4, top_k=3, total_tokens=12)


def bigram(seed: int = 0) -> Any:
    """A target whose next token depends on the last one alone: its attention and feed-forward add nothing."""
    model = tiny_model(seed=seed)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.mul_(2.0)
    return model


def seer(model: Any) -> Any:
    """A head that knows a bigram target: each node attends to itself alone and outputs its token's normed embedding."""
    head = tiny_head(model, num_key_value_heads=4, attention_bias=True, taps=(0,))
    for parameter in (*head.fc.parameters(), *head.layers[0].self_attn.parameters(), head.layers[0].mlp.down_proj.weight):
        parameter.zero_()
    attention, eye = head.layers[0].self_attn, torch.eye(64)
    attention.q_proj.bias.fill_(60.0)  # equal queries and keys: the rotary embedding makes distance 0 win by far
    attention.k_proj.bias.fill_(60.0)
    attention.v_proj.weight.copy_(torch.cat((eye, -eye), 1))  # the token's embedding, less the residual that is fed back
    attention.o_proj.weight.copy_(eye)
    return head


MAKERS = {"random": (tiny_model, tiny_head), "bigram": (bigram, seer)}


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[Any, Any]]:
    """kind -> (the unpatched model, the same model patched); drafts are mostly wrong for "random" and all right for "bigram"."""
    made = {}
    for kind, (target, head) in MAKERS.items():
        model = target()
        made[kind] = (target(), fastspec.patch(model, eagle3=head(model)))
    return made


@pytest.fixture(params=["random", "bigram"])
def pair(request: pytest.FixtureRequest, pairs: dict[str, tuple[Any, Any]]) -> tuple[Any, Any]:
    return pairs[request.param]


@pytest.fixture(params=["autoregressive", "eagle3"])
def assistant(request: pytest.FixtureRequest) -> Any:
    return TREE if request.param == "eagle3" else request.param


def prompts(*lengths: int, seed: int = 0) -> dict[str, Tensor]:
    """Left-padded prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(6, 97, (length,), generator=generator)
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def free(model: Any, inputs: dict[str, Tensor], count: int = LENGTH, **options: Any) -> list[list[int]]:
    """What the unpatched model says when nothing ends it."""
    width = inputs["input_ids"].shape[1]
    return model.generate(**inputs, max_new_tokens=count, do_sample=False, eos_token_id=NEVER, **options)[:, width:].tolist()


def same(pair: tuple[Any, Any], assistant: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    plain, patched = pair
    options = {"do_sample": False, "max_new_tokens": LENGTH, **options}
    expected = plain.generate(**inputs, **options)
    got = patched.generate(**inputs, **options, assistant=assistant)
    assert got.tolist() == expected.tolist()
    return expected


def stats(patched: Any) -> Any:
    return fastspec.report(patched).last


def test_the_two_drafters_differ_as_the_cases_need(pairs):
    """The perfect head fills every path; the random one is seldom right."""
    for kind, least, most in (("random", 1.0, 2.0), ("bigram", 4.0, 6.0)):
        same(pairs[kind], TREE, prompts(9), max_new_tokens=48)
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


@pytest.mark.parametrize("place", range(8))
def test_end_tokens_at_every_place_of_a_round(pair, assistant, place):
    inputs = prompts(5, 3, 8)
    texts = free(pair[0], inputs)
    ends = [texts[0][place], texts[1][2 * place]]
    same(pair, assistant, inputs, eos_token_id=ends)
    same(pair, assistant, inputs, eos_token_id=ends[0], pad_token_id=96)
    same(pair, assistant, {k: v[:1] for k, v in inputs.items()}, eos_token_id=ends)


def test_min_new_tokens_holds_the_end_back(pair, assistant):
    inputs = prompts(5, 3)
    ends = [row[2] for row in free(pair[0], inputs)]
    out = same(pair, assistant, inputs, eos_token_id=ends, min_new_tokens=9)
    assert out.shape[1] - 5 >= 9
    same(pair, assistant, inputs, eos_token_id=ends, min_length=9)


@pytest.mark.parametrize("spread", [2, 3])
def test_num_return_sequences(pair, assistant, spread):
    out = same(pair, assistant, prompts(4, 6), do_sample=True, top_k=1, num_return_sequences=spread, eos_token_id=NEVER)
    assert out.shape[0] == 2 * spread


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 1},
        {"encoder_repetition_penalty": 2.0},
        {"suppress_tokens": [7, 8, 9]},
        {"begin_suppress_tokens": list(range(6, 60))},
        {"forced_eos_token_id": 7},
        {"exponential_decay_length_penalty": (3, 1.5)},
        {"renormalize_logits": True, "repetition_penalty": 1.2, "min_new_tokens": 4},
    ],
    ids=lambda options: next(iter(options)),
)
def test_built_in_processors(pair, assistant, options):
    same(pair, assistant, prompts(6, 2, 9), **options)


def test_bad_words_and_bias(pair, assistant):
    inputs = prompts(6, 2)
    texts = free(pair[0], inputs)
    same(pair, assistant, inputs, bad_words_ids=[[texts[0][3]], texts[1][4:6], texts[0][6:9]])
    same(pair, assistant, inputs, sequence_bias=[[[texts[0][2]], -9.0], [[11, 12], 6.0]])


def test_prefix_allowed_tokens_sees_each_row_with_its_own_tokens(pair, assistant):
    inputs = prompts(6, 6, 6)
    starts = inputs["input_ids"].tolist()

    def allowed(row: int, ids: Tensor) -> list[int]:
        assert ids[:6].tolist() == starts[row]
        return [token for token in range(6, 96) if token % 3 == (row + int(ids[-1])) % 3]

    same(pair, assistant, inputs, prefix_allowed_tokens_fn=allowed)


class Shift(LogitsProcessor):
    """A user's processor that looks at nothing but the scores."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(1, -1)


class Parity(LogitsProcessor):
    """A user's processor that looks at the tokens so far and at the row, and writes in place."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for row in range(input_ids.shape[0]):
            scores[row, (int(input_ids[row].sum()) + row) % 2 :: 2] -= 5.0
        return scores


@pytest.mark.parametrize("processor", [Shift, Parity])
def test_user_processors(pair, assistant, processor):
    same(pair, assistant, prompts(5, 9, 2), logits_processor=LogitsProcessorList([processor()]))


def test_stateful_user_processor_is_called_once_per_token(pair, assistant):
    """For a single row the calls are those of plain decoding, so that even a processor that counts them agrees."""

    class Counting(LogitsProcessor):
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.calls += 1
            return scores.roll(self.calls % 3, -1)

    texts = [model.generate(
        **prompts(5), do_sample=False, max_new_tokens=LENGTH, eos_token_id=NEVER, logits_processor=[Counting()], **extra
    ).tolist() for model, extra in zip(pair, ({}, {"assistant": assistant}), strict=True)]  # fmt: skip
    assert texts[0] == texts[1]


class Says(StoppingCriteria):
    """Stops the rows whose last token is one of these; `form` is the type of the answer."""

    def __init__(self, tokens: list[int], form: str = "rows") -> None:
        self.tokens, self.form = torch.tensor(tokens), form

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        done = torch.isin(input_ids[:, -1], self.tokens)
        return {"rows": done, "scalar": done.any(), "one": done.any()[None], "bool": bool(done.any())}[self.form]


@pytest.mark.parametrize("ends", [NEVER, None])
def test_user_criteria_stop_their_rows(pair, assistant, ends):
    inputs = prompts(5, 3, 8)
    texts = free(pair[0], inputs)
    criteria = StoppingCriteriaList([Says([row[3 + 4 * i] for i, row in enumerate(texts)])])
    plain, patched = pair
    for model in pair:
        model.generation_config.eos_token_id = ends
    try:
        same(pair, assistant, inputs, stopping_criteria=criteria)
        same(pair, assistant, {k: v[:2] for k, v in inputs.items()}, stopping_criteria=criteria)
    finally:
        plain.generation_config.eos_token_id = patched.generation_config.eos_token_id = 5


@pytest.mark.parametrize("form", ["scalar", "one", "bool"])
def test_user_criteria_may_answer_once_for_the_batch(pair, assistant, form):
    inputs = prompts(5)
    word = free(pair[0], inputs)[0][6]
    if form == "bool":  # transformers refuses it or not by version; the answer is clear
        options = {"do_sample": False, "max_new_tokens": LENGTH, "stopping_criteria": [Says([word], form)]}
        out = pair[1].generate(**inputs, **options, assistant=assistant)
        assert out[0, 5:].tolist().index(word) == out.shape[1] - 6
    else:
        same(pair, assistant, inputs, stopping_criteria=[Says([word], form)])


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One word per token id."""
    words = {f"w{i}": i for i in range(97)}  # w4 gives way: transformers needs one word that stands for letters
    words = {("abcdef" if word == "w4" else word): token for word, token in words.items()}
    raw = Tokenizer(models.WordLevel(words, unk_token="w3"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="w3", pad_token="w0", eos_token="w5")


def test_stop_strings(pair, assistant, tokenizer):
    inputs = prompts(5, 3)
    texts = free(pair[0], inputs)
    strings = [f"w{texts[0][4]}", f"w{texts[1][7]}"]
    out = same(pair, assistant, inputs, stop_strings=strings, tokenizer=tokenizer, eos_token_id=NEVER)
    assert out.shape[1] < 5 + LENGTH


class Recorder:
    """A streamer that writes down what it is given."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.events.append(value.tolist())

    def end(self) -> None:
        self.events.append("end")


class RoundRecorder(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[tuple[list[int], int]] = []

    def on_round(self, tokens: list[int], accepted: int) -> None:
        self.rounds.append((tokens, accepted))


def streamed(model: Any, streamer: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    model.generate(**inputs, do_sample=False, max_new_tokens=LENGTH, streamer=streamer, **options)
    return streamer


@pytest.mark.parametrize("lengths", [(5,), (5, 3, 8)])
def test_streamer_is_fed_as_by_transformers(pair, assistant, lengths):
    inputs = prompts(*lengths)
    ends = [row[3 + 2 * i] for i, row in enumerate(free(pair[0], inputs))]
    expected = streamed(pair[0], Recorder(), inputs, eos_token_id=ends).events
    assert streamed(pair[1], Recorder(), inputs, eos_token_id=ends, assistant=assistant).events == expected


def test_text_streamer_prints_the_same(pair, assistant, tokenizer, capsys):
    streamed(pair[0], TextStreamer(tokenizer, skip_prompt=True), prompts(5))
    expected = capsys.readouterr().out
    streamed(pair[1], TextStreamer(tokenizer, skip_prompt=True), prompts(5), assistant=assistant)
    assert capsys.readouterr().out == expected


def test_on_round_tells_which_tokens_were_drafted(pairs):
    patched = pairs["bigram"][1]
    recorder = streamed(patched, RoundRecorder(), prompts(5), eos_token_id=NEVER, assistant=TREE)
    said = [event[0] for event in recorder.events[1:-1]]
    assert [token for tokens, _ in recorder.rounds for token in tokens] == said
    assert all(0 <= accepted <= len(tokens) for tokens, accepted in recorder.rounds)
    assert recorder.rounds[0][1] == 0
    assert max(accepted for _, accepted in recorder.rounds) == 5
    assert all(len(tokens) == accepted + 1 for tokens, accepted in recorder.rounds[:-1])


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"do_sample": True, "top_k": 1, "temperature": 0.7}])
def test_scores_and_logits(pair, assistant, options):
    """Equal up to each row's end, within the rounding of fp32 sums taken in another order over 97 logits of size about 10."""
    inputs = prompts(5, 3, 8)
    ends = [row[2 + 3 * i] for i, row in enumerate(free(pair[0], inputs))]
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": ends, "return_dict_in_generate": True, **options}
    wanted = {"output_scores": True, "output_logits": True}
    expected = pair[0].generate(**inputs, **options, **wanted)
    got = pair[1].generate(**inputs, **options, **wanted, assistant=assistant)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert type(got) is type(expected)
    for name in ("scores", "logits"):
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert len(ours) == len(theirs) == got.sequences.shape[1] - 8
        running = torch.ones(3, dtype=torch.bool)
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a[running], b[running], rtol=1e-4, atol=1e-3)
            assert not a[~running].any()
            running &= ~torch.isin(got.sequences[:, 8 + step], torch.tensor(ends))
    lean = pair[1].generate(**inputs, **options, assistant=assistant)
    assert lean.scores is None and lean.logits is None
    assert lean.fastspec.assistant == ("autoregressive" if assistant == "autoregressive" else "eagle3")


def two_turns(model: Any, first: dict[str, Tensor], more: Tensor, cache: Any, own: bool, count: int, **options: Any) -> list[Any]:
    """Tokens of two turns of a chat, the second on the cache of the first, with the width of the cache after each."""
    options = {"do_sample": False, "max_new_tokens": count, "return_dict_in_generate": True, **options}
    one = model.generate(**first, **options, past_key_values=cache)
    widths = [one.past_key_values.get_seq_length()]
    if own:
        assert one.past_key_values is cache
    new = one.sequences.shape[1] - first["input_ids"].shape[1]
    said = (one.sequences[:, -new:] != 0).long()
    ids = torch.cat((one.sequences, more), 1)
    mask = torch.cat((first["attention_mask"], said, torch.ones_like(more)), 1)
    two = model.generate(input_ids=ids, attention_mask=mask, **options, past_key_values=one.past_key_values)
    widths.append(two.past_key_values.get_seq_length())
    return [one.sequences.tolist(), two.sequences.tolist(), widths]


@pytest.mark.parametrize("lengths", [(5,), (2, 9, 4)])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("count", [3, 17])
def test_a_second_turn_on_the_cache_of_the_first(pair, assistant, lengths, own, count):
    inputs, more = prompts(*lengths), prompts(*[3] * len(lengths), seed=7)["input_ids"]
    ends = [row[min(2 + 4 * i, count - 1)] for i, row in enumerate(free(pair[0], inputs))]
    for eos in (ends, NEVER):
        results = []
        for model, extra in zip(pair, ({}, {"assistant": assistant}), strict=True):
            cache = DynamicCache(config=model.config) if own else None
            results.append(two_turns(model, inputs, more, cache, own, count, eos_token_id=eos, **extra))
        assert results[1] == results[0]


def test_a_second_turn_far_behind_the_first(pair, assistant):
    """The past is longer than the new prompt by more than one bucket of attended slots."""
    inputs, more = prompts(150), prompts(2, seed=3)["input_ids"]
    expected = two_turns(pair[0], inputs, more, None, False, 5, eos_token_id=NEVER)
    assert two_turns(pair[1], inputs, more, None, False, 5, eos_token_id=NEVER, assistant=assistant) == expected


def test_a_cache_of_the_unpatched_model_and_back(pair, assistant):
    """The first turn plain and the second assisted, and the other way round, in a cache of the user that is changed in place."""
    inputs = prompts(3, 8)
    texts = []
    for first, second in ((None, None), (None, assistant), (assistant, None)):
        cache = DynamicCache(config=pair[1].config)
        options = {"do_sample": False, "eos_token_id": NEVER, "max_new_tokens": 9, "past_key_values": cache}
        ids = pair[1].generate(**inputs, **options, assistant=first)
        mask = torch.cat((inputs["attention_mask"], torch.ones(2, 9, dtype=torch.long)), 1)
        assert cache.get_seq_length() == ids.shape[1] - 1
        texts.append(pair[1].generate(ids, attention_mask=mask, **options, assistant=second).tolist())
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]


def test_rows_that_bring_unequal_shares_of_past_and_prompt(pair, assistant):
    """One row has a long past and a short prompt, the other the reverse; both pads lie in the middle of the mask."""
    past, ids = prompts(12, 2), prompts(2, 12, seed=5)
    options = {"do_sample": False, "max_new_tokens": 2, "eos_token_id": NEVER}
    texts = []
    for model, extra in zip(pair, ({}, {"assistant": assistant}), strict=True):
        cache = model(**past, use_cache=True).past_key_values
        whole = torch.cat((past["input_ids"], ids["input_ids"]), 1)
        mask = torch.cat((past["attention_mask"], ids["attention_mask"]), 1)
        texts.append(model.generate(whole, attention_mask=mask, past_key_values=cache, **options, **extra).tolist())
    assert texts[1] == texts[0]


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}, {"top_k": 20, "top_p": 0.9}])
def test_a_seed_decides_the_sample(pairs, assistant, options):
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        out = pairs["random"][1].generate(
            **prompts(5, 3), do_sample=True, temperature=3.0, max_new_tokens=12, assistant=assistant, eos_token_id=NEVER, **options
        )
        texts.append(out.tolist())
    assert texts[0] == texts[1] != texts[2]


def test_a_generation_config_and_inputs_by_name(pair, assistant):
    plain, patched = pair
    ids = prompts(7)["input_ids"]
    config = GenerationConfig(max_new_tokens=11, do_sample=False, repetition_penalty=1.1, eos_token_id=NEVER, pad_token_id=0)
    expected = plain.generate(inputs=ids, generation_config=config).tolist()
    assert patched.generate(inputs=ids, generation_config=config, assistant=assistant).tolist() == expected
    assert patched.generate(ids, config, assistant=assistant).tolist() == expected


def test_padding_is_inferred_from_the_pad_token(pair, assistant):
    inputs = prompts(4, 9)
    same(pair, assistant, {"input_ids": inputs["input_ids"]}, eos_token_id=NEVER)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_prompts_of_several_prefill_chunks(pair, assistant, chunk, monkeypatch):
    monkeypatch.setattr(hf_model, "PREFILL_CHUNK", chunk)
    monkeypatch.setattr(drafter_module, "PREFILL_CHUNK", chunk)
    same(pair, assistant, prompts(33, 5, 17), eos_token_id=NEVER)


def test_texts_longer_than_a_bucket_of_attended_slots(pair, assistant):
    same(pair, assistant, prompts(120, 3), max_new_tokens=40, eos_token_id=NEVER)


class Oracle:
    """A third party's assistant: chains of six tokens, right for the rows that it knows and wrong for the others."""

    name, taps, nodes, max_path = "oracle", None, 7, 7

    def __init__(self, texts: list[list[int]], known: set[int]) -> None:
        self.texts, self.known = texts, known

    def drafter(self, *, rows: int, capacity: int, device: Any, ops: Any) -> Oracle:
        self.place = torch.ones(rows, dtype=torch.long)
        return self

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        self.root = root

    def propose(self, extent: int) -> TokenTree:
        drafts = []
        for row, place in enumerate(self.place.tolist()):
            ahead = (self.texts[row][place : place + 6] + [7] * 6)[:6]
            drafts.append(ahead if row in self.known else [(token + 1) % 97 for token in ahead])
        tokens = torch.cat((self.root[:, None], torch.tensor(drafts)), 1)
        return TokenTree.from_parents(tokens, (torch.arange(7) - 1).clamp(min=0).expand(len(drafts), -1))

    def observe(self, tree: TokenTree, verdict: Verdict, features: Tensor, active: Tensor, extent: int) -> None:
        self.place += (verdict.accepted + 1) * active
        self.root = torch.where(active, verdict.bonus, self.root)


@pytest.mark.parametrize("known", [{0}, {1}, {0, 1}, set()])
@pytest.mark.parametrize("count", [1, 2, 5, 7, 15])
def test_a_row_that_runs_past_its_limit_while_others_lag(pair, known, count):
    inputs = prompts(6, 6)
    oracle = Oracle(free(pair[0], inputs, 40), known)
    same(pair, oracle, inputs, max_new_tokens=count, eos_token_id=NEVER)
    if count == 15 and known == {0, 1}:
        assert stats(pair[1]).acceptance_length == 7.0
