"""Drafts drawn by the tokens that two vocabularies share: the target's own distribution, and the acceptance that the
shared part allows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from helpers.enumerate import PROCESSES, Make, Tables, agree, closed, distribution_of, enumerated
from helpers.examples import examples
from helpers.generate import prompts, stats
from helpers.models import tiny_model
from helpers.sampling import CASES, check_distribution
from helpers.tokenizers import DRAFT, TARGET, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import fastspec
from fastspec import Speculative
from fastspec.generation.drafters.chain import ChainDrafter
from fastspec.generation.drafters.policy import Length
from fastspec.generation.drafters.retokenized import SHARE, SharedDrafter, TextDrafter, shared_tokens
from fastspec.generation.engine.call import Request
from fastspec.generation.engine.engine import Engine
from fastspec.generation.engine.rounds import decode
from fastspec.generation.engine.verifier import ChoiceRule
from fastspec.patches.assistants.speculative import Pair, TextDecoding
from fastspec.patches.backends import TORCH

OURS = tokenizer(["a", "b"], [("a", "b")])  # a, b, ab
PAIRS = {
    "some shared": tokenizer(["b", "c", "a"], []),
    "one shared": tokenizer(["x", "y", "b"], []),
    "nothing shared": tokenizer(["x", "y"], []),
    "with a merge": tokenizer(["b", "a", "c"], [("b", "a"), ("a", "b")]),
}


class Draft(Tables):
    """Tables that are fed in parts, by rows of other lengths."""

    def prefill(self, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        texts = []
        for row, (count, start) in enumerate(zip(counts.tolist(), self.lengths.tolist(), strict=True)):
            assert count > 0
            self.cells[row, start : start + count] = ids[row, :count]
            texts.append(tuple(self.cells[row, : start + count].tolist()))
        self.lengths = self.lengths + counts
        return torch.tensor([self.after(text) for text in texts]), ids[..., None][..., :0]


def restricted(
    scores: list[float], pairs: list[tuple[int, int]], vocab: int, process: Any
) -> tuple[list[float], float]:
    """What a draft is drawn from, by hand, and how much the shared tokens hold."""
    over = torch.full((1, vocab), -torch.inf)
    for ours, theirs in pairs:
        over[0, ours] = scores[theirs]
    held = float(sum(torch.tensor(scores).softmax(-1)[theirs] for _, theirs in pairs))
    return process(over).softmax(-1)[0].tolist(), held


class Checked(SharedDrafter):
    """Holds every node's q to the draft model's distribution after its text, encoded anew, and the drafts before the
    node."""

    def propose(self, extent: int) -> Any:
        tree = super().propose(extent)
        for row, emitted in enumerate(self.history):
            read = list(self.draft_tokenizer(self.tokenizer.decode(emitted), add_special_tokens=False)["input_ids"])
            drawn = self.alive[row] and 0 < len(read) <= self.room - self.length.most
            for node in range(1, tree.tokens.shape[1]):
                want, held = restricted(
                    self.draft.after(tuple(read)), list(self.known.items()), len(self.foreign), self.process
                )  # type: ignore[attr-defined]
                drawn = drawn and held >= SHARE and max(want) > 0
                torch.testing.assert_close(
                    tree.q[row, node], torch.tensor(want if drawn else [0.0] * len(want)), rtol=1e-5, atol=1e-6
                )
                token = int(tree.tokens[row, node])
                assert not drawn or want[token] > 0
                read.append(self.known.get(token, 0))
        return tree


def sharing(
    seed: int, theirs: Any, gamma: int, process: Any, kind: Any = Checked, ours: Any = OURS, length: Any = None
) -> Make:
    def make(rows: int, ops: Any) -> tuple[Any, Any]:
        target, draft = Tables(seed, "target", rows, len(ours)), Draft(seed, "draft", rows, len(theirs), 60)
        drafter = kind(
            draft,
            length or Length(gamma),
            shared_tokens(ours, theirs),
            room=50,
            tokenizer=ours,
            draft_tokenizer=theirs,
            vocab=len(ours),
            draft_vocab=len(theirs),
            ops=ops,
            process=process,
            device=torch.device("cpu"),
        )
        return target, drafter

    return make


def own(seed: int, process: Any) -> Callable[[Any], list[float]]:
    return partial(distribution_of, Tables(seed, "target", 1, len(OURS)), process=process)


@pytest.mark.some("(1, 2, 0)", "(2, 2, 1)")
# One batch a script: how wide a round is depends on the rows beside, and so does what a row is asked.
@pytest.mark.parametrize(
    ("theirs", "gamma", "limit", "companions"),
    [
        pytest.param(
            theirs,
            *sizes,
            id=f"{name}-{sizes}",
            marks=pytest.mark.slow if sizes[1] == 3 and name != "some shared" else (),
        )
        for name, theirs in PAIRS.items()
        for sizes in ((1, 2, 0), (2, 3, 0), (2, 2, 1))
    ],
)
@given(st.integers(0, 10**6), st.sampled_from(PROCESSES[1:]))
@examples(3)
def test_the_loop_emits_what_the_target_emits_alone(theirs, gamma, limit, companions, seed, process):
    found = enumerated(sharing(seed, theirs, gamma, process), process, limit, 1, companions)
    assert agree(found, closed(len(OURS), limit, own(seed, process)))


class QOfAnotherPrefix(SharedDrafter):
    def propose(self, extent):
        tree = super().propose(extent)
        return tree if tree.q is None else replace(tree, q=tree.q[:, [0, 1, *range(1, tree.q.shape[1] - 1)]])


class UnprocessedQ(SharedDrafter):
    """Drawn at the temperature 0.6, and given as if at 1."""

    def propose(self, extent):
        tree = super().propose(extent)
        return (
            tree
            if tree.q is None
            else replace(tree, q=torch.nan_to_num(tree.q**0.6 / (tree.q**0.6).sum(-1, keepdim=True)))
        )


class QNotRenormalised(SharedDrafter):
    """The draft model's own probabilities of the shared tokens."""

    def propose(self, extent):
        self.held = []
        tree = super().propose(extent)
        return (
            tree
            if tree.q is None
            else replace(tree, q=tree.q * torch.stack((self.held[0], *self.held), 1)[:, : tree.q.shape[1], None])
        )

    def _scores(self, logits):
        scores, share = super()._scores(logits)
        self.held.append(share)
        return scores, share


