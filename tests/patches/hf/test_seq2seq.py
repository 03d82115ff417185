"""Encoder-decoder models: the unpatched model's tokens and distribution with every assistant, and every node scored as
its own text would be."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.examples import examples
from helpers.generate import NEVER, answer, same, stats
from helpers.sampling import CASES, SIGNIFICANCE, p_value, padded, processors
from helpers.seq2seq import pair_of, patched, sources, tiny_seq2seq
from helpers.trees import paths, trees
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateEncoderDecoderOutput

import fastspec
from fastspec.generation.tree import TokenTree
from fastspec.patches.backends import TORCH
from fastspec.patches.hf.cache import kept_cache
from fastspec.patches.hf.families import SEQ2SEQ
from fastspec.patches.hf.seq2seq import Seq2SeqModel, read_source

KINDS = ("t5", "bart", "marian")
SCALED = [
    "t5 tie_word_embeddings",
    *(f"{kind} scale_embedding" for kind in ("bart", "marian", "pegasus", "blenderbot-small", "m2m_100")),
]
ASSISTANTS = [
    "autoregressive",
    "nasd",
    fastspec.Nasd(gamma=3, total_tokens=7, stop_if_unknown=False),
    "speculative",
    fastspec.Speculative(gamma=4),
    fastspec.Speculative(gamma=3, branches=2),
]


CROSSED = [(kind, assistant) for kind in KINDS for assistant in ASSISTANTS]
IN_TURN = [
    pytest.param(
        case,
        id=f"{case[0]}-{case[1]}",
        marks=[] if ASSISTANTS.index(case[1]) % 3 == KINDS.index(case[0]) else pytest.mark.slow,
    )
    for case in CROSSED
]
"""Each assistant with one family in turn; with the others, which score trees by the same adapter, only in `make
test-slow`."""


@pytest.fixture(params=IN_TURN)
def case(request: Any) -> tuple[str, Any]:
    return request.param


@pytest.fixture
def pair(case: tuple[str, Any]) -> tuple[Any, Any]:
    return pair_of(case[0])


@pytest.fixture
def assistant(case: tuple[str, Any]) -> Any:
    return case[1]


@pytest.fixture(params=KINDS)
def each_pair(request: Any) -> tuple[Any, Any]:
    return pair_of(request.param)


def free(model: Any, inputs: dict[str, Tensor]) -> list[list[int]]:
    """What the unpatched model says when nothing ends it."""
    return answer(model, inputs, max_new_tokens=20, do_sample=False, eos_token_id=NEVER)[:, 1:].tolist()


@pytest.mark.some(
    "('t5', 'autoregressive')",
    "('t5', Speculative(gamma=3, most=8, branches=2, early_exit=None))",
    "('bart', 'nasd')",
    "('bart', 'speculative')",
    "('bart', Speculative(gamma=4, most=8, branches=1, early_exit=None))",
    "('marian', 'autoregressive')",
    "('marian', Nasd",
)
@pytest.mark.parametrize("case", CROSSED, ids=str)
def test_greedy(pair, assistant):
    out = same(pair, assistant, sources(7, 3, 11), max_new_tokens=30, eos_token_id=NEVER)
    assert out.shape == (3, 31)
    same(pair, assistant, sources(7, 3, 11))
    same(pair, assistant, sources(7, 3, 11), labels=out[:, 1:])  # of a trainer's batch, which plain decoding drops


@pytest.mark.each_value
@pytest.mark.parametrize("lengths, side", [((7,), "right"), ((7, 3, 11), "left")], ids=str)
def test_greedy_of_one_source_and_of_padding_in_front(pair, assistant, lengths, side):
    out = same(pair, assistant, sources(*lengths, side=side), max_new_tokens=30, eos_token_id=NEVER)
    assert out.shape == (len(lengths), 31)
    same(pair, assistant, sources(*lengths, side=side))


def test_texts_vary_and_drafts_are_taken_and_refused(each_pair):
    texts = free(each_pair[0], sources(7, 3, 11))
    assert len({token for text in texts for token in text}) > 15
    same(each_pair, fastspec.Speculative(gamma=3), sources(7, 3, 11), max_new_tokens=30, eos_token_id=NEVER)
    assert 1.2 < stats(each_pair[1]).acceptance_length < 4


@pytest.mark.parametrize("kind", [kind for kind in SEQ2SEQ if kind not in KINDS])
def test_every_family(kind):
    pair = pair_of(kind)
    for assistant in ("nasd", ASSISTANTS[-1]):
        same(pair, assistant, sources(7, 3, 11), max_new_tokens=14, eos_token_id=NEVER)
    assert fastspec.report(pair[1]).mode == f"encoder-decoder {kind}"


@pytest.mark.parametrize("kind", [*SEQ2SEQ, *SCALED])
@examples(5, database=None, derandomize=True)
@given(tree=trees(), counts=st.lists(st.integers(1, 7), min_size=2, max_size=2), spread=st.booleans())
@torch.no_grad()
def test_every_node_is_scored_as_its_own_text(kind: str, tree: TokenTree, counts: list[int], spread: bool) -> None:
    model = pair_of(kind)[0]
    ids = torch.randint(6, 97, (2, max(counts)), generator=torch.Generator().manual_seed(sum(counts)))
    tree = TokenTree.from_parents(tree.tokens.clamp(min=1), tree.parents, tree.max_path) if kind == "m2m_100" else tree
    inputs = sources(4, 9)
    outputs = model.get_encoder()(**inputs, return_dict=True)
    prepared = {"encoder_outputs": outputs, "attention_mask": inputs["attention_mask"]}
    target = Seq2SeqModel(model, read_source(model, inputs, prepared, 2), rows=2, capacity=40, tail=9, ops=TORCH)
    last, _ = target.prefill(ids, torch.tensor(counts))
    if spread:  # what was written behind the committed tokens before must not be seen
        target.score(TokenTree.chain(torch.full((2, 9), 9)), max(counts))
    logits, features = target.score(tree, max(counts))
    assert features.shape[-1] == 0
    for row, count in enumerate(counts):
        own = {name: value[row : row + 1] for name, value in inputs.items()}
        _close(last[row], model(**own, decoder_input_ids=ids[row : row + 1, :count]).logits[0, -1])
        texts = [torch.cat((ids[row, :count], tokens)) for tokens in paths(tree, row)]
        # Each is a row of one pass: what is filled up behind a text is seen by none of its tokens.
        wide = {name: value.expand(len(texts), -1) for name, value in own.items()}
        out = model(**wide, decoder_input_ids=torch.nn.utils.rnn.pad_sequence(texts, batch_first=True))
        for node, text in enumerate(texts):
            _close(logits[row, node], out.logits[node, len(text) - 1])


def _close(got: Tensor, expected: Tensor) -> None:
    # As in test_adapters: rounding gives 4e-5 of the largest value, a wrong position or mask 1e-1 of it.
    torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.each_value
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_implementations(kind, attention):
    model, inputs = tiny_seq2seq(kind), {**sources(5, 9), "max_new_tokens": 16, "do_sample": False}
    model.set_attn_implementation(attention)
    expected = model.generate(**inputs)
    assert torch.equal(patched(model).generate(**inputs, assistant="nasd"), expected)
    assert torch.equal(model.generate(**inputs, assistant="speculative"), expected)


@pytest.mark.each_value
@pytest.mark.parametrize("place", range(5))
def test_end_tokens_at_every_place_of_a_round(pair, assistant, place):
    inputs = sources(7, 3, 11)
    texts = free(pair[0], inputs)
    ends = [texts[0][place], texts[1][2 * place]]
    same(pair, assistant, inputs, eos_token_id=ends)
    same(pair, assistant, inputs, eos_token_id=ends[0], pad_token_id=96)


@pytest.mark.each_value
@pytest.mark.parametrize("ends", [NEVER, 5])
def test_criteria_are_asked_about_the_decoders_tokens(pair, assistant, ends):
    texts = free(pair[0], sources(7, 3, 11))

    def stops(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor(
            [row[1:] == text[: 3 + at] for at, (row, text) in enumerate(zip(ids.tolist(), texts, strict=True))]
        )

    same(pair, assistant, sources(7, 3, 11), stopping_criteria=[stops], eos_token_id=ends)


@pytest.mark.each_value
@pytest.mark.parametrize("count", [1, 2, 5])
def test_length_limits_are_exact(pair, assistant, count):
    assert same(pair, assistant, sources(7, 3), max_new_tokens=count, eos_token_id=NEVER).shape == (2, 1 + count)
    same(pair, assistant, sources(7, 3), max_new_tokens=None, max_length=1 + count, eos_token_id=NEVER)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 1},
        {"encoder_repetition_penalty": 2.0},
        {"forced_bos_token_id": 17},
        {"forced_eos_token_id": 7},
        {"begin_suppress_tokens": list(range(6, 60))},
        {"min_length": 9},
        {"min_new_tokens": 9, "repetition_penalty": 1.2},
        {"suppress_tokens": [7, 8, 9]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_see_the_decoders_tokens(pair, assistant, options):
    inputs = sources(7, 3, 11)
    ends = [row[3] for row in free(pair[0], inputs)]
    same(pair, assistant, inputs, eos_token_id=ends, **options)


def test_prompts_of_the_decoder(pair, assistant):
    same(
        pair,
        assistant,
        sources(7, 3),
        decoder_input_ids=torch.tensor([[2, 11, 12, 13], [2, 21, 22, 23]]),
        eos_token_id=NEVER,
    )
    same(pair, assistant, sources(7, 3), decoder_input_ids=torch.tensor([[11, 12], [21, 22]]), eos_token_id=NEVER)


def test_num_return_sequences_and_inputs_without_a_mask(pair, assistant):
    out = same(pair, assistant, sources(7, 3), do_sample=True, top_k=1, num_return_sequences=3, eos_token_id=NEVER)
    assert out.shape[0] == 6
    expected = answer(pair[0], {"input_ids": sources(7)["input_ids"]}, max_new_tokens=12, do_sample=False)
    assert torch.equal(
        pair[1].generate(sources(7)["input_ids"], max_new_tokens=12, do_sample=False, assistant=assistant), expected
    )


def test_encoder_outputs_handed_in(each_pair):
    inputs = sources(7, 3)
    mask = inputs["attention_mask"]
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    with torch.no_grad():
        expected = each_pair[0].generate(
            encoder_outputs=each_pair[0].get_encoder()(**inputs, return_dict=True), **options
        )
        outputs = each_pair[1].get_encoder()(**inputs, return_dict=True)
    for assistant in ("autoregressive", "nasd"):
        assert torch.equal(each_pair[1].generate(encoder_outputs=outputs, **options, assistant=assistant), expected)
    with pytest.raises(fastspec.Unsupported, match="reads the source itself: pass input_ids"):
        each_pair[1].generate(encoder_outputs=outputs, **options, assistant="speculative")


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}])
def test_the_output_of_transformers_with_scores_and_logits(pair, assistant, options):
    """Within the rounding of fp32 sums taken in another order, over logits of size about 10."""
    settings = {
        "do_sample": False,
        "max_new_tokens": 12,
        "return_dict_in_generate": True,
        "eos_token_id": NEVER,
        **options,
    }
    wanted = {"output_scores": True, "output_logits": True}
    expected = pair[0].generate(**sources(7, 3), **settings, **wanted)
    got = pair[1].generate(**sources(7, 3), **settings, **wanted, assistant=assistant)
    assert type(got) is GenerateEncoderDecoderOutput and torch.equal(got.sequences, expected.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(
            torch.stack(getattr(got, name)), torch.stack(getattr(expected, name)), rtol=1e-4, atol=1e-3
        )
    lean = pair[1].generate(**sources(7, 3), **settings, assistant=assistant)
    assert lean.scores is None and lean.logits is None
    assert lean.keys() - {"fastspec"} == pair[0].generate(**sources(7, 3), **settings).keys()
    assert lean.fastspec.assistant == getattr(assistant, "name", assistant)


@pytest.mark.parametrize("kind", ["bart", "t5", "m2m_100"])
@pytest.mark.parametrize("ended", [False, True])
def test_the_cache_of_an_output_is_transformers_own(kind, ended):
    """Keys and values of the decoder's tokens, of padding behind a row that ended, and of the source."""
    plain, patched = pair_of(kind)
    end = plain.generate(**sources(7, 3), max_new_tokens=12, do_sample=False, eos_token_id=NEVER)[0, 4].item()
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "return_dict_in_generate": True,
        "eos_token_id": end if ended else NEVER,
    }
    expected = plain.generate(**sources(7, 3), **options)
    got = patched.generate(**sources(7, 3), **options, assistant="nasd")
    assert torch.equal(got.sequences, expected.sequences)
    theirs, ours = kept_cache(expected), kept_cache(got)
    assert type(ours) is type(theirs) and ours.is_updated == theirs.is_updated
    for name in ("self_attention_cache", "cross_attention_cache"):
        for wanted, found in zip(getattr(theirs, name).layers, getattr(ours, name).layers, strict=True):
            torch.testing.assert_close(found.keys, wanted.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found.values, wanted.values, rtol=1e-4, atol=1e-4)


