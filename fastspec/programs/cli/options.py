"""Options that several commands share, and what they do."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import typer
from typer import Argument, Option

import fastspec
from fastspec.cascade.config import Cascade
from fastspec.config import BackendName, HeadBits
from fastspec.devices import use_device
from fastspec.errors import Unsupported, meant
from fastspec.models import SMOLLM2, check_model, cut_over, load_config, load_draft, load_model
from fastspec.programs.heads import with_tokenizer

MODEL = "Hub id, directory or .gguf file of the target."
Model = Annotated[str | None, Argument(metavar="MODEL", show_default=SMOLLM2, help=MODEL)]
AnyModel = Annotated[str | None, Argument(metavar="MODEL", help=MODEL)]
"""The same of a command that has no model of its own."""
ModelOption = Annotated[str | None, Option("--model", metavar="MODEL", help="The same as the argument MODEL.")]
Head = Annotated[str | None, Option(help="Hub id, directory or shipped name of the EAGLE-3 head.")]
HEADS = "Hub id, directory or shipped name of an EAGLE head; repeatable, one of each kind."
Heads = Annotated[list[str] | None, Option("--head", help=HEADS)]
MaxNewTokens = Annotated[int, Option(min=1, help="Longest answer, in tokens.")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None, Option(help="Else float32 (CPU) or bfloat16 (CUDA).")
]
Draft = Annotated[str | None, Option("--draft-model", help="Smaller model, named as the target, for speculative.")]
Device = Annotated[str | None, Option(help="cpu, cuda or cuda:N; by default CUDA where there is a device.")]
KERNELS = "Kernels: auto (the device's), torch, cpp (CPU, with a compiler), triton (CUDA). See docs/guide/devices.md."
Backend = Annotated[BackendName, Option(help=KERNELS)]
STORED = "Multiply quantised weights as stored, or by their own forward; else as measured. See docs/guide/quantised.md."
Stored = Annotated[bool | None, Option("--stored/--own-forward", help=STORED)]
BITS = "Bits that a head is read in, 16 or 8; by default as is measured to be faster. See docs/guide/assistants.md."
Bits = Annotated[HeadBits | None, Option("--head-bits", help=BITS)]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object, and nothing else, on stdout.")]
SPELLINGS = {
    "--eagle3": "--head",
    "--eagle": "--head",
    "--target": "--model",
    "--max-tokens": "--max-new-tokens",
    "--new-tokens": "--max-new-tokens",
    "--output": "--out",
    "--assistant": "--methods",
}
"""Older name of an option, or what other commands call it -> its name."""


UsageError: Any = typer.BadParameter.__mro__[1]


class NamingCommand(typer.core.TyperCommand):
    """Command that takes other spellings of its options, and says what a mistyped one is like and where one went."""

    gone: ClassVar[Mapping[str, str]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.params for name in parameter.opts}
        old = {name: new for name, new in SPELLINGS.items() if new in known and name not in known}
        given = [name.partition("=") for name in args]
        for name in (each[0] for each in given if each[0] not in known and each[0] in self.gone):
            raise Unsupported(f"{name} {self.gone[name]}")
        try:
            return super().parse_args(ctx, [old.get(name, name) + sign + rest for name, sign, rest in given])
        except UsageError as error:
            if type(error).__name__ == "NoSuchOption":  # typer brings a click of its own: it is told by name
                name = error.option_name
                options = [each for each in (*known, *old) if each.startswith("-")]
                word = name.removeprefix("--")
                like = f"{word.upper()} is an argument, without a name" if word in known else meant(name, options)
                raise UsageError(": ".join(filter(None, (f"no such option: {name}", like))), ctx) from error
            raise


def model_name(argument: str | None, option: str | None, default: str | None = None) -> str:
    """The model that a command names, by its argument or by --model. Raises Unsupported where there is none."""
    if argument is not None and option is not None:
        raise typer.BadParameter(f"MODEL {argument} names the model already: give one of them", param_hint="--model")
    found = default if argument is None and option is None else argument if option is None else option
    if found is None:
        raise typer.BadParameter("name the model, as an argument or by --model", param_hint="MODEL")
    check_model(found)
    return found


def stdout_kept(as_json: bool) -> contextlib.AbstractContextManager[object]:
    """Context manager that sends what libraries print to stderr, so that `--json` prints its object alone."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def patched_model(
    name: str,
    device: str | None,
    backend: BackendName,
    *,
    dtype: str | None = None,
    heads: Mapping[str, str] | None = None,
    draft_model: str | None = None,
    cascade: Cascade | None = None,
    stored: bool | None = None,
    head_bits: HeadBits | None = None,
    processes: int = 1,
) -> tuple[Any, Any]:
    """(model, tokenizer), loaded and patched as a command's options say, `heads` by assistant."""
    import torch

    from fastspec.patches.assistants.heads import packaged_head

    on = use_device(device)
    if draft_model:
        load_config(draft_model)  # a mistyped name is told before the target is loaded
    for head in (heads or {}).values():
        packaged_head(head)  # so is the package of heads, where it is missing
    kind, packed = getattr(torch, dtype) if dtype else None, True if stored and processes == 1 else None
    target, tokenizer = load_model(name, on, kind, packed=packed, **cut_over(processes))
    resources: dict[str, Any] = dict(heads or {})
    if draft_model:
        resources["speculative"] = load_draft(draft_model, target, tokenizer)
    if cascade is not None:
        resources["cascade"] = with_tokenizer(cascade, tokenizer, "the cascade")
    return fastspec.patch(target, backend=backend, stored=stored, head_bits=head_bits, **resources), tokenizer
