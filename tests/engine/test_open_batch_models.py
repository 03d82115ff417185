"""Open batches that draft with other models: `speculative`, and the modes `lossless` and `token` of a cascade."""

from __future__ import annotations

import copy
import random
import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.cascade import trained
from helpers.generate import NEVER, answer, kept, shallow_model, two_layers
from helpers.open import GREEDY, SECONDS, alone, texts, told

import fastspec
from fastspec import ContinuousBatch, Speculative
from fastspec.cascade.decisions import mixed
from fastspec.errors import Unsupported
from fastspec.generation.drafters.chain import ChainDrafter
from fastspec.generation.engine import batching
from fastspec.kernels.verification.reference import uniform_at
from fastspec.patches.backends import TORCH
from fastspec.patches.call.processors import RoundStreamer, StreamedRound
from fastspec.patches.session import session_of

COUNTS = (9, 3, 14, 5, 1, 7, 2, 11, 6)
SPECULATIVE = {
    "adaptive": Speculative(),
    "chains": Speculative(gamma=3),
    "branches": Speculative(gamma=3, branches=2),
    "early exit": Speculative(early_exit=1, gamma=2),
    "early exit, adaptive": Speculative(early_exit=1),
}
EXACT = (*SPECULATIVE, "lossless")
ALL = (*EXACT, "token")


@cache
def plain() -> Any:
    return kept(two_layers())


def noisy(noise: float) -> Any:
    """The large model with another LM head: drafts of which some are right."""
    model = copy.deepcopy(plain())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.lm_head.weight.add_(noise * torch.randn(model.lm_head.weight.shape, generator=generator))
    return model


def made(name: str, draft: Any = None, **over: Any) -> tuple[Any, Any]:
    """(a patched model, the assistant of this name)."""
    model = copy.deepcopy(plain())
    if name in SPECULATIVE:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*drafting will not pay")
            fastspec.patch(model, speculative=draft or noisy(0.03))
        return model, SPECULATIVE[name]
    if name == "token":
        below, names, more = [draft or noisy(0.1)], ("small", "large"), {"rule": "diff", "alpha": 0.0, "gamma": 3}
    else:
        below, names, more = [noisy(0.06), noisy(0.02)], ("small", "medium", "large"), {"gamma": 4}
    stages = [fastspec.Stage(each, name=label) for each, label in zip(below, names, strict=False)]
    settings = {"mode": name, "predictor": trained(names), "costs": [1.0, 2.0, 4.0][: len(names)], **more, **over}
    fastspec.patch(model, cascade=fastspec.Cascade(stages=stages, label="large", **settings))
    return model, session_of(model).resources["cascade"].config


def generated(model: Any, assistant: Any, ids: Any, **options: Any) -> list[int]:
    """What `generate` answers to one prompt: for a mixture its own call, else the unpatched model's."""
    given = {"do_sample": False, "eos_token_id": NEVER, "pad_token_id": 0, **options}
    if getattr(assistant, "mode", None) == "token":
        return model.generate(ids[None], assistant=assistant, **given)[0].tolist()
    return answer(plain(), {"input_ids": ids[None]}, **given)[0].tolist()


def settings_of(name: str, count: int) -> list[dict[str, Any]]:
    """A different set of greedy settings for each prompt in turn."""
    ends = alone(plain(), texts(*COUNTS)[0], 12)[-3:]
    kinds: list[dict[str, Any]] = [
        {"max_new_tokens": 17},
        {"max_new_tokens": 1},
        {"max_new_tokens": 30, "eos_token_id": ends},
        {"max_new_tokens": 12, "suppress_tokens": ends},
        {"max_new_tokens": 9, **({} if name == "token" else {"repetition_penalty": 1.4})},
    ]
    return [kinds[index % len(kinds)] for index in range(count)]


@pytest.mark.each_value
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_every_prompt_is_answered_by_its_own_settings_as_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, captured: bool
) -> None:
    """With fewer rows than prompts, whose number changes, chunks smaller than some, and rows that others had before."""
    if captured:
        stand_in(monkeypatch)
        monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", 0)
    model, assistant = made(name)
    ids, settings = texts(*COUNTS), settings_of(name, len(COUNTS))
    want = [generated(model, assistant, each, **given) for each, given in zip(ids, settings, strict=True)]
    common = {"do_sample": False, "eos_token_id": NEVER, "pad_token_id": 0}
    with fastspec.continuous(model, assistant, rows=3, max_length=64, prefill_chunk=4) as batch:
        asked = [batch.submit(each, **{**common, **given}) for each, given in zip(ids, settings, strict=True)]
        assert told(asked) == want
        again = [batch.submit(ids[at], **{**common, **settings[at]}) for at in reversed(range(5))]
        assert told(again) == want[4::-1]
        assert told([batch.submit(ids[0], **{**common, **settings[0]})]) == want[:1]
        assert 0 < batch.stats.accepted < batch.stats.drafted and batch.stats.joined == len(ids) + 6
    assert batch.running == batch.waiting == 0


