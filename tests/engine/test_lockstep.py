"""Processors, criteria and streamers of unknown types see plain decoding's calls: the whole batch, every step once, in
order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.devices import ON_CUDA
from helpers.generate import LENGTH, MAKERS, NEVER, SHALLOW, TREE, Oracle, free, kept, prompts_on, stats
from helpers.models import tiny_head, tiny_model
from helpers.seq2seq import sources, tiny_seq2seq
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, SynthIDTextWatermarkingConfig, WatermarkingConfig

import fastspec
from fastspec import ContinuousBatch, Unsupported
from fastspec.patches.hf.cache import CACHE, kept_cache

SAMPLED = fastspec.Speculative(gamma=3)
EARLY, BRANCHES = fastspec.Speculative(early_exit=1, gamma=3), fastspec.Speculative(gamma=3, branches=3)
ASSISTANTS = ["autoregressive", TREE, "eagle", "nasd", SAMPLED, "eagle2", EARLY, BRANCHES]
FEW: dict[tuple[int, ...], list[Any]] = {
    (6,): ["autoregressive", TREE, "nasd"],
    (4, 9): [],
    (5, 3, 8): ["nasd", "eagle2", EARLY, BRANCHES],
    (7, 3, 5, 5): [TREE, "eagle", SAMPLED],
}
"""The lengths of a batch's prompts -> the assistants that the fast suite decodes it with: every one somewhere, and each
size but one."""
MATRIX = [
    pytest.param(lengths, each, id=f"{len(lengths)}-{each}", marks=() if each in few else pytest.mark.slow)
    for lengths, few in FEW.items()
    for each in ASSISTANTS
]
Log = list[tuple[str, Any, Any]]


class Watching(LogitsProcessor):
    """Writes down what it is shown, and changes the scores by how often it was called."""

    def __init__(self, log: Log) -> None:
        self.log, self.calls = log, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.log.append(("processor", input_ids.tolist(), scores.clone()))
        self.calls += 1
        scores = scores.clone()
        scores[:, 6 + self.calls % 7 :: 11] += 2.0
        return scores


class Held(StoppingCriteria):
    """Keeps which rows were ever stopped, as lm-eval's criterion for stop sequences does."""

    def __init__(self, log: Log, tokens: list[int]) -> None:
        self.log, self.tokens = log, torch.tensor(tokens)
        self.done: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.log.append(("criterion", input_ids.tolist(), None if scores is None else len(scores)))
        hit = torch.isin(input_ids[:, -1], self.tokens.to(input_ids.device))
        self.done = hit if self.done is None else self.done | hit
        return self.done.clone()


class Told:
    """A streamer that writes down what it is given."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def put(self, value: Tensor) -> None:
        self.log.append(("streamer", value.tolist(), None))

    def end(self) -> None:
        self.log.append(("streamer", "end", None))


@pytest.fixture(scope="module", params=["torch", "stand-in", pytest.param("cuda", marks=ON_CUDA)])
def place(request):
    """Where calls run: uncaptured, with the stand-in for captured graphs, on a GPU."""
    patched = pytest.MonkeyPatch()
    if request.param == "stand-in":
        stand_in(patched)
    yield "cuda" if request.param == "cuda" else "cpu"
    patched.undo()


@pytest.fixture(scope="module", params=list(MAKERS))
def both(request, place):
    """(the unpatched model, the same patched, with what every assistant needs)."""
    target, head = MAKERS[request.param]
    plain, model = kept(target(**SHALLOW).to(place)), target(**SHALLOW)
    first = tiny_head(model, kind="eagle", taps=(), own_lm_head=False)
    heads = {"eagle3": head(model), "eagle": first, "eagle2": first}
    resources = {name: each.to(place) for name, each in heads.items()}
    return plain, fastspec.patch(model.to(place), **resources, speculative=target(seed=0, **SHALLOW).to(place))


def recorded(
    model: Any, inputs: dict[str, Tensor], stops: list[int], streams: bool = False, **options: Any
) -> tuple[Any, Log]:
    """A call's output, and the calls of its processor, criterion and streamer."""
    log: Log = []
    torch.manual_seed(0)
    parts = {
        "logits_processor": [Watching(log)],
        "stopping_criteria": [Held(log, stops)],
        **({"streamer": Told(log)} if streams else {}),
    }
    out = model.generate(
        **inputs, **{"do_sample": False, "max_new_tokens": LENGTH, "pad_token_id": 0, **options}, **parts
    )
    return out, log


