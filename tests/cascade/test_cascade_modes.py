"""Two ways of decoding with several models: a mixture's distribution at every token, and a chain's last model, exactly.

The loop itself is enumerated. Its only random decisions are draws of a token and acceptances of one; both are replaced
by a script, and every script that differs from another in one decision is run, with its chance. So the distribution of
the first tokens is a finite sum, the real drafters, rounds and caches at work, and it must be the closed form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.cascade import twin
from helpers.enumerate import PROCESSES, Make, Tables, Text, agree, closed, distribution_of, enumerated, request
from helpers.examples import examples
from helpers.generate import free, prompts, shallow_model
from helpers.models import tiny_model
from helpers.sampling import SIGNIFICANCE, p_value
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastspec.cascade.config import RANGES, RULES
from fastspec.cascade.decisions import mixed
from fastspec.errors import Unsupported
from fastspec.generation.drafters.chain import MixedDrafter
from fastspec.generation.drafters.staged import StagedDrafter, drafted, room
from fastspec.generation.engine.call import Outcome, Request
from fastspec.generation.engine.engine import Engine
from fastspec.generation.engine.rounds import decode
from fastspec.generation.engine.verifier import ChoiceRule
from fastspec.patches.backends import TORCH
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import adapter_for


def mixture(seed: int, vocab: int, rule: str, alpha: Any, process: Any) -> Callable[[Text], list[float]]:
    """pi after every text, in plain Python."""
    large, small = Tables(seed, "large", 1, vocab), Tables(seed, "small", 1, vocab)

    def pi(text: Text) -> list[float]:
        p, q = (distribution_of(model, text, process) for model in (large, small))
        if alpha == "lossless" or alpha == RANGES[rule][0]:
            return p
        return (
            q
            if alpha == RANGES[rule][1]
            else twin(rule, alpha, p, q, distribution_of(large, text), distribution_of(small, text))
        )

    return pi


def mixing(seed: int, vocab: int, gamma: int, blend: Any, kind: Any = MixedDrafter) -> Make:
    def make(rows: int, ops: Any) -> tuple[Any, Any]:
        large, small = (Tables(seed, name, rows, vocab) for name in ("large", "small"))
        return large, kind(small, gamma, blend, vocab=vocab, draft_vocab=vocab, ops=ops)

    return make


@st.composite
def alphas(draw: st.DrawFn, rule: str) -> Any:
    large, small = RANGES[rule] if rule != "opt" else (-3, 3)
    inside = large + (small - large) * draw(st.integers(1, 15)) / 16
    return draw(st.sampled_from([inside] * 6 + ["lossless", *RANGES[rule]]))


@pytest.mark.parametrize("rule", RULES)
@given(
    st.data(),
    st.integers(0, 10**6),
    st.sampled_from([(3, 2, 3), (3, 1, 3), (2, 3, 4), (4, 2, 2)]),
    st.sampled_from(PROCESSES),
)
@examples(10)
def test_every_token_of_the_loop_follows_the_mixture(rule, data, seed, sizes, process):
    alpha, (vocab, gamma, limit) = data.draw(alphas(rule)), sizes
    found = enumerated(mixing(seed, vocab, gamma, partial(mixed, rule, alpha)), process, limit)
    assert agree(found, closed(vocab, limit, mixture(seed, vocab, rule, alpha, process)))


class BonusOfTheTarget(MixedDrafter):
    def mix(self, tree, logits, scores):
        return torch.cat((super().mix(tree, logits, scores)[:, :-1], scores[:, -1:].log_softmax(-1)), 1)


class FirstOfTheTarget(MixedDrafter):
    def first(self, ids, counts, logits, scores, **options):
        super().first(ids, counts, logits, scores, **options)
        return scores


class DistributionsOneNodeLate(MixedDrafter):
    def mix(self, tree, logits, scores):
        self.q = torch.cat((self.q[:, :1], self.q[:, :-1]), 1)
        return super().mix(tree, logits, scores)


class NothingForgotten(MixedDrafter):
    """The draft model's cache keeps the drafts that were refused."""

    def observe(self, *given):
        before = self.draft.lengths
        super().observe(*given)
        self.draft.lengths = before


