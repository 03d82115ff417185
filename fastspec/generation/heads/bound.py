"""A head bound to its target: the frozen value that a patched model drafts with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastspec.errors import CheckpointError, Unsupported
from fastspec.generation.decoder_layer import LayerFamily, is_plain
from fastspec.generation.heads.module import (
    FLOATS,
    Binding,
    DraftHead,
    EagleHead,
    HeadConfig,
    Layer,
    MtpHead,
    ReadStored,
    RMSNorm,
    drafted_ids,
)
from fastspec.generation.heads.rounded_linear import LINES, RoundedLinear, rounded_lines
from fastspec.kernels.quantised.reference import StoredWeight, dequantised

ONCE, FADES = 1 << 10, 10
"""A token's count of one occurrence, and the part of it, one in so many, that goes whenever another text begins."""
SAME = 0.01
"""Relative distance up to which a product in half precision is taken for the one that it was made of."""


class Sizes(NamedTuple):
    """Sizes of a target that a head must agree with."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    embedding_size: int
    """The width of the embedding and of the LM head's input: OPT's may be another than that of the hidden states."""


def rows_in(module: Any) -> int | None:
    """Rows of an embedding or an LM head: its weight's, or where it packs that its own figure; None without either."""
    weight = getattr(module, "weight", None)
    shape = tuple(weight.shape) if isinstance(weight, Tensor) else ()
    if isinstance(module, nn.Linear) and shape[1:] != (module.in_features,):
        return module.out_features
    return shape[0] if shape else None


