"""A conversation with a patched model: prompts in, one answer per strategy out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

import fastspec
from fastspec.cascade.decisions import Explanation, Visit
from fastspec.config import STORAGES
from fastspec.errors import Unsupported, accepted
from fastspec.files import parse_json
from fastspec.generation.drafters.nasd import storage_of
from fastspec.models import prompt_width
from fastspec.patches.api import ASSISTANTS, cascade_of, check_assistant, has_resource, is_patched, resources_of
from fastspec.patches.hf.cache import CACHE, kept_cache
from fastspec.programs.chat import settings as chat_settings
from fastspec.programs.chat.settings import OLDER_STORAGES, Settings, forget_cascade, load, resource_names
from fastspec.programs.compare import BASELINE, Stopwatch, first_difference
from fastspec.programs.texts import encode

BEAMS = "beam search"
WARM_TOKENS = 4
STORED = ("storage_per", "own_storage")
STORED_FIELDS = ("nasd.n", "nasd.storage")
"""Settings, and fields of `fastspec.Nasd`, with which a kept storage goes when one of them changes."""


@dataclass
class Answer:
    """Answer of one strategy: new tokens, wall-clock seconds (prefill included, printing not), drafts."""

    strategy: str
    tokens: list[int]
    text: str
    seconds: float
    acceptance_length: float | None = 1.0
    """None for beam search, which has no rounds, and where a cascade's stages answered."""
    drafted: int = 0
    accepted: int = 0
    reused: int = 0
    """Tokens of the prompt that came from the cache of earlier turns."""
    stopped: bool = False
    explanation: Explanation | None = None
    """Decisions of a cascade, stage by stage."""
    exact: bool = True
    """True where greedy tokens are the target's, not a smaller stage's of a cascade or a mixture's of two models."""

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    def as_json(self) -> dict[str, Any]:
        told, found = self.explanation, asdict(self) | {"tokens_per_second": round(self.tokens_per_second, 2)}
        for name in ("acceptance_length", "acceptance_rate"):
            value = getattr(self, name)
            found[name] = None if value is None else round(value, 3)
        if told is not None:
            found["explanation"] |= {name: getattr(told, name) for name in ("stage", "reused", "milliseconds")}
        return found


@dataclass
class ChatTurn:
    """One prompt and its answers. `settings` are those that it was answered with."""

    prompt: str
    settings: Settings
    answers: list[Answer] = field(default_factory=list)

    @property
    def reference(self) -> Answer | None:
        """The first answer that must be the target's own, which the others are compared with; None while sampling."""
        return next((answer for answer in self.answers if self._fixed(answer)), None)

    def identical(self, answer: Answer) -> bool | None:
        """True where an answer has the reference's tokens; None where it need not, and for the reference."""
        first = self.reference
        return None if first is None or answer is first or not self._fixed(answer) else answer.tokens == first.tokens

    def _fixed(self, answer: Answer) -> bool:
        return self.settings.greedy and answer.exact and not answer.stopped and answer.strategy != BEAMS

    def as_json(self) -> dict[str, Any]:
        answers = [{**answer.as_json(), "identical": self.identical(answer)} for answer in self.answers]
        return {"prompt": self.prompt, "settings": asdict(self.settings), "answers": answers}


@dataclass(frozen=True, slots=True)
class SavedChat:
    """Settings, conversation and turns of a chat that was saved."""

    settings: Settings
    conversation: list[dict[str, str]]
    turns: list[ChatTurn]