class UnlikelyDraftsLeftOut(SharedDrafter):
    """Whether a token is handed on depends on which one it is."""

    def propose(self, extent):
        tree = super().propose(extent)
        return tree if tree.q is None else replace(tree, q=tree.q * (tree.tokens != 1)[..., None])


@pytest.mark.some("QNotRenormalised")  # the others in test_chain_distribution.py
@pytest.mark.parametrize("bug", [QOfAnotherPrefix, UnprocessedQ, QNotRenormalised, UnlikelyDraftsLeftOut])
def test_planted_bugs_are_found(bug):
    process, theirs = PROCESSES[1], PAIRS["some shared"]
    assert not all(
        agree(enumerated(sharing(s, theirs, 2, process, bug), process, 3, 1), closed(3, 3, own(s, process)))
        for s in range(4)
    )


class OtherTokensFed(SharedDrafter):
    """The draft model goes on with another token than its own id of the drafted one."""

    def _feed(self, token, behind):
        return super()._feed((token + 1) % 3, behind)


def test_the_check_of_q_finds_a_draft_model_that_read_something_else():
    class Bug(Checked, OtherTokensFed):
        pass

    with pytest.raises(AssertionError):
        for seed in range(4):
            run(sharing(seed, PAIRS["some shared"], 3, PROCESSES[1], Bug), [[0, 1]], 9, PROCESSES[1])


def run(make: Make, texts: list[list[int]], limit: int, process: Any, ends: Any = frozenset(), seed: int = 0) -> Any:
    counts = torch.tensor([len(text) for text in texts])
    ids = torch.tensor([text + [0] * (int(counts.max()) - len(text)) for text in texts])
    target, drafter = make(len(texts), TORCH)
    torch.manual_seed(seed)
    engine = Engine(target, drafter, TORCH, ChoiceRule(sample=True, process=process), rows=len(texts))
    return decode(engine, Request(ids, counts, list(ids), limit, ends, None), "shared")


