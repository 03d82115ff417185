"""Drafters whose draft model has another tokenizer: they hand over text, or tokens that both vocabularies have.

The text so far is encoded anew for the draft model, its continuation is decoded and encoded for the target. The drafts
are a function of the text and of rounds that are over, so that one draw per node keeps every call exact.

Token-level intersection: Timor et al. (arXiv 2502.05202). The draft model's distribution, restricted to the shared
tokens and renormalised, is processed as the target's and judged by p / q.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import Tensor

from fastspec.generation.drafters.base import Drafter, Process, Traits
from fastspec.generation.drafters.chain import Passes
from fastspec.generation.drafters.policy import AdaptiveLength, Length
from fastspec.generation.ops import Ops
from fastspec.generation.target import Target
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.generation.verify import pick_draft


class Tokenizer(Protocol):
    """A tokenizer of transformers, or one called like it, perhaps without the roles of tokens (`bos_token_id`, ...)."""

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Mapping[str, Sequence[int]]:
        """The tokens of a text: "input_ids"."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """The text of tokens."""

    def get_vocab(self) -> Mapping[str, int]:
        """Every token as the vocabulary writes it, and its id."""


def decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of tokens, special ones included."""
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, nothing added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def opening_of(tokenizer: Tokenizer) -> list[int]:
    """The begin token, where a tokenizer puts it before a text."""
    first = getattr(tokenizer, "bos_token_id", None)
    return [] if first is None or list(tokenizer("")["input_ids"])[:1] != [first] else [first]


LONGEST_CHARACTER = 4
"""Bytes of the longest character in UTF-8, and so the most tokens that may end in the middle of one."""
ANEW, TRIES = 64, 8
"""Tokens at the end of a text that are always encoded anew, and places that are tried as the cut before them."""


