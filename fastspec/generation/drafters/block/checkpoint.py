"""Reading a block head from disk: config.json and model.safetensors in the layout of z-lab's DFlash, with the keys of DSpark and DFlash 2.

Also read are speculators' `draft_vocab_size` with `lm_head.weight`, `d2t` and `t2d`. Nothing is loaded loosely: a key that is missing,
unknown or misshapen is an error, and so is a switch of these formats that `BlockHead` does not have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fastspec.errors import CheckpointError
from fastspec.generation.drafters.block.config import BlockConfig
from fastspec.generation.drafters.block.head import BlockHead
from fastspec.reading import parse_json

NEUTRAL: dict[str, tuple[object, ...]] = {
    "causal": (False,), "causal_head": (False,), "is_causal": (False,), "use_swa": (False,), "attention_bias": (False,),
    "attention_sink_bias": (False,), "attention_value_scale": (1, 1.0), "output_multiplier": (1, 1.0), "input_embedding_scale": (1, 1.0),
    "final_logit_softcapping": (), "sliding_window": (), "conv_kernel_size": (2,), "markov_head_type": ("vanilla",),
    "confidence_head_with_markov": (True,), "hidden_act": ("silu",),
}  # fmt: skip
"""Switch -> the values, beside null, that mean what `BlockHead` does."""


def as_json(config: BlockConfig) -> dict[str, object]:
    """The config.json of a head: Qwen3's field names, and beside them those of the format of its kind; DSpark's both at the top level, as
    DeepSpec has them, and in `dflash_config`, as SpecForge has them."""
    c = config
    layer_ids = [tap - 1 for tap in c.taps]
    nested: dict[str, object] = {
        "mask_token_id": c.mask_token_id, "target_layer_ids": layer_ids, "block_size": c.block_size, "causal": False,
    }  # fmt: skip
    own: dict[str, object] = {}
    if c.kind == "dspark":
        own = {"markov_rank": c.rank, "markov_head_type": "vanilla", "enable_confidence_head": c.confidence}
        own |= {"confidence_head_with_markov": True} if c.confidence else {}
        nested |= {"projector_type": "dspark", **own}
    if c.kind == "dflash2":
        nested |= {"conv_kernel_size": 2, "conv_group_size": c.conv_group, "selector_rank": c.rank, "selector_top_k": c.candidates}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "num_hidden_layers": c.num_hidden_layers,
        "layer_types": ["full_attention"] * c.num_hidden_layers,
        "sliding_window": None,
        "num_target_layers": c.num_target_layers,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "max_position_embeddings": c.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "block_size": c.block_size,
        "sample_from_anchor": c.sample_from_anchor,
        "aux_hidden_state_layer_ids": list(c.taps),
        "dflash_config": nested,
        **own,
    }


def from_json(raw: dict[str, Any], where: str) -> BlockConfig:
    """The sizes in a config.json. Raises CheckpointError for keys that are missing and for switches that `BlockHead` does not have."""
    nested = raw.get("dflash_config") or {}
    both = raw | nested
    for name, accepted in NEUTRAL.items():
        if both.get(name) is not None and both[name] not in accepted:
            raise CheckpointError(f"{where}: {name} is {both[name]!r}; block heads are read with {name} in {[*accepted, None]}")
    kinds = sorted(set(both.get("layer_types") or ["full_attention"]) - {"full_attention"})
    if kinds:
        raise CheckpointError(f"{where}: layer_types holds {kinds}; block heads are read with full attention alone")
    rope = both.get("rope_parameters") or both.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise CheckpointError(f"{where}: rope_type is {rope['rope_type']!r}; block heads are read with the default one")
    projector = both.get("projector_type")
    if projector not in (None, "dspark"):
        raise CheckpointError(f"{where}: projector_type is {projector!r}; block heads are read with dspark's or with none")
    kind = "dflash2" if "selector_rank" in both else "dspark" if projector or both.get("markov_rank") else "dflash"
    rank = {"dflash2": "selector_rank", "dspark": "markov_rank"}.get(kind)
    try:
        layer_ids = both.get("target_layer_ids")
        taps = [i + 1 for i in layer_ids] if layer_ids is not None else both["aux_hidden_state_layer_ids"]
        return BlockConfig(
            kind=kind,
            **{name: both[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")},
            head_dim=both.get("head_dim") or both["hidden_size"] // both["num_attention_heads"],
            vocab_size=both["vocab_size"],
            draft_vocab_size=both.get("draft_vocab_size") or both["vocab_size"],
            num_target_layers=both["num_target_layers"],
            num_hidden_layers=both["num_hidden_layers"],
            taps=tuple(taps),
            mask_token_id=both["mask_token_id"],
            block_size=both["block_size"],
            sample_from_anchor=bool(both.get("sample_from_anchor", kind == "dspark")),
            rank=both[rank] if rank else 0,
            candidates=both.get("selector_top_k", 16),
            confidence=bool(both.get("enable_confidence_head", False)),
            conv_group=both.get("conv_group_size", 16),
            rms_norm_eps=both.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or both.get("rope_theta") or 10000.0),
            max_position_embeddings=both.get("max_position_embeddings", 2048),
        )
    except KeyError as error:
        raise CheckpointError(f"{where}: config.json has no {error.args[0]}, which a block head needs") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{where}: config.json: {error}") from error


def tensors_of(head: BlockHead) -> dict[str, Tensor]:
    """A head's tensors under their published names: bf16 weights, and with a draft vocabulary `d2t` (int64 offsets) and `t2d` (bool)."""
    c = head.config
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in head.state_dict().items() if name != "d2t"
    }
    if not c.own_lm_head:
        return tensors
    d2t = head.d2t.cpu()
    t2d = torch.zeros(c.vocab_size, dtype=torch.bool, device="cpu")
    t2d[torch.arange(c.draft_vocab_size, device="cpu") + d2t] = True
    return {**tensors, "d2t": d2t.contiguous(), "t2d": t2d}


