"""An Outcome as transformers' own output: sequences, scores, logits and the cache, of rows that ended early too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from fastspec.generation.engine.call import Outcome
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.patches.call.plan import Plan
from fastspec.patches.call.processors import process_rows
from fastspec.patches.hf.cache import CACHE, export_span, fill_cache, import_past, note_padding
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.seq2seq import Seq2SeqModel


def output_of(plan: Plan, outcome: Outcome, target: HFModel) -> Any:
    """Output that `generate` returns."""
    config, steps, text, pad = plan.config, plan.steps, plan.text, plan.pad
    ids, all_at_once = text.ids, plan.request.rows is None
    longest = max(len(row) for row in outcome.tokens)
    new = torch.tensor([row + [pad] * (longest - len(row)) for row in outcome.tokens], device=ids.device)
    # a processor may have written into the ids of steps
    sequences = torch.cat((ids, new), 1) if steps is None else steps.ids.to(ids.device)
    returned = bool(config.return_dict_in_generate)
    wants_past = text.cache is not None and all_at_once and (text.handed_in or returned)
    wants = returned and bool(config.output_scores or config.output_logits)
    if all_at_once and (wants or wants_past):
        if steps is None:
            _stand(plan, target, outcome.tokens)
            _add_padding(plan, outcome, target, longest)
        elif not target.rewinds:
            _stand(plan, target, sequences[:, -longest:].tolist())
    if wants_past:
        shown = F.pad(text.new_keep, (0, longest - 1), value=True)
        made = export_span(target.state, text.past_keep.sum(1), shown)
        if isinstance(target, Seq2SeqModel):
            target.export(text.cache, made)
        else:
            fill_cache(text.cache, text.past_length, made)
            note_padding(text.cache, text.keep, text.past_length)
    if not returned:
        return sequences
    scores = steps.scores if steps is not None else _columns(outcome.scores, longest) if config.output_scores else None
    logits = steps.logits if steps is not None else _columns(outcome.logits, longest) if config.output_logits else None
    kind = GenerateDecoderOnlyOutput if text.source is None else GenerateEncoderDecoderOutput
    out = kind(sequences=sequences, scores=scores, logits=logits, **{CACHE: text.cache if wants_past else None})
    out.fastspec = outcome.stats
    return out


def _stand(plan: Plan, target: HFModel, tokens: list[list[int]]) -> None:
    """Let every row stand behind its own new tokens but the last, which its last round may have gone beyond; where a
    state cannot be taken back, the rows read their texts once more."""
    text = plan.text
    first = text.past_keep.sum(1)
    wanted = first + plan.request.counts + torch.tensor([len(row) for row in tokens], device=first.device) - 1
    if target.rewinds:
        target.rewind(wanted)
    elif not torch.equal(target.lengths, wanted):
        real = text.new_keep
        ids = text.ids[:, -real.shape[1] :]
        rows = zip(ids, real, tokens, strict=True)
        texts = [torch.cat((row[shown], row.new_tensor(more[:-1]))) for row, shown, more in rows]
        target.open(int(wanted.max()))
        if text.shift is not None:
            target.move(text.shift)
        if text.own is not None:
            text.own(target)
            texts, first = [ids.new_tensor(more[:-1]) for more in tokens], target.lengths.clone()
        elif text.past is not None:
            import_past(target.state, text.past, text.past_keep)
        if int((wanted - first).max()):
            target.prefill(pad_sequence(texts, batch_first=True), wanted - first)


def _add_padding(plan: Plan, outcome: Outcome, target: HFModel, longest: int) -> None:
    """Let rows that ended early read padding up to the longest, as plain decoding does: its keys and values, scores and
    logits are returned, and a mask of ones over the next turn shows them."""
    logits = _read_padding(target, outcome.tokens, longest, plan.pad)
    ids, padding = plan.text.ids, [plan.pad] * longest
    rows = [row for row, read in enumerate(logits) if len(read)]
    if plan.config.output_logits:
        for row in rows:
            outcome.logits[row] += list(logits[row])
    for step in range(longest) if plan.config.output_scores else ():
        here = [row for row in rows if len(outcome.tokens[row]) <= step]
        if here:
            answers = ids.new_tensor([(outcome.tokens[row] + padding)[:step] for row in here])
            texts = torch.cat((ids[here], answers), 1)
            raw = torch.stack([logits[row][step - len(outcome.tokens[row])] for row in here])
            scored = process_rows(plan.processing.processors, here, texts, raw)
            for row, scores in zip(here, scored, strict=True):
                outcome.scores[row].append(scores)


def _read_padding(target: HFModel, tokens: list[list[int]], longest: int, pad: int) -> list[Tensor]:
    """Commit every row's last token and padding, up to the longest -> per row raw logits [n, V] fp32 of these."""
    need, device, done = [longest - len(row) for row in tokens], target.lengths.device, 0
    read: list[list[Tensor]] = [[] for _ in tokens]
    while done < max(need):
        width = min(target.state.tail, max(need) - done)
        chain = torch.tensor([[row[-1] if done == 0 else pad] + [pad] * (width - 1) for row in tokens], device=device)
        tree = TokenTree.chain(chain)
        logits, _ = target.score(tree, int(target.lengths.max()))
        more = [max(0, min(count - done, width)) for count in need]
        for row, count in enumerate(more):
            read[row].append(logits[row, :count].float())
        counted = torch.tensor(more, device=device)
        target.commit(Verdict(tree.depths, (counted - 1).clamp(min=0), chain[:, -1]), counted > 0)
        done += width
    return [torch.cat(parts) if parts else torch.empty(0, device=device) for parts in read]


def _columns(rows: list[list[Tensor]], longest: int) -> tuple[Tensor, ...]:
    """Per-row lists of [V] -> one [B, V] per step; zeros for a row that has ended (ContinuousBatch)."""
    blank = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[step] if step < len(row) else blank for row in rows]) for step in range(longest))
