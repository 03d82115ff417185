"""patch, unpatch, patched, continuous, profile, clear_memory, and questions that programs ask about a patched model."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from torch import nn

from fastspec.cascade.config import Cascade
from fastspec.config import Assistant, BackendName, HeadBits
from fastspec.errors import PatchConflict, Unsupported
from fastspec.generation.drafters.base import Decoding
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.heads.module import EagleHead
from fastspec.generation.stats import Profile
from fastspec.patches.assistants.gemma4_assistant import gemma4_assistant
from fastspec.patches.assistants.heads import load_heads
from fastspec.patches.assistants.kept_counts import vocabularies
from fastspec.patches.assistants.mtp import load_mtp, save_with_mtp
from fastspec.patches.assistants.registry import NAMES, resolve
from fastspec.patches.assistants.smaller_heads import all_in_bits, bits_of, refuse_bits
from fastspec.patches.assistants.speculative import check_draft
from fastspec.patches.backends import choose_backend
from fastspec.patches.call.generate import generate, generate_batch, init_continuous_batching
from fastspec.patches.call.refusals import refuse_heads
from fastspec.patches.cascade.loop import CascadeModels
from fastspec.patches.cascade.open_batch import ContinuousCascade
from fastspec.patches.cascade.stages import Patching
from fastspec.patches.continuous_batch import FIRST, Continuous, open_batch
from fastspec.patches.hf.compat import device_of, drop_capturing_hooks, has_capturing_hooks, unwrapped
from fastspec.patches.hf.factory import language_model
from fastspec.patches.hf.modes import check_supported, mode_for, not_patched
from fastspec.patches.hf.tree_check import check_states
from fastspec.patches.open_turns import BatchSettings
from fastspec.patches.session import STATE, PatchSession, deep_copy, patched_session, session_of, state_before

ASSISTANTS = tuple(NAMES)
"""Names of the assistants that come with fastspec."""


def is_patched(model: Any) -> bool:
    """True between `fastspec.patch(model)` and `fastspec.unpatch(model)`."""
    return session_of(model) is not None


def resources_of(model: Any) -> dict[str, Any]:
    """The arguments of `fastspec.patch` that would patch a model as it is; empty for an unpatched model."""
    session = session_of(model)
    if session is None:
        return {}
    given = {
        name: held.as_module() if isinstance(held, BoundHead) else held for name, held in session.resources.items()
    }
    models = cascade_of(model)
    given |= {name: getattr(session, name) for name in ("backend", "exact", "stored", "head_bits")}
    return given | ({} if models is None else {Cascade.name: models.config})


def cascade_of(model: Any) -> CascadeModels | None:
    """The stages of the cascade that a model was patched with, or None."""
    session = session_of(model)
    return None if session is None else session.resources.get(Cascade.name)


def check_assistant(assistant: Any, model: Any) -> None:
    """Raise Unsupported where a model's `generate` could not have an assistant: a name, a config or an object."""
    session = session_of(model)
    resolve(assistant, {} if session is None else session.resources, model)


def has_resource(name: str, model: Any) -> bool:
    """True where a model was patched with what the assistant of this name needs."""
    session = session_of(model)
    return session is not None and name in session.resources


Source = str | Path | EagleHead | None
Model = TypeVar("Model", bound=nn.Module)


