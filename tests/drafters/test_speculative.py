"""The assistant `speculative`: the target's own tokens and distribution, whatever the draft model is, and drafts as
long as they pay."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.generate import SHALLOW, bigram, kept, prompts, same, stats
from helpers.models import tiny_model
from helpers.sampling import CASES, check_distribution
from helpers.tokenizers import DRAFT, TARGET
from hypothesis import given
from hypothesis import strategies as st

import fastspec
from fastspec import Speculative
from fastspec.errors import Unsupported
from fastspec.generation.drafters import policy as draft_length
from fastspec.generation.drafters.chain import ChainDrafter
from fastspec.generation.drafters.policy import COSTS, LAYERS, Length
from fastspec.generation.target import Target
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.patches.assistants.speculative import SpeculativeDecoding, draft_cost
from fastspec.patches.backends import TORCH
from fastspec.patches.hf.cache import CACHE, kept_cache
from fastspec.patches.session import session_of

CONFIGS = [
    Speculative(),
    Speculative(gamma=1),
    Speculative(gamma=5),
    Speculative(gamma=4, branches=3),
    Speculative(most=5, branches=2),
]
EARLY = [Speculative(early_exit=4, gamma=3), Speculative(early_exit=2), Speculative(early_exit=5, gamma=4, branches=2)]
NEVER = 1000


def patched(target: Any, draft: Any) -> Any:
    """The target with a draft model, which may be as large as it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*drafting will not pay")
        return fastspec.patch(target, speculative=draft)


@pytest.fixture(scope="module", params=["itself", "another", "smaller vocabulary", "larger vocabulary", "generic"])
def drafted(request):
    """(the unpatched target, the same patched) with drafts of a copy of the target, of another model, of other
    sizes."""
    drafts: dict[str, dict[str, Any]] = {
        "itself": {},
        "another": {"seed": 3},
        "smaller vocabulary": {"vocab_size": 90},
        "larger vocabulary": {"vocab_size": 128},
        "generic": {"model_type": "gpt2"},
    }
    draft = tiny_model(**drafts[request.param], **SHALLOW)
    return kept(tiny_model(**SHALLOW)), patched(tiny_model(**SHALLOW), draft)


def test_a_draft_model_as_large_as_the_target_brings_a_warning_with_numbers():
    with pytest.warns(
        UserWarning, match=r"reads [\d.]+ M weights a token and the target [\d.]+ M: drafting will not pay"
    ):
        fastspec.patch(tiny_model(), speculative=tiny_model(seed=1))


OTHER = {"bos_token_id": 2, "eos_token_id": 6, "pad_token_id": 7}


def test_models_of_other_special_tokens_bring_a_warning_with_both_values():
    small = {"num_hidden_layers": 1}
    message = r"bos_token_id \[2\] and \[1\]; eos_token_id \[6\] and \[5\]; pad_token_id \[7\] and \[0\]"
    with pytest.warns(UserWarning, match=message) as told:
        fastspec.patch(tiny_model(), speculative=tiny_model(**OTHER, **small))
    assert "speculative=(draft_model, draft_tokenizer, tokenizer)" in str(told[0].message)
    silent = [tiny_model(**small), tiny_model(**dict.fromkeys(OTHER), **small), tiny_model(**OTHER, **small)]
    silent[2].generation_config.update(
        bos_token_id=1, eos_token_id=[6, 5], pad_token_id=0
    )  # the config knows others, as of a base model
    pair = (tiny_model(**OTHER, **small), DRAFT, TARGET)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for draft in (*silent, pair):
            fastspec.patch(tiny_model(), speculative=draft)


