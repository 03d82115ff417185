"""Bad input is refused by name, and whatever goes wrong inside a call leaves the model usable and patched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.generate import prompts, shallow_model
from helpers.heads import as_speculators, make_head, write
from helpers.models import tiny_head, tiny_model
from helpers.threads import in_threads
from transformers import BatchEncoding, BertConfig, BertLMHeadModel, GenerationConfig, StoppingCriteriaList

import fastspec
from fastspec.patches.call.refusals import refuse_arguments
from fastspec.patches.session import session_of

PROMPT = torch.tensor([[7, 8, 9, 10]])
GREEDY = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def test_an_argument_that_is_off_is_not_given() -> None:
    model = tiny_model()
    refuse_arguments(model, {"synced_gpus": False, "custom_generate": None})
    with pytest.raises(fastspec.Unsupported, match="synced_gpus cannot be combined"):
        refuse_arguments(model, {"synced_gpus": True})


def bert_decoder() -> Any:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = BertConfig(vocab_size=97, is_decoder=True, eos_token_id=5, initializer_range=0.3, **sizes)
    torch.manual_seed(0)
    return BertLMHeadModel(config).eval()


@pytest.mark.parametrize("made", ["gpt2", "gptj", "bert"])
@pytest.mark.parametrize("kind", [0, 1])
def test_types_of_tokens_are_refused_unless_they_say_nothing(made: str, kind: int) -> None:
    """A tokenizer of BERT's gives each token type 0, which its model takes where none is given; in GPT-2 a type adds
    an embedding of its own to every token, new ones too."""
    rotated = {"rotary_dim": 8} if made == "gptj" else {}
    model = fastspec.patch(bert_decoder() if made == "bert" else tiny_model(made, num_hidden_layers=2, **rotated))
    given = {"input_ids": PROMPT, "token_type_ids": torch.full_like(PROMPT, kind), "max_new_tokens": 6}
    if made == "bert" and kind == 0:
        assert torch.equal(model.generate(**given, assistant="nasd"), model.generate(**given))
        return
    with pytest.raises(fastspec.Unsupported, match=r"token_type_ids cannot be combined with assistant= on"):
        model.generate(**given, assistant="nasd")
    assert not torch.equal(model.generate(**given), model.generate(PROMPT, max_new_tokens=6))


def test_settings_of_a_configuration_are_refused_before_transformers_acts_on_them() -> None:
    model, config = tiny_model(num_hidden_layers=1), GenerationConfig(cache_implementation="static")
    with pytest.raises(fastspec.Unsupported, match="cache_implementation='static'"):
        refuse_arguments(model, {"generation_config": config})
    refuse_arguments(model, {"generation_config": config, "cache_implementation": None})
    model.generation_config = config
    with pytest.raises(fastspec.Unsupported, match="cache_implementation='static'"):
        refuse_arguments(model, {"generation_config": GenerationConfig()})
    refuse_arguments(model, {"generation_config": GenerationConfig(cache_implementation="hybrid")})


@pytest.fixture(scope="module")
def shared() -> tuple[Any, torch.Tensor]:
    """An unpatched model, and what it says."""
    model = shallow_model()
    return model, model.generate(PROMPT, **GREEDY)


@pytest.fixture
def model(shared: tuple[Any, torch.Tensor]) -> Iterator[Any]:
    """A patched model that must still generate correctly, and come off cleanly, after whatever a test did to it."""
    model, expected = shared
    before, config = dict(vars(model)), model.generation_config.to_dict()
    fastspec.patch(model, eagle3=tiny_head(model))
    yield model
    assert session_of(model).turn.owner is None
    for assistant in ("eagle3", "autoregressive", None):
        assert torch.equal(model.generate(PROMPT, **GREEDY, assistant=assistant), expected)
    fastspec.unpatch(model)
    assert dict(vars(model)) == before and model.generation_config.to_dict() == config


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown assistant": ({"assistant": "eagle9"}, "'eagle9' is unknown.*'eagle3'"),
    "unknown object": ({"assistant": 3}, "assistant=3 is neither"),
    "class instead of a config": ({"assistant": fastspec.Eagle3}, "Eagle3 is a class: give an object"),
    "model instead of a name": (
        {"assistant": tiny_model(num_hidden_layers=1)},
        r"is a module: .*speculative=draft_model",
    ),
    "text": ({"input_ids": "Once"}, r"input_ids is a str: pass whole numbers of shape \[rows, tokens\]"),
    "list": ({"input_ids": [[7, 8]]}, "input_ids is a list"),
    "what a tokenizer returns": (
        {"input_ids": BatchEncoding({"input_ids": PROMPT})},
        r"BatchEncoding: .*\*\*tokenizer",
    ),
    "one text without rows": ({"input_ids": PROMPT[0]}, r"torch.int64 of shape \(4,\)"),
    "numbers that are no ids": ({"input_ids": PROMPT.float()}, "input_ids is torch.float32"),
    "mask as a list": (
        {"attention_mask": [[1, 1, 1, 1]]},
        r"attention_mask must be a tensor of shape \[rows, tokens\]",
    ),
    "mask without rows": ({"attention_mask": torch.ones(4, dtype=torch.long)}, "attention_mask must be a tensor"),
    "beam search": ({"num_beams": 2}, "num_beams=2"),
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, r"penalty_alpha=0\.6"),
    "guidance": ({"guidance_scale": 1.5}, r"guidance_scale=1\.5"),
    "layer contrast": ({"dola_layers": "high"}, "dola_layers='high'"),
    "another model's drafts": ({"assistant_model": tiny_model(num_hidden_layers=1)}, "assistant_model"),
    "own decoding loop by name": ({"custom_generate": "some/loop"}, "custom_generate"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "attentions": ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
    "hidden states": ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 4, 64), "input_ids": None}, "inputs_embeds"),
    "position ids": ({"position_ids": torch.arange(4)[None]}, "position_ids"),
    "own decoding loop": ({"custom_generate": lambda model, **_: None}, "custom_generate"),
    "no rows": ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, r"shape \(0, 4\)"),
    "right padding": (
        {"input_ids": torch.tensor([[7, 8, 0], [7, 8, 9]]), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])},
        "padding_side='left'",
    ),
    "mask of another width": ({"attention_mask": torch.ones(1, 7, dtype=torch.long)}, "attention_mask is 7 wide"),
    "too much memory": ({"max_new_tokens": 10**9}, r"out of memory.*GiB.*max_new_tokens"),
    "too wide a tree": ({"assistant": fastspec.Eagle3(depth=1, top_k=98, total_tokens=9)}, "top_k=98.*97"),
}


WEIGHTS = {"output_attentions": True}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore")  # transformers warns of some of these itself
def test_a_call_that_cannot_work_is_refused_by_name(model: Any, kind: str) -> None:
    options, message = REFUSED[kind]
    call = {"input_ids": PROMPT, **GREEDY, "assistant": "eagle3", **options}
    with pytest.raises(fastspec.FastSpecError, match=f"(?s){message}"):
        model.generate(**{name: value for name, value in call.items() if value is not None or name == "eos_token_id"})
    assert not fastspec.report(model).calls


def test_attention_weights_that_change_how_a_model_attends_are_refused_where_nothing_returns_them() -> None:
    """Falcon adds its mask of padding as numbers then."""
    plain = shallow_model("falcon", 1)
    with fastspec.patched(deepcopy(plain)) as model:
        inputs = prompts(5, 12, seed=3)
        assert not torch.equal(plain.generate(**inputs, **GREEDY), plain.generate(**inputs, **GREEDY, **WEIGHTS))
        with pytest.raises(fastspec.Unsupported, match=r"output_attentions=True.*FalconForCausalLM"):
            model.generate(**inputs, **GREEDY, **WEIGHTS, assistant="nasd")


def test_positional_prompts_and_masks_are_understood(model: Any) -> None:
    assert torch.equal(model.generate(PROMPT, None, assistant="eagle3", **GREEDY), model.generate(PROMPT, **GREEDY))


def test_an_assistant_without_its_resource_names_the_call_that_supplies_it() -> None:
    """Also where a model of one process is told not to keep others in step."""
    model = tiny_model(num_hidden_layers=1)
    for more in ({}, {"synced_gpus": False}):
        with fastspec.patched(model), pytest.raises(fastspec.Unsupported, match=r"fastspec\.patch\(model, eagle3="):
            model.generate(PROMPT, **GREEDY, **more, assistant="eagle3")


@pytest.mark.parametrize(
    "over",
    [{"hidden_size": 32}, {"vocab_size": 65}, {"num_hidden_layers": 2}, {"dtype": torch.bfloat16}],
    ids=["width", "vocabulary", "taps", "dtype"],
)
def test_a_head_of_another_model_is_refused(over: dict[str, Any]) -> None:
    model = tiny_model(**{name: value for name, value in over.items() if name != "dtype"}).to(
        over.get("dtype", torch.float32)
    )
    head, before = tiny_head(shallow_model()), dict(vars(model))
    with pytest.raises(fastspec.CheckpointError, match=r"\d"):
        fastspec.patch(model, eagle3=head)
    assert dict(vars(model)) == before


def attributes(model: Any) -> dict[str, dict[str, int]]:
    """Every attribute of every module, by identity."""
    return {name: {key: id(value) for key, value in vars(module).items()} for name, module in model.named_modules()}


def truncate(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def poison(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    state["fc.weight"][3, 5] = float("nan")
    write(folder, config, state)


def misdirect(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    state["d2t"][-1] = 97
    write(folder, config, state)


def widen(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    head = make_head(**{**HEAD, "vocab_size": 128, "hidden_size": 32, "target_hidden_size": 32})
    write(folder, *as_speculators(head, torch.zeros(128, 32)))


HEAD = {"hidden_size": 64, "target_hidden_size": 64, "vocab_size": 97, "draft_vocab_size": 41, "taps": (0, 1, 3)}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "model.safetensors"),
        (poison, "fc.weight contains NaN"),
        (misdirect, "d2t.*not a map into the target's vocabulary"),
        (widen, "vocabulary of 128, the target's has 97"),
        (None, ""),
    ],
    ids=["truncated", "NaN", "map", "another model's", "sound"],
)
def test_a_damaged_head_is_refused_and_the_model_left_as_it_was(
    shared: tuple[Any, torch.Tensor], tmp_path: Path, damage: Callable[..., None] | None, message: str
) -> None:
    config, state = as_speculators(make_head(**HEAD), torch.zeros(97, 64))
    write(tmp_path, config, state)
    model, expected = shared
    before = attributes(model)
    if damage is None:
        with fastspec.patched(model, eagle3=tmp_path):
            assert torch.equal(model.generate(PROMPT, **GREEDY, assistant="eagle3"), expected)
    else:
        damage(tmp_path, config, state)
        with pytest.raises(fastspec.CheckpointError, match=message):
            fastspec.patch(model, eagle3=tmp_path)
        assert torch.equal(model.generate(PROMPT, **GREEDY), expected)
    assert attributes(model) == before


@pytest.mark.parametrize("cls", [fastspec.Eagle3, fastspec.TreeShape])
@pytest.mark.parametrize(
    "sizes",
    [
        {"total_tokens": 1},
        {"total_tokens": 257},
        {"total_tokens": 12, "depth": 0, "top_k": 10},
        {"top_k": 0},
        {"depth": -1},
    ]
    + [{name: value} for name in ("total_tokens", "depth", "top_k") for value in (2.5, "3", -4, True)],
    ids=str,
)
def test_tree_sizes_are_checked_when_made(cls: type, sizes: dict[str, Any]) -> None:
    with pytest.raises(fastspec.Unsupported, match=next(iter(sizes))):
        cls(**sizes)


class Streamer:
    """Calls `act` when the third piece arrives (the first is the prompt)."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act, self.pieces, self.ended = act, [], False

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value)
        if len(self.pieces) == 3:
            self.act()

    def end(self) -> None:
        self.ended = True


