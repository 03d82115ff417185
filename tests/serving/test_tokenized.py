"""Tokens of a text are those of the tokenizer, whatever texts came before."""

from __future__ import annotations

import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fastspec.programs.serving import tokenized
from fastspec.programs.serving.tokenized import TokenizedTexts

SPECIAL = "<|begin|>", "<|end|>", "<|end|><|begin|>"
OTHERS = (
    AddedToken("<tool>", normalized=False, special=False),
    AddedToken("<left>", normalized=False, lstrip=True),
    AddedToken("<right>", normalized=False, rstrip=True),
    AddedToken("word", normalized=False, single_word=True),
    AddedToken("begin", normalized=False, special=False),  # goes on with a word, which is then none
    AddedToken("Normal", normalized=True, special=False),
    AddedToken("|end|><|be", normalized=False, special=False),  # begins within another
)
PIECES = [
    *SPECIAL,
    *map(str, OTHERS),
    " ",
    "\n",
    "  two",
    "NORMAL normal",
    "é",
    "a",
    "<",
    "|",
    ">",
    "longer words of a text",
]


def made(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, or of words that begin with a blank, at the start of a text or of every part; "spelt" takes
    special tokens for any text."""
    whole = Tokenizer(models.BPE(unk_token="?"))
    if kind == "bytes":
        whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        whole.decoder = decoders.ByteLevel()
    elif kind == "legacy":
        whole.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        whole.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if kind == "spelt" else kind)
        whole.normalizer = normalizers.Lowercase()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["?"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    whole.train_from_iterator(PIECES * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, unk_token="?")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.add_tokens(list(OTHERS))
    tokenizer.split_special_tokens = kind == "spelt"
    return tokenizer


TOKENIZERS = {kind: made(kind) for kind in ("bytes", "legacy", "first", "always", "never", "spelt")}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=12), min_size=1, max_size=6))
def test_tokens_are_those_of_the_tokenizer_behind_every_beginning(kind: str, turns: list[list[str]]) -> None:
    tokenizer = TOKENIZERS[kind]
    texts = TokenizedTexts(tokenizer)
    talk = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenized, "SHORT", 0)
        for turn in turns:
            talk += "".join(turn)
            for _ in range(2):
                assert texts.ids(talk).tolist() == tokenizer(talk, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("first, second", [("word<|end|>", "wordbegin"), ("<|end|>", "<|begin|>")])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_what_follows_a_beginning_may_change_it(kind: str, first: str, second: str, monkeypatch) -> None:
    """As of a token that is one where no word goes on."""
    monkeypatch.setattr(tokenized, "SHORT", 0)
    tokenizer = TOKENIZERS[kind]
    texts = TokenizedTexts(tokenizer)
    for talk in (f"a {first}", f"a {second}", f"a {second}<|end|>", f"a {first}"):
        assert texts.ids(talk).tolist() == tokenizer(talk, add_special_tokens=False)["input_ids"]


def test_a_lone_surrogate_is_what_the_tokenizer_takes_it_for(monkeypatch) -> None:
    monkeypatch.setattr(tokenized, "SHORT", 0)
    tokenizer = TOKENIZERS["bytes"]
    texts = TokenizedTexts(tokenizer)
    texts.ids("a<|begin|>b<|end|>")
    for talk in ("a<|begin|>b<|end|>\ud800", "\ud83d\ude00<|end|>b", "a<|begin|>b<|end|>"):
        found = []
        for read in (texts.ids, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]):
            try:
                found.append(list(read(talk)))
            except Exception as error:
                found.append(type(error))
        assert found[0] == found[1]


@given(
    st.lists(st.text("<ab|.\\n ", min_size=1, max_size=60), min_size=1, max_size=12), st.text("<ab|.\\n ", max_size=80)
)
def test_a_pattern_finds_the_longest_word_at_a_place(words: list[str], text: str) -> None:
    words += [" " * count for count in range(1, 60)]
    plain = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))
    talk = text.join(words)
    assert re.findall(tokenized._any_of(words), talk) == plain.findall(talk)


class Counted:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.own, self.count = tokenizer, 0

    def __getattr__(self, name: str):
        return getattr(self.own, name)

    def __call__(self, text: str, **options):
        self.count += len(text)
        return self.own(text, **options)


def test_a_chat_is_tokenized_from_its_last_turn_on():
    tokenizer = Counted(TOKENIZERS["bytes"])
    texts, talk = TokenizedTexts(tokenizer), ""
    for turn in range(8):
        talk += f"<|begin|>user {turn}: {'longer words ' * 400}<|end|><|begin|>assistant"
        tokenizer.count = 0
        assert texts.ids(talk).tolist() == tokenizer.own(talk, add_special_tokens=False)["input_ids"]
        assert tokenizer.count < 6000
        talk += " an answer<|end|>"


def test_little_is_kept_and_the_oldest_goes_first(monkeypatch):
    monkeypatch.setattr(tokenized, "MOST", 3000)
    texts = TokenizedTexts(TOKENIZERS["bytes"])
    talks = [f"<|begin|>{number} {'longer words ' * 300}<|end|>" for number in range(8)]
    for talk in talks:
        texts.ids(talk)
    assert texts.count == sum(map(len, texts.known.values())) <= 3000 and 0 < len(texts.known) < len(talks)
    held = [threading.Thread(target=lambda: [texts.ids(talk) for talk in talks]) for _ in range(4)]
    [each.start() for each in held]
    [each.join() for each in held]
    assert texts.count == sum(map(len, texts.known.values())) <= 3000


def test_a_tokenizer_in_python_tokenizes_whole_texts():
    class Slow:
        is_fast = False

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [ord(each) for each in text]}

    talk = "<|begin|>a" * 1000
    assert TokenizedTexts(Slow()).ids(talk).tolist() == [ord(each) for each in talk]