def test_drafts_that_are_never_accepted_bring_one_warning_with_numbers():
    call: dict[str, Any] = {**prompts(6), "do_sample": False, "max_new_tokens": 60, "eos_token_id": NEVER}
    model = patched(tiny_model(), tiny_model(seed=3))
    with pytest.warns(
        UserWarning, match=r"accepted in \d+ of (3[2-9]|[45]\d) rounds: .*\(draft_model, draft_tokenizer, tokenizer\)"
    ):
        model.generate(**call, assistant=Speculative(gamma=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(**call, assistant=Speculative(gamma=2))  # once
        near_enough, few = patched(tiny_model(), near(tiny_model())), patched(tiny_model(), tiny_model(seed=3))
        near_enough.generate(**call, assistant=Speculative(gamma=2))
        few.generate(**call | {"max_new_tokens": 20}, assistant=Speculative(gamma=2))
        few.generate(**call, assistant=Speculative(early_exit=1, gamma=2))
        few.generate(**call, assistant="speculative")  # drafts are tried in a few rounds alone
    assert stats(few).draft_rounds < 32


@pytest.mark.each_value  # a tree does not hang on whose drafts it holds
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_greedy_tokens_are_the_targets(drafted, config):
    same(drafted, config, prompts(7))
    same(drafted, config, prompts(3, 9, 17), eos_token_id=[5, 11, 40], max_new_tokens=24)


@pytest.mark.some(
    "Speculative(gamma=None, most=8, branches=1, early_exit=2)",
    "Speculative(gamma=4, most=8, branches=2, early_exit=5)",
)
@pytest.mark.parametrize("config", EARLY, ids=str)
def test_greedy_tokens_are_the_targets_where_its_own_layers_draft(config):
    pair = tiny_model(num_hidden_layers=6), fastspec.patch(tiny_model(num_hidden_layers=6))
    same(pair, config, prompts(7))
    same(pair, config, prompts(3, 9, 17), eos_token_id=[5, 11, 40], max_new_tokens=33)


def test_a_perfect_draft_is_accepted_whole():
    model = patched(tiny_model(), tiny_model())
    for gamma, branches in ((1, 1), (3, 1), (4, 3)):
        model.generate(
            **prompts(5, 8),
            do_sample=False,
            max_new_tokens=41,
            eos_token_id=NEVER,
            assistant=Speculative(gamma=gamma, branches=branches),
        )
        assert stats(model).acceptance_length == gamma + 1
    for seed in range(3):
        torch.manual_seed(seed)
        model.generate(
            **prompts(5, 8),
            do_sample=True,
            top_k=9,
            max_new_tokens=33,
            eos_token_id=NEVER,
            assistant=Speculative(gamma=3),
        )
        assert stats(model).acceptance_length == 4  # p = q: nothing is refused


def near(target: Any) -> Any:
    """A draft model that is often right and often wrong."""
    draft = copy.deepcopy(target)
    torch.manual_seed(0)
    with torch.no_grad():
        draft.lm_head.weight.add_(0.1 * torch.randn_like(draft.lm_head.weight))
    return draft


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, config",
    [
        ("temperature", Speculative(gamma=2)),
        ("all four", Speculative(gamma=2)),
        ("history", Speculative(gamma=2)),
        ("all four", Speculative(gamma=2, branches=2)),
        ("all four", Speculative(gamma=2, early_exit=2)),
    ],
    ids=str,
)
def test_sampled_texts_follow_the_targets_distribution(case, config):
    target = tiny_model(seed=1, num_hidden_layers=4)
    model = patched(target, near(target))
    check_distribution(model, CASES[case], config)
    call = stats(model)
    assert 0 < call.accepted < call.drafted  # some drafts are taken and some are not


class Dice(Target):
    """A draft model of four tokens whose next token depends on the last one alone."""

    lengths: Any = None

    SCORES = torch.tensor([[3.0, 1.0, 0.0, -1.0], [0.5, 0.4, 0.3, 0.0], [0.0, 4.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])

    def __init__(self) -> None:
        self.lengths = torch.zeros(1, dtype=torch.long)

    def prefill(self, ids: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.SCORES[ids[:, -1]], ids[..., None][..., :0]

    def score(self, tree: TokenTree, extent: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.SCORES[tree.tokens], tree.tokens[..., None][..., :0]

    def commit(self, verdict: Verdict, active: torch.Tensor) -> None:
        self.lengths += verdict.accepted + 1

    def rewind(self, lengths: torch.Tensor) -> None:
        self.lengths = lengths

    def open(self, capacity: int) -> None:
        raise AssertionError("no second call here")


def test_whether_to_draft_on_does_not_depend_on_what_would_be_drawn():
    """Else unlikely drafts would be dropped, and the drafts' distribution would not be the q that judges them."""
    went_on: dict[tuple[int, ...], set[bool]] = {}
    for seed in range(400):
        torch.manual_seed(seed)
        drafter = ChainDrafter(
            Dice(), Length(4, 0.1), branches=1, vocab=4, draft_vocab=4, ops=TORCH, process=lambda scores: scores
        )
        drafter.begin(torch.tensor([[1, 2]]), torch.tensor([2]), torch.zeros(1, 2, 0), torch.tensor([1]))
        tree = drafter.propose(0)
        drafts = tuple(tree.tokens[0, 1:].tolist())
        assert tree.q is not None and torch.equal(tree.q[0, 1:], Dice.SCORES[tree.tokens[0, :-1]].softmax(-1))
        for count in range(1, min(len(drafts), 3) + 1):
            went_on.setdefault(drafts[:count], set()).add(count < len(drafts))
    assert all(len(answers) == 1 for answers in went_on.values())
    assert {True, False} == set().union(*went_on.values())  # some texts are drafted on and some are not


def test_a_row_that_has_ended_takes_no_more_room_in_the_drafts_cache():
    drafter = ChainDrafter(Dice(), Length(2), branches=1, vocab=4, draft_vocab=4, ops=TORCH, process=None)
    drafter.begin(torch.tensor([[1, 2], [1, 2]]), torch.tensor([2, 2]), torch.zeros(2, 2, 0), torch.tensor([1, 3]))
    for _ in range(3):
        tree = drafter.propose(0)
        verdict = Verdict(torch.tensor([[0, 1, 2]] * 2), torch.tensor([1, 2]), torch.tensor([2, 2]))
        drafter.observe(tree, verdict, torch.zeros(2, 3, 4), torch.zeros(2, 3, 0), torch.tensor([True, False]), 0)
    assert drafter.draft.lengths.tolist() == [1 + 3 * 2, 1] and drafter.root.tolist() == [2, 3]


def test_branches_are_the_likeliest_tokens_whatever_a_call_draws_from():
    drafter = ChainDrafter(
        Dice(), Length(2), branches=2, vocab=4, draft_vocab=4, ops=TORCH, process=lambda scores: -scores
    )
    drafter.begin(torch.tensor([[1, 2]]), torch.tensor([2]), torch.zeros(1, 2, 0), torch.tensor([1]))
    tree = drafter.propose(0)
    assert tree.tokens.tolist() == [[1, 0, 1, 0, 1]] and tree.parents.tolist() == [[0, 0, 0, 1, 1]]
    assert tree.q is None and not drafter.traits.draws


def test_early_layers_draft_on_the_targets_cache():
    model = bigram()  # its layers add nothing, so every early exit knows the answer
    fastspec.patch(model)
    decoding = SpeculativeDecoding(Speculative(gamma=3, early_exit=2), model, model)
    made: list[Any] = []
    bind = ChainDrafter.bind

    def spy(self, target):
        bind(self, target)
        made.append((self, target))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChainDrafter, "bind", spy)
        model.generate(**prompts(4, 6), do_sample=False, max_new_tokens=21, eos_token_id=NEVER, assistant=decoding)
    assert stats(model).acceptance_length == 4
    drafter, target = made[0]
    first, whole = drafter.draft.state.kinds[0], target.state.kinds[0]
    assert first.k.data_ptr() == whole.k.data_ptr() and first.k.shape[0] == 2
    assert torch.equal(drafter.draft.lengths, target.lengths)


def test_the_next_turn_of_a_chat_is_drafted_with_the_whole_text():
    plain, *pair = (tiny_model(seed=1) for _ in range(3))  # which says no padding token
    model = patched(*pair)
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": NEVER, "return_dict_in_generate": True}
    first = model.generate(**prompts(6), max_new_tokens=9, assistant=Speculative(gamma=3), **options)
    ids = torch.cat((first.sequences, torch.tensor([[7, 8, 9]])), 1)
    second = model.generate(
        ids, **{CACHE: kept_cache(first)}, max_new_tokens=13, assistant=Speculative(gamma=3), **options
    )
    assert stats(model).acceptance_length == 4
    expected = plain.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=13, eos_token_id=NEVER
    )
    assert second.sequences.tolist() == expected.tolist()


@given(st.fractions(0, 1), st.lists(st.fractions(0, 1), max_size=7), st.fractions(Fraction(1, 100), 2))
def test_one_more_token_is_drafted_where_it_raises_the_yield(chance, before, cost):
    survivals = [Fraction(1)]
    for share in before:
        survivals.append(survivals[-1] * share)
    drafted, expected, survival = len(before), 1 + sum(survivals[1:]), survivals[-1] * chance
    rate, next_rate = expected / (1 + drafted * cost), (expected + survival) / (1 + (drafted + 1) * cost)
    length = Length(8, cost)  # type: ignore[arg-type]
    assert length.goes_on(survival, expected, drafted) == (next_rate > rate)  # type: ignore[arg-type]
    assert not length.goes_on(1.0, 1.0, 8)


def test_drafts_are_shorter_where_the_draft_model_is_unsure():
    """And where it is sure and wrong: its word counts for less then; where it is sure and right drafts are as long as
    they may be."""
    target = bigram()
    right, wrong, unsure = (tiny_model(num_hidden_layers=1) for _ in range(3))
    with torch.no_grad():
        layer = right.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        for own, theirs in ((right.model.embed_tokens, target.model.embed_tokens), (right.lm_head, target.lm_head)):
            own.weight.copy_(theirs.weight)
        unsure.lm_head.weight.mul_(0.05)
        for sure in (right, wrong):
            sure.lm_head.weight.mul_(20.0)
    drafted = []
    for draft in (right, wrong, unsure):
        model = patched(bigram(), draft)
        with proposed() as rounds:
            model.generate(
                **prompts(6), do_sample=False, max_new_tokens=60, eos_token_id=NEVER, assistant=Speculative(most=3)
            )
        drafted.append([count for count in rounds if count])
        assert draft is right or len(drafted[-1]) < len(rounds) / 3  # most go without
    assert set(drafted[0]) == {3} and drafted[1][0] == 3 and set(drafted[1][2:]) == {1} == set(drafted[2])


@contextmanager
def proposed() -> Iterator[list[int]]:
    """How many tokens each round's draft model drafted."""
    counts: list[int] = []
    propose, rest = ChainDrafter.propose, ChainDrafter.pause

    def spy(self, extent):
        tree = propose(self, extent)
        counts.append((tree.tokens.shape[1] - 1) // self.branches)
        return tree

    def idle(self):
        rounds = rest(self)
        counts.extend([0] * rounds)
        return rounds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChainDrafter, "propose", spy)
        patch.setattr(ChainDrafter, "pause", idle)
        yield counts


@pytest.mark.some(
    "Speculative(gamma=None, most=8, branches=2, early_exit=None)",
    "Speculative(gamma=None, most=8, branches=1, early_exit=2)",
)
@pytest.mark.parametrize("config", [Speculative(), Speculative(branches=2), Speculative(early_exit=2)], ids=str)
def test_a_draft_model_that_is_no_good_is_asked_seldom(config):
    """And then reads all that was said meanwhile: one that is right from some place on is taken up again."""
    target = tiny_model()
    model, plain = patched(target, tiny_model(seed=3)), tiny_model()
    session_of(model).warned = True  # that its drafts are not accepted
    with proposed() as counts:
        same((plain, model), config, prompts(3, 9), max_new_tokens=90, eos_token_id=NEVER)
    tried = [place for place, count in enumerate(counts) if count]
    pause = max(b - a for a, b in pairwise(tried))
    assert len(tried) < len(counts) / 3 and pause > 10
    with proposed() as counts:
        same((plain, model), replace(config, gamma=1), prompts(3, 9), max_new_tokens=30, eos_token_id=NEVER)
    assert all(counts)  # a number that was asked for is kept to


def test_what_a_draft_costs_is_counted_by_weights_layers_and_the_host():
    target, draft = tiny_model(num_hidden_layers=4), tiny_model(num_hidden_layers=1)
    head = target.lm_head.weight.numel()
    read, little = (
        sum(p.numel() for p in m.parameters()) - m.model.embed_tokens.weight.numel() for m in (target, draft)
    )
    assert draft_cost(draft, target, "cpu") == pytest.approx(little / read)
    assert draft_cost(target, target, "cpu", 1) == pytest.approx((head + (read - head) / 4) / read)
    times = COSTS["cuda"]
    passes = [
        times.one * layers / LAYERS + 4 * count / times.bytes_per_ms for layers, count in ((1, little), (4, read))
    ]
    assert draft_cost(draft, target, "cuda") == pytest.approx((times.drafted + passes[0]) / passes[1])
    assert draft_cost(target, target, "cuda", 4) > 1 > draft_cost(target, target, "cpu", 3)


def test_drafts_are_taken_up_again_behind_a_pause():
    """The draft model is the target, its cost is set: what it drafts behind rounds without drafts is right."""
    model = patched(tiny_model(), tiny_model())
    inputs = {**prompts(4, 11), "do_sample": False, "max_new_tokens": 60, "eos_token_id": NEVER}
    with pytest.MonkeyPatch.context() as patch, proposed() as counts:
        patch.setattr("fastspec.patches.assistants.speculative.read_weights", lambda each: 1 if each is model else 0.2)
        patch.setattr(draft_length, "BUDGET", 0.0)
        model.generate(**inputs, assistant=Speculative(most=3))
    assert counts[:4] == [0] * 4 and all(counts[4:]) and stats(model).accepted == stats(model).drafted


def test_no_pass_of_the_draft_model_is_run_for_a_token_that_is_not_drafted():
    draft = tiny_model(num_hidden_layers=1)
    with torch.no_grad():
        draft.lm_head.weight.mul_(0.05)  # unsure: a draft a round
    model, passes = patched(tiny_model(), draft), []
    feed = ChainDrafter._feed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChainDrafter, "_feed", lambda self, *given: (passes.append(1), feed(self, *given))[1])
        model.generate(**prompts(6), do_sample=False, max_new_tokens=20, eos_token_id=NEVER, assistant="speculative")
    assert 0 < len(passes) == stats(model).drafted < stats(model).rounds


@pytest.mark.parametrize(
    "draft, message",
    [
        (lambda target: target, "is the target itself"),
        (lambda target: tiny_model(vocab_size=5000), "vocabulary of 5000 tokens and the target one of 97"),
        (lambda target: tiny_model().to("meta"), "on meta and the target on cpu"),
        (lambda target: torch.nn.Linear(2, 2), r"^speculative= takes a transformers model, .*, not a Linear: load one"),
        (
            lambda target: "a/draft",
            r"^speculative= takes .*\(draft_model, draft_tokenizer, tokenizer\).*, not 'a/draft': load one",
        ),
        (lambda target: ("a/draft", DRAFT, TARGET), r"^speculative= takes a transformers model, .*, not 'a/draft'"),
        (
            lambda target: (tiny_model(), DRAFT),
            r"\(draft_model, draft_tokenizer, tokenizer\) takes .*, not \(LlamaForCausalLM, \w+\)",
        ),
    ],
)
def test_a_draft_model_that_cannot_draft_is_refused(draft, message):
    target = tiny_model()
    before = dict(target.__dict__)
    with pytest.raises(Unsupported, match=message):
        fastspec.patch(target, speculative=draft(target))
    assert target.__dict__ == before


@pytest.mark.parametrize(
    "options",
    [{"gamma": 0}, {"gamma": -1}, {"most": 0}, {"branches": 0}, {"early_exit": 0}, {"gamma": 64, "branches": 4}],
)
def test_sizes_that_make_no_draft_are_refused(options):
    with pytest.raises(Unsupported):
        Speculative(**options)


def test_what_is_missing_is_named():
    model = fastspec.patch(tiny_model())
    with pytest.raises(Unsupported, match=r"fastspec\.patch\(model, speculative=draft_model\)"):
        model.generate(**prompts(3), assistant="speculative")
    with pytest.raises(Unsupported, match="has 3 layers, so at most 2"):
        model.generate(**prompts(3), assistant=Speculative(early_exit=3))
    with pytest.raises(Unsupported, match="generic mode"):
        fastspec.patch(tiny_model("gpt2")).generate(**prompts(3), assistant=Speculative(early_exit=2))
    assert session_of(model).resources == {}
