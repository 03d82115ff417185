"""`make newest` says what broke by its cause, the commonest first."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from helpers.pages import ROOT

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one"><failure message="TypeError: no x&#10;more"/></testcase>
<testcase classname="tests.a" name="two"/>
<testcase classname="tests.b" name="three"><failure message="TypeError: no x"/></testcase>
<testcase classname="tests.b" name="four"><error message=""/></testcase>
<testcase classname="tests.b" name="five"><skipped/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def newest() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("newest", ROOT / ".ci" / "newest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("release", "where"), [("5.24.1", "within"), ("5.99.0", "beyond")])
def test_causes_are_counted(tmp_path: Path, monkeypatch, newest: Any, release: str, where: str) -> None:
    (tmp_path / "newest.xml").write_text(REPORT)
    monkeypatch.setattr(newest, "version", lambda name: release)
    monkeypatch.setattr(newest, "requires", lambda name: ["torch>=2", "transformers<5.25,>=5.17"])
    assert newest.told(tmp_path / "newest.xml") == [
        f"transformers {release} ({where} <5.25,>=5.17): 3 of 4 tests fail",
        "    2 TypeError: no x\n      tests.a::one",
        "    1 error\n      tests.b::four",
    ]


def test_the_core_is_there(newest: Any) -> None:
    assert newest.CORE and all((ROOT / path).exists() for path in newest.CORE)
