"""The models of a cascade, loaded when a request first reaches them, and what is kept of their texts between calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from fastspec.cascade.config import SETTINGS, Cascade, Stage
from fastspec.cascade.decisions import Rates
from fastspec.cascade.memory import CacheManager
from fastspec.distribution import install_command
from fastspec.errors import Unsupported, accepted
from fastspec.generation.drafters.retokenized import decoded, encoded, opening_of
from fastspec.generation.engine.call import Outcome
from fastspec.models import cut_over, load_model, source_of, token_table
from fastspec.patches.assistants.registry import NAMES, Continued
from fastspec.patches.assistants.speculative import PADDING, vocabulary
from fastspec.patches.call.ranks import Ranks
from fastspec.patches.hf.cache import read_cache
from fastspec.patches.hf.changes import check_present
from fastspec.patches.hf.compat import device_of, dtype_of, processes_of
from fastspec.patches.hf.config_fields import kept_by, layer_shapes, position_limit, rope_bound
from fastspec.patches.hf.ends import listed
from fastspec.patches.hf.modes import check_supported
from fastspec.patches.session import session_of

Value = TypeVar("Value")


def check_kept(model: Any) -> None:
    """Raise `Unsupported`, naming the reason, for a model whose keys and values cannot be kept between calls."""
    name, instead = type(model).__name__, "keep nothing between calls (Cascade: memory=None)"
    if model.config.is_encoder_decoder:
        raise Unsupported(f"the cache of {name}, an encoder-decoder model, belongs to its source: {instead}")
    check_present(model)
    wanted = model.generation_config.cache_implementation
    if wanted not in (None, "hybrid"):  # transformers takes no other beside a given cache, and unsets this one itself
        raise Unsupported(
            f"{name} asks for cache_implementation={wanted!r}: set it to None in its generation_config, or {instead}"
        )
    if rope_bound(model.config) is not None:
        raise Unsupported(f"the keys of {name} depend on the length of the text, by its rope_parameters: {instead}")
    layers = DynamicCache(config=model.config).layers
    other = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if other:
        raise Unsupported(
            f"{name} needs a cache with layers of the class {', '.join(other)}, which cannot be cut to a prefix: "
            f"{instead}"
        )


def check_room(manager: CacheManager, model: Any, tokens: int) -> None:
    """Raise `Unsupported` where the keys and values of a text of so many tokens exceed the budget."""
    shapes = layer_shapes(model.config)
    kept = [shapes[layer] for layer in set(kept_by(model.config))]
    need = tokens * sum(heads * (key + value) for heads, key, value in kept)
    need *= torch.empty((), dtype=dtype_of(model), device="cpu").element_size()
    if need > manager.budget:
        raise Unsupported(
            f"a request of up to {tokens} tokens needs {need} bytes of keys and values in {type(model).__name__}, and "
            f"the cascade's memory is {manager.budget} bytes: raise Cascade(memory=...), ask for fewer new tokens, or "
            "keep nothing (memory=None)"
        )


def past_of(manager: CacheManager, stage: int, model: Any, ids: Tensor) -> DynamicCache | None:
    """A stage's kept beginning of ids [1, T], without padding: a cache of at most T - 1 tokens for `model.generate`,
    each layer on the model's device, or by a `device_map` where it was; None without any in the model's dtype. Raises
    `Unsupported` for a model that `check_kept` refuses."""
    check_kept(model)
    found = manager.find(stage, ids[0].tolist())
    if found is None or found[0][0].dtype != dtype_of(model):
        return None
    cache = DynamicCache(config=model.config)
    for layer in range(len(found)):
        keys, values = found.pop(0)  # the cache copies: each layer is freed before the next is copied
        if getattr(model, "hf_device_map", None) is None:
            keys, values = keys.to(device_of(model)), values.to(device_of(model))
        cache.update(keys, values, layer)
    return cache


def keep_past(manager: CacheManager, stage: int, ids: Tensor, cache: Any) -> None:
    """Keep a call's cache of the first tokens of the text ids [1, T], without padding; it stays the caller's."""
    layers = read_cache(cache, len(cache.layers))
    assert layers is not None  # the call has read its prompt
    manager.keep(stage, ids[0, : layers[0][0].shape[2]].tolist(), layers)


@dataclass(frozen=True, slots=True)
class Patching:
    """`fastspec.patch` and `fastspec.unpatch`, which lie above."""

    patch: Callable[..., Any]
    unpatch: Callable[..., Any]


OWN = object()
"""In place of a call's end tokens: the stage's own."""
TRIAL = 24
"""New tokens per stage with which its rates are measured."""


class StageModel:
    """One model of a cascade, ready to generate; `tokenizer` is None where it shares the large model's tokens. A
    patched model is used as it is; one that is loaded here goes to `device`, or is cut over `processes`, as the large
    one."""

    def __init__(self, stage: Stage, large_tokenizer: Any, device: str, patching: Patching, processes: int = 1) -> None:
        stage.check_processes(processes)
        self.stage, self.label, self.device, self.patching = stage, stage.label, device, patching
        self._own, self._large = stage.tokenizer, large_tokenizer
        self._check_tokenizers()
        if isinstance(stage.assistant, str) and stage.assistant not in NAMES:
            known = [repr(name) for name in NAMES if name != Cascade.name]
            raise Unsupported(
                f"the cascade's stage {self.label!r} has the unknown assistant {stage.assistant!r}; "
                f"{accepted(repr(stage.assistant), known)}"
            )
        self.lock = threading.Lock()
        self.held: Any = None
        self.patched = False
        if not isinstance(stage.model, (str, Path)):
            self._take(stage.model)
            self._check_cut(processes)
        elif stage.is_cut:  # now, when all processes are here: later the first alone may reach it
            self._load()

    def _check_cut(self, processes: int) -> None:
        """Raise Unsupported for a loaded model that is not cut as it should be."""
        size, wanted = processes_of(self.held), self.stage.tensor_parallel
        if wanted not in (None, size):
            raise Unsupported(
                f"the cascade's stage {self.label!r} has tensor_parallel={wanted}, and its model was loaded over "
                f"{size}: load it so, leave tensor_parallel out, or name the model's path"
            )
        if size not in (1, processes):
            raise Unsupported(
                f"{size} processes hold the cascade's stage {self.label!r} together, and the large model is held by "
                f"{processes}: load both over the same ones"
            )

    def _check_tokenizers(self) -> None:
        if self._own is not None and self._large is None:
            raise Unsupported(
                f"the cascade's stage {self.label!r} has a tokenizer and the large model's is unknown: give it, "
                "Cascade(tokenizer=...)"
            )

    @property
    def tokenizer(self) -> Any:
        """The stage's tokenizer, loaded if it is not yet, or None. Raises Unsupported for one that cannot be loaded."""
        return _tokenizer(self._own)

    @property
    def large_tokenizer(self) -> Any:
        """The large model's, in the same way."""
        return _tokenizer(self._large)

    @property
    def loaded(self) -> bool:
        """True where the model is in memory."""
        return self.held is not None

    @property
    def cut(self) -> bool:
        """True where several processes hold the model together."""
        return self.loaded and processes_of(self.held) > 1

    def by_holders(self, run: Callable[[], Value], ranks: Ranks | None) -> Value:
        """Result of `run` in the processes that hold the model: all of `ranks`, or the first, for all."""
        return run() if ranks is None or self.cut else ranks.by_first(run)

    @property
    def model(self) -> Any:
        """The model, loaded and patched if it is not yet."""
        with self.lock:
            if self.held is None:
                self._load()
            self._patch()
            return self.held

    def _load(self) -> None:
        stage = self.stage
        options = cut_over(stage.tensor_parallel or 1)
        if stage.device_map is not None:
            options["device_map"] = stage.device_map
        dtype = None if stage.dtype == "auto" else getattr(torch, stage.dtype)
        if stage.quantization is not None:  # bitsandbytes would put it on CUDA's current device
            options = {"device_map": {"": self.device}} | options
            options["quantization_config"] = quantization(stage.quantization, dtype)
        model, tokenizer = load_model(
            str(stage.model), self.device, dtype, tokenizer=self._own or self.large_tokenizer, **options
        )
        self._own = self._own or tokenizer
        self._take(model)

    def _take(self, model: Any) -> None:
        check_supported(model)
        if model.config.is_encoder_decoder:
            raise Unsupported(
                f"the cascade's stage {self.label!r} is an encoder-decoder model: a cascade takes decoder-only models"
            )
        self.held = model

    def _patch(self) -> None:
        session = session_of(self.held)
        if session is None:
            self.patching.patch(self.held, **self.stage.resources)
            self.patched = True
            return
        held = session.resources | {name: getattr(session, name) for name in SETTINGS}
        asked = self.stage.resources.items()
        missing = sorted(
            name for name, value in asked if name not in held or (name in SETTINGS and held[name] != value)
        )
        if missing:
            raise Unsupported(
                f"the cascade's stage {self.label!r} is patched already, without the {', '.join(missing)} of its "
                "resources: give them to fastspec.patch, or leave the patch to the cascade"
            )

    def close(self) -> None:
        """Take the patch off again, if it was ours and is still there."""
        with self.lock:
            if self.patched and session_of(self.held) is not None:  # not half: the large model's patch is off
                self.patching.unpatch(self.held, force=True)
            self.patched = False

    @property
    def foreign(self) -> bool:
        """True where the stage reads other tokens than the large model."""
        if self._own is None:
            return False
        self._check_tokenizers()  # the stage's own may have come with its model
        return token_table(self.tokenizer) != token_table(self.large_tokenizer)

    @property
    def rewrites(self) -> bool:
        """True where the stage reads other tokens than the large model, or another prompt."""
        return self.foreign or self.stage.prompt is not None

    def check_shared(self, large: Any) -> None:
        """Refuse a stage that is said to share the large model's tokens and has another number of them."""
        # a loaded model need not be patched yet; tokenizers are loaded where sizes differ
        sizes = vocabulary(self.held if self.loaded else self.model), vocabulary(large)
        if abs(sizes[0] - sizes[1]) > PADDING and not self.foreign:
            raise Unsupported(
                f"the cascade's stage {self.label!r} has a vocabulary of {sizes[0]} tokens and the large model one of "
                f"{sizes[1]}: give both tokenizers, Cascade(stages=[Stage(model, tokenizer=...)], tokenizer=...)"
            )

    def ends(self, given: Any = OWN) -> tuple[int, ...]:
        """The stage's end tokens, the one to write first; `given` ones are the call's, None for a call without any."""
        ends = self.model.generation_config.eos_token_id if given is OWN else given
        return tuple(listed(ends))

    def read_prompt(self, ids: Sequence[int]) -> list[int]:
        """The large model's prompt in this stage's tokens; none where its text has none of them."""
        if not self.rewrites:
            return list(ids)
        reader = self.large_tokenizer or self.tokenizer
        if reader is None:
            raise Unsupported(
                f"the cascade's stage {self.label!r} has a prompt function, which reads text: give "
                "Cascade(tokenizer=...)"
            )
        text = decoded(reader, ids[1:] if ids and ids[0] == reader.bos_token_id else ids)
        text = text if self.stage.prompt is None else self.stage.prompt(text)
        if not isinstance(text, str):
            raise Unsupported(
                f"the prompt function of the cascade's stage {self.label!r} gave {text!r}: it must give text"
            )
        writer = self.tokenizer or reader
        return opening_of(writer) + encoded(writer, text)


