"""Drafts of a model with another tokenizer: exact for any pair of encodings, and accepted where the texts agree."""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.generate import bigram, prompts, same, shallow_model, stats
from helpers.tokenizers import DRAFT, LETTERS, TARGET
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import fastspec
from fastspec import Speculative
from fastspec.errors import Unsupported
from fastspec.generation.drafters import retokenized as rereading
from fastspec.generation.drafters.policy import COSTS, Length
from fastspec.generation.drafters.retokenized import ANEW, TRIES, TextDrafter, decoded, encoded
from fastspec.generation.target import Target
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.patches.assistants.speculative import Pair, TextDecoding, check_cost, draft_cost, pass_ms
from fastspec.patches.backends import TORCH


@pytest.mark.each_value
@pytest.mark.parametrize("config", [Speculative(gamma=3), Speculative(most=5)], ids=str)
@pytest.mark.parametrize("make", [shallow_model, bigram])
def test_the_tokens_are_the_targets(make, config):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*drafting will not pay")
        model = fastspec.patch(make(), speculative=(shallow_model(seed=2, vocab_size=93), DRAFT, TARGET))
    for lengths in ((7,), (3, 9, 17)):
        same((make(), model), config, prompts(*lengths), eos_token_id=[5, 40])
    assert stats(model).drafted > 0


def test_a_pair_of_one_tokenizer_drafts_what_the_draft_model_would():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*drafting will not pay")
        model = fastspec.patch(bigram(), speculative=(bigram(), TARGET, TARGET))
    same((bigram(), model), Speculative(gamma=3), prompts(4, 6), eos_token_id=1000)
    assert (
        stats(model).acceptance_length > 2
    )  # less than 4 only where a text does not encode to the tokens it came from


TEXTS: dict[str, Any] = {
    "tokenizer": TARGET,
    "draft_tokenizer": DRAFT,
    "vocab": 97,
    "draft_vocab": 93,
    "device": torch.device("cpu"),
}