@pytest.mark.some("branches", "lossless", "token-{'typical_p': 0.9}")
@pytest.mark.parametrize(
    "name, options",
    [
        *((name, {"temperature": 0.8, "top_p": 0.9}) for name in ALL if "early" not in name),
        ("token", {"typical_p": 0.9}),
    ],
    ids=str,
)
def test_a_seed_gives_its_answer_whatever_is_decoded_beside_it(name: str, options: dict[str, Any]) -> None:
    """Where the target's distribution is kept, the tokens of decoding without a draft."""
    model, assistant = made(name)
    ids = texts(*COUNTS[:5])
    given = {"do_sample": True, "eos_token_id": NEVER, "max_new_tokens": 10, **options}
    own = assistant if name == "token" else "autoregressive"
    with fastspec.continuous(model, own, rows=1, max_length=64) as batch:
        want = [told([batch.submit(each, seed=seed, **given)])[0] for seed, each in enumerate(ids)]
    with fastspec.continuous(model, assistant, rows=4, max_length=64, prefill_chunk=3) as batch:
        others = [batch.submit(each, max_new_tokens=5 + index, **GREEDY) for index, each in enumerate(ids)]
        assert told([batch.submit(each, seed=seed, **given) for seed, each in enumerate(ids)]) == want
        assert len(told(others)) == len(ids)
        assert len({tuple(each) for each in told([batch.submit(ids[0], seed=n, **given) for n in range(6)])}) > 3


@pytest.mark.each_value  # a rule reads probabilities, whatever made them
@pytest.mark.parametrize(
    "rule, alpha", [("chow", 0.75), ("diff", 0.05), ("opt", 0.15), ("token_v1", 0.1), ("token_v3", 0.5)]
)
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_a_mixtures_tokens_are_drawn_from_it_by_the_numbers_of_their_positions(
    rule: str, alpha: float, temperature: float | None
) -> None:
    small = noisy(0.1)
    model, assistant = made("token", small, rule=rule, alpha=alpha)
    how = {"do_sample": False} if temperature is None else {"do_sample": True, "top_k": 0, "temperature": temperature}
    with fastspec.continuous(model, assistant, rows=3, max_length=64) as batch:
        ids = texts(6, 3, 8)
        asked = [batch.submit(each, seed=n, max_new_tokens=20, eos_token_id=NEVER, **how) for n, each in enumerate(ids)]
        answers = told(asked)
    unlike = torch.zeros(2)
    for seed, (prompt, text) in enumerate(zip(ids, answers, strict=True)):
        with torch.no_grad():
            p_raw, q_raw = (each(torch.tensor([text])).logits[0] for each in (plain(), small))
        places = torch.arange(len(prompt), len(text))
        p_raw, q_raw = p_raw[places - 1], q_raw[places - 1]
        if temperature is None:
            p, q = (torch.nn.functional.one_hot(each.argmax(-1), each.shape[-1]).float() for each in (p_raw, q_raw))
        else:
            p, q = ((each / temperature).softmax(-1) for each in (p_raw, q_raw))
        pi = mixed(rule, alpha, p, q, p_raw.softmax(-1), q_raw.softmax(-1))
        uniform = None if temperature is None else uniform_at(torch.tensor(seed), places)[None]
        assert TORCH.pick(pi.log()[None], uniform)[0].tolist() == text[len(prompt) :]
        new = torch.tensor(text[len(prompt) :])
        unlike += torch.stack([(TORCH.pick(each.log()[None], uniform)[0] != new).sum() for each in (p, q)])
    assert unlike.all()  # neither model alone would have given these tokens


def new_parameter(draft: Any) -> None:
    draft.lm_head.weight = torch.nn.Parameter(draft.lm_head.weight.detach().flip(0).clone())


def hooked(draft: Any) -> None:
    draft.model.layers[1].mlp.register_forward_hook(lambda module, given, out: -3 * out)


def replaced(draft: Any) -> None:
    draft.model.layers[1].mlp = torch.nn.Sequential(draft.model.layers[1].mlp, torch.nn.Tanh())


def cast(draft: Any) -> None:
    draft.lm_head.weight.data.copy_(draft.lm_head.weight.flip(0))
    draft.double()