def _raise(error: type[BaseException]) -> None:
    raise error("from the user's code")


@pytest.mark.each_value
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, RuntimeError])
@pytest.mark.parametrize("where", ["streamer", "criterion", "processor"])
def test_an_exception_inside_a_call_leaves_the_model_usable(model: Any, error: type[BaseException], where: str) -> None:
    options: dict[str, Any] = {
        "streamer": {"streamer": Streamer(lambda: _raise(error))},
        "criterion": {
            "stopping_criteria": StoppingCriteriaList([lambda ids, scores: ids.shape[1] > 6 and _raise(error)])
        },
        "processor": {"logits_processor": [lambda ids, scores: _raise(error) if ids.shape[1] > 6 else scores]},
    }[where]
    with pytest.raises(error, match="from the user's code"):
        model.generate(PROMPT, **GREEDY, assistant="eagle3", **options)


def test_a_nested_call_is_refused(model: Any) -> None:
    streamer = Streamer(lambda: model.generate(PROMPT, **GREEDY, assistant="autoregressive"))
    with pytest.raises(fastspec.Unsupported, match="inside another such call"):
        model.generate(PROMPT, **GREEDY, assistant="eagle3", streamer=streamer)


def test_a_nested_plain_call_is_as_good_as_any(model: Any) -> None:
    seen: list[torch.Tensor] = []
    streamer = Streamer(lambda: seen.append(model.generate(PROMPT, **GREEDY)))
    out = model.generate(PROMPT, **GREEDY, assistant="eagle3", streamer=streamer)
    assert torch.equal(seen[0], out) and streamer.ended


