"""Open batches: prompts of many callers join the running rows as they come, and leave them one by one."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from fastspec.cascade.config import Cascade
from fastspec.config import Assistant
from fastspec.generation.drafters.base import Decoding
from fastspec.patches.assistants.registry import resolve
from fastspec.patches.cascade.open_batch import ContinuousCascade
from fastspec.patches.continuous_batch import FIRST, BatchSettings, Continuous, open_batch
from fastspec.patches.hf.compat import unwrapped
from fastspec.patches.session import patched_session

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
    read `prefill_chunk` tokens at a time between two rounds ("auto": 1,024 on CUDA, 256 elsewhere). None: any number,
    for work of which nobody waits for one answer; one row in sixteen may then stand idle until several prompts are read
    together. Where passes are captured, up to eight short prompts that wait are read in one pass.

    Rounds have as many rows as the load needs, 1, 2, 4, ... up to `rows`, since a tree in an idle row costs as much as
    in another. In low precision a text's rounding depends on the number of rows, and so on the load. With
    `narrows=False` there are always `rows`, which take half the memory of keys and values, and each prompt is read
    alone.

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