class RetokenizingDrafter(Drafter):
    """The texts of a call's rows, and a draft model with a cache of its own, `room` tokens a row and a tail of one.

    Texts are read with `tokenizer`, the target's, and `draft_tokenizer`; the models have `vocab` and `draft_vocab`
    tokens. A text that does not encode, outgrows `room` or has a token that the draft model lacks is not drafted for.
    """

    traits = Traits(reusable=True, reads_logits=False)

    def __init__(
        self,
        draft: Target,
        length: Length,
        *,
        room: int,
        tokenizer: Tokenizer,
        draft_tokenizer: Tokenizer,
        vocab: int,
        draft_vocab: int,
        device: torch.device,
    ) -> None:
        self.draft, self.length, self.room, self.device = draft, length, room, device
        self.vocab, self.draft_vocab = vocab, draft_vocab
        self.tokenizer, self.draft_tokenizer = tokenizer, draft_tokenizer
        self.known: dict[int, int] = {}
        """The draft model's ids of target tokens that mean the same."""
        self.opening = opening_of(draft_tokenizer)
        self.nodes = self.max_path = length.most + 1
        self.passes = Passes(draft)

    def open(self, capacity: int) -> None:
        self.room = room_for(capacity, self.length)
        self.draft.open(self.room)

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        self.history = [
            [*row[:count], first]
            for row, count, first in zip(ids.tolist(), counts.tolist(), root.tolist(), strict=True)
        ]
        self.read: list[list[int]] = [[] for _ in self.history]
        self.fed: list[list[int]] = [[] for _ in self.history]
        """The tokens in the draft's cache."""
        starts = [int(history[0] == getattr(self.tokenizer, "bos_token_id", None)) for history in self.history]
        self.settled: list[tuple[int, list[int]]] = [(start, []) for start in starts]
        """The number of a text's tokens that are encoded for good, and their encoding."""
        self.due = [start + 2 * ANEW for start in starts]
        """The length of a text at which more of it is."""
        self.adaptive = AdaptiveLength(self.length, root.device)
        self.active = torch.ones_like(root, dtype=torch.bool)
        """The rows that go on, the rounds' own tensor after the first."""

    def pause(self) -> int:
        return self.adaptive.budget.pause()

    def catch_up(self, tokens: Tensor, counts: Sequence[int]) -> None:
        for history, more, count in zip(self.history, tokens.tolist(), counts, strict=True):
            history += more[:count]

    def observe(
        self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int
    ) -> None:
        self.adaptive.judge(verdict.accepted, active)
        self.active = active
        for history, emitted in zip(self.history, verdict.read(tree, active), strict=True):
            history += emitted

    def _roots(self) -> Tensor:
        """The last token of every row [B]."""
        return torch.tensor([history[-1] for history in self.history], device=self.device)

    def _encode_all(self) -> list[bool]:
        """Begin a round: encode the texts of the rows that go on -> which rows can be drafted for."""
        self.alive: list[bool] = self.active.tolist()
        self.adaptive.begin(max(1, sum(self.alive)))
        able = []
        for row, going in enumerate(self.alive):
            read = self._encoded(row) if going else []
            able.append(0 < len(read) <= self.room - self.length.most and max(read) < self.draft_vocab)
            self.read[row] = read if able[row] else [0]
        return able

    def _encoded(self, row: int) -> list[int]:
        """A row's text in the draft model's tokens, begun as its tokenizer begins one, only its end encoded anew."""
        history = self.history[row]
        if len(history) > self.due[row]:
            self._settle(row)
        start, ids = self.settled[row]
        return [*self.opening, *ids, *self._end(history[start:])]

    def _settle(self, row: int) -> None:
        """Encode more of a row's text for good, where a cut leaves the encoding the same; else try again much later."""
        history, (start, ids) = self.history[row], self.settled[row]
        whole = decoded(self.tokenizer, history[start:])
        want, last = encoded(self.draft_tokenizer, whole), len(history) - ANEW
        self.due[row] = 2 * len(history)
        for cut in range(last, last - TRIES, -1):
            front, back = decoded(self.tokenizer, history[start:cut]), decoded(self.tokenizer, history[cut:])
            first = encoded(self.draft_tokenizer, front)
            if front + back == whole and [*first, *encoded(self.draft_tokenizer, back)] == want:
                self.settled[row], self.due[row] = (cut, [*ids, *first]), cut + 2 * ANEW
                return

    def _end(self, history: Sequence[int]) -> list[int]:
        """A text's end in the draft model's tokens; where it ends within a character, by `known` if it has the last."""
        for behind in range(LONGEST_CHARACTER):
            end = len(history) - behind
            text = decoded(self.tokenizer, history[:end]) if end > 0 else ""
            if not text.endswith("\ufffd"):
                break
        rest = [self.known.get(token) for token in history[end:]]
        if None in rest:
            text, rest = decoded(self.tokenizer, history), []
        ids = encoded(self.draft_tokenizer, text)
        return [*ids, *(token for token in rest if token is not None)]

    def _catch_up(self) -> Tensor:
        """Feed the tokens that the draft's cache lacks of the rows' texts -> logits after them [B, its vocabulary].
        Every row feeds as many of its last tokens as any row lacks, so that none outgrows the cache."""
        pairs = zip(self.fed, self.read, strict=True)
        lacks = max(1, *(len(read) - common_prefix(fed, read) for fed, read in pairs))  # the last one is always fed
        parts = [read[-lacks:] for read in self.read]
        starts = [len(read) - len(part) for read, part in zip(self.read, parts, strict=True)]
        self.draft.rewind(torch.tensor(starts, device=self.device))
        ids = torch.tensor([part + [0] * (lacks - len(part)) for part in parts], device=self.device)
        return self.draft.prefill(ids, torch.tensor([len(part) for part in parts], device=self.device))[0]

    def _feed(self, token: Tensor, behind: int) -> Tensor:
        """Append the draft model's token [B], with `behind` drafts between the text and it -> the next logits."""
        return self.passes(token[:, None], max(map(len, self.read)) + behind)[:, -1]

    def _keep(self, rows: Sequence[Sequence[int]]) -> None:
        """Note the draft model's tokens that were fed after the text of each row."""
        self.fed = [[*read, *row] for read, row in zip(self.read, rows, strict=True)]


def room_for(capacity: int, length: Length) -> int:
    """Room in the draft model's tokens, in which a text may be twice as long as in the target's."""
    return 2 * capacity + length.most + 2


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix of two texts, by bisection: parts are compared faster than tokens."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        half = (low + high + 1) // 2
        low, high = (half, high) if first[low:half] == second[low:half] else (low, half - 1)
    return low


