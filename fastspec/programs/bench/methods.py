"""The methods of a bench: which can be measured, on which instance of the model, and what drafts for them.

The peers run on an instance of the model that is never patched; it shares its weights with the one that is.
"""

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
"""What transformers itself offers: plain `generate`, n-gram lookup, a draft model or early exit, a static cache with a
compiled forward."""
ENGINES = ("vllm",)
"""Other libraries, which answer in processes of their own."""
LOOKUP_TOKENS = 10
HEAD, DRAFT = "--head", "--draft-model or --early-exit"
SUPPLIED = {"eagle3": HEAD, "eagle2": HEAD, "eagle": HEAD, "speculative": DRAFT, ASSISTED: DRAFT}
"""The options that give a method what it needs."""
READERS = {"eagle3": ("eagle3",), "eagle": ("eagle", "eagle2")}
"""Kind of head -> the assistants that read it."""


def is_peer(name: str) -> bool:
    """Whether a row's method is somebody else's."""
    return name in PEERS or name.startswith(ENGINES)


@dataclass(frozen=True, slots=True)
class Method:
    """A name of the table, the instance that generates, what `generate` is given, and what drafts; a peer's instance is
    not patched."""

    name: str
    model: Any
    options: dict[str, Any]
    drafted_by: Row

    @property
    def peer(self) -> bool:
        return self.name in PEERS

    @property
    def compiles(self) -> bool:
        """Whether the first calls with prompts of a size compile kernels or capture graphs on CUDA."""
        return not self.peer or self.name == COMPILED


@dataclass(frozen=True, slots=True)
class Drafters:
    """What drafts in a run: heads by assistant, and for `speculative` and `assisted` a draft model or the target's
    first layers.

    `resources` is what `fastspec.patch` is given, and `assisted` what transformers' assisted generation is, empty where
    nothing drafts.
    """

    heads: dict[str, str]
    draft_model: str | None
    early_exit: int | None
    resources: dict[str, Any]
    assisted: dict[str, Any]

    def assistant(self, name: str) -> Any:
        """What `assistant=` is given."""
        return (
            Speculative(early_exit=self.early_exit)
            if name == Speculative.name and self.early_exit is not None
            else name
        )

    def of(self, name: str) -> Row:
        """What drafts for a method, as its rows say it; None for what it does not use."""
        drafts = {"draft_model": self.draft_model, "early_exit": self.early_exit}
        return {"head": self.heads.get(name)} | (
            drafts if name in (Speculative.name, ASSISTED) else dict.fromkeys(drafts)
        )


def read_drafters(
    heads: Sequence[str] | None,
    draft_model: str | None,
    early_exit: int | None,
    model: str,
    target: Any,
    tokenizer: Any,
) -> Drafters:
    """What drafts for a target named `model`; without `heads` those that ship for it. Raises Unsupported for two heads
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
        assisted = {
            "assistant_model": twin(draft),
            **dict(zip(("assistant_tokenizer", "tokenizer"), both, strict=False)),
        }
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
    """The methods to measure, the baseline first. What lacks something is left out with a note, or refused if it was
    named."""
    from fastspec.patches.api import ASSISTANTS

    options = {
        BASELINE: {},
        LOOKUP: {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
        ASSISTED: drafters.assisted,
        COMPILED: {
            "cache_implementation": "static"
        },  # on CUDA transformers compiles the forward of a static cache by itself
    }
    options |= {name: {"assistant": drafters.assistant(name)} for name in ASSISTANTS}
    lacking = find_lacking(plain, target, options, batch)
    chosen = []
    for name in dict.fromkeys((BASELINE, *(methods or (*PEERS, *ASSISTANTS)))):
        if name not in lacking:
            chosen.append(Method(name, plain if name in PEERS else target, options[name], drafters.of(name)))
        elif methods and name != COMPILED:
            raise Unsupported(f"method {name!r} cannot be measured: {lacking[name]}")
        else:
            say(f"left out: {name}: {lacking[name]}")
    return chosen


def find_lacking(plain: Any, target: Any, options: dict[str, dict[str, Any]], batch: int) -> dict[str, str]:
    """Why a method cannot be measured, by its name."""
    from fastspec.patches.api import ASSISTANTS, check_assistant

    lacking: dict[str, str] = {}
    if not options[ASSISTED]:
        lacking[ASSISTED] = f"it needs {SUPPLIED[ASSISTED]}"
    if batch > 1:
        lacking |= dict.fromkeys((LOOKUP, ASSISTED), f"transformers takes one prompt at a time here, not {batch}")
    if plain.device.type != "cuda":
        lacking[COMPILED] = "measured on CUDA only; elsewhere torch.compile needs a C++ compiler"
    for name in ASSISTANTS:
        try:
            check_assistant(options[name]["assistant"], target)
        except Unsupported as error:
            lacking[name] = f"{error} (here: {SUPPLIED[name]})" if name in SUPPLIED else str(error)
    return lacking
