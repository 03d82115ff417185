"""Files and arguments that are junk: an error that names them and says what is accepted, in no time."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.heads import make_head, plain_config
from helpers.models import tiny_head, tiny_model
from safetensors.torch import save_file

import fastspec
from fastspec.cascade import records
from fastspec.cascade.predictor import Predictor
from fastspec.files import DEEPEST, LARGEST, parse_json, parse_yaml
from fastspec.patches.assistants.heads import inspect_head, load_head
from fastspec.programs.texts import read_jsonl

DEEP = {
    "lists": "[" * 12_000 + "]" * 12_000,
    "objects": '{"a": ' * 12_000 + "1" + "}" * 12_000,
    "shallower": "[" * 200 + "]" * 200,
}


def config_of_a_head(folder: Path, deep: str) -> Any:
    path = folder / "config.json"
    path.write_text('{"rope_scaling": ' + deep + "}")
    return path, lambda: inspect_head(folder)


def index_of_a_head(folder: Path, deep: str) -> Any:
    (folder / "config.json").write_text("{}")
    path = folder / "model.safetensors.index.json"
    path.write_text('{"weight_map": ' + deep + "}")
    return path, lambda: inspect_head(folder)


def yaml_of_a_cascade(folder: Path, deep: str) -> Any:
    path = folder / "cascade.yaml"
    path.write_text("stages: " + deep)
    return path, lambda: fastspec.Cascade.from_yaml(path)


def predictor_of_a_cascade(folder: Path, deep: str) -> Any:
    path = folder / "predictor.safetensors"
    header = {"format": "fastspec-cascade-predictor", "version": "1", "stages": deep, "features": "[]", "place": "{}"}
    save_file({"a": torch.zeros(1)}, str(path), metadata=header)
    return path, lambda: Predictor.load(path)


def records_of_a_cascade(folder: Path, deep: str) -> Any:
    path = folder / "answers.jsonl"
    path.write_text(json.dumps({"format": records.FORMAT, "version": 1, "features": []}) + "\n" + deep + "\n")
    return path, lambda: records.read(path)


def prompts(folder: Path, deep: str) -> Any:
    path = folder / "prompts.jsonl"
    path.write_text('{"prompt": ' + deep + "}\n")
    return path, lambda: list(read_jsonl(path))


def storage(folder: Path, deep: str) -> Any:
    path = folder / "storage.safetensors"
    header = {"format": "fastspec-storage", "version": "1", "kind": deep}
    save_file({"contexts": torch.zeros(1, 3, dtype=torch.long)}, str(path), metadata=header)
    return path, lambda: fastspec.NgramStorage.load(path)


FILES = [
    config_of_a_head,
    index_of_a_head,
    yaml_of_a_cascade,
    predictor_of_a_cascade,
    records_of_a_cascade,
    prompts,
    storage,
]


@pytest.mark.parametrize("kind", DEEP)
@pytest.mark.parametrize("file", FILES)
def test_deep_files_are_refused_by_name_in_no_time(tmp_path: Path, file: Any, kind: str) -> None:
    path, read = file(tmp_path, DEEP[kind])
    start = time.process_time()
    with pytest.raises(fastspec.FastSpecError, match=f"{path.name}.*"):
        read()
    assert time.process_time() - start < 3  # seconds of the CPU; 17 and more without the bound


def test_depth_and_size_are_bounded_where_they_are_said_to_be() -> None:
    fits, over = ("[" * depth + "]" * depth for depth in (DEEPEST, DEEPEST + 1))
    for parse in (parse_json, parse_yaml):
        assert json.dumps(parse(fits)) == fits
        with pytest.raises(ValueError, match=f"deeper than {DEEPEST}"):
            parse(over)
    with pytest.raises(ValueError, match=f"at most {LARGEST}"):
        parse_yaml(" " * (LARGEST + 1))


@pytest.mark.parametrize(
    "text",
    [
        "stages: [&a [x, x], &b [*a, *a]]",
        "stages: &s [*s]",
        "stages: [x]\nprice: " + "9" * 5000,
        "stages: [x]\nprice: 2020-13-45",
        "stages: [x]\n? [a]\n: 1",
        "stages: [x]\nprice: !!python/name:os.system",
    ],
)
def test_yaml_that_is_no_plain_data_is_refused_with_its_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cascade.yaml"
    path.write_text(text)
    with pytest.raises(fastspec.Unsupported, match=r"cascade\.yaml cannot be read as YAML"):
        fastspec.Cascade.from_yaml(path)


@pytest.mark.parametrize("kind", ["sparse", "csr", "meta", "quantised"])
@pytest.mark.filterwarnings("ignore")  # torch's, of sparse tensors being in beta and of quantisation moving elsewhere
def test_tensors_without_dense_values_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    head = make_head()
    state = head.state_dict()
    weight = state["fc.weight"]
    state["fc.weight"] = {
        "sparse": weight.to_sparse,
        "csr": weight.to_sparse_csr,
        "meta": lambda: weight.to("meta"),
        "quantised": lambda: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
    }[kind]()
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(plain_config(head.config)))
    with pytest.raises(
        fastspec.CheckpointError, match=r"pytorch_model\.bin(: fc\.weight is .*dense| cannot be read as plain tensors)"
    ):
        inspect_head(tmp_path)


@pytest.mark.parametrize("source", [5, ["a"], {"a": 1}, 1.5, torch.zeros(2)])
def test_a_head_that_is_none_is_refused_by_name(source: Any) -> None:
    model = tiny_model(num_hidden_layers=7)
    with pytest.raises(
        fastspec.CheckpointError, match=r"eagle3=.* is no head: accepted are a directory, a hub id.*EagleHead"
    ):
        fastspec.patch(model, eagle3=source)
    with pytest.raises(fastspec.CheckpointError, match="is no head"):
        load_head(source, model)
    with pytest.raises(fastspec.CheckpointError, match="is no head"):
        inspect_head(source)
    assert "generate" not in vars(model)
    fastspec.unpatch(fastspec.patch(model, eagle3=tiny_head(model)))


@pytest.mark.parametrize("wrapped", [torch.nn.Sequential, partial(torch.compile, backend="eager")])
def test_a_module_around_a_head_is_named_with_the_head_within(wrapped: Any) -> None:
    model = tiny_model(num_hidden_layers=7)
    module = wrapped(tiny_head(model))
    match = rf"^eagle3=<{type(module).__name__}> is no head \(its (0|_orig_mod) is one\): accepted are [^\n]*$"
    with pytest.raises(fastspec.CheckpointError, match=match):
        fastspec.patch(model, eagle3=module)
    with pytest.raises(fastspec.CheckpointError, match=r"^<OrderedDict> is no head: "):
        load_head(module.state_dict(), model)  # type: ignore[arg-type]


def test_a_head_without_values_is_refused_by_name() -> None:
    model = tiny_model(num_hidden_layers=7)
    with pytest.raises(fastspec.CheckpointError, match="on the device meta, without values"):
        fastspec.patch(model, eagle3=tiny_head(model).to("meta"))


@pytest.mark.parametrize("make", [fastspec.NgramStorage, fastspec.SuffixStorage])
def test_a_storage_of_another_models_texts_is_refused_by_name(tmp_path: Path, make: Any) -> None:
    model = fastspec.patch(tiny_model())
    ids, options = torch.tensor([[7, 8, 9, 7, 8]]), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for last, fits in ((96, True), (97, False)):
        held, cursor = make(), make().start()
        for token in (7, 8, last, 7, 8, last):
            cursor = held.feed(cursor, token)
        held.save(tmp_path / "held.safetensors")
        held = make.load(tmp_path / "held.safetensors")
        if fits:
            assert (
                model.generate(ids, **options, assistant=fastspec.Nasd(storage=held)).tolist()
                == model.generate(ids, **options).tolist()
            )
        else:
            with pytest.raises(
                fastspec.Unsupported,
                match=r"Storage.* holds the token 97.*end at 96.*load the one made with this model",
            ):
                model.generate(ids, **options, assistant=fastspec.Nasd(storage=held))
    assert make().tallies.largest() == -1
