"""Draft vocabularies of heads that draft with their target's LM head: which tokens, and the files that list them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastspec.config import Mtp
from fastspec.errors import CheckpointError
from fastspec.generation.heads.bound import BoundHead, narrowed, no_rows
from fastspec.patches.call.ranks import by_first
from fastspec.patches.hf.checkpoint_files import revision_of
from fastspec.patches.hf.ends import listed

DEFAULT = 1 << 16
"""Drafted tokens where the model has more than twice as many; exllamav3 #303 and MTPLX #317 measured as many."""
FREE = 16
"""One place in so many goes to tokens that texts bring."""


def with_vocabulary(head: BoundHead, config: Mtp, model: Any) -> BoundHead:
    """The head with a config's draft vocabulary. Raises CheckpointError for a list or rows that are not there."""
    asked, size = config.draft_vocab, head.config.vocab_size
    lm_head = head.binding.lm_head
    if lm_head is None or asked == "full" or (isinstance(asked, int) and asked >= size):
        return head
    if asked is None:
        few = torch.zeros(1, dtype=torch.int64, device="cpu")
        if size <= 2 * DEFAULT or no_rows(lm_head, few, head.config.hidden_size) is not None:
            return head
    count = DEFAULT if asked is None else asked
    free = 0 if isinstance(count, str) or isinstance(getattr(lm_head, "weight", None), DTensor) else count // FREE

    def made() -> Tensor:
        return read_list(Path(count), size) if isinstance(count, str) else likely(model, count - free, size)

    return narrowed(head, (asked, free), lambda: by_first(model, made), free)


def likely(model: Any, count: int, size: int) -> Tensor:
    """So many ids of a vocabulary, ascending: special and added tokens, then those of the earliest merges."""
    settings = model.generation_config
    ends = (settings.eos_token_id, settings.bos_token_id, settings.pad_token_id)
    named = [token for each in ends for token in listed(each)]
    first = dict.fromkeys(token for token in (*named, *_special(model)) if 0 <= token < size)
    ids = list(first)[:count]
    ids += [token for token in range(size) if token not in first][: count - len(ids)]
    return torch.tensor(sorted(ids), dtype=torch.int64, device="cpu")


def _special(model: Any) -> Iterable[int]:
    """The special and added tokens of the tokenizer beside a model's files, where there is one."""
    from transformers import AutoTokenizer

    where = getattr(model.config, "name_or_path", None)
    if not where:
        return ()
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, revision=revision_of(model))
    except Exception as error:  # of any kind: a tokenizer may be anybody's, and here it chooses drafts alone
        told = f"{type(error).__name__}: {error}".partition("\n")[0]
        warnings.warn(
            f"no tokenizer was found in {where} ({told}), so the draft vocabulary has its first tokens and no added "
            "ones; Mtp(draft_vocab=FILE) lists others",
            stacklevel=2,
        )
        return ()
    return sorted({*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()})


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
        return torch.tensor(json.loads(path.read_text(encoding="utf-8")), dtype=torch.int64, device="cpu")
    if path.suffix == ".safetensors":
        found: Any = load_file(path)
    elif path.suffix == ".gguf":
        from gguf import GGUFReader

        tensors = {each.name: each.data for each in GGUFReader(path).tensors}
        found = {"ids": torch.from_numpy(np.array(tensors["d2t"])).to(torch.int64)}
    else:
        found = torch.load(path, weights_only=True, map_location="cpu")
    if not isinstance(found, dict):
        return torch.as_tensor(found, dtype=torch.int64, device="cpu").flatten()
    if "ids" in found:
        return found["ids"].flatten()
    if "d2t" in found:
        offsets = found["d2t"].to(torch.int64)
        return offsets + torch.arange(len(offsets), device="cpu")
    return found["t2d"].nonzero().flatten()