class Script(Target):
    """A draft model that writes the letters of one text over and over, and keeps what it was fed."""

    lengths: Any = None

    def __init__(self, text: str) -> None:
        self.text, self.fed = DRAFT(text)["input_ids"], []

    def rewind(self, lengths: Tensor) -> None:
        del self.fed[int(lengths[0]) :]

    def prefill(self, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        self.fed += ids[0].tolist()
        return self._next(), torch.zeros(1, ids.shape[1], 0)

    def score(self, tree: TokenTree, extent: int) -> tuple[Tensor, Tensor]:
        self.fed += tree.tokens[0].tolist()
        return self._next()[None], torch.zeros(1, 1, 0)

    def commit(self, verdict: Verdict, active: Tensor) -> None:
        """Fed already."""

    def open(self, capacity: int) -> None:
        raise AssertionError("no second call here")

    def _next(self) -> Tensor:
        last = self.text.index(self.fed[-1]) if self.fed[-1] in self.text else -1
        return torch.nn.functional.one_hot(torch.tensor([self.text[(last + 1) % len(self.text)]]), 93).float()


def test_the_continuation_is_encoded_with_the_text_before_it():
    script = Script("xyabcdQ")
    drafter = TextDrafter(script, Length(4), room=100, **TEXTS)
    emitted = TARGET("Qxy")["input_ids"]
    drafter.begin(
        torch.tensor([emitted[:-1]]),
        torch.tensor([len(emitted) - 1]),
        torch.zeros(1, 1, 0),
        torch.tensor([emitted[-1]]),
    )
    tree = drafter.propose(0)
    assert [TARGET.decode([token]) for token in tree.tokens[0].tolist()] == [
        "xy",
        "abcd",
        "Q",
        "x",
    ]  # drafted as abc, d, Q, x
    before = list(script.fed)
    verdict = Verdict(
        torch.tensor([[0, 1, *[1] * (tree.max_path - 2)]]), torch.tensor([1]), torch.tensor([LETTERS.index("x")])
    )
    drafter.observe(tree, verdict, torch.zeros(1, 1, 97), torch.zeros(1, 1, 0), torch.tensor([True]), 0)
    assert TARGET.decode(drafter.history[0]) == "Qxyabcdx"
    drafter.propose(0)
    assert script.fed[: len(before) - 1] == before[:-1]  # what was read is not read again


def test_reading_texts_anew_is_part_of_the_price():
    """A round's, whatever it drafts; a number that was asked for is kept to."""
    target, draft = shallow_model(), shallow_model(seed=2, num_hidden_layers=1, vocab_size=93)
    decoding = TextDecoding(Speculative(most=5), target, Pair(draft, DRAFT, TARGET))
    length = decoding.drafter(rows=1, capacity=20, device="cpu", ops=TORCH, process=None).length
    price = (
        check_cost(target, "cpu", 1)
        + COSTS["cpu"].reread / pass_ms(COSTS["cpu"], target)
        + 2 * draft_cost(draft, target, "cpu")
    )
    assert length.price(2) == pytest.approx(price)
    fixed = (
        replace(decoding, config=Speculative(gamma=3))
        .drafter(rows=1, capacity=20, device="cpu", ops=TORCH, process=None)
        .length
    )
    assert (fixed.most, fixed.cost, fixed.pause) == (3, 0.0, 0)


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_what_two_texts_have_in_common(fed, read):
    kept = rereading.common_prefix(fed, read)
    assert fed[:kept] == read[:kept] and kept <= len(read)
    assert kept == len(fed) or kept == len(read) or fed[kept] != read[kept]


class Spaced(PreTrainedTokenizerFast):
    """Drops what is in front of a text, as SentencePiece's do with a space: parts of a text are not the whole."""

    def decode(self, *given: Any, **options: Any) -> str:
        return super().decode(*given, **options)[1:]


@pytest.mark.parametrize("kind", ["plain", "drops what is in front"])
def test_a_long_text_is_encoded_as_a_whole_a_part_at_a_time(kind, monkeypatch):
    target = TARGET if kind == "plain" else Spaced(tokenizer_object=TARGET.backend_tokenizer)
    drafter = TextDrafter(Script("ab"), Length(4), room=10**4, **{**TEXTS, "tokenizer": target})
    torch.manual_seed(0)
    emitted = torch.randint(0, 97, (2, 700)).tolist()
    firsts = torch.tensor([emitted[0][300], emitted[1][200]])
    drafter.begin(torch.tensor([row[:300] for row in emitted]), torch.tensor([300, 200]), torch.zeros(2, 1, 0), firsts)
    spent = []
    monkeypatch.setattr(
        rereading, "encoded", lambda tokenizer, text: (spent.append(len(text)), encoded(tokenizer, text))[1]
    )
    for count in range(1, 300):
        drafter.history = [emitted[0][: 300 + count], emitted[1][: 200 + count]]
        for row, text in enumerate(drafter.history):
            assert drafter._encoded(row) == encoded(DRAFT, decoded(target, text))
    settled = [start for start, _ in drafter.settled]
    if kind == "plain":
        assert all(
            len(text) - 3 * ANEW < start < len(text) - ANEW + 1
            for text, start in zip(drafter.history, settled, strict=True)
        )
        assert sum(spent) / len(spent) < 3 * ANEW  # letters: a token has one or two
    else:
        assert (
            settled == [0, 0] and len(spent) < 2 * 299 + 2 * 2 * TRIES * 6
        )  # tried a few times, each time twice as late


def test_a_text_beyond_the_room_is_not_drafted_for():
    drafter = TextDrafter(Script("ab"), Length(4), room=6, **TEXTS)
    drafter.begin(torch.tensor([[3, 4, 5]]), torch.tensor([3]), torch.zeros(1, 3, 0), torch.tensor([6]))
    assert drafter.propose(0).tokens.tolist() == [[6]]


def test_tokens_that_a_model_lacks_are_neither_fed_nor_drafted():
    """Those that were added to a tokenizer alone: a text with one is not drafted for, a chain ends before one."""
    emitted, script = TARGET("Qxy")["input_ids"], Script("xyabcdQ")
    ids, own, drafts = torch.tensor([emitted[:-1]]), DRAFT("Qxy")["input_ids"], TARGET("abcdQx")["input_ids"]

    def drafted(**sizes: int) -> list[int]:
        script.fed.clear()
        drafter = TextDrafter(script, Length(4), room=100, **TEXTS | sizes)
        drafter.begin(ids, torch.tensor([ids.shape[1]]), torch.zeros(1, 1, 0), torch.tensor([emitted[-1]]))
        return drafter.propose(0).tokens[0, 1:].tolist()

    whole = drafted()
    assert whole and whole == drafts[: len(whole)]
    assert drafted(draft_vocab=max(own) + 1) == whole and drafted(draft_vocab=max(own)) == []
    highest = whole.index(max(whole))
    assert drafted(vocab=max(whole) + 1) == whole and drafted(vocab=max(whole)) == whole[:highest]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*drafting will not pay")
        model = fastspec.patch(bigram(), speculative=(bigram(seed=2, vocab_size=40), DRAFT, TARGET))
    same((bigram(), model), Speculative(gamma=3), prompts(4, 6), eos_token_id=1000)


def test_a_tokenizer_of_another_model_is_refused():
    large = deepcopy(TARGET)
    large.add_tokens([f"<{number}>" for number in range(1025)])
    for name, pair in (("draft_tokenizer", (large, TARGET)), ("tokenizer", (DRAFT, large))):
        with pytest.raises(Unsupported, match=rf"^{name} has 1122 tokens and its model 97: it is another model's"):
            fastspec.patch(shallow_model(), speculative=(shallow_model(seed=2), *pair))


def test_what_does_not_fit_is_refused():
    with pytest.raises(Unsupported, match="give both tokenizers"):
        fastspec.patch(shallow_model(), speculative=shallow_model(vocab_size=3000))
    with pytest.raises(Unsupported, match=r"speculative=\(draft_model, draft_tokenizer, tokenizer\)"):
        fastspec.patch(shallow_model(), speculative=(shallow_model(), DRAFT))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*drafting will not pay")
        model = fastspec.patch(shallow_model(), speculative=(shallow_model(seed=2), DRAFT, TARGET))
    with pytest.raises(Unsupported, match="chains"):
        model.generate(**prompts(3), assistant=Speculative(branches=2))