@dataclass(frozen=True, kw_only=True)
class TargetParts:
    """Parts of a target that a head is fitted and bound to. `lm_head_device` is where the LM head computes."""

    name: str
    sizes: Sizes
    embedding: nn.Module
    lm_head: nn.Module
    device: torch.device
    dtype: torch.dtype
    lm_head_device: torch.device
    family: LayerFamily | None = None
    """Family that runs a layer of the target's kind; None where only the target's own forward does."""
    stored: ReadStored | None = None
    """Reader of a packed LM head, which gives None where it is not read."""
    has_adapter: bool = False
    """True where PEFT has put an adapter into the target."""

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of embedding and LM head. Raises Unsupported without a weight, but for packed linear layers."""
        found = []
        for name, module in (("embedding", self.embedding), ("LM head", self.lm_head)):
            rows = rows_in(module)
            if rows is None:
                raise Unsupported(
                    f"a drafting head needs the size of its target's {name}, and that of this {self.name} is a "
                    f"{type(module).__name__} without a weight: use autoregressive, nasd or speculative"
                )
            found.append(rows)
        return found[0], found[1]


@dataclass
class Derived:
    """Parts derived from a bound head: the LM head of `BoundHead.readout`, the head in a lower precision (`lowered`),
    the head with a draft vocabulary (`narrowed`), and that vocabulary. Copies and pickles begin without."""

    readout: nn.Linear | RoundedLinear | None = None
    lowered: BoundHead | None = None
    narrowed: tuple[Hashable, BoundHead] | None = None
    vocabulary: DraftVocabulary | None = None

    def __reduce__(self) -> tuple[type[Derived], tuple[()]]:
        return Derived, ()


class Drafted(NamedTuple):
    """Tokens that a head is to draft: the target's `ids`, ascending. `counted` are tokens with counts to begin with,
    and `kept_by` is a fingerprint of the vocabulary by which later ones are kept; an empty one keeps none."""

    ids: Tensor
    counted: tuple[tuple[int, int], ...] = ()
    kept_by: str = ""


class DraftVocabulary:
    """The drafted tokens of a head that reads rows of its target's LM head: those it was made with, and in the last
    `free` places tokens that texts brought besides, the most frequent ones first."""

    def __init__(self, drafted: Drafted, free: int, size: int, d2t: Tensor) -> None:
        ids, device = drafted.ids, d2t.device
        self.free, self.kept_by = free, drafted.kept_by
        self.d2t = d2t.clone()
        """[V_d] as `DraftHead.d2t`, as it is now: no part of the module, whose captured rounds these changes leave."""
        self.base = torch.zeros(size, dtype=torch.bool, device=device).index_fill_(0, ids.to(device), True)
        self.counts = torch.zeros(size, dtype=torch.int64, device=device)
        """In units of 1 / ONCE, whole numbers: processes that hold a model together make the same of them."""
        tokens, counts = torch.tensor(drafted.counted, dtype=torch.int64, device="cpu").view(-1, 2).to(device).unbind(1)
        self.counts[tokens] = counts

    def count(self, tokens: Tensor, counts: Tensor) -> None:
        """Count the first counts [B] of tokens [B, T]. Waits for nothing."""
        real = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
        self.counts.index_add_(0, tokens.flatten(), real.flatten() * ONCE)

    def renew(self, readout: nn.Linear | RoundedLinear, rows: Callable[[Tensor], Tensor]) -> None:
        """Give the free places to the tokens that were counted most, in place, and `readout` their `rows` of the LM
        head. What was counted long ago fades. Waits for nothing."""
        d2t, tokens = self.d2t, self._most()
        places = torch.arange(len(d2t) - self.free, len(d2t), device=d2t.device)
        d2t[places] = tokens - places
        if isinstance(readout, RoundedLinear):
            readout.put(places, rows(tokens))
        else:
            readout.weight[places] = rows(tokens).to(readout.weight)
        self.counts.sub_(self.counts // FADES)

    def _most(self) -> Tensor:
        """The tokens [free] that were counted most besides those that it was made with."""
        size = len(self.counts)
        places = torch.arange(size, device=self.counts.device)
        return torch.topk(torch.where(self.base, -1, self.counts) * size - places, self.free).indices  # without ties

    def most_counted(self) -> dict[int, int]:
        """Token -> its count, of those that the free places would go to now. Waits for the device."""
        tokens = self._most()
        pairs = zip(tokens.tolist(), self.counts[tokens].tolist(), strict=True)
        return {token: count for token, count in pairs if count > 0}


@dataclass(frozen=True, eq=False)
class BoundHead:
    """A head and the modules that it uses of its target; the module itself may serve other targets too. `rows` are
    those of the target's embedding and LM head when it was bound, `source` the head of a twin in lower precision."""

    module: DraftHead
    binding: Binding
    rows: tuple[int, int]
    source: BoundHead | None = None
    derived: Derived = field(default_factory=Derived)

    @classmethod
    def of(cls, module: DraftHead) -> BoundHead:
        """A module as `DraftHead.bind` bound it. Raises RuntimeError for one that is not bound."""
        binding, count = module.bound, module.config.vocab_size
        return cls(module, binding, (count, count))

    @property
    def config(self) -> HeadConfig:
        """Sizes and switches of the head."""
        return self.module.config

    def as_module(self) -> DraftHead:
        """A module that shares the head's weights and has this binding; the head's own module stays as it is."""
        module = copy.copy(self.module)
        module.binding = self.binding
        return module

    def readout(self) -> Any:
        """The LM head that drafts: the head's own, the target's, or one made of the target's rows, in 8 bits where the
        head is, or of these and the head's matrix. Raises CheckpointError where the target's has no rows to give."""
        module, lm_head = self.module, self.binding.lm_head
        if module.lm_head is not None:
            return module.lm_head
        assert lm_head is not None
        if not module.config.target_rows:
            return lm_head
        made, like = self.derived.readout, module.like
        held = made.like if isinstance(made, RoundedLinear) else None if made is None else made.weight
        if held is None or (held.device, held.dtype) != (like.device, like.dtype):
            self.derived.readout = made = self._made(lm_head)
        return made

    @torch.inference_mode(False)  # what is made in one call is written to in others
    @torch.no_grad()
    def _made(self, lm_head: nn.Module) -> nn.Linear | RoundedLinear:
        weight = self._product(lm_head)
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        made.weight = nn.Parameter(weight, requires_grad=False)
        rounds = self.module.is_rounded and self.module.lm_head_map is None
        return RoundedLinear.of(made) if rounds else made

    @property
    def d2t(self) -> Tensor:
        """[V_d] offsets from the drafted tokens to the target's."""
        vocabulary = self.derived.vocabulary
        return self.module.d2t if vocabulary is None else vocabulary.d2t

    def drafted(self) -> Tensor:
        """The target's ids [V_d] of the drafted tokens."""
        return drafted_ids(self.d2t)

    @torch.no_grad()
    def hear(self, ids: Tensor, counts: Tensor) -> None:
        """Begin texts, the first counts [B] of ids [B, T]: their tokens join a draft vocabulary with free places, while
        the LM head has rows."""
        vocabulary, made = self.derived.vocabulary, self.derived.readout
        if vocabulary is None or not vocabulary.free or made is None:
            return
        if _weight(self.binding.lm_head, self.binding.stored) is not None:
            vocabulary.count(ids, counts)
            vocabulary.renew(made, self._rows)

    @torch.no_grad()
    def renew(self) -> None:
        """Make the product of `readout` anew, in place, where the target's rows or the head's matrix have changed,
        which one vector's product shows, or without a matrix some of the rows. An LM head without rows leaves it."""
        made, lm_head, between = self.derived.readout, self.binding.lm_head, self.module.lm_head_map
        if made is None or no_rows(lm_head, self.module.d2t, self.config.hidden_size, self.binding.stored) is not None:
            return
        assert lm_head is not None
        if between is None:
            ids = self.drafted()
            few = slice(None, None, max(1, len(ids) // 64))
            rows = self._rows(ids[few])
            if isinstance(made, RoundedLinear):
                codes, scales = rounded_lines(rows.to(made.like), made.kind)
                same = torch.equal(codes.view(torch.uint8), made.codes[few]) and torch.equal(scales, made.scales[few])
                if not same:
                    for places in torch.arange(len(ids), device=ids.device).split(LINES):
                        made.put(places, self._rows(ids[places]).to(made.like))
            elif not torch.equal(rows.to(made.weight), made.weight[few]):
                made.weight.copy_(self._product(lm_head))
            return
        assert isinstance(made, nn.Linear)  # the head's matrix is not rounded, nor what is made of it
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(made.weight.shape[1], generator=generator, device="cpu").to(made.weight)
        mapped = between.weight.float() @ probe.to(between.weight.device).float()
        whole = plain_weight(lm_head)
        if whole is not None and whole.dtype is torch.float32 and not isinstance(whole, DTensor):
            now = (whole @ mapped.to(whole.device))[self.module.drafted().to(whole.device)]  # a third of the time
        else:
            rows = self._rows(self.module.drafted()).float()
            now = rows @ mapped.to(rows.device)
        far = (made.weight @ probe).to(now.device, torch.float32) - now
        if float(far.norm()) > SAME * float(now.norm()):
            made.weight.copy_(self._product(lm_head))

    @torch.inference_mode(False)  # what is made in one call is written to in others
    @torch.no_grad()
    def _product(self, lm_head: nn.Module) -> Tensor:
        module, matrix = self.module, self.module.lm_head_map
        _check_rows(module, lm_head, self.binding.stored)
        rows = self._rows(self.drafted())
        if matrix is not None:
            rows = rows.float() @ matrix.weight.to(rows.device, torch.float32)
        return rows.to(module.like)

    def _rows(self, ids: Tensor) -> Tensor:
        """Rows [N, H] of the target's LM head for its ids [N], dequantised where it is packed."""
        lm_head = self.binding.lm_head
        assert lm_head is not None
        weight = _weight(lm_head, self.binding.stored)
        if not isinstance(weight, StoredWeight):
            return self.module.target_rows(lm_head, ids)
        parts = ids.to(weight.device).split(LINES)
        return torch.cat([dequantised(weight.taken(part), self.module.like.dtype) for part in parts])


@torch.inference_mode(False)  # calls in any mode write to it
@torch.no_grad()
def narrowed(head: BoundHead, key: Hashable, made: Callable[[], Drafted], free: int) -> BoundHead:
    """The head with a draft vocabulary of the target's ids that are `made`, and `free` places for those that its texts
    bring; the same one as long as its key is. Raises CheckpointError where the LM head has no rows."""
    known = head.derived.narrowed
    if known is not None and known[0] == key:
        known[1].renew()
        return known[1]
    drafted, whole, device = made(), head.config, head.module.like.device
    ids = drafted.ids
    others = torch.ones(whole.vocab_size, dtype=torch.bool, device="cpu").index_fill_(0, ids, False).nonzero().flatten()
    places = torch.cat((ids, others[:free])).to(device)
    module = copy.copy(head.module)
    module._buffers = dict(module._buffers) | {"d2t": places - torch.arange(len(places), device=device)}
    module.config = replace(whole, draft_vocab_size=len(places), target_rows=True)
    assert head.binding.lm_head is not None
    _check_rows(module, head.binding.lm_head, head.binding.stored)
    twin = BoundHead(module, head.binding, head.rows)
    twin.readout()
    twin.derived.vocabulary = DraftVocabulary(drafted, free, whole.vocab_size, module.d2t)
    head.derived.narrowed = key, twin
    return twin


def bind(module: DraftHead, embedding: nn.Module | None, target: TargetParts) -> BoundHead:
    """A head bound to a target: `embedding` is the head's own, None for the target's. Raises CheckpointError where the
    LM head has no rows to give, Unsupported where it would run on another device."""
    borrows, rows = module.lm_head is None, module.config.target_rows
    if borrows and not rows and target.lm_head_device != target.device:
        raise Unsupported(
            f"this head drafts with the LM head of {target.name}, which is on {target.lm_head_device}, and would run "
            f"on {target.device}: use a head with an LM head of its own, 'nasd' or 'speculative'"
        )
    if rows:
        _check_rows(module, target.lm_head, target.stored)
    own = embedding is not None
    binding = Binding(
        target.embedding if embedding is None else embedding,
        target.lm_head if borrows else None,
        own,
        target.family,
        target.stored,
    )
    return BoundHead(module, binding, target.rows)


def followed(head: BoundHead, target: TargetParts) -> BoundHead:
    """The head as its target is now: itself, or another where the target was moved, cast, or given another embedding or
    LM head since. Raises Unsupported where the target's vocabulary has changed and the head cannot serve it."""
    last, layers = max(head.config.taps, default=0), target.sizes.num_layers
    if last > layers:
        raise Unsupported(
            f"the head reads what layer {last} of the model gives, which has {layers} by now (num_hidden_layers): "
            "change it back, or fastspec.unpatch(model) and patch it with a head made for it"
        )
    weight = head.module.like
    if weight.device != target.device or weight.dtype != target.dtype:
        head = _moved(head, target)
    held, borrowed, own = head.binding.embedding, head.binding.lm_head, head.binding.own_embedding
    rows = target.rows
    if rows == head.rows and (own or held is target.embedding) and borrowed in (None, target.lm_head):
        head.renew()
        return head
    reasons = _misfits_now(head, target, rows)
    if reasons:
        sizes = f" ({head.rows[0]} and {head.rows[1]} tokens then, {rows[0]} and {rows[1]} now)"
        back = f", such as by model.resize_token_embeddings({head.rows[0]})"
        raise Unsupported(
            f"the model's embedding and LM head have changed since fastspec.patch{sizes if rows != head.rows else ''}, "
            f"and its head does not fit them: {'; '.join(reasons)}. Change them back"
            f"{back if rows != head.rows and head.rows[0] == head.rows[1] else ''}, or "
            "fastspec.unpatch(model) and patch it with a head made for it"
        )
    return bind(head.module, held if own else None, target)


def _misfits_now(head: BoundHead, target: TargetParts, rows: tuple[int, int]) -> list[str]:
    config, borrowed, own = head.config, head.binding.lm_head, head.binding.own_embedding
    last = int(head.module.drafted().max())
    lines = len(cast(Tensor, head.binding.embedding.weight)) if own else rows[1]
    used = [None if own else target.embedding, None if borrowed is None else target.lm_head]
    wide = [_width(each) for each in used if each is not None]
    reasons = (
        (last >= min(rows), f"the head drafts tokens up to {last}"),
        (lines < rows[1], f"the head's own embedding has {lines} rows"),
        (
            borrowed is not None and not config.target_rows and rows[1] != config.draft_vocab_size,
            f"the head drafts with the model's LM head, of {config.draft_vocab_size} tokens",
        ),
        (any(width != config.hidden_size for width in wide), f"the head is {config.hidden_size} wide"),
    )
    return [reason for holds, reason in reasons if holds]


def _width(module: nn.Module) -> int:
    """Columns of an embedding's or an LM head's weight, or where it is packed the module's own figure."""
    if isinstance(module, nn.Linear) and plain_weight(module) is None:
        return module.in_features
    return cast(Tensor, module.weight).shape[1]


def check_range(weights: Mapping[str, Tensor], dtype: torch.dtype, where: str) -> None:
    """Raise CheckpointError, naming the tensor, for finite weights that are infinite in a target's fp16."""
    if dtype is not torch.float16:
        return
    for name, weight in weights.items():
        if weight.is_floating_point() and not torch.isfinite(weight.to(dtype)).all():
            raise CheckpointError(
                f"{where}: {name} has values up to {float(weight.abs().max()):g}, and {dtype} ends at "
                f"{torch.finfo(dtype).max:g}: load the target in torch.bfloat16 or torch.float32"
            )


def _moved(head: BoundHead, target: TargetParts) -> BoundHead:
    """A copy of a head on the target's device and in its dtype; what it borrows of the target stays shared."""
    binding = head.binding
    check_range(dict(head.module.named_parameters()), target.dtype, "this head")
    if binding.own_embedding:
        check_range({"embed_tokens.weight": cast(Tensor, binding.embedding.weight)}, target.dtype, "this head")
    module = copy.deepcopy(head.module, {id(head.module.binding): None}).to(target.device, target.dtype)
    if binding.own_embedding:
        binding = replace(binding, embedding=copy.deepcopy(binding.embedding).to(target.device, target.dtype))
    return BoundHead(module, binding, head.rows)


def _check_rows(module: DraftHead, lm_head: nn.Module, stored: ReadStored | None = None) -> None:
    reason = no_rows(lm_head, module.d2t, module.config.hidden_size, stored)
    if reason is not None:
        raise CheckpointError(
            f"{reason}: load the target without quantising or offloading its LM head, or use another head"
        )


def plain_weight(module: Any) -> Tensor | None:
    """An embedding's or LM head's weight in plain floating point, or None without one, as where it is offloaded."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or type(weight) not in (Tensor, nn.Parameter, DTensor):
        return None
    return None if weight.is_meta or weight.dtype not in FLOATS else weight


def _weight(lm_head: Any, stored: ReadStored | None) -> Tensor | StoredWeight | None:
    """An LM head's weight in plain floating point, or as it is stored, or None without either."""
    plain = plain_weight(lm_head)
    return stored(lm_head) if plain is None and stored is not None else plain


def no_rows(lm_head: Any, d2t: Tensor, width: int, stored: ReadStored | None = None) -> str | None:
    """Reason why a target's LM head has no rows [width] in plain floating point, or that `stored` reads, for the tokens
    of `d2t`, or None."""
    held, weight = getattr(lm_head, "weight", None), _weight(lm_head, stored)
    if weight is not None:
        last = int(drafted_ids(d2t).max())
        if len(weight.shape) == 2 and weight.shape[0] > last and weight.shape[1] == width:
            return None
        found = f"of shape {list(weight.shape)}"
    elif not isinstance(held, Tensor) or type(held) not in (Tensor, nn.Parameter, DTensor):
        found = type(held if isinstance(held, Tensor) else lm_head).__name__
    else:
        found = "on the device meta, without values" if held.is_meta else str(held.dtype)
    return f"the head drafts with rows [{width}] of the target's LM head, in plain floating point, and that is {found}"


def lowered(head: BoundHead, dtype: torch.dtype | None) -> BoundHead:
    """The twin of an fp32 head with weights of `dtype`, in which a backend drafts; the head keeps it. Rounding can cost
    accepted tokens, never the output's, and half as many bytes are read in half the time.

    The head itself for None, for a head of another dtype, for one that drafts with the target's whole LM head, and for
    one of whose modules any is more than its weights (hooks, parametrizations, other classes).
    """
    module = head.module
    borrows = module.lm_head is None and module.lm_head_map is None
    own = isinstance(module, EagleHead) and not borrows and _is_weights(module)
    if dtype is None or module.like.dtype is not torch.float32 or not own:
        head.derived.lowered = None
        return head
    twin = head.derived.lowered
    if twin is None or twin.module.fc.weight.dtype is not dtype or not follow(twin):
        made = _rounded_to(dtype, module).eval()
        made.binding = None
        twin = head.derived.lowered = BoundHead(made, head.binding, head.rows, source=head)
    return twin


@torch.no_grad()
def follow(twin: BoundHead) -> bool:
    """Give a twin its head's weights anew, in place: the head may have been trained since. False, and nothing has
    happened, where these have other shapes. A head that is no twin is left as it is."""
    if twin.source is None:
        return True
    head = twin.source.module
    mine, theirs = (dict(each.named_parameters(remove_duplicate=False)) for each in (twin.module, head))
    if {name: each.shape for name, each in mine.items()} != {name: each.shape for name, each in theirs.items()}:
        return False
    for name, weight in mine.items():
        weight.copy_(theirs[name])
    assert isinstance(twin.module, EagleHead) and isinstance(head, EagleHead)
    twin.module.d2t, twin.module.inv_freq, twin.module.rope_scale = head.d2t, head.inv_freq, head.rope_scale
    twin.renew()
    return True


@torch.inference_mode(False)
@torch.no_grad()
def _rounded_to(dtype: torch.dtype, module: nn.Module) -> Any:
    """A module of the same modules with weights of `dtype`, none of which two names share. What else it holds, which
    need not be copyable, stays shared."""
    made, weights, inner = copy.copy(module), module._parameters, module._modules
    made._parameters = {
        name: None if weight is None else nn.Parameter(weight.detach().to(dtype), requires_grad=False)
        for name, weight in weights.items()
    }
    made._modules = {name: None if each is None else _rounded_to(dtype, each) for name, each in inner.items()}
    made._buffers = dict(module._buffers)
    return made


def _is_weights(head: DraftHead) -> bool:
    """True where what a head computes follows from its class and its weights."""
    for module in head.modules():
        if isinstance(module, nn.Linear):
            if not is_plain(module):
                return False
        elif isinstance(module, RMSNorm):
            hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
            if hooked or type(module.weight) is not nn.Parameter:
                return False
        elif any(True for _ in module.parameters(recurse=False)):
            return False
    return True


@torch.inference_mode(False)  # calls in any mode draft with it
@torch.no_grad()
def rounded(head: BoundHead) -> BoundHead:
    """A copy of a head in 8 bits: its linear layers hold codes with a scale for each line, rounded once, so that later
    changes of its weights are not seen. What it borrows of its target stays shared, and is not rounded but for the rows
    of a draft vocabulary, which are copies. A head that is rounded already stays itself.

    Raises ValueError, naming it, for a product that is no `torch.nn.Linear`.
    """
    module = head.module
    if module.is_rounded:
        return head
    made: dict[int, Any] = {id(module.binding): None}
    for name, layer in products(head):
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"{name} is a {type(layer).__name__}, and torch.nn.Linear layers are rounded")
        made[id(layer)] = RoundedLinear.of(layer)
    return BoundHead(copy.deepcopy(module, made), head.binding, head.rows)


def products(head: BoundHead) -> list[tuple[str, nn.Module]]:
    """The head's own layers that are multiplied when it drafts, by their names. The matrix that makes an LM head of the
    target's rows is not among them, nor are mixtures of experts."""
    module, family = head.module, head.binding.family
    mine: set[nn.Module] = {each for each in (module.fc, module.lm_head) if each is not None}
    if isinstance(module, EagleHead):
        for layer in cast(Iterable[Layer], module.layers):
            attn, mlp = layer.self_attn, layer.mlp
            mine |= {attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj}
    elif isinstance(module, MtpHead) and family is not None:
        mine |= set(family.products(module.layer))
    return [(name, each) for name, each in module.named_modules() if each in mine]
