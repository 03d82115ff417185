"""Check that fastspec scores the nodes of a tree as a model scores their texts, made on the model itself before it is
relied on.

A model without an adapter runs its own forward with positions and a 4-D mask of fastspec's making, and some classes
read neither as transformers' convention has it. What goes wrong then is no error but another text, so it is looked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from fastspec.errors import Unsupported
from fastspec.generation.target import Source
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.patches.backends import TORCH
from fastspec.patches.hf.cache import CACHE
from fastspec.patches.hf.compat import (
    brings_weights,
    device_of,
    dtype_of,
    every_module,
    has_global_hooks,
    is_autocast,
    is_out_of_memory,
    keep_hooks,
    own_buffers,
)
from fastspec.patches.hf.config_fields import attention_name, layer_count, table_rows
from fastspec.patches.hf.families import Adapter
from fastspec.patches.hf.limits import LAYER_KINDS, counts_padding, dropped_spans
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import check_masks
from fastspec.patches.hf.replaced import attention_functions, autocast_inside, replaced_functions
from fastspec.patches.hf.seq2seq import Seq2SeqModel

LENGTHS = (12, 7)
"""Tokens of the two prompts: in one batch the second is padded."""
DRAWS = (0, 3, 4)
"""Texts that are tried before a class is refused: rounding may choose another of nearly equal experts for one node,
while positions or masks that are read otherwise show in every text."""
FIRST = (0, 0, 0, 0, 1, 2, 3, 5, 4)
"""Parents of the first tree, level by level, so that nearly every node lies behind nodes that are not its ancestors."""
PATHS = ((0, 2, 5, 7), (0, 3, 6))
"""Nodes of it that are committed in each row."""
SECOND = (0, 0, 0, 2)
SPAN = 5
"""Positions that windows and chunks are cut to for a second look."""
MORE = 2
"""Tokens that the model itself generates behind each text, through its own cache."""
ROOM = LENGTHS[0] + len(PATHS[0]) + 3 + MORE
LEAVES = (6, 7, 8), (1, 3)
BOUNDS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.25}
"""By dtype, how far logits may be apart: root mean square of the difference, in standard deviations of a node's.

A layer rounds its sums some ten times, and roundings add up like a random walk: in 100 layers to about 1000**0.5 = 30
units of the last place, 4e-6 in fp32, 0.03 in fp16 and 0.25 in bf16. Other texts differ by 0.1 to 1.4.
"""
WHOLE = (torch.float64, torch.float32)
"""Dtypes in which every node must agree; in others the median, since rounding may choose another expert."""
_VERDICTS: dict[Any, bool] = {}
"""Key of what was found sound -> True where a prompt without padding is read as fastspec reads it."""


def check_trust(model: Any, *, reads_source: bool = False, adapter: Adapter | None = None) -> bool:
    """Raise Unsupported unless fastspec scores trees as the model scores texts: once per class, configuration, dtype
    and versions, and anew after a check that could not say so. True where a pass of fastspec's may read a prompt in
    place of the model's own: PaliGemma's tokens see the whole of a prompt without padding.

    With `reads_source` the decoder behind an encoder is checked; `adapter` is that of a decoder inside the model.
    Model, hooks and global generators are left as they were. Nothing runs where attention takes no masks: torch's flex
    attention on the CPU reads past the end of one.
    """
    if adapter is None:
        check_masks(model)  # its attention may have changed since `patch`
    key = adapter is not None, _key(model)
    if key not in _VERDICTS:
        with _undisturbed(model), torch.no_grad():
            _VERDICTS[key] = _judge(model, reads_source, adapter)
    return _VERDICTS[key]


def check_states(model: Any, taps: tuple[int, ...]) -> None:
    """Raise Unsupported for a model without a hidden state for each token behind the layers `taps`, or behind its last
    without any; looked at once per class, configuration, dtype and versions."""
    key = "states", taps, _key(model)
    if key in _VERDICTS:
        return
    with _undisturbed(model), torch.no_grad():
        two = torch.tensor([[1, 2]], device=device_of(model))
        try:
            states = model(input_ids=two, use_cache=False, output_hidden_states=True, return_dict=True).hidden_states
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise Unsupported(
                f"{type(model).__name__} fails over two tokens with output_hidden_states=True, and a head reads hidden "
                f"states ({type(error).__name__}: {error}): call it so to see why"
            ) from error
    if states is None:
        raise Unsupported(
            f"{type(model).__name__} gives no hidden states when it is asked for them, and this assistant's "
            "drafter reads them"
        )
    for tap in taps or (layer_count(model.config),):
        shape = list(states[tap].shape) if tap < len(states) else None
        if shape is None or shape[:-1] != list(two.shape):
            found = f"no hidden state behind layer {tap}" if shape is None else f"hidden states of shape {shape}"
            raise Unsupported(
                f"{type(model).__name__} gives {found} for tokens of shape {list(two.shape)}, where a head reads one "
                'for each layer and token: use "nasd" or "speculative"'
            )
    _VERDICTS[key] = True


def _key(model: Any) -> Any:
    config = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    modules = every_module(model)  # one that stands in two places is counted once
    forwards = frozenset((type(each), getattr(vars(each).get("forward"), "__qualname__", None)) for each in modules)
    replaced = frozenset((*attention_functions(model), *replaced_functions(model, modules)))
    about = type(model), hash(config), forwards, len(modules), replaced, attention_name(model.config), _computed(model)
    return (*about, device_of(model).type, has_global_hooks(), torch.__version__, transformers.__version__)


def _computed(model: Any) -> torch.dtype:
    """The coarsest dtype that a pass computes in; torch's dynamically quantised layers round as bf16 does."""
    if any(type(module).__module__.startswith("torch.ao.nn.quantized.dynamic") for module in model.modules()):
        return torch.bfloat16
    device = device_of(model)
    if is_autocast(device):
        return torch.get_autocast_dtype(device.type)
    return autocast_inside(model) or dtype_of(model)