LETTERS = list("abcde")
MANY = tokenizer(LETTERS, [("a", "b"), ("c", "d"), ("ab", "cd")])


@given(st.data(), st.integers(0, 10**6), st.integers(1, 4), st.sampled_from(PROCESSES[1:]), st.booleans())
@examples(40)
def test_batches_keep_every_rows_distribution(data, seed, gamma, process, fixed):
    """Rows of other lengths that accept and end differently: each q is the draft model's, and what was drafted is
    possible."""
    texts = data.draw(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=6), min_size=1, max_size=4))
    ends = data.draw(st.sampled_from([frozenset(), frozenset({3})]))
    theirs = tokenizer(list("dxcbya"), [("c", "d"), ("b", "c")])
    make = sharing(seed, theirs, gamma, process, ours=MANY, length=Length(gamma, 0.0 if fixed else 0.1))
    emitted = run(make, texts, 8, process, ends, seed).tokens
    assert emitted == run(make, texts, 8, process, ends, seed).tokens
    assert all(len(row) == 8 or row[-1] in ends for row in emitted)


class Renamed(Draft):
    """The tables of another vocabulary's model, its tokens in another order."""

    def __init__(self, seed: int, rows: int, order: list[int]) -> None:
        super().__init__(seed, "draft", rows, len(order), 60)
        self.order, self.inner = order, Tables(seed, "draft", 1, len(order))

    def after(self, text: Any) -> list[float]:
        scores = self.inner.after(tuple(self.order[token] for token in text))
        return [scores[token] for token in self.order]


@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.sampled_from(PROCESSES[1:]),
    st.sampled_from([0.0, 0.15]),
    st.booleans(),
)
@examples(25)
def test_with_all_tokens_shared_it_is_the_same_as_with_one_tokenizer(seed, gamma, process, cost, ending):
    """The same draws give the same tokens and the same numbers."""
    order, length = Random(seed).sample(range(5), 5), Length(gamma, cost)
    ours, theirs = tokenizer(LETTERS, []), tokenizer([LETTERS[token] for token in order], [])
    texts, ends = [[0, 3, 2], [4], [1, 1, 2, 0, 3]], frozenset({2} if ending else ())

    def shared(rows: int, ops: Any) -> tuple[Any, Any]:
        pairs = shared_tokens(ours, theirs)
        assert len(pairs) == 5
        return Tables(seed, "target", rows, 5), SharedDrafter(
            Renamed(seed, rows, order),
            length,
            pairs,
            room=50,
            tokenizer=ours,
            draft_tokenizer=theirs,
            vocab=5,
            draft_vocab=5,
            ops=ops,
            process=process,
            device=torch.device("cpu"),
        )

    def one(rows: int, ops: Any) -> tuple[Any, Any]:
        drafter = ChainDrafter(
            Tables(seed, "draft", rows, 5), length, branches=1, vocab=5, draft_vocab=5, ops=ops, process=process
        )
        return Tables(seed, "target", rows, 5), drafter

    found, want = (run(make, texts, 14, process, ends, seed) for make in (shared, one))
    assert found.tokens == want.tokens
    assert (found.stats.drafted, found.stats.accepted) == (want.stats.drafted, want.stats.accepted)


def test_what_cannot_be_drafted_for_is_decoded_plainly():
    process = PROCESSES[1]
    for theirs in (PAIRS["nothing shared"], PAIRS["some shared"]):
        target, drafter = sharing(1, theirs, 3, process)(1, TORCH)
        drafter.room = 4  # the prompt and the first token leave no room for three drafts
        outcome = run(lambda rows, ops, pair=(target, drafter): pair, [[0, 1]], 6, process)
        assert outcome.stats.drafted == 0 and len(outcome.tokens[0]) == 6


