"""Drafting heads for a transformers model: find one and bind it, look into it without running it, or measure how it is
to be read.

`load_head` reads what `patch(model, eagle3=...)` takes. `inspect_head` says how a checkpoint was read and whether it
fits a target. `probe_head` measures which reading of an ambiguous checkpoint drafts best: formats in circulation
contradict each other about the tapped layers, the RoPE base and one residual (docs/checkpoints.md), and a wrong guess
costs speed without an error.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fastspec.errors import CheckpointError
from fastspec.generation.heads.bound import BoundHead, Sizes, TargetParts, check_range, no_rows
from fastspec.generation.heads.checkpoint import HeadCheckpoint
from fastspec.generation.heads.dialects import TRAINED_THETA
from fastspec.generation.heads.fields import Flag
from fastspec.generation.heads.fit import Reading, fitted, misfits, override, with_taps
from fastspec.generation.heads.load import bound, is_copy, load, read_checkpoint
from fastspec.generation.heads.module import EagleHead, HeadConfig
from fastspec.patches.assistants.packaged_heads import names_of_heads, packaged_head
from fastspec.patches.hf.compat import device_of
from fastspec.patches.hf.modes import adapter_for, decoder_of
from fastspec.patches.hf.parallel import is_spread

PATTERNS = ["*.json", "*.safetensors", "*.bin"]
PROBE_TOKENS = 64
SOURCES = "a directory, a hub id, the name of a head of an installed package, and (to patch or load) an EagleHead"


def sizes_of(target: PreTrainedModel | PretrainedConfig) -> Sizes:
    """Sizes of a target that a head must agree with; its config is enough."""
    config = target.config if isinstance(target, PreTrainedModel) else target
    text = config.get_text_config()
    width = getattr(text, "word_embed_proj_dim", text.hidden_size)
    if isinstance(target, PreTrainedModel):
        width = getattr(target.get_input_embeddings(), "embedding_dim", width)
    return Sizes(text.vocab_size, text.hidden_size, text.num_hidden_layers, width)


def parts_of(target: PreTrainedModel) -> TargetParts:
    """Parts of a target that heads are fitted and bound to."""
    lm_head, device = target.get_output_embeddings(), device_of(target)
    weight = getattr(lm_head, "weight", None)
    return TargetParts(
        name=type(target).__name__,
        sizes=sizes_of(target),
        embedding=target.get_input_embeddings(),
        lm_head=lm_head,
        device=device,
        dtype=target.dtype,
        lm_head_device=weight.device if is_spread(target) and weight is not None else device,
    )


def load_head(
    source: str | Path | EagleHead,
    target: PreTrainedModel,
    *,
    revision: str | None = None,
    taps: tuple[int, ...] | None = None,
    rope_theta: float | None = None,
    rope_interleaved: bool | None = None,
    norm_before_residual: bool | None = None,
    norm_output: bool | None = None,
    own_embedding: bool | None = None,
) -> EagleHead:
    """A drafting head for `target`, bound to its embedding (and LM head where it has none), on its device and in its
    dtype.

    `source` is a directory, a hub id, the name of a head of an installed package, or an `EagleHead`. Of a module a copy
    is bound that shares its weights, which are never moved or cast. `taps`, `rope_theta`, `rope_interleaved`,
    `norm_before_residual` and `norm_output` replace what the checkpoint says, and `own_embedding=False` takes the
    target's embedding in place of the head's; `probe_head` finds them. Warns of what the checkpoint leaves open, and
    was assumed.

    Raises CheckpointError for a source that cannot be found, a checkpoint that cannot be read, and a head that does not
    fit the target.

    >>> head = load_head("smollm2-135m-instruct", model)                                     # doctest: +SKIP
    >>> read = probe_head("path/or/hub-id", model)[0].overrides()                            # doctest: +SKIP
    >>> head = load_head("path/or/hub-id", model, **read)                                    # doctest: +SKIP
    """
    reading = Reading(
        taps=taps,
        rope_theta=rope_theta,
        rope_interleaved=rope_interleaved,
        norm_before_residual=norm_before_residual,
        norm_output=norm_output,
        own_embedding=own_embedding,
    )
    found = source if isinstance(source, EagleHead) else find_head(source, revision=revision)
    head, assumed = load(found, parts_of(target), reading, scaled_rope)
    if assumed is not None:
        warnings.warn(assumed, stacklevel=2)
    return head.as_module()


_KINDS = {"eagle3": ("EAGLE-3", "eagle3=head"), "eagle": ("EAGLE-1/2", "eagle=head or eagle2=head")}


def load_heads(sources: Mapping[str, str | Path | EagleHead | None], target: PreTrainedModel) -> dict[str, BoundHead]:
    """The heads of the assistants "eagle", "eagle2" and "eagle3" that have a source, loaded once where they share one.

    Raises CheckpointError like `load_head`, and for a head of the other kind, naming the assistant that takes it.
    """
    made: dict[str | Path | EagleHead, BoundHead] = {}
    heads = {}
    for name, source in sources.items():
        if source is None:
            continue
        if not isinstance(source, (str, Path, EagleHead)):
            raise CheckpointError(f"{name}={source!r} is no head: accepted are {SOURCES}")
        if source not in made:
            found = source if isinstance(source, EagleHead) else find_head(source)
            made[source], assumed = load(found, parts_of(target), Reading(), scaled_rope)
            if assumed is not None:
                warnings.warn(assumed, stacklevel=3)
        head = heads[name] = made[source]
        kind = head.config.kind
        if (kind == "eagle3") != (name == "eagle3"):
            shown = "this EagleHead" if isinstance(source, EagleHead) else source
            raise CheckpointError(
                f"{name}={shown} is an {_KINDS[kind][0]} head: fastspec.patch(model, {_KINDS[kind][1]}) takes it"
            )
    return heads


def find_head(source: str | Path, *, revision: str | None = None) -> Path:
    """The directory of a head: one that exists, one of an installed package, or a hub repository's JSON and weight
    files.

    Raises CheckpointError where there is none.
    """
    if not isinstance(source, (str, Path)):
        given = type(source).__name__ if isinstance(source, nn.Module) else repr(source)
        raise CheckpointError(f"{given} is no head: accepted are {SOURCES}")
    local = Path(source).expanduser()
    if local.is_dir():
        return local
    if local.is_file():
        raise CheckpointError(f"{source} is a file; give the directory that holds config.json and the weights")
    packaged = packaged_head(str(source))
    if packaged is not None:
        return packaged
    shipped = f"heads that have a name: {names_of_heads()}"
    if isinstance(source, Path) or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        raise CheckpointError(f"{source} is no directory, and no hub id of the form owner/name; {shipped}")
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=PATTERNS, ignore_patterns=["*/*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{source} is no directory, and the hub does not give it ({_first_line(error)}); {shipped}"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def scaled_rope(config: HeadConfig) -> tuple[Tensor, float]:
    """Rotary frequencies (fp32, [R / 2]) and the factor on cos and sin, of any RoPE type that transformers knows."""
    rope = config.rope_parameters
    compute = ROPE_INIT_FUNCTIONS.get(rope["rope_type"])
    if compute is None:
        known = ", ".join(["default", *sorted(ROPE_INIT_FUNCTIONS)])
        raise CheckpointError(f"rope_parameters of the head: rope_type is {rope['rope_type']!r}; accepted are {known}")
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
    try:
        stand_in = LlamaConfig(**{name: getattr(config, name) for name in sizes}, rope_parameters=dict(rope))
        inv_freq, scale = compute(stand_in, torch.device("cpu"))
    except KeyError as error:
        raise CheckpointError(
            f"rope_parameters of the head: {rope['rope_type']!r} is incomplete ({rope}): {error.args[0]}"
        ) from error
    return inv_freq, float(scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadReport:
    """How a checkpoint was read. `misfits` is None without a target, and empty where the head fits it."""

    source: str
    dialect: str
    config: HeadConfig
    flags: dict[str, Flag]
    parameters: int
    has_embedding: bool
    copies_embedding: bool | None
    """Whether the head's own embedding is the target's; None where it brought none, and without the target's
    weights."""
    notes: tuple[str, ...]
    misfits: tuple[str, ...] | None

    def rows(self) -> list[tuple[str, str]]:
        """(name, value) pairs to print, in reading order."""
        c = self.config
        rows = [
            ("source", self.source),
            ("dialect", self.dialect),
            ("kind", "EAGLE-3" if c.kind == "eagle3" else "EAGLE-1/2"),
            ("parameters", f"{self.parameters / 1e6:.1f} M"),
            ("hidden size", f"{c.hidden_size} (target {c.target_hidden_size})"),
            ("layers", str(c.num_hidden_layers)),
            (
                "attention",
                f"{c.num_attention_heads} query heads, {c.num_key_value_heads} key/value heads of {c.head_dim}",
            ),
            ("intermediate size", str(c.intermediate_size)),
            ("vocabulary", f"{c.draft_vocab_size} drafted of {c.vocab_size}"),
            ("RoPE", str(c.rope_parameters["rope_type"])),
            ("own embedding", _of_embedding(self.has_embedding, self.copies_embedding)),
        ]
        rows += [(name, str(flag)) for name, flag in sorted(self.flags.items())]
        rows += [("note", note) for note in self.notes]
        if self.misfits is not None:
            rows += (
                [("fits the target", "yes")] if not self.misfits else [("does not fit", text) for text in self.misfits]
            )
        return rows


def _of_embedding(brought: bool, copied: bool | None) -> str:
    if not brought:
        return "no"
    if copied is None:
        return "yes"
    return (
        "a copy of the target's" if copied else "differs from the target's, which own_embedding=False takes: probe it"
    )


def inspect_head(
    source: str | Path, target: PreTrainedModel | PretrainedConfig | None = None, *, revision: str | None = None
) -> HeadReport:
    """Read a head and say how each switch was decided and, given a target (its config is enough), whether it fits.

    Raises CheckpointError like `load_head`, except that a head that does not fit is reported and not raised.
    """
    checkpoint = read_checkpoint(find_head(source, revision=revision))
    found = None
    if target is not None:
        sizes = sizes_of(target)
        checkpoint = with_taps(checkpoint, sizes.num_layers)
        found = misfits(checkpoint, sizes)
        if checkpoint.config.target_rows and isinstance(target, PreTrainedModel):
            reason = no_rows(target.get_output_embeddings(), checkpoint.state["d2t"], checkpoint.config.hidden_size)
            found += () if reason is None else (reason,)
    return HeadReport(
        source=str(source),
        dialect=checkpoint.dialect,
        config=checkpoint.config,
        flags=checkpoint.flags,
        parameters=checkpoint.num_parameters,
        has_embedding=checkpoint.has_embedding,
        copies_embedding=_copies_embedding(checkpoint, target) if isinstance(target, PreTrainedModel) else None,
        notes=checkpoint.notes if checkpoint.assumed is None else (*checkpoint.notes, checkpoint.assumed),
        misfits=found,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRow:
    """One reading of a checkpoint: `agreement` is the share of `tokens` whose draft from the target's states is the
    target's own choice, `second` that of the draft after it, from the state that the head feeds back to itself.

    `own_embedding` and `rope_interleaved` are None where they leave nothing to choose.
    """

    rope_theta: float
    taps: tuple[int, ...]
    norm_before_residual: bool
    norm_output: bool
    own_embedding: bool | None = None
    rope_interleaved: bool | None = None
    agreement: float
    second: float
    tokens: int
    declared: bool

    @property
    def score(self) -> float:
        """What readings are ranked by: the mean of both shares."""
        return (self.agreement + self.second) / 2

    def overrides(self) -> dict[str, Any]:
        """Keyword arguments that make `load_head` read the checkpoint this way."""
        found: dict[str, Any] = {"rope_theta": self.rope_theta, "rope_interleaved": self.rope_interleaved}
        if self.taps:
            found |= {
                "taps": self.taps,
                "norm_before_residual": self.norm_before_residual,
                "norm_output": self.norm_output,
            }
        found["own_embedding"] = self.own_embedding
        return {name: value for name, value in found.items() if value is not None}


@torch.no_grad()
def probe_head(
    source: str | Path, target: PreTrainedModel, input_ids: Tensor | None = None, *, revision: str | None = None
) -> list[ProbeRow]:
    """Measure the plausible readings of a checkpoint, best first; equal ones in the order declared, then nearest to it.

    `input_ids` [1, T] is a prompt (by default the BOS token alone). The target continues it greedily for 64 tokens and
    is run once over the result; each reading then drafts every next token from true features, and the one after it from
    what it feeds back to itself. Its row says how often each met the target's choice.
    """
    parts = parts_of(target)
    checkpoint = _moved(fitted(read_checkpoint(find_head(source, revision=revision)), parts.sizes, Reading()), target)
    prompt = _default_prompt(target) if input_ids is None else input_ids.to(device_of(target))
    if prompt.ndim != 2 or prompt.shape[0] != 1 or prompt.shape[1] == 0:
        raise ValueError(f"input_ids has shape {list(prompt.shape)}; expected one prompt, [1, T]")
    ids = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=PROBE_TOKENS, do_sample=False)
    if ids.shape[1] < 3:
        raise ValueError(
            "the target ended its answer at once, so nothing can be measured; give a longer prompt as input_ids"
        )
    states, picks = _states(target, ids)
    rows = []
    for index, (given, reading) in enumerate(_readings(checkpoint, target)):
        config = reading.config
        if config.last_tap_before_norm and states[-1] is None:
            continue
        first, second = _draft(bound(reading, parts, scaled_rope), ids, states)
        # The pair (token t + 1, hidden state t) drafts token t + 2, which the target picks at t + 1, and its state with
        # token t + 2 drafts token t + 3; only the target's own answer counts.
        start = min(max(prompt.shape[1] - 2, 0), len(second) - 1)
        hits, more = (drafts[start:] == picks[at:][start:] for at, drafts in ((1, first), (2, second)))
        row = ProbeRow(
            rope_theta=config.rope_parameters["rope_theta"],
            taps=config.taps,
            norm_before_residual=config.norm_before_residual,
            norm_output=config.norm_output,
            own_embedding=given.own_embedding,
            rope_interleaved=given.rope_interleaved,
            agreement=float(hits.float().mean()),
            second=float(more.float().mean()),
            tokens=len(hits),
            declared=index == 0,
        )
        rows.append(row)
    if not rows or not rows[0].declared:
        raise CheckpointError(
            f"{checkpoint.where} reads the last layer's output before the final norm, which cannot be measured on "
            f"{type(target).__name__}: it has no adapter"
        )
    return sorted(rows, key=lambda row: -row.score)


def _states(target: PreTrainedModel, ids: Tensor) -> tuple[tuple[Tensor | None, ...], Tensor]:
    """The target's hidden states of ids [1, T], behind them the last layer's output before the final norm (None without
    an adapter, which says where that norm is), and what the target picks after each token [T]."""
    adapter, before = adapter_for(target), list[Tensor]()
    hook = None
    if adapter is not None:
        norm = getattr(decoder_of(target), adapter.norm)
        hook = norm.register_forward_pre_hook(lambda module, inputs: before.append(inputs[0]))
    try:
        out = target(ids, output_hidden_states=True, use_cache=False)
    finally:
        if hook is not None:
            hook.remove()
    return (*out.hidden_states, before[-1] if before else None), out.logits[0].argmax(-1)


def _moved(checkpoint: HeadCheckpoint, target: PreTrainedModel) -> HeadCheckpoint:
    """The checkpoint with its weights where the target is, so that all readings share one copy."""
    check_range(checkpoint.state, target.dtype, checkpoint.where)
    state = {
        k: v.to(device_of(target), target.dtype if v.is_floating_point() else v.dtype)
        for k, v in checkpoint.state.items()
    }
    return replace(checkpoint, state=state)


def _default_prompt(target: PreTrainedModel) -> Tensor:
    bos = target.config.get_text_config().bos_token_id
    return torch.tensor([[bos if isinstance(bos, int) else 0]], device=device_of(target))


def _copies_embedding(checkpoint: HeadCheckpoint, target: PreTrainedModel) -> bool | None:
    shared = getattr(target.get_input_embeddings(), "weight", None)
    return (
        None
        if checkpoint.embedding is None or not isinstance(shared, Tensor)
        else is_copy(checkpoint.embedding, shared)
    )


def _readings(checkpoint: HeadCheckpoint, target: PreTrainedModel) -> Iterator[tuple[Reading, HeadCheckpoint]]:
    """The checkpoint as declared, then its variants: embedding x rotation x tap shift x residual x state fed back x
    theta; for EAGLE-1/2 only theta."""
    config, layers = checkpoint.config, target.config.get_text_config().num_hidden_layers
    theta = config.rope_parameters["rope_theta"]
    thetas = [theta] if theta == TRAINED_THETA else [theta, TRAINED_THETA]
    if config.kind == "eagle":
        for base in thetas:
            given = Reading(rope_theta=base)
            yield given, override(checkpoint, given)
        return
    may_share = config.hidden_size == sizes_of(target).embedding_size and _copies_embedding(checkpoint, target) is False
    embeddings = (True, False) if may_share else (None,)
    rotations = (True, False) if checkpoint.rope_interleaved else (None,)
    shifts = [tuple(i + step for i in config.taps) for step in (0, -1, 1)]
    shifts = [taps for taps in shifts if min(taps) >= 0 and max(taps) <= layers]
    residual, output = config.norm_before_residual, config.norm_output
    for own, turned, taps, flag, fed, base in product(
        embeddings, rotations, shifts, (residual, not residual), (output, not output), thetas
    ):
        given = Reading(
            taps=taps,
            rope_theta=base,
            rope_interleaved=turned,
            norm_before_residual=flag,
            norm_output=fed,
            own_embedding=own,
        )
        yield given, with_taps(override(checkpoint, given), layers)


def _draft(bound_head: BoundHead, ids: Tensor, states: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor]:
    """The head's first choice after every pair (token t + 1, hidden state t) of ids [1, T], and after the state that
    the head makes of the pair and the token behind it: target ids [T - 1] and [T - 2]. `states` are as from
    `_states`."""
    head = bound_head.as_module()
    config = head.config
    last = len(states) - 2
    read = [
        states[-1] if tap == last and config.last_tap_before_norm else states[tap] for tap in config.taps or (last,)
    ]
    features = torch.cat([cast(Tensor, each) for each in read], -1)[:, :-1].to(head.fc.weight.device)
    positions = torch.arange(ids.shape[1] - 1, device=features.device)[None]
    true: dict[int, tuple[Tensor, Tensor]] = {}

    def first(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        true[layer] = k[:, :-1], v[:, :-1]
        return _causal(layer, q, k, v)

    def second(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _one_step_on(q, k, v, *true[layer])

    fed = head.step(ids[:, 1:], head.fuse(features), positions, first)
    after = head.step(ids[:, 2:], fed[:, :-1], positions[:, 1:], second)
    drafts = [head.to_target(head.logits(each)[0].argmax(-1)) for each in (fed, after)]
    return drafts[0], drafts[1]


def _causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _one_step_on(q: Tensor, k: Tensor, v: Tensor, k_true: Tensor, v_true: Tensor) -> Tensor:
    """Attention of drafted nodes [B, T, heads, D]: node t sees the true pairs up to t, and itself."""
    count = q.shape[1]
    seen = torch.ones(count, count, dtype=torch.bool, device=q.device)
    mask = torch.cat((seen.tril(), torch.eye(count, dtype=torch.bool, device=q.device)), 1)
    keys, values = (torch.cat(pair, 1).transpose(1, 2) for pair in ((k_true, k), (v_true, v)))
    return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True).transpose(
        1, 2
    )
