"""Drafters, the decodings that make one for every call, and the checks of a third party's.

A drafter of one's own has three methods and two numbers; all else has a default here:

    begin     take the prompt and the first new token
    propose   the next tree of draft tokens
    observe   what the target chose in it
    nodes, max_path   the largest tree, and the longest path in it
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastspec.default_trees import TreeShape
from fastspec.errors import Unsupported
from fastspec.generation.ops import Ops
from fastspec.generation.stats import unmarked
from fastspec.generation.target import Buffered, Source, Target
from fastspec.generation.tree import TokenTree, Verdict


def why_uncallable(method: Callable[..., object], positions: Sequence[str], names: Sequence[str] = ()) -> str | None:
    """The reason why a method cannot be called with these arguments; None where it can, or has no signature."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*positions, **dict.fromkeys(names))
    except TypeError as error:
        takes = ", ".join(str(each.replace(annotation=each.empty)) for each in signature.parameters.values())
        name = getattr(method, "__name__", type(method).__name__)
        return f"{name}({takes}) is called with ({', '.join(positions or names)}): {error}"
    return None


def check_taps(taps: object, layers: int, name: str) -> None:
    """Raise Unsupported for what are no hidden states of a model of so many layers."""
    if taps is None:
        return
    if not isinstance(taps, (tuple, list)) or not all(
        tap in range(layers + 1) and not isinstance(tap, bool) for tap in taps
    ):
        raise Unsupported(
            f"assistant {name!r} has taps={taps!r}: accepted are None for no features, () for the last hidden state "
            f"after the norm, and a tuple of hidden states, from 0, the embeddings, to {layers}"
        )


def check_tree(tree: object, root: Tensor, *, nodes: int, max_path: int, draws: bool, who: str) -> None:
    """Raise Unsupported for anything but a tree of at most `nodes` nodes and `max_path` nodes a path, a row for every
    root [B], with `q` only where it `draws`. Nothing is read back from the device."""
    if not isinstance(tree, TokenTree):
        kind = type(tree).__name__
        raise Unsupported(
            f"{who}.propose gave a {kind}: fastspec.TokenTree.chain(tokens) and .from_parents(...) make trees"
        )
    tokens = tree.tokens
    if tokens.dim() != 2 or len(tokens) != len(root):
        raise Unsupported(
            f"{who}.propose gave tokens of shape {list(tokens.shape)} for {len(root)} rows: they are [{len(root)}, N]"
        )
    if tokens.dtype != root.dtype or tokens.device != root.device:
        raise Unsupported(
            f"{who}.propose gave tokens in {tokens.dtype} on {tokens.device}: they are {root.dtype} on {root.device}"
        )
    if not 1 <= tokens.shape[1] <= max(nodes, max_path) or tree.max_path > max_path:
        raise Unsupported(
            f"{who}.propose gave a tree of {tokens.shape[1]} nodes and up to {tree.max_path} a path, and it says "
            f"nodes={nodes} and max_path={max_path}: room was made for these, the root counted"
        )
    if tree.q is not None and not draws:
        raise Unsupported(
            f"{who}.propose gave drafts with the distributions that they were drawn from (TokenTree.q): they are drawn "
            "only where Decoding.drafter was given a `process`, and by a drafter whose traits say Traits(draws=True)"
        )


def check_roots(tokens: Tensor, root: Tensor, going: Tensor, who: str) -> None:
    """Raise Unsupported where tokens [B, N] do not begin with the last emitted token root [B] in the rows going [B]."""
    wrong = ((tokens[:, 0] != root) & going).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise Unsupported(
            f"{who}.propose gave a tree that begins with token {int(tokens[row, 0])} in row {row}, where "
            f"{int(root[row])} was emitted last: its root is `root` of `begin`, and then `verdict.bonus` of each "
            "`observe` for the rows that are `active`"
        )


Process = Callable[[Tensor], Tensor]
"""Scores [R, V] -> scores [R, V], as a call's processors leave them."""


class Place(Enum):
    """Place of a phase of a round. A DEVICE phase reads and writes tensors that stay where they are and waits for
    nothing, so a CUDA graph can hold it; a HOST phase runs Python between two launches. A FED phase, of verifiers
    alone, is a DEVICE phase that reads what the host writes while the device scores (`FedVerifier`)."""

    HOST = "host"
    DEVICE = "device"
    FED = "fed"


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a drafter, by which the engine decides how rounds run."""

    place: Place = Place.HOST
    """Place of `propose` and `observe`."""
    reusable: bool = False
    """True where `open` begins a later call of the same kind; others are made anew for every call."""
    reads_logits: bool = True
    """True where the drafter reads the target's logits; else `observe` may be given the likeliest tokens instead."""
    draws: bool = False
    """True where drafts are drawn at random, from distributions that trees bring as `TokenTree.q`."""


