"""Grammars: masks over trees against one node at a time, and assisted answers against plain decoding's."""

from __future__ import annotations

import copy
import json
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.generate import TREE, prompts, seer
from helpers.grammars import END, SCHEMA, SIZE, TOKENIZER, is_valid, terse
from helpers.threads import Writes
from helpers.tokenizers import TARGET
from torch import Tensor
from transformers import LogitsProcessor

import fastspec
from fastspec.errors import NoDistribution, Unsupported
from fastspec.generation.constraint import AnyToken, Masks, roots_of
from fastspec.generation.engine.schedule import FedGraph, FedTreeGraph
from fastspec.generation.tree import TokenTree
from fastspec.generation.verify import pick_allowed, walk
from fastspec.patches.backends import TORCH
from fastspec.patches.call.grammar import GrammarState
from fastspec.patches.cascade.settings import refuse
from fastspec.patches.session import session_of

llguidance = pytest.importorskip("llguidance")

GRAMMARS: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": SCHEMA},
    "regex": {"regex": r"[a-f]{3,5}(/[0-9]+){2}\."},
    "choice": {"choice": ["true", "trudge", "12 a", 'q"']},
    "ebnf": {"ebnf": 'root ::= "(" root ")" | "a" root "b" | "12"'},
}
ASSISTANTS = "autoregressive", "eagle3", "nasd", "speculative"


def said(tokens: list[int]) -> str:
    text: str = TOKENIZER.decode(tokens, skip_special_tokens=True)
    return text


