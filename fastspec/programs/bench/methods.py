"""Methods of a bench: which can be measured, on which instance of the model, and what drafts for them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastspec.config import Speculative
from fastspec.errors import Unsupported
from fastspec.models import SHIPPED, load_draft
from fastspec.programs.bench.prompts import Row, Say
from fastspec.programs.compare import BASELINE

LOOKUP, ASSISTED, COMPILED = "prompt-lookup", "assisted", "static-compile"
PEERS = (BASELINE, LOOKUP, ASSISTED, COMPILED)
"""Methods of transformers: plain `generate`, n-gram lookup, a draft model or early exit, a static cache compiled."""
ENGINES = ("vllm",)
"""Other libraries, which answer in processes of their own."""
LOOKUP_TOKENS = 10
HEAD, DRAFT = "--head", "--draft-model or --early-exit"
SUPPLIED = {"eagle3": HEAD, "eagle2": HEAD, "eagle": HEAD, "speculative": DRAFT, ASSISTED: DRAFT}
"""The options that give a method what it needs."""
READERS = {"eagle3": ("eagle3",), "eagle": ("eagle", "eagle2")}
"""Kind of head -> the assistants that read it."""


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
    """Drafters of a run: heads by assistant, and for `speculative` and `assisted` a draft model or the target's first
    layers; as `resources` of `fastspec.patch`, and as options of transformers' `assisted` generation, empty where
    nothing drafts."""

    heads: dict[str, str]
    draft_model: str | None
    early_exit: int | None
    resources: dict[str, Any]
    assisted: dict[str, Any]

    def assistant(self, name: str) -> Any:
        """The argument `assistant=` of a method."""
        exits = name == Speculative.name and self.early_exit is not None
        return Speculative(early_exit=self.early_exit) if exits else name

    def of(self, name: str) -> Row:
        """Columns that say what drafts for a method, None for what it does not use."""
        drafts = name in (Speculative.name, ASSISTED)
        model, early = (self.draft_model, self.early_exit) if drafts else (None, None)
        return {"head": self.heads.get(name), "draft_model": model, "early_exit": early}


def read_drafters(
    heads: Sequence[str] | None,
    draft_model: str | None,
    early_exit: int | None,
    model: str,
    target: Any,
    tokenizer: Any,
) -> Drafters:
    """Drafters for a target named `model`; without `heads` those that ship for it. Raises Unsupported for two heads
    of one kind, both a draft model and an early exit, and one that the target has not."""
    from fastspec.patches.api import check_assistant

    found = read_heads(list(dict.fromkeys(source for _, source in SHIPPED.get(model, ()))) if heads is None else heads)
    resources: dict[str, Any] = dict(found)
    assisted: dict[str, Any] = {}
    if early_exit is not None:
        if draft_model is not None:
            raise Unsupported(
                "--draft-model and --early-exit both say what drafts for speculative and assisted: give one of them"
            )
        check_assistant(Speculative(early_exit=early_exit), target)
        assisted = {"assistant_early_exit": early_exit}
    elif draft_model is not None:
        given = resources[Speculative.name] = load_draft(draft_model, target, tokenizer)
        draft, *both = given if isinstance(given, tuple) else (given,)
        assisted = dict(zip(("assistant_tokenizer", "tokenizer"), both, strict=False))
        assisted["assistant_model"] = twin(draft)
    return Drafters(found, draft_model, early_exit, resources, assisted)


def read_heads(sources: Sequence[str]) -> dict[str, str]:
    """The assistants that read each head. Raises Unsupported for two heads of one kind."""
    from fastspec.patches.assistants.heads import inspect_head

    found: dict[str, str] = {}
    for source in sources:
        names = READERS[inspect_head(source).config.kind]
        if names[0] in found:
            raise Unsupported(
                f"--head {found[names[0]]} and --head {source} are both heads of {' and '.join(names)}: give one of "
                "them"
            )
        found |= dict.fromkeys(names, source)
    return found


def twin(model: Any) -> Any:
    """A second instance of a model on the same parameters: what is patched on one is not on the other."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def check_names(methods: Sequence[str] | None) -> None:
    """Raises Unsupported for a method that does not exist."""
    from fastspec.patches.api import ASSISTANTS

    accepted = [name for name in (*PEERS, *ASSISTANTS) if name != "cascade"]
    for name in methods or ():
        if name == "cascade":
            raise Unsupported("a cascade answers with several models, and is measured by fastspec cascade evaluate")
        if name not in accepted:
            raise Unsupported(f"method {name!r} is unknown: accepted are {', '.join(accepted)}")


def choose(
    methods: Sequence[str] | None, plain: Any, target: Any, drafters: Drafters, batch: int, say: Say
) -> list[Method]:
    """Methods to measure, the baseline first. One that lacks something is left out with a note, or refused if it was
    named."""
    from fastspec.patches.api import ASSISTANTS, check_assistant

    options: dict[str, dict[str, Any]] = {
        BASELINE: {},
        LOOKUP: {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
        ASSISTED: drafters.assisted,
        COMPILED: {"cache_implementation": "static"},  # whose forward transformers compiles on CUDA by itself
    }
    lacking: dict[str, str] = {}
    if not drafters.assisted:
        lacking[ASSISTED] = f"it needs {SUPPLIED[ASSISTED]}"
    if batch > 1:
        lacking |= dict.fromkeys((LOOKUP, ASSISTED), f"transformers takes one prompt at a time here, not {batch}")
    if plain.device.type != "cuda":
        lacking[COMPILED] = "measured on CUDA only; elsewhere torch.compile needs a C++ compiler"
    for name in ASSISTANTS:
        options[name] = {"assistant": drafters.assistant(name)}
        try:
            check_assistant(options[name]["assistant"], target)
        except Unsupported as error:
            lacking[name] = f"{error} (here: {SUPPLIED[name]})" if name in SUPPLIED else str(error)
    chosen = []
    for name in dict.fromkeys((BASELINE, *(methods or (*PEERS, *ASSISTANTS)))):
        if name not in lacking:
            chosen.append(Method(name, plain if name in PEERS else target, options[name], drafters.of(name)))
        elif methods and name != COMPILED:
            raise Unsupported(f"method {name!r} cannot be measured: {lacking[name]}")
        else:
            say(f"left out: {name}: {lacking[name]}")
    return chosen