def test_rows_are_drafted_for_while_the_shared_tokens_hold_enough():
    class Sure(Draft):
        def after(self, text: Any) -> list[float]:
            if text == (0, 0):
                return [-torch.inf, 0.0, -torch.inf]
            return (
                [0.0, 5.0, 0.0] if text[-1] == 0 else [0.0, 0.0, 0.0]
            )  # behind b it would say c, which the target has not

    process, theirs = PROCESSES[1], PAIRS["some shared"]
    _, drafter = sharing(0, theirs, 3, process, SharedDrafter)(3, TORCH)
    drafter.draft = drafter.passes.draft = Sure(0, "draft", 3, 3)
    drafter.begin(
        torch.tensor([[0], [0], [1]]), torch.ones(3, dtype=torch.long), torch.zeros(3, 1, 0), torch.tensor([0, 1, 1])
    )
    for seed in range(8):
        torch.manual_seed(seed)
        tree = drafter.propose(0)
        drawn = tree.q[:, 1:].sum(-1) > 0
        assert (
            bool(tree.q.isfinite().all()) and not drawn[1:].any() and drawn[0, 0]
        )  # the texts are "aa", "ab" and "bb"
        for node in range(1, drawn.shape[1]):
            assert drawn[0, node] == (drawn[0, node - 1] and tree.tokens[0, node] != 1)


def test_what_is_not_shared_is_not_drawn_whatever_the_processors_make_of_it():
    def lift(scores: Tensor) -> Tensor:
        return scores.clamp(min=-1.0)

    for seed in range(4):
        _, drafter = sharing(seed, PAIRS["some shared"], 3, lift, SharedDrafter)(1, TORCH)
        drafter.begin(torch.tensor([[0]]), torch.tensor([1]), torch.zeros(1, 1, 0), torch.tensor([1]))
        tree = drafter.propose(0)
        assert tree.q is None or (not tree.q[..., 2].any() and not (tree.tokens == 2).any())
    seed = 3
    found = enumerated(sharing(seed, PAIRS["some shared"], 2, lift, SharedDrafter), lift, 2, 1)
    assert agree(found, closed(3, 2, own(seed, lift)))


# Through generate


def near(target: Any) -> Any:
    """A model of DRAFT's tokens that thinks much as the target does."""
    layers = target.config.num_hidden_layers
    draft, state = tiny_model(seed=1, vocab_size=len(DRAFT), num_hidden_layers=layers), dict(target.state_dict())
    torch.manual_seed(0)
    ours, theirs = (torch.tensor(ids) for ids in zip(*shared_tokens(TARGET, DRAFT), strict=True))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.randn(len(DRAFT), state[name].shape[1]) * state[name].std()
        rows[theirs] = state[name][ours]
        state[name] = rows + 0.1 * torch.randn_like(rows) * (name == "lm_head.weight")
    draft.load_state_dict(state)
    return draft


def paired(target: Any, draft: Any, draft_tokenizer: Any = DRAFT) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*drafting will not pay")
        return fastspec.patch(target, speculative=(draft, draft_tokenizer, TARGET))


@pytest.mark.some("all four", "temperature")
@pytest.mark.parametrize(
    "case, config", [("all four", Speculative(gamma=2)), ("temperature", Speculative(most=3))], ids=str
)
def test_sampled_texts_follow_the_targets_distribution(case, config):
    target = tiny_model(seed=1, num_hidden_layers=4)
    model = paired(target, near(target))
    check_distribution(model, CASES[case], config)
    call = stats(model)
    assert 0.2 * call.drafted < call.accepted < call.drafted


def test_batches_reproduce_and_are_accepted_more_often_than_texts(monkeypatch):
    target = tiny_model(seed=1)
    draft, inputs = near(target), prompts(3, 9, 17)
    model = paired(target, draft)
    options: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 30,
        "max_new_tokens": 40,
        "eos_token_id": [5, 40],
    }
    accepted, texts = [], []
    for _ in range(3):
        torch.manual_seed(7)
        texts.append(model.generate(**inputs, assistant=Speculative(gamma=3), **options).tolist())
        accepted.append(stats(model).acceptance_length)
        if len(texts) == 2:
            monkeypatch.setattr("fastspec.patches.assistants.speculative.shared_tokens", lambda *tokenizers: [])
            model = paired(tiny_model(seed=1), draft)
    assert texts[0] == texts[1]
    assert accepted[0] == accepted[1] > accepted[2]