def test_threads_get_their_own_answers(model: Any) -> None:
    prompts = [torch.randint(6, 97, (1, 3 + i), generator=torch.Generator().manual_seed(i)) for i in range(6)]
    expected = [model.generate(prompt, **GREEDY) for prompt in prompts]
    found: dict[int, torch.Tensor] = {}
    start = threading.Barrier(len(prompts))

    def work(index: int) -> None:
        start.wait()
        found[index] = model.generate(prompts[index], **GREEDY, assistant=("eagle3", "autoregressive", None)[index % 3])

    in_threads(work, len(prompts))
    assert all(torch.equal(found[index], out) for index, out in enumerate(expected))
    assert len(fastspec.report(model).calls) == 4


SETTINGS = {
    "num_beams": 2,
    "guidance_scale": 1.5,
    "use_cache": False,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "prompt_lookup_num_tokens": 3,
    "cache_implementation": "static",
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("source", ["argument", "model"])
def test_settings_in_a_generation_config_are_refused_too(
    model: Any, name: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leave nothing on the model, where transformers' own preparation would: a static cache's length, for one."""
    before = attributes(model)
    with monkeypatch.context() as patch, pytest.raises(fastspec.Unsupported, match=name):
        if source == "argument":
            settings = GenerationConfig(**{**model.generation_config.to_dict(), **GREEDY, name: SETTINGS[name]})
            model.generate(PROMPT, settings, assistant="eagle3")
        else:
            patch.setattr(model.generation_config, name, SETTINGS[name])
            model.generate(PROMPT, **GREEDY, assistant="eagle3")
    assert attributes(model) == before


def test_an_argument_has_the_last_word_over_a_generation_config(model: Any) -> None:
    settings = GenerationConfig(**{**model.generation_config.to_dict(), **GREEDY, "num_beams": 2})
    out = model.generate(PROMPT, generation_config=settings, num_beams=1, assistant="eagle3")
    assert torch.equal(out, model.generate(PROMPT, **GREEDY))


@pytest.mark.parametrize("limit", [{"max_new_tokens": 5.0}, {"max_new_tokens": 5.5}, {"max_length": 9.5}], ids=str)
def test_a_limit_between_two_whole_numbers_is_reached_with_the_next(limit: dict[str, float]) -> None:
    """As in plain decoding, which compares lengths with it: a limit may be read of a file, or computed."""
    model = fastspec.patch(tiny_model(num_hidden_layers=1))
    given = {"input_ids": PROMPT, **GREEDY, "max_new_tokens": None, **limit}
    out = model.generate(**given, assistant="nasd")
    assert out.shape[1] == (9 if limit == {"max_new_tokens": 5.0} else 10)
    assert torch.equal(out, model.generate(**given))


@pytest.mark.parametrize("limit", [int(1e30), float("inf")], ids=["a tokenizer's", "none"])
def test_a_limit_that_no_memory_holds_is_left_to_plain_decoding_by_a_default_alone(limit: float) -> None:
    """Tokenizers that name no longest text have a `model_max_length` of 1e30, and programs ask for as much: rows end
    by their end tokens."""
    model = tiny_model(num_hidden_layers=1)
    expected = model.generate(PROMPT, **GREEDY)
    given = {**GREEDY, "eos_token_id": int(expected[0, -1]), "max_new_tokens": limit}
    with fastspec.patched(model, assistant="nasd"):
        with pytest.warns(UserWarning, match="out of memory"):
            out = model.generate(PROMPT, **given)
        assert sum(fastspec.report(model).unassisted.values()) == 1
        with pytest.raises(fastspec.Unsupported, match=r"out of memory.*max_new_tokens"):
            model.generate(PROMPT, **given, assistant="nasd")
    assert torch.equal(out, model.generate(PROMPT, **given))
    assert out.shape[1] <= expected.shape[1]


def test_settings_that_a_generate_of_the_users_own_adds_are_refused_too() -> None:
    model = tiny_model(num_hidden_layers=1)
    model.generate = lambda *args, **options: type(model).generate(model, *args, **{**options, "num_beams": 2})
    with fastspec.patched(model), pytest.raises(fastspec.Unsupported, match="num_beams=2"):
        model.generate(PROMPT, **GREEDY, assistant="autoregressive")


def test_an_assistant_model_passed_by_position_is_seen(model: Any) -> None:
    with pytest.raises(fastspec.Unsupported, match="assistant_model cannot"):
        model.generate(
            PROMPT, None, None, None, None, None, tiny_model(num_hidden_layers=1), **GREEDY, assistant="eagle3"
        )


@pytest.mark.parametrize(
    "error", [None, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")], ids=["cpu", "cuda"]
)
def test_memory_that_runs_out_on_the_way_is_named(model: Any, error: Exception | None) -> None:
    def exhaust(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if error is not None:
            raise error
        return torch.empty(2**55, dtype=torch.int8)  # the allocator's own error

    with pytest.raises(fastspec.FastSpecError, match=r"out of memory.*1 rows of up to 9 tokens.*fewer new tokens"):
        model.generate(PROMPT, **GREEDY, assistant="eagle3", logits_processor=[exhaust])


@pytest.mark.parametrize(
    "damage, message", [("nan", "contains NaN"), ("d2t", "d2t leads outside the target's vocabulary of 97")]
)
def test_a_damaged_head_in_memory_is_refused_as_in_a_file(damage, message):
    model = tiny_model()
    head, before = tiny_head(model), dict(model.__dict__)
    if damage == "nan":
        head.layers[0].mlp.up_proj.weight.data[3, 5] = float("nan")
    else:
        head.d2t[7] = 97
    with pytest.raises(fastspec.CheckpointError, match=message):
        fastspec.patch(model, eagle3=head)
    assert model.__dict__ == before


def test_an_argument_that_is_the_model_itself_is_seen(model: Any) -> None:
    with pytest.raises(fastspec.Unsupported, match="assistant_model cannot be combined"):
        model.generate(PROMPT, **GREEDY, assistant="nasd", assistant_model=model)


@pytest.mark.parametrize("assistant", ["nasd", "eagle3"])
@pytest.mark.parametrize(
    ("to", "message"),
    [("meta", "on the meta device, without values"), (torch.float8_e4m3fn, "cast to torch.float8_e4m3fn")],
)
def test_weights_that_no_pass_can_multiply_are_refused(assistant: str, to: Any, message: str) -> None:
    model = tiny_model(num_hidden_layers=2)
    fastspec.patch(model, eagle3=tiny_head(model))
    model.to(to)
    with pytest.raises(fastspec.Unsupported, match=message):
        model.generate(PROMPT, **GREEDY, assistant=assistant)


def test_an_open_batch_refuses_what_is_no_prompt(model: Any) -> None:
    with fastspec.continuous(model, "nasd", rows=2) as batch:
        expected = batch.submit(PROMPT, **GREEDY).result()
        for wrong in ("Once", [7, 8, 9], BatchEncoding({"input_ids": PROMPT})):
            with pytest.raises(fastspec.Unsupported, match=r"input_ids is a \w+: pass whole numbers"):
                batch.submit(wrong, **GREEDY)
        assert torch.equal(batch.submit(PROMPT[0], **GREEDY).result(), expected)


def test_a_head_is_read_for_a_model_and_not_for_its_name() -> None:
    with pytest.raises(fastspec.Unsupported, match="reads a head for a model, not 'some/model': load the model first"):
        fastspec.load_head("smollm2-135m-instruct", "some/model")  # type: ignore[arg-type]


def test_a_mistyped_name_of_the_library_is_answered_with_the_right_one() -> None:
    with pytest.raises(AttributeError, match="no attribute 'pacth'") as caught:
        _ = fastspec.pacth  # type: ignore[attr-defined]
    assert caught.value.name == "pacth" and caught.value.obj is fastspec  # by which Python says what was meant