class Chat:
    """A patched model, its tokenizer, the settings, and the conversation. `own`, `processors` and `storages` map names
    to yours: assistants (objects of the `Decoding` protocol), transformers' logits processors (of a class one is made
    for every answer), and classes or functions that make a `fastspec.Storage`."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Settings,
        own: dict[str, Any] | None = None,
        processors: dict[str, Any] | None = None,
        storages: dict[str, Callable[[], fastspec.Storage]] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.settings, self.own = model, tokenizer, settings, own or {}
        self.processors, self.storages = processors or {}, storages or {}
        for name in STORAGES:
            if name in self.storages:
                raise Unsupported(f"storage {name!r} is one of fastspec's own: give yours another name")
        self.turns: list[ChatTurn] = []
        self.conversation: list[dict[str, str]] = []
        self.over = False
        self._caches: dict[str, tuple[list[int], Any]] = {}  # strategy -> the tokens in its cache, the cache
        self._storage: Any = None
        self._warm: set[Any] = set()

    @classmethod
    def open(cls, settings: Settings, **own: Any) -> Chat:
        """Load the settings' model, patch it and check the assistants, `own` beside them."""
        chat = cls(None, None, settings, **own)
        chat.check_own(settings)
        for name in settings.assistants:
            chat.check_name(name)
        chat.model, chat.tokenizer = load(settings)
        for name in settings.assistants:
            chat.check(name)
        return chat

    def change(self, fields: dict[str, Any], **others: Any) -> None:
        """Change fields of the assistants' configs, and settings. Raises Unsupported, and changes nothing, where one of
        the assistants cannot answer with them, or is not known."""
        settings = self.settings.replace(**others).with_fields(fields)
        self.check_own(settings)
        for name in settings.assistants:
            self.check(name, settings)
        changed = any(getattr(settings, name) != getattr(self.settings, name) for name in STORED)
        if changed or any(settings.field(name) != self.settings.field(name) for name in STORED_FIELDS):
            self._storage = None
        self.settings = settings

    def reopen(self, settings: Settings) -> dict[str, str]:
        """Load and patch what settings name, and drop the old model; returns the assistants that can no longer answer,
        and why. Where loading fails, everything is as it was."""
        self.check_own(settings)
        if all(getattr(settings, name) == getattr(self.settings, name) for name in ("model", "device")):
            given = chat_settings.read_resources(settings, self.model, self.tokenizer)
            before = resources_of(self.model)
            fastspec.unpatch(self.model)
            try:
                fastspec.patch(self.model, **given, backend=settings.backend)
            except BaseException:  # an interrupt too must leave the model patched as it was
                fastspec.patch(self.model, **before)
                raise
        else:
            self.model, self.tokenizer = load(settings)
        self.settings = settings
        self._storage = None
        self._caches.clear()
        self._warm.clear()
        lost = {}
        for name in settings.assistants:
            try:
                self.check(name)
            except Unsupported as error:
                lost[name] = str(error)
        kept = tuple(name for name in settings.assistants if name not in lost)
        self.settings = settings.replace(assistants=kept or ("autoregressive",))
        return lost

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def strategies(self) -> list[str]:
        return [*self.settings.assistants, *([BEAMS] if self.settings.beams > 1 else [])]

    def known(self) -> list[str]:
        return [BASELINE, *ASSISTANTS, *self.own]

    def check_own(self, settings: Settings) -> None:
        """Raise Unsupported for processors and a storage of one's own that this chat was not given."""
        asked = [("logits processor", name, self.processors) for name in settings.logits_processors]
        if settings.own_storage is not None:
            asked.append(("storage", settings.own_storage, self.storages))
        for kind, name, given in asked:
            if name not in given:
                known = accepted(name, given) if given else "there are none: --own FILE gives them"
                raise Unsupported(f"{kind} {name!r} of your own is unknown: {known}")

    def check_name(self, name: str) -> None:
        if name not in self.known():
            raise Unsupported(f"assistant {name!r} is unknown: {accepted(name, self.known())}")

    def check(self, name: str, settings: Settings | None = None) -> None:
        """Raise Unsupported for an assistant that is unknown, or cannot answer with these settings (the chat's)."""
        settings = settings or self.settings
        self.check_name(name)
        if name == BASELINE or name in self.own:
            return
        if not is_patched(self.model):
            name = type(self.model).__name__
            raise Unsupported(f"this {name} is not patched: fastspec.patch(model) comes before Chat(model, ...)")
        try:
            check_assistant(settings.assistant(name), self.model)
        except Unsupported as error:
            early = name == fastspec.Speculative.name
            exits = early and settings.field("speculative.early_exit") is not None
            if has_resource(name, self.model) or name not in resource_names() or exits:
                raise
            raise Unsupported(
                f"{error}; in the chat: /resource {name} SOURCE{' or /early_exit K' if early else ''}; "
                f"on its command line: --resource {name}=SOURCE"
            ) from error

    def answer(self, prompt: str, strategy: str, streamer: Any) -> Answer:
        """The answer of one strategy to the conversation and a further prompt. The display time of `streamer`, a
        `view.AnswerStreamer`, does not count; an interrupt (Ctrl-C) ends the answer with what it was handed."""
        ids = self._encode([*self.conversation, {"role": "user", "content": prompt}])
        options = self._options(strategy)
        if strategy != BEAMS:
            self._warm_up(strategy, ids, options)
            options["streamer"] = streamer
        cache, reused = self._past(strategy, ids[0].tolist())
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **({CACHE: cache} if cache else {})}
        if self.settings.seed is not None:
            torch.manual_seed(self.settings.seed)
        cascade = self._cascade(strategy)
        options |= {"max_new_tokens": self.settings.max_new_tokens, "return_dict_in_generate": True}
        output = None
        with Stopwatch(ids.device) as watch, contextlib.suppress(KeyboardInterrupt):
            output = self.model.generate(**inputs, **options)
        if output is None:
            tokens, stats = list(streamer.ids), streamer.stats if streamer.stats.row_rounds else None
        else:
            tokens = output.sequences[0, prompt_width(self.model, ids) :].tolist()
            stats = getattr(output, "fastspec", None)
            if self.settings.cache and strategy != BEAMS and cascade is None:  # a cascade's stages have their own
                self._caches[strategy] = (output.sequences[0].tolist(), kept_cache(output))
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        answer = Answer(strategy, tokens, text, watch.seconds - streamer.spent, reused=reused, stopped=output is None)
        if strategy == BEAMS:
            answer.acceptance_length = None
        if stats is not None:
            answer.acceptance_length, answer.drafted = stats.acceptance_length, stats.drafted
            answer.accepted = stats.accepted
        if cascade is not None:
            _judge(answer, cascade, () if output is None else output.fastspec.explanations)
        return answer

    def keep(self, turn: ChatTurn) -> None:
        """Make a turn part of the conversation, which goes on from its first answer, if that has a token."""
        if not turn.answers or not turn.answers[0].tokens:
            return
        self.turns.append(turn)
        said = ("user", turn.prompt), ("assistant", turn.answers[0].text)
        self.conversation += [{"role": role, "content": text} for role, text in said]

    def restore(self, saved: SavedChat) -> dict[str, str]:
        """Go on with a chat that was saved, with its model and settings, as `reopen` does."""
        lost = self.reopen(saved.settings)
        self.turns, self.conversation = list(saved.turns), list(saved.conversation)
        return lost

    def reset(self) -> None:
        self.turns, self.conversation, self._storage = [], [], None
        self.drop_caches()

    def drop_caches(self) -> None:
        """Forget the keys and values of earlier turns, those that a cascade keeps too."""
        self._caches = {}
        forget_cascade(self.model)

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.settings.model,
            "device": str(self.model.device),
            "dtype": self.dtype,
            "settings": asdict(self.settings),
            "conversation": self.conversation,
            "turns": [turn.as_json() for turn in self.turns],
        }

    def _encode(self, turns: list[dict[str, str]]) -> Any:
        """Token ids [1, T] of a conversation, by the chat template, or of its texts line by line."""
        chat = self.settings.chat and self.tokenizer.chat_template is not None
        text = "\n".join(turn["content"] for turn in turns)
        ids = encode(self.tokenizer, turns if chat else text, self.model.device, chat=chat)["input_ids"]
        if ids.shape[1] == 0:
            raise Unsupported("the prompt has no tokens: write something")
        return ids

    def _options(self, strategy: str) -> dict[str, Any]:
        options = self.settings.sampling(self.model)
        if self.settings.logits_processors:
            given = (self.processors[name] for name in self.settings.logits_processors)
            options["logits_processor"] = [each() if isinstance(each, type) else each for each in given]
        config = self.model.generation_config
        if config.pad_token_id is None:  # else transformers says on every call which one it takes
            ends = config.eos_token_id
            options["pad_token_id"] = ends[0] if isinstance(ends, list) else (0 if ends is None else ends)
        if strategy == BEAMS:
            return {**options, "num_beams": self.settings.beams, "length_penalty": self.settings.length_penalty}
        if strategy == BASELINE:
            return options
        return {**options, "assistant": self._assistant(strategy)}

    def _assistant(self, strategy: str) -> Any:
        """Value that `generate(assistant=...)` takes for a strategy, the storage that is kept for the chat in it."""
        if strategy in self.own:
            return self.own[strategy]
        config, own = self.settings.assistant(strategy), self.settings.own_storage
        if strategy != fastspec.Nasd.name or (self.settings.storage_per == "answer" and own is None):
            return config
        if self._storage is None or self.settings.storage_per == "answer":
            self._storage = storage_of(config) if own is None else self.storages[own]()
        return dataclasses.replace(config, n=None, storage=self._storage)

    def _cascade(self, strategy: str) -> fastspec.Cascade | None:
        given = self.own.get(strategy, strategy)
        models = cascade_of(self.model) if given == fastspec.Cascade.name else None
        return given if isinstance(given, fastspec.Cascade) else None if models is None else models.config

    def _warm_up(self, strategy: str, ids: Any, options: dict[str, Any]) -> None:
        """Compile and capture before the first answer with an assistant's settings is timed."""
        config = None if strategy == BASELINE or strategy in self.own else self.settings.assistant(strategy)
        kind = strategy, config, self.settings.logits_processors
        if kind in self._warm:
            return
        if config is not None:
            options = {**options, "assistant": config}
        self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=WARM_TOKENS, **options)
        self._warm.add(kind)
        if self._cascade(strategy) is not None:
            forget_cascade(self.model)

    def _past(self, strategy: str, ids: list[int]) -> tuple[Any, int]:
        """(a strategy's cache or None, tokens in it): cut to what it shares with ids, at most all but the last."""
        held, cache = self._caches.pop(strategy, ([], None))
        if cache is None or not self.settings.cache:
            return None, 0
        length = int(cache.get_seq_length())
        held, known = held[:length], ids[:-1]
        shared = first_difference(held, known)
        shared = len(known) if shared is None else shared
        if shared == 0:
            return None, 0
        if shared < length:
            try:
                cache.crop(shared - length)  # a negative number is how many tokens go
            except RuntimeError:  # a sliding window cannot be taken back: read the conversation anew
                return None, 0
        return cache, shared


