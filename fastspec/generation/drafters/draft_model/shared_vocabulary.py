"""Drafts that are drawn from a model with another tokenizer, by the tokens that both vocabularies have.

Token-level intersection: Timor et al. (arXiv 2502.05202). The draft model's distribution, restricted to the shared tokens and
renormalised, is a distribution over the target's vocabulary; it is processed as the target's and judged by p / q. What the draft model
reads only decides how good the drafts are: any text of its own that is a function of the prefix is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastspec.generation.drafters.base import Process, Traits
from fastspec.generation.drafters.draft_model.retokenized import RetokenizingDrafter
from fastspec.generation.drafters.draft_model.tokenizer import Tokenizer, decoded
from fastspec.generation.drafters.policy import Length, Pace
from fastspec.generation.ops import Ops
from fastspec.generation.target import Target
from fastspec.generation.tree import TokenTree
from fastspec.generation.verify import pick_draft

SHARE = 0.1
"""A row is drafted for no further where the shared tokens hold less of the draft model's probability than this."""
SPACES = str.maketrans({"Ġ": " ", "▁": " "})
"""How byte-level and SentencePiece vocabularies write a leading space."""


class SharedDrafter(RetokenizingDrafter):
    """Chains of target tokens drawn from a draft model.

    `shared` are pairs (target id, draft id) of tokens that mean the same, as `shared_tokens` finds them; pairs that one of the models has
    no logit for are left out. After a drafted token the draft model goes on with its own id of it. Nodes that are not drawn (a text that is
    not drafted for, shared tokens that hold too little, a row that ended) have a q of zeros.
    """

    traits = Traits(reusable=True, reads_logits=False, draws=True)

    def __init__(
        self, draft: Target, length: Length, shared: Sequence[tuple[int, int]], *, room: int, tokenizer: Tokenizer,
        draft_tokenizer: Tokenizer, vocab: int, draft_vocab: int, ops: Ops, process: Process, device: torch.device,
    ) -> None:  # fmt: skip
        pairs = [(ours, theirs) for ours, theirs in shared if ours < vocab and theirs < draft_vocab]
        super().__init__(
            draft, length, room=room, tokenizer=tokenizer, draft_tokenizer=draft_tokenizer, known=dict(pairs), device=device
        )  # fmt: skip
        self.ops, self.process = ops, process
        self.ours, self.theirs = torch.tensor(pairs, dtype=torch.long, device=device).view(-1, 2).unbind(1)
        self.own_id = torch.zeros(vocab, dtype=torch.long, device=device).scatter(0, self.ours, self.theirs)
        self.foreign = torch.ones(vocab, dtype=torch.bool, device=device).scatter(0, self.ours, False)

    def propose(self, extent: int) -> TokenTree:
        """A chain of drafts below the root; the root alone where no row can be drafted for."""
        root = self._roots()
        going = torch.tensor([able and bool(self.known) for able in self._encode_all()], device=self.device)
        tokens, q, own = [root], [], []
        survival, pace = going.float(), Pace(self.length, self.trust, max(1, sum(self.alive)))
        logits = self._catch_up() if bool(going.any()) else None
        while logits is not None:
            scores, share = self._scores(logits)
            going = going & (share >= SHARE) & (scores > -torch.inf).any(-1)
            scores = scores.masked_fill(~going[:, None], 0)
            probs = torch.softmax(scores, -1) * going[:, None]
            if self.length.cost:  # before the draw: a token that decided over its own being drafted would not follow its distribution
                survival = survival * probs.amax(-1) * share
            if not pace.allows(survival) or not bool(going.any()):
                break
            token = torch.where(going, pick_draft(scores, torch.rand(len(scores), device=self.device), self.ops), 0)
            tokens.append(token)
            q.append(probs)
            if not pace.take():
                break
            own.append(self.own_id[token])
            logits = self._feed(own[-1], pace.drafted - 1)
        self.written = pace.drafted
        if logits is not None:
            self._keep(torch.stack(own, 1).tolist() if own else [[]] * len(self.read))
        if not q:
            return TokenTree.root_only(root)
        return TokenTree.chain(torch.stack(tokens, 1), self.max_path, torch.stack((q[0], *q), 1))

    def _scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The draft model's logits [B, its vocabulary] -> processed fp32 scores over the target's [B, V], -inf where a token is not
        shared, and the part of its probability that the shared tokens hold [B]."""
        logits = logits.float()
        among = logits[:, self.theirs]
        scores = logits.new_full((len(logits), len(self.foreign)), -torch.inf).index_copy(1, self.ours, among)
        share = (among.logsumexp(-1) - logits.logsumexp(-1)).exp()
        return self.process(scores).masked_fill(self.foreign, -torch.inf), share  # processors may put a finite score for -inf


def shared_tokens(tokenizer: Tokenizer, draft_tokenizer: Tokenizer) -> list[tuple[int, int]]:
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
    """What a token adds to the text of `head`; nothing where it changes that."""
    text, start = decoded(tokenizer, [*head, token]), decoded(tokenizer, head) if head else ""
    return text[len(start) :] if text.startswith(start) else ""
