"""What ends a text before its length, and who is told of it: stopping criteria, stop strings, streamers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.generate import LENGTH, NEVER, TREE, Recorder, free, prompts, same
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList, TextStreamer

import fastspec


class Says(StoppingCriteria):
    """Stops the rows whose last token is one of these; `form` is the type of the answer."""

    def __init__(self, tokens: list[int], form: str = "rows") -> None:
        self.tokens, self.form = torch.tensor(tokens), form

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        done = torch.isin(input_ids[:, -1], self.tokens)
        return {"rows": done, "scalar": done.any(), "one": done.any()[None], "bool": bool(done.any())}[self.form]


@pytest.mark.each_value
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


@pytest.mark.each_value
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


@pytest.mark.each_value
def test_stop_strings(pair, assistant, tokenizer):
    inputs = prompts(5, 3)
    texts = free(pair[0], inputs)
    strings = [f"w{texts[0][4]}", f"w{texts[1][7]}"]
    out = same(pair, assistant, inputs, stop_strings=strings, tokenizer=tokenizer, eos_token_id=NEVER)
    assert out.shape[1] < 5 + LENGTH


class RoundRecorder(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[tuple[list[int], int]] = []

    def on_round(self, tokens: list[int], accepted: int) -> None:
        self.rounds.append((tokens, accepted))


def streamed(model: Any, streamer: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    model.generate(**inputs, do_sample=False, max_new_tokens=LENGTH, streamer=streamer, **options)
    return streamer


@pytest.mark.each_value
@pytest.mark.parametrize("lengths", [(5,), (5, 3, 8)])
def test_streamer_is_fed_as_by_transformers(pair, assistant, lengths):
    inputs = prompts(*lengths)
    ends = [row[3 + 2 * i] for i, row in enumerate(free(pair[0], inputs))]
    expected = streamed(pair[0], Recorder(), inputs, eos_token_id=ends).events
    assert streamed(pair[1], Recorder(), inputs, eos_token_id=ends, assistant=assistant).events == expected


@pytest.mark.each_value
def test_text_streamer_prints_the_same(pair, assistant, tokenizer, capsys):
    streamed(pair[0], TextStreamer(tokenizer, skip_prompt=True), prompts(5))
    expected = capsys.readouterr().out
    streamed(pair[1], TextStreamer(tokenizer, skip_prompt=True), prompts(5), assistant=assistant)
    assert capsys.readouterr().out == expected


def test_on_round_tells_which_tokens_were_drafted(pairs):
    patched = pairs["bigram"][1]
    recorder = streamed(patched, RoundRecorder(), prompts(5), eos_token_id=NEVER, assistant=TREE)
    emitted = [event[0] for event in recorder.events[1:-1]]
    assert [token for tokens, _ in recorder.rounds for token in tokens] == emitted
    assert all(0 <= accepted <= len(tokens) for tokens, accepted in recorder.rounds)
    assert recorder.rounds[0][1] == 0
    assert max(accepted for _, accepted in recorder.rounds) == TREE.depth + 1
    assert all(len(tokens) == accepted + 1 for tokens, accepted in recorder.rounds[:-1])


class TreeRecorder(RoundRecorder):
    def __init__(self) -> None:
        super().__init__()
        self.trees: list[tuple[Any, Any, Tensor]] = []

    def on_tree(self, tree: Any, verdict: Any, logits: Tensor) -> None:
        assert len(self.rounds) == 1 + len(self.trees)  # before its own round, after the prefill's token
        self.trees.append((tree, verdict, logits))


def test_on_tree_shows_every_rounds_tree(pairs):
    patched = pairs["random"][1]
    recorder = streamed(patched, TreeRecorder(), prompts(5), eos_token_id=NEVER, assistant=TREE)
    assert len(recorder.trees) == len(recorder.rounds) - 1
    for (tree, verdict, logits), (tokens, accepted) in zip(recorder.trees, recorder.rounds[1:], strict=True):
        assert verdict.tokens(tree)[0, : len(tokens)].tolist() == tokens
        assert tree.tokens[0, verdict.path[0, 1 : accepted + 1]].tolist() == tokens[:accepted]
        assert accepted == min(int(verdict.accepted[0]), len(tokens))
        assert logits[0, verdict.path[0]].argmax(-1)[: len(tokens)].tolist() == tokens
    assert streamed(patched, TreeRecorder(), prompts(5, 3), eos_token_id=NEVER, assistant=TREE).trees == []


def test_a_call_is_in_the_report_when_its_streamer_ends(pair):
    """Another thread that has read the text to its end may ask for the report at once."""
    seen: list[int] = []

    class Asks(Recorder):
        def end(self) -> None:
            seen.append(len(fastspec.report(pair[1]).calls))

    before = len(fastspec.report(pair[1]).calls)
    pair[1].generate(**prompts(5), do_sample=False, max_new_tokens=4, streamer=Asks(), assistant="nasd")
    assert seen == [before + 1]
