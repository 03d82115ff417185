"""Drafts that are drawn from a model with another tokenizer, by the tokens that both vocabularies have.

Token-level intersection: Timor et al. (arXiv 2502.05202). The draft model's distribution, restricted to the shared tokens and
renormalised, is a distribution over the target's vocabulary; it is processed as the target's and judged by p / q. What the draft model
reads only decides how good the drafts are: any text of its own that is a function of the prefix is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastspec.generation.draft_length import Credit, Length, Trust, mean_accepted
from fastspec.generation.draft_model import Process
from fastspec.generation.protocols import LanguageModel, Ops
from fastspec.generation.text_draft import decoded, encoded
from fastspec.generation.tree import TokenTree, Verdict

SHARE = 0.1
"""A row is drafted for no further where the shared tokens hold less of the draft model's probability: what it would say cannot be said."""
SPACES = str.maketrans({"Ġ": " ", "▁": " "})
"""How byte-level and SentencePiece vocabularies write a leading space."""
LONGEST_CHARACTER = 4
"""Bytes of the longest character in UTF-8, and so the most tokens that may end in the middle of one."""


class SharedDrafter:
    """Chains of target tokens drawn from a draft model with a cache of its own rows, `room` tokens each, and one node of a tree behind.

    `shared` are pairs (target id, draft id) of tokens that mean the same, as `shared_tokens` finds them; pairs that one of the models has
    no logit for are left out. A round begins by encoding every row's text anew with `draft_tokenizer`; after a drafted token the draft
    model goes on with its own id of it. Nodes that are not drawn (a text that does not encode or outgrows `room`, shared tokens that hold
    too little, a row that ended) have a q of zeros.
    """

    def __init__(
        self, draft: LanguageModel, length: Length, shared: Sequence[tuple[int, int]], *, room: int, tokenizer: Any, draft_tokenizer: Any,
        vocab: int, draft_vocab: int, ops: Ops, process: Process, device: torch.device,
    ) -> None:  # fmt: skip
        self.draft, self.length, self.room, self.ops, self.process, self.device = draft, length, room, ops, process, device
        self.tokenizer, self.draft_tokenizer = tokenizer, draft_tokenizer
        pairs = [(ours, theirs) for ours, theirs in shared if ours < vocab and theirs < draft_vocab]
        self.ours, self.theirs = torch.tensor(pairs, dtype=torch.long, device=device).view(-1, 2).unbind(1)
        self.known = dict(pairs)
        self.own_id = torch.zeros(vocab, dtype=torch.long, device=device).scatter(0, self.ours, self.theirs)
        self.foreign = torch.ones(vocab, dtype=torch.bool, device=device).scatter(0, self.ours, False)
        self.opening = _opening(draft_tokenizer)
        self.nodes = self.max_path = length.most + 1

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Take the text ids [B, T] with counts [B] real tokens, and its first new token root [B]."""
        self.said = [[*row[:count], first] for row, count, first in zip(ids.tolist(), counts.tolist(), root.tolist(), strict=True)]
        self.read: list[list[int]] = [[] for _ in self.said]
        self.fed: list[list[int]] = [[] for _ in self.said]
        """What the draft's cache holds."""
        self.trust, self.credit = Trust(root.device), Credit(self.length, root.device)
        self.active = torch.ones_like(root, dtype=torch.bool)
        """Which rows go on: the rounds' own tensor after the first of them, which tells by the next one."""

    def propose(self, extent: int) -> TokenTree:
        """A chain of drafts below the root; the root alone where no row can be drafted for, or drafts do not pay."""
        self.alive: list[bool] = self.active.tolist()
        root = torch.tensor([said[-1] for said in self.said], device=self.device)
        if not self.credit.allows():
            return TokenTree.root_only(root)
        going = torch.tensor(self._encode_all(), device=self.device)
        alive, drafted = max(1, sum(self.alive)), 0
        tokens, q, own = [root], [], []
        survival, expected, mean, hope = going.float(), 1.0, 1.0, 0.0
        logits = self._catch_up() if bool(going.any()) else None
        while logits is not None:
            scores, share = self._scores(logits)
            going = going & (share >= SHARE) & (scores > -torch.inf).any(-1)
            scores = scores.masked_fill(~going[:, None], 0)
            law = torch.softmax(scores, -1) * going[:, None]
            if self.length.cost:  # before the draw: a token that decided over its own being drafted would not follow its law
                survival = survival * law.amax(-1) * share
                hope, mean = self.trust.weigh(survival.sum() / alive)
            if not bool(going.any()) or (drafted and self.length.cost and not self.length.goes_on(mean, expected, drafted)):
                break
            token = torch.where(going, self.ops.pick(scores, torch.rand(len(scores), device=self.device)), 0)
            tokens.append(token)
            q.append(law)
            drafted, expected = drafted + 1, expected + mean
            self.trust.hoped += hope
            if drafted == self.length.most or (self.length.cost and not self.length.goes_on(mean, expected, drafted)):
                break
            own.append(self.own_id[token])
            logits = self._feed(own[-1], drafted - 1)
        if logits is not None:
            rows = torch.stack(own, 1).tolist() if own else [[]] * len(self.read)
            self.fed = [[*read, *row] for read, row in zip(self.read, rows, strict=True)]
        if not q:
            return TokenTree.root_only(root)
        return TokenTree.chain(torch.stack(tokens, 1), self.max_path, torch.stack((q[0], *q), 1))

    def observe(self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int) -> None:
        """Append what the target said."""
        if self.length.cost:
            gained = mean_accepted(verdict.accepted, active)
            self.trust.judge(gained)
            self.credit.judge(gained, tree.tokens.shape[1] - 1)
        self.active = active
        entries = zip(self.said, verdict.accepted.tolist(), verdict.tokens(tree).tolist(), active.tolist(), strict=True)
        for said, count, tokens, going in entries:
            said += tokens[: count + 1] if going else []

    def _encode_all(self) -> list[bool]:
        """Encode the texts of the rows that go on -> which rows can be drafted for; the others read some token."""
        able = []
        for row, going in enumerate(self.alive):
            read = self._encoded(self.said[row]) if going and self.known else []
            able.append(0 < len(read) <= self.room - self.length.most)
            self.read[row] = read if able[row] else [0]
        return able

    def _encoded(self, said: Sequence[int]) -> list[int]:
        """A text in the draft model's tokens, begun as its tokenizer begins one. Where it ends within a character, the last tokens are
        their own counterparts, if they have any."""
        said = said[1:] if said[0] == getattr(self.tokenizer, "bos_token_id", None) else said
        for behind in range(LONGEST_CHARACTER):
            end = len(said) - behind
            text = decoded(self.tokenizer, said[:end]) if end > 0 else ""
            if not text.endswith("\ufffd"):
                break
        rest = [self.known.get(token) for token in said[end:]]
        if None in rest:
            text, rest = decoded(self.tokenizer, said), []
        ids = encoded(self.draft_tokenizer, text)
        return [*self.opening, *ids, *(token for token in rest if token is not None)]

    def _catch_up(self) -> Tensor:
        """Feed what the draft's cache lacks of the rows' texts -> logits of what follows them [B, its vocabulary].

        Every row feeds as many of its last tokens as any row lacks: then none is filled up beyond the room of the cache.
        """
        lacks = max(len(read) - _common(fed, read) for fed, read in zip(self.fed, self.read, strict=True))
        parts = [read[-lacks:] for read in self.read]
        starts = [len(read) - len(part) for read, part in zip(self.read, parts, strict=True)]
        self.draft.rewind(torch.tensor(starts, device=self.device))
        ids = torch.tensor([part + [0] * (lacks - len(part)) for part in parts], device=self.device)
        return self.draft.prefill(ids, torch.tensor([len(part) for part in parts], device=self.device))[0]

    def _feed(self, token: Tensor, behind: int) -> Tensor:
        """Append the draft model's token [B], with `behind` drafts between the text and it -> logits of what follows."""
        zero = torch.zeros_like(token)
        logits, _ = self.draft.score(TokenTree.root_only(token), max(map(len, self.read)) + behind)
        self.draft.commit(Verdict(zero[:, None], zero, zero), torch.ones_like(token, dtype=torch.bool))
        return logits[:, 0]

    def _scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The draft model's logits [B, its vocabulary] -> processed fp32 scores over the target's [B, V], -inf where a token is not
        shared, and the part of its probability that the shared tokens hold [B]."""
        logits = logits.float()
        among = logits[:, self.theirs]
        scores = logits.new_full((len(logits), len(self.foreign)), -torch.inf).index_copy(1, self.ours, among)
        share = (among.logsumexp(-1) - logits.logsumexp(-1)).exp()
        return self.process(scores).masked_fill(self.foreign, -torch.inf), share  # processors may put a finite score for -inf


def shared_tokens(tokenizer: Any, draft_tokenizer: Any) -> list[tuple[int, int]]:
    """Pairs (target id, draft id) of tokens that two tokenizers have in common, by the target's ids.

    Two ordinary tokens are the same where they have the same string form, "Ġ" and "▁" both read as a space, and add the same text to
    a text before them: "the" that continues a word is not "the" that begins one. Special tokens are the same with the same form, if they
    are special in both; the tokens for what is unknown are not. End tokens of different forms are the same where neither has its form in
    the other vocabulary. No pairs where one of the tokenizers lists no vocabulary.
    """
    if not all(callable(getattr(each, "get_vocab", None)) for each in (tokenizer, draft_tokenizer)):
        return []
    ours, our_special = _forms(tokenizer)
    theirs, their_special = _forms(draft_tokenizer)
    both = sorted((ours[form], theirs[form]) for form in ours.keys() & theirs.keys())
    pairs = [(a, b) for a, b in both if a in our_special and b in their_special]
    plain = [(a, b) for a, b in both if a not in our_special and b not in their_special]
    before = next(((a, b) for a, b in plain if _word(tokenizer, a) and _word(tokenizer, a) == _word(draft_tokenizer, b)), None)
    heads = ([], []) if before is None else ([before[0]], [before[1]])
    for a, b in plain:
        added = _added(tokenizer, heads[0], a)
        if added and added == _added(draft_tokenizer, heads[1], b):
            pairs.append((a, b))
    end, their_end = (getattr(each, "eos_token_id", None) for each in (tokenizer, draft_tokenizer))
    if end is not None and their_end is not None and end not in dict(pairs) and their_end not in dict(pairs).values():
        pairs.append((end, their_end))
    return sorted(pairs)


def _forms(tokenizer: Any) -> tuple[dict[str, int], set[int]]:
    """Ids by string form, without the unknown token, and the ids of special tokens."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    added = getattr(tokenizer, "added_tokens_decoder", {})  # marked as special, whether they have a role or not
    special = {*getattr(tokenizer, "all_special_ids", ()), *(index for index, token in added.items() if token.special)}
    forms: dict[str, int] = {}
    for form, index in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
        if isinstance(form, str) and index != unknown:
            forms.setdefault(form if index in special else form.translate(SPACES), index)
    return forms, special


def _word(tokenizer: Any, token: int) -> str:
    """The text of a token of ASCII letters, else nothing."""
    text = decoded(tokenizer, [token])
    return text if text.isascii() and text.isalpha() else ""


def _added(tokenizer: Any, head: list[int], token: int) -> str:
    """What a token adds to the text of `head`; nothing where it changes that."""
    text, start = decoded(tokenizer, [*head, token]), decoded(tokenizer, head) if head else ""
    return text[len(start) :] if text.startswith(start) else ""


def _opening(tokenizer: Any) -> list[int]:
    """The begin token, if the tokenizer puts it before a text."""
    first = getattr(tokenizer, "bos_token_id", None)
    return [first] if first is not None and list(tokenizer("")["input_ids"])[:1] == [first] else []


def _common(fed: Sequence[int], read: Sequence[int]) -> int:
    """How many tokens of a text the cache holds, short of the last one, which is always fed."""
    kept = 0
    while kept < min(len(fed), len(read) - 1) and fed[kept] == read[kept]:
        kept += 1
    return kept