def patch(
    model: Model,
    *,
    eagle: Source = None,
    eagle2: Source = None,
    eagle3: Source = None,
    mtp: Any = None,
    speculative: Any = None,
    cascade: Cascade | None = None,
    assistant: Assistant | Literal["none"] | None = None,
    backend: BackendName = "auto",
    exact: bool | None = None,
    stored: bool | None = None,
    head_bits: HeadBits | None = None,
) -> Model:
    """Give a transformers model `generate(..., assistant=...)`, and return the same object. One that PEFT,
    `torch.compile` or `accelerate.prepare` has wrapped is patched inside its wrapper.

    - `eagle`, `eagle2`, `eagle3`: the heads of the assistants of these names: a directory, a hub id, the name of a head
      of an installed package ("smollm2-135m-instruct") or an EagleHead. The first two share a format.
    - `mtp`: the draft layer that a model's own checkpoint brings. True reads the files that the model was loaded from,
      at once; a directory or hub id is another copy. Or a Gemma 4 assistant (`google/gemma-4-*-it-assistant`), also as
      a module.
    - `speculative`: a smaller transformers model with the target's tokenizer, on its device; with another tokenizer a
      tuple `(draft_model, draft_tokenizer, tokenizer)`, the target's tokenizer last.
    - `cascade`: the smaller models of a cascade whose last stage is this model. They are patched when a call first
      needs them.
    - `assistant`: the default of every `generate` call that names none. A call that it cannot serve runs transformers'
      own, with a warning.
    - `backend`: "auto", "triton", "cpp" or "torch".
    - `exact`: every assistant gives the bits of `autoregressive`, in bfloat16 and float16 too, by kernels that sum in a
      fixed order (docs/guide/output.md). True refuses by name what has none, False takes the fast kernels, and None is
      True where that was measured to cost little: on an H100 or H200, from 1,536 channels on.
    - `stored`: assisted calls multiply quantised weights as they are stored, where their format is read
      (docs/guide/quantised.md); else such layers run by their own forward. None is True where that was measured to be
      faster and no layer's own forward rounds activations: in 16 bits on an H200.
    - `head_bits`: with 8 the weights of `eagle`, `eagle2`, `eagle3` and `mtp` heads are rounded to 8 bits, a scale for
      each line, and multiplied so. Drafts may differ, and the output is as with any drafts. 16 keeps their dtype; None
      is 8 for heads of 2,560 channels or more on an H200.

    Only this instance is changed, and nothing in its forward pass; without an assistant it does what it did. On CUDA
    and with "cpp" the weights of layers that read one input (query, key and value; gate and up) are laid one after
    another: the parameters become views, and their values, names and shapes stay.

    Raises Unsupported (the model cannot be decoded with), CheckpointError (the head is damaged or does not fit),
    PatchConflict (patched already). On any error the model is as it was.
    """
    given, model, bits = model, unwrapped(model), bits_of(head_bits)
    if session_of(model) is not None:
        raise PatchConflict(f"this {type(model).__name__} is patched already: call fastspec.unpatch(model) first")
    check_supported(model)
    heads = {"eagle": eagle, "eagle2": eagle2, "eagle3": eagle3}
    for name in (name for name, source in heads.items() if source is not None):
        refuse_heads(name, model)
    resources: dict[str, Any] = {**load_heads(heads, model)}
    if mtp is not None and mtp is not False:
        refuse_heads("mtp", model)
        resources["mtp"] = gemma4_assistant(mtp, model) or load_mtp(mtp, model)
    if bits == 8:
        refuse_bits(model, backend)
    resources = all_in_bits(resources, bits, model, backend)
    if speculative is not None:
        resources["speculative"] = check_draft(speculative, model)
    if cascade is not None:
        resources["cascade"] = cascade_models(cascade, model)
    mode = mode_for(model)
    for head in (each for each in resources.values() if isinstance(each, BoundHead) and mode.adapter is None):
        check_states(model, head.config.taps)
    choose_backend(backend, device_of(model), adapted=mode.adapter is not None)  # refuses what cannot be
    assistant = None if assistant == "none" else assistant
    if assistant is not None:
        resolve(assistant, resources, model)  # refuses one that no call could have
    session = PatchSession(backend, resources, exact, stored, bits, has_capturing_hooks(model), default=assistant)
    try:
        session.set(model, STATE, session)
        for name, method in (("generate", generate), ("__getstate__", state_before), ("__deepcopy__", deep_copy)):
            session.set(model, name, types.MethodType(method, model))
        for method in (generate_batch, init_continuous_batching):
            if hasattr(model, method.__name__):
                session.set(model, method.__name__, types.MethodType(method, model))
        if isinstance(resources.get("mtp"), BoundHead):
            session.set(model, "save_pretrained", types.MethodType(save_with_mtp, model))
        session.pack(model, mode)
        if exact:
            language_model(model, None, rows=1, capacity=1, tail=1, ops=session.ops(model, mode))
    except BaseException:  # an interrupt too must not leave the model half patched
        session.undo(force=True)
        raise
    return given


def cascade_models(config: Any, model: Any) -> CascadeModels:
    """The stages of a cascade whose last one is `model`. Raises Unsupported for what is no Cascade."""
    if not isinstance(config, Cascade):
        raise Unsupported(f"cascade={config!r} must be a fastspec.Cascade(stages=[...], ...)")
    return CascadeModels(config, model, Patching(patch, unpatch))


def unpatch(model: Model, *, force: bool = False) -> Model:
    """Undo `patch` and return the model, as it was.

    Raises PatchConflict when the model is not patched, or when someone else has written over what `patch` set; with
    `force=True` the latter is left in place, named in a warning, and the rest is undone.
    """
    given, model = model, unwrapped(model)
    session = session_of(model)
    if session is None:
        raise PatchConflict(not_patched(model, "fastspec.patch(model) comes first"))
    left = session.undo(force)
    vocabularies.let_go(model)
    if not session.captured:
        drop_capturing_hooks(model)
    if left:
        warnings.warn(f"unpatch left {', '.join(left)} as someone else had set it", stacklevel=2)
    return given


@contextmanager
def patched(
    model: Model,
    *,
    eagle: Source = None,
    eagle2: Source = None,
    eagle3: Source = None,
    mtp: Any = None,
    speculative: Any = None,
    cascade: Cascade | None = None,
    assistant: Assistant | Literal["none"] | None = None,
    backend: BackendName = "auto",
    exact: bool | None = None,
    stored: bool | None = None,
    head_bits: HeadBits | None = None,
) -> Iterator[Model]:
    """`with fastspec.patched(model, eagle3=...) as model:` patches for the block; arguments as for `patch`."""
    patch(
        model,
        eagle=eagle,
        eagle2=eagle2,
        eagle3=eagle3,
        mtp=mtp,
        speculative=speculative,
        cascade=cascade,
        assistant=assistant,
        backend=backend,
        exact=exact,
        stored=stored,
        head_bits=head_bits,
    )
    try:
        yield model
    finally:
        unpatch(model)


