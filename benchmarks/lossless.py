"""Sampled texts of every assistant against the unpatched model's exact distribution: chi-square per position, on a real
model.

    python benchmarks/lossless.py --assistants eagle3 nasd --texts 50000 --out rows.jsonl

Every text has three new tokens, or as many as TOKENS says: the first comes from the prompt's pass, the others from
rounds, in which drafts are accepted or not. The distribution of each token given those before it is computed by plain
passes of the model, which a patch does not change, and by transformers' own processors: temperature, top-k, top-p,
min-p, with a repetition penalty and without. Texts are drawn in batches, each under its own seed; a kept storage drafts
from earlier batches. For each position the tokens are compared with their distributions by Pearson's chi-square, summed
over what came before; tokens expected fewer than five times are taken together. Significance: 0.001 for each test, so
one right assistant in three hundred fails one of three; a token of probability 0 fails at once.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from common import device_here, parser_of, write
from full_size import head_config
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedTokenizerFast
from transformers.generation import logits_process as lp

import fastspec
from fastspec.generation.heads.module import EagleHead
from fastspec.models import SMOLLM2, load_model
from fastspec.patches.assistants.speculative import check_draft, resolve_speculative
from fastspec.programs.compare import environment
from fastspec.programs.texts import encode

OPTIONS = {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3}
PENALTY = {"with": 1.3, "without": 1.0}  # a penalty looks at the text so far: its rounds are not the ones without
SIGNIFICANCE = 0.001
NEVER = 10**6  # no text ends early
Text = tuple[int, ...]
PROMPT = "Name a colour, an animal and a city."
KEPT = 0.6
"""Share of the target's vocabulary that the other tokenizer keeps: its earliest merges, so that it cuts rarer words
into more tokens."""


@dataclass(frozen=True, slots=True)
class OwnLayers:
    """`speculative` with a draft model of the target's first `layers`, under another tokenizer where `renamed`."""

    config: fastspec.Speculative
    layers: int
    renamed: bool = False


ASSISTANTS = {
    "autoregressive": fastspec.Autoregressive(),
    "eagle3": fastspec.Eagle3(total_tokens=6, depth=1, top_k=4),
    "nasd": fastspec.Nasd(),
    "nasd, kept storage": fastspec.Nasd(storage=fastspec.NgramStorage(), stop_if_unknown=False, total_tokens=4),
    "speculative, early exit, drawn": fastspec.Speculative(early_exit=24, gamma=1),
    "speculative, early exit, adaptive": fastspec.Speculative(early_exit=1),
    "speculative, early exit, branches": fastspec.Speculative(early_exit=24, gamma=1, branches=4),
    "speculative, draft model": OwnLayers(fastspec.Speculative(gamma=2), 24),
    "speculative, shared vocabulary": OwnLayers(fastspec.Speculative(gamma=2), 24, renamed=True),
    "eagle": fastspec.Eagle1(paths=[[0], [1], [2], [3]]),
    "eagle, drawn": fastspec.Eagle1(paths=[[0], [1], [2], [3]], drafts="sampled"),
    "eagle2": fastspec.Eagle2(total_tokens=6, depth=1, top_k=4),
}
LENGTH = 3
TOKENS = {"speculative, early exit, adaptive": 5}
"""New tokens of an assistant's texts, where they are not LENGTH."""
DRAWN_ONLY = ("speculative, shared vocabulary",)
"""Left out with a penalty: a draft model with another tokenizer draws no drafts then, and writes text row by row."""


def on(assistant: Any, model: Any, tokenizer: Any) -> Any:
    """What `assistant=` takes: the assistant itself, but for one whose draft model has to be made first."""
    if not isinstance(assistant, OwnLayers):
        return assistant
    draft: Any = first_layers(model, assistant.layers)
    if assistant.renamed:
        draft = (*renamed(draft, tokenizer), tokenizer)
    return resolve_speculative(assistant.config, {"speculative": check_draft(draft, model)}, model)


