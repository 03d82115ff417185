"""The pages keep to the rules of `.prose.yml`, and each rule finds what it is there for."""

from __future__ import annotations

from pathlib import Path

import prose
import pytest
from helpers.pages import PAGES, ROOT

RULES = prose.settings()["rules"]


@pytest.mark.parametrize("page", [page for page in PAGES if not prose.excepted(page)], ids=str)
def test_a_page_has_no_words_that_mislead(page: Path) -> None:
    assert list(prose.faults((ROOT / page).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["wrong"])
def test_a_rule_finds_its_example_alone(rule: dict[str, str]) -> None:
    assert rule["say"] in [say for _, _, say in prose.faults(rule["wrong"])]
    assert list(prose.faults(rule["right"])) == []


def test_code_and_addresses_are_not_read_and_lines_are_counted() -> None:
    page = "# Now\n\n```\nnow\n```\n\nA call `now` [takes](now.md)\nmore time now.\n\n- item\n- now\n"
    assert [(line, words) for line, words, _ in prose.faults(page)] == [(7, "now"), (11, "now")]


def test_a_long_sentence_is_found() -> None:
    longest = prose.settings()["longest"]
    assert not list(prose.faults("word " * longest))
    assert len(list(prose.faults("word " * (longest + 1)))) == 1
