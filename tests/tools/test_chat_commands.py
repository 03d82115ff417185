"""The commands of the chat: what they set, what they refuse, and what reaches the model."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.chat import make_chat, screen, target, tokenizer
from helpers.generate import bigram, seer
from helpers.models import tiny_model
from tokenizers import models

import fastspec
from fastspec.errors import FastSpecError
from fastspec.patches.assistants.speculative import Pair
from fastspec.patches.session import session_of
from fastspec.programs.chat.commands import COMMANDS, execute
from fastspec.programs.chat.loop import converse, respond
from fastspec.programs.chat.session import Chat
from fastspec.programs.chat.settings import PROCESSORS, Settings


@pytest.fixture
def chat() -> Chat:
    return make_chat()


@pytest.mark.parametrize(
    ("line", "setting", "value"),
    [
        ("/length 7", "max_new_tokens", 7),
        ("/processor multinomial 0.7", "temperature", 0.7),
        ("/processor topk 0.7 9", "top_k", 9),
        ("/processor nucleus 0.7 0.5", "top_p", 0.5),
        ("/processor topknucleus 0.7 9 0.5", "processor", "topknucleus"),
        ("/processor greedy", "processor", "greedy"),
        ("/temperature 0.5", "processor", "multinomial"),
        ("/temperature 0", "processor", "greedy"),
        ("/gamma 3", "nasd.gamma", 3),
        ("/gamma default", "nasd.gamma", 8),
        ("/ngram 4", "nasd.n", 4),
        ("/top_k_filler 2", "nasd.top_k_filler", 2),
        ("/storage onelevel", "nasd.storage", "one_level"),
        ("/storage one_level", "nasd.storage", "one_level"),
        ("/storage basic", "nasd.storage", "ngram"),
        ("/storage suffix", "storage_per", "answer"),
        ("/storage suffix chat", "storage_per", "chat"),
        ("/stop_if_unknown off", "nasd.stop_if_unknown", False),
        ("/stop_if_unknown", "nasd.stop_if_unknown", False),
        ("/early_exit 5", "speculative.early_exit", 5),
        ("/early_exit off", "speculative.early_exit", None),
        ("/tree 12", "eagle3.total_tokens", 12),
        ("/tree 12 3 4", "eagle3.depth", 3),
        ("/tree auto 3 4", "eagle3.top_k", 4),
        ("/tree auto", "eagle3.total_tokens", "auto"),
        ("/tree default", "eagle3.total_tokens", None),
        ("/seed 5", "seed", 5),
        ("/seed off", "seed", None),
        ("/beams 3", "beams", 3),
        ("/beams 3 -0.5", "length_penalty", -0.5),
        ("/logits_processor none", "logits_processors", ()),
        ("/cache", "cache", False),
        ("/cache on", "cache", True),
        ("/chat", "chat", False),
        ("/debug", "debug", True),
        ("/columns", "columns", True),
        ("/branches 2", "speculative.branches", 2),
        ("/branches default", "speculative.branches", 1),
        ("/drafts sampled", "eagle.drafts", "sampled"),
        ("/debug off", "debug", False),
        ("/set nasd.total_tokens 24", "nasd.total_tokens", 24),
        ("/set mtp.total_tokens 24", "mtp.total_tokens", 24),
        ("/set nasd.stop_if_unknown off", "nasd.stop_if_unknown", False),
        ("/set eagle2.total_tokens auto", "eagle2.total_tokens", "auto"),
        ("/set eagle.paths [[0],[0,1],[1]]", "eagle.paths", [[0], [0, 1], [1]]),
        ("/set speculative.most default", "speculative.most", 8),
        ("/assistant autoregressive,transformers", "assistants", ("autoregressive", "transformers")),
    ],
)
def test_commands_set(chat: Chat, line: str, setting: str, value: Any) -> None:
    assert execute(chat, line)
    assert (chat.settings.field(setting) if "." in setting else getattr(chat.settings, setting)) == value


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/", "/help"),
        ("/lenght 3", "did you mean /length"),
        ("/help nonsense", "/help lists"),
        ("/model", "NAME [HEAD]"),
        ("/model no-such-file.gguf", "no such GGUF file"),
        ("/resource eagle3", "takes 2 arguments"),
        ("/resource nasd x", "takes no resource"),
        ("/resource exact x", "'exact' takes no resource"),
        ("/resource eagle3 no/such-head", "no/such-head"),
        ("/assistant", "takes 1 argument, not 0"),
        ("/assistant ,", "one name or several"),
        ("/assistant nonsense", "accepted are"),
        ("/assistant eagle3", "/resource eagle3 SOURCE"),
        ("/length 0", "at least 1"),
        ("/length many", "whole number, not 'many'"),
        ("/length default", "whole number"),
        ("/processor best", "greedy, multinomial"),
        ("/processor greedy 1", "nothing more"),
        ("/processor topk 1 2.5", "top_k must be a whole number"),
        ("/processor nucleus 1 1.5", "top_p"),
        ("/processor topknucleus 1 2 3 4", "1 to 4 arguments"),
        ("/temperature -1", "above 0"),
        ("/temperature nan", "above 0"),
        ("/temperature warm", "must be a number"),
        ("/gamma 0", "at least 1"),
        ("/gamma 1 2", "takes 1 argument, not 2"),
        ("/ngram 1", "n must be"),
        ("/top_k_filler x", "whole number"),
        ("/storage tree", "ngram, one_level, suffix"),
        ("/storage ngam", "did you mean ngram"),
        ("/storage suffix turn", "answer, chat"),
        ("/storage suffix chat 1", "takes 1 to 2 arguments"),
        ("/stop_if_unknown maybe", "on or off"),
        ("/early_exit 0", "at least 1"),
        ("/early_exit 6", "the target has 6 layers, so at most 5$"),
        ("/early_exit few", "whole number, not 'few'"),
        ("/early_exit", "takes 1 argument"),
        ("/tree", "takes 1 to 3 arguments"),
        ("/tree 1", "between 2 and"),
        ("/tree 300", "at most 256"),
        ("/tree 12 -1", "depth must be"),
        ("/tree 12 3 0", "top_k must be"),
        ("/tree 60 0 4", "between 2 and 5"),
        ("/tree large", "total_tokens must be a whole number"),
        ("/tree default 3", "as a whole"),
        ("/resource cascade no/such.yaml", "no/such.yaml cannot be read"),
        ("/assistant cascade", "/resource cascade SOURCE"),
        ("/assistant speculative", "/resource speculative SOURCE or /early_exit K"),
        ("/cache maybe", "on or off"),
        ("/chat maybe", "on or off"),
        ("/debug 1 2", "0 to 1"),
        ("/columns wide", "on or off"),
        ("/branches 0", "at least 1"),
        ("/branches 60", "at most 256"),
        ("/drafts drawn", "'greedy', 'sampled'"),
        ("/set nasd.colour 3", "'nasd.colour' is unknown: "),
        ("/set nasd.gama 3", "did you mean nasd.gamma"),
        ("/set nasd.gamma many", "whole number"),
        ("/set nasd.gamma on", "whole number"),
        ("/set speculative.early_exit 0", "at least 1"),
        ("/set nasd.gamma", "takes 2 arguments"),
        ("/seed -1", "between 0"),
        ("/seed x", "whole number"),
        ("/beams 0", "at least 1"),
        ("/beams 3 long", "length_penalty must be a number"),
        ("/beams 3 inf", "must be finite"),
        ("/beams 3 1 1", "1 to 2 arguments"),
        ("/logits_processor mine", "'mine' of your own is unknown: there are none: --own FILE"),
        ("/reset now", "takes 0 arguments"),
        ("/save", "FILE"),
        ("/save 'open", "No closing quotation"),
        ("/save no/such/folder/file", "could not write"),
        ("/clear x", "takes 0"),
        ("/quit x", "takes 0"),
    ],
)
def test_bad_arguments_are_refused_and_change_nothing(chat: Chat, line: str, words: str) -> None:
    before = chat.settings
    with pytest.raises(FastSpecError, match=words.replace("[", "\\[")):
        execute(chat, line)
    assert chat.settings == before
    assert fastspec.report(chat.model)


def test_help_lists_every_command_with_its_value(chat: Chat) -> None:
    console = screen()
    execute(chat, "/gamma 6")
    converse(chat, ["/help"], console)
    text = console.export_text()
    assert all(command.usage in text and command.what in text for command in COMMANDS.values())
    assert next(line for line in text.splitlines() if line.startswith("/gamma")).split()[-1] == "6"
    console.print(execute(chat, "/help /gamma"))
    assert "/gamma" in (one := console.export_text()) and "/length" not in one


def test_reset_clear_and_quit(chat: Chat) -> None:
    console = screen()
    converse(chat, ["w9 w8", "/reset", "/clear", "/quit", "w7"], console)
    assert chat.over and not chat.turns and not chat.conversation


def test_settings_reach_the_configs_of_the_assistants() -> None:
    settings = Settings().with_fields(
        {"nasd.gamma": 3, "nasd.n": 3, "nasd.top_k_filler": 2, "nasd.storage": "one_level", "speculative.gamma": 3}
    )
    assert settings.assistant("eagle3") == fastspec.Eagle3() and settings.assistant("eagle") == fastspec.Eagle1()
    nasd = settings.assistant("nasd")
    assert (nasd.n, nasd.gamma, nasd.top_k_filler, nasd.storage) == (3, 3, 2, "one_level")
    assert settings.assistant("speculative").gamma == 3
    assert Settings().assistant("nasd") == fastspec.Nasd()


@pytest.mark.parametrize("processor", PROCESSORS)
def test_processors_stand_whatever_the_generation_config_says(chat: Chat, processor: str) -> None:
    config = chat.model.generation_config
    config.do_sample, config.temperature, config.top_k, config.top_p, config.min_p = True, 0.2, 3, 0.4, 0.3
    options = chat.settings.replace(processor=processor, temperature=0.7, top_k=9, top_p=0.5).sampling(chat.model)
    prepared, _ = chat.model._prepare_generation_config(None, **options)
    read = PROCESSORS[processor]
    assert prepared.do_sample == (processor != "greedy")
    assert prepared.min_p == 0.0
    if prepared.do_sample:
        assert prepared.temperature == 0.7
        assert prepared.top_k == (9 if "top_k" in read else 0)
        assert prepared.top_p == (0.5 if "top_p" in read else 1.0)


def test_model_patches_anew_and_keeps_the_conversation(chat: Chat, monkeypatch) -> None:
    respond(chat, "w9", screen())
    other = target(bigram())
    monkeypatch.setattr("fastspec.programs.chat.settings.load_model", lambda name, *rest: (other, tokenizer()))
    chat.settings = chat.settings.replace(assistants=("autoregressive", "transformers"))
    told = execute(chat, "/model other")
    assert "other" in told and chat.model is other and fastspec.report(other)
    assert len(chat.conversation) == 2
    respond(chat, "w8", screen())
    assert len(chat.turns) == 2


def test_resource_adds_a_head_and_model_takes_it_away(chat: Chat, monkeypatch) -> None:
    head = seer(chat.model)
    monkeypatch.setattr("fastspec.programs.chat.settings.load_model", lambda name, *rest: (target(), tokenizer()))
    chat.reopen(chat.settings.replace(resources=(("eagle3", head),)))
    execute(chat, "/assistant eagle3,transformers")
    told = execute(chat, "/model other")
    assert "eagle3 is left out: " in told and "/resource eagle3 SOURCE" in told
    assert chat.settings.assistants == ("transformers",)


@pytest.mark.parametrize("shift", [0, 40])
def test_a_draft_model_may_have_another_tokenizer(chat: Chat, monkeypatch, shift: int) -> None:
    own = tokenizer()
    words = {f"w{(i + shift) % 97}": i for i in range(97)}  # the same words under other ids
    own.backend_tokenizer.model = models.WordLevel(words, unk_token="w3")
    monkeypatch.setattr(
        "fastspec.models.load_model", lambda name, *rest: (target(tiny_model(num_hidden_layers=1)), own)
    )
    execute(chat, "/resource speculative small")
    execute(chat, "/assistant speculative,transformers")
    respond(chat, "w9 w12", screen())
    answers = chat.turns[-1].answers
    assert answers[0].text == answers[1].text
    assert isinstance(session_of(chat.model).resources["speculative"], Pair) == bool(shift)