class Drafter(Buffered, ABC):
    """Proposes a tree after the last emitted token and learns from what the target chose in it."""

    traits: Traits = Traits()
    nodes: int
    """Nodes of the largest tree, the root included."""
    max_path: int
    """Nodes of the longest path in it."""
    observes_roots: bool = False
    """True where it hears of rounds without drafts by `catch_up`, or by `observe` of trees of the root alone that are
    not its own. Then prompts of an open batch may ask for no drafts."""
    ends: frozenset[int] = frozenset()
    """The call's end tokens; set before `begin`."""
    mark: Callable[[str], None] = staticmethod(unmarked)
    """Called with the name of a part of `propose` that is done, where a profile is taken."""

    @abstractmethod
    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Take the prompt: ids [B, T] with counts [B] real tokens, the target's features of them [B, T, F], and the
        first emitted token root [B]."""

    @abstractmethod
    def propose(self, extent: int) -> TokenTree:
        """The next tree, of at most `nodes` nodes; its root is the last emitted token. No row has more than `extent`
        committed tokens. `TokenTree.q` and `TokenTree.drafted` say more of its drafts."""

    @abstractmethod
    def observe(
        self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int
    ) -> None:
        """Take the verdict on the last tree, and the target's raw logits [B, N, V] and features [B, N, F] of its nodes,
        which the next pass of the target may write over."""

    def open(self, capacity: int) -> None:
        """Begin another call of the same rows, of at most `capacity` tokens each; for `traits.reusable`."""
        raise NotImplementedError(f"{type(self).__name__} is not made for a second call")

    def bind(self, target: Target) -> None:
        """Take the call's target, before `begin`; for drafters that read its cache."""

    def copy_row(self, row: int, other: Drafter, count: int) -> None:
        """Begin a row anew with the prompt of `count` tokens that `other`, a drafter of the same decoding and of one
        row, has begun with; for `Decoding.continuous`. A drafter whose rows move does so by `move_row`."""
        if not self.moves:
            raise NotImplementedError(f"{type(self).__name__} cannot take another prompt in place of a row")
        self.move_row(row, other, 0, count)

    def move_row(self, row: int, other: Drafter, source: int, count: int) -> None:
        """Go on in a row with row `source` of another drafter of the same decoding, whose text has `count` committed
        tokens. Where it is overridden, open batches take as many rows as they need (`fastspec.continuous`)."""
        raise NotImplementedError(f"{type(self).__name__} cannot go on with a row of another")

    def resume(self, other: Drafter, source: int, count: int) -> None:
        """Begin with the first `count` tokens that row `source` of another drafter of the same decoding has read, whose
        next token is the same; `begin` then takes the text behind them alone. Where it is overridden, a prompt that
        begins like another is not read again (`fastspec.continuous`); so it is where no features are read
        (`Decoding.taps`), and `begin` takes the whole prompt."""
        raise NotImplementedError(f"{type(self).__name__} cannot go on from a part of a text")

    def take_prefix(self, other: Drafter, source: int, count: int) -> int:
        """Take what row `source` of another drafter knows of its first `count` tokens -> how many of the prompt's
        tokens `begin` is not given: all of these by `resume`, where it is overridden, else none."""
        if not self.resumes:
            return 0
        self.resume(other, source, count)
        return count

    @property
    def resumes(self) -> bool:
        """True where `begin` takes what is behind the tokens of `resume`."""
        return type(self).resume is not Drafter.resume

    @property
    def moves(self) -> bool:
        """True where rows move from one to another."""
        return type(self).move_row is not Drafter.move_row

    def pause(self) -> int:
        """Number of the next rounds that have no drafts; asked before every round that may have some."""
        return 0

    def rests_on(self) -> int:
        """Number of rounds without drafts that follow those of the last `pause`; asked before the last of them, which
        may be in flight."""
        return 0

    def catch_up(self, tokens: Tensor, counts: Sequence[int]) -> None:
        """Take the tokens [B, n] that the rows emitted in rounds without drafts, counts [B] of it."""

    def sized(self, shape: TreeShape) -> Drafter:
        """This drafter with other trees, on the same state: no larger ones than its own."""
        raise NotImplementedError(f"{type(self).__name__} drafts trees of one size")

    def resting(self, root: Tensor) -> RootsOnly:
        """Drafter of the roots root [B] alone for rounds without drafts, where sizes are chosen."""
        raise NotImplementedError(f"{type(self).__name__} drafts trees of one size")

    def hint(self, texts: Sequence[Sequence[int]]) -> None:
        """Take a text per row that is no part of the row itself, such as another model's answer; before `begin`."""


