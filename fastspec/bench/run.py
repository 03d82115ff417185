"""The run: which methods can be measured, and every prompt answered by all of them.

A prompt is answered by one method after another before the next prompt comes, so that a machine's slow spell hits all of them. The peers
run on an instance of the model that is never patched; it shares its weights with the one that is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastspec
from fastspec.bench.device import Floor, environment
from fastspec.bench.measure import ASSISTED, BASELINE, COMPILED, LOOKUP, LOOKUP_TOKENS, PEERS, Method, ask, on_part
from fastspec.bench.prompts import Prompt, Row, Say, encode_rows, make_batches, read_rows
from fastspec.errors import Unsupported
from fastspec.models import SMOLLM2, load_model

if TYPE_CHECKING:
    from fastspec.generation.clock import Profile

WARM_UP_TOKENS = 8
"""Of a warm-up on the CPU; on CUDA it is as long as a timed call, for the sizes that are compiled and captured."""


def run_bench(
    *,
    prompts: Sequence[str | Path],
    model: str = SMOLLM2,
    head: str | None = None,
    draft_model: str | None = None,
    methods: Sequence[str] | None = None,
    each: int | None = None,
    max_new_tokens: int = 128,
    dtype: str | None = None,
    batch: int = 1,
    say: Say | None = None,
    on_row: Callable[[Row], object] | None = None,
    on_profile: Callable[[str, Profile], object] | None = None,
) -> list[Row]:
    """Answer the prompts greedily by every method, and return one row per method and batch of prompts; see docs/performance.md.

    `prompts` are jsonl files in Spec-Bench's form, of which the first `each` prompts of every category are taken. `model`, `head` and
    `draft_model` are names as in `load_model` and `fastspec.patch`; SmolLM2 brings its head. `methods` are names of assistants and of
    `PEERS`; without them all that have what they need. "transformers" is always measured. `dtype` ("float32", "bfloat16", "float16")
    defaults to fp32 on the CPU and bf16 on CUDA. `say` is told of what is left out, and `on_row` is given every row as it comes.
    `on_profile` is given the name of every assistant among the methods and the times of its rounds, from one more call on the first batch
    of prompts after all else is measured.

    A row's `floor_share` is the time of reading the weights once, at the bandwidth measured here, over the time of a round. Loading and
    one warm-up call per method, on the longest prompts, are not timed. Raises Unsupported for bad arguments, an unknown method and one
    that was named and lacks its resource, and whatever loading and patching raise.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("batch", batch), ("each", 1 if each is None else each)):
        if value < 1:
            raise Unsupported(f"{name} must be at least 1, not {value}")
    say = say or (lambda line: None)
    asked = [row for path in prompts for row in read_rows(path)]
    if not asked:
        raise Unsupported("there are no prompts in " + (", ".join(map(str, prompts)) or "an empty list of files"))
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    check_names(methods)
    target, tokenizer = load_model(model, device, getattr(torch, dtype) if dtype else None)
    draft = load_model(draft_model, device, target.dtype)[0] if draft_model else None
    plain, plain_draft = twin(target), twin(draft) if draft is not None else None
    parts = make_batches(encode_rows(asked, tokenizer, target, each, max_new_tokens, say), batch)
    head = SMOLLM2 if head is None and model == SMOLLM2 else head
    fastspec.patch(target, **resources(head, draft, target))
    try:
        chosen = choose(methods, plain, target, plain_draft, batch, say)
        floor = Floor.of(target)
        names = {"model": model, "head": head, "draft_model": draft_model, "max_new_tokens": max_new_tokens}
        where = names | environment(target) | floor.row
        say(f"{model} on {where['device']}, {where['dtype']}, threads: {where['threads']}: {len(parts)} x {batch} prompts, greedy")
        warm_up(chosen, parts, max_new_tokens if device == "cuda" else min(max_new_tokens, WARM_UP_TOKENS), say)
        rows = []
        for number, part in enumerate(parts, 1):
            say(f"{number}/{len(parts)}: {part[0].category}")
            for row in on_part(part, chosen, tokenizer, max_new_tokens, floor.milliseconds):
                rows.append(row | where)
                if on_row is not None:
                    on_row(rows[-1])
        if on_profile is not None:
            for method in chosen:
                if not method.peer:
                    say(f"profile: {method.name}")
                    with fastspec.profile(target) as profile:
                        ask(method, parts[0], max_new_tokens)
                    on_profile(method.name, profile)
        return rows
    finally:
        fastspec.unpatch(target)


def warm_up(methods: list[Method], parts: list[list[Prompt]], tokens: int, say: Say) -> None:
    """One call of every method on the longest prompts, so that buffers have their size and what is compiled is compiled."""
    longest = max(parts, key=lambda part: max(len(prompt.ids) for prompt in part))
    for method in methods:
        say(f"warm-up: {method.name}")
        ask(method, longest, tokens)


def twin(model: Any) -> Any:
    """A second instance of a model on the same parameters: what is patched on one is not on the other."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def resources(head: str | None, draft: Any, target: Any) -> dict[str, Any]:
    """What `fastspec.patch` is given, by assistant: a head for those that read its kind, the draft model."""
    from fastspec.patches.heads import load_head

    given = {} if draft is None else {"speculative": draft}
    if head is not None:
        loaded = load_head(head, target)
        given |= dict.fromkeys(("eagle3",) if loaded.config.kind == "eagle3" else ("eagle", "eagle2"), loaded)
    return given


def check_names(methods: Sequence[str] | None) -> None:
    """Raises Unsupported for a method that does not exist."""
    from fastspec.patches.assistants import NAMES

    for name in methods or ():
        if name not in PEERS and name not in NAMES:
            raise Unsupported(f"method {name!r} is unknown: accepted are {', '.join((*PEERS, *NAMES))}")


def choose(methods: Sequence[str] | None, plain: Any, target: Any, plain_draft: Any, batch: int, say: Say) -> list[Method]:
    """The methods to measure, the baseline first. What lacks something is left out with a note, or refused if it was named."""
    from fastspec.patches.assistants import NAMES, resolve
    from fastspec.patches.session import session_of

    options = {
        BASELINE: {}, LOOKUP: {"prompt_lookup_num_tokens": LOOKUP_TOKENS}, ASSISTED: {"assistant_model": plain_draft},
        COMPILED: {"cache_implementation": "static"},  # on CUDA transformers compiles the forward of a static cache by itself
    }  # fmt: skip
    lacking: dict[str, str] = {}
    if batch > 1:
        lacking = dict.fromkeys((LOOKUP, ASSISTED), f"transformers takes one prompt at a time here, not {batch}")
    if plain_draft is None:
        lacking[ASSISTED] = "it needs --draft-model"
    if plain.device.type != "cuda":
        lacking[COMPILED] = "measured on CUDA only; elsewhere torch.compile needs a C++ compiler"
    session = session_of(target)
    for name in NAMES:
        try:
            resolve(name, session.resources if session else {}, target)
        except Unsupported as error:
            lacking[name] = f"{error} (here: --head or --draft-model)"
    chosen = []
    for name in dict.fromkeys((BASELINE, *(methods or (*PEERS, *NAMES)))):
        if name not in lacking:
            chosen.append(Method(name, plain, options[name]) if name in PEERS else Method(name, target, {"assistant": name}))
        elif methods and name != COMPILED:
            raise Unsupported(f"method {name!r} cannot be measured: {lacking[name]}")
        else:
            say(f"left out: {name}: {lacking[name]}")
    return chosen