def _judge(model: Any, reads_source: bool, adapter: Adapter | None) -> bool:
    name, dtype = type(model).__name__, _computed(model)
    bound = BOUNDS.get(dtype, BOUNDS[torch.bfloat16])
    try:
        before = 0.0 if reads_source else _apart(*_after_prompt(model, adapter), dtype)
        for draw in DRAWS:
            found = before if math.isnan(before) else _apart(*_after_texts(model, reads_source, adapter, draw), dtype)
            if math.isnan(found):
                raise Unsupported(
                    f"{name} gives logits that are NaN or infinite for random texts in "
                    f"{str(dtype).removeprefix('torch.')}: look for NaN in its weights, and for a dtype that overflows"
                )
            if found <= bound:
                return before <= bound
    except Unsupported:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise Unsupported(
            f"{name} does not run as fastspec has to run it, with a position for every node and a 4-D mask "
            f"({type(error).__name__}: {error}): it cannot be combined with assistant="
        ) from error
    raise Unsupported(
        f"{name} scores the nodes of a draft tree otherwise than the same tokens in a text of their own (its logits "
        f"are {found:.2g} standard deviations apart): it reads positions or masks in a way of its own, and cannot be "
        "combined with assistant="
    )


def _after_texts(model: Any, reads_source: bool, adapter: Adapter | None, draw: int) -> tuple[Tensor, Tensor]:
    """Logits of fastspec and of the model after the same texts, [n, V] each; with short spans too, if any."""
    if reads_source:
        return _after_source(model, draw)
    got, want = _after_prompts(model, adapter, draw)
    if names := _span_settings(model):
        with _short_spans(model, names):
            more = _after_prompts(model, adapter, draw)
        got, want = torch.cat((got, more[0])), torch.cat((want, more[1]))
    return got, want


def _apart(got: Tensor, want: Tensor, dtype: torch.dtype) -> float:
    """Distance of logits [n, V], in standard deviations; NaN where one of them is NaN or infinite."""
    apart = (got.float() - want.float()).pow(2).mean(-1).sqrt() / want.float().std(-1).clamp(min=1e-30)
    return float(apart.max() if dtype in WHOLE else apart.median())


