"""The command line in this process, and the JSON of a demo."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from fastspec.programs.cli.app import app

HEAD = "smollm2-135m-instruct"


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def check_demo(found: dict[str, Any], model: str, prompt: str) -> None:
    """What the JSON of a demo on the CPU says."""
    assert set(found) == {"model", "device", "dtype", "load", "prompts", "rows"}
    assert (found["model"], found["dtype"], found["prompts"]) == (model, "float32", [prompt])
    assert [row["method"] for row in found["rows"]] == ["transformers", "autoregressive", "eagle3"]
    for row in found["rows"]:
        assert set(row) == {"method", "tokens_per_second", "ratio", "acceptance_length", "identical"}
        assert row["tokens_per_second"] > 0 and row["identical"] is True
    assert found["rows"][0]["ratio"] == 1.0
    assert found["rows"][1]["acceptance_length"] == 1.0