def hand_over(
    answer: Sequence[int], giver: StageModel, taker: StageModel, ends: Sequence[int], end: int | None
) -> list[int]:
    """A stage's answer in another's tokens; an end token of the giver, one of `ends`, becomes the taker's, `end`."""
    both = giver.foreign and taker.foreign
    alike = token_table(giver.tokenizer) == token_table(taker.tokenizer) if both else giver.foreign == taker.foreign
    if alike:
        return list(answer)
    over = bool(answer) and answer[-1] in ends
    text = decoded(giver.tokenizer or giver.large_tokenizer, answer[:-1] if over else answer)
    tokens = encoded(taker.tokenizer or taker.large_tokenizer, text)
    return [*tokens, end] if over and end is not None else tokens


def _tokenizer(given: Any) -> Any:
    return load_tokenizer(str(given)) if isinstance(given, (str, Path)) else given


@lru_cache(maxsize=32)
def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model named as in `fastspec.models.load_model`. Raises Unsupported where there is none."""
    from transformers import AutoTokenizer

    source, packed = source_of(name)
    try:
        return AutoTokenizer.from_pretrained(source, **packed)
    except (OSError, ValueError) as error:
        raise Unsupported(f"could not load the tokenizer {name!r}: {error}") from error


def quantization(kind: str, dtype: torch.dtype | None) -> Any:
    """bitsandbytes' settings, with products of 4-bit weights in `dtype`. Raises Unsupported where it is missing."""
    import importlib.util

    if importlib.util.find_spec("bitsandbytes") is None:
        raise Unsupported(f"quantization={kind!r} needs bitsandbytes: {install_command('quantised')}")
    from transformers import BitsAndBytesConfig

    computes = {} if dtype is None else {"bnb_4bit_compute_dtype": dtype}
    return BitsAndBytesConfig(load_in_4bit=kind == "4bit", load_in_8bit=kind == "8bit", **computes)


