"""Heads made smaller on request: with fewer tokens (`Mtp(draft_vocab=...)`, and the files that list them), and with
weights of 8 bits (`patch(head_bits=...)`)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastspec.config import HEAD_BITS, HeadBits, Mtp
from fastspec.devices import is_timed
from fastspec.errors import CheckpointError, Unsupported, accepted
from fastspec.generation.heads.bound import BoundHead, Drafted, narrowed, no_rows, rounded
from fastspec.generation.heads.files import some
from fastspec.generation.ops import Ops
from fastspec.patches.assistants.kept_counts import fingerprint, kept_counts, vocabularies
from fastspec.patches.call.ranks import by_first
from fastspec.patches.hf.checkpoint_files import revision_of
from fastspec.patches.hf.compat import device_of
from fastspec.patches.hf.ends import listed
from fastspec.patches.hf.modes import Mode, mode_for
from fastspec.patches.hf.parallel import group_of
from fastspec.patches.on_cpu import named

DEFAULT = 1 << 16
"""Drafted tokens where the model has more than twice as many; exllamav3 #303 and MTPLX #317 measured as many."""
FREE = 16
"""One place in so many goes to tokens that texts bring."""


def with_vocabulary(head: BoundHead, config: Mtp, model: Any) -> BoundHead:
    """The head with a config's draft vocabulary. Raises CheckpointError for a list or rows that are not there."""
    asked, size = config.draft_vocab, head.config.vocab_size
    lm_head = head.binding.lm_head
    if asked == "full" or (isinstance(asked, int) and asked >= size) or (lm_head is None and asked is None):
        return head
    if lm_head is None:
        raise Unsupported(
            f"draft_vocab={asked!r} takes rows of the target's LM head, and this layer brings one of its own: "
            "leave it out"
        )
    if asked is None:
        few = torch.zeros(1, dtype=torch.int64, device="cpu")
        if size <= 2 * DEFAULT or no_rows(lm_head, few, head.config.hidden_size) is not None:
            return head
    count = DEFAULT if asked is None else asked
    free = 0 if isinstance(count, str) or isinstance(getattr(lm_head, "weight", None), DTensor) else count // FREE

    def made() -> Drafted:
        if isinstance(count, str):
            return Drafted(read_list(Path(count), size))
        tokenizer = _tokenizer(model)
        vocabularies.let_go(model)
        ids, kept_by = likely(model, tokenizer, count - free, size), fingerprint(tokenizer, size) if free else ""
        return Drafted(ids, kept_counts(kept_by, size), kept_by) if kept_by else Drafted(ids)

    narrow = narrowed(head, (asked, free), lambda: by_first(model, made), free)
    vocabulary, group = narrow.derived.vocabulary, group_of(model)
    if vocabulary is not None and vocabulary.kept_by and (group is None or group.rank() == 0):
        vocabularies.hold(vocabulary, model)
    return narrow


def likely(model: Any, tokenizer: Any, count: int, size: int) -> Tensor:
    """So many ids of a vocabulary, ascending: special and added tokens, then those of the earliest merges."""
    settings = model.generation_config
    ends = (settings.eos_token_id, settings.bos_token_id, settings.pad_token_id)
    named = [token for each in ends for token in listed(each)]
    first = dict.fromkeys(token for token in (*named, *_special(tokenizer)) if 0 <= token < size)
    ids = list(first)[:count]
    ids += [token for token in range(size) if token not in first][: count - len(ids)]
    return torch.tensor(sorted(ids), dtype=torch.int64, device="cpu")


def _special(tokenizer: Any) -> Iterable[int]:
    """The special and added tokens of a tokenizer, where there is one."""
    return () if tokenizer is None else sorted({*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()})


def _tokenizer(model: Any) -> Any:
    """The tokenizer beside a model's files, None where there is none."""
    from transformers import AutoTokenizer

    where = getattr(model.config, "name_or_path", None)
    if not where:
        return None
    revision, failed = revision_of(model), Exception()
    for local in (True, False):
        try:
            if not local or _lists_added(where, revision):
                tokenizer = AutoTokenizer.from_pretrained(where, revision=revision, local_files_only=local)
                break
        except Exception as error:  # of any kind: a tokenizer may be anybody's, and here it chooses drafts alone
            failed = error
    else:
        told = f"{type(failed).__name__}: {failed}".partition("\n")[0]
        warnings.warn(
            f"no tokenizer was found in {where} ({told}), so the draft vocabulary has its first tokens and no added "
            "ones; Mtp(draft_vocab=FILE) lists others",
            stacklevel=2,
        )
        return None
    if not _lists_added(where, revision):
        warnings.warn(
            f"the tokenizer of {where} is there in part, without {', '.join(LISTS[:-1])} or {LISTS[-1]}, so the draft "
            "vocabulary may lack added tokens; Mtp(draft_vocab=FILE) lists others",
            stacklevel=2,
        )
    return tokenizer


LISTS = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
"""Files that list a tokenizer's added tokens. Transformers loads a tokenizer without, of a cache that has a part."""


def _lists_added(where: str, revision: str | None) -> bool:
    """True for a directory, and for a hub id of which the cache has such a file."""
    return Path(where).expanduser().is_dir() or any(
        isinstance(try_to_load_from_cache(where, name, revision=revision), str) for name in LISTS
    )


