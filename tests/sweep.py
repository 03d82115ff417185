"""Every class of transformers' own mappings, tiny and random: what assisted decoding gives beside plain `generate`.

    python tests/sweep.py            # writes benchmarks/results/models.jsonl, and the guide from it
    python tests/sweep.py gpt2 git   # prints the rows of these
    python tests/sweep.py --write gpt2 git    # writes them among the others

The outcome of a row is `equal` (every one of its `assistants` gives plain generate's tokens: one text, three texts
left-padded, and three turns on returned caches), `refused` (by name, by `patch` or by the first call), `plain fails`,
`not built`, and what must not be: `differs`, `raises`, `stuck`. The classes run in another process, so that one that
dies or hangs costs its own row alone.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from helpers.generate import conversation
from helpers.models import tiny_head
from helpers.seq2seq import near, tiny_seq2seq
from helpers.sweep import TOKENS, tiny
from helpers.vision import prompts_with_images, seeing
from transformers.models.auto import modeling_auto

import fastspec
from fastspec.patches.hf.families import SEQ2SEQ
from fastspec.patches.hf.limits import layer_spans

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "models.jsonl"
PAGES = [ROOT / "docs" / "guide" / name for name in ("models.md", "output.md")]
CAUSAL, IMAGE_TEXT, SOURCE = "causal-lm", "image-text", "encoder-decoder"
MAPPINGS = {
    CAUSAL: (transformers.AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    IMAGE_TEXT: (transformers.AutoModelForImageTextToText, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    SOURCE: (transformers.AutoModelForSeq2SeqLM, dict.fromkeys(SEQ2SEQ, "")),
}
NEEDED: dict[str, Any] = {
    "autoregressive": "autoregressive",
    "nasd": "nasd",
    "speculative": fastspec.Speculative(gamma=3, branches=3),
}
HEAD = fastspec.Eagle3(depth=2, top_k=6, total_tokens=24)
NEW, TURN = 20, 7
SECONDS = 120
"""Of one class, before it counts as stuck."""


def row(mapping: str, kind: str) -> dict[str, Any]:
    """What a model type of a mapping gives."""
    found: dict[str, Any] = {"mapping": mapping, "model_type": kind, "class": "-"}
    try:
        model = tiny_seq2seq(kind) if mapping == SOURCE else tiny(kind, MAPPINGS[mapping][0])
    except Exception as error:
        return found | {"outcome": "not built", "reason": _short(error)}
    found["class"] = type(model).__name__
    resources: dict[str, Any] = {
        "speculative": near(model) if mapping == SOURCE else _draft(kind, model, MAPPINGS[mapping][0])
    }
    if mapping != SOURCE:
        try:
            resources["eagle3"] = tiny_head(model)
        except Exception as error:
            found["eagle3"] = f"no head: {_short(error)}"
    try:
        try:
            fastspec.patch(model, **resources)
        except (fastspec.CheckpointError, fastspec.Unsupported) as error:
            headless = {name: given for name, given in resources.items() if name != "eagle3"}
            fastspec.patch(model, **headless)
            found["eagle3"], resources = f"refused: {_short(error)}", headless
    except fastspec.Unsupported as error:
        return found | {"outcome": "refused", "at": "patch", "reason": _short(error)}
    texts = {"one text": _texts(12), "batch": _texts(12, 7, 10)}
    try:
        expected = {name: _call(model, inputs) for name, inputs in texts.items()}
    except Exception as error:
        return found | {"outcome": "plain fails", "reason": _short(error)}
    for name, assistant in NEEDED.items():
        for text, inputs in texts.items():
            given = _outcome(
                lambda inputs=inputs, assistant=assistant: _call(model, inputs, assistant=assistant), expected[text]
            )
            if given is not None:
                outcome, reason = given
                return found | {"outcome": outcome, "at": f"{name}, {text}", "reason": reason}
    tokens = {token for text in expected["batch"] for token in text}
    found |= {"outcome": "equal", "mode": fastspec.report(model).mode, "tokens": len(tokens), "assistants": [*NEEDED]}
    if mapping == SOURCE:
        return found
    found["outgrown"] = _outgrown(model)
    if "eagle3" in resources:
        given = next(
            filter(
                None, (_outcome(lambda i=i: _call(model, i, assistant=HEAD), expected[t]) for t, i in texts.items())
            ),
            None,
        )
        found["eagle3"] = "equal" if given is None else ": ".join(given)
    try:
        turns = _turns(model, {})
    except Exception as error:
        found["turns"] = f"plain fails: {_short(error)}"
    else:
        given = _outcome(lambda: _turns(model, {"assistant": NEEDED["speculative"]}), turns)
        found["turns"] = "equal" if given is None else ": ".join(given)
    if found["eagle3"] == "equal":
        found["assistants"].append("eagle3")
    if mapping == IMAGE_TEXT and (emitted := _with_images(kind)):
        found["images"] = emitted
    for name in ("eagle3", "turns", "images"):
        if found.get(name, "").startswith(("differs", "raises")):
            return found | {"outcome": found[name].split(":")[0], "at": name, "reason": found[name]}
    return found


def _with_images(kind: str) -> str:
    """What prompts with random images give; "" where none are made here for this type."""
    try:
        model = seeing(kind)
        inputs = [prompts_with_images(model, around) for around in (((3, 4),), ((3, 4), (6, 9)))]
        texts = [_call(model, each) for each in inputs]
    except Exception:
        return ""
    fastspec.patch(model, speculative=tiny("llama", transformers.AutoModelForCausalLM))
    for assistant in NEEDED.values():
        for each, text in zip(inputs, texts, strict=True):
            given = _outcome(lambda each=each, assistant=assistant: _call(model, each, assistant=assistant), text)
            if given is not None:
                return ": ".join(given)
    return "equal"


def _outcome(call: Callable[[], Any], expected: Any) -> tuple[str, str] | None:
    """What is to be said of a call, or None where it gives what is expected."""
    try:
        got = call()
    except fastspec.FastSpecError as error:
        return "refused", _short(error)
    except Exception as error:
        return "raises", _short(error)
    return None if got == expected else ("differs", "other tokens")


def _draft(kind: str, model: Any, auto: Any) -> Any:
    """A model whose drafts are accepted at times: nearly the target, or a llama of its vocabulary where the target
    keeps a state."""
    if getattr(model, "_is_stateful", False):
        return tiny("llama", transformers.AutoModelForCausalLM)
    draft, generator = tiny(kind, auto), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=3e-3)
    return draft


def _texts(*lengths: int) -> dict[str, Any]:
    """Prompts of these lengths, left-padded."""
    width, generator = max(lengths), torch.Generator().manual_seed(0)
    ids, mask = (
        torch.randint(6, TOKENS - 7, (len(lengths), width), generator=generator),
        torch.ones(len(lengths), width, dtype=torch.long),
    )
    for at, length in enumerate(lengths):
        mask[at, : width - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _call(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    given = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, **options)
    return getattr(given, "sequences", given).tolist()


def _turns(model: Any, options: dict[str, Any]) -> list[Any]:
    """The texts after each of three turns of two rows, each on the cache that the last returned; the second is
    transformers' own."""
    turns = [{"max_new_tokens": TURN, **each} for each in (options, {}, options)]
    return [out.sequences.tolist() for out in conversation(model, _texts(9, 5), turns)]