def stage_models(config: Cascade, large: Any, patching: Patching) -> list[StageModel]:
    """The stages of a cascade, the large model last."""
    common = config.tokenizer, str(device_of(large)), patching, processes_of(large)
    below = [StageModel(stage, *common) for stage in config.stages]
    for stage in below:
        if stage.held is large:
            raise Unsupported("a stage of the cascade is the patched model itself: stages are the smaller ones")
        if stage.loaded:
            stage.check_shared(large)
    return [*below, StageModel(Stage(large, name=config.label, assistant=config.assistant), *common)]


def measure_rates(
    stages: Sequence[StageModel], prompts: Sequence[Sequence[int]], new: int = TRIAL, *, ranks: Ranks | None = None
) -> Rates:
    """Every stage's milliseconds per generated token, per verified token and per start: means over the large model's
    `prompts`, `new` tokens after each, of the better of two runs. All of `ranks` call it."""

    def measured(stage: StageModel) -> list[float]:
        judged = stage is not stages[-1]  # the last answer is not measured token by token
        found = torch.tensor([_rates_after(stage, prompt, new, judged) for prompt in prompts], device="cpu").mean(0)
        return found.tolist()

    columns = [stage.by_holders(partial(measured, stage), ranks) for stage in stages]
    token, verify, start = zip(*columns, strict=True)
    return Rates(token, (0.0, *verify[1:]), start)


