"""A cascade's answers judged by tasks of lm-eval: the same prompts, answers and scores as lm-eval's own run of every
stage."""

from __future__ import annotations

import json
import re
import shutil
import string
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.clients import MARKS
from helpers.training import VOCAB, small_target
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from fastspec.cascade import records
from fastspec.cascade.predictor import Predictor
from fastspec.cascade.records import NAMES
from fastspec.programs.cli.app import app

pytestmark = MARKS

UTILS = """
import random
from datasets import Dataset

def rows(seed, count):
    drawn = random.Random(seed)
    return [{"q": "".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=9)), "a": drawn.choice("cgmuyw")} for _ in range(count)]

def data(**_):
    return {"train": Dataset.from_list(rows(0, 6)), "test": Dataset.from_list(rows(1, 40))}

def longer(doc, results):
    return {"longer": len(results[0]) > 8, "length": len(results[0]), "loss": 0.5}

def ran(doc, results):
    return {"passed": float(eval(repr(len(results[0]))) > 8)}
"""  # noqa: E501
TASK = """
task: {name}
custom_dataset: !function utils.data
test_split: test
fewshot_split: train
output_type: generate_until
doc_to_text: "Q: {{{{q}}}}"
doc_to_target: "{{{{a}}}}"
num_fewshot: 2
fewshot_config: {{sampler: first_n}}
generation_kwargs: {{until: ["Hw", ">^", "$-"], max_gen_toks: 12, do_sample: false, temperature: 0.0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
filter_list:
- name: first
  filter: [{{function: regex, regex_pattern: "([a-z])"}}, {{function: take_first}}]
- name: last
  filter: [{{function: regex, regex_pattern: "([a-z])", group_select: -1}}, {{function: take_first}}]
"""
BY_LENGTH = """
include: words.yaml
task: {name}
process_results: !function utils.longer
metric_list:
- {{metric: longer, aggregation: mean, higher_is_better: true}}
- {{metric: length, aggregation: mean, higher_is_better: true}}
- {{metric: loss, aggregation: mean, higher_is_better: false}}
filter_list: [{{name: none, filter: [{{function: take_first}}]}}]
"""
FILES = {
    "words": TASK,
    "by_length": BY_LENGTH,
    "coded": BY_LENGTH.replace("utils.longer", "utils.ran").replace("metric: longer", "metric: passed")
    + "unsafe_code: true\n",
    "sampled": "include: words.yaml\ntask: {name}\ngeneration_kwargs: {{until: [], do_sample: true, temperature: "
    "0.8}}\n",
    "warm": "include: words.yaml\ntask: {name}\ngeneration_kwargs: {{until: [], temperature: 0.8}}\n",
    "beamed": "include: words.yaml\ntask: {name}\ngeneration_kwargs: {{until: [], num_beams: 4}}\n",
    "repeated": "include: words.yaml\ntask: {name}\nrepeats: 3\n",
    "scored": (
        'include: words.yaml\ntask: {name}\noutput_type: multiple_choice\ndoc_to_choice: ["w4", '
        '"w5"]\ndoc_to_target: 0\n'
        "metric_list: [{{metric: acc}}]\nfilter_list: [{{name: none, filter: [{{function: take_first}}]}}]\n"
    ),
}


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of characters, with a chat template: stop strings of several tokens, and every text of a model can be
    read."""
    signs = string.printable[:96] + "\n"
    words = ["<pad>", "<end>", "<unk>", *signs, *map(chr, range(0x391, 0x391 + VOCAB - 3 - len(signs)))]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    plain.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")
    made.chat_template = (
        "{% for m in messages %}{{ m.role + ' says ' + m.content + '|' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'bot says ' + messages[-1].content[-2:] }}{% endif %}"
    )
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models that agree on some prompts, and the task files."""
    found = tmp_path_factory.mktemp("tasks")
    for name, noise in (("small", 0.5), ("large", 0.0)):
        model = small_target(peak=0.3)
        torch.manual_seed(1)
        model.lm_head.weight[4:] += noise * torch.randn(124, 64)
        model.save_pretrained(found / name)
        letters().save_pretrained(found / name)
    (found / "tasks").mkdir()
    (found / "tasks" / "utils.py").write_text(UTILS)
    for name, text in FILES.items():
        (found / "tasks" / f"{name}.yaml").write_text(text.format(name=name))
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates after two items, few steps of training, and no look at lm-eval's own thousands of tasks."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("fastspec.programs.cli.cascade.RATED", 2)
    monkeypatch.setattr("fastspec.cascade.predictor.STEPS", 40)
    monkeypatch.setattr(
        "fastspec.programs.training.cascade_tasks.TaskManager", partial(TaskManager, include_defaults=False)
    )