def test_which_drafter_a_call_gets():
    decoding = TextDecoding(Speculative(gamma=2), tiny_model(), Pair(tiny_model(seed=2, vocab_size=93), DRAFT, TARGET))
    options: dict[str, Any] = {"rows": 1, "capacity": 9, "device": torch.device("cpu"), "ops": TORCH}
    assert type(decoding.drafter(process=PROCESSES[1], **options)) is SharedDrafter
    assert type(decoding.drafter(process=None, **options)) is TextDrafter
    strangers = Pair(decoding.pair.model, tokenizer(["é", "è"], []), TARGET)
    assert type(replace(decoding, pair=strangers).drafter(process=PROCESSES[1], **options)) is TextDrafter


# Which tokens are the same


def named(pieces: list[str], decoder: Any, special: tuple[str, ...] = (), **roles: str) -> Any:
    inner = Tokenizer(BPE({piece: index for index, piece in enumerate(pieces)}, []))
    inner.decoder = decoder
    inner.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=inner, **roles)


def matched(one: Any, other: Any) -> set[tuple[str, str]]:
    return {(one.convert_ids_to_tokens(a), other.convert_ids_to_tokens(b)) for a, b in shared_tokens(one, other)}


def test_the_shared_tokens():
    letters = tokenizer(LETTERS, [])
    assert matched(TARGET, DRAFT) == {(t, t) for t in set(TARGET.get_vocab()) & set(DRAFT.get_vocab())}
    assert shared_tokens(letters, tokenizer(["x"], [])) == [] and shared_tokens(object(), letters) == []
    byte = named(
        ["the", "Ġthe", "a", "Ċ", "Ã", "▁b", "<s>"],
        decoders.ByteLevel(),
        ("<end>", "<eos>"),
        eos_token="<eos>",
        unk_token="<end>",
    )
    piece = named(
        ["a", "▁the", "the", "Ġthe", "\n", "Ã", "b"],
        decoders.Metaspace(),
        ("<s>", "<end>", "</s>"),
        eos_token="</s>",
        bos_token="<s>",
    )
    # Ã is a byte in one and a letter in the other, <s> a text in one and a special token in the other
    assert matched(byte, piece) == {("the", "the"), ("Ġthe", "▁the"), ("a", "a"), ("<eos>", "</s>")}
    starting, inside = (
        named(["a", "the", "##the"], decoders.WordPiece(), unk_token="a"),
        named(["x", "the", "y"], decoders.Fuse()),
    )
    assert matched(starting, starting) == {("the", "the"), ("##the", "##the")}
    assert ("##the", "the") not in matched(starting, inside)
    taken = named(["a", "b"], decoders.Fuse(), ("<end>", "</s>"), eos_token="<end>", pad_token="</s>")
    assert matched(taken, piece) == {("a", "a"), ("b", "b"), ("<end>", "<end>"), ("</s>", "</s>")}


def test_a_text_that_ends_within_a_character_is_read_with_its_bytes():
    alphabet = ["a", "Ã", "©", "â", "Ĥ", "¬"]
    ours, theirs = (named(pieces, decoders.ByteLevel()) for pieces in (alphabet, alphabet[::-1]))
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _, drafter = sharing(0, theirs, 2, PROCESSES[1], SharedDrafter, ours)(1, TORCH)

    def read(emitted: list[int]) -> list[int]:
        text = torch.tensor([emitted])
        drafter.begin(text[:, :-1], torch.tensor([len(emitted) - 1]), torch.zeros(1, 1, 0), text[:, -1])
        return drafter._encoded(0)

    for emitted in ([0, 1], [0, 1, 2, 3, 4], [3, 4, 5, 0], [1]):
        assert read(emitted) == [5 - token for token in emitted]
    drafter.opening = [4]
    ours.bos_token = "a"
    assert read([0, 1, 2]) == [4, 4, 3]
