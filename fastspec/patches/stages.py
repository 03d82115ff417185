"""The models of a cascade: loaded when a request first reaches them, patched as long as the large one is, and the texts that go from one
to the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastspec.cascade.config import Cascade, Stage
from fastspec.cascade.stopping import Rates
from fastspec.errors import Unsupported
from fastspec.generation.loop import Outcome
from fastspec.patches.adapters import check_supported
from fastspec.patches.assistants import Continued
from fastspec.patches.speculative import PADDING, vocabulary

TRIAL = 24
"""New tokens per stage with which its rates are measured."""


class StageModel:
    """One model of a cascade, ready to generate.

    `tokenizer` is None where the stage shares the large model's tokens. A model that the user has patched already is used as it is; one
    that is loaded here goes to `device`, the large model's.
    """

    def __init__(self, stage: Stage, large_tokenizer: Any, device: str) -> None:
        self.stage, self.label, self.device = stage, stage.label, device
        self.large_tokenizer = large_tokenizer
        self.lock = threading.Lock()
        self.held: Any = None
        self.patched = False
        self.tokenizer: Any = stage.tokenizer
        if not isinstance(stage.model, (str, Path)):
            self._take(stage.model)

    @property
    def loaded(self) -> bool:
        """Whether the model is in memory."""
        return self.held is not None

    @property
    def model(self) -> Any:
        """The model, loaded and patched if it is not yet."""
        with self.lock:
            if self.held is None:
                self._load()
            self._patch()
            return self.held

    def _load(self) -> None:
        from fastspec.models import load_model

        stage = self.stage
        options: dict[str, Any] = {}
        if stage.device_map is not None:
            options["device_map"] = stage.device_map
        if stage.quantization is not None:
            options["quantization_config"] = quantization(stage.quantization)
        dtype = None if stage.dtype == "auto" else getattr(torch, stage.dtype)
        model, tokenizer = load_model(str(stage.model), self.device, dtype, **options)
        self.tokenizer = self.tokenizer or tokenizer
        self._take(model)

    def _take(self, model: Any) -> None:
        check_supported(model)
        if model.config.is_encoder_decoder:
            raise Unsupported(f"the cascade's stage {self.label!r} is an encoder-decoder model: a cascade takes decoder-only models")
        self.held = model

    def _patch(self) -> None:
        from fastspec.patches.api import patch
        from fastspec.patches.session import session_of

        if session_of(self.held) is None:
            patch(self.held, **self.stage.resources)
            self.patched = True

    def close(self) -> None:
        """Take the patch off again, if it was ours and is still there."""
        from fastspec.patches.api import unpatch
        from fastspec.patches.session import session_of

        with self.lock:
            if self.patched and session_of(self.held) is not None:
                unpatch(self.held)
            self.patched = False

    @property
    def foreign(self) -> bool:
        """Whether the stage reads other tokens than the large model."""
        if self.tokenizer is not None and self.large_tokenizer is None:
            raise Unsupported(
                f"the cascade's stage {self.label!r} has a tokenizer and the large model's is unknown: give it, Cascade(tokenizer=...)"
            )
        return self.tokenizer is not None and token_table(self.tokenizer) != token_table(self.large_tokenizer)

    def check_shared(self, large: Any) -> None:
        """Refuse a stage that is said to share the large model's tokens and has another number of them."""
        sizes = vocabulary(self.model), vocabulary(large)
        if not self.foreign and abs(sizes[0] - sizes[1]) > PADDING:
            raise Unsupported(
                f"the cascade's stage {self.label!r} has a vocabulary of {sizes[0]} tokens and the large model one of {sizes[1]}: give "
                "both tokenizers, Cascade(stages=[Stage(model, tokenizer=...)], tokenizer=...)"
            )

    def ends(self, given: Any = None) -> frozenset[int]:
        """The stage's end tokens; `given` ones are the call's own."""
        ends = self.model.generation_config.eos_token_id if given is None else given
        return frozenset(torch.as_tensor([] if ends is None else ends).flatten().tolist())

    def read_prompt(self, ids: Sequence[int]) -> list[int]:
        """The large model's prompt in this stage's tokens."""
        if not self.foreign and self.stage.prompt is None:
            return list(ids)
        reader = self.large_tokenizer or self.tokenizer
        if reader is None:
            raise Unsupported(f"the cascade's stage {self.label!r} has a prompt function, which reads text: give Cascade(tokenizer=...)")
        text = decoded(reader, ids[1:] if ids and ids[0] == reader.bos_token_id else ids)
        text = text if self.stage.prompt is None else self.stage.prompt(text)
        writer = self.tokenizer or reader
        start = writer("", add_special_tokens=True)["input_ids"][:1]
        begins = [writer.bos_token_id] if writer.bos_token_id is not None and start == [writer.bos_token_id] else []
        return begins + encoded(writer, text)


