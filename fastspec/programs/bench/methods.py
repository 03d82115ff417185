"""Prompts and methods of a bench: files in Spec-Bench's form, the methods that can be measured, and what drafts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastspec.config import Speculative
from fastspec.errors import Unsupported, accepted
from fastspec.models import SHIPPED, load_config, load_draft
from fastspec.patches.api import ASSISTANTS, check_assistant
from fastspec.patches.hf.config_fields import position_limit
from fastspec.programs.compare import BASELINE
from fastspec.programs.heads import read_heads
from fastspec.programs.texts import encode, read_prompts

BUNDLED = Path(__file__).with_name("prompts.jsonl")
"""Eight prompts of six kinds, written for fastspec: what is asked where no prompts are given."""
Row = dict[str, Any]
Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt as token ids, with the category that it is counted in."""

    category: str
    id: str
    ids: list[int]


def read_rows(path: str | Path) -> list[Row]:
    """Rows of a jsonl file in Spec-Bench's form: `turns`, of which the first is asked, or `prompt`; `category` (else
    the file's name) and `id` (else the line's number)."""
    stem = Path(path).stem
    return [
        {"category": str(row.get("category", stem)), "id": str(row.get("id", number)), "text": text}
        for number, row, text in read_prompts(path)
    ]


def rows_of(texts: Sequence[str]) -> list[Row]:
    """Rows of prompts that were given as texts, all of one category."""
    return [{"category": "prompt", "id": str(number), "text": text} for number, text in enumerate(texts, 1)]


def encode_rows(
    rows: list[Row], tokenizer: Any, model: Any, each: int | None, max_new_tokens: int, say: Say
) -> list[BenchPrompt]:
    """The first `each` prompts of every category that the model has positions for, by category."""
    bound = position_limit(model.config)
    found: dict[str, list[BenchPrompt]] = {}
    left = 0
    for row in rows:
        group = found.setdefault(row["category"], [])
        if each is not None and len(group) >= each:
            continue
        ids = encode(tokenizer, row["text"])["input_ids"][0].tolist()
        most = max(len(ids), max_new_tokens) if model.config.is_encoder_decoder else len(ids) + max_new_tokens
        if ids and (bound is None or most <= bound):
            group.append(BenchPrompt(row["category"], row["id"], ids))
        else:
            left += 1
    no_room = f"empty or with no room for {max_new_tokens} new tokens in {bound} positions"
    if left:
        say(f"left out: {left} prompts, {no_room}")
    if not any(found.values()):
        raise Unsupported(f"no prompt is left: each is {no_room}")
    return [prompt for group in found.values() for prompt in group]


def make_batches(prompts: list[BenchPrompt], size: int) -> list[list[BenchPrompt]]:
    """At most `size` prompts of one category at a time."""
    groups: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return [group[start : start + size] for group in groups.values() for start in range(0, len(group), size)]


LOOKUP, ASSISTED, COMPILED = "prompt-lookup", "assisted", "static-compile"
PEERS = (BASELINE, LOOKUP, ASSISTED, COMPILED)
"""Methods of transformers: plain `generate`, n-gram lookup, a draft model or early exit, a static cache compiled."""
MEASURED = tuple(name for name in ASSISTANTS if name != "cascade")
"""Assistants that are methods: a cascade answers with several models."""
ENGINES = ("vllm",)
"""Other libraries, which answer in processes of their own."""
LOOKUP_TOKENS = 10
HEAD, DRAFT = "--head", "--draft-model or --early-exit"
SUPPLIED = {"eagle3": HEAD, "eagle2": HEAD, "eagle": HEAD, "speculative": DRAFT, ASSISTED: DRAFT}
"""The options that give a method what it needs."""


def is_peer(name: str) -> bool:
    """True where a row's method is somebody else's."""
    return name in PEERS or name.startswith(ENGINES)


@dataclass(frozen=True, slots=True)
class Method:
    """Method by name: the instance that generates, the options of `generate`, and what drafts. A peer's instance is not
    patched and shares its weights with the one that is."""

    name: str
    model: Any
    options: dict[str, Any]
    drafted_by: Row

    @property
    def peer(self) -> bool:
        return self.name in PEERS

    @property
    def compiles(self) -> bool:
        """True where the first calls with prompts of a size compile kernels or capture graphs on CUDA."""
        return not self.peer or self.name == COMPILED


@dataclass(frozen=True, slots=True)
class Drafters:
    """Drafters of a run: heads by method ("eagle3", or "eagle3:NAME" of a head with a name), and for `speculative` and
    `assisted` a draft model or the target's first layers, as `resources` of `fastspec.patch` and as options of
    transformers' `assisted` generation, empty where nothing drafts."""

    heads: dict[str, str]
    draft_model: str | None
    early_exit: int | None
    resources: dict[str, Any] = field(default_factory=dict)
    assisted: dict[str, Any] = field(default_factory=dict)

    def assistant(self, name: str) -> Any:
        exits = name == Speculative.name and self.early_exit is not None
        return Speculative(early_exit=self.early_exit) if exits else name.partition(":")[0]

    def names(self, assistant: str) -> list[str]:
        """The methods of an assistant: its name, where a head has none, and one for every head that has."""
        named = [name for name in self.heads if name.startswith(f"{assistant}:")]
        return named if named and assistant not in self.heads else [assistant, *named]

    def patching(self) -> dict[str, dict[str, str]]:
        """Name of a head ("" without one) -> what an instance of the model is patched with, heads by assistant."""
        found: dict[str, dict[str, str]] = {"": {}}
        for method, source in self.heads.items():
            assistant, _, name = method.partition(":")
            found.setdefault(name, {})[assistant] = source
        return found

    def of(self, name: str) -> Row:
        """Columns that say what drafts for a method, None for what it does not use."""
        drafts = name in (Speculative.name, ASSISTED)
        model, early = (self.draft_model, self.early_exit) if drafts else (None, None)
        return {"head": self.heads.get(name), "draft_model": model, "early_exit": early}

    def loaded(self, target: Any, tokenizer: Any) -> Drafters:
        """The same with the draft model, for this target. Raises Unsupported for an early exit that it has not."""
        if self.early_exit is not None:
            check_assistant(Speculative(early_exit=self.early_exit), target)
            return replace(self, assisted={"assistant_early_exit": self.early_exit})
        if self.draft_model is None:
            return self
        given = load_draft(self.draft_model, target, tokenizer)
        draft, *both = given if isinstance(given, tuple) else (given,)
        assisted = dict(zip(("assistant_tokenizer", "tokenizer"), both, strict=False)) | {
            "assistant_model": twin(draft)
        }
        return replace(self, resources={Speculative.name: given}, assisted=assisted)