@dataclass(eq=False, slots=True)
class Unread:
    """Prompts that one pass of the target has read, and a drafter has not: `reader`, of as many rows, begins with ids
    [B, T], counts [B], features [B, T, F] and root [B] once drafts are wanted. `rows` have taken them: each has the
    reader's row, and its tokens. `refuse` ends the prompt of a row with an error of that."""

    reader: Drafter
    ids: Tensor
    counts: Tensor
    features: Tensor
    root: Tensor
    refuse: Callable[[int, Exception], None]
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)


class RootsOnly(Drafter):
    """Drafter of a root alone, root [B], that lets another drafter of the same rows know what they emit."""

    nodes = max_path = 1
    backlog: int = 128
    """Rounds at the most before `hand_over`."""

    def __init__(self, drafter: Drafter, root: Tensor) -> None:
        self.drafter, self.root, self.tree = drafter, root, TokenTree.root_only(root)
        self.traits = Traits(drafter.traits.place, reads_logits=drafter.traits.reads_logits)
        self.catches_up = drafter.traits.place is Place.HOST and type(drafter).catch_up is not Drafter.catch_up
        self.unread: list[Unread] = []
        """Prompts that the other drafter begins with before it drafts, the first ones first."""

    def reserve(self, committed: int) -> int:
        return self.drafter.reserve(committed)

    def fits(self, committed: int) -> bool:
        return self.drafter.fits(committed)

    @property
    def buffers(self) -> Hashable:
        return self.drafter.buffers

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Nothing: the other has begun."""

    def propose(self, extent: int) -> TokenTree:
        return self.tree

    def observe(
        self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int
    ) -> None:
        if self.catches_up:
            self.drafter.catch_up(verdict.bonus[:, None], active.long().tolist())
        else:
            self.drafter.observe(tree, verdict, logits, features, active, extent)

    def takes(self, tokens: int) -> bool:
        """True where it may keep prompts of so many tokens more, padding counted, until the other drafter drafts."""
        return False

    def hand_over(self, rounds: int) -> None:
        """Let the other drafter take what was kept of prompts, and of so many rounds, if anything was."""

    def forget(self, row: int | None = None) -> None:
        """Drop what was kept of a row (None: of all): nobody drafts after it."""


class HostDrafter(Drafter):
    """A drafter on the host that learns from a few integers of every round, which a captured round reads back with its
    own result. `catch_up` is called with tokens on the host, after every round without drafts while it `listens`."""

    listens = True
    """False in a rest of whose rounds it hears when it is asked next, or rows change."""

    tries = False
    """True in a warm-up: rounds have trees of every size in turn, whatever they promise, and none."""
    timed = False
    """True where a clock may decide on drafts: no size changes a bit, or roundings follow the load anyway."""
    ends_at_once = False
    """True where no prompt takes a row that has ended: a call is over with its last one."""
    hosted = False
    """True where the host had a part in choosing the last round's tokens, which takes longer."""

    @abstractmethod
    def digest(self, tree: TokenTree, verdict: Verdict, logits: Tensor, active: Tensor, steps: int) -> Tensor:
        """The integers [B, D] int64 that `update` needs of a round, of the first `steps` nodes of every path."""

    @abstractmethod
    def update(self, digest: list[list[int]], steps: int) -> None:
        """Take a digest of so many steps, read back."""

    def join(
        self,
        row: int,
        text: Tensor,
        first: int,
        prefix: tuple[Drafter, int, int] | None = None,
        hint: Sequence[int] = (),
    ) -> None:
        """Begin a row anew with a prompt text [T], on the host, and the first token of its answer, in place of
        `copy_row`; for `Decoding.continuous`. A `prefix` is this drafter, or what another has `held`, with the row that
        has read so many of the first tokens, and `hint` a text as of the method."""
        raise NotImplementedError(f"{type(self).__name__} begins all rows at once")

    def held(self) -> HostDrafter:
        """Snapshot of what is known of the rows, for others to `join` with; it holds until the next round here."""
        raise NotImplementedError(f"{type(self).__name__} begins all rows at once")

    def work(self) -> None:
        """Work that can wait until a pass was launched, and is done while the device is busy."""

    def come(self) -> None:
        """The tokens of a round have come, of which it hears later."""

    def interrupt(self) -> None:
        """Other work comes before the next round."""

    def finish(self) -> None:
        """The call is over: do what was put off and is needed beyond it."""

    def observe(
        self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int
    ) -> None:
        """Make the digest, read it back and take it; on a CPU of the accepted steps alone."""
        steps = int(verdict.accepted.max()) + 1 if logits.device.type == "cpu" else tree.max_path
        self.update(self.digest(tree, verdict, logits, active, steps).tolist(), steps)