def load_block_head(directory: str | Path) -> BlockHead:
    """The block head in a folder, in fp32 on the CPU, not bound to a target. Raises CheckpointError for what is missing or damaged."""
    folder = Path(directory)
    try:
        raw = parse_json((folder / "config.json").read_text(encoding="utf-8"))
        found = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: a block head is config.json and model.safetensors in one folder: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{folder}: config.json holds no object")
    with torch.device("cpu"):  # where the weights are, whatever device is the default
        head = BlockHead(from_json(raw, str(folder)))
    wanted = head.state_dict()
    found = {_published(name): value for name, value in found.items() if name not in ("t2d", "embed_tokens.weight")}
    missing, unknown = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unknown:
        raise CheckpointError(f"{folder}: tensors missing {missing[:4]}, unknown {unknown[:4]} for a {head.config.kind} head")
    wrong = [name for name in wanted if found[name].shape != wanted[name].shape]
    if wrong:
        has, asked = tuple(found[wrong[0]].shape), tuple(wanted[wrong[0]].shape)
        raise CheckpointError(f"{folder}: {wrong[0]} has the shape {has}, and config.json asks for {asked}")
    broken = [name for name, value in found.items() if value.is_floating_point() and not bool(value.float().isfinite().all())]
    if broken:
        raise CheckpointError(f"{folder}: {broken[0]} holds values that are not finite")
    head.load_state_dict(found)
    if head.config.own_lm_head:
        ids = head.to_target(torch.arange(head.config.draft_vocab_size, device="cpu"))
        if int(ids.min()) < 0 or int(ids.max()) >= head.config.vocab_size or len(ids.unique()) < len(ids):
            raise CheckpointError(f"{folder}: d2t is no map into a vocabulary of {head.config.vocab_size}")
    return head.eval().requires_grad_(False)


def _published(name: str) -> str:
    """Older exports prefix `logit_head.`; exports as a transformers class have `codebook.weight`."""
    return name.removeprefix("logit_head.").replace("codebook.weight", "codebook")