WRONG: dict[str, tuple[Any, Any]] = {
    "bonus token from p": (BonusOfTheTarget, mixed),
    "first token from p": (FirstOfTheTarget, mixed),
    "distributions of the node before": (DistributionsOneNodeLate, mixed),
    "refused drafts in the cache": (NothingForgotten, mixed),
    "rules that look at processed probabilities": (
        MixedDrafter,
        lambda rule, alpha, p, q, p_raw, q_raw: mixed(rule, alpha, p, q, p, q),
    ),
    "mixture of unprocessed ones": (
        MixedDrafter,
        lambda rule, alpha, p, q, p_raw, q_raw: mixed(rule, alpha, p_raw, q_raw, p_raw, q_raw),
    ),
    "p and q taken for each other": (
        MixedDrafter,
        lambda rule, alpha, p, q, p_raw, q_raw: mixed(rule, alpha, q, p, q_raw, p_raw),
    ),
}


@pytest.mark.parametrize("bug", WRONG)
def test_planted_bugs_in_the_mixture_are_found(bug):
    kind, rules = WRONG[bug]
    right = []
    for seed, (rule, alpha) in enumerate([("token_v1", 0.2), ("token_v3", 0.5), ("diff", 0.1), ("chow", 0.5)]):
        found = enumerated(mixing(seed, 2, 1, partial(rules, rule, alpha), kind), PROCESSES[1], 3)
        right.append(agree(found, closed(2, 3, mixture(seed, 2, rule, alpha, PROCESSES[1]))))
    assert not all(right)


@given(st.data(), st.sampled_from(RULES), st.integers(0, 10**6), st.integers(1, 4), st.sampled_from(PROCESSES))
@examples(30)
def test_greedy_calls_give_the_mixtures_tokens(data, rule, seed, gamma, process):
    """Rows with prompts of their own, which accept differently; one token has the whole mixture."""
    alpha, vocab, limit = data.draw(alphas(rule)), 4, 9
    texts = data.draw(st.lists(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=5), min_size=1, max_size=3))
    large, small = (Tables(seed, name, len(texts), vocab) for name in ("large", "small"))
    counts = torch.tensor([len(text) for text in texts])
    ids = torch.tensor([text + [0] * (int(counts.max()) - len(text)) for text in texts])
    drafter = MixedDrafter(small, gamma, partial(mixed, rule, alpha), vocab=vocab, draft_vocab=vocab, ops=TORCH)
    engine = Engine(large, drafter, TORCH, ChoiceRule(process=process), rows=len(texts))
    found = decode(engine, Request(ids, counts, list(ids), limit, frozenset(), None), "mixed").tokens
    for prompt, emitted in zip(texts, found, strict=True):
        text = list(prompt)
        for token in emitted:
            raw = [torch.tensor(model.after(tuple(text))) for model in (large, small)]
            best = [int((each if process is None else process(each[None])[0]).argmax()) for each in raw]
            hot = [torch.eye(vocab)[each] for each in best]
            pi = mixed(rule, alpha, *hot, *(each.softmax(-1) for each in raw))
            assert token == int(pi.argmax()) and float(pi.max()) == 1
            text.append(token)
        assert len(emitted) == limit


def test_what_cannot_be_mixed_is_refused():
    make = mixing(0, 2, 2, partial(mixed, "chow", 0.5))
    target, drafter = make(1, TORCH)
    asked = replace(request(1, 3), process_at=lambda rows, texts, scores: scores)
    with pytest.raises(Unsupported, match="takes no processors that look at the tokens so far"):
        decode(Engine(target, drafter, TORCH, ChoiceRule(sample=True), rows=1), asked, "mixed")


# The chain


class Checked(StagedDrafter):
    """A chain of Tables that holds every stage's recorded distributions, and its drafts where none are drawn, to the
    stage's own."""

    def _write(self, stage, at, count, active, extent):
        q = super()._write(stage, at, count, active, extent)
        for row in range(len(at)):
            if not active[row]:
                continue
            cells = [*self.text[row], *self.tape[row, self.kept :].tolist()]
            begin = len(self.text[row]) + int(at[row]) - self.kept
            for place in range(count):
                scores = torch.tensor(self.models[stage].after(tuple(cells[: begin + place])))
                if q is None:
                    assert cells[begin + place] == int(scores.argmax())
                else:
                    torch.testing.assert_close(
                        q[row, place], self.process(scores[None])[0].softmax(-1), rtol=1e-6, atol=1e-7
                    )
        return q

    def begin(self, ids, counts, features, root):
        self.text = [
            [*text[:n], first] for text, n, first in zip(ids.tolist(), counts.tolist(), root.tolist(), strict=True)
        ]
        super().begin(ids, counts, features, root)

    def observe(self, tree, verdict, logits, features, active, extent):
        super().observe(tree, verdict, logits, features, active, extent)
        for row, (n, emitted) in enumerate(zip(verdict.accepted.tolist(), verdict.tokens(tree).tolist(), strict=True)):
            self.text[row] += emitted[: n + 1] if active[row] else []
            for model in self.models:
                held = int(model.lengths[row])
                assert held < len(self.text[row]) and model.cells[row, :held].tolist() == self.text[row][:held]


