"""Gemma 4's assistants (`google/gemma-4-*-it-assistant`), which draft from their target's own keys and values."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from fastspec.errors import CheckpointError, Unsupported
from fastspec.generation.decoder_layer import LayoutKey, is_plain
from fastspec.generation.drafters.dynamic_tree import DynamicDecoding, Expand, trees_of
from fastspec.generation.drafters.shared_cache import SharedCacheDrafter, SharedCacheProgram
from fastspec.generation.heads.bound import check_range
from fastspec.generation.heads.files import check_finite
from fastspec.generation.layer_state import FullAttentionState
from fastspec.generation.ops import Ops
from fastspec.generation.target import Target
from fastspec.kernels.attention.reference import Span
from fastspec.kernels.drafting.reference import Candidates
from fastspec.patches.assistants.heads import find_head, is_hub_id
from fastspec.patches.call.refusals import refuse_heads
from fastspec.patches.hf.compat import device_of, dtype_of, is_shared_out
from fastspec.patches.hf.config_fields import layer_shapes, table_rows
from fastspec.patches.hf.families import ADAPTERS
from fastspec.patches.hf.layers import layer_parts, norm_of, product_of, rotary_tables
from fastspec.patches.hf.limits import layer_spans
from fastspec.patches.hf.model import SHIFT_ROOM, HFModel
from fastspec.patches.hf.modes import decoder_of
from fastspec.patches.hf.parallel import group_of, is_spread

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
TARGETS = ("gemma4_text", "gemma4_unified_text")
"""Model types of decoders whose keys and values such an assistant reads."""
WIDER = 2
"""Positions that a node sees beyond the assistant's window W: transformers shows it W + 1 committed tokens."""


def is_assistant(source: Any) -> bool:
    """True for a Gemma 4 assistant, as a module."""
    return isinstance(source, PreTrainedModel) and source.config.model_type in MODEL_TYPES


def gemma4_assistant(source: Any, target: Any) -> Any:
    """The Gemma 4 assistant of a module, a directory or a hub id, on the target's device and in its dtype; None for
    another checkpoint. Raises CheckpointError for one that lacks tensors or does not fit, Unsupported for the
    target."""
    named = isinstance(source, (str, Path))
    if not (_model_type(source) in MODEL_TYPES if named else is_assistant(source)):
        return None
    _check_target(target)
    return _placed(_load(find_head(source), target) if named else source, target)


def gemma4_decoding(config: Any, resources: dict[str, Any], model: Any) -> SharedCacheDecoding:
    """The decoding of a config. Raises Unsupported for sizes that it cannot draft, or a target that has changed."""
    _check_target(model)
    assistant = resources["mtp"] = _placed(resources["mtp"], model)
    fields, most = trees_of(config, device_of(model).type)
    if config.fused:
        raise Unsupported(
            "fused=True drafts with an EAGLE-3 head, and Gemma 4's assistant has no such kernel: leave fused out"
        )
    if config.draft_vocab not in (None, "full"):
        raise Unsupported(
            f"draft_vocab={config.draft_vocab!r} bounds what a model's LM head drafts, and Gemma 4's assistant has one "
            "of its own: leave it out"
        )
    scored = scored_tokens(assistant)
    if most > scored:
        raise Unsupported(f"top_k={most} children of a node exceed the {scored} tokens that the assistant scores")
    return SharedCacheDecoding(**fields, assistant=assistant)


@dataclass(frozen=True, kw_only=True)
class SharedCacheDecoding(DynamicDecoding):
    """Decoding with a Gemma 4 assistant and dynamic trees."""

    continuous: ClassVar[bool] = True
    taps: tuple[int, ...] = ()
    assistant: Any

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.assistant,)

    def drafter(self, *, rows: int, capacity: int, device: Any, ops: Ops, process: Any) -> SharedCacheDrafter:
        """The drafter of one call, which takes its keys and values from the target later, in `bind`."""
        return SharedCacheDrafter(
            partial(program_of, self.assistant, ops),
            self.tree(rows, ops),
            width=self.assistant.config.backbone_hidden_size,
            rows=rows,
            dtype=dtype_of(self.assistant),
            device=device,
            ops=ops,
        )