class MixingDrafter(Drafter):
    """A drafter whose distribution is mixed into the target's; the call emits the mixture's tokens."""

    @abstractmethod
    def first(
        self, ids: Tensor, counts: Tensor, logits: Tensor, scores: Tensor, *, process: Process | None, sample: bool
    ) -> Tensor:
        """Read the text ids [B, T], of which counts [B] tokens are real -> log-probabilities [B, V] of the first new
        token.

        logits and scores [B, V] are the target's, raw and processed; `process` is the call's processors, None where
        there are none, and `sample` says whether the call draws.
        """

    @abstractmethod
    def mix(self, tree: TokenTree, logits: Tensor, scores: Tensor) -> Tensor:
        """Log-probabilities at the nodes of the last tree, from the target's raw logits and processed scores."""

    @abstractmethod
    def mix_row(self, row: int, logits: Tensor, scores: Tensor, *, process: Process | None, sample: bool) -> Tensor:
        """`mix` [N, V] of a row that has processors of its own, from its raw logits and processed scores [N, V]."""


class Decoding(ABC):
    """A strategy, which `generate(assistant=...)` makes of a name, and accepts from third parties."""

    name: str
    taps: tuple[int, ...] | None
    """Transformers' hidden states that the drafter reads; None for no features, () for the last after the norm."""
    continuous: ClassVar[bool] = False
    """True where its drafters take a new prompt in place of a row that has ended (`Drafter.copy_row`). It is asked for
    a drafter of a single row besides, and where rows move (`Drafter.move_row`) and passes are captured for others of
    2, 4 and 8 rows, in which prompts begin together."""
    reads_source: ClassVar[bool] = False
    """True where its drafters read the source of an encoder-decoder model themselves (`reading`)."""

    @abstractmethod
    def drafter(
        self, *, rows: int, capacity: int, device: torch.device, ops: Ops, process: Process | None
    ) -> Drafter | None:
        """Make the drafter of one generate call of `rows` rows and `capacity` tokens each; None decodes token by token.

        `process` maps scores [R, V] as the call's processors do; None where the call does not sample, or they look at
        the history. Drafts may be drawn (`Traits.draws`) only where it is given.
        """

    @property
    def before_norm(self) -> bool:
        """True where a tap after the last layer is before the final norm, unlike transformers' hidden states."""
        return False

    def reading(self, source: Source) -> Decoding:
        """The decoding of a call with this source."""
        return self

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Modules beside the target that a drafter runs; a captured round holds for their weights at its capture."""
        return ()


METHODS = {
    name: tuple(inspect.signature(getattr(Drafter, name)).parameters)[1:] for name in ("begin", "propose", "observe")
}
"""The methods that every drafter has -> the arguments that each is called with, by position."""
NUMBERS = ("nodes", "max_path")
OPTIONAL = (
    *("ends", "reserve", "digest", "mix"),
    *(name for name, each in vars(Drafter).items() if inspect.isfunction(each) and name not in METHODS),
)
"""Methods that are refused on a plain three-method drafter: nobody would call them. Any other name is its own."""


class Adopted(Drafter):
    """A third party's drafter of three methods, called by position; `may_draw`: trees may bring `TokenTree.q`."""

    def __init__(self, theirs: Any, may_draw: bool) -> None:
        self.traits = Traits(draws=may_draw)
        self.theirs, self.nodes, self.max_path = theirs, theirs.nodes, theirs.max_path

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        self.theirs.begin(ids, counts, features, root)

    def propose(self, extent: int) -> TokenTree:
        tree: TokenTree = self.theirs.propose(extent)
        return tree

    def observe(
        self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int
    ) -> None:
        self.theirs.observe(tree, verdict, logits, features, active, extent)