@pytest.mark.some("hooked", "cast")  # the others in test_open_batch_changes.py
@pytest.mark.filterwarnings("ignore:.*generic")
@pytest.mark.parametrize("change", [new_parameter, hooked, replaced, cast])
def test_a_draft_model_that_changes_is_read_as_it_is(change: Any) -> None:
    """A mixture follows it, so that another answer would tell; others draft by it, and go on."""
    draft, ids = noisy(0.1), texts(*COUNTS[:3])
    model, mixture = made("token", draft, alpha=0.3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*drafting will not pay")
        other = fastspec.patch(copy.deepcopy(plain()), speculative=draft)
    want = [alone(plain(), each, 12) for each in ids]
    given = {"max_new_tokens": 12, **GREEDY}
    with (
        fastspec.continuous(model, mixture, rows=2, max_length=64) as mixed,
        fastspec.continuous(other, Speculative(gamma=3), rows=2, max_length=64) as drafted,
    ):
        before = told([mixed.submit(each, **given) for each in ids])
        assert before == [generated(model, mixture, each, max_new_tokens=12) for each in ids]
        assert told([drafted.submit(each, **given) for each in ids]) == want
        change(draft)
        now = [generated(model, mixture, each, max_new_tokens=12) for each in ids]
        assert told([mixed.submit(each, **given) for each in ids]) == now != before
        assert told([drafted.submit(each, **given) for each in ids]) == want


@pytest.mark.some("small")
@pytest.mark.parametrize("end", ["large", "small"])
def test_a_mixture_of_one_model_alone_is_that_model(end: str) -> None:
    small = noisy(0.1)
    model, assistant = made("token", small, rule="chow", alpha=0.0 if end == "large" else 1.0)
    other = fastspec.patch(copy.deepcopy(plain() if end == "large" else small))
    given = {"do_sample": True, "temperature": 0.9, "eos_token_id": NEVER, "max_new_tokens": 16}
    found = []
    for each, how in ((model, assistant), (other, "autoregressive")):
        with fastspec.continuous(each, how, rows=2, max_length=64) as batch:
            found.append(told([batch.submit(ids, seed=seed, **given) for seed, ids in enumerate(texts(*COUNTS[:4]))]))
    assert found[0] == found[1]


@pytest.mark.some("branches", "early exit", "lossless")
@pytest.mark.parametrize("name", EXACT)
def test_answers_without_drafts_are_the_same_and_drafts_go_on_behind_them(name: str) -> None:
    model, assistant = made(name)
    prompts = texts(9, 5)
    with fastspec.continuous(model, assistant, rows=3, max_length=120) as batch:
        first = batch.submit(prompts[0], drafts=False, max_new_tokens=30, **GREEDY)
        assert told([first]) == [alone(plain(), prompts[0], 30)] and batch.stats.drafted == 0
        beside = [
            batch.submit(prompts[0], max_new_tokens=60, **GREEDY),
            batch.submit(prompts[1], drafts=False, max_new_tokens=25, **GREEDY),
            batch.submit(prompts[1], max_new_tokens=40, **GREEDY),
        ]
        assert told(beside) == [alone(plain(), prompts[at], count) for at, count in ((0, 60), (1, 25), (1, 40))]
        assert batch.stats.accepted > 0


class Heard(RoundStreamer):
    """Keeps (tokens, accepted, drafted) of each round."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int, int]] = []

    def put_round(self, round: StreamedRound) -> None:
        self.rounds.append((len(round.tokens), round.accepted, round.drafted))


@pytest.mark.some("branches", "early exit", "lossless", "token")
@pytest.mark.parametrize("name", ALL)
def test_drafts_of_the_same_model_are_all_accepted(name: str) -> None:
    """Whatever joins, moves and goes without drafts meanwhile: a draft model has read what its row has emitted. Else
    the answers would be the same, and drafts worse."""
    model, assistant = made(name, noisy(0.0))
    if name == "lossless":
        config = replace(assistant, stages=[fastspec.Stage(noisy(0.0), name=each) for each in ("small", "medium")])
        fastspec.unpatch(model)
        fastspec.patch(model, cascade=config)
        assistant = config
    if "early" in name:  # the layers that do not draft add nothing
        for layer in model.model.layers[assistant.early_exit :]:
            layer.self_attn.o_proj.weight.data.zero_()
            layer.mlp.down_proj.weight.data.zero_()
    ids, heard = texts(*COUNTS), [Heard() for _ in COUNTS]
    with fastspec.continuous(model, assistant, rows=3, max_length=120) as batch:
        futures = []
        for place, (each, streamer) in enumerate(zip(ids, heard, strict=True)):
            options = {"max_new_tokens": 12 + 5 * (place % 5), **GREEDY}
            futures.append(batch.submit(each, streamer=streamer, **options))
            if name != "token":
                futures.append(batch.submit(each, drafts=False, **{**options, "max_new_tokens": 7 + place}))
            if place % 4 == 3:
                futures[-1].result(SECONDS)
        told(futures)
    for each in heard:
        (_, *rounds, _) = each.rounds
        wide = getattr(assistant, "branches", 1)
        assert all(accepted * wide == drafted and accepted == tokens - 1 for tokens, accepted, drafted in rounds)
    assert sum(drafted for each in heard for _, _, drafted in each.rounds) > 20


def test_what_a_mixture_cannot_do_is_refused_by_name() -> None:
    model, assistant = made("token")
    ids = texts(5)[0]
    with fastspec.continuous(model, assistant, rows=1, max_length=64) as batch:
        with pytest.raises(Unsupported, match="mixture of two models' distributions takes no processors"):
            batch.submit(ids, repetition_penalty=1.3, max_new_tokens=4, **GREEDY)
        with pytest.raises(Unsupported, match="MixedDrafter of assistant 'cascade' does not say observes_roots"):
            batch.submit(ids, drafts=False, max_new_tokens=4, **GREEDY)
        assert told([batch.submit(ids, max_new_tokens=4, **GREEDY)])


@pytest.mark.parametrize("name", ["adaptive", "early exit, adaptive"])
def test_rows_join_and_move_while_drafts_do_not_pay(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The draft model reads what was emitted without it, by rows that had other rounds without drafts."""
    late: list[int] = []
    read = ChainDrafter._read_up
    monkeypatch.setattr(ChainDrafter, "_read_up", lambda self: late.append(self.unread.shape[1]) or read(self))
    model, assistant = made(name, shallow_model(seed=3))
    rng = random.Random(0)
    prompts = texts(*[rng.randint(1, 12) for _ in range(16)], seed=1)
    counts = [rng.choice([3, 17, 40, 80]) for _ in prompts]
    want = [alone(plain(), each, count) for each, count in zip(prompts, counts, strict=True)]
    with fastspec.continuous(model, assistant, rows=4, max_length=100) as batch:
        futures = []
        for each, count in zip(prompts, counts, strict=True):
            futures.append(batch.submit(each, max_new_tokens=count, **GREEDY))
            if len(futures) % 5 == 0:
                futures[-3].result(SECONDS)
        assert told(futures) == want
        assert batch.stats.draft_rounds < batch.stats.rounds
    assert name != "adaptive" or max(late) > 2


@pytest.mark.some("adaptive", "lossless", "token")
@pytest.mark.parametrize("name", ALL)
def test_a_conversations_next_turn_is_answered_as_a_cold_start(name: str) -> None:
    model, assistant = made(name)
    [first, more] = texts(20, 4)
    with fastspec.continuous(model, assistant, rows=2, max_length=100) as batch:
        said = batch.submit(first, max_new_tokens=12, **GREEDY).result(SECONDS)[0]
        text = torch.cat((said, more))
        future = batch.submit(text, max_new_tokens=12, **GREEDY)
        assert told([future]) == [generated(model, assistant, text, max_new_tokens=12)] and future.cached_tokens >= 16


@pytest.mark.some("chains", "early exit, adaptive", "token")
@pytest.mark.parametrize("name", ALL)
def test_generate_takes_prompts_one_after_another(name: str) -> None:
    model, assistant = made(name)
    ids = texts(*COUNTS[:5])
    width = max(map(len, ids))
    padded = torch.stack([torch.nn.functional.pad(each, (width - len(each), 0)) for each in ids])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(each), (width - len(each), 0)) for each in ids])
    out = model.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=14,
        assistant=ContinuousBatch(assistant, rows=2),
        **GREEDY,
        pad_token_id=0,
    )
    for row, each in zip(out, ids, strict=True):
        assert row[width - len(each) :].tolist() == generated(model, assistant, each, max_new_tokens=14)
    given = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 6, "eos_token_id": NEVER, "pad_token_id": 0}
    torch.manual_seed(0)
    drawn = model.generate(padded, attention_mask=mask, assistant=ContinuousBatch(assistant, rows=2), **given)
    assert drawn.shape == (5, width + 6)


def test_modes_of_one_cascade_are_opened_from_its_config() -> None:
    model, lossless = made("lossless")
    ids = texts(7)[0]
    for cascade in (lossless, replace(lossless, gamma=2)):
        with fastspec.continuous(model, cascade, rows=2, max_length=64) as batch:
            assert told([batch.submit(ids, max_new_tokens=9, **GREEDY)]) == [alone(plain(), ids, 9)]
            assert batch.info["assistant"] == "cascade" and "stages" not in batch.info
