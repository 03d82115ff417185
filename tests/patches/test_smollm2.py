"""What is tested on SmolLM2-135M: the demo, the probe of the shipped head, marked text, a head's start. One file, for
it loads slowly."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from helpers.cli import HEAD, check_demo, run
from rich.console import Console

import fastspec
from fastspec.generation.heads.load import Reading
from fastspec.generation.heads.module import EagleHead
from fastspec.models import SMOLLM2
from fastspec.patches.assistants import probe
from fastspec.programs.demo import PROMPTS, MarkedStreamer
from fastspec.programs.training.config import TrainConfig
from fastspec.programs.training.heads import SOFTEN, head_for, start_from_target
from fastspec.programs.training.target import TargetReader
from fastspec.programs.training.ttt import TrainingTimeTest


def test_the_demos_own_model_gives_the_same_tokens_and_takes_drafts(smollm2, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        "fastspec.programs.demo.load_model", lambda name, device: {(SMOLLM2, "cpu"): smollm2}[name, device]
    )
    done = run("demo", "--json", "--max-new-tokens", "8", "--prompt", "Name two colours.")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    check_demo(found, SMOLLM2, "Name two colours.")
    assert found["rows"][2]["acceptance_length"] > 1.0
    assert "generate" not in vars(smollm2[0])  # it is unpatched again


def test_the_eagle3_head_drafts_what_the_model_says(smollm2) -> None:
    """Tokens of plain generate, and as many of them a round as a head that was read rightly gives."""
    model, tokenizer = smollm2
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "List the first ten even numbers."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    want = model.generate(**ids, max_new_tokens=24, do_sample=False)
    with fastspec.patched(model, eagle3=HEAD):
        got = model.generate(
            **ids, max_new_tokens=24, do_sample=False, assistant=fastspec.Eagle3(total_tokens=16, depth=4, top_k=4)
        )
        assert torch.equal(got, want) and fastspec.report(model).last.acceptance_length > 4


@pytest.mark.each_value  # the text is made before it is templated
@pytest.mark.parametrize("prompt", [None, "Name three rivers."])
@pytest.mark.parametrize("template", [True, False])
def test_probe_measures_on_the_answer_to_a_prompt(smollm2, monkeypatch, prompt: str | None, template: bool) -> None:
    seen, real = [], probe.probe_head

    def probe_head(path: str, model: Any, ids: torch.Tensor) -> Any:
        seen.append(smollm2[1].decode(ids[0]))
        return real(path, model, ids)

    monkeypatch.setattr("fastspec.programs.cli.heads.load_model", lambda name, device: smollm2)
    monkeypatch.setattr("fastspec.programs.cli.heads.load_config", lambda name: smollm2[0].config)
    monkeypatch.setattr(probe, "probe_head", probe_head)
    monkeypatch.setattr(probe, "PROBE_TOKENS", 4)
    monkeypatch.setattr(probe, "_readings", lambda checkpoint, target: [(Reading(), checkpoint)])
    if not template:
        monkeypatch.setattr(smollm2[1], "chat_template", None)
    done = run("inspect", HEAD, "--target", HEAD, "--probe", *(("--probe-prompt", prompt) if prompt else ()))
    assert done.exit_code == 0, done.output
    assert "agreement" in done.output and "as declared" in done.output
    text = prompt or PROMPTS[0][1]
    assert text in seen[0]
    assert ("<|im_start|>assistant" in seen[0]) == template and (seen[0] == text) != template


def test_probe_says_what_is_wrong_with_an_empty_prompt(smollm2, monkeypatch) -> None:
    monkeypatch.setattr("fastspec.programs.cli.heads.load_model", lambda name, device: smollm2)
    monkeypatch.setattr("fastspec.programs.cli.heads.load_config", lambda name: smollm2[0].config)
    monkeypatch.setattr(smollm2[1], "chat_template", None)
    done = run("inspect", HEAD, "--target", HEAD, "--probe", "--probe-prompt", "")
    assert done.exit_code == 2
    assert "--probe-prompt" in done.output and "Traceback" not in done.output


def test_accepted_tokens_are_marked_and_the_text_is_whole(smollm2) -> None:
    tokenizer = smollm2[1]
    text = "def naïve(x):\n    return x  # 🙂 done"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    console = Console(record=True, width=400, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    streamer = MarkedStreamer(tokenizer, console)
    streamer.put(torch.tensor([[1, 2, 3]]))
    for start in range(0, len(ids), 3):
        chunk = ids[start : start + 3]
        streamer.on_round(chunk, len(chunk) - 1)
        for token in chunk:
            streamer.put(torch.tensor([token]))
    streamer.end()
    styled = console.export_text(clear=False, styles=True)
    assert console.export_text().rstrip("\n") == text
    assert "\x1b[1;32m" in styled


def test_start_is_better_than_guessing_and_than_the_target_as_it_is(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    text = (
        "The tides follow the moon: its pull raises the sea on the near side, and on the far side the water is "
        "left a little behind."
    )
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    vocabulary = torch.arange(10240)
    head = EagleHead(head_for(TrainConfig(target="", output="", prompts="none"), model, 10240))
    torch.manual_seed(0)
    start_from_target(head, model, vocabulary)
    head.bind(model.get_input_embeddings(), None)
    teacher = TargetReader(model, head.config.taps, vocabulary).read(ids, torch.arange(1, ids.shape[1]))
    unrolled = TrainingTimeTest(head, 7, 0.8)
    with torch.no_grad():
        losses = unrolled(ids, teacher)[1]
        head.norm.weight.div_(SOFTEN)
        assert losses.max() < math.log(10240) and losses.mean() < 0.7 * unrolled(ids, teacher)[1].mean()