class Taking(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.taken: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.taken.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_streamers_get_what_transformers_gives_them(pair, assistant):
    got = []
    for model, extra in zip(pair, ({}, {"assistant": assistant}), strict=True):
        streamer = Taking()
        model.generate(**sources(7), max_new_tokens=15, do_sample=False, streamer=streamer, **extra)
        assert streamer.ended
        got.append(streamer.taken)
    assert got[0] == got[1]


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}, {"top_k": 20, "top_p": 0.9}], ids=str)
def test_a_seed_decides_the_sample(pair, assistant, options):
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        settings = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 12, "eos_token_id": NEVER, **options}
        texts.append(pair[1].generate(**sources(7, 3), assistant=assistant, **settings).tolist())
    assert texts[0] == texts[1] != texts[2]


@torch.no_grad()
def distribution(
    model: Any, inputs: dict[str, Tensor], options: dict[str, Any], length: int
) -> dict[tuple[int, ...], float]:
    """The probability of every text of `length` tokens, as `generate` returns it: token 0 ends a text and fills it
    up."""
    found, merged = {(): 1.0}, {}
    for _ in range(length):
        texts = list(found)
        rows = torch.cat(
            (torch.full((len(texts), 1), 2), torch.tensor(texts, dtype=torch.long).view(len(texts), -1)), 1
        )
        wide = {name: value.expand(len(texts), -1) for name, value in inputs.items()}
        chances = (
            processors(options)(rows, model(**wide, decoder_input_ids=rows).logits[:, -1].float()).double().softmax(-1)
        )
        found = {
            (*text, token): found[text] * chance
            for text, row in zip(texts, chances.tolist(), strict=True)
            for token, chance in enumerate(row)
            if chance > 0
        }
    for text, chance in found.items():
        merged[padded(text)] = merged.get(padded(text), 0.0) + chance
    assert abs(sum(merged.values()) - 1) < 1e-9
    return merged


