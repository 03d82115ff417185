"""The assistants "eagle" and "eagle2" through `generate`: what the unpatched model says, on heads of the EAGLE-1/2
format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.generate import EAGLE1, NEVER, SHALLOW, bigram, kept, prompts, same, seer1, stats
from helpers.heads import EAGLE1 as PUBLISHED_KEYS
from helpers.heads import as_eagle, write
from helpers.models import DISTINCT, tiny_head, tiny_model
from helpers.sampling import CASES, SIGNIFICANCE, distribution, p_value, padded, sample

import fastspec
from fastspec import CheckpointError, Eagle1, Eagle2, Unsupported
from fastspec.generation.drafters import head_drafter
from fastspec.generation.drafters.head_drafter import StaticDrafter, draw_distinct
from fastspec.generation.tree import TokenTree
from fastspec.patches.backends import TORCH
from fastspec.patches.hf.families import ADAPTERS
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import adapter_for
from fastspec.patches.session import session_of

SMALL = [[0], [1], [0, 0], [0, 0, 0], [0, 0, 2]]
ASSISTANTS = ["eagle", Eagle1(SMALL), Eagle1(drafts="sampled"), "eagle2", Eagle2(depth=3, top_k=2, total_tokens=7)]
NAMES = ["eagle", "eagle small", "eagle sampled", "eagle2", "eagle2 small"]
EACH = pytest.mark.parametrize("assistant", ASSISTANTS, ids=NAMES)
SCALES = {
    **dict.fromkeys(("cohere", "cohere2"), lambda config: config.logit_scale),
    **dict.fromkeys(("granite", "granitemoe"), lambda config: 1 / config.logits_scaling),
    "hyperclovax": lambda config: config.logits_scaling,
}
"""What some families multiply logits by."""
GENERIC = ("gpt2", "gpt_neox", "opt", "gpt_bigcode")


def eagle_head(model: Any, **over: Any) -> Any:
    return tiny_head(model, **EAGLE1, **over)


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[Any, Any]]:
    """kind -> (unpatched, patched); one head serves both assistants."""
    pairs = {}
    for kind, (target, head) in {"random": (tiny_model, eagle_head), "bigram": (bigram, seer1)}.items():
        model = target(**SHALLOW)
        shared = head(model)
        pairs[kind] = (kept(target(**SHALLOW)), fastspec.patch(model, eagle=shared, eagle2=shared))
    return pairs


@pytest.mark.each_value
@EACH
@pytest.mark.parametrize("kind", ["random", "bigram"])
@pytest.mark.parametrize("lengths", [(7,), (3, 12, 1, 7)])
def test_greedy(made, kind, assistant, lengths):
    same(made[kind], assistant, prompts(*lengths), eos_token_id=NEVER)
    assert stats(made[kind][1]).assistant == (assistant if isinstance(assistant, str) else assistant.name)


@EACH
def test_what_a_head_knows_is_accepted(made, assistant):
    """A head that knows its target fills every path of a static tree: its depth in drafts, and the bonus token."""
    same(made["bigram"], assistant, prompts(9), max_new_tokens=61, eos_token_id=NEVER)
    reached = stats(made["bigram"][1]).acceptance_length
    if stats(made["bigram"][1]).assistant == "eagle":
        assert reached == 1 + max(map(len, (assistant if isinstance(assistant, Eagle1) else Eagle1()).tree()))
    else:
        assert reached > 4.0


@pytest.mark.each_value
@EACH
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 1, "repetition_penalty": 1.3},
        {"top_k": 1, "no_repeat_ngram_size": 2, "temperature": 0.7},
    ],
)
@pytest.mark.parametrize("kind", ["random", "bigram"])
def test_a_sample_of_one_token_is_the_greedy_text(made, kind, assistant, options):
    """With top_k=1 a single token has any probability: all but the first child of a drawn node were not drawn."""
    same(made[kind], assistant, prompts(5, 9), do_sample=True, eos_token_id=NEVER, **options)


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("llama", "gpt2", *SCALES) else pytest.param(kind, marks=pytest.mark.slow)
        for kind in (*DISTINCT, *GENERIC)
    ],
)
def test_every_family(kind):
    """Here those whose LM head scales what it reads, and one of each mode: the next test holds all to the feature that
    heads read of them, and tests/patches/hf/test_families.py to the trees."""
    model = tiny_model(kind, **SHALLOW)
    inputs, options = prompts(9, 3, 6), {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**inputs, **options)
    head = eagle_head(model)
    with fastspec.patched(model, eagle=head, eagle2=head):
        # Both read the same features: each family is held to one of the two, in turn.
        assistant = Eagle1(SMALL) if [*DISTINCT, *GENERIC].index(kind) % 2 else Eagle2(depth=2, top_k=3, total_tokens=7)
        assert torch.equal(model.generate(**inputs, **options, assistant=assistant), expected)
        assert fastspec.report(model).mode.startswith("adapter" if kind in ADAPTERS else "generic")


@pytest.mark.parametrize("kind", [*DISTINCT, *GENERIC])
@torch.no_grad()
def test_the_feature_is_what_the_lm_head_reads(kind):
    """Taps () give the last hidden state after the final norm, of the prompt and of the nodes of a tree."""
    model = tiny_model(kind, **SHALLOW)
    ids, counts = prompts(7)["input_ids"].expand(2, -1), torch.tensor([7, 4])
    target = HFModel(model, adapter_for(model), rows=2, capacity=20, tail=3, taps=(), ops=TORCH)
    last, features = target.prefill(ids, counts)
    tree = TokenTree.from_parents(torch.tensor([[9, 11, 12]] * 2), torch.tensor([[0, 0, 1]] * 2))
    logits, below = target.score(tree, 7)
    for row, count in enumerate(counts.tolist()):
        text = torch.cat((ids[row, :count], tree.tokens[row]))[None]
        out = model(text, output_hidden_states=True)
        found = torch.cat((features[row, :count], below[row]))
        # As in test_adapters.py: a few layers amplify fp32's rounding to up to 4e-5 of the largest value.
        torch.testing.assert_close(
            found, out.hidden_states[-1][0], rtol=0.0, atol=1e-4 * float(out.hidden_states[-1].abs().max())
        )
        emitted = model.get_output_embeddings()(found)
        cap = getattr(model.config, "final_logit_softcapping", None)
        emitted = emitted if cap is None else cap * torch.tanh(emitted / cap)
        emitted = emitted * SCALES.get(kind, lambda config: 1.0)(model.config)
        torch.testing.assert_close(emitted[count:], logits[row], rtol=0.0, atol=1e-4 * float(logits.abs().max()))
        torch.testing.assert_close(emitted[count - 1], last[row], rtol=0.0, atol=1e-4 * float(logits.abs().max()))


@pytest.fixture(scope="module")
def sampled() -> Any:
    """A target whose drafts are taken and refused: its head knows the bigrams alone, and is less sure of them."""
    model = tiny_model(seed=1, num_hidden_layers=3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.5)
            layer.mlp.down_proj.weight.mul_(0.3)
    head = seer1(model)
    head.fc.weight.mul_(0.7)
    return fastspec.patch(model, eagle=head, eagle2=head)


def evidence(model: Any, options: dict[str, Any], assistant: Any) -> float:
    """The p-value of the sampled texts of two or three tokens under the target's distribution."""
    ids = torch.tensor([[17, 44, 61, 9]])
    length = 3 if "top_k" in options else 2
    merged: dict[tuple[int, ...], float] = {}
    for text, chance in distribution(model, ids, options, length).items():
        merged[padded(text)] = merged.get(padded(text), 0.0) + chance
    found = p_value(merged, sample(model, ids, options, assistant, length))
    assert 0 < stats(model).accepted < stats(model).row_rounds * 2  # some drafts are taken and some are not
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "assistant"),
    [
        ("temperature", Eagle1(SMALL)),
        ("temperature", Eagle1(SMALL, "sampled")),
        ("temperature", Eagle1(drafts="sampled")),
        ("all four", Eagle1(drafts="sampled")),
        ("all four", Eagle2(2, 3, 10)),
        ("history", Eagle1(SMALL, "sampled")),
    ],
)
def test_sampled_texts_follow_the_targets_distribution(sampled, case, assistant):
    assert evidence(sampled, CASES[case], assistant) > SIGNIFICANCE