def _span_settings(model: Any) -> list[str]:
    """The settings that may say how far back layers of a model see; the model tells whether it reads them."""
    config = model.config.get_text_config()
    held = {name: getattr(config, name, None) for name in LAYER_KINDS.values()}
    return [name for name, size in held.items() if isinstance(size, int) and size > 0]


@contextmanager
def _short_spans(model: Any, names: list[str]) -> Iterator[None]:
    """A model whose spans are SPAN positions, so that short texts go past them; they are read at every pass."""
    config = model.config.get_text_config()
    held = {name: getattr(config, name) for name in names}
    try:
        for name in names:
            setattr(config, name, SPAN)
        yield
    finally:
        for name, size in held.items():
            setattr(config, name, size)


def _words(model: Any) -> Tensor:
    """Tokens without a role, [n]: what a vision-language model would take for an image is none."""
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    count = table_rows(decoder.get_input_embeddings(), decoder.config)
    special = set()
    for config in (model.config.to_dict(), model.config.get_text_config().to_dict(), model.generation_config.to_dict()):
        for name, value in config.items():
            if name.endswith(("token_id", "token_index")):
                special |= set(value if isinstance(value, list) else [value])
    plain = [token for token in range(min(count, 4096)) if token not in special]
    return torch.tensor(plain or range(count), device="cpu")


def _after_prompts(model: Any, adapter: Adapter | None, draw: int) -> tuple[Tensor, Tensor]:
    """Logits that fastspec and the model give after the same texts, [n, V] each."""
    target = _target(model, adapter, 2, len(FIRST))
    texts, prefixes, got = _as_trees(target, _words(model), draw)
    want, tokens = _own(model, texts)
    # each row's last text ends in the second tree's last leaf; it is read on as a chain
    ends = [-1 - len(LEAVES[1]), -1]
    behind = [texts[end][len(prefixes[row]) :] for row, end in enumerate(ends)]
    chain = torch.cat((tokens.new_tensor(behind), tokens[ends]), 1)
    logits, _ = target.score(TokenTree.chain(chain), max(map(len, prefixes)))
    after = torch.cat([want[end, 1:] for end in ends])
    return torch.cat((got, *logits[:, -MORE:])), torch.cat((want[:, 0], after))


def _target(model: Any, adapter: Adapter | None, rows: int, tail: int) -> HFModel:
    """The model as its calls run it, on a cache that keeps what its layers see."""
    whole = (None,) * layer_count(model.config)
    return HFModel(model, adapter, rows=rows, capacity=ROOM, tail=tail, ops=TORCH, dropped=whole)


def _after_prompt(model: Any, adapter: Adapter | None) -> tuple[Tensor, Tensor]:
    """Logits that fastspec and the model give after a prompt in a batch without padding, [1, V] each."""
    target, words = _target(model, adapter, 1, 1), _words(model)
    text = words[torch.randint(len(words), (LENGTHS[0],), generator=torch.Generator().manual_seed(2), device="cpu")]
    got, _ = target.prefill(text[None].to(device_of(model)), torch.tensor([len(text)], device=device_of(model)))
    return got, _own(model, [text.tolist()])[0][:, 0]


def _as_trees(target: HFModel, words: Tensor, draw: int) -> tuple[list[list[int]], list[list[int]], Tensor]:
    """Texts, committed tokens of both rows, and what passes over two prompts and trees give, [n, V]."""
    device, generator = device_of(target.model), torch.Generator().manual_seed(draw)

    def drawn(*shape: int) -> Tensor:
        return words[torch.randint(len(words), shape, generator=generator, device="cpu")].to(device)

    prompts = drawn(2, LENGTHS[0])
    logits, _ = target.prefill(prompts, torch.tensor(LENGTHS, device=device))
    prefixes = [row[:count] for row, count in zip(prompts.tolist(), LENGTHS, strict=True)]
    texts, found = [list(text) for text in prefixes], [logits]
    for parents, leaves, paths in ((FIRST, LEAVES[0], PATHS), (SECOND, LEAVES[1], None)):
        tree = TokenTree.from_parents(drawn(2, len(parents)), torch.tensor(parents, device=device).expand(2, -1))
        logits, _ = target.score(tree, max(map(len, prefixes)))
        for row in range(2):
            texts += [prefixes[row] + _text(tree.tokens[row].tolist(), parents, leaf) for leaf in leaves]
            found.append(logits[row, list(leaves)])
        if paths is not None:
            path = torch.tensor([[*each, *each[-1:] * (len(paths[0]) - len(each))] for each in paths], device=device)
            accepted = torch.tensor([len(each) - 1 for each in paths], device=device)
            target.commit(Verdict(path, accepted, accepted), torch.ones(2, dtype=torch.bool, device=device))
            prefixes = [prefixes[row] + tree.tokens[row, list(each)].tolist() for row, each in enumerate(paths)]
    return texts, prefixes, torch.cat(found)