def first_layers(model: Any, count: int) -> Any:
    """A model of the same class of another's first `count` layers, its embedding, final norm and LM head: the same
    modules, none copied.

    `model` is built as transformers' Llama: `model.embed_tokens`, `layers`, `norm`, `rotary_emb` and an `lm_head`.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    with torch.device("meta"):
        draft = type(model)(config)
    for name in ("embed_tokens", "norm", "rotary_emb"):
        setattr(draft.model, name, getattr(model.model, name))
    draft.model.layers = nn.ModuleList(model.model.layers[:count])
    draft.lm_head = model.lm_head
    draft.generation_config = copy.deepcopy(model.generation_config)
    return draft.eval()


def renamed(model: Any, tokenizer: Any, seed: int = 0) -> tuple[Any, Any]:
    """(a model with other token ids, its tokenizer): the KEPT first tokens of a byte-level BPE tokenizer, their ids
    permuted.

    Tokens that are kept mean what they meant; texts are cut into others where a merge is missing. The embedding and the
    LM head are copies with permuted rows, all else is shared.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = state["model"]["vocab"]
    kept = int(KEPT * len(vocab))
    order = torch.randperm(kept, generator=torch.Generator().manual_seed(seed)).tolist()  # old id -> new id
    state["model"]["vocab"] = {form: order[index] for form, index in vocab.items() if index < kept}
    state["model"]["merges"] = [pair for pair in state["model"]["merges"] if "".join(pair) in state["model"]["vocab"]]
    for token in state["added_tokens"]:
        token["id"] = order[token["id"]]
    roles = {name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    draft = first_layers(model, model.config.num_hidden_layers)
    draft.config.vocab_size = kept
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for config in (draft.config, draft.generation_config):
            index = getattr(config, name)
            setattr(config, name, None if index is None else order[index])
    rows = torch.empty(kept, dtype=torch.long)
    rows[torch.tensor(order)] = torch.arange(kept)
    rows = rows.to(model.device)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    draft.lm_head = nn.Linear(head.shape[1], kept, bias=False, device="meta")
    draft.lm_head.weight = nn.Parameter(head.detach()[rows], requires_grad=False)
    draft.model.embed_tokens = nn.Embedding(kept, embedding.shape[1], device="meta")
    own = draft.lm_head.weight if embedding is head else nn.Parameter(embedding.detach()[rows], requires_grad=False)
    draft.model.embed_tokens.weight = own
    return draft, PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **roles)


def untrained_head(model: Any, seed: int = 0) -> EagleHead:
    """A head of the EAGLE-1/2 format with random weights: its drafts are mostly wrong."""
    torch.manual_seed(seed)
    c = model.config
    head = EagleHead(head_config(c, c.vocab_size, kind="eagle", own_lm_head=False, taps=()))
    return head.to(model.device, model.dtype).requires_grad_(False)