@pytest.mark.some("nasd", "marian")
@pytest.mark.each_value  # a tree is judged by the same rule whoever grew it
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("t5", "all four"),
        ("marian", "history"),
        pytest.param("t5", "history", marks=pytest.mark.slow),
        pytest.param("marian", "all four", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "assistant", ["nasd", fastspec.Speculative(gamma=2), fastspec.Speculative(gamma=2, branches=2)], ids=str
)
def test_the_distribution_of_short_texts(kind, case, assistant):
    model, inputs = pair_of(kind)[1], sources(5)
    options = {"temperature": 1.7, "top_k": 5, **CASES[case]}
    texts: list[tuple[int, ...]] = []
    for seed in range(4):
        torch.manual_seed(seed)
        settings = {**options, "do_sample": True, "num_return_sequences": 512, "max_new_tokens": 3, "eos_token_id": 0}
        texts += map(tuple, model.generate(**inputs, **settings, assistant=assistant)[:, 1:].tolist())
    assert p_value(distribution(model, inputs, options, 3), texts) > SIGNIFICANCE
    if assistant != "nasd":
        assert 0 < stats(model).accepted < stats(model).drafted


def test_n_grams_are_read_from_the_source():
    model, seen = pair_of("bart")[1], []

    class Watching(fastspec.NgramStorage):
        def feed(self, cursor: Any, token: int, likeliest: Any = ()) -> Any:
            seen.append(token)
            return super().feed(cursor, token, likeliest)

    inputs = sources(7, 3, side="left")
    out = model.generate(**inputs, max_new_tokens=1, do_sample=False, assistant=fastspec.Nasd(storage=Watching(n=4)))
    expected = [
        [*ids[mask.bool()].tolist(), *emitted.tolist()]
        for ids, mask, emitted in zip(*inputs.values(), out, strict=True)
    ]
    assert seen in (expected[0] + expected[1], expected[1] + expected[0])


