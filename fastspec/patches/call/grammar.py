"""Grammars of answers: a JSON schema, a regular expression, a choice of texts or an EBNF, matched by llguidance."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Sequence
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import LogitsProcessor

from fastspec.errors import NoDistribution, Unsupported
from fastspec.generation.constraint import Masks, allow_all, roots_of
from fastspec.generation.drafters.retokenized import common_prefix
from fastspec.patches.call.grammar_text import FORMS, library, refusal, text_of

TOGETHER = 4
"""Masks of a round from which on threads fill them."""


class Grammar(LogitsProcessor):  # type: ignore[misc]
    """Grammar of answers, given to `generate` and to an open batch as any other logits processor:

        grammar = fastspec.Grammar(tokenizer, json_schema={"type": "object", ...})
        model.generate(**inputs, assistant="eagle3", logits_processor=[grammar])

    One of four says what an answer may be: `json_schema`, a dict or its JSON text; `regex`, which all of it matches;
    `choice`, a list of texts; `ebnf`, a grammar in GBNF (`root ::= ...`) or Lark (`start: ...`). An end token, one of
    `end_tokens` (None: the tokenizer's), comes where the answer may end, and is the only one left where nothing may
    follow.

    With an assistant every call begins anew, whichever threads share the grammar. Plain decoding tells a processor of
    no call's start: there a call goes on whose prompt is the text of the thread's last call with one token more.

    Raises Unsupported for a grammar that llguidance cannot compile, a tokenizer that it cannot read, and without it.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        json_schema: dict[str, Any] | str | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        ebnf: str | None = None,
        end_tokens: int | Sequence[int] | None = None,
    ) -> None:
        given = dict(zip(FORMS, (json_schema, regex, choice, ebnf), strict=True))
        named = {name: value for name, value in given.items() if value is not None}
        if len(named) != 1:
            raise Unsupported(f"a grammar is one of {', '.join(FORMS)}, and {' and '.join(named) or 'none'} is given")
        [(self.form, value)] = named.items()
        self._given = tokenizer, value, end_tokens
        self.tokens = _tokens_of(tokenizer, end_tokens)
        self.size: int = self.tokens.vocab_size
        """Tokens of the tokenizer."""
        self.words = -(-self.size // 32)
        """Words of a mask."""
        self._matcher = _compiled(self.tokens, self.form, value)
        self._plain = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> Grammar:
        """The same grammar, whose plain decoding is in no call; what was compiled is shared."""
        twin = object.__new__(type(self))
        twin.__dict__ |= self.__dict__ | {"_plain": threading.local()}
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        """The tokenizer and the text, of which it is compiled again."""
        tokenizer, value, end_tokens = self._given
        named: dict[str, Any] = {self.form: value}
        return partial(type(self), end_tokens=end_tokens, **named), (tokenizer,)

    def matcher(self) -> Any:
        """A matcher of llguidance at the start of an answer."""
        return self._matcher.deep_copy()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] of a step of plain decoding, with -inf at what the grammar forbids behind input_ids [B, T]."""
        call: GrammarOfCall | None = getattr(self._plain, "call", None)
        if call is None or not call.goes_on(input_ids):
            call = self._plain.call = GrammarOfCall(self, input_ids)
        call.seen = input_ids.shape[1]
        return call(input_ids, scores)


class GrammarOfCall(LogitsProcessor):  # type: ignore[misc]
    """Grammar of one call, whose answers come after prompts [B, T]."""

    def __init__(self, grammar: Grammar, prompts: Tensor) -> None:
        self.grammar, self.prompts = grammar, prompts
        self.rows: Sequence[int] = range(len(prompts))
        """The rows of the batch that it is given."""
        self.seen = self.length = prompts.shape[1]
        """Tokens of the texts of plain decoding's last step, and of the prompts."""
        self.states: dict[int, GrammarState] = {}

    def of_rows(self, rows: list[int]) -> GrammarOfCall:
        """The same for these rows of the batch."""
        twin = copy.copy(self)
        twin.rows = rows
        return twin

    def goes_on(self, ids: Tensor) -> bool:
        """True where ids [B, T] are those of plain decoding's next step."""
        same = ids.device == self.prompts.device and ids.shape[1] == self.seen + 1
        return same and torch.equal(ids[:, : self.length], self.prompts)

    def state(self, row: int) -> GrammarState:
        """The state of a row's answer."""
        if row not in self.states:
            self.states[row] = GrammarState(self.grammar)
        return self.states[row]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [R, V] with -inf at what may not follow input_ids [R, T]; a row that has left the grammar, ended and
        padded, keeps its scores. Raises NoDistribution where nothing is left of what the grammar allows."""
        answers = input_ids[:, self.length :].tolist()
        states = [self.state(row) for row in self.rows]
        texts = zip(states, answers, strict=True)
        held = [(place, state, answer) for place, (state, answer) in enumerate(texts) if state.follows(answer)]
        found, masks = scores, Masks(scores.device)
        if held:
            masks.fill(roots_of(len(answers)), scores.shape[-1], held)
            found = masks.masked(scores[:, None])[:, 0]
        for place, empty in enumerate((found == -torch.inf).all(-1).tolist()):
            if empty:
                raise NoDistribution.after(len(answers[place]), self.rows[place])
        return found


class GrammarState:
    """State of one answer in a grammar. It is a `fastspec.generation.constraint.Constraint`."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar, self.matcher = grammar, grammar.matcher()
        self.taken: list[int] = []
        """Tokens that the matcher stands behind."""

    def follows(self, answer: list[int]) -> bool:
        """Roll the matcher to the end of an answer -> True where the grammar allows it, up to its end."""
        taken = self.taken
        count = len(taken) if answer[: len(taken)] == taken else common_prefix(taken, answer)
        self.matcher.rollback(len(taken) - count)
        del taken[count:]
        while count < len(answer) and self._takes(answer[count]):
            taken.append(answer[count])
            count += 1
        return count == len(answer) or self._is_over()

    @property
    def words(self) -> int:
        """Words of a mask."""
        return self.grammar.words

    def follow(self, answer: list[int]) -> None:
        """Go to the end of an answer. Raises Unsupported for one that the grammar does not allow."""
        if not self.follows(answer):
            raise Unsupported(f"the grammar does not allow token {answer[len(self.taken)]} of this answer")

    def allows(self, answer: list[int], token: int) -> bool:
        """True where a token may follow an answer that the grammar allows; False for the end token behind its end."""
        self.follow(answer)
        return token < self.grammar.size and self.matcher.validate_tokens([token]) == 1

    @staticmethod
    def fill_rows(states: Sequence[tuple[GrammarState, int]], masks: Tensor) -> None:
        """Masks of many answers, by threads that hold no lock of the interpreter."""
        matchers = [(state.matcher, row) for state, row in states]
        if len(matchers) < TOGETHER:
            for matcher, row in matchers:
                matcher.unsafe_compute_mask_ptr(masks[row].data_ptr(), masks[row].nbytes)
        else:
            size = masks.stride(0) * masks.element_size()
            _executor(os.getpid()).unsafe_compute_mask_ptr(matchers, masks.data_ptr(), size, len(masks))

    def check(self) -> None:
        """Raise Unsupported for a grammar that grows past llguidance's bounds."""
        if self.matcher.is_error():
            raise Unsupported(f"the grammar cannot be followed any further: {self.matcher.get_error()[:400]}")

    def fill(self, masks: Tensor, answer: list[int], tokens: list[int], parents: list[int]) -> None:
        """Masks of a tree behind an answer. Raises Unsupported as `follow` and `check`."""
        self.follow(answer)
        allow_all(masks)
        children: list[list[int]] = [[] for _ in tokens]
        for node in range(len(tokens) - 1, 0, -1):
            children[parents[node]].append(node)
        path, ended, waiting = [0], set(), [0]
        while waiting:
            node = waiting.pop()
            if node:
                behind = path.index(parents[node]) + 1
                self.matcher.rollback(len(path) - behind)
                del path[behind:]
                if not self._takes(tokens[node]):
                    continue
                path.append(node)
            self.matcher.unsafe_compute_mask_ptr(masks[node].data_ptr(), masks[node].nbytes)
            self.check()
            if self._is_over():
                ended.add(node)
            else:
                waiting += children[node]
        self.matcher.rollback(len(path) - 1)
        for node in range(1, len(tokens)):  # after the end nothing but the end token comes
            if parents[node] in ended:
                masks[node] = masks[parents[node]]
                ended.add(node)

    def _takes(self, token: int) -> bool:
        return token < self.grammar.size and bool(self.matcher.try_consume_tokens([token]))

    def _is_over(self) -> bool:
        return bool(self.matcher.is_stopped())