def allowed(mask: Tensor) -> list[int]:
    words = mask.tolist()
    return [token for token in range(SIZE) if words[token // 32] >> (token % 32) & 1]


def masks_of(state: GrammarState, answer: list[int], tokens: list[int], parents: list[int]) -> Tensor:
    """Masks [N, W] of a tree behind an answer."""
    masks = torch.zeros(len(tokens), state.words, dtype=torch.int32)
    state.fill(masks, answer, tokens, parents)
    return masks


class Drawn:
    """A constraint whose masks are given."""

    allows: Any = None

    def __init__(self, masks: Tensor) -> None:
        self.masks, self.words = masks, masks.shape[1]

    def fill(self, masks: Tensor, answer: list[int], tokens: list[int], parents: list[int]) -> None:
        masks.copy_(self.masks)


class Guided(LogitsProcessor):
    """A matcher for each row, in the way llguidance's documentation shows for transformers; for one call."""

    def __init__(self, grammar: fastspec.Grammar) -> None:
        self.grammar, self.matchers = grammar, []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.matchers:
            self.matchers = [self.grammar.matcher() for _ in input_ids]
        else:
            for matcher, token in zip(self.matchers, input_ids[:, -1].tolist(), strict=True):
                if not matcher.is_stopped():
                    assert matcher.consume_token(token)
        for row, matcher in enumerate(self.matchers):
            mask = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
            kept = set(allowed(mask))
            scores[row, [token for token in range(SIZE) if token not in kept]] = -torch.inf
        return scores


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A model, and the same patched."""
    model = terse()
    return terse(), fastspec.patch(model, eagle3=seer(model), speculative=terse(1))


@pytest.fixture(scope="module", params=GRAMMARS)
def grammar(request: pytest.FixtureRequest) -> fastspec.Grammar:
    return fastspec.Grammar(TOKENIZER, **GRAMMARS[request.param])


def test_masks_of_trees_are_those_of_each_node_by_itself(grammar: fastspec.Grammar) -> None:
    """A state that is rolled through trees behind many answers, the next often no continuation of the last."""
    rng, state = random.Random(0), GrammarState(grammar)
    answers: list[list[int]] = [[]]
    for _ in range(80):
        answer = rng.choice(answers)
        nodes = rng.randint(1, 12)
        parents = [0, *(rng.randrange(node) for node in range(1, nodes))]
        texts, tokens = [answer], [0]
        for parent in parents[1:]:
            alone = GrammarState(grammar)
            fits = alone.follows(texts[parent]) and rng.random() < 0.8
            token = rng.choice(allowed(masks_of(alone, texts[parent], [0], [0])[0])) if fits else rng.randrange(SIZE)
            tokens.append(token)
            texts.append([*texts[parent], token])
        masks = masks_of(state, answer, tokens, parents)
        for text, mask in zip(texts, masks, strict=True):
            alone = GrammarState(grammar)
            if alone.follows(text):
                assert torch.equal(mask, masks_of(alone, text, [0], [0])[0])
                answers.append(text)
            else:
                assert mask.eq(-1).all()


def test_what_comes_after_the_end_of_a_grammar_counts_for_nothing() -> None:
    state = GrammarState(fastspec.Grammar(TOKENIZER, choice=["12"]))
    token = TOKENIZER.convert_tokens_to_ids("12")
    masks = masks_of(state, [], [0, token, 5, 5, token, 6], [0, 0, 1, 2, 3, 0])
    assert [allowed(mask) for mask in masks[1:5]] == [[END]] * 4
    assert masks[5].eq(-1).all() and token in allowed(masks[0])
    assert allowed(masks_of(state, [token, 5, 5, 7], [0], [0])[0]) == [5]
    with pytest.raises(Unsupported, match="does not allow token 9"):
        masks_of(state, [9], [0], [0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [90, 128, 150])
def test_masked_logits_lack_what_a_mask_forbids_and_what_it_has_no_bit_for(size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 4, size, dtype=dtype)
    mask = torch.randint(-(2**31), 2**31 - 1, (4, 4), dtype=torch.int32)
    masks = Masks(logits.device)
    masks.fill(([[0] * 4] * 3,) * 2, size, [(1, Drawn(mask), [])])
    found = masks.masked(logits)
    assert torch.equal(found[[0, 2]], logits[[0, 2]])
    for node in range(4):
        kept = [token for token in allowed(mask[node]) if token < size]
        assert torch.equal(found[1, node, kept], logits[1, node, kept])
        assert int((found[1, node] == -torch.inf).sum()) == size - len(kept)


@pytest.mark.parametrize("size", [90, 128, 150])
def test_masks_of_unequal_width_are_those_of_each_by_itself(size: int) -> None:
    """Also where the memory held masks of another round."""
    logits, masks = torch.randn(4, 2, size), Masks(torch.device("cpu"))
    for _ in range(3):
        drawn = [torch.randint(-(2**31), 2**31 - 1, (2, words), dtype=torch.int32) for words in (3, 4)]
        held = [(row, Drawn(each), list[int]()) for row, each in zip((0, 2), drawn, strict=True)]
        masks.fill(([[0] * 2] * 4,) * 2, size, held)
        found = masks.masked(logits)
        for row, each in zip((0, 2), drawn, strict=True):
            alone = Masks(torch.device("cpu"))
            alone.fill(([[0] * 2],) * 2, size, [(0, Drawn(each), [])])
            assert torch.equal(found[row], alone.masked(logits[row : row + 1])[0])
        assert torch.equal(found[[1, 3]], logits[[1, 3]])


def test_picks_along_walks_are_those_under_masks_of_all_nodes(grammar: fastspec.Grammar) -> None:
    """In trees that may hold a draft twice, of rows with a grammar and without; logits often have equals."""
    rng, generator, masks = random.Random(0), torch.Generator().manual_seed(0), Masks(torch.device("cpu"))
    rows, answers, accepted = 5, [list[int]() for _ in range(5)], 0
    states = [GrammarState(grammar) for _ in range(rows)]
    for _ in range(25):
        logits = torch.randint(0, 9, (rows, 7, SIZE + 20), generator=generator).float()
        held: list[Any] = [(row, states[row], answers[row]) for row in range(1, rows)]
        parents = [[0, *(rng.randrange(node) for node in range(1, 7))] for _ in range(rows)]
        tokens = [[rng.randrange(SIZE) for _ in range(7)] for _ in range(rows)]
        for row, _, answer in held:
            texts = [answer]
            for node in range(1, 7):
                parent = parents[row][node]
                alone = GrammarState(grammar)
                if rng.random() < 0.8 and alone.follows(texts[parent]):  # drafts are often what is picked
                    kept = allowed(masks_of(alone, texts[parent], [0], [0])[0])
                    tokens[row][node] = kept[int(logits[row, parent, kept].argmax())]
                texts.append([*texts[parent], tokens[row][node]])
                logits[row, node] = logits[row, texts.index(texts[node])]
        tree = TokenTree.from_parents(torch.tensor(tokens), torch.tensor(parents))
        masks.fill((tokens, parents), SIZE + 20, held)
        wanted = walk(tree, masks.masked(logits).argmax(-1), TORCH)
        found = walk(tree, pick_allowed(tree, logits, logits.argmax(-1), held, masks, TORCH), TORCH)
        assert torch.equal(found.accepted, wanted.accepted) and torch.equal(found.bonus, wanted.bonus)
        accepted += int(found.accepted.sum())
        for row, _, answer in held:
            path = found.path[row, 1 : 1 + int(found.accepted[row])]
            answer += tree.tokens[row, path].tolist()[:1]  # a part of it: the next answers go back, too
    assert accepted > 50


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_masks_of_many_answers_are_those_of_each_by_itself(grammar: fastspec.Grammar, rows: int) -> None:
    """Of rows with a grammar and without; one whose answer the grammar does not allow is told of alone."""
    rng, masks, logits = random.Random(rows), Masks(torch.device("cpu")), torch.randn(rows + 3, 1, SIZE + 40)
    answers: list[list[int]] = [[] for _ in range(rows)]
    states, failed = [GrammarState(grammar) for _ in range(rows)], list[tuple[int, str]]()
    bad, last = GrammarState(grammar), rows + 2
    wrong = next(token for token in range(SIZE) if not GrammarState(grammar).follows([token]))
    for _ in range(12):
        held: list[Any] = [*zip(range(1, rows + 1), states, answers, strict=True), (last, bad, [wrong])]
        failed.clear()
        masks.fill(roots_of(rows + 3), SIZE + 40, held, lambda row, error: failed.append((row, str(error))))
        assert [row for row, _ in failed] == [last] and "does not allow" in failed[0][1]
        found = masks.masked(logits)
        for row, answer in enumerate(answers, 1):
            alone = allowed(masks_of(GrammarState(grammar), answer, [0], [0])[0])
            assert (found[row, 0] > -torch.inf).nonzero()[:, 0].tolist() == alone
            answer.append(rng.choice(alone))
        assert torch.equal(found[[0, rows + 1]], logits[[0, rows + 1]])


@pytest.mark.parametrize("nodes", [1, 5])
def test_no_thread_of_torch_is_woken_for_masks(nodes: int) -> None:
    """Of as many words as take several threads, for constraints of unequal width too; the values are those of one row
    at a time (`test_masks_of_unequal_width_are_those_of_each_by_itself`)."""
    words, rows, masks = 4748, 16, Masks(torch.device("cpu"))
    for widths in ([words] * rows, [words - 9] * rows, [words - row for row in range(rows)]):
        held: list[Any] = [(row, AnyToken(width), list[int]()) for row, width in enumerate(widths)]
        with Writes() as writes:
            masks.fill(([[0] * nodes] * rows,) * 2, 32 * words, held)
        assert not writes.wakes
        bits = masks.words.view(rows, -1, words)
        assert all((bits[row, :, :width] == -1).all() for row, width in enumerate(widths))
        assert all((bits[row, :, width:] == 0).all() for row, width in enumerate(widths))


def test_plain_decoding_is_that_of_a_matcher_a_row(pair: tuple[Any, Any], grammar: fastspec.Grammar) -> None:
    """Twice with one grammar, whose second call has another prompt of the same length."""
    for seed in (1, 2):
        options = {**prompts(3, 9, 6, seed=seed), "max_new_tokens": 40, "do_sample": False}
        expected = pair[0].generate(**options, logits_processor=[Guided(grammar)])
        assert torch.equal(pair[0].generate(**options, logits_processor=[grammar]), expected)


@pytest.mark.each_value  # a draw reads the masked logits of any round
@pytest.mark.parametrize("assistant", ["autoregressive", TREE], ids=str)
@pytest.mark.parametrize("sampled", [False, True])
def test_captured_calls_are_those_of_the_cpu(assistant: Any, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several calls with what the first has captured, of other prompts and with scores or without; rounds whose verdict
    the host does not wait for, or corrects alone, are launched by graphs but for copies."""
    grammar, how = fastspec.Grammar(TOKENIZER, regex="[a-f0-9]{25}"), {"do_sample": sampled, "max_new_tokens": 40}
    calls = [{**how, **prompts(3, 9, 6, seed=seed), "output_scores": seed == 1} for seed in (1, 2, 3)]

    def told() -> list[list[list[int]]]:
        model, found = terse(), []
        with fastspec.patched(model, eagle3=seer(model)):
            for seed, options in enumerate(calls):
                torch.manual_seed(seed)
                more = {"assistant": assistant, "return_dict_in_generate": True, "logits_processor": [grammar]}
                found.append(model.generate(**options, **more).sequences.tolist())
            held = list(session_of(model).engines.held.values())
            fed = [each for engine in held for each in engine.schedules.values() if isinstance(each, FedGraph)]
            assert {type(each) for each in fed} == (kinds if held else set())
            assert all(each.back.replays > 10 for each in fed)
        return found

    kinds = {FedGraph} if assistant == "autoregressive" else set() if sampled else {FedTreeGraph}
    eager = told()
    stand_in(monkeypatch)
    assert told() == eager


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_hold_the_same(grammar: fastspec.Grammar, again: Callable[[Any], Any]) -> None:
    made = again(grammar)
    ids, scores = torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, grammar.size)
    first = grammar(ids, scores)
    assert torch.equal(made(ids, scores), first) and not torch.equal(first, scores)


@pytest.mark.each_value  # what a grammar allows does not hang on who drafts
@pytest.mark.parametrize("assistant", ASSISTANTS)
@pytest.mark.parametrize("rows", [1, 4])
def test_greedy_answers_are_plain_decodings(
    pair: tuple[Any, Any], grammar: fastspec.Grammar, assistant: str, rows: int
) -> None:
    plain, served = pair
    options = {**prompts(*range(3, 3 + rows)), "max_new_tokens": 40, "do_sample": False, "logits_processor": [grammar]}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, found = plain.generate(**options), served.generate(**options, assistant=assistant)
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        for mine, theirs in zip(getattr(found, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-4)


def test_answers_are_whole_and_end(pair: tuple[Any, Any]) -> None:
    """Every answer is valid, and its end token comes where nothing may follow."""
    grammar, inputs = fastspec.Grammar(TOKENIZER, json_schema=SCHEMA), prompts(4, 7, 5, 3, seed=3)
    out = pair[1].generate(**inputs, assistant="eagle3", max_new_tokens=200, logits_processor=[grammar])
    for row in out[:, inputs["input_ids"].shape[1] :].tolist():
        assert END in row
        assert is_valid(json.loads(said(row[: row.index(END)])))


HISTORY: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 3},
    {"suppress_tokens": [7, 100]},
    {"min_new_tokens": 2},
]