@pytest.fixture(scope="module")
def plainly(both):
    """`recorded` of the unpatched model, once for all assistants: the lengths of the prompts, and its other arguments,
    name a call."""
    calls: dict[str, tuple[Any, Log]] = {}

    def asked(inputs: dict[str, Tensor], stops: list[int], streams: bool = False, **options: Any) -> tuple[Any, Log]:
        name = str((inputs["attention_mask"].sum(1).tolist(), stops, streams, options))
        if name not in calls:
            calls[name] = recorded(both[0], inputs, stops, streams, **options)
        return calls[name]

    return asked


def agree(got: Log, wanted: Log) -> None:
    """The same calls; scores within the rounding of fp32 sums taken in another order over 97 logits of size about
    10."""
    assert [(who, ids) for who, ids, _ in got] == [(who, ids) for who, ids, _ in wanted]
    for (_, _, ours), (_, _, theirs) in zip(got, wanted, strict=True):
        assert type(ours) is type(theirs)
        if isinstance(ours, Tensor):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
        else:
            assert ours == theirs


def stopping(plain: Any, inputs: dict[str, Tensor]) -> list[int]:
    """Tokens at which rows end at different steps, without a processor."""
    return [row[2 + 4 * index] for index, row in enumerate(free(plain, inputs))]


