"""A conversation with a patched model: prompts in, one answer per strategy out."""

from __future__ import annotations

import inspect
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import fastspec
from fastspec.chat.settings import PLAIN, Settings
from fastspec.errors import Unsupported

BEAMS = "beam search"
WARM_TOKENS = 4


@dataclass
class Answer:
    """One strategy's answer: new tokens, wall-clock seconds (prefill included, printing not), what was drafted and accepted."""

    strategy: str
    tokens: list[int]
    text: str
    seconds: float
    acceptance_length: float = 1.0
    drafted: int = 0
    accepted: int = 0
    reused: int = 0
    """Tokens of the prompt that came from the cache of earlier turns."""
    stopped: bool = False

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0


@dataclass
class Turn:
    """One prompt and its answers. `settings` are those that it was answered with."""

    prompt: str
    settings: Settings
    answers: list[Answer] = field(default_factory=list)

    def identical(self, answer: Answer) -> bool | None:
        """Whether an answer has the first one's tokens; None where they need not agree (sampling, beam search, stopped, the first)."""
        first = self.answers[0]
        if answer is first or not self.settings.greedy or BEAMS in (first.strategy, answer.strategy) or first.stopped or answer.stopped:
            return None
        return answer.tokens == first.tokens

    def as_json(self) -> dict[str, Any]:
        answers = [
            {
                **asdict(answer),
                "tokens_per_second": round(answer.tokens_per_second, 2),
                "acceptance_length": round(answer.acceptance_length, 3),
                "identical": self.identical(answer),
            }
            for answer in self.answers
        ]
        return {"prompt": self.prompt, "settings": asdict(self.settings), "answers": answers}