def read_list(path: Path, size: int) -> Tensor:
    """The ids, ascending, of a file that lists drafted tokens: a JSON list of ids, SGLang's `.pt` of one, or the map
    `d2t` (offsets) or `t2d` (a mask) of SpecForge's `.pt`, of a head's safetensors or of llama.cpp's GGUF. Raises
    CheckpointError for a file that is none, and for ids that a vocabulary of `size` lacks."""
    try:
        ids = _ids(path)
    except Exception as error:  # of any kind: the file may be anybody's
        raise CheckpointError(f"draft_vocab={str(path)!r} cannot be read: {error}") from error
    ids = ids.unique()
    if not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= size:
        range_of = f"from {int(ids[0])} to {int(ids[-1])}" if len(ids) else "none"
        raise CheckpointError(f"draft_vocab={str(path)!r} lists tokens {range_of}, and the model has {size}")
    return ids


def _ids(path: Path) -> Tensor:
    if path.suffix == ".json":
        return _whole(torch.tensor(json.loads(path.read_text(encoding="utf-8")), device="cpu"))
    if path.suffix == ".safetensors":
        found: Any = load_file(path)
    elif path.suffix == ".gguf":
        from gguf import GGUFReader

        tensors = {each.name: each.data for each in GGUFReader(path).tensors}
        found = {"ids": torch.from_numpy(np.array(tensors["d2t"])).to(torch.int64)}
    else:
        found = torch.load(path, weights_only=True, map_location="cpu")
    if not isinstance(found, dict):
        return _whole(torch.as_tensor(found, device="cpu"))
    if "ids" in found:
        return _whole(found["ids"])
    if "d2t" in found:
        offsets = _whole(found["d2t"])
        return offsets + torch.arange(len(offsets), device="cpu")
    if "t2d" not in found:
        raise ValueError(f"it holds neither 'd2t' nor 't2d', but {some(map(str, found))}")
    return found["t2d"].nonzero().flatten()


def _whole(numbers: Tensor) -> Tensor:
    """Token ids [N], int64. Raises ValueError for what was no whole number, which a cast would make one."""
    if numbers.numel() and (numbers.dtype is torch.bool or numbers.is_floating_point()):
        raise ValueError(f"it holds {numbers.dtype}, and token ids are whole numbers")
    return numbers.to(torch.int64).flatten()


HINT = "patch with head_bits=16"
WIDE = 2560
"""Hidden size from which heads are read in 8 bits by themselves (stored_h200.jsonl)."""


def bits_of(asked: Any) -> HeadBits | None:
    """Bits that `head_bits=` asks for. Raises Unsupported for others than it takes."""
    if asked is None:
        return None
    if type(asked) is not int or asked not in HEAD_BITS:
        raise Unsupported(f"head_bits={asked!r}: {accepted(repr(asked), map(repr, (None, *HEAD_BITS)))}")
    return asked  # type: ignore[return-value]  # one of them


def refuse_bits(model: Any, backend: str) -> None:
    """Raise Unsupported where heads of a model cannot be read in 8 bits."""
    if group_of(model) is not None:
        raise Unsupported(f"head_bits=8: several processes hold this model and cut its head between them; {HINT}")
    mode = mode_for(model)
    if named(backend, device_of(model), mode.dtype, mode.adapter is not None) == "cpp":
        raise _on_cpp()


def may_round(model: Any, mode: Mode, backend: str) -> bool:
    """True where wide heads are read in 8 bits unasked: 16-bit models of one process where that was faster."""
    kernels = named(backend, device_of(model), mode.dtype, mode.adapter is not None)
    return (
        mode.dtype in (torch.bfloat16, torch.float16)
        and kernels in ("auto", "triton")
        and group_of(model) is None
        and is_timed(device_of(model))
    )


def in_bits(head: Any, bits: HeadBits | None, name: str, model: Any, backend: str) -> Any:
    """A head as an assistant reads it. Raises Unsupported where 8 bits were asked for and cannot be."""
    if bits is None:
        if not isinstance(head, BoundHead) or head.config.hidden_size < WIDE:
            return head
        with suppress(ValueError):  # of a layer that has no 8 bits
            return rounded(head) if may_round(model, mode_for(model), backend) else head
    if bits != 8:
        return head
    if not isinstance(head, BoundHead):
        raise Unsupported(
            f"head_bits=8 is for EAGLE heads and MTP layers, and {name}= is a {type(head).__name__}, a model of its "
            f"own: {HINT}"
        )
    try:
        return rounded(head)
    except ValueError as error:
        raise Unsupported(f"head_bits=8: of the head of {name!r} {error}; {HINT}") from error


def all_in_bits(heads: dict[str, Any], bits: HeadBits | None, model: Any, backend: str) -> dict[str, Any]:
    """`in_bits` of the heads of assistants, once of one that several share."""
    names = {head: name for name, head in heads.items()}
    made = {head: in_bits(head, bits, name, model, backend) for head, name in names.items()}
    return {name: made[head] for name, head in heads.items()}


def ops_of(head: BoundHead, ops: Ops) -> Ops:
    """The ops that a head drafts with. Raises Unsupported for a head in 8 bits on the C++ kernels."""
    if not head.module.is_rounded:
        return ops
    if ops.name == "cpp":
        raise _on_cpp()
    return ops.heads or ops


def refuse_fused(head: BoundHead) -> None:
    """Raise Unsupported for a head in 8 bits whose draft phase is to be one launch."""
    if head.module.is_rounded:
        raise Unsupported(f"fused=True reads weights of 16 bits, and this head is read in 8: {HINT}")


def _on_cpp() -> Unsupported:
    return Unsupported(
        "head_bits=8 has no C++ kernels, which draft in bfloat16 and are faster on the CPU than what would dequantise "
        f'each weight: {HINT}, with backend="torch", or once the model is on a GPU'
    )