def hand_over(answer: Sequence[int], giver: StageModel, taker: StageModel, ends: frozenset[int], end: int | None) -> list[int]:
    """A stage's answer in another's tokens; an end token of the giver, one of `ends`, becomes the taker's, `end`."""
    if giver.foreign == taker.foreign and (not giver.foreign or token_table(giver.tokenizer) == token_table(taker.tokenizer)):
        return list(answer)
    over = bool(answer) and answer[-1] in ends
    text = decoded(giver.tokenizer or giver.large_tokenizer, answer[:-1] if over else answer)
    tokens = encoded(taker.tokenizer or taker.large_tokenizer, text)
    return [*tokens, end] if over and end is not None else tokens


@lru_cache(maxsize=32)
def token_table(tokenizer: Any) -> int:
    """What tells one vocabulary from another; a tokenizer takes a tenth of a second to list its tokens."""
    return hash(frozenset(tokenizer.get_vocab().items()))


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of tokens, special ones included."""
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def encoded(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, nothing added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def quantization(kind: str) -> Any:
    """bitsandbytes' settings, for transformers. Raises Unsupported where bitsandbytes or a CUDA device is missing."""
    import importlib.util

    if not torch.cuda.is_available() or importlib.util.find_spec("bitsandbytes") is None:
        raise Unsupported(f"quantization={kind!r} needs a CUDA device and bitsandbytes (pip install bitsandbytes)")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=kind == "4bit", load_in_8bit=kind == "8bit")


def stage_models(config: Cascade, large: Any) -> list[StageModel]:
    """The stages of a cascade, the large model last."""
    below = [StageModel(stage, config.tokenizer, str(large.device)) for stage in config.stages]
    for stage in below:
        if stage.held is large:
            raise Unsupported("a stage of the cascade is the patched model itself: stages are the smaller ones")
        if stage.loaded:
            stage.check_shared(large)
    return [*below, StageModel(Stage(large, name=config.label, assistant=config.assistant), config.tokenizer, str(large.device))]


def measure_rates(stages: Sequence[StageModel], prompts: Sequence[Sequence[int]], new: int = TRIAL) -> Rates:
    """Every stage's milliseconds per generated token, per verified token and per start, on this machine: means over the large model's
    `prompts`, `new` tokens after each, of the better of two runs after a first one."""
    columns = []
    for stage in stages:
        found = torch.tensor([_rates_after(stage, prompt, new) for prompt in prompts]).mean(0)
        columns.append(found.tolist())
    token, verify, start = zip(*columns, strict=True)
    return Rates(token, (0.0, *verify[1:]), start)


def _rates_after(stage: StageModel, prompt: Sequence[int], new: int) -> tuple[float, float, float]:
    """Milliseconds per generated token, per verified token and per start of one stage after one prompt."""
    ids = torch.tensor([stage.read_prompt(prompt)], device=stage.model.device)
    text = [_trial(stage, ids, new, None)[1][:-1]]
    runs = [[_trial(stage, ids, *kind)[0] for kind in ((1, None), (new, None), (new, text))] for _ in range(3)][1:]
    start, whole, verified = (min(column) for column in zip(*runs, strict=True))
    return max(whole - start, 1e-3) / (new - 1), max(verified - start, 0.0) / (new - 1), start


def _trial(stage: StageModel, ids: Tensor, new: int, texts: Any) -> tuple[float, list[int]]:
    """Milliseconds of one greedy call of `new` tokens, with texts to verify, and what it said."""
    heard: list[Outcome] = []
    began = time.perf_counter()
    stage.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0,
        assistant=Continued(stage.stage.assistant, texts, heard.append),
    )  # fmt: skip
    return 1000 * (time.perf_counter() - began), heard[0].tokens[0]