def processors() -> LogitsProcessorList:
    """What transformers makes of OPTIONS, in its order."""
    penalty = OPTIONS["repetition_penalty"]
    found = [lp.RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1.0 else []
    found += [lp.TemperatureLogitsWarper(OPTIONS["temperature"]), lp.TopKLogitsWarper(int(OPTIONS["top_k"]))]
    return LogitsProcessorList([*found, lp.TopPLogitsWarper(OPTIONS["top_p"]), lp.MinPLogitsWarper(OPTIONS["min_p"])])


@torch.no_grad()
def distribution(model: Any, texts: Tensor) -> Tensor:
    """The processed distribution of what follows texts [R, T] -> [R, V] float64."""
    scored = ((part, model(part, logits_to_keep=1).logits[:, -1].float()) for part in texts.split(64))
    return torch.cat([processors()(part, scores).double().softmax(-1) for part, scores in scored])


def draw(
    model: Any, inputs: dict[str, Tensor], assistant: Any, count: int, batch: int, seed: int, length: int = LENGTH
) -> list[Text]:
    """`count` continuations of `length` tokens."""
    texts: list[Text] = []
    while len(texts) < count:
        torch.manual_seed(seed + len(texts))
        settings = {"do_sample": True, "eos_token_id": NEVER, "pad_token_id": 0, "max_new_tokens": length, **OPTIONS}
        number = min(batch, count - len(texts))
        out = model.generate(**inputs, **settings, num_return_sequences=number, assistant=assistant)
        texts += map(tuple, out[:, -length:].tolist())
    return texts


def chi_square(seen: Counter[int], chances: Tensor, total: int) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; infinite for a token of probability 0."""
    expected = chances * total
    if any(expected[token] == 0 for token in seen):
        return float("inf"), 1
    often = torch.nonzero(expected >= 5)[:, 0].tolist()
    cells = [(seen[token], float(expected[token])) for token in often]
    rest = total - sum(want for _, want in cells)
    if rest >= 5:
        cells.append((total - sum(have for have, _ in cells), rest))
    return sum((have - want) ** 2 / want for have, want in cells), max(0, len(cells) - 1)


def p_value(statistic: float, freedom: int) -> float:
    """The chance of a statistic at least as large."""
    if freedom == 0:
        return 1.0
    half, value = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half, value))


def judge(model: Any, ids: Tensor, texts: list[Text], distributions: dict[Text, Tensor]) -> list[dict[str, Any]]:
    """Every position of some texts against its distribution given the tokens before; `distributions` keeps those that
    are known."""
    positions = []
    for place in range(len(texts[0])):
        begun = Counter(text[:place] for text in texts)
        new = [before for before in begun if before not in distributions]
        if new:
            grown = torch.cat((ids.expand(len(new), -1), torch.tensor(new, dtype=ids.dtype, device=ids.device)), 1)
            distributions |= zip(new, distribution(model, grown).cpu(), strict=True)
        said: dict[Text, Counter[int]] = {before: Counter() for before in begun}
        for text in texts:
            said[text[:place]][text[place]] += 1
        parts = [chi_square(said[before], distributions[before], count) for before, count in begun.items()]
        value, freedom = sum(value for value, _ in parts), sum(freedom for _, freedom in parts)
        positions.append({"chi_square": round(value, 2), "freedom": freedom, "p": p_value(value, freedom)})
    return positions


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--head", default=SMOLLM2)
    parser.add_argument("--eagle-head", help="of `eagle` and `eagle2`; else random weights, mostly wrong drafts")
    parser.add_argument("--assistants", nargs="+", default=list(ASSISTANTS), choices=list(ASSISTANTS))
    parser.add_argument("--penalty", nargs="+", default=list(PENALTY), choices=list(PENALTY))
    parser.add_argument("--texts", type=int, default=50_000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    device, _ = device_here()
    model, tokenizer = load_model(options.model, device, torch.float32)
    inputs = encode(tokenizer, PROMPT, device)
    eagle = options.eagle_head or untrained_head(model)
    fastspec.patch(model, eagle3=options.head, eagle=eagle, eagle2=eagle)
    failed = False
    for penalty in options.penalty:
        OPTIONS["repetition_penalty"], distributions = PENALTY[penalty], dict[Text, Tensor]()
        for name in options.assistants:
            if penalty == "with" and name in DRAWN_ONLY:
                print(f"left out: {name} with a penalty: it draws no drafts then", file=sys.stderr)
                continue
            began = time.perf_counter()
            assistant, length = on(ASSISTANTS[name], model, tokenizer), TOKENS.get(name, LENGTH)
            texts = draw(model, inputs, assistant, options.texts, options.batch, options.seed, length)
            calls = fastspec.report(model).calls[-options.texts // options.batch :]
            mine = [call for call in calls if call.assistant == calls[-1].assistant]
            row = {"assistant": name, "texts": len(texts), "tokens": length, "options": dict(OPTIONS)}
            row |= {"seed": options.seed, "batch": options.batch, "significance": SIGNIFICANCE}
            row |= {"eagle_head": options.eagle_head} if name.startswith("eagle") and name != "eagle3" else {}
            row |= {"positions": judge(model, inputs["input_ids"], texts, distributions)}
            row |= {"drafted": sum(c.drafted for c in mine), "drafts_accepted": sum(c.accepted for c in mine)}
            row |= {"rounds": sum(c.row_rounds for c in mine), "seconds": round(time.perf_counter() - began, 1)}
            row |= environment(model) | {"backend": fastspec.report(model).backend}
            failed |= any(position["p"] < SIGNIFICANCE for position in row["positions"])
            write(options.out, row)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
