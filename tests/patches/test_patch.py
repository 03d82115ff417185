"""patch and unpatch: what must be as it was, what must go on working, and who may write over what."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from helpers.models import tiny_head, tiny_model
from helpers.patch import assert_same, snapshot
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, pipeline

import fastspec
from fastspec.patches.backends import choose_backend
from fastspec.patches.on_cpu import named
from fastspec.patches.session import CALLS_KEPT, PatchSession, session_of

INPUTS = {
    "input_ids": torch.tensor([[0, 0, 7, 8, 9], [11, 12, 13, 14, 15]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1] * 5]),
}
GREEDY = {**INPUTS, "max_new_tokens": 12, "do_sample": False}


@pytest.mark.some("mixtral", "gpt2")
@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2"])
def test_unpatch_leaves_the_model_as_it_was(kind: str) -> None:
    model = tiny_model(kind)
    before = snapshot(model)
    assert fastspec.patch(model, eagle3=tiny_head(model)) is model
    assert inspect.signature(model.generate) != before["signature"]
    for assistant in ("eagle3", "autoregressive", None):
        model.generate(**GREEDY, assistant=assistant)
    model.generate(
        **{**GREEDY, "do_sample": True}, assistant="eagle3", return_dict_in_generate=True, output_scores=True
    )
    assert fastspec.unpatch(model) is model
    assert_same(before, snapshot(model))


def test_a_patched_model_looks_the_same_from_outside() -> None:
    model = tiny_model()
    before = snapshot(model)
    with fastspec.patched(model, eagle3=tiny_head(model)):
        during = snapshot(model)
        for key in ("parts", "storage", "config", "generation_config", "classes", "hooks", "forward", "training"):
            assert before[key] == during[key], key
        extra = {name: vars_.keys() - before["attributes"][name].keys() for name, vars_ in during["attributes"].items()}
        methods = {"generate", "generate_batch", "init_continuous_batching", "__getstate__", "__deepcopy__"}
        assert {name: found for name, found in extra.items() if found} == {"": {"_fastspec", *methods}}


def test_a_deep_copy_is_patched_on_its_own() -> None:
    model = fastspec.patch(tiny_model(), eagle3=tiny_head(tiny_model()))
    expected = model.generate(**GREEDY)
    twin = copy.deepcopy(model)
    assert session_of(twin) is not session_of(model)
    assert torch.equal(twin.generate(**GREEDY, assistant="eagle3"), expected)
    assert not session_of(model).calls
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(parameter.flip(0))
    changed = twin.generate(**GREEDY)
    assert not torch.equal(changed, expected)
    assert torch.equal(twin.generate(**GREEDY, assistant="eagle3"), changed)
    assert session_of(twin).resources["eagle3"].binding.embedding is twin.get_input_embeddings()
    fastspec.unpatch(twin)
    assert session_of(twin) is None and "generate" not in vars(twin)
    assert torch.equal(model.generate(**GREEDY, assistant="eagle3"), expected)
    fastspec.unpatch(model)
    assert torch.equal(twin.generate(**GREEDY), changed)


def test_a_deep_copy_has_no_batch_of_its_original() -> None:
    model = fastspec.patch(tiny_model())
    with fastspec.continuous(model, "autoregressive", rows=1):
        twin = copy.deepcopy(model)
        with pytest.raises(fastspec.PatchConflict, match="still decodes"):
            fastspec.unpatch(model)
        fastspec.unpatch(twin)
    fastspec.unpatch(model)


def test_an_object_with_the_attributes_of_a_patched_model_is_not_patched() -> None:
    model, other = fastspec.patch(tiny_model()), tiny_model()
    vars(other).update(vars(model))
    assert session_of(other) is None and session_of(model) is vars(other)["_fastspec"]


class Foreign(pickle.Unpickler):
    """Unpickles where fastspec is not installed."""

    def find_class(self, module: str, name: str) -> Any:
        assert module.partition(".")[0] != "fastspec"
        return super().find_class(module, name)


def by_pickle(model: Any) -> Any:
    return Foreign(io.BytesIO(pickle.dumps(model))).load()


def by_torch(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [by_pickle, by_torch])
def test_a_model_that_was_saved_whole_loads_as_an_ordinary_one(again: Any) -> None:
    model = tiny_model(num_hidden_layers=1)
    expected, size = model.generate(**GREEDY), len(pickle.dumps(model))
    fastspec.patch(model)
    model.generate(**GREEDY, assistant="autoregressive")
    assert len(pickle.dumps(model)) < size + 200  # neither heads nor statistics
    loaded = again(model)
    assert session_of(model) is not None and session_of(loaded) is None
    with pytest.raises(fastspec.FastSpecError, match="not patched"):
        fastspec.report(loaded)
    assert torch.equal(loaded.generate(**GREEDY), expected)
    assert inspect.signature(loaded.generate) == inspect.signature(tiny_model(num_hidden_layers=1).generate)
    assert vars(loaded).keys() == vars(tiny_model(num_hidden_layers=1)).keys()
    before = snapshot(loaded)
    with fastspec.patched(loaded):
        assert torch.equal(loaded.generate(**GREEDY, assistant="autoregressive"), expected)
        assert torch.equal(again(loaded).generate(**GREEDY), expected)
    assert_same(before, snapshot(loaded))


def test_a_shallow_copy_leaves_the_patch_to_its_original() -> None:
    model = fastspec.patch(tiny_model(num_hidden_layers=1))
    twin = copy.copy(model)
    assert vars(twin).keys() == vars(tiny_model(num_hidden_layers=1)).keys()
    with pytest.raises(fastspec.PatchConflict, match="not patched"):
        fastspec.unpatch(twin)
    expected = model.generate(**GREEDY)
    with fastspec.patched(twin):
        assert torch.equal(twin.generate(**GREEDY, assistant="autoregressive"), expected)
    assert torch.equal(model.generate(**GREEDY, assistant="autoregressive"), expected)
    fastspec.unpatch(model)
    assert "generate" not in vars(model)


@pytest.mark.parametrize("again", [copy.copy, by_pickle])
def test_a_copy_has_the_generate_that_was_there_before(again: Any) -> None:
    model = tiny_model(num_hidden_layers=1)
    model.generate = partial(type(model).generate, model, min_new_tokens=2)
    twin = again(fastspec.patch(model))
    assert type(vars(twin)["generate"]) is partial and torch.equal(twin.generate(**GREEDY), model.generate(**GREEDY))
    with pytest.raises(ValueError, match="assistant"):
        twin.generate(**GREEDY, assistant="nasd")


def test_patching_twice_and_unpatching_nothing_are_errors() -> None:
    model = tiny_model()
    for act in (fastspec.unpatch, fastspec.report):
        with pytest.raises(fastspec.FastSpecError, match="not patched"):
            act(model)
    fastspec.patch(model)
    with pytest.raises(fastspec.PatchConflict, match=r"patched already.*fastspec\.unpatch"):
        fastspec.patch(model)
    fastspec.unpatch(model)
    with pytest.raises(fastspec.PatchConflict, match="not patched"):
        fastspec.unpatch(model)


def test_someone_elses_change_is_refused_or_left_with_force() -> None:
    model = fastspec.patch(tiny_model())
    ours = model.generate

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    model.generate = theirs
    with pytest.raises(fastspec.PatchConflict, match=r"LlamaForCausalLM\.generate.*force=True"):
        fastspec.unpatch(model)
    assert torch.equal(
        model.generate(**GREEDY, assistant="autoregressive"), model.generate(**GREEDY)
    )  # nothing was undone
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM\.generate"):
        fastspec.unpatch(model, force=True)
    assert model.generate is theirs and session_of(model) is None
    assert torch.equal(model.generate(**GREEDY), tiny_model().generate(**GREEDY))  # their wrapper still calls ours
    with pytest.raises(fastspec.FastSpecError, match=r"not patched|fastspec\.patch"):
        model.generate(**GREEDY, assistant="eagle3")


def test_their_change_taken_back_is_no_conflict() -> None:
    model = tiny_model()
    before = snapshot(model)
    fastspec.patch(model)
    ours, model.generate = model.generate, print
    vars(model)["generate"] = ours
    fastspec.unpatch(model)
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("fail_at", [1, 2])
def test_a_failure_midway_is_rolled_back(fail_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls, real = tiny_model(), [], PatchSession.set
    before = snapshot(model)

    def failing(self, owner, name, value):
        calls.append(name)
        if len(calls) == fail_at:
            raise KeyboardInterrupt(name)
        real(self, owner, name, value)

    monkeypatch.setattr(PatchSession, "set", failing)
    with pytest.raises(KeyboardInterrupt):
        fastspec.patch(model, eagle3=tiny_head(model))
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("options", [{"backend": "cuda-magic"}, {"eagle3": "/no/such/head"}, {"eagle4": 1}])
def test_a_patch_that_is_refused_changes_nothing(options: dict[str, Any]) -> None:
    model = tiny_model()
    before = snapshot(model)
    with pytest.raises((fastspec.FastSpecError, TypeError), match=r"cuda-magic|no/such/head|eagle4"):
        fastspec.patch(model, **options)
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_patched_undoes_itself_whatever_happens(error: type[BaseException] | None) -> None:
    model = tiny_model()
    before = snapshot(model)
    if error is None:
        with fastspec.patched(model) as same:
            assert same is model and session_of(model) is not None
    else:
        with pytest.raises(error), fastspec.patched(model):
            raise error
    assert_same(before, snapshot(model))


def test_save_pretrained_writes_the_same_files(tmp_path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "plain")
    with fastspec.patched(model, eagle3=tiny_head(model)):
        model.save_pretrained(tmp_path / "patched")
    files = {path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "patched").iterdir()}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert torch.equal(again.generate(**GREEDY), model.generate(**GREEDY))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_cast_after_patch_takes_its_head_along(dtype: torch.dtype) -> None:
    model = tiny_model()
    with fastspec.patched(model, eagle3=tiny_head(model)):
        model.to(dtype)
        out = model.generate(**GREEDY, assistant="eagle3")
        assert out.shape[0] == 2 and fastspec.report(model).dtype == str(dtype).removeprefix("torch.")
        if dtype == torch.float64:
            assert torch.equal(out, model.generate(**GREEDY))
        model.to(torch.float32)
    assert model.dtype == torch.float32


def test_training_is_bit_identical() -> None:
    def step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model.train()
        loss = model(**INPUTS, labels=INPUTS["input_ids"]).loss
        loss.backward()
        return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}

    plain, patched = tiny_model(attention_dropout=0.2), tiny_model(attention_dropout=0.2)
    with fastspec.patched(patched, eagle3=tiny_head(patched)):
        loss, grads = step(patched)
    expected, expected_grads = step(plain)
    assert torch.equal(loss, expected) and all(torch.equal(grads[name], grad) for name, grad in expected_grads.items())


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "temperature": 0.8}, {"num_beams": 3}, {"num_beams": 2, "do_sample": True}]
)
def test_plain_generate_is_bit_identical(options: dict[str, Any]) -> None:
    def run() -> Any:
        torch.manual_seed(7)
        return model.generate(
            **{**GREEDY, **options}, return_dict_in_generate=True, output_scores=True, output_logits=True
        )

    model = tiny_model()
    expected = run()
    with fastspec.patched(model, eagle3=tiny_head(model)):
        out = run()
    assert (
        type(out) is type(expected) and out.keys() == expected.keys() and torch.equal(out.sequences, expected.sequences)
    )
    for name in ("scores", "logits"):
        assert all(torch.equal(a, b) for a, b in zip(out[name], expected[name], strict=True))


def test_a_generate_of_the_users_own_is_called_and_put_back() -> None:
    model, calls = tiny_model(), []

    def own(*args, **kwargs):
        calls.append(sorted(kwargs))
        return type(model).generate(model, *args, **kwargs)

    model.generate = own
    expected = model.generate(**GREEDY)
    with fastspec.patched(model, eagle3=tiny_head(model)):
        assert torch.equal(model.generate(**GREEDY), expected)
        assert torch.equal(model.generate(**GREEDY, assistant="eagle3"), expected)
    assert model.generate is own and len(calls) == 3


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<s>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 97)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", unk_token="<unk>", padding_side="left"
    )


def test_pipeline_generates_with_an_assistant(tokenizer: PreTrainedTokenizerFast) -> None:
    model, texts = tiny_model(), ["w7 w8 w9", "w11 w12 w13 w14 w15"]

    def run(**options: Any) -> list[Any]:
        generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        return generator(texts, max_new_tokens=10, do_sample=False, batch_size=2, **options)

    expected = run()
    with fastspec.patched(model, eagle3=tiny_head(model)):
        assert run() == expected
        assert run(assistant="eagle3") == expected
        assert fastspec.report(model).last.assistant == "eagle3"


def test_report_says_what_is_patched_and_what_ran() -> None:
    model = tiny_model()
    with fastspec.patched(model, eagle3=tiny_head(model)):
        report = fastspec.report(model)
        assert (report.model, report.mode) == ("LlamaForCausalLM", "adapter llama")
        backend = named("auto", model.device, model.dtype, True)  # the tests' own FASTSPEC_CPU is torch
        assert report.backend == choose_backend(backend, torch.device("cpu")).name
        assert (report.device, report.dtype, report.last) == ("cpu", "float32", None)
        assert {"autoregressive", "eagle3"} <= set(report.assistants)
        assert not report.exact and "Triton" in report.why_inexact
        model.generate(**GREEDY, eos_token_id=None, assistant="eagle3")
        model.generate(**GREEDY, eos_token_id=None, assistant="autoregressive")
        model.generate(**GREEDY)
        report = fastspec.report(model)
        assert [call.assistant for call in report.calls] == ["eagle3", "autoregressive"]
        assert report.last.emitted == 24 and report.last.rounds == 11 and report.last.acceptance_length == 1.0
        assert report.last.tokens_per_second > 0 and {"prefill", "score"} <= report.last.phases.keys()
        text = str(report)
        expected = (
            "LlamaForCausalLM",
            "adapter llama",
            report.backend,
            "float32",
            "eagle3: 1 call, ",
            "acceptance length 1.00",
        )
        assert [word for word in expected if word not in text] == []


def test_statistics_do_not_grow_without_bound() -> None:
    model = tiny_model(num_hidden_layers=1)
    with fastspec.patched(model):
        model.generate(**GREEDY, assistant="autoregressive")
        session = session_of(model)
        session.calls.extend([session.calls[-1]] * (CALLS_KEPT + 5))
        model.generate(**{**GREEDY, "max_new_tokens": 1}, assistant="autoregressive")
        report = fastspec.report(model)
        assert len(report.calls) == CALLS_KEPT and report.last.emitted == 2