def _judge(answer: Answer, cascade: fastspec.Cascade, explanations: Sequence[Explanation]) -> None:
    """Say of a cascade's answer what was decided, and whether it has to be the large model's own."""
    if cascade.mode == "adaptive":
        answer.acceptance_length = None
        answer.explanation = explanations[0] if explanations else None
        answer.exact = answer.explanation is not None and answer.explanation.stage == len(cascade.stages)
    else:
        answer.exact = cascade.mode == "lossless" or cascade.alpha == "lossless"


PARTS = {"settings": dict, "conversation": list, "turns": list}
TUPLES = ("assistants", "resources")
NAMES = ("assistants", "logits_processors")


def read_saved(path: str | Path) -> SavedChat:
    """The chat in a file that `/save` wrote. Raises Unsupported for a file that cannot be read, or is none of these."""
    place = Path(path).expanduser()
    try:
        read = parse_json(place.read_text(encoding="utf-8"))
        missing = [name for name, kind in PARTS.items() if not isinstance(read.get(name), kind)]
        if missing:
            raise ValueError(f"it has no {' and no '.join(missing)}")
        conversation = [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in read["conversation"]]
        return SavedChat(_settings(read["settings"]), conversation, [_turn(turn) for turn in read["turns"]])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        told = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise Unsupported(f"{place} is no chat that /save wrote: {told}") from error