OVERLAP = 8
"""Tokens of the text that are encoded again with its continuation, since tokens merge across the seam."""


class TextDrafter(RetokenizingDrafter):
    """Chains of at most `length.most` target tokens, the text of as many drafts, up to one that the target lacks."""

    def propose(self, extent: int) -> TokenTree:
        """One chain per row, filled up with token 0. The root alone where no row can be drafted for."""
        able = self._encode_all()
        written = self._write(torch.tensor(able, device=self.device)) if any(able) else []
        drafted = [self._as_target(row, written[row]) if going else [] for row, going in enumerate(able)]
        width = max(map(len, drafted))
        if not width:
            return TokenTree.root_only(self._roots())
        tokens = [
            [history[-1], *draft, *[0] * (width - len(draft))]
            for history, draft in zip(self.history, drafted, strict=True)
        ]
        return TokenTree.chain(torch.tensor(tokens, device=self.device), self.max_path)

    def _write(self, going: Tensor) -> list[list[int]]:
        """The draft model's tokens after every row's text, as many as pay over the rows going [B]."""
        logits, own = self._catch_up(), list[Tensor]()
        while not self.length.cost or self.adaptive.allows(torch.softmax(logits.float(), -1), going):
            own.append(logits.argmax(-1))
            if not self.adaptive.take():
                break
            logits = self._feed(own[-1], len(own) - 1)
        rows: list[list[int]] = torch.stack(own, 1).tolist()
        self._keep([row[:-1] for row in rows])
        return rows

    def _as_target(self, row: int, written: Sequence[int]) -> list[int]:
        """Target tokens of the draft model's after a row's text, by the end of it that was encoded anew."""
        end = self.read[row][len(self.opening) + len(self.settled[row][1]) :]
        before, after = (decoded(self.draft_tokenizer, ids) for ids in (end, [*end, *written]))
        if not after.startswith(before):
            return []
        more, tail = after[len(before) :], self.history[row][-OVERLAP:]
        whole = encoded(self.tokenizer, decoded(self.tokenizer, tail) + more)
        ids = whole[len(tail) :] if whole[: len(tail)] == tail else encoded(self.tokenizer, more)
        return list(takewhile(lambda token: token < self.vocab, ids[: self.length.most]))


SHARE = 0.1
"""A row is drafted for no further where the shared tokens hold less of the draft model's probability than this."""
SPACES = str.maketrans({"Ġ": " ", "▁": " "})
"""Leading spaces of byte-level and SentencePiece vocabularies."""