@pytest.mark.slow
def test_a_wrong_q_is_found(sampled, monkeypatch):
    def wrong(probs: torch.Tensor, noise: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, q = draw_distinct(probs, noise, count)
        return ids, q / 2  # half as likely as they were, so taken too often

    monkeypatch.setattr(head_drafter, "draw_distinct", wrong)
    assert evidence(sampled, CASES["all four"], Eagle1(drafts="sampled")) < SIGNIFICANCE


def test_drafts_are_drawn_only_where_the_call_samples_from_rows(sampled, monkeypatch):
    drawn = []
    propose = StaticDrafter.propose

    def spy(self: StaticDrafter, extent: int) -> Any:
        tree = propose(self, extent)
        drawn.append(tree.q is not None)
        return tree

    monkeypatch.setattr(StaticDrafter, "propose", spy)
    history = {"do_sample": True, "repetition_penalty": 1.2}
    for options, want in (({"do_sample": True}, True), ({"do_sample": False}, False), (history, False)):
        for config in (Eagle1(SMALL, "sampled"), Eagle1(SMALL)):
            drawn.clear()
            sampled.generate(**prompts(5), max_new_tokens=4, assistant=config, **options)
            assert set(drawn) == {want and config.drafts == "sampled"}


def test_a_seed_decides_a_drawn_sample(sampled):
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        options = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 12, "eos_token_id": NEVER}
        texts.append(sampled.generate(**prompts(5, 3), **options, assistant=Eagle1(drafts="sampled")).tolist())
    assert texts[0] == texts[1] != texts[2]


