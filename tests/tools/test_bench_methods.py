"""What drafts in `fastspec bench`: heads of both kinds, early exit, draft models of either tokenizer, and what its rows
say of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.heads import EAGLE1, as_eagle, save_eagle3, write
from helpers.models import tiny_head, tiny_model
from helpers.tokenizers import DRAFT, TARGET
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from fastspec.config import Speculative
from fastspec.errors import Unsupported
from fastspec.models import load_model
from fastspec.patches.api import is_patched, resources_of
from fastspec.patches.assistants.heads import load_head
from fastspec.patches.assistants.registry import NAMES
from fastspec.patches.session import session_of
from fastspec.programs.bench import methods, run, run_bench
from fastspec.programs.bench.report import print_report
from fastspec.programs.cli.app import app

pytestmark = pytest.mark.usefixtures("quick")

DRAFTED = ("head", "draft_model", "early_exit")
ALL = [
    "transformers",
    "prompt-lookup",
    "assisted",
    "autoregressive",
    "eagle",
    "eagle2",
    "eagle3",
    "nasd",
    "speculative",
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A tiny target, a head of each kind for it, draft models with its tokenizer and with another, and two prompts, in
    a folder."""
    folder = tmp_path_factory.mktemp("methods")
    model = tiny_model(num_hidden_layers=8)
    embedding = model.get_input_embeddings().weight.detach().clone()
    made = {
        "model": (model, TARGET),
        "same": (tiny_model(seed=2, num_hidden_layers=2), TARGET),
        "other": (tiny_model(seed=2, num_hidden_layers=2, vocab_size=93), DRAFT),
    }
    for name, (each, tokenizer) in made.items():
        each.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    save_eagle3(tiny_head(model), folder / "head", taps=(2, 4, 5))
    (folder / "head-eagle").mkdir()
    write(folder / "head-eagle", *as_eagle(tiny_head(model, **{**EAGLE1, "draft_vocab_size": 97}), embedding))
    rows = [{"id": text, "category": text[0], "prompt": text} for text in ("abcdxyz12bca", "xyabcdQR")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def bench(saved: Path, *arguments: str) -> Any:
    command = [
        "bench",
        "--model",
        str(saved / "model"),
        "--prompts",
        str(saved / "prompts.jsonl"),
        "--max-new-tokens",
        "10",
    ]
    return CliRunner().invoke(app, [*command, *arguments], env={"COLUMNS": "200"})


def both(saved: Path) -> list[str]:
    return ["--head", str(saved / "head"), "--head", str(saved / "head-eagle")]


def test_one_run_measures_every_assistant_and_says_what_drafted(saved: Path) -> None:
    done = bench(saved, *both(saved), "--early-exit", "4", "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert sorted(row["method"] for row in rows[: len(ALL)]) == sorted(ALL)
    assert all(row["identical"] for row in rows)
    found = {row["method"]: tuple(row[name] for name in DRAFTED) for row in rows}
    eagle = str(saved / "head-eagle"), None, None
    wanted = {"eagle3": (str(saved / "head"), None, None), "eagle": eagle, "eagle2": eagle}
    wanted |= {"speculative": (None, None, 4), "assisted": (None, None, 4)}
    assert found == dict.fromkeys(ALL, (None, None, None)) | wanted
    assert {word for word in NAMES if f"left out: {word}:" in done.stderr} == {"mtp"}
    file = io.StringIO()
    print_report(rows, Console(width=200, file=file))
    emitted = " ".join(file.getvalue().split())
    assert (
        f"eagle3: head {saved / 'head'};" in emitted
        and "speculative: early exit after layer 4" in emitted
        and "nasd:" not in emitted
    )


def test_early_exit_drafts_with_the_first_layers(saved: Path) -> None:
    """Of eight layers, the first seven agree with all of them more often than the first does; every answer is the
    same."""
    lengths = {}
    for layers, asked in ((1, ["speculative"]), (7, ["speculative", "assisted"])):
        rows = run_bench(
            prompts=[saved / "prompts.jsonl"],
            model=str(saved / "model"),
            heads=[],
            early_exit=layers,
            max_new_tokens=30,
            methods=asked,
        )
        assert all(row["identical"] for row in rows)
        lengths[layers] = sum(row["acceptance_length"] for row in rows if row["method"] == "speculative")
    assert lengths[1] < lengths[7]


def calls(monkeypatch) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Filled by a run: method -> (what `generate` was given, what the model was patched with)."""
    seen: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    real = run.ask

    def ask(method: Any, part: Any, max_new_tokens: int) -> Any:
        session = session_of(method.model)
        seen[method.name] = method.options, dict(session.resources) if session else {}
        return real(method, part, max_new_tokens)

    monkeypatch.setattr(run, "ask", ask)
    return seen


@pytest.mark.some("other")
@pytest.mark.parametrize("draft", ["same", "other"])
def test_a_draft_model_of_either_tokenizer(saved: Path, monkeypatch, draft: str) -> None:
    seen = calls(monkeypatch)
    name = str(saved / draft)
    rows = run_bench(
        prompts=[saved / "prompts.jsonl"],
        model=str(saved / "model"),
        draft_model=name,
        max_new_tokens=12,
        methods=["assisted", "speculative"],
    )
    assert all(
        row["identical"] and row["draft_model"] == (None if row["method"] == "transformers" else name) for row in rows
    )
    assert all(row["head"] is row["early_exit"] is None for row in rows)
    options, held = seen["assisted"][0], seen["speculative"][1]["speculative"]
    if draft == "same":
        assert set(options) == {"assistant_model"} and held.config.vocab_size == 97
        return
    assert options["tokenizer"].get_vocab() == held.tokenizer.get_vocab() == TARGET.get_vocab()
    assert options["assistant_tokenizer"].get_vocab() == held.draft_tokenizer.get_vocab() == DRAFT.get_vocab()
    assert (
        options["assistant_model"] is not held.model
    )  # a peer's draft model is an instance of its own, on the same weights
    assert all(a is b for a, b in zip(options["assistant_model"].parameters(), held.model.parameters(), strict=True))


def test_heads_of_one_kind_are_compared_in_one_run(saved: Path, monkeypatch) -> None:
    """Each on an instance of its own that shares the weights; nothing stays patched."""
    loaded = load_model(str(saved / "model"))[0]
    save_eagle3(tiny_head(loaded, seed=7), saved / "second", taps=(2, 4, 5))
    seen: dict[str, tuple[Any, Any]] = {}
    real = run.ask

    def ask(method: Any, *rest: Any) -> Any:
        seen[method.name] = method.model, resources_of(method.model).get("eagle3")
        return real(method, *rest)

    monkeypatch.setattr(run, "ask", ask)
    sources = {"eagle3:a": saved / "head", "eagle3:b": saved / "second"}
    options: dict[str, Any] = {"heads": [f"a={saved / 'head'}", f"b={saved / 'second'}"], "max_new_tokens": 10}
    options |= {"prompts": [saved / "prompts.jsonl"], "model": str(saved / "model")}
    rows = run_bench(methods=["nasd", "eagle3"], **options)
    assert [row["method"] for row in rows[:4]] == ["transformers", "nasd", *sources]
    assert all(row["identical"] for row in rows)
    assert {row["method"]: row["head"] for row in rows[2:4]} == {name: str(at) for name, at in sources.items()}
    models = [seen[name][0] for name in sources]
    assert models[0] is not models[1] and not any(map(is_patched, models))
    assert all(a is b for a, b in zip(*(each.parameters() for each in models), strict=True))
    for name, source in sources.items():
        wanted = load_head(source, loaded).state_dict()
        assert all(value.equal(wanted[key]) for key, value in seen[name][1].state_dict().items())
    assert {row["method"] for row in run_bench(methods=["eagle3:b"], **options)} == {"transformers", "eagle3:b"}
    told = bench(saved, *(word for head in options["heads"] for word in ("--head", head)), "--methods", "eagle3")
    assert f"eagle3:a: head {saved / 'head'}; eagle3:b: head" in " ".join(told.output.split()), told.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--early-exit", "8"], "the target has 8 layers"),
        (["--early-exit", "2", "--draft-model", "same"], "give one of them"),
        (["--head", "head", "--head", "head"], "both heads of eagle3"),
        (["--head", "head-eagle", "--head", "head-eagle"], "both heads of eagle and eagle2"),
        (["--head", "head", "--methods", "eagle2"], "it needs --head"),
        (["--methods", "speculative"], "it needs --draft-model or --early-exit"),
        (["--methods", "assisted"], "--draft-model or --early-exit"),
        (["--methods", "assisted", "--early-exit", "2", "--batch", "2"], "one prompt at a time"),
        (["--head", "prompts.jsonl"], "is a file"),
    ],
)
def test_what_cannot_draft_is_refused_by_name(saved: Path, arguments: list[str], words: str) -> None:
    paths = {name: str(saved / name) for name in ("head", "head-eagle", "same", "prompts.jsonl")}
    done = bench(saved, *(paths.get(word, word) for word in arguments))
    assert done.exit_code == 1 and words in " ".join(done.output.split()), done.output
    assert "Traceback" not in done.output


def test_the_heads_of_the_package_are_those_that_are_named() -> None:
    """And each is read by the assistants that it is named for."""
    from fastspec.models import SHIPPED
    from fastspec.patches.assistants.heads import HEADS

    assert {source for named in SHIPPED.values() for _, source in named} == set(HEADS)
    for named in SHIPPED.values():
        assert methods.read_heads(sorted({source for _, source in named})) == dict(named)


@given(missing=st.sampled_from(["head", "head-eagle", None]))
def test_heads_that_ship_are_the_default_and_given_ones_replace_them(saved: Path, missing: str | None) -> None:
    shipped = [str(saved / name) for name in ("head", "head-eagle") if name != missing]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(methods.SHIPPED, "m", tuple(("any", source) for source in shipped))
        found = methods.read_drafters(None, None, None, "m").loaded(None, None)
        readers = {"head": {"eagle3"}, "head-eagle": {"eagle", "eagle2"}}
        assert set(found.heads) == set().union(*(readers[Path(name).name] for name in shipped))
        assert methods.read_drafters([], None, None, "m").heads == {}
    assert found.patching() == {"": found.heads} and found.resources == found.assisted == {}
    assert found.assistant("speculative") == "speculative"


@given(name=st.sampled_from([*NAMES, "assisted", "transformers"]), layers=st.integers(1, 40))
def test_only_what_uses_an_early_exit_is_told_of_it(name: str, layers: int) -> None:
    drafters = methods.Drafters({}, None, layers)
    assert drafters.assistant(name) == (Speculative(early_exit=layers) if name == "speculative" else name)
    assert drafters.of(name)["early_exit"] == (layers if name in ("speculative", "assisted") else None)


def test_an_early_exit_of_no_layer_is_refused() -> None:
    with pytest.raises(Unsupported, match="early_exit"):
        methods.Drafters({}, None, 0).loaded(None, None)