def chained(seed: int, vocab: int, gamma: int, stages: int, process: Any, kind: Any = Checked) -> Make:
    def make(rows: int, ops: Any) -> tuple[Any, Any]:
        models = [Tables(seed, str(stage), rows, vocab) for stage in range(stages)]
        return Tables(seed, "target", rows, vocab), kind(
            models, gamma, vocab=vocab, vocabs=[vocab] * stages, ops=ops, process=process
        )

    return make


def own(seed: int, vocab: int, process: Any) -> Callable[[Text], list[float]]:
    return partial(distribution_of, Tables(seed, "target", 1, vocab), process=process)


@pytest.mark.some("1-2-3-0-2", "2-1-2-0-3", "2-2-2-1-2")
@pytest.mark.parametrize(
    "stages, gamma, limit, companions, vocab",
    [
        (1, 2, 3, 0, 2),
        (2, 1, 2, 0, 3),
        (2, 2, 2, 1, 2),
        (3, 2, 2, 0, 2),
        pytest.param(2, 2, 3, 0, 2, marks=pytest.mark.slow),
    ],
)
@given(st.integers(0, 10**6), st.sampled_from(PROCESSES[1:]))
@examples(3)
def test_the_loop_emits_what_the_last_model_emits_alone(stages, gamma, limit, companions, vocab, seed, process):
    """Scripts one by one: how far a stage writes depends on the rows beside, so that a row's decisions are the same in
    one batch alone."""
    found = enumerated(chained(seed, vocab, gamma, stages, process), process, limit, 1, companions)
    assert agree(found, closed(vocab, limit, own(seed, vocab, process)))


class DistributionsOfAnotherTemperature(Checked):
    def _write(self, stage, at, count, active, extent):
        q = super()._write(stage, at, count, active, extent)
        return q * q / (q * q).sum(-1, keepdim=True)


class UnlikelyDraftsLeftOut(Checked):
    """A draft of token 1 is not handed on."""

    def _write(self, stage, at, count, active, extent):
        q = super()._write(stage, at, count, active, extent)
        emitted = self.tape.gather(1, at[:, None] + torch.arange(count))
        return q if stage == 0 else q * (emitted != 1)[..., None]


class NothingCut(Checked):
    """Caches keep what was replaced on the tape: the output stays the target's, but the stages' distributions are not
    their own."""

    def _cut(self, stage, at):
        pass


class OtherTokensHandedOn(Checked):
    """The last token on the tape is not the one that was written."""

    def _write(self, stage, at, count, active, extent):
        q = super()._write(stage, at, count, active, extent)
        if stage:
            self.tape.scatter_(1, (at + count - 1)[:, None], torch.zeros_like(at)[:, None])
        return q


def found_in_the_chain(bug: Any, seed: int, limit: int) -> bool:
    process = PROCESSES[1]
    try:
        return not agree(
            enumerated(chained(seed, 2, 2, 2, process, bug), process, limit, 1), closed(2, limit, own(seed, 2, process))
        )
    except AssertionError:
        return True