def _rates_after(stage: StageModel, prompt: Sequence[int], new: int, judged: bool) -> tuple[float, float, float]:
    """Milliseconds per generated token, per verified token and per start of one stage after one prompt."""
    bound, tokens = position_limit(stage.model.config), stage.read_prompt(prompt) or [0]
    if bound is not None:
        tokens = tokens[-max(bound - new, 1) :]
    ids = torch.tensor([tokens], device=device_of(stage.model))
    text = [_trial(stage, ids, new, None, judged)[1][:-1]]
    calls = (1, None), (new, None), (new, text)
    runs = [[_trial(stage, ids, count, given, judged)[0] for count, given in calls] for _ in range(3)]
    start, whole, verified = (min(column) for column in zip(*runs[1:], strict=True))
    return max(whole - start, 1e-3) / (new - 1), max(verified - start, 0.0) / (new - 1), start


def _trial(stage: StageModel, ids: Tensor, new: int, texts: Any, judged: bool) -> tuple[float, list[int]]:
    """Milliseconds of one greedy call of `new` tokens, with texts to verify, and its answer."""
    heard: list[Outcome] = []
    assistant = Continued(stage.stage.assistant, texts, heard.append, measure=judged)
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    began = time.perf_counter()
    stage.model.generate(ids, attention_mask=torch.ones_like(ids), assistant=assistant, **options)
    return 1000 * (time.perf_counter() - began), heard[0].tokens[0]