PromptBatch: TypeAlias = Continuous | ContinuousCascade
"""Open batch: a model's, or one of every stage of a cascade."""


def continuous(
    model: Any,
    assistant: Assistant = "eagle3",
    rows: int = 8,
    *,
    max_length: int | None = None,
    prefill_chunk: int | Literal["auto"] | None = "auto",
    narrows: bool = True,
    prefix_caching: bool | None = None,
) -> PromptBatch:
    """Decode prompts as they come, up to `rows` at a time:

        with fastspec.continuous(model, "eagle3", rows=8) as batch:
            future = batch.submit(ids, max_new_tokens=256)
            future.result()     # what model.generate(ids, max_new_tokens=256) returns

    `assistant` is what `fastspec.ContinuousBatch` takes, or "cascade" (a `fastspec.Cascade` of the patch's stages too),
    each stage of which has `rows` rows of its own in the adaptive mode. A row has room for `max_length` tokens, prompt
    and answer (None: the model's positions, 8192 at most); buffers grow as texts do. While rows decode, prompts are
    read `prefill_chunk` tokens at a time between two rounds ("auto": 1,024 on CUDA, 256 elsewhere), and four times as
    many of whole prompts while more wait than rows decode. None: any number, for work of which nobody waits for one
    answer; one row in sixteen may then stand idle until several prompts are read together. Where passes are captured,
    up to eight short prompts that wait are read in one pass.

    Rounds have as many rows as the load needs, 1, 2, 4, ... up to `rows`, since a tree in an idle row costs as much as
    in another. In low precision a text's rounding depends on the number of rows, and so on the load, and on a
    GPU, for rows held to grammars, on trees of as many nodes as pay. With `narrows=False` there are always `rows`,
    which take half the memory of keys and values, and each prompt is read alone.

    Processes that hold the model together (`tp_plan`) all call this with the same arguments. The first takes prompts;
    the others run the same rounds until it closes its batch, which `close` and the end of a `with` block wait for, and
    call nothing else of the model. A change of it is made in all before the prompt that is to see it. Where one fails
    in a round, or ends, prompts end with an error: at once where connections break, else after the group's time limit.

    A free row keeps its text until another prompt takes the row, the oldest first. A prompt that begins like the text
    of any row is read from there on: the next turn of a conversation, or the same instructions. No memory is taken
    beside the rows' own. In low precision this may change a rounding, unless the model was patched with `exact=True`;
    `prefix_caching=False` reads all prompts whole, as None does with `narrows=False`.

    Weights that change in place are read as they are. Where a module, a hook or a parameter of the model, or of a draft
    model, was replaced, PEFT's adapter switched, a plain attribute of a module or of the configuration set, or a buffer
    of up to 65,536 elements changed (on a GPU otherwise than by `.data`), a prompt that is submitted after that waits
    until the running rows have ended, and is decoded by rounds that are made anew, or ends with the reason. Rows that
    run may see the change, or not.

    Raises Unsupported for an unpatched model, and for what `ContinuousBatch` refuses.
    """
    settings = BatchSettings(rows, max_length, prefill_chunk, narrows, prefix_caching)
    if assistant == Cascade.name or isinstance(assistant, Cascade):
        model = unwrapped(model)
        found: Any = resolve(assistant, patched_session(model, FIRST).resources, model)
        if not isinstance(found, Decoding):  # in the modes 'token' and 'lossless' it is one
            return ContinuousCascade(found, settings)
    return open_batch(Continuous, model, assistant, settings)


@contextmanager
def profile(model: Any) -> Iterator[Profile]:
    """`with fastspec.profile(model) as p:` times the parts of every round of the assisted calls in the block.

    The parts are draft (EAGLE-2 and EAGLE-3: by depth), score, choose, commit, observe and host, in milliseconds, on
    CUDA by events in the stream; `print(p)` shows a table and `p.write_trace(path)` writes a trace for Perfetto. Raises
    Unsupported for an unpatched model.
    """
    session = patched_session(unwrapped(model), "nothing to profile before fastspec.patch(model)")
    before, session.profile = session.profile, Profile()
    try:
        yield session.profile
    finally:
        session.profile = before


def clear_memory(model: Any) -> None:
    """Free the keys and values that a patched model's cascade keeps between calls (`Cascade(memory=...)`), as a change
    of weights does by itself; the counts go on. Raises Unsupported for a model whose cascade keeps nothing."""
    session = patched_session(model, "nothing to clear before fastspec.patch(model)")
    held = session.resources.get("cascade")
    if held is None or held.memory is None:
        raise Unsupported(
            f"this {type(model).__name__} keeps nothing between calls: fastspec.patch(model, "
            "cascade=Cascade(memory=bytes)) lets it"
        )
    held.memory.clear()