@cache
def _executor(process: int) -> Any:
    """Threads of this process that fill masks."""
    return library().LLExecutor()


_known: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
_lock = threading.Lock()


def _tokens_of(tokenizer: Any, end_tokens: int | Sequence[int] | None) -> Any:
    """llguidance's form of a tokenizer, which takes it a second for each 30,000 tokens, and is kept."""
    library()
    import llguidance.hf

    named = tokenizer.eos_token_id if end_tokens is None else end_tokens
    ends = (named,) if isinstance(named, int) else tuple(sorted(named or ()))
    if not ends:
        why = (
            f"{type(tokenizer).__name__} has no eos_token: set it, or give Grammar(tokenizer, end_tokens=...)"
            if end_tokens is None
            else "end_tokens is empty: a server takes eos_token_id of the model's generation_config.json"
        )
        raise Unsupported(f"a grammar needs a token that ends it, and {why}")
    key = len(tokenizer), *ends
    with _lock:
        known = _known.setdefault(tokenizer, {})
        if key not in known:
            try:
                made = llguidance.hf.from_tokenizer(tokenizer, eos_token=list(ends))
            except Exception as error:  # of any kind: the library is not Python's
                raise Unsupported(f"llguidance cannot read this {type(tokenizer).__name__}: {error}") from error
            known[key] = made
        return known[key]


def _compiled(tokens: Any, form: str, value: Any) -> Any:
    """A matcher of a grammar. Raises Unsupported for one that cannot be compiled."""
    limits = library().LLParserLimits(verbose_errors=False)
    made = library().LLMatcher(tokens, text_of(form, value), log_level=0, limits=limits)
    if made.is_error():
        raise refusal(form, made.get_error())
    begun = made.deep_copy()
    begun.compute_bitmask()
    if begun.is_error():  # a rule that is itself, say
        raise refusal(form, f"it allows no first token ({begun.get_error()})")
    return made