@pytest.mark.some("t5", "bart")
@pytest.mark.parametrize("kind", KINDS)
def test_a_perfect_draft_is_accepted_whole(kind):
    model = patched(tiny_seq2seq(kind), tiny_seq2seq(kind))
    for side in ("left", "right"):
        for sampled in ({"do_sample": False}, {"do_sample": True, "top_k": 9}):
            torch.manual_seed(0)
            options = {**sources(7, 3, 11, side=side), **sampled, "max_new_tokens": 33, "eos_token_id": NEVER}
            model.generate(**options, assistant=fastspec.Speculative(gamma=3))
            assert stats(model).acceptance_length == 4


@pytest.mark.parametrize("kind", ["bart", "marian"])
def test_drafts_past_the_position_table_do_no_harm(kind):
    pair = tiny_seq2seq(kind, max_position_embeddings=24), patched(tiny_seq2seq(kind, max_position_embeddings=24))
    for assistant in ("nasd", fastspec.Speculative(gamma=7)):
        assert same(pair, assistant, sources(7), max_new_tokens=24, eos_token_id=NEVER).shape == (1, 25)


def test_a_source_in_another_vocabulary_than_the_decoders():
    sizes = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 60}
    pair = tiny_seq2seq("marian", **sizes), patched(tiny_seq2seq("marian", **sizes))
    for assistant in ASSISTANTS:
        same(pair, assistant, sources(7, 3, 11), max_new_tokens=14, eos_token_id=NEVER)