@pytest.mark.each_value
@pytest.mark.parametrize(("lengths", "assistant"), MATRIX)
def test_every_call_is_one_of_plain_decoding(both, plainly, place, lengths, assistant):
    """With end tokens, after which rows are padded, and without any, where rows go on until all have ended."""
    model, inputs = both[1], prompts_on(place, *lengths)
    _, seen = plainly(inputs, [NEVER], eos_token_id=NEVER)
    generated = torch.tensor(seen[-1][1])[:, max(lengths) :].tolist()
    stops = [row[1 + 3 * index] for index, row in enumerate(generated)]
    for options in ({"eos_token_id": stops[:1]}, {"eos_token_id": None}, {"eos_token_id": [NEVER]}):
        want, calls = plainly(inputs, stops[len(stops) // 2 :], len(lengths) == 1, **options)
        got, ours = recorded(model, inputs, stops[len(stops) // 2 :], len(lengths) == 1, **options, assistant=assistant)
        assert got.tolist() == want.tolist()
        agree(ours, calls)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "assistant", [*ASSISTANTS[:5], *(pytest.param(each, marks=pytest.mark.slow) for each in ASSISTANTS[5:])], ids=str
)
def test_scores_seeds_and_return_sequences(both, plainly, place, assistant):
    """Samples are plain decoding's own under a seed; scores are all of plain decoding's, those of ended rows
    included."""
    plain, model = both
    inputs, stops = prompts_on(place, 6, 3), stopping(plain, prompts_on(place, 6, 3))
    options: dict[str, Any] = {
        "num_return_sequences": 2,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 8,
        "eos_token_id": stops,
    }
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    want, calls = plainly(inputs, stops[:1], **options)
    got, ours = recorded(model, inputs, stops[:1], **options, assistant=assistant)
    assert got.sequences.tolist() == want.sequences.tolist()
    agree(ours, calls)
    for name in ("scores", "logits"):
        for mine, theirs in zip(getattr(got, name), getattr(want, name), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


class Draws(LogitsProcessor):
    """Forces one text per call of `generate`, token by token, whatever row asks: it counts its calls."""

    def __init__(self, text: list[int]) -> None:
        self.text, self.calls = text, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.text[self.calls]] = 0.0
        self.calls += 1
        return forced


def test_a_forced_text_is_whole_in_every_returned_sequence():
    model, text = fastspec.patch(tiny_model()), list(range(10, 22))
    out = model.generate(
        **prompts_on("cpu", 5),
        do_sample=True,
        num_return_sequences=2,
        max_new_tokens=12,
        eos_token_id=NEVER,
        logits_processor=[Draws(text)],
        assistant="nasd",
    )
    assert out[:, 5:].tolist() == [text, text]


def test_right_drafts_are_kept_by_all_rows_together():
    """Rows whose drafts are right take whole trees a round, also beside a row that has ended."""
    plain, model = tiny_model(seed=2), fastspec.patch(tiny_model(seed=2))
    inputs = prompts_on("cpu", 6, 3, 5)
    texts = free(plain, inputs, 60)
    log: Log = []
    options = {"max_new_tokens": 40, "eos_token_id": [texts[1][3]], "do_sample": False, "pad_token_id": 0}
    want = plain.generate(**inputs, **options)
    got = model.generate(
        **inputs, **options, stopping_criteria=[Held(log, [NEVER])], assistant=Oracle(texts, {0, 1, 2})
    )
    assert got.tolist() == want.tolist()
    assert stats(model).rounds <= 2 + 40 // 7 + 1  # one round is cut where the second row ends
    assert len(log) == 40 and stats(model).emitted == sum((row != 0).sum() for row in got[:, 6:])


def test_one_wrong_row_holds_the_others_back():
    plain, model = tiny_model(), fastspec.patch(tiny_model())
    inputs = prompts_on("cpu", 6, 3)
    texts = free(plain, inputs, 40)
    options = {
        "max_new_tokens": 10,
        "eos_token_id": NEVER,
        "do_sample": False,
        "stopping_criteria": [Held([], [NEVER])],
    }
    out = model.generate(**inputs, **options, assistant=Oracle(texts, {0}))
    assert out[:, 6:].tolist() == [row[:10] for row in texts]
    assert stats(model).rounds == 9


def test_the_next_turn_finds_the_padding_of_rows_that_ended():
    """A cache handed in holds real keys behind an early end, as plain decoding's does, with processors of known types
    and without."""
    plain, model = tiny_model(), fastspec.patch(tiny_model(), eagle3=tiny_head(tiny_model()))
    inputs = prompts_on("cpu", 6, 4, 5)
    ends = [free(plain, inputs)[0][2], free(plain, inputs)[2][7]]
    options = {
        "max_new_tokens": 12,
        "eos_token_id": ends,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
    }
    for extra in ({}, {"logits_processor": [Watching([])]}):
        turns = []
        for each, more in ((plain, {}), (model, {"assistant": TREE})):
            if "logits_processor" in extra:
                extra = {"logits_processor": [Watching([])]}
            first = each.generate(**inputs, **options, **extra, **more)
            fresh = torch.tensor([[11, 12], [13, 14], [15, 16]])
            ids = torch.cat((first.sequences, fresh), 1)
            mask = torch.ones_like(ids)
            mask[:, :6] = inputs["attention_mask"]
            again = options | {"return_dict_in_generate": False, "eos_token_id": NEVER, CACHE: kept_cache(first)}
            turns.append((first.sequences.tolist(), each.generate(ids, attention_mask=mask, **again, **more).tolist()))
        assert turns[0] == turns[1]


@pytest.mark.parametrize("kind", [SynthIDTextWatermarkingConfig, WatermarkingConfig])
def test_watermarks_of_transformers(kind):
    """One of them keeps a state per row over the whole call."""
    plain, model = tiny_model(), fastspec.patch(tiny_model())
    config = (
        kind(keys=[1, 2, 3], ngram_len=3) if kind is SynthIDTextWatermarkingConfig else kind(seeding_scheme="selfhash")
    )
    options = {"watermarking_config": config, "do_sample": True, "max_new_tokens": LENGTH, "pad_token_id": 0}
    texts = []
    for each, more in ((plain, {}), (model, {"assistant": "nasd"})):
        torch.manual_seed(1)
        texts.append(each.generate(**prompts_on("cpu", 6, 3, 5), **options, **more).tolist())
    assert texts[0] == texts[1]


def test_encoder_decoder_models():
    """A decoder's tokens are shown as plain decoding shows them."""
    plain, model = tiny_seq2seq("t5"), fastspec.patch(tiny_seq2seq("t5"))
    inputs = sources(7, 4)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": NEVER}
    want, calls = recorded(plain, inputs, [NEVER], **options)
    for assistant in ("autoregressive", "nasd"):
        got, ours = recorded(model, inputs, [NEVER], **options, assistant=assistant)
        assert got.tolist() == want.tolist()
        agree(ours, calls)


def test_continuous_batches_are_refused_where_prompts_wait():
    model = fastspec.patch(tiny_model())
    inputs = prompts_on("cpu", 6, 3, 5)
    options = {"max_new_tokens": 4, "stopping_criteria": [Held([], [NEVER])]}
    with pytest.raises(Unsupported, match="decodes 2 of 3 prompts at a time, and Held may keep a state"):
        model.generate(**inputs, **options, assistant=ContinuousBatch("nasd", rows=2))
    model.generate(**inputs, **options, assistant=ContinuousBatch("nasd", rows=3))
    with pytest.raises(Unsupported, match="Watching may keep a state"):
        model.generate(
            **inputs, max_new_tokens=4, logits_processor=[Watching([])], assistant=ContinuousBatch("nasd", rows=1)
        )


def test_processors_are_shown_scores_that_lie_row_by_row():
    """As plain decoding's do: xgrammar masks them through a pointer, whatever their strides say."""
    seen = []

    class Layout(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            seen.append(scores.stride())
            return scores

    model = tiny_model()
    with fastspec.patched(model, eagle3=tiny_head(model)):
        for assistant in ("autoregressive", TREE):
            model.generate(
                **prompts_on("cpu", 4, 7),
                assistant=assistant,
                max_new_tokens=5,
                do_sample=False,
                logits_processor=[Layout()],
            )
    assert set(seen) == {(model.config.vocab_size, 1)}


@pytest.mark.parametrize("lengths", [(6,), (5, 3, 8)])
def test_a_mixture_of_two_models_distributions_is_stopped_step_by_step(lengths):
    """Its tokens are those of the same mixture without the criterion, which sees the whole batch once a step; a
    processor is refused."""
    model, log = tiny_model(), []
    stage = fastspec.Stage(tiny_model(seed=2, num_hidden_layers=2), name="small")
    fastspec.patch(model, cascade=fastspec.Cascade(stages=[stage], mode="token", rule="chow", alpha=0.3, gamma=3))
    options = {
        **prompts_on("cpu", *lengths),
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": NEVER,
        "assistant": "cascade",
    }
    free = model.generate(**options)
    assert model.generate(**options, stopping_criteria=[Held(log, [NEVER])]).tolist() == free.tolist()
    assert [ids for _, ids, _ in log] == [free[:, : max(lengths) + step].tolist() for step in range(1, 13)]
    with pytest.raises(Unsupported, match="a mixture of two models' distributions takes no processors that may look"):
        model.generate(**options, logits_processor=[Watching(log)])


@pytest.mark.each_value
@pytest.mark.parametrize("assistant", ASSISTANTS[:4], ids=str)
@pytest.mark.parametrize("who", ["processor", "criterion"])
def test_what_is_written_into_the_tokens_stands(who, assistant):
    """In place, as plain decoding lets it be: what a criterion writes last is what the model reads next."""

    def writes(input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] % 3 == 0:
            input_ids[:, -1] = 9
        return scores if who == "processor" else torch.zeros(len(input_ids), dtype=torch.bool)

    model = tiny_model()
    fastspec.patch(model, eagle3=tiny_head(model), eagle=tiny_head(model, kind="eagle", taps=(), own_lm_head=False))
    name = "logits_processor" if who == "processor" else "stopping_criteria"
    for lengths in ((6,), (5, 3)):
        options = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": NEVER, name: [writes]}
        want = tiny_model().generate(**prompts_on("cpu", *lengths), **options)
        assert model.generate(**prompts_on("cpu", *lengths), **options, assistant=assistant).tolist() == want.tolist()
        assert (want[:, 6:] == 9).any()