def _text(tokens: list[int], parents: tuple[int, ...], node: int) -> list[int]:
    """The tokens from the root to a node."""
    return [*(_text(tokens, parents, parents[node]) if node else ()), tokens[node]]


def _own(model: Any, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Logits of the model's own `generate` behind texts, [n, 1 + MORE, V], and its tokens [n, MORE]."""
    if len(texts) > 1 and counts_padding(model):
        logits, tokens = zip(*(_own(model, [text]) for text in texts), strict=True)
        return torch.cat(logits), torch.cat(tokens)
    device, width = device_of(model), max(map(len, texts))
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    pad = pad if isinstance(pad, int) and 0 <= pad < table_rows(model.get_input_embeddings(), model.config) else 0
    ids = torch.tensor([[pad] * (width - len(text)) + text for text in texts], device=device)
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts], device=device)
    new = 1 + MORE
    config = GenerationConfig(
        max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=pad
    )
    # synced_gpus: not `generate`'s own way of keeping processes together
    settings: dict[str, Any] = {"generation_config": config, "synced_gpus": False}
    if not model.config.is_encoder_decoder and any(dropped_spans(model)):
        settings[CACHE] = DynamicCache()  # its own would keep less than what its layers see
    out = type(model).generate(model, input_ids=ids, attention_mask=mask, **settings)
    return torch.stack(out.logits, 1), out.sequences[:, -new:-1]


def _after_source(model: Any, draw: int) -> tuple[Tensor, Tensor]:
    """As `_after_prompts`, for a model that reads a source; its own texts come one by one, without padding."""
    words = _words(model)
    encoder = model.get_encoder()
    device, known = device_of(model), words[words < table_rows(encoder.get_input_embeddings(), encoder.config)]
    ids = known[torch.randint(len(known), (1, 9), generator=torch.Generator().manual_seed(1), device="cpu")].to(device)
    mask = torch.ones_like(ids)
    states = encoder(input_ids=ids, attention_mask=mask, return_dict=True)[0]
    source = Source(states.expand(2, -1, -1), mask.expand(2, -1), ids.expand(2, -1))
    target = Seq2SeqModel(model, source, rows=2, capacity=ROOM, tail=len(FIRST), ops=TORCH)
    texts, _, got = _as_trees(target, words, draw)
    decoded = (torch.tensor([text], device=device) for text in texts)
    own = [model(input_ids=ids, attention_mask=mask, decoder_input_ids=text).logits[:, -1] for text in decoded]
    return got, torch.cat(own)


@contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """The model in evaluation mode, without forward hooks but those that bring weights, and settings of its own; in the
    end attributes, buffers and global generators are as they were."""
    modules = list(model.modules())
    held = [(vars(module), dict(vars(module)), dict(own_buffers(module))) for module in modules]
    devices = [device_of(model)] if device_of(model).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            for module in modules:
                vars(module)["training"] = False
                keep_hooks(module, brings_weights)
            vars(model)["generation_config"] = GenerationConfig()
            yield
        finally:
            for (now, before, buffers), module in zip(held, modules, strict=True):
                for name in [name for name in now if name not in before]:
                    del now[name]
                for name, value in before.items():
                    now[name] = value
                own_buffers(module).update(buffers)
