"""The user's guide says what the code has: fields of assistants, default trees, commands of the chat, settings of the
environment, errors."""

from __future__ import annotations

import re
from dataclasses import fields

from helpers.pages import ROOT

import fastspec
from fastspec import errors
from fastspec.config import BATCH_TREES, CPP_TREE, DEFAULT_TREES, SAMPLED_DEPTHS, TreeShape
from fastspec.programs.chat.commands import COMMANDS

CONFIGS = (
    fastspec.Eagle3,
    fastspec.Eagle1,
    fastspec.Mtp,
    fastspec.Speculative,
    fastspec.Nasd,
    fastspec.ContinuousBatch,
)


def page(name: str) -> str:
    return (ROOT / "docs" / "guide" / name).read_text(encoding="utf-8")


def test_assistants_are_shown_with_all_their_fields() -> None:
    for config in CONFIGS:
        named = ", ".join(field.name for field in fields(config))
        assert f"`fastspec.{config.__name__}({named})`" in page("assistants.md")


def test_default_trees_are_those_of_the_code() -> None:
    text = page("assistants.md")

    def sizes(tree: TreeShape) -> str:
        return f"{tree.total_tokens}, {tree.depth}, {tree.top_k}"

    assert f"| CPU, C++ kernels, `eagle3` | {sizes(CPP_TREE)} |" in text
    assert f"| CPU, else | {sizes(DEFAULT_TREES['cpu'])} |" in text
    (first, _), *_ = BATCH_TREES["cuda"]
    assert f"| CUDA, below {first} rows | {sizes(DEFAULT_TREES['cuda'])} |" in text
    rows = ", ".join(str(rows) for rows, _ in BATCH_TREES["cuda"])
    trees = "; ".join(sizes(tree) for _, tree in BATCH_TREES["cuda"])
    assert f"| from {rows} rows on | {trees} |" in text
    ((hot, shallow), (_, depth)) = SAMPLED_DEPTHS
    assert f"at most {depth} deep, {shallow} from a temperature of {hot} on" in text


def test_every_command_of_the_chat_is_on_its_page() -> None:
    assert set(COMMANDS) <= set(re.findall(r"`/(\w+)", page("chat.md")))


def test_settings_of_the_environment_are_those_that_the_code_reads() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "fastspec").rglob("*.py"))
    read = set(re.findall(r'"(FASTSPEC_\w+)"', source))
    told = set(re.findall(r"`(FASTSPEC_\w+)", page("devices.md") + page("serving.md")))
    assert read == told


def test_errors_are_named() -> None:
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert not [name for name in kinds if name not in page("troubleshooting.md")]