@dataclass(frozen=True)
class AdoptedDecoding(Decoding):
    """A third party's decoding, whose drafters are adopted where they are made."""

    theirs: Any
    name: str
    taps: tuple[int, ...] | None

    def drafter(
        self, *, rows: int, capacity: int, device: torch.device, ops: Ops, process: Process | None
    ) -> Drafter | None:
        made: Drafter | None = self.theirs.drafter(
            rows=rows, capacity=capacity, device=device, ops=ops, process=process
        )
        return made


def adopt(drafter: object, *, may_draw: bool) -> Drafter | None:
    """A drafter as the engine takes it; `may_draw` says that it was given a `process`.

    Raises Unsupported that names what is missing, or what only a class that derives from `Drafter` may have."""
    if drafter is None:
        return None
    kind = type(drafter).__name__
    missing = [
        f"{name}({', '.join(takes)})" for name, takes in METHODS.items() if not callable(getattr(drafter, name, None))
    ]
    numbers = {name: getattr(drafter, name, None) for name in NUMBERS}
    missing += [f"{name} (int, at least 1)" for name, size in numbers.items() if type(size) is not int or size < 1]
    if missing:
        raise Unsupported(f"{kind} is no drafter: it lacks {', '.join(missing)}; see fastspec.Drafter")
    if isinstance(drafter, Drafter):
        _check_traits(drafter)
        return drafter
    more = [name for name in OPTIONAL if hasattr(drafter, name)]
    if more:
        raise Unsupported(f"{kind} has more than three methods, {', '.join(more)}: derive it from fastspec.Drafter")
    for name, takes in METHODS.items():
        if (why := why_uncallable(getattr(drafter, name), takes)) is not None:
            raise Unsupported(f"{kind} is no drafter: {why}; see fastspec.Drafter")
    return Adopted(drafter, may_draw)


def _check_traits(drafter: Drafter) -> None:
    kind = type(drafter)
    if not isinstance(drafter.traits, Traits):
        raise Unsupported(
            f"{kind.__name__}.traits={drafter.traits!r} must be fastspec.generation.drafters.base.Traits(...)"
        )
    if drafter.traits.reusable and kind.open is Drafter.open:
        raise Unsupported(
            f"{kind.__name__} says Traits(reusable=True), and lacks open(capacity), which begins a later call"
        )


def check_rows(drafter: Drafter | None, name: str) -> None:
    """Raise Unsupported for a drafter whose rows cannot begin anew one by one, of a decoding that says `continuous`."""
    if drafter is not None and not drafter.moves and type(drafter).copy_row is Drafter.copy_row:
        raise Unsupported(
            f"assistant {name!r} says continuous = True, and its {type(drafter).__name__} lacks copy_row(row, other, "
            "count), which begins a row anew; see fastspec.Drafter"
        )


def adopt_decoding(decoding: object) -> Decoding | None:
    """A third party's decoding as the engine takes it, else None. Raises Unsupported for parts that it lacks."""
    if isinstance(decoding, type):
        raise Unsupported(f"assistant={decoding.__name__} is a class: give an object of it, {decoding.__name__}(...)")
    name = getattr(decoding, "name", None)
    if isinstance(decoding, Decoding) and not isinstance(name, str):
        raise Unsupported(f"{type(decoding).__name__} lacks `name`: what reports call it, a str")
    if not callable(getattr(decoding, "drafter", None)) or not isinstance(name, str):
        return None
    if not hasattr(decoding, "taps"):
        raise Unsupported(f"assistant {name!r} lacks `taps`: the hidden states that its drafter reads, or None")
    if isinstance(decoding, Decoding):
        return decoding
    more = [each for each in ("joins", "reading", "continuous") if hasattr(decoding, each)]
    if more:
        raise Unsupported(
            f"assistant {name!r} has {', '.join(more)}: derive it from fastspec.Decoding (continuous, reading)"
        )
    theirs: Any = decoding
    if (why := why_uncallable(theirs.drafter, (), ("rows", "capacity", "device", "ops", "process"))) is not None:
        raise Unsupported(f"assistant {name!r} cannot make a drafter: {why}; see fastspec.Decoding")
    return AdoptedDecoding(theirs, name, tuple(theirs.taps) if isinstance(theirs.taps, list) else theirs.taps)