def _outgrown(model: Any) -> bool:
    """Whether the texts went past a window or chunk of some layers."""
    spans = layer_spans(model)
    return any(span is not None and span.size < 12 for span in spans)


def _short(error: Exception) -> str:
    words = " ".join(str(error).split())
    return words if isinstance(error, fastspec.FastSpecError) else f"{type(error).__name__}: {words[:200]}"


def _work(pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    while True:
        pipe.send(row(*pipe.recv()))


def wanted(kinds: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The mappings and model types of these types, of all where none are given."""
    return [(mapping, kind) for mapping, (_, names) in MAPPINGS.items() for kind in names if not kinds or kind in kinds]


def rows(kinds: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """The rows of these model types, all of them where none are given, by a process that is begun anew where one dies
    or hangs."""
    start, process = multiprocessing.get_context("spawn"), None
    for mapping, kind in wanted(kinds):
        if process is None or not process.is_alive():
            pipe, theirs = start.Pipe()
            process = start.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
        pipe.send((mapping, kind))
        try:
            if not pipe.poll(SECONDS):
                raise EOFError(f"no answer within {SECONDS} s")
            yield pipe.recv()
        except EOFError as error:
            process.kill()
            process.join()
            reason = str(error) or f"the process ended ({process.exitcode})"
            yield {"mapping": mapping, "model_type": kind, "class": "-", "outcome": "stuck", "reason": reason}
    if process is not None:
        process.kill()


def main() -> None:
    """Write the rows and the page, or print some rows."""
    from sweep_page import filled

    kinds = [each for each in sys.argv[1:] if each != "--write"]
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    if "--write" in sys.argv and lines[0] != versions:
        raise SystemExit(f"{RESULTS} holds rows of {lines[0]}, and these are of {versions}: write all rows anew")
    found = {place(each): each for each in lines[1:]} if "--write" in sys.argv else {}
    for each in rows(kinds):
        print(json.dumps(each), flush=True)
        found[place(each)] = each
    if not kinds or "--write" in sys.argv:
        held = [found[each] for each in wanted() if each in found]
        RESULTS.write_text("".join(json.dumps(each, separators=(",", ":")) + "\n" for each in (versions, *held)))
        for page in PAGES:
            page.write_text(filled(page.read_text(), versions, held))


def place(found: dict[str, Any]) -> tuple[str, str]:
    """Where a row stands among the others: its mapping and model type."""
    return found["mapping"], found["model_type"]


if __name__ == "__main__":
    main()