class Chat:
    """A model that `fastspec.patch` has patched, its tokenizer, the settings, and what was said.

    `own` maps names to assistants of your own (objects of the `Decoding` protocol), which then are strategies like the others.
    """

    def __init__(self, model: Any, tokenizer: Any, settings: Settings, own: dict[str, Any] | None = None) -> None:
        self.model, self.tokenizer, self.settings, self.own = model, tokenizer, settings, own or {}
        self.turns: list[Turn] = []
        self.conversation: list[dict[str, str]] = []
        self.over = False
        self._caches: dict[str, tuple[list[int], Any]] = {}  # strategy -> the tokens in its cache, the cache
        self._warm: set[str] = set()

    @classmethod
    def open(cls, settings: Settings) -> Chat:
        """Load the settings' model, patch it and check the assistants. Raises what loading and patching raise."""
        model, tokenizer = _load(settings)
        chat = cls(model, tokenizer, settings)
        for name in settings.assistants:
            chat.check(name)
        return chat

    def reopen(self, settings: Settings) -> list[str]:
        """Load and patch what changed settings name, and drop the old model; returns the assistants that it can no longer have.

        The conversation goes on. Where loading fails, everything is as it was.
        """
        if settings.model == self.settings.model:
            before = self.settings
            fastspec.unpatch(self.model)
            try:
                _patch(self.model, settings)
            except BaseException:  # an interrupt too must leave the model patched as it was
                _patch(self.model, before)
                raise
        else:
            self.model, self.tokenizer = _load(settings)
        self.settings = settings
        self._caches.clear()
        self._warm.clear()
        kept = tuple(name for name in settings.assistants if self._has(name))
        self.settings = settings.replace(assistants=kept or ("autoregressive",))
        return [name for name in settings.assistants if name not in kept]

    @property
    def dtype(self) -> str:
        """The model's dtype by name."""
        return str(self.model.dtype).removeprefix("torch.")

    def strategies(self) -> list[str]:
        """What answers a prompt, in turn."""
        return [*self.settings.assistants, *([BEAMS] if self.settings.beams > 1 else [])]

    def known(self) -> list[str]:
        """Every assistant by name, whether it has what it needs or not."""
        from fastspec.patches.assistants import NAMES

        return [PLAIN, *NAMES, *self.own]

    def check(self, name: str) -> None:
        """Raise Unsupported for an assistant that is unknown or lacks its resource."""
        if name not in self.known():
            raise Unsupported(f"assistant {name!r} is unknown: accepted are {', '.join(self.known())}")
        if name == PLAIN or name in self.own:
            return
        from fastspec.patches.assistants import resolve
        from fastspec.patches.session import session_of

        session = session_of(self.model)
        if session is None:
            raise Unsupported(f"this {type(self.model).__name__} is not patched: fastspec.patch(model) comes before Chat(model, ...)")
        try:
            resolve(self.settings.assistant(name), session.resources, self.model)
        except Unsupported as error:
            if name in session.resources or name not in resource_names():
                raise
            raise Unsupported(f"{error}; in the chat: /resource {name} SOURCE") from error

    def _has(self, name: str) -> bool:
        try:
            self.check(name)
        except Unsupported:
            return False
        return True

    def answer(self, prompt: str, strategy: str, streamer: Any) -> Answer:
        """The answer of one strategy to the conversation and a further prompt.

        `streamer` is a `view.AnswerStreamer`; an interrupt (Ctrl-C) ends the answer with what it was handed. Its display time does not
        count. What `generate` refuses or raises comes through, and the conversation stays as it was.
        """
        import torch

        ids = self._encode([*self.conversation, {"role": "user", "content": prompt}])
        options = self._options(strategy)
        if strategy != BEAMS:
            self._warm_up(strategy, ids, options)
            options["streamer"] = streamer
        cache, reused = self._past(strategy, ids[0].tolist())
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **({"past_key_values": cache} if cache else {})}
        if self.settings.seed is not None:
            torch.manual_seed(self.settings.seed)
        _wait(ids)
        start = time.perf_counter()
        try:
            output = self.model.generate(**inputs, max_new_tokens=self.settings.max_new_tokens, return_dict_in_generate=True, **options)
            tokens, stats, stopped = output.sequences[0, ids.shape[1] :].tolist(), getattr(output, "fastspec", None), False
        except KeyboardInterrupt:
            tokens, stats, stopped = list(streamer.ids), streamer if streamer.rounds else None, True
        _wait(ids)
        seconds = time.perf_counter() - start - streamer.spent
        if not stopped and self.settings.cache and strategy != BEAMS:
            self._caches[strategy] = (output.sequences[0].tolist(), output.past_key_values)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        answer = Answer(strategy, tokens, text, seconds, reused=reused, stopped=stopped)
        if stats is not None:
            answer.acceptance_length, answer.drafted, answer.accepted = stats.acceptance_length, stats.drafted, stats.accepted
        return answer

    def keep(self, turn: Turn) -> None:
        """Make a turn part of the conversation, which goes on from its first answer. A turn stopped before its first token is dropped."""
        if not turn.answers or not turn.answers[0].tokens:
            return
        self.turns.append(turn)
        self.conversation += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": turn.answers[0].text}]

    def reset(self) -> None:
        """Forget what was said, and the caches with it."""
        self.turns, self.conversation, self._caches = [], [], {}

    def drop_caches(self) -> None:
        """Forget the keys and values of earlier turns."""
        self._caches = {}

    def as_json(self) -> dict[str, Any]:
        """Settings, conversation and statistics, ready for `json.dumps`."""
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
        if self.settings.chat and self.tokenizer.chat_template is not None:
            encoded = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        else:
            encoded = self.tokenizer("\n".join(turn["content"] for turn in turns), return_tensors="pt")
        if encoded["input_ids"].shape[1] == 0:
            raise Unsupported("the prompt has no tokens: write something")
        return encoded["input_ids"].to(self.model.device)

    def _options(self, strategy: str) -> dict[str, Any]:
        options = self.settings.sampling(self.model)
        config = self.model.generation_config
        if config.pad_token_id is None:  # else transformers says on every call which one it takes
            ends = config.eos_token_id
            options["pad_token_id"] = ends[0] if isinstance(ends, list) else (0 if ends is None else ends)
        if strategy == BEAMS:
            return {**options, "num_beams": self.settings.beams}
        if strategy == PLAIN:
            return options
        return {**options, "assistant": self.own.get(strategy) or self.settings.assistant(strategy)}

    def _warm_up(self, strategy: str, ids: Any, options: dict[str, Any]) -> None:
        """A few tokens ahead of a strategy's first answer, so that its seconds do not hold what is done once."""
        import torch

        if strategy not in self._warm:
            self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=WARM_TOKENS, **options)
            self._warm.add(strategy)

    def _past(self, strategy: str, ids: list[int]) -> tuple[Any, int]:
        """A strategy's cache cut to what it shares with ids, at most all but the last token -> cache or None, tokens in it."""
        held, cache = self._caches.pop(strategy, ([], None))
        if cache is None or not self.settings.cache:
            return None, 0
        length = int(cache.get_seq_length())
        pairs = zip(held[:length], ids[:-1], strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(length, len(ids) - 1))
        if shared == 0:
            return None, 0
        if shared < length:
            try:
                cache.crop(shared - length)  # a negative number is how many tokens go
            except RuntimeError:  # a sliding window cannot be taken back: read the conversation anew
                return None, 0
        return cache, shared


def resource_names() -> list[str]:
    """The assistants that `fastspec.patch` takes a resource for."""
    return [name for name in inspect.signature(fastspec.patch).parameters if name not in ("model", "backend")]


def _load(settings: Settings) -> tuple[Any, Any]:
    """The settings' model, patched, and its tokenizer; bf16 on CUDA, fp32 on the CPU."""
    import torch

    from fastspec.models import load_model

    model, tokenizer = load_model(settings.model, "cuda" if torch.cuda.is_available() else "cpu")
    _patch(model, settings)
    return model, tokenizer


def _patch(model: Any, settings: Settings) -> None:
    from fastspec.models import load_model

    given: dict[str, Any] = dict(settings.resources)
    for name, source in settings.resources:
        if name not in resource_names():
            raise Unsupported(f"{name!r} takes no resource: accepted are {', '.join(resource_names())}")
        if name == "speculative":
            given[name] = load_model(source, model.device.type, model.dtype)[0]
    fastspec.patch(model, **given)


def _wait(ids: Any) -> None:
    if ids.is_cuda:
        import torch

        torch.cuda.synchronize()