def test_one_head_serves_both_assistants():
    model = tiny_model()
    head = eagle_head(model)
    fastspec.patch(model, eagle=head, eagle2=head)
    resources = session_of(model).resources
    assert resources["eagle"] is resources["eagle2"] and resources["eagle"].module.fc.weight is head.fc.weight
    expected = model.double().generate(**prompts(5), max_new_tokens=8, do_sample=False)
    for name in ("eagle", "eagle2"):
        assert torch.equal(model.generate(**prompts(5), max_new_tokens=8, do_sample=False, assistant=name), expected)
    assert resources["eagle"] is resources["eagle2"] and resources["eagle"].module.fc.weight.dtype == torch.float64


def test_a_published_head_from_disk(tmp_path):
    model = tiny_model()
    head = tiny_head(model, **{**PUBLISHED_KEYS, "draft_vocab_size": 97})
    write(tmp_path, *as_eagle(head, model.get_input_embeddings().weight.detach().clone()))
    expected = model.generate(**prompts(5, 8), max_new_tokens=12, do_sample=False)
    with fastspec.patched(model, eagle=tmp_path, eagle2=tmp_path):
        assert session_of(model).resources["eagle"] is session_of(model).resources["eagle2"]
        for name in ("eagle", "eagle2"):
            assert torch.equal(
                model.generate(**prompts(5, 8), max_new_tokens=12, do_sample=False, assistant=name), expected
            )


@pytest.mark.parametrize("name", ["eagle", "eagle2", "eagle3"])
def test_heads_of_the_other_kind_are_refused(name):
    model = tiny_model()
    wrong, takes = (
        (eagle_head(model), "eagle=head or eagle2=head") if name == "eagle3" else (tiny_head(model), "eagle3=head")
    )
    with pytest.raises(
        CheckpointError, match=rf"{name}=this EagleHead is an EAGLE-.* head: fastspec\.patch\(model, {takes}\)"
    ):
        fastspec.patch(model, **{name: wrong})
    assert session_of(model) is None


def test_what_cannot_be_done_is_refused_by_name(made):
    model = tiny_model()
    with fastspec.patched(model, eagle3=tiny_head(model)):
        for name in ("eagle", "eagle2"):
            with pytest.raises(Unsupported, match=rf"fastspec\.patch\(model, {name}="):
                model.generate(**prompts(3), max_new_tokens=2, assistant=name)
    with pytest.raises(Unsupported, match=r"98 children .* vocabulary of 97"):
        made["random"][1].generate(**prompts(3), max_new_tokens=2, assistant=Eagle1([[97]]))


def test_a_rank_of_the_whole_vocabulary_is_a_tree(made):
    same(made["random"], Eagle1([[96], [0]]), prompts(5), max_new_tokens=5)
    same(made["random"], Eagle1([[rank] for rank in range(97)]), prompts(5), max_new_tokens=9, eos_token_id=NEVER)
    assert stats(made["random"][1]).acceptance_length == 2.0  # every token hangs below the root
