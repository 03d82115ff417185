"""What the tests of `generate(assistant=...)` share: drafters of known quality, prompts, and the comparison with the
unpatched model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import LogitsProcessor

import fastspec
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.patches.hf.cache import CACHE, kept_cache
from helpers.models import tiny_head, tiny_model

LENGTH = 12
NEVER = 1000  # an end token outside the vocabulary
TREE = fastspec.Eagle3(depth=3, top_k=3, total_tokens=12)


SHALLOW = {"num_hidden_layers": 3}
"""Sizes of a target whose depth proves nothing, in families of more kinds of layers too: a first, a middle and a last
layer."""


def shallow_model(model_type: str = "llama", seed: int = 0, **over: Any) -> Any:
    """A `tiny_model` of three layers, unless `over` says how many."""
    return tiny_model(model_type, seed, **{**SHALLOW, **over})


two_layers = partial(shallow_model, num_hidden_layers=2)
"""A Llama whose first and last layer are all: one between them is as the last, which tests of families have."""


def bigram(seed: int = 0, **over: Any) -> Any:
    """A target whose next token depends on the last one alone: its attention and feed-forward add nothing. Of two
    layers, unless `over` says how many."""
    model = two_layers(seed=seed, **over)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.mul_(2.0)
    return model


def seer(model: Any) -> Any:
    """A head that knows a bigram target: each node attends to itself alone and outputs its token's normed embedding."""
    head = tiny_head(model, num_key_value_heads=4, attention_bias=True, taps=(0,))
    for parameter in (
        *head.fc.parameters(),
        *head.layers[0].self_attn.parameters(),
        head.layers[0].mlp.down_proj.weight,
    ):
        parameter.zero_()
    attention, eye = head.layers[0].self_attn, torch.eye(64)
    attention.q_proj.bias.fill_(60.0)  # equal queries and keys: the rotary embedding makes distance 0 win by far
    attention.k_proj.bias.fill_(60.0)
    attention.v_proj.weight.copy_(
        torch.cat((eye, -eye), 1)
    )  # the token's embedding, less the residual that is fed back
    attention.o_proj.weight.copy_(eye)
    return head


EAGLE1 = {"kind": "eagle", "taps": (), "own_lm_head": False}


def seer1(model: Any) -> Any:
    """An EAGLE-1 head that knows a bigram target: it outputs its token's embedding, which the final norm only
    scales."""
    head = tiny_head(model, **EAGLE1)
    for parameter in (head.layers[0].self_attn.o_proj.weight, head.layers[0].mlp.down_proj.weight):
        parameter.zero_()
    head.fc.weight.copy_(torch.cat((torch.eye(64) / 0.3, torch.zeros(64, 64)), 1))
    return head


MAKERS = {"random": (two_layers, tiny_head), "bigram": (bigram, seer)}


def prompts(*lengths: int, seed: int = 0) -> dict[str, Tensor]:
    """Left-padded prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(6, 97, (length,), generator=generator)
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def prompts_on(device: str, *lengths: int, seed: int = 0) -> dict[str, Tensor]:
    return {name: each.to(device) for name, each in prompts(*lengths, seed=seed).items()}


ANSWERS: WeakKeyDictionary[Any, dict[str, Tensor]] = WeakKeyDictionary()
SHARED: dict[str, dict[str, Tensor]] = {}


def kept(model: Any, made: str = "") -> Any:
    """The model, unpatched, whose weights and modules no test changes: its answer to a greedy call is kept for the next
    that asks it.

    `made` says how it is made, for models that are made alike to share what each has answered.
    """
    ANSWERS[model] = SHARED.setdefault(made, {}) if made else {}
    return model


def unpatched(kind: str, **over: Any) -> Any:
    """A model of one of the `MAKERS` that is kept: of those made alike, the first that is asked answers for all."""
    return kept(MAKERS[kind][0](**over), json.dumps([kind, over], sort_keys=True))


def answer(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """What a model generates; from an earlier call where the model is `kept` and its tokens are a function of plain
    values."""
    answers = ANSWERS.get(model)
    greedy = options.get("do_sample") is False or options.get("top_k") == 1
    if answers is None or not greedy or options.get("return_dict_in_generate"):
        return model.generate(**inputs, **options)
    try:
        call = json.dumps([{name: value.tolist() for name, value in inputs.items()}, options], sort_keys=True)
        call += model.generation_config.to_json_string() + str(model.device)
    except TypeError:  # a processor, a criterion, a streamer or a cache, which see or change what others must not
        return model.generate(**inputs, **options)
    if call not in answers:
        answers[call] = model.generate(**inputs, **options)
    return answers[call].clone()


def free(model: Any, inputs: dict[str, Tensor], count: int = LENGTH, **options: Any) -> list[list[int]]:
    """What the unpatched model says when nothing ends it."""
    width = inputs["input_ids"].shape[1]
    return answer(model, inputs, max_new_tokens=count, do_sample=False, eos_token_id=NEVER, **options)[
        :, width:
    ].tolist()


def same(pair: tuple[Any, Any], assistant: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    plain, patched = pair
    options = {"do_sample": False, "max_new_tokens": LENGTH, **options}
    expected = answer(plain, inputs, **options)
    got = patched.generate(**inputs, **options, assistant=assistant)
    assert got.tolist() == expected.tolist()
    return expected


def conversation(model: Any, inputs: dict[str, Tensor], turns: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """What each turn's call returns, with these options: a turn goes on from the cache that the last one left, behind
    its text and three more tokens."""
    past = None
    for turn, options in enumerate(turns):
        out = model.generate(
            **inputs,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            **{CACHE: past, "max_new_tokens": 9, "eos_token_id": None, **options},
        )
        yield out
        past = kept_cache(out)
        more = torch.randint(6, 90, (len(out.sequences), 3), generator=torch.Generator().manual_seed(turn))
        ids = torch.cat((out.sequences, more), 1)
        mask = torch.ones_like(ids)
        mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
        inputs = {"input_ids": ids, "attention_mask": mask}


def stats(patched: Any) -> Any:
    return fastspec.report(patched).last


class Oracle:
    """A third party's assistant: chains of six tokens, right for the rows that it knows and wrong for the others."""

    name, taps, nodes, max_path = "oracle", None, 7, 7

    def __init__(self, texts: list[list[int]], known: set[int]) -> None:
        self.texts, self.known = texts, known

    def drafter(self, *, rows: int, capacity: int, device: Any, ops: Any, process: Any) -> Oracle:
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

    def observe(
        self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int
    ) -> None:
        self.place += (verdict.accepted + 1) * active
        self.root = torch.where(active, verdict.bonus, self.root)


class OwnProcessor(LogitsProcessor):
    """A user's own processor, which may have a state, so that calls with it decode in lockstep: every step lowers the
    scores of another seventh of the tokens."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores - (torch.arange(scores.shape[-1]) % 7 == ids.shape[1] % 7) * 0.5


class Recorder:
    """A streamer that writes down what it is given."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.events.append(value.tolist())

    def end(self) -> None:
        self.events.append("end")