@pytest.mark.some("DistributionsOfAnotherTemperature", "UnlikelyDraftsLeftOut", "NothingCut")
@pytest.mark.parametrize(
    "bug", [DistributionsOfAnotherTemperature, UnlikelyDraftsLeftOut, NothingCut, OtherTokensHandedOn]
)
def test_planted_bugs_in_the_chain_are_found(bug):
    assert any(found_in_the_chain(bug, seed, limit) for seed in range(4) for limit in (2, 3))  # most show in two tokens


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.data())
@examples(40)
def test_batches_keep_every_stages_distributions(seed, stages, gamma, sample, data):
    """Rows of other lengths that accept and end differently: the distributions recorded are the stages' own, and greedy
    tokens the target's."""
    vocab, limit = 4, 8
    texts = data.draw(st.lists(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=6), min_size=1, max_size=4))
    ends = data.draw(st.sampled_from([frozenset(), frozenset({3})]))
    counts = torch.tensor([len(text) for text in texts])
    ids = torch.tensor([text + [0] * (int(counts.max()) - len(text)) for text in texts])
    process = (lambda scores: scores / 0.6) if sample else None
    target, drafter = chained(seed, vocab, gamma, stages, process)(len(texts), TORCH)
    drafter.models[-1].name = "target"  # so all its drafts are accepted, while its own stage below is mostly refused
    torch.manual_seed(seed)
    engine = Engine(target, drafter, TORCH, ChoiceRule(sample=sample, process=process), rows=len(texts))
    outcome = decode(engine, Request(ids, counts, list(ids), limit, ends, None), "staged")
    for row, (prompt, emitted) in enumerate(zip(texts, outcome.tokens, strict=True)):
        text = list(prompt)
        for token in emitted:
            assert sample or token == int(torch.tensor(target.after(tuple(text))).argmax())
            text.append(token)
        assert len(emitted) == limit or emitted[-1] in ends, row
    assert sum(outcome.stats.lengths[: drafter.nodes - 1]) <= len(
        texts
    )  # a row's last round alone, which its end may cut


# Both with tiny transformers models


def run(
    large: Any,
    parts: dict[str, Any],
    make: Any,
    limit: int,
    *,
    process: Any = None,
    sample: bool = False,
    ends: Any = (),
) -> Outcome:
    """Decode prompts with make(rows, capacity) -> drafter."""
    keep = parts["attention_mask"].bool()
    counts = keep.sum(1)
    ids = parts["input_ids"].gather(1, torch.argsort((~keep).int(), dim=1, stable=True))
    rows, capacity = len(ids), ids.shape[1] + limit
    with torch.no_grad():
        drafter = make(rows, capacity)
        target = HFModel(
            large, adapter_for(large), rows=rows, capacity=capacity, tail=drafter.nodes, taps=None, ops=TORCH
        )
        engine = Engine(target, drafter, TORCH, ChoiceRule(sample=sample, process=process), rows=rows)
        return decode(engine, Request(ids, counts, list(ids), limit, frozenset(ends), None), "cascade")


def staged(models: list[Any], gamma: int, vocab: int, process: Any = None) -> Callable[[int, int], StagedDrafter]:
    more, tail = room(len(models), gamma)

    def make(rows: int, capacity: int) -> StagedDrafter:
        caches = [
            HFModel(m, adapter_for(m), rows=rows, capacity=capacity + more, tail=tail, taps=None, ops=TORCH)
            for m in models
        ]
        return StagedDrafter(
            caches, gamma, vocab=vocab, vocabs=[m.config.vocab_size for m in models], ops=TORCH, process=process
        )

    return make


def mixing_with(small: Any, gamma: int, blend: Any, vocab: int) -> Callable[[int, int], MixedDrafter]:
    def make(rows: int, capacity: int) -> MixedDrafter:
        cache = HFModel(
            small, adapter_for(small), rows=rows, capacity=capacity + gamma + 2, tail=2, taps=None, ops=TORCH
        )
        return MixedDrafter(cache, gamma, blend, vocab=vocab, draft_vocab=small.config.vocab_size, ops=TORCH)

    return make


@pytest.fixture(scope="module")
def zoo() -> dict[str, Any]:
    """Models of other seeds, vocabularies and families; "near" is often the target's opinion."""
    near = shallow_model()
    with torch.no_grad():
        near.lm_head.weight.add_(
            0.12 * torch.randn(near.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
        )
    return {
        "target": shallow_model(),
        "near": near,
        "other": tiny_model(seed=3, num_hidden_layers=1),
        "fewer tokens": shallow_model(vocab_size=90),
        "more tokens": shallow_model(vocab_size=128),
        "generic": tiny_model("gpt2", num_hidden_layers=1),
    }


@given(st.data(), st.integers(1, 6), st.integers(0, 10**6))
@examples(8)
def test_a_chain_gives_the_greedy_tokens_of_the_target(zoo, data, gamma, seed):
    chain = [zoo[name] for name in data.draw(st.lists(st.sampled_from(sorted(zoo)), min_size=1, max_size=3))]
    inputs = prompts(*data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)), seed=seed)
    assert run(zoo["target"], inputs, staged(chain, gamma, 97), 17).tokens == free(zoo["target"], inputs, 17)