@pytest.mark.each_value  # processors run above the drafts
@pytest.mark.parametrize("more", HISTORY, ids=lambda more: next(iter(more)))
@pytest.mark.parametrize("assistant", ["eagle3", "nasd"])
def test_beside_processors_that_look_at_the_tokens_so_far(
    pair: tuple[Any, Any], assistant: str, more: dict[str, Any]
) -> None:
    grammar = fastspec.Grammar(TOKENIZER, json_schema=SCHEMA)
    options = {**prompts(3, 5, 4), "max_new_tokens": 30, "do_sample": False, "logits_processor": [grammar], **more}
    assert torch.equal(pair[1].generate(**options, assistant=assistant), pair[0].generate(**options))


class Counting(LogitsProcessor):
    """A processor of unknown type: calls with it run in lockstep."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + input_ids.shape[1] % 3 * torch.arange(scores.shape[1]) / 50


def test_beside_a_processor_that_may_have_a_state(pair: tuple[Any, Any]) -> None:
    grammar = fastspec.Grammar(TOKENIZER, json_schema=SCHEMA)
    options = {**prompts(3, 5, 4), "max_new_tokens": 30, "do_sample": False}
    options["logits_processor"] = [grammar, Counting()]
    assert torch.equal(pair[1].generate(**options, assistant="eagle3"), pair[0].generate(**options))


@pytest.mark.each_value  # what a grammar forbids is taken off before any of the filters
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7, "top_k": 9}, {"top_p": 0.8}, {"typical_p": 0.9}], ids=str)
def test_a_seed_draws_the_same_answers_with_drafts_and_without(
    pair: tuple[Any, Any], grammar: fastspec.Grammar, filters: dict[str, Any]
) -> None:
    options = {**prompts(3, 5, 4), "max_new_tokens": 40, "do_sample": True, "logits_processor": [grammar], **filters}
    answers = []
    for assistant in ("autoregressive", "eagle3", "nasd"):
        torch.manual_seed(3)
        answers.append(pair[1].generate(**options, assistant=assistant))
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])
    assert grammar.form != "choice" or set(map(said, answers[0][:, 5:].tolist())) <= set(GRAMMARS["choice"]["choice"])


def test_drawn_drafts_leave_the_distribution_within_the_grammar(pair: tuple[Any, Any]) -> None:
    grammar = fastspec.Grammar(TOKENIZER, choice=["ab", "ac", "bc"])
    inputs = {name: value.expand(400, -1) for name, value in prompts(4).items()}
    options = {**inputs, "do_sample": True, "temperature": 2.0, "max_new_tokens": 4, "logits_processor": [grammar]}
    counts = []
    for model, assistant in ((pair[0], None), (pair[1], "speculative")):
        torch.manual_seed(0)
        out = model.generate(**options, **({"assistant": assistant} if assistant else {}))
        answers = [said(row) for row in out[:, 4:].tolist()]
        counts.append([answers.count(text) for text in ("ab", "ac", "bc")])
    assert sum(counts[0]) == sum(counts[1]) == 400
    for mine, theirs in zip(*counts, strict=True):  # within five standard deviations of the difference of two counts
        assert abs(mine - theirs) <= 5 * (2 * 400 * 0.25) ** 0.5


def test_prompts_that_take_turns_in_rows(pair: tuple[Any, Any]) -> None:
    grammar = fastspec.Grammar(TOKENIZER, json_schema=SCHEMA)
    options = {**prompts(3, 5, 4, 6, 9, seed=2), "max_new_tokens": 30, "do_sample": False}
    options["logits_processor"] = [grammar]
    found = pair[1].generate(**options, assistant=fastspec.ContinuousBatch(TREE, rows=2))
    assert torch.equal(found, pair[0].generate(**options))


def test_other_processors_that_leave_nothing_are_named(pair: tuple[Any, Any]) -> None:
    grammar = fastspec.Grammar(TOKENIZER, choice=["12"])
    options = {**prompts(3), "max_new_tokens": 9, "min_new_tokens": 8, "logits_processor": [grammar]}
    for model, more in ((pair[0], {}), (pair[1], {"assistant": "nasd"})):
        with pytest.raises(NoDistribution, match="after 1 new tokens"):
            model.generate(**options, **more)


def test_beams_are_held_to_a_grammar(pair: tuple[Any, Any]) -> None:
    """Which move between rows."""
    grammar = fastspec.Grammar(TOKENIZER, choice=["abba", "acca", "true", "trudge"])
    out = pair[0].generate(**prompts(4, 6), num_beams=3, max_new_tokens=8, logits_processor=[grammar])
    assert {said(row) for row in out[:, 6:].tolist()} <= {"abba", "acca", "true", "trudge"}


def test_two_grammars_hold_both(pair: tuple[Any, Any]) -> None:
    both = [fastspec.Grammar(TOKENIZER, regex=form) for form in ("[a-d]{4}[a-z]*", "[c-f]{2}.{2,5}")]
    options = {**prompts(3, 5), "max_new_tokens": 12, "do_sample": False, "logits_processor": both}
    expected = pair[0].generate(**options)
    assert torch.equal(pair[1].generate(**options, assistant="eagle3"), expected)
    assert all(text[:2].strip("cd") == "" for text in map(said, expected[:, 5:].tolist()))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "none is given"),
    ({"regex": "a", "choice": ["a"]}, "regex and choice is given"),
    ({"regex": "("}, "regex cannot be compiled"),
    ({"regex": 3}, "regex cannot be compiled"),
    (
        {"json_schema": {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}},
        "json_schema cannot be compiled: it allows no first token",
    ),
    ({"choice": []}, "choice cannot be compiled: it must be a list of texts"),
    ({"choice": "ab"}, "choice cannot be compiled: it must be a list of texts"),
    ({"choice": ["a", ""]}, "choice cannot be compiled: it must be a list of texts"),
    ({"ebnf": 'start: "a'}, "ebnf cannot be compiled"),
    ({"json_schema": "["}, "json_schema cannot be compiled"),
    ({"json_schema": {"not": {}}}, 'Unimplemented keys: \\["not"\\]'),
    ({"json_schema": {"type": "object", "properties": 3}}, "json_schema cannot be compiled"),
    ({"json_schema": {"$ref": "http://127.0.0.1/a.json"}}, "json_schema cannot be compiled"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[str(given) for given, _ in REFUSED])
def test_what_cannot_be_compiled_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        fastspec.Grammar(TOKENIZER, **given)


def test_tokenizers_that_cannot_be_read_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match=r"cannot read this .*decoder type"):
        fastspec.Grammar(TARGET, regex="a", end_tokens=5)
    with pytest.raises(Unsupported, match=r"has no eos_token: .*end_tokens="):
        fastspec.Grammar(TARGET, regex="a")
    with pytest.raises(Unsupported, match=r"end_tokens is empty: .*generation_config.json"):
        fastspec.Grammar(TOKENIZER, regex="a", end_tokens=())
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(Unsupported, match=r"pip install .*\[structured\]"):
        fastspec.Grammar(TOKENIZER, regex="a")


def test_end_tokens_of_ones_own(pair: tuple[Any, Any]) -> None:
    grammar = fastspec.Grammar(TOKENIZER, choice=["12"], end_tokens=[3, 4])
    out = pair[1].generate(**prompts(4), assistant="nasd", max_new_tokens=3, logits_processor=[grammar])
    assert out[0, 5] in (3, 4)


def test_a_cascade_and_a_mixture_take_no_grammar(pair: tuple[Any, Any]) -> None:
    small, large = terse(1), terse()
    grammar = fastspec.Grammar(TOKENIZER, choice=["12"])
    with pytest.raises(Unsupported, match="Grammar may keep a state"):
        refuse([], {"logits_processor": [grammar]})
    with (
        fastspec.patched(large, cascade=fastspec.Cascade([small], mode="token", rule="chow", alpha=0.3)),
        pytest.raises(Unsupported, match=r"may look at the tokens so far \(Grammar\)"),
    ):
        large.generate(**prompts(4), assistant="cascade", max_new_tokens=3, logits_processor=[grammar])


def drawn_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of what most have."""
    kinds = ["string", "integer", "boolean", "enum", "null"] + ["object", "array", "anyOf"] * (depth < 2)
    match rng.choice(kinds):
        case "string":
            return {"type": "string", "maxLength": rng.randint(0, 5)}
        case "integer":
            low = rng.randint(-20, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
        case "enum":
            return {"enum": rng.sample(["a", 'q"', 12, True, None, "12"], rng.randint(1, 4))}
        case "array":
            least = rng.randint(0, 2)
            return {"type": "array", "items": drawn_schema(rng, depth + 1), "minItems": least, "maxItems": least + 2}
        case "anyOf":
            return {"anyOf": [drawn_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        case "object":
            names = rng.sample(["a", "b c", 'd"', "e"], rng.randint(0, 3))
            properties = {name: drawn_schema(rng, depth + 1) for name in names}
            required = [name for name in names if rng.random() < 0.6]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case kind:
            return {"type": kind}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """True where a value has a schema that `drawn_schema` makes."""
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return any(value == each and type(value) is type(each) for each in schema["enum"])
    match schema["type"]:
        case "object":
            inner = schema["properties"]
            whole = isinstance(value, dict) and set(schema["required"]) <= value.keys() <= inner.keys()
            return whole and all(fits(each, inner[name]) for name, each in value.items())
        case "array":
            whole = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return whole and all(fits(each, schema["items"]) for each in value)
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case kind:
            return value is None if kind == "null" else isinstance(value, bool)


@pytest.mark.parametrize("seed", range(40))
def test_drawn_schemas_hold_whatever_tokens_are_chosen(seed: int) -> None:
    """Answers of any allowed tokens, each taken behind a tree of drafts."""
    rng = random.Random(seed)
    schema = drawn_schema(rng)
    state, answer = GrammarState(fastspec.Grammar(TOKENIZER, json_schema=schema)), [*range(0)]
    while END not in answer:
        tokens = [0, *rng.choices(range(6, SIZE), k=4)]
        may = allowed(masks_of(state, answer, tokens, [0, 0, 1, 1, 0])[0])
        answer.append(END if END in may else rng.choice(may))
        assert len(answer) < 2000
    assert fits(json.loads(said(answer)), schema), (schema, said(answer))


@pytest.mark.parametrize("seed", range(3))
def test_drawn_schemas_give_plain_decodings_answers(pair: tuple[Any, Any], seed: int) -> None:
    grammar = fastspec.Grammar(TOKENIZER, json_schema=drawn_schema(random.Random(seed + 100)))
    options = {**prompts(3, 6, seed=seed), "max_new_tokens": 40, "do_sample": False, "logits_processor": [grammar]}
    assert torch.equal(pair[1].generate(**options, assistant="nasd"), pair[0].generate(**options))
