"""Every snippet of README and the pages runs, or says what it needs; every command has the options that it is shown
with; links lead somewhere."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from helpers.cascade import trained
from helpers.pages import NEEDS, PAGES, ROOT, STOOD_IN, Snippet, notebook_cells, snippets, stand_in_heads
from helpers.seq2seq import tiny_seq2seq
from helpers.training import small_target, small_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

import fastspec
from fastspec.patches.assistants import heads, probe
from fastspec.patches.cascade.stages import measure_rates
from fastspec.patches.session import session_of
from fastspec.programs.cli.app import app

ALL = [snippet for page in PAGES for snippet in snippets(page)]
PYTHON = [snippet for snippet in ALL if snippet.language == "python"]
RUN = [snippet for snippet in PYTHON if snippet.needs <= STOOD_IN]
BINDING = ("programs.bench.run", "programs.demo", "patches.cascade.stages", "programs.training.entry")
"""Modules that take `load_model` when they are imported."""
IN_ORDER = ("README.md", "docs/tutorial.md")
"""Pages whose snippets go on from each other; elsewhere each finds a patched model, unless it patches one itself."""


def stand_in(name: str, *options: Any, **more: Any) -> Any:
    """A tiny model for a name of the hub; of another seed for a smaller one."""
    return tiny_seq2seq("t5", vocab_size=128) if "t5" in name else small_target(seed="0.5B" in name)


@pytest.fixture
def stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Tiny models and heads under every name that the pages load, in an empty folder; the names that snippets may take
    as given."""
    held = stand_in_heads(tmp_path)
    for module in BINDING:  # before anything is replaced: what they import stays theirs
        import_module(f"fastspec.{module}")
    for module in ("models", "patches.cascade.stages"):
        monkeypatch.setattr(
            f"fastspec.{module}.load_model", lambda name, *options, **more: (stand_in(name), small_tokenizer())
        )
    monkeypatch.setattr("fastspec.patches.cascade.stages.load_tokenizer", lambda name: small_tokenizer())
    few = partial(measure_rates, new=2)  # what they come to is no matter here
    monkeypatch.setattr("fastspec.patches.cascade.loop.measure_rates", few)
    for module in (heads, probe):
        monkeypatch.setattr(
            module, "find_head", lambda source, **options: held["eagle" if str(source).endswith("-eagle") else "eagle3"]
        )
    for kind in (AutoModelForCausalLM, AutoModelForSeq2SeqLM):
        monkeypatch.setattr(kind, "from_pretrained", stand_in)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name, **options: small_tokenizer())
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    trained(("small", "large")).save("predictor.safetensors")
    return {"fastspec": fastspec, "torch": torch, "head": str(held["eagle3"])}


def given(names: dict[str, Any], snippet: Snippet) -> dict[str, Any]:
    """What a snippet that goes on from none finds."""
    model, tokenizer = small_target(), small_tokenizer()
    if not re.search(r"\bpatch(ed)?\(model\b|custom_generate", snippet.text):
        fastspec.patch(model, eagle3=names["head"])
    inputs = dict(tokenizer("w9 w12 w40", return_tensors="pt"))
    prompts = ["w9 w12", "w5", "w6 w7 w8"]
    tokenizer.pad_token = tokenizer.eos_token
    return {
        **names,
        "model": model,
        "tokenizer": tokenizer,
        "inputs": inputs,
        "input_ids": inputs["input_ids"],
        "prompts": prompts,
    }


@pytest.mark.parametrize("page", [page for page in PAGES if any(each.page == page for each in RUN)], ids=str)
def test_snippets_run_as_they_stand(page: Path, stands_in: dict[str, Any], capsys) -> None:
    torch.manual_seed(0)
    known: dict[str, Any] = {}
    for file in (each for each in ALL if each.page == page and each.language == "yaml"):
        Path("cascade.yaml").write_text(file.text)
    for snippet in (each for each in RUN if each.page == page):
        if str(page) not in IN_ORDER:
            known = given(stands_in, snippet)
        exec(compile(snippet.text, snippet.name, "exec"), known)
        if str(page) == "README.md":
            assert session_of(known["model"]) is None  # README leaves its models as they were


NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def test_the_notebook_runs_from_its_first_cell_to_the_last(stands_in: dict[str, Any], capsys) -> None:
    names: dict[str, Any] = {}
    for number, cell in enumerate(notebook_cells(NOTEBOOK)):
        exec(compile(cell, f"{NOTEBOOK.name}:{number}", "exec"), names)
    assert "eagle3" in capsys.readouterr().out and session_of(names["model"]) is None


def test_the_marks_are_known_and_few() -> None:
    marked = [snippet for snippet in PYTHON if not snippet.needs <= STOOD_IN]
    assert all(snippet.needs <= set(NEEDS) for snippet in ALL), [
        snippet.name for snippet in ALL if not snippet.needs <= set(NEEDS)
    ]
    elsewhere = [snippet.name for snippet in marked if not snippet.needs & {"clients", "processes"}]
    assert len(elsewhere) <= 3, elsewhere
    tested = {
        "docs/guide/clients.md",
        "docs/guide/serving.md",
        "docs/recipes.md",
        "docs/guide/quantised.md",
    }  # by test_page.py, test_serve_page.py, test_recipes.py and test_stored.py
    assert {str(snippet.page) for snippet in marked if "clients" in snippet.needs} <= tested
    unmarked = [
        snippet.name
        for snippet in snippets(Path("docs/guide/clients.md"))
        if snippet.language == "python" and not snippet.needs
    ]
    assert not unmarked, unmarked


def commands() -> list[tuple[str, list[str]]]:
    """(where, words) of every `fastspec ...` line in the pages' blocks, lines that go on joined."""
    found = []
    for snippet in ALL:
        if snippet.language in ("", "sh"):
            for line in snippet.text.replace("\\\n", " ").splitlines():
                match = re.match(r"(?:.*-m )?fastspec(?:\.cli)? (.*)", line)
                if match and "(" not in match[1].split("#")[0] and not match[1].startswith("|"):
                    found.append((snippet.name, shlex.split(match[1], comments=True)))
    return found


@cache
def program() -> Any:
    """`fastspec` as its command line knows it."""
    return typer.main.get_command(app)


