"""What the tests of the chat share: a tokenizer of words, a tiny target, a chat and a screen."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import fastspec
from fastspec.programs.chat.session import Chat
from fastspec.programs.chat.settings import Settings
from fastspec.programs.chat.view import AnswerStreamer
from helpers.cascade import trained
from helpers.generate import NEVER
from helpers.models import tiny_model

TEMPLATE = (
    "{% for m in messages %}{{ 'w90 ' + m['content'] + ' w91 ' }}{% endfor %}{% if add_generation_prompt "
    "%}w92{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE) -> Any:
    """One word per token id."""
    words = {f"w{i}": i for i in range(97)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w3"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="w3", pad_token="w0", eos_token="w5")
    made.chat_template = template
    return made


def target(made: Any = None) -> Any:
    """A tiny model that no token ends."""
    model = made or tiny_model(num_hidden_layers=6)
    model.generation_config.eos_token_id = NEVER
    return model


def make_chat() -> Chat:
    """A chat with a tiny random model, greedy, in which `autoregressive` answers with 12 tokens."""
    settings = Settings(model="tiny", resources=(), assistants=("autoregressive",), max_new_tokens=12, cache=True)
    return Chat(fastspec.patch(target()), tokenizer(), settings)


def cascade_file(folder: Path, small: Any, text: str = "price: 0.0") -> str:
    """A YAML file of a cascade whose one stage is `small`, saved beside it; `text` are further lines."""
    small.save_pretrained(folder / "small")
    tokenizer().save_pretrained(folder / "small")
    trained(("small", "large")).save(folder / "predictor.safetensors")
    path = folder / "cascade.yaml"
    stages = f"stages:\n- model: {folder / 'small'}\n  name: small\nlabel: large\n"
    path.write_text(f"{stages}predictor: {folder / 'predictor.safetensors'}\ncosts: [1, 2]\n{text}\n")
    return str(path)


def screen() -> Console:
    """A terminal that is only recorded."""
    return Console(record=True, width=240, force_terminal=True, file=io.StringIO())


def interrupt_after(monkeypatch, count: int) -> None:
    real = AnswerStreamer.put

    def put(self: AnswerStreamer, value: Any) -> None:
        real(self, value)
        if len(self.ids) == count:
            monkeypatch.setattr(AnswerStreamer, "put", real)
            raise KeyboardInterrupt

    monkeypatch.setattr(AnswerStreamer, "put", put)