def twin(model: Any) -> Any:
    """A second instance of a model on the same parameters: what is patched on one is not on the other."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def read_drafters(
    heads: Sequence[str] | None,
    draft_model: str | None,
    early_exit: int | None,
    model: str,
    methods: Sequence[str] | None = None,
) -> Drafters:
    """Drafters of a run for a target named `model`, before weights are loaded; without `heads` those that ship for it.
    Raises Unsupported and CheckpointError for a method that does not exist or lacks its drafter, two heads of one kind
    and name, a head that is none or does not fit, and what else the models' configurations tell."""
    known = (*PEERS, *MEASURED)
    for name in methods or ():
        if name == "cascade":
            raise Unsupported("a cascade answers with several models, and is measured by fastspec cascade evaluate")
        if name.partition(":")[0] not in known:
            raise Unsupported(f"method {name!r} is unknown: {accepted(name, known)}")
    if draft_model is not None and early_exit is not None:
        raise Unsupported("--draft-model and --early-exit both draft for speculative and assisted: give one of them")
    config: Any = load_config(model) if heads or early_exit is not None else None
    shipped = dict.fromkeys(source for _, source in SHIPPED.get(model, ()))
    found = read_heads(shipped if heads is None else heads, config if heads else None)
    drafters = Drafters(found, draft_model, early_exit)
    for name in methods or ():
        assistant, named, _ = name.partition(":")
        if named and name not in found:
            raise Unsupported(f"method {name!r} has no head: {accepted(name, found)}")
        needs = SUPPLIED.get(assistant)
        if (needs == DRAFT and draft_model is None and early_exit is None) or (
            needs == HEAD and not any(each in found for each in drafters.names(assistant))
        ):
            raise Unsupported(f"method {name!r} cannot be measured: it needs {needs}")
    if early_exit is not None and early_exit >= (layers := config.get_text_config().num_hidden_layers):
        raise Unsupported(f"--early-exit {early_exit}: the target has {layers} layers, so at most {layers - 1} draft")
    if draft_model is not None:
        load_config(draft_model)
    return drafters


def compiled_on_all_devices() -> Any:
    """Settings with which transformers compiles a static cache's forward on a CPU too, not on accelerators alone."""
    from transformers import CompileConfig

    config = CompileConfig()
    config._compile_all_devices = True
    return config


def choose(
    methods: Sequence[str] | None, plain: Any, patched: Mapping[str, Any], drafters: Drafters, batch: int, say: Say
) -> list[Method]:
    """Methods to measure, the baseline first; `patched` are the instances of the model by the name of their heads. One
    that lacks something is left out with a note, or refused if it was named."""
    options: dict[str, dict[str, Any]] = {
        BASELINE: {},
        LOOKUP: {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
        ASSISTED: drafters.assisted,
        COMPILED: {"cache_implementation": "static", "compile_config": compiled_on_all_devices()},
    }
    lacking: dict[str, str] = {}
    if not drafters.assisted:
        lacking[ASSISTED] = f"it needs {SUPPLIED[ASSISTED]}"
    if batch > 1:
        lacking |= dict.fromkeys((LOOKUP, ASSISTED), f"transformers takes one prompt at a time here, not {batch}")
    if plain.device.type != "cuda" and COMPILED not in (methods or ()):
        lacking[COMPILED] = "compiled on a CPU only where it is named"
    models = dict.fromkeys(PEERS, plain)
    for name in (method for each in MEASURED for method in drafters.names(each)):
        assistant, _, head = name.partition(":")
        options[name], models[name] = {"assistant": drafters.assistant(name)}, patched[head]
        try:
            check_assistant(options[name]["assistant"], patched[head])
        except Unsupported as error:
            lacking[name] = f"{error} (here: {SUPPLIED[assistant]})" if assistant in SUPPLIED else str(error)
    wanted = [  # a name stands for one method, or that of an assistant for one of each of its heads
        each
        for name in methods or (*PEERS, *MEASURED)
        for each in ([name] if name in PEERS or ":" in name else drafters.names(name))
    ]
    chosen = []
    for name in dict.fromkeys((BASELINE, *wanted)):
        if name not in lacking:
            chosen.append(Method(name, models[name], options[name], drafters.of(name)))
        elif methods:
            raise Unsupported(f"method {name!r} cannot be measured: {lacking[name]}")
        else:
            say(f"left out: {name}: {lacking[name]}")
    return chosen