class SharedDrafter(RetokenizingDrafter):
    """Chains of target tokens drawn from a draft model.

    `shared` are pairs (target id, draft id) of `shared_tokens`; those without a logit in both models are left out.
    Nodes that are not drawn (a text that is not drafted for, shared tokens that hold too little, a row that ended) have
    a q of zeros.
    """

    traits = Traits(reusable=True, reads_logits=False, draws=True)

    def __init__(
        self,
        draft: Target,
        length: Length,
        shared: Sequence[tuple[int, int]],
        *,
        ops: Ops,
        process: Process,
        **texts: Any,
    ) -> None:
        super().__init__(draft, length, **texts)
        pairs = [(ours, theirs) for ours, theirs in shared if ours < self.vocab and theirs < self.draft_vocab]
        self.ops, self.process, self.known = ops, process, dict(pairs)
        self.ours, self.theirs = torch.tensor(pairs, dtype=torch.long, device=self.device).view(-1, 2).unbind(1)
        self.own_id = torch.zeros(self.vocab, dtype=torch.long, device=self.device).scatter(0, self.ours, self.theirs)
        self.foreign = torch.ones(self.vocab, dtype=torch.bool, device=self.device).scatter(0, self.ours, False)

    def propose(self, extent: int) -> TokenTree:
        """A chain of drafts below the root; the root alone where no row can be drafted for."""
        root = self._roots()
        going = torch.tensor([able and bool(self.known) for able in self._encode_all()], device=self.device)
        tokens, q, own = [root], [], []
        logits = self._catch_up() if bool(going.any()) else None
        while logits is not None:
            scores, share = self._scores(logits)
            going = going & (share >= SHARE) & (scores > -torch.inf).any(-1)
            scores = scores.masked_fill(~going[:, None], 0)
            probs = torch.softmax(scores, -1) * going[:, None]
            if not self.adaptive.allows(probs, share) or not bool(going.any()):
                break
            token = torch.where(going, pick_draft(scores, torch.rand(len(scores), device=self.device), self.ops), 0)
            tokens.append(token)
            q.append(probs)
            if not self.adaptive.take():
                break
            own.append(self.own_id[token])
            logits = self._feed(own[-1], len(own) - 1)
        if logits is not None:
            self._keep(torch.stack(own, 1).tolist() if own else [[]] * len(self.read))
        if not q:
            return TokenTree.root_only(root)
        return TokenTree.chain(torch.stack(tokens, 1), self.max_path, torch.stack((q[0], *q), 1))

    def _scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The draft model's logits [B, its vocabulary] -> processed fp32 scores over the target's [B, V], -inf where a
        token is not shared, and the part of its probability that the shared tokens hold [B]."""
        logits = logits.float()
        among = logits[:, self.theirs]
        scores = logits.new_full((len(logits), len(self.foreign)), -torch.inf).index_copy(1, self.ours, among)
        share = (among.logsumexp(-1) - logits.logsumexp(-1)).exp()
        # processors may put a finite score for -inf
        return self.process(scores).masked_fill(self.foreign, -torch.inf), share


def shared_tokens(tokenizer: Tokenizer, draft_tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Pairs (target id, draft id) of tokens that two tokenizers have in common, by the target's ids.

    Ordinary tokens are the same where they have the same string form ("Ġ" and "▁" are spaces) and add the same text to
    a text before them. Special tokens are the same with the same form, if they are special in both, but for unknown
    tokens. End tokens of different forms are the same where neither has its form in the other vocabulary. No pairs
    where one of the tokenizers lists no vocabulary.
    """
    if not all(callable(getattr(each, "get_vocab", None)) for each in (tokenizer, draft_tokenizer)):
        return []
    ours, our_special = _forms(tokenizer)
    theirs, their_special = _forms(draft_tokenizer)
    both = sorted((ours[form], theirs[form]) for form in ours.keys() & theirs.keys())
    pairs = [(a, b) for a, b in both if a in our_special and b in their_special]
    plain = [(a, b) for a, b in both if a not in our_special and b not in their_special]
    before = next(
        ((a, b) for a, b in plain if _word(tokenizer, a) and _word(tokenizer, a) == _word(draft_tokenizer, b)), None
    )
    heads = ([], []) if before is None else ([before[0]], [before[1]])
    for a, b in plain:
        added = _added(tokenizer, heads[0], a)
        if added and added == _added(draft_tokenizer, heads[1], b):
            pairs.append((a, b))
    end, their_end = (getattr(each, "eos_token_id", None) for each in (tokenizer, draft_tokenizer))
    if end is not None and their_end is not None and end not in dict(pairs) and their_end not in dict(pairs).values():
        pairs.append((end, their_end))
    return sorted(pairs)


def _forms(tokenizer: Tokenizer) -> tuple[dict[str, int], set[int]]:
    """Ids by string form, without the unknown token, and the ids of special tokens."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    added = getattr(tokenizer, "added_tokens_decoder", {})  # marked as special, whether they have a role or not
    special = {*getattr(tokenizer, "all_special_ids", ()), *(index for index, token in added.items() if token.special)}
    forms: dict[str, int] = {}
    for form, index in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
        if isinstance(form, str) and index != unknown:
            forms.setdefault(form if index in special else form.translate(SPACES), index)
    return forms, special


def _word(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token of ASCII letters, else nothing."""
    text = decoded(tokenizer, [token])
    return text if text.isascii() and text.isalpha() else ""


def _added(tokenizer: Tokenizer, head: list[int], token: int) -> str:
    """The text that a token adds to that of `head`; nothing where it changes that."""
    text, start = decoded(tokenizer, [*head, token]), decoded(tokenizer, head) if head else ""
    return text[len(start) :] if text.startswith(start) else ""
