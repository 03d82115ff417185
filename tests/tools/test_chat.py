"""The chat on tiny models: its turns, the marks of its tokens, and what stops it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers.chat import TEMPLATE, interrupt_after, make_chat, screen, target, tokenizer
from helpers.generate import LENGTH, Oracle, bigram, seer
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console
from typer.testing import CliRunner

import fastspec
from fastspec.errors import Unsupported
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.patches.call import refusals
from fastspec.programs.chat.commands import COMMANDS, execute
from fastspec.programs.chat.loop import CommandCompleter, converse, respond, terminal_lines
from fastspec.programs.chat.session import BEAMS, Answer, Chat, ChatTurn
from fastspec.programs.chat.settings import Settings
from fastspec.programs.chat.view import (
    ACCEPTED,
    BONUS,
    OWN,
    RECOVERED,
    STYLES,
    AnswerStreamer,
    read_round,
    verdict_line,
)
from fastspec.programs.cli.app import app
from fastspec.programs.compare import BASELINE as PLAIN


@pytest.fixture
def chat() -> Chat:
    return make_chat()


def answers(chat: Chat) -> list[list[list[int]]]:
    return [[answer.tokens for answer in turn.answers] for turn in chat.turns]


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_two_turns_with_two_assistants_give_the_same_tokens(template: str | None) -> None:
    model = target(bigram())
    settings = Settings(
        model="tiny", resources=(), assistants=("eagle3", "autoregressive", PLAIN), max_new_tokens=LENGTH, cache=True
    )
    chat = Chat(fastspec.patch(model, eagle3=seer(model)), tokenizer(template), settings)
    console = screen()
    converse(chat, ["w10 w11", "w12 w13"], console)
    text = console.export_text()
    assert "error" not in text
    assert text.count("The 3 greedy answers are identical") == 2
    assert "acceptance" in text and "tokens/s" in text
    for turn in chat.turns:
        first, second, third = turn.answers
        assert first.tokens == second.tokens == third.tokens
        assert len(first.tokens) == LENGTH
        assert first.acceptance_length > 3 and first.accepted > 0
        assert (second.acceptance_length, second.drafted, third.acceptance_length) == (1.0, 0, 1.0)
    assert [turn["role"] for turn in chat.conversation] == ["user", "assistant"] * 2
    assert all(answer.reused > 0 for answer in chat.turns[1].answers)


def test_differing_answers_are_named() -> None:
    made = [Answer(name, tokens, "", 1.0) for name, tokens in (("a", [1, 2, 3]), ("b", [1, 9, 3]), ("c", [1, 2]))]
    turn = ChatTurn("", Settings(), made)
    assert verdict_line(turn, "float32") == "b differs from a from token 2 on; c differs from a from token 3 on."
    assert "bfloat16" in (verdict_line(turn, "bfloat16") or "")
    assert verdict_line(ChatTurn("", Settings(processor="multinomial"), made), "float32") is None
    assert verdict_line(ChatTurn("", Settings(), made[:1]), "float32") is None


@pytest.mark.some("/cache off")
@pytest.mark.parametrize("line", ["/cache off", "/chat off"])
def test_the_cache_changes_no_text(chat: Chat, line: str) -> None:
    prompts = ["w10 w11", "w12", "w13 w14"]
    execute(chat, line)
    execute(chat, "/assistant autoregressive,transformers")
    converse(chat, prompts, screen())
    expected = answers(chat)
    reused = {answer.reused > 0 for turn in chat.turns[1:] for answer in turn.answers}
    assert reused == {line != "/cache off"}
    execute(chat, "/reset")
    execute(chat, "/cache")
    converse(chat, prompts, screen())
    assert answers(chat) == expected


def test_what_the_cache_no_longer_shares_is_cut_off(chat: Chat) -> None:
    respond(chat, "w10 w11", screen())
    chat.conversation[1]["content"] = "w20 w21"  # the answer, said anew in other words
    turn = respond(chat, "w12", screen())
    ids = chat._encode([*chat.conversation[:2], {"role": "user", "content": "w12"}])
    expected = chat.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert turn.answers[0].tokens == expected[0, ids.shape[1] :].tolist()
    assert 0 < turn.answers[0].reused < ids.shape[1]


def test_a_seed_repeats_a_sampled_answer(chat: Chat) -> None:
    converse(chat, ["/temperature 1", "/seed 3", "w9", "/reset", "w9"], screen())
    first = chat.turns[0].answers[0].tokens
    converse(chat, ["/reset", "w9"], screen())
    assert chat.turns[0].answers[0].tokens == first
    converse(chat, ["/reset", "/seed 4", "w9"], screen())
    assert chat.turns[0].answers[0].tokens != first


def test_beam_search_answers_besides_and_is_not_compared(chat: Chat) -> None:
    console = screen()
    converse(chat, ["/beams 2", "w10 w11"], console)
    turn = chat.turns[0]
    assert [answer.strategy for answer in turn.answers] == ["autoregressive", BEAMS]
    ids = chat._encode([{"role": "user", "content": "w10 w11"}])
    mask = torch.ones_like(ids)
    expected = chat.model.generate(ids, attention_mask=mask, max_new_tokens=12, num_beams=2, do_sample=False)
    assert turn.answers[1].tokens == expected[0, ids.shape[1] :].tolist()
    assert turn.identical(turn.answers[1]) is None
    text = console.export_text()
    assert turn.answers[1].text in text
    assert turn.answers[1].acceptance_length is None  # it has no rounds
    assert next(line for line in text.splitlines() if line.startswith(f"{BEAMS}  ")).split()[-2:] == ["-", "-"]


def test_beam_search_has_the_length_penalty_that_was_asked_for(chat: Chat, monkeypatch) -> None:
    asked: list[dict[str, Any]] = []
    real = chat.model.generate
    monkeypatch.setitem(chat.model.__dict__, "generate", lambda **given: asked.append(given) or real(**given))
    converse(chat, ["/beams 3 -2.5", "w10", "/beams 2", "w10"], screen(), strict=True)
    beams = [each for each in asked if "num_beams" in each]
    assert [(each["num_beams"], each["length_penalty"]) for each in beams] == [(3, -2.5), (2, -2.5)]


def drafted(chat: Chat, wrong: int | None, **settings: Any) -> tuple[AnswerStreamer, Answer, Console]:
    """An answer for which an oracle drafts six tokens a round, all right but the one at index `wrong` of the text."""
    chat.settings = chat.settings.replace(max_new_tokens=15, **settings)
    text = chat.answer("w10 w11", PLAIN, AnswerStreamer(chat.tokenizer, screen())).tokens
    if wrong is not None:
        text = [*text[:wrong], (text[wrong] + 1) % 97, *text[wrong + 1 :]]
    chat.own = {"oracle": Oracle([text], {0})}
    console = screen()
    streamer = AnswerStreamer(chat.tokenizer, console, trees=True)
    return streamer, chat.answer("w10 w11", "oracle", streamer), console


def test_marks_of_a_known_drafter(chat: Chat) -> None:
    streamer, answer, console = drafted(chat, wrong=4)
    expected = [OWN] + [ACCEPTED] * 3 + [RECOVERED] + [ACCEPTED] * 6 + [BONUS] + [ACCEPTED] * 3
    assert streamer.marks == expected
    assert streamer.ids == answer.tokens
    stats = fastspec.report(chat.model).last
    assert (answer.accepted, answer.drafted, answer.acceptance_length) == (
        stats.accepted,
        stats.drafted,
        stats.acceptance_length,
    )
    assert (streamer.stats.accepted, streamer.stats.drafted, streamer.stats.acceptance_length) == (
        stats.accepted,
        stats.drafted,
        stats.acceptance_length,
    )
    styled = console.export_text(styles=True)
    words = answer.text.split()
    for place, code in ((1, "1;32"), (4, "1;33"), (11, "1;36")):
        assert f"\x1b[{code}m {words[place]}\x1b[0m" in styled
    assert f" {words[0]}\x1b" not in styled
    assert len({STYLES[mark] for mark in (ACCEPTED, RECOVERED, BONUS, OWN)}) == 4


def test_plain_tokens_are_the_targets_own(chat: Chat) -> None:
    for name in ("autoregressive", PLAIN):
        streamer = AnswerStreamer(chat.tokenizer, screen())
        chat.answer("w10", name, streamer)
        assert set(streamer.marks) <= {OWN}


def test_a_draft_of_an_end_token_is_no_rejected_one(chat: Chat) -> None:
    tree = TokenTree.from_parents(torch.tensor([[9, 5]]), torch.tensor([[0, 0]]))
    streamer = AnswerStreamer(chat.tokenizer, screen())
    streamer.on_tree(tree, Verdict(torch.tensor([[0, 0]]), torch.tensor([0]), torch.tensor([5])), None)
    streamer.on_round([5], 0)
    assert streamer.marks == [BONUS]


def test_debug_draws_the_tree_of_every_round(chat: Chat) -> None:
    drafted(chat, wrong=4, debug=True)
    chat.settings = chat.settings.replace(assistants=("oracle",))
    console = screen()
    turn = respond(chat, "w10 w11", console)
    text = console.export_text()
    words = turn.answers[0].text.split()
    assert "round 1: 3 of 6 drafted tokens accepted" in text and "round 2: 6 of 6" in text
    assert f"'{words[4]}' p=" in text and "<- recovered" in text and "<- bonus" in text and "<- accepted" in text


def test_probabilities_of_a_tree_are_the_models(chat: Chat) -> None:
    streamer, answer, _ = drafted(chat, wrong=4)
    ids = chat._encode([{"role": "user", "content": "w10 w11"}])
    emitted = torch.tensor([answer.tokens])
    probabilities = chat.model(torch.cat((ids, emitted), 1)).logits[0].softmax(-1)
    first = streamer.trees[0]
    at = ids.shape[1] + 1 + len(first.path) - 2  # the last accepted token: what follows it is the recovered one
    assert first.last == answer.tokens[4]
    assert first.notes[-1] == f"p={probabilities[at, first.last]:.2f}"


def test_copies_that_fill_a_tree_up_are_neither_shown_nor_counted() -> None:
    """Equal siblings stand once, whatever their order; what lies below a copy goes with it."""
    # under the root 4, a copy of it, 8, and a copy again; 1 twice under 8, and 2 under a copy
    tokens, parents = [9, 4, 4, 8, 1, 2, 4, 1], [0, 0, 0, 0, 3, 2, 0, 3]
    tree = TokenTree.from_parents(torch.tensor([tokens]), torch.tensor([parents]))
    verdict = Verdict(torch.tensor([[0, 3, 4]]), torch.tensor([2]), torch.tensor([6]))
    logits = torch.randn(1, 8, 10, generator=torch.Generator().manual_seed(0))
    found = read_round(tree, verdict, logits)
    assert (found.tokens, found.parents, found.path, found.last) == ([9, 4, 8, 1], [0, 0, 0, 2], [0, 2, 3], 6)
    p = logits[0].softmax(-1)
    assert found.notes == [
        f"p={p[0, 9]:.2f}",
        f"p={p[0, 4]:.2f}",
        f"p={p[0, 8]:.2f}",
        f"p={p[3, 1]:.2f}",
        f"p={p[4, 6]:.2f}",
    ]
    assert read_round(tree, verdict).notes is None
    late = read_round(
        tree, Verdict(torch.tensor([[0, 2, 5]]), torch.tensor([2]), torch.tensor([6]))
    )  # a draw of its own, accepted
    assert (late.tokens, late.parents, late.path) == ([9, 4, 4, 8, 1, 2], [0, 0, 0, 0, 3, 2], [0, 2, 5])


def test_what_nasd_drafts_is_counted_without_copies(chat: Chat) -> None:
    """A chain of two drafts, or a few branches, in trees of 16 nodes; statistics, streamer and screen agree."""
    text = " ".join(["w10 w11 w12 w13 w14"] * 4)
    chat.settings = chat.settings.replace(max_new_tokens=30, given=(("nasd.stop_if_unknown", False), ("nasd.gamma", 2)))
    console, trees, plain = screen(), [], AnswerStreamer.on_tree
    streamer = AnswerStreamer(chat.tokenizer, console, trees=True)
    streamer.on_tree = lambda tree, *rest: (trees.append(tree), plain(streamer, tree, *rest))  # type: ignore[method-assign]
    answer = chat.answer(text, "nasd", streamer)
    nodes = sum(tree.tokens.shape[1] - 1 for tree in trees)
    apart = sum(len(set(zip(tree.parents[0, 1:].tolist(), tree.tokens[0, 1:].tolist(), strict=True))) for tree in trees)
    assert answer.drafted == streamer.stats.drafted == apart < nodes
    assert [len(found.tokens) - 1 for found in streamer.trees or ()] == [
        len(set(zip(tree.parents[0, 1:].tolist(), tree.tokens[0, 1:].tolist(), strict=True))) for tree in trees
    ]


@pytest.mark.parametrize("name", ["autoregressive", PLAIN])
def test_an_interrupt_stops_the_answer_and_leaves_the_chat_usable(chat: Chat, monkeypatch, name: str) -> None:
    execute(chat, f"/assistant {name}")
    respond(chat, "w10", screen())
    whole = chat.turns[0].answers[0].tokens
    chat.reset()
    interrupt_after(monkeypatch, 3)
    execute(chat, f"/assistant {name},transformers")
    console = screen()
    converse(chat, ["w10", "w11"], console)
    first, second = chat.turns
    assert [answer.tokens for answer in first.answers] == [whole[:3]]
    assert first.answers[0].stopped and not second.answers[0].stopped
    assert "stopped" in console.export_text()
    assert chat.conversation[1]["content"] == first.answers[0].text
    assert [answer.strategy for answer in second.answers] == chat.strategies()
    assert all(second.identical(answer) for answer in second.answers[1:])


def test_an_answer_stopped_before_its_first_token_is_forgotten(chat: Chat, monkeypatch) -> None:
    interrupt_after(monkeypatch, 0)
    converse(chat, ["w10", "w11"], screen())
    assert [turn.prompt for turn in chat.turns] == ["w11"]


def test_an_error_is_one_line_and_the_chat_goes_on(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "position_rows", lambda model: 512)  # as where positions lie in a table
    console = screen()
    converse(chat, ["/nonsense", "w9 " * 600, "w10"], console)
    text = console.export_text()
    assert text.count("error: ") == 2 and "max_position_embeddings" in text
    assert [turn.prompt for turn in chat.turns] == ["w10"]
    with pytest.raises(Unsupported, match="nonsense"):
        converse(chat, ["/nonsense"], console, strict=True)


def test_a_space_before_the_slash_makes_a_prompt(chat: Chat) -> None:
    converse(chat, ["", "  ", " /w9"], screen())
    assert [turn.prompt for turn in chat.turns] == ["/w9"]


def test_save_writes_conversation_and_statistics(chat: Chat, tmp_path) -> None:
    path = tmp_path / "chat.json"
    converse(chat, ["/assistant autoregressive,transformers", "w10", f"/save {path}"], screen())
    saved = json.loads(path.read_text())
    assert saved["conversation"] == chat.conversation
    assert saved["settings"]["processor"] == "greedy"
    mine, plain = saved["turns"][0]["answers"]
    assert mine["tokens"] == chat.turns[0].answers[0].tokens and mine["tokens_per_second"] > 0
    assert (mine["identical"], plain["identical"]) == (None, True)


def completions(chat: Chat, text: str) -> list[str]:
    return [found.text for found in CommandCompleter(chat).get_completions(Document(text), CompleteEvent())]


def test_completion(chat: Chat) -> None:
    assert completions(chat, "/") == [f"/{name}" for name in COMMANDS]
    assert completions(chat, "/te") == ["/temperature"]
    assert completions(chat, "/storage s") == ["suffix"]
    assert (
        completions(chat, "/storage suffix ") == ["answer", "chat"] and completions(chat, "/storage suffix chat ") == []
    )
    assert completions(chat, "/tree a") == ["auto"] and completions(chat, "/tree auto ") == []
    assert completions(chat, "/resource c") == ["cascade"] and completions(chat, "/stop_if_unknown ") == ["on", "off"]
    assert completions(chat, "/early_exit o") == ["off"] and completions(chat, "/length ") == []
    assert completions(chat, "/assistant eagle3,auto") == ["autoregressive"]
    assert (
        completions(chat, "/assistant eagle3 x") == completions(chat, "hello") == completions(chat, "/nonsense a") == []
    )


def test_a_terminal_is_read_until_ctrl_d(chat: Chat) -> None:
    with create_pipe_input() as pipe:
        pipe.send_text("w10 w11\rthrown away\x03/length 5\rw12\x1b\rw13\r\x04w14\r")
        converse(chat, terminal_lines(chat, input=pipe, output=DummyOutput()), screen())
    assert [turn.prompt for turn in chat.turns] == ["w10 w11", "w12\nw13"]
    assert len(chat.turns[1].answers[0].tokens) == 5


@pytest.fixture
def command(monkeypatch):
    """Runs `fastspec chat` on the tiny model."""
    for module in ("fastspec.models", "fastspec.programs.chat.settings"):
        monkeypatch.setattr(f"{module}.load_model", lambda name, *rest: (target(), tokenizer()))
    monkeypatch.setattr("fastspec.programs.chat.settings.load_config", lambda name: target().config)
    monkeypatch.setattr("fastspec.programs.cli.options.check_model", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    fixed = ("chat", "--model", "tiny", "--max-new-tokens", "8")
    return lambda *arguments, **options: CliRunner().invoke(app, [*fixed, *arguments], **options)


def test_prompts_on_the_command_line(command) -> None:
    done = command(
        "--prompt", "w10", "--prompt", "/length 4", "--prompt", "w11", "--assistant", "autoregressive,transformers"
    )
    assert done.exit_code == 0, done.output
    assert done.output.count("The 2 greedy answers are identical") == 2
    assert "acceptance" in done.output and "\x1b" not in done.output


def test_json_is_one_object(command) -> None:
    done = command("--prompt", "w10", "--json", "--temperature", "0.5", "--seed", "1")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["model"] == "tiny" and len(found["turns"]) == 1
    assert found["settings"]["processor"] == "multinomial"
    assert found["turns"][0]["answers"][0]["strategy"] == "nasd"


def test_assistants_beside_each_other(command) -> None:
    names = "transformers,speculative,nasd"
    with pytest.warns(UserWarning, match="will not pay"):  # the draft model is as large as the target
        done = command(
            "--prompt", "w10 w11 w10", "--json", "--resource", "speculative=small", "--gamma", "3", "--assistant", names
        )
    assert done.exit_code == 0, done.output
    _, speculative, nasd = json.loads(done.stdout)["turns"][0]["answers"]
    assert speculative["identical"] is nasd["identical"] is True
    assert (
        speculative["acceptance_length"] == 3.5
    )  # the draft model is the target's twin: four tokens a round, and three up to the limit


def test_lines_on_standard_input(command) -> None:
    done = command(input="w10\n/nonsense\n/quit\nw11\n")
    assert done.exit_code == 0, done.output
    assert "unknown command /nonsense" in done.output
    assert done.output.count("tokens/s") == 1


def test_a_line_that_is_no_utf_8_is_refused_and_the_next_one_answered(command) -> None:
    done = command(input=b"w10 \xe9\nw10\n")
    assert done.exit_code == 0, done.output
    assert r"the prompt has '\udce9' at position 4" in done.output and done.output.count("tokens/s") == 1


def test_standard_input_is_left_as_it_was_where_there_are_prompts(command, monkeypatch) -> None:
    found = list[str | None]()
    monkeypatch.setattr("fastspec.programs.chat.loop.converse", lambda *_, **__: found.append(sys.stdin.errors))
    command(), command("--prompt", "w10")
    assert found == ["surrogateescape", "strict"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--json"], 2, "--prompt"),
        (["--prompt", "/nonsense"], 1, "unknown command"),
        (["--assistant", "eagle3", "--prompt", "w9"], 1, "--resource eagle3=SOURCE"),
        (["--resource", "eagle2", "--prompt", "w9"], 1, "ASSISTANT=SOURCE"),
        (["--resource", "nasd=x", "--prompt", "w9"], 1, "takes no resource"),
        (["--temperature", "-1"], 2, "temperature"),
    ],
)
def test_bad_options(command, arguments: list[str], status: int, words: str) -> None:
    done = command(*arguments)
    assert done.exit_code == status
    assert words in done.output and "Traceback" not in done.output


def test_the_command_line_imports_no_more_than_it_needs() -> None:
    code = "import fastspec.programs.cli.app, fastspec.programs.chat, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "prompt_toolkit"} & set(modules)