def test_a_smaller_draft_model_of_another_family():
    draft = tiny_seq2seq("marian", seed=2, decoder_layers=1, encoder_layers=1)
    pair = tiny_seq2seq("t5"), patched(tiny_seq2seq("t5"), draft)
    same(pair, "speculative", sources(7, 3, 11), max_new_tokens=24)
    pair = (
        tiny_seq2seq("bart"),
        patched(tiny_seq2seq("bart"), tiny_seq2seq("t5", seed=1, num_decoder_layers=1, vocab_size=90)),
    )
    same(pair, fastspec.Speculative(gamma=3), sources(7, 3, 11), max_new_tokens=24)


def test_a_draft_is_priced_without_the_encoders():
    target, draft = tiny_seq2seq("bart"), tiny_seq2seq("bart", decoder_layers=1, encoder_layers=6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastspec.patch(target, speculative=draft)


def test_a_padding_token_has_no_position_in_m2m():
    """Its drafts and its texts count as transformers counts them, and a prompt that hides one is refused."""
    pair, inputs = (
        (tiny_seq2seq("m2m_100", pad_token_id=9), patched(tiny_seq2seq("m2m_100", pad_token_id=9))),
        sources(7, 3),
    )
    ids = torch.tensor([[2, 9, 11], [2, 12, 13]])
    with pytest.raises(fastspec.Unsupported, match="decoder_input_ids holds the padding token 9"):
        pair[1].generate(**inputs, decoder_input_ids=ids, assistant="nasd", max_new_tokens=4)
    bias = {"sequence_bias": [[[9], 9.0]], "eos_token_id": NEVER}
    out = same(pair, "speculative", inputs, **bias)
    assert (out == 9).any()
    same(pair, "nasd", inputs, **bias)


def test_plain_calls_are_unchanged_and_unpatch_leaves_nothing(each_pair):
    model, inputs = tiny_seq2seq(each_pair[0].config.model_type), sources(7, 3)
    before, weights = dict(vars(model)), {name: value.clone() for name, value in model.state_dict().items()}
    options = {"max_new_tokens": 12, "num_beams": 2, "do_sample": False}
    expected = model.generate(**inputs, **options)
    patched(model)
    for assistant in ("autoregressive", "nasd", "speculative"):
        model.generate(**inputs, max_new_tokens=12, assistant=assistant)
    assert torch.equal(model.generate(**inputs, **options), expected)
    fastspec.unpatch(model)
    assert dict(vars(model)) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.generate(**inputs, **options), expected)