def program_of(assistant: Any, ops: Ops, target: Target) -> SharedCacheProgram:
    """The passes of an assistant over a target's keys and values."""
    assert isinstance(target, HFModel)
    decoder, config = decoder_of(assistant), assistant.config.get_text_config()
    parts = ADAPTERS[config.model_type]
    places, layers, keys = _shared_places(target), [], []
    for layer, kind, span in zip(decoder.layers, config.layer_types, layer_spans(assistant), strict=True):
        state, index = places[kind]
        seen = None if span is None else Span(span.size + WIDER)
        key = LayoutKey(seen, state.ring, config.num_attention_heads // state.k.shape[2])
        layers.append(layer_parts(parts, layer, ops, state, index, layout=key, rotary=kind))
        keys.append(key)
    return SharedCacheProgram(
        embed=target.model.get_input_embeddings(),
        enter=product_of((assistant.pre_projection,), ops),
        layers=layers,
        keys=tuple(dict.fromkeys(keys)),
        norm=norm_of(decoder.norm, ops, parts),
        leave=product_of((assistant.post_projection,), ops),
        expand=_expand_of(assistant, ops),
        tables=lambda count: rotary_tables(assistant, parts, set(config.layer_types), count),
        slots=lambda: target.state.slots + (0 if target.shift is None else SHIFT_ROOM),
        positions=lambda: target.lengths if target.shift is None else (target.lengths + target.shift).clamp(min=0),
    )


def _shared_places(target: HFModel) -> dict[str, tuple[FullAttentionState, int]]:
    """Kind of layer -> the keys and values of the target's last layer of that kind that owns any."""
    found = {}
    for kind, (state, index) in zip(
        target.model.config.get_text_config().layer_types, target.state.places, strict=True
    ):
        assert isinstance(state, FullAttentionState)
        found[kind] = state, index  # layers that own none have the place of the last that does
    return found


def _expand_of(assistant: Any, ops: Ops) -> Expand:
    """`Ops.topk_expand` with the assistant's LM head, over the tokens that it scores."""
    masked, lm_head = assistant.masked_embedding, assistant.lm_head
    own = torch.zeros(scored_tokens(assistant), dtype=torch.long, device=lm_head.weight.device)
    if masked is None:
        weight, logits = lm_head.weight.detach() if is_plain(lm_head) else None, product_of((lm_head,), ops)

        def expand(readout: Tensor, scores: Tensor, count: int, out: Candidates) -> Any:
            return ops.topk_expand(logits(readout) if weight is None else readout, weight, scores, count, own, out)

        return expand
    centroids = product_of((masked.centroids,), ops)

    def expand_likeliest(readout: Tensor, scores: Tensor, count: int, out: Candidates) -> Any:
        logits, tokens = likeliest_clusters(masked, centroids(readout), readout, lm_head.weight)
        children, places, best, index = ops.topk_expand(logits, None, scores, count, own, out)
        chosen = tokens.gather(2, places.unflatten(1, (-1, count))).flatten(1)
        return children, out.tokens.copy_(chosen), best, index

    return expand_likeliest


def likeliest_clusters(masked: Any, clusters: Tensor, readout: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and tokens, both [B, N, S], of the likeliest centroids, by their logits `clusters` [B, N, C]."""
    chosen = clusters.topk(masked.centroid_intermediate_top_k, -1).indices
    tokens = masked.token_ordering.long().view(masked.num_centroids, -1)[chosen].flatten(2)
    return (weight[tokens] @ readout[..., None])[..., 0], tokens


def scored_tokens(assistant: Any) -> int:
    """Tokens of which an assistant gives a node a score."""
    masked = assistant.masked_embedding
    if masked is None:
        return int(assistant.vocab_size)
    return int(masked.centroid_intermediate_top_k * masked.vocab_size_per_centroid)


def _model_type(source: str | Path) -> Any:
    """Model type in the config.json of a directory or hub id, alone fetched; None without. Raises CheckpointError."""
    local = Path(source).expanduser()
    at = local / "config.json"
    if not local.exists():
        if not is_hub_id(source):
            raise CheckpointError(f"mtp={source} is no directory, and no hub id of the form owner/name")
        try:
            at = Path(hf_hub_download(str(source), "config.json"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"mtp={source} is no directory, and the hub does not give it ({error})") from error
    if not at.is_file():
        return None
    try:
        return json.loads(at.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{at} cannot be read: {error}") from error


def _load(folder: Path, target: Any) -> Any:
    """The assistant of a folder. Raises CheckpointError for one that lacks tensors, or has others, or broken ones."""
    try:
        assistant, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype_of(target),
            output_loading_info=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # refused below by name
        )
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"mtp={folder} cannot be loaded: {error}") from error
    shapes = [f"{name} of {list(held)}, not {list(wanted)}" for name, held, wanted in info["mismatched_keys"]]
    keys = ("lacks", info["missing_keys"]), ("brings unknown", info["unexpected_keys"]), ("brings", shapes)
    wrong = [f"{what} {', '.join(sorted(map(str, names)))}" for what, names in keys if names]
    if wrong:
        raise CheckpointError(f"mtp={folder}: the assistant {' and '.join(wrong)}")
    for name, weight in assistant.named_parameters():
        check_finite(name, weight, f"mtp={folder}")
    return assistant.eval().requires_grad_(False)


def _placed(assistant: Any, target: Any) -> Any:
    """A fitting assistant on the target's device and in its dtype, copied if need be. Raises CheckpointError else."""
    misfits = _misfits(assistant, target)
    if misfits:
        raise CheckpointError(
            f"mtp: {type(assistant).__name__} does not fit {type(target).__name__}: {'; '.join(misfits)}"
        )
    place = device_of(target), dtype_of(target)
    if (device_of(assistant), dtype_of(assistant)) == place:
        return assistant
    check_range(dict(assistant.named_parameters()), place[1], "mtp")
    return copy.deepcopy(assistant).to(*place)


def _misfits(assistant: Any, target: Any) -> list[str]:
    """Sizes in which an assistant and its target disagree."""
    own, theirs = assistant.config.get_text_config(), target.config.get_text_config()
    width, rows = assistant.config.backbone_hidden_size, table_rows(target.get_input_embeddings(), target.config)
    found = []
    if width != theirs.hidden_size:
        found.append(f"it reads hidden states of {width}, the target's are {theirs.hidden_size}")
    if own.vocab_size > rows:
        found.append(f"it drafts {own.vocab_size} tokens, and the target has {rows}")
    held = dict(zip(theirs.layer_types, layer_shapes(target.config), strict=True))
    heads = own.num_attention_heads
    for kind, (_, size, _) in dict(zip(own.layer_types, layer_shapes(assistant.config), strict=True)).items():
        if kind not in held:
            found.append(f"it reads the keys of layers of type {kind}, and the target has none")
        elif held[kind][1] != size or heads % held[kind][0]:
            found.append(
                f"its {heads} heads of {size} read layers of type {kind}, and the target's have {held[kind][0]} key "
                f"heads of {held[kind][1]}"
            )
    if "sliding_attention" in own.layer_types and own.sliding_window > theirs.sliding_window:
        found.append(
            f"its window of {own.sliding_window} tokens is longer than the target's, of {theirs.sliding_window}"
        )
    return found


def _check_target(model: Any) -> None:
    """Raise Unsupported for a target whose keys and values no assistant can read."""
    refuse_heads("mtp", model)
    name = type(model).__name__
    if model.config.get_text_config().model_type not in TARGETS:
        raise Unsupported(
            f"mtp= is a Gemma 4 assistant, which reads the keys and values of a Gemma 4 model, and this is a {name}"
        )
    why = None
    if group_of(model) is not None or is_shared_out(model):
        why = "several processes hold its weights"
    elif is_spread(model):
        why = "its layers are on several devices"
    if why is not None:
        raise Unsupported(
            f"Gemma 4's assistant reads keys and values of this {name}, and {why}: use 'nasd' or 'speculative'"
        )