def test_a_chain_of_copies_is_accepted_whole(zoo):
    """Whatever their stages below say: 18 tokens in three rounds of six, after the first."""
    target = zoo["target"]
    for chain in ([target], [zoo["other"], target], [target, target], [zoo["near"], zoo["other"], target]):
        for process in (None, lambda scores: scores / 0.8):
            torch.manual_seed(0)
            sample = process is not None
            call = run(target, prompts(1, 9), staged(chain, 5, 97, process), 19, process=process, sample=sample).stats
            assert (call.rounds, call.acceptance_length) == (3, 6)


def test_drafters_begin_another_call_on_their_caches(zoo):
    target, (first, second) = zoo["target"], (prompts(3, 12), prompts(9, 2, seed=1))
    for make in (
        staged([zoo["other"], zoo["near"]], 4, 97),
        mixing_with(zoo["near"], 4, partial(mixed, "token_v2", 0.3), 97),
    ):
        alone, drafter = run(target, second, make, 11).tokens, make(2, 40)
        run(target, first, lambda rows, capacity, drafter=drafter: drafter, 15)
        drafter.open(20)
        assert run(target, second, lambda rows, capacity, drafter=drafter: drafter, 11).tokens == alone


def test_stages_write_no_fewer_than_one():
    assert drafted(1, 5) == [5] and drafted(3, 5) == [3, 4, 5] and drafted(4, 2) == [1, 1, 1, 2]


@pytest.mark.some("['near']", "['other', 'near']")
@pytest.mark.parametrize("below", [["near"], ["other", "near"], ["near", "fewer tokens"]], ids=str)
def test_sampled_texts_of_a_chain_follow_the_target(zoo, below):
    target, ids, length = zoo["target"], torch.tensor([[17, 44, 61, 9]]), 2
    expected = distributions_of([target], ids, length, lambda each: each[0])
    texts = sampled(target, staged([zoo[name] for name in below], 3, 97, warm), ids, length)
    assert p_value(expected, texts) > SIGNIFICANCE


@pytest.mark.some("token_v3", "opt")
@pytest.mark.each_value
@pytest.mark.parametrize("rule, alpha", [("token_v1", 0.1), ("opt", 0.3), ("token_v3", 0.8)])
@pytest.mark.parametrize("small", ["near", "more tokens"])
def test_sampled_texts_follow_the_mixture(zoo, rule, alpha, small):
    target, ids, length = zoo["target"], torch.tensor([[17, 44, 61, 9]]), 2
    blend = partial(mixed, rule, alpha)
    both = [target, zoo[small]]
    expected = distributions_of(both, ids, length, lambda each: blend(*each[:4]))
    texts = sampled(target, mixing_with(zoo[small], 2, blend, 97), ids, length)
    assert p_value(expected, texts) > SIGNIFICANCE
    assert p_value(distributions_of([target], ids, length, lambda each: each[0]), texts) < SIGNIFICANCE


def warm(scores: Tensor) -> Tensor:
    """Temperature 1.5 and the eight likeliest tokens."""
    return (scores / 1.5).masked_fill(scores < scores.topk(8, -1).values[..., -1:], -torch.inf)


def sampled(target: Any, make: Any, ids: Tensor, length: int) -> list[Text]:
    """2,048 seeded texts."""
    inputs = {"input_ids": ids.expand(512, -1), "attention_mask": torch.ones(512, ids.shape[1], dtype=torch.long)}
    texts: list[Text] = []
    for seed in range(4):
        torch.manual_seed(seed)
        texts += map(tuple, run(target, inputs, make, length, process=warm, sample=True).tokens)
    return texts


@torch.no_grad()
def distributions_of(
    models: list[Any], ids: Tensor, length: int, distribution: Callable[[list[Tensor]], Tensor]
) -> dict[Text, float]:
    """The chance of every text whose tokens have the distribution made of the models' distributions over 97 tokens: all
    processed, then all not."""
    found: dict[Text, float] = {(): 1.0}
    for _ in range(length):
        texts = list(found)
        whole = torch.cat((ids.expand(len(texts), -1), torch.tensor(texts, dtype=torch.long).view(len(texts), -1)), 1)
        raw = [model(whole).logits[:, -1, :97].float() for model in models]
        chances = distribution(
            [warm(scores).softmax(-1) for scores in raw] + [scores.softmax(-1) for scores in raw]
        ).double()
        found = {
            (*text, token): found[text] * chance
            for text, row in zip(texts, chances.tolist(), strict=True)
            for token, chance in enumerate(row)
        }
    return found