@pytest.mark.parametrize(("where", "words"), commands(), ids=lambda value: value if isinstance(value, str) else None)
def test_commands_have_the_options_that_they_are_shown_with(where: str, words: list[str]) -> None:
    command: Any = program()
    rest = list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    accepted = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help"
    }
    named = [word.strip("[]") for word in rest if word.strip("[]").startswith("--")]
    assert (command is not program() or words[0].startswith("--")) and set(named) <= accepted, (where, words)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's titles, as they are made on the web."""
    titles = re.findall(
        r"^#+ (.+)$", re.sub(r"^(```|~~~).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'\bsrc(?:set)?="([^"]+)"', text):
        if re.match(r"\w+://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong


def test_messages_of_troubleshooting_are_those_of_the_package() -> None:
    page = (
        (ROOT / "docs" / "guide" / "troubleshooting.md")
        .read_text(encoding="utf-8")
        .partition("## Messages")[2]
        .partition("\n## ")[0]
    )
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "fastspec").rglob("*.py"))
    assert len(quoted) > 5 and not [text for text in quoted if text.strip() not in source]


def test_pictures_are_readable_at_the_width_of_a_page() -> None:
    widths = {
        path.name: int.from_bytes(path.read_bytes()[16:20], "big")
        for path in (ROOT / "benchmarks" / "results").glob("*.png")
    }
    assert widths and max(widths.values()) <= 1300, (
        widths
    )  # a page shows some 900 points; letters of 8 points stay above 6


@pytest.fixture(scope="module")
def site() -> Any:
    """docs/site.py, the hooks of the site's build."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


def test_the_reference_has_every_public_name_with_a_docstring(site: Any) -> None:
    assert not [name for module in site.MODULES for name in site.undocumented(module)]
    listed = set(re.findall(r"^::: (\S+)$", (ROOT / "docs/reference/python.md").read_text(), re.MULTILINE))
    public = {f"fastspec.{name}" for name in fastspec.__all__ if name != "__version__"}
    assert listed == public | {module for module in site.MODULES if module != "fastspec"}


def test_the_command_lines_reference_names_every_command(site: Any) -> None:
    commands = {" ".join(words): command for words, command in site.named(program())}
    assert {"", "bench", "cascade train", "serve"} <= commands.keys()
    assert f"- [train](#fastspec-cascade-train): {commands['cascade train'].help}" in site.listed(
        ("cascade",), commands["cascade"]
    )


def test_the_sites_contents_name_every_page() -> None:
    told = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r": ([\w/.]+\.md)$", told, re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not page.startswith("cards/")} == {
        page for page in named if not page.startswith("repository/")
    }


@pytest.mark.parametrize(
    ("here", "text", "moved"),
    [
        ("index.md", "[a](../README.md#use)", "[a](repository/README.md#use)"),
        ("guide/output.md", "[a](../../benchmarks/results/x.jsonl)", "[a](../repository/benchmarks/results/x.jsonl)"),
        ("guide/output.md", "[a](models.md#b), [c](https://d.e/f)", "[a](models.md#b), [c](https://d.e/f)"),
        ("guide/output.md", "[a](#b)", "[a](#b)"),
        ("repository/README.md", '<img src="docs/assets/a.svg">', '<img src="../assets/a.svg">'),
        ("repository/README.md", "[a](docs/guide/b.md)", "[a](../guide/b.md)"),
        ("repository/README.md", "[a](CHANGELOG.md)", "[a](CHANGELOG.md)"),
    ],
)
def test_the_site_leads_links_to_where_files_are(site: Any, here: str, text: str, moved: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=here))
    assert site.on_page_markdown(text, page) == moved


def test_the_site_shows_the_picture_of_the_scheme_that_a_reader_chose(site: Any) -> None:
    shown = site.on_page_markdown(
        (ROOT / "docs/index.md").read_text(encoding="utf-8"), SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    )
    assert "<picture" not in shown
    assert re.findall(r'src="([^"]*)"', shown) == [
        "assets/speed_light.svg#only-light",
        "assets/speed_dark.svg#only-dark",
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tutorial_from_its_first_snippet_to_a_head_that_drafts(tmp_path, monkeypatch) -> None:
    """With SmolLM2, as it stands, but for the installation: its Python goes on from snippet to snippet, and its
    commands run between."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    page, told = Path("docs/tutorial.md"), {}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for snippet in snippets(page)[1:]:
        if snippet.language == "python":
            exec(compile(snippet.text, snippet.name, "exec"), names)
            continue
        for words in (words for where, words in commands() if where == snippet.name):
            done = subprocess.run(
                [sys.executable, "-m", "fastspec", *words], env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, (words, done.stdout[-1000:], done.stderr[-2000:])
            told[" ".join(words[:3])] = done.stdout
    assert (tmp_path / "my-head" / "model.safetensors").is_file() and "my-head" in next(
        text for words, text in told.items() if words.startswith("inspect my-head")
    )
    last = fastspec.report(names["model"]).last
    assert last.rounds > 1 and last.emitted == 48


@pytest.mark.slow
def test_the_first_recipe_says_something_on_the_real_model(smollm2, monkeypatch, capsys) -> None:
    monkeypatch.setattr("fastspec.models.load_model", lambda name: copy.deepcopy(smollm2))
    first = next(snippet for snippet in RUN if str(snippet.page) == "docs/recipes.md")
    names: dict[str, Any] = {}
    exec(compile(first.text, first.name, "exec"), names)
    emitted, unassisted = capsys.readouterr().out.splitlines()[-2:]
    assert len(emitted) > 150 and unassisted == "{}"


@pytest.mark.slow
def test_the_notebook_runs_on_the_real_model(smollm2, monkeypatch, capsys) -> None:
    monkeypatch.setattr("fastspec.models.load_model", lambda name, device, dtype: copy.deepcopy(smollm2))
    names: dict[str, Any] = {}
    for cell in notebook_cells(NOTEBOOK):
        exec(cell, names)
    assert len(names["answers"]) == 4 and "prime" in capsys.readouterr().out


@pytest.mark.slow
def test_readmes_first_snippet_runs_on_the_real_model(smollm2, monkeypatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name, **options: smollm2[0])
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: smollm2[1])
    first = next(snippet for snippet in RUN if str(snippet.page) == "README.md")
    names: dict[str, Any] = {}
    exec(compile(first.text, first.name, "exec"), names)
    plain = smollm2[0].generate(**names["inputs"], max_new_tokens=64, do_sample=False)
    assert torch.equal(names["out"], plain) and session_of(smollm2[0]) is None
