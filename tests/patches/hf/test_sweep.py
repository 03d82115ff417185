"""The guide says what the rows say, the rows are of every class, and a sample of them is found again."""

from __future__ import annotations

from pathlib import Path

import pytest
import sweep
import sweep_page
import transformers

from fastspec.patches.hf.families import ADAPTERS

VERSIONS, ROWS = sweep_page.read(sweep.RESULTS)
SAMPLE = (
    ("causal-lm", "bloom"),
    ("causal-lm", "longcat_flash"),
    ("image-text", "llava"),
    ("image-text", "paligemma"),
    ("image-text", "exaone4_5"),
    ("encoder-decoder", "t5"),
)
LEFT_OUT = {"tokens"}  # how many different ones a text has is the processor's affair


@pytest.mark.parametrize("page", sweep.PAGES, ids=lambda page: page.name)
def test_the_pages_are_made_of_the_rows(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<!-- made: " in text and text == sweep_page.filled(text, VERSIONS, ROWS)


def test_every_adapter_is_of_one_family() -> None:
    named = [adapter for family in sweep_page.FAMILIES.values() for adapter in family]
    assert sorted(named) == sorted(ADAPTERS)


def test_no_class_gives_other_tokens_or_an_error_that_is_no_refusal() -> None:
    assert [row for row in ROWS if row["outcome"] in sweep_page.WRONG] == []
    found = sweep_page.counts([row for row in ROWS if row["mapping"] != sweep.SOURCE])
    assert found["adapter"] + found["generic"] >= 170
    assert all(row["reason"].strip() for row in ROWS if row["outcome"] != "equal")


@pytest.mark.skipif(
    transformers.__version__ != VERSIONS["transformers"], reason="the rows are of another version of transformers"
)
def test_every_class_of_transformers_has_a_row() -> None:
    assert [(row["mapping"], row["model_type"]) for row in ROWS] == sweep.wanted()


@pytest.mark.some("causal-lm", "image-text-exaone4_5", "encoder-decoder")
@pytest.mark.parametrize("mapping, kind", SAMPLE)
@pytest.mark.skipif(
    transformers.__version__ != VERSIONS["transformers"], reason="the rows are of another version of transformers"
)
def test_a_row_is_found_again(mapping: str, kind: str) -> None:
    (stored,) = (row for row in ROWS if (row["mapping"], row["model_type"]) == (mapping, kind))
    found = sweep.row(mapping, kind)
    assert {name: value for name, value in found.items() if name not in LEFT_OUT} == {
        name: value for name, value in stored.items() if name not in LEFT_OUT
    }


@pytest.mark.slow
def test_no_class_of_what_is_installed_is_wrong() -> None:
    assert [row for row in sweep.rows() if row["outcome"] in sweep_page.WRONG] == []
