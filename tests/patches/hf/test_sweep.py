"""docs/models.md says what its rows say, the rows are of every class, and a sample of them is found again."""

from __future__ import annotations

import pytest
import sweep
import sweep_page
import transformers

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


def test_the_page_is_made_of_the_rows() -> None:
    assert sweep.PAGE.read_text() == sweep_page.page(VERSIONS, ROWS)


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