def invoke(folder: Path, *more: str, out: str = "p") -> Any:
    given = [
        *("cascade", "train", "--stage", f"small={folder}/small", "--model", f"large={folder}/large"),
        *("--out", f"{folder}/{out}.safetensors", "--answers", f"{folder}/{out}.jsonl", "--batch", "16"),
        *("--include-path", f"{folder}/tasks"),
    ]
    return CliRunner().invoke(app, [*given, *more], env={"COLUMNS": "200"})


def own(model: Path, names: list[str], folder: Path, templated: bool) -> dict[str, list[dict[str, Any]]]:
    """The samples of lm-eval's own run of a model."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lm = HFLM(pretrained=str(model), batch_size=8, device="cpu", dtype="float32")
    found = simple_evaluate(
        lm,
        tasks=names,
        task_manager=TaskManager(include_path=folder / "tasks", include_defaults=False),
        bootstrap_iters=0,
        apply_chat_template=templated,
        fewshot_as_multiturn=templated,
    )
    return found["samples"]


@pytest.mark.parametrize("templated", [True, False])
def test_prompts_answers_and_scores_are_lm_evals_own(folder: Path, tmp_path: Path, templated: bool) -> None:
    for name in ("small", "large"):
        shutil.copytree(folder / name, tmp_path / name)
        if not templated:
            (tmp_path / name / "chat_template.jinja").unlink()
    shutil.copytree(folder / "tasks", tmp_path / "tasks")
    done = invoke(tmp_path, "--task", "words,by_length")
    assert done.exit_code == 0, done.output + repr(done.exception)
    lines = [
        "words: judged by lm-eval words (exact_match,first)",
        "by_length: judged by lm-eval by_length (longer,none)",
    ]
    assert all(line in done.output for line in lines), done.output
    found = {
        (record.set, record.item.split("-")[1], record.stage): record for record in records.read(tmp_path / "p.jsonl")
    }
    assert len(found) == 2 * 2 * 40 and {record.label for record in found.values()} == {0.0, 1.0}
    lengths = {record.new_tokens + record.kept_tokens for record in found.values()}
    assert max(lengths) == 12 and len(lengths) > 1  # some end at a stop string
    for stage in ("small", "large"):
        samples = own(tmp_path / stage, ["words", "by_length"], tmp_path, templated)
        for task, metric, chosen in (("words", "exact_match", "first"), ("by_length", "longer", "none")):
            for sample in (each for each in samples[task] if each["filter"] == chosen):
                record = found[task, str(sample["doc_id"]), stage]
                assert record.answer == sample["resps"][0][0]
                assert record.label == float(sample[metric])
                assert record.prompt_tokens == len(sample["arguments"][0][0])
    assert "words: lm-eval words (exact_match,first)" in Predictor.load(tmp_path / "p.safetensors").place["judged"]


def test_another_metric_and_filter_are_chosen_by_name(folder: Path) -> None:
    given = "--task", "words,by_length", "--most", "24"
    done = invoke(folder, *given, "--metric", "exact_match,last", "--metric", "longer", out="chosen")
    assert "judged by lm-eval words (exact_match,last)" in done.output, done.output
    for metric, message in (
        ("f1", "lm-eval words has no metric f1; it has exact_match,first exact_match,last"),
        ("exact_match", "lm-eval by_length has no metric exact_match; it has longer,none length,none loss,none"),
    ):
        refused = invoke(folder, *given, "--metric", metric, out="chosen")
        assert refused.exit_code == 1 and message in refused.output, refused.output
    for metric, message in (("length", "must be a number in [0, 1]"), ("loss", "a lower loss is better")):
        asked = "--task", "by_length", "--most", "24", "--share", "1", "--metric", metric
        refused = invoke(folder, *asked, out="by_length")
        assert refused.exit_code == 1 and message in refused.output, refused.output


def test_tasks_and_prompts_go_together_and_another_wording_is_another_item(folder: Path, tmp_path: Path) -> None:
    rows = [{"id": f"n-{at}", "prompt": f"tell me of {at}", "answer": list(string.ascii_letters)} for at in range(24)]
    prompts = tmp_path / "own.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = "--prompts", str(prompts), "--task", "words", "--most", "24", "--max-new-tokens", "1", "--share", "1"
    done = invoke(folder, *given, out="both")
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert "own: judged by the text in `answer`" in done.output and "words: judged by lm-eval words" in done.output
    read = records.read(folder / "both.jsonl")
    assert {record.new_tokens + record.kept_tokens for record in read if record.set == "own"} == {1}
    task = folder / "tasks" / "words.yaml"
    text = task.read_text()
    try:
        task.write_text(text.replace("num_fewshot: 2", "num_fewshot: 1"))
        refused = invoke(folder, *given, out="both")
    finally:
        task.write_text(text)
    assert refused.exit_code == 1 and re.search(r"items: 'words-0-\w+', which is not asked now", refused.output), (
        refused.output
    )


def test_a_file_of_judgements_takes_the_place_of_a_tasks_own(folder: Path) -> None:
    right = folder / "right.jsonl"
    given = "--task", "words", "--most", "24", "--share", "1", "--right", str(right)
    asked = invoke(folder, *given, out="judged")
    assert asked.exit_code == 1 and "The 48 answers to judge are in" in asked.output, asked.output
    read = records.read(folder / "judged.jsonl")
    told = [{"item": each.item, "stage": each.stage, "right": each.stage == "large"} for each in read]
    right.write_text("".join(json.dumps(each) + "\n" for each in told))
    assert invoke(folder, *given, out="judged").exit_code == 0
    assert all(each.label == float(each.stage == "large") for each in records.read(folder / "judged.jsonl"))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("sampled", "lm-eval sampled: generation_kwargs ask for sampled answers"),
        ("warm", "lm-eval warm: generation_kwargs ask for sampled answers"),
        ("beamed", "lm-eval beamed: generation_kwargs num_beams cannot be honoured"),
        ("repeated", "lm-eval repeated: `repeats` asks for 3 answers"),
        ("scored", "lm-eval scored: the task compares likelihoods"),
        ("wrods", "has no task wrods: `lm-eval ls tasks` lists its own"),
        ("coded", "--confirm-run-unsafe-code"),
    ],
)
def test_tasks_that_a_cascade_cannot_answer_are_refused_before_a_model_is_loaded(
    folder: Path, task: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastspec.programs.cli.cascade.load_model", lambda *_, **__: pytest.fail("loaded"))
    refused = invoke(folder, "--task", task, out="refused")
    assert refused.exit_code == 1 and message in refused.output, refused.output + repr(refused.exception)
    assert not (folder / "refused.jsonl").exists()


def test_a_task_runs_code_where_lm_evals_switch_is_given(folder: Path) -> None:
    done = invoke(folder, "--task", "coded", "--most", "24", "--share", "1", "--confirm-run-unsafe-code", out="coded")
    assert done.exit_code == 0 and "judged by lm-eval coded (passed,none)" in done.output, done.output + repr(
        done.exception
    )


def test_a_folder_of_tasks_must_be_there(folder: Path) -> None:
    refused = CliRunner().invoke(
        app,
        [
            *("cascade", "train", "--stage", f"a={folder}/small", "--model", f"b={folder}/large", "--out", "p"),
            *("--answers", "a", "--task", "words", "--include-path", f"{folder}/nowhere"),
        ],
    )
    assert refused.exit_code == 1 and "no such folder of task files" in refused.output


def test_the_task_file_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    from fastspec.programs.training.cascade_tasks import Tasks

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/guide/cascade.md").read_text(encoding="utf-8")
    text = next(block.split("```")[0] for block in page.split("```\n") if block.startswith("task:"))
    (tmp_path / "task.yaml").write_text(text)
    rows = [{"question": f"What is {at} and {at}?", "answer": 2 * at} for at in range(3)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = Tasks(["my_questions"], letters(), include=tmp_path)
    items = tasks.items()
    asked = "user says What is 1 and 1?\nAnswer with one number.|bot says r."
    assert items[1].prompt == asked and (items[1].until, items[1].limit) == (("\n\n",), 64)
    counts, features = (0, 9), (0.0,) * len(NAMES)
    answers = [
        records.Record(item.name, item.set, "train", "small", *counts, text, 3, 0, True, 0.0, 0.0, None, features, 0)
        for item, text in zip(items, ("So it is 0.", "1 + 1 = 2", "4, or 5"), strict=True)
    ]
    judged = tasks.judge(answers)
    assert [judged[item.name, "small"] for item in items] == [
        (value, "lm-eval my_questions (exact_match,last-number)") for value in (1.0, 1.0, 0.0)
    ]