def _settings(read: dict[str, Any]) -> Settings:
    for name, kind in (("model", str), *((name, list) for name in TUPLES)):
        if not isinstance(read[name], kind):
            raise TypeError(f"{name} is {read[name]!r}")
    older = chat_settings.COMMAND_FIELDS  # names of older files, None for a default
    given = {name: value for name, value in read.items() if name not in older}
    given |= {name: tuple(map(str, read[name])) for name in NAMES if name in read}
    given["resources"] = tuple((str(name), str(at)) for name, at in read["resources"])
    changes = {str(name): value for name, value in given.pop("given", ())}
    for name, value in ((name, read[name]) for name in older if read.get(name) is not None):
        changes |= dict.fromkeys(older[name], OLDER_STORAGES.get(value, value) if name == "storage" else value)
    return Settings(**given).with_fields(changes)


def _turn(read: dict[str, Any]) -> ChatTurn:
    return ChatTurn(str(read["prompt"]), _settings(read["settings"]), [_answer(answer) for answer in read["answers"]])


def _answer(read: dict[str, Any]) -> Answer:
    """Fields that `Answer.as_json` was made of; its other figures follow from these."""
    told = read["explanation"]
    visits = [Visit(**{**visit, "quality": tuple(visit["quality"])}) for visit in told["visits"]] if told else []
    given = {field.name: read[field.name] for field in fields(Answer)}
    return Answer(**{**given, "explanation": Explanation(tuple(visits)) if told else None})
