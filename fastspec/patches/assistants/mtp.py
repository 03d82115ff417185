"""MTP heads: the draft layer in a model's own checkpoint, which transformers leaves out. Names of its tensors are from
transformers' conversion mapping of `MtpModel`, and vLLM's models of this name."""

from __future__ import annotations

import hashlib
import inspect
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import parse_safetensors_file_metadata, try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from fastspec import files
from fastspec.default_trees import TreeShape
from fastspec.errors import CheckpointError, Unsupported
from fastspec.generation.drafters.head_drafter import EagleDrafter
from fastspec.generation.heads.bound import BoundHead, TargetParts, bind, check_range, plain_weight
from fastspec.generation.heads.files import check_finite, some
from fastspec.generation.heads.load import is_copy
from fastspec.generation.heads.module import FLOATS, HeadConfig, MtpHead
from fastspec.models import first_line
from fastspec.patches.assistants.heads import is_hub_id, parts_of
from fastspec.patches.assistants.probe import default_prompt, states_of
from fastspec.patches.backends import TORCH
from fastspec.patches.call.ranks import by_first
from fastspec.patches.hf.cache import cache_argument, kept_cache
from fastspec.patches.hf.checkpoint_files import FLOATS as BY_NAME
from fastspec.patches.hf.checkpoint_files import WRAPPED, Header, dense_float8, headers_of, revision_of
from fastspec.patches.hf.config_fields import layer_shapes
from fastspec.patches.hf.families import Adapter
from fastspec.patches.hf.modes import decoder_of, mode_for
from fastspec.patches.session import session_of

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
CODED = re.compile(r"\.(?:weight_\w+|qweight|qzeros|scales|g_idx|input_scale)$")
"""Tensors that quantisers write beside a layer's weight, or in its place."""
EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpForm:
    """Names of an MTP layer's tensors in one form of checkpoint: a pattern before them (N: the target's number of
    layers, `step`: the number of the MTP layer), and patterns of what follows with their names in `MtpHead`."""

    prefix: str
    names: tuple[tuple[str, str], ...]
    final: bool = True
    """True where a norm stands before the LM head."""
    disputed: bool = False
    """True where programs differ in the side of the final norm that hidden states are from; a probe decides."""


FORMS = (
    MtpForm(  # Qwen3-Next, Qwen3.5
        prefix=WRAPPED.pattern + r"mtp\.(?:layers\.(?P<step>\d+)\.)?",
        names=((r"^pre_fc_norm_embedding\.", "token_norm."), (r"^pre_fc_norm_hidden\.", "state_norm.")),
    ),
    MtpForm(  # Qwen's, as speculators trains and saves it alone
        prefix=r"^mtp_layers\.(?P<step>\d+)\.",
        names=(
            (r"^token_layernorm\.", "token_norm."),
            (r"^hidden_layernorm\.", "state_norm."),
            (r"^input_proj\.", "fc."),
            (r"^final_layernorm\.", "norm."),
        ),
    ),
    MtpForm(  # DeepSeek-V3, GLM-4.5, Hunyuan
        prefix=WRAPPED.pattern + r"layers\.(?P<step>N)\.",
        names=(
            (r"^enorm\.", "token_norm."),
            (r"^hnorm\.", "state_norm."),
            (r"^eh_proj\.", "fc."),
            (r"^(?:shared_head\.norm|final_layernorm)\.", "norm."),
            (r"^shared_head\.head\.", "lm_head."),
        ),
        disputed=True,
    ),
    MtpForm(  # ERNIE 4.5
        prefix=WRAPPED.pattern + r"mtp_(?=(?:emb_norm|hidden_norm|linear_proj|block)\.(?P<step>\d+)\.)",
        names=(
            (r"^emb_norm\.0\.", "token_norm."),
            (r"^hidden_norm\.0\.", "state_norm."),
            (r"^linear_proj\.0\.", "fc."),
            (r"^block\.0\.", ""),
            (r"^mlp\.moe_statics\.", "mlp.gate.moe_statics."),
        ),
        final=False,
    ),
)
BLOCKS = re.compile(r"(^|\.)mtp\.\d+\.markov_head\.")
"""Tensors that DSpark's blocks have, and MTP layers do not."""
OUTSIDE = re.compile(r"^(?:token_norm|state_norm|fc|norm|lm_head|embed_tokens)\.")
"""Names of what is beside an MTP layer."""
MARKS = {"token_norm.weight", "state_norm.weight", "fc.weight"}
"""Tensors that no other layer has."""


def load_mtp(source: str | Path | bool | MtpHead, model: PreTrainedModel) -> BoundHead:
    """MTP head of a model, bound to it, of the files that the model was loaded from (True), of a directory or hub id,
    or of a head that was loaded before. Raises Unsupported without an adapter, CheckpointError for incomplete files."""
    adapter, target = adapter_of(model), parts_of(model, layers=True)
    if isinstance(source, MtpHead):
        _check_module(source, model, adapter, target)
        held = source.binding
        return bind(source, held.embedding if held is not None and held.own_embedding else None, target)
    if source is not True and not isinstance(source, (str, Path)):
        raise CheckpointError(
            f"mtp= is a {type(source).__name__}, which holds no draft layers: accepted are True, a directory, a hub "
            "id, an MtpHead and a Gemma 4 assistant"
        )
    if source is True:
        refuse_gemma4(model.config)
    where = (getattr(model.config, "name_or_path", None) or "") if source is True else str(source)
    if not where:
        raise CheckpointError(
            f"this {target.name} was not loaded from files (its config has no name_or_path): fastspec.patch(model, "
            "mtp=PATH) says where its MTP weights are"
        )
    revision = revision_of(model) if source is True else None
    form, state = read_mtp(where, target.sizes.num_layers, revision=revision)
    head = _built(form, state, (where, revision), model, adapter, target)
    tell_of_adapter(head, target)
    return _probed(head, model, where) if form.disputed else head


def adapter_of(model: Any) -> Adapter:
    """The adapter that runs a model's MTP layer. Raises Unsupported for a model without."""
    mode = mode_for(model)
    if mode.adapter is None:
        raise Unsupported(
            f"assistant 'mtp' runs the draft layer of a checkpoint through an adapter, and {type(model).__name__} runs "
            f"in generic mode ({mode.why or 'it has none'}): use 'nasd' or 'speculative'"
        )
    return mode.adapter


def refuse_gemma4(config: Any) -> None:
    """Raise CheckpointError for the configuration of a Gemma 4, which has no MTP layer in its own files."""
    if config.get_text_config().model_type.startswith("gemma4"):
        raise CheckpointError(
            "Gemma 4's draft layers are a checkpoint of their own: fastspec.patch(model, "
            'mtp="google/gemma-4-E4B-it-assistant"), or the assistant of another size'
        )


def tell_of_adapter(head: BoundHead, target: TargetParts) -> None:
    """Warn, once for a layer, that an adapter has changed the target that it drafts for."""
    if target.has_adapter and isinstance(head.module, MtpHead) and not head.module.told:
        head.module.told = True
        warnings.warn(
            f"an adapter changes what this {target.name} says, and its MTP layer was trained without: it drafts for "
            "it, and its drafts are accepted less often",
            stacklevel=3,
        )


@torch.no_grad()
def new_mtp(model: PreTrainedModel) -> MtpHead:
    """An MTP head to train, bound to a model: a copy of its last layer with full attention and of its final norm, which
    read the mean of the token's embedding and the hidden state, each normed. Raises Unsupported for a model without an
    adapter."""
    mode, target = mode_for(model), parts_of(model, layers=True)
    if mode.adapter is None:
        raise Unsupported(f"an MTP layer needs an adapter, and {target.name} runs in generic mode: train an EAGLE head")
    decoder, parts = decoder_of(model), mode.adapter
    like = [each for each in getattr(decoder, parts.layers) if hasattr(each, parts.attention)][-1]
    norm = _input_norm(like, parts, target).weight
    half = torch.eye(target.sizes.hidden_size, dtype=target.dtype, device=target.device) / 2
    state = {f"layer.{name}": each.clone() for name, each in like.state_dict().items()}
    state |= {f"{name}_norm.weight": norm.mean().expand_as(norm).clone() for name in ("token", "state")}
    state |= {"fc.weight": torch.cat((half, half), 1), "norm.weight": getattr(decoder, parts.norm).weight.clone()}
    head = _built(FORMS[0], state, ("a new MTP layer", None), model, parts, target).as_module()
    assert isinstance(head, MtpHead)
    head.source = None
    return head


def saved_mtp(head: MtpHead) -> dict[str, Tensor]:
    """Tensors of an MTP head by the names of Qwen's checkpoints, bfloat16. Raises Unsupported for another form."""
    faults = {
        "is rounded to 8 bits": head.is_rounded,
        "has no norm before the LM head": head.norm is None,
        "reads states before the target's final norm": head.config.last_tap_before_norm,
        "has an embedding of its own": head.bound.own_embedding,
    }
    if odd := [fault for fault, true in faults.items() if true]:
        raise Unsupported(f"this MTP layer {' and '.join(odd)}, which the form that is written does not tell")
    names = {"token_norm": "pre_fc_norm_embedding", "state_norm": "pre_fc_norm_hidden", "layer": "layers.0"}
    found = {}
    for name, tensor in head.state_dict().items():
        part, _, rest = name.partition(".")
        held = tensor.detach().cpu().contiguous()
        found[f"mtp.{names.get(part, part)}.{rest}"] = held.bfloat16() if held.is_floating_point() else held
    return found


def read_mtp(
    where: str, num_layers: int, *, revision: str | None = None, values: bool = True
) -> tuple[MtpForm, dict[str, Tensor]]:
    """The MTP layer in the checkpoint of a model of so many layers, under the names of `MtpHead`, of FP8 in bf16;
    nothing else is read. Without `values` the tensors are on the device meta, of headers alone. Raises CheckpointError
    where there is none, or one for every draft."""
    found = found_mtp(where, num_layers, revision)
    if found is None:
        if blocks := sorted(key for _, keys, _ in files_of(where, revision) for key in keys if BLOCKS.search(key)):
            raise CheckpointError(
                f"{where} holds DSpark blocks under mtp. ({some(blocks)}), which draft several tokens in one pass, and "
                "no MTP layer: use 'nasd' or 'speculative'"
            )
        raise CheckpointError(
            f"{where} holds no MTP weights: its publisher gave none, or a conversion lost them; fastspec.patch(model, "
            "mtp=PATH) takes those of another copy"
        )
    form, by_file, steps = found
    if len(steps) > 1:
        raise CheckpointError(
            f"{where} has an MTP layer for each draft ({len(steps)}), and fastspec runs one, fed its own state; "
            "use 'nasd' or 'speculative'"
        )
    names = {key: name for _, own in by_file for key, name in own.items()}
    read = _tensors if values else _blanks
    state = dense_float8({names[key]: tensor for key, tensor in read(by_file).items()})
    if coded := sorted(name for name, each in state.items() if each.dtype not in FLOATS or CODED.search(name)):
        raise CheckpointError(
            f"{where} holds its MTP weights quantised ({some(coded)}), and they are read in FP8, 16 or 32 bits: "
            "fastspec.patch(model, mtp=PATH) takes those of a copy that left them as they were"
        )
    return form, _together(state)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of safetensors: its path, or its name in a commit of a repository of the hub's."""

    name: str
    repository: str | None = None
    commit: str | None = None

    def path(self) -> str:
        """Its path. It is fetched where no cache has it."""
        return self.name if self.repository is None else _needed(self.repository, self.name, self.commit)

    def headers(self) -> dict[str, Header]:
        """Headers of its tensors; of a file that no cache has these alone are fetched."""
        held = self.name if self.repository is None else _cached(self.repository, self.name, self.commit)
        if held is not None:
            return headers_of([held])
        assert self.repository is not None
        try:
            told = parse_safetensors_file_metadata(self.repository, self.name, revision=self.commit).tensors
        except OSError as error:
            raise _not_given(self.repository, error) from error
        return {name: Header(tuple(each.shape), each.dtype) for name, each in told.items()}


ByFile = list[tuple[StoredFile, dict[str, str]]]
"""Of each file its MTP tensors: the names that they have there, and in `MtpHead`."""


def _tensors(by_file: ByFile) -> dict[str, Tensor]:
    """MTP tensors by the names that they have in their files."""
    found: dict[str, Tensor] = {}
    for stored, names in by_file:
        with safe_open(stored.path(), framework="pt", device="cpu") as file:
            found |= {key: file.get_tensor(key) for key in names}
    return found


def _blanks(by_file: ByFile) -> dict[str, Tensor]:
    """The same without values, on the device meta; int32 for what is no number that is read."""
    kinds = {**BY_NAME, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn}
    headers = {key: each for stored, names in by_file for key, each in stored.headers().items() if key in names}
    return {
        key: torch.empty(each.shape, dtype=kinds.get(each.dtype, torch.int32), device="meta")
        for key, each in headers.items()
    }


def found_mtp(where: str, num_layers: int, revision: str | None) -> tuple[MtpForm, ByFile, set[str]] | None:
    """The form of a checkpoint's MTP layers, the one with most of its marks, their tensors, and the numbers of the
    layers; None where it has none."""
    stored = list(files_of(where, revision))
    best, most = None, 0
    for form in FORMS:
        pattern = re.compile(form.prefix.replace("N", rf"(?:{num_layers}|{num_layers + 1})"))
        by_file, steps, held = ByFile(), set[str](), dict[str, bool]()
        for file, keys, loaded in stored:
            found = {key: match for key in keys if (match := pattern.search(key)) is not None}
            mine = {key: match for key, match in found.items() if not held.get(key)}
            if twice := sorted(mine.keys() & held.keys()):
                raise CheckpointError(
                    f"{where} holds {some(twice)} in two files, neither of which the model is loaded from: leave one"
                )
            held |= dict.fromkeys(mine, loaded)
            steps |= {match["step"] for match in mine.values() if match["step"] is not None}
            if mine:
                by_file.append((file, {key: _renamed(form, key[match.end() :]) for key, match in mine.items()}))
        marks = len(MARKS.intersection(name for _, names in by_file for name in names.values()))
        if marks > most:
            best, most = (form, by_file, steps), marks
    return best


def _renamed(form: MtpForm, key: str) -> str:
    for pattern, name in form.names:
        key = re.sub(pattern, name, key)
    return key if OUTSIDE.search(key) else f"layer.{key}"


def layers_in(where: str) -> int:
    """Number of layers of a checkpoint's language model, by its config.json. Raises ValueError without."""
    folder = Path(where).expanduser()
    path = folder / "config.json" if folder.is_dir() else Path(_needed(where, "config.json", None))
    raw = files.parse_json(path.read_text(encoding="utf-8"))
    text = raw.get("text_config", raw) if isinstance(raw, dict) else None
    layers = text.get("num_hidden_layers") if isinstance(text, dict) else None
    if not isinstance(layers, int):
        raise ValueError(f"{path} describes no language model")
    return layers


def _together(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with experts that are stored one by one all in one, gate before up, as transformers has them."""
    apart = {key: (found[1], int(found[2]), found[3]) for key in state if (found := EXPERT.match(key)) is not None}
    merged = {key: tensor for key, tensor in state.items() if key not in apart}
    one = {(at, number, kind): state[key] for key, (at, number, kind) in apart.items()}
    for place in sorted({at for at, _, _ in one}):
        numbers = sorted({number for at, number, _ in one if at == place})
        with suppress(KeyError):  # one that lacks a part is missed below, by name
            gates_ups = [torch.cat((one[place, n, "gate"], one[place, n, "up"])) for n in numbers]
            downs = [one[place, n, "down"] for n in numbers]
            merged |= {f"{place}.gate_up_proj": torch.stack(gates_ups), f"{place}.down_proj": torch.stack(downs)}
    return merged


def files_of(where: str, revision: str | None) -> Iterator[tuple[StoredFile, list[str], bool]]:
    """The files of a checkpoint, each with the names of its tensors, and True for those that the model is loaded from,
    which come first."""
    folder = Path(where).expanduser()
    if folder.is_dir():
        stored = sorted(folder.glob("*.safetensors"))
        if not stored and (others := sorted(folder.glob("*.bin"))):
            raise CheckpointError(
                f"{where} holds its weights in .bin files ({others[0].name}), and MTP weights are read from "
                "safetensors: write each anew by safetensors.torch.save_file(torch.load(FILE, weights_only=True), NAME)"
            )
        indexed = (folder / INDEX).exists() and not (folder / WHOLE).exists()  # as transformers chooses
        loaded = set(_by_file(folder / INDEX)) if indexed else {WHOLE}
        for file in sorted(stored, key=lambda file: (file.name not in loaded, file.name)):
            yield StoredFile(str(file)), _keys(file), file.name in loaded
        return
    if not is_hub_id(where):
        raise CheckpointError(
            f"{where} is no directory, and no hub id of the form owner/name: fastspec.patch(model, mtp=PATH) says "
            "where the model's files are"
        )
    whole = _cached(where, WHOLE, revision)
    index = _fetched(where, INDEX, revision) if whole is None or _cached(where, INDEX, revision) else None
    if index is None:
        alone = StoredFile(WHOLE, where, revision)
        if whole is not None:
            yield alone, _keys(Path(whole)), True
            return
        try:
            keys = list(alone.headers())
        except CheckpointError as error:
            raise CheckpointError(
                f"{where} is no directory, and as a hub id it gives neither {INDEX} nor {WHOLE}: MTP weights are read "
                "from safetensors, and where HF_HUB_OFFLINE is set from what was fetched before; of a model that was "
                "loaded with cache_dir=, fastspec.patch(model, mtp=PATH) says where"
            ) from error
        yield alone, keys, True
        return
    commit = revision or Path(index).parent.name  # main may be another one on the hub
    for name, keys in _by_file(Path(index)).items():
        yield StoredFile(name, where, commit), keys, True


def _by_file(index: Path) -> dict[str, list[str]]:
    """The names of the tensors in each file that an index names."""
    try:
        mapped = files.parse_json(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: [key for key, file in mapped.items() if file == name] for name in sorted(set(mapped.values()))}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of a checkpoint: {error}") from error


def _keys(file: Path) -> list[str]:
    try:
        with safe_open(str(file), framework="pt", device="cpu") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _cached(where: str, name: str, revision: str | None) -> str | None:
    """The path of a file of the hub's that was fetched before. Asks no network."""
    found = try_to_load_from_cache(where, name, revision=revision)
    return found if isinstance(found, str) else None


def _fetched(where: str, name: str, revision: str | None) -> str | None:
    """The path of a file of the hub's, None where the repository has no such file."""
    if found := _cached(where, name, revision):
        return found
    try:
        return cached_file(where, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise _not_given(where, error) from error


def _not_given(where: str, error: OSError) -> CheckpointError:
    return CheckpointError(f"{where} is no directory, and the hub does not give it ({first_line(error)})")


def _needed(where: str, name: str, revision: str | None) -> str:
    found = _fetched(where, name, revision)
    if found is None:
        raise CheckpointError(f"{where} has no {name}, which its index names")
    return found


def save_with_mtp(model: Any, *args: Any, **options: Any) -> Any:
    """A model's `save_pretrained` that keeps the MTP layer among its tensors, which transformers would lose: as its
    files have it, FP8 in bf16, or in Qwen's form where it was trained since. Raises CheckpointError, before anything is
    written, where the files that it was read from hold it no more."""
    save = type(model).save_pretrained
    given = inspect.signature(save).bind(model, *args, **options).arguments
    session = session_of(model)
    head = None if session is None else session.resources.get("mtp")
    if head is None or getattr(model, "_hf_peft_config_loaded", False):
        return save(model, *args, **options)
    if getattr(model, "hf_quantizer", None) is not None:
        warnings.warn(
            "save_pretrained of a quantised model leaves its MTP layer out, as transformers does", stacklevel=2
        )
        return save(model, *args, **options)
    try:
        kept = _kept(head.as_module(), model)
    except Unsupported as error:
        warnings.warn(f"save_pretrained leaves the MTP layer out: {error}", stacklevel=2)
        return save(model, *args, **options)
    held = given.get("state_dict")
    state = {**(model.state_dict() if held is None else held), **kept}
    rest = {name: value for name, value in given.items() if name not in ("self", "state_dict", "kwargs")}
    return save(model, **rest, **given.get("kwargs", {}), state_dict=state)


def _kept(head: MtpHead, model: Any) -> dict[str, Tensor]:
    """The tensors of a model's MTP layer, by the names of a checkpoint. Raises Unsupported for one that has no form."""
    if head.source is None:
        return saved_mtp(head)
    where, revision = head.source
    found = found_mtp(where, model.config.get_text_config().num_hidden_layers, revision)
    if found is None:
        raise CheckpointError(
            f"{where} holds the MTP layer no more that was read from it, and nothing was saved: "
            "fastspec.unpatch(model) lets the model be saved without"
        )
    tensors = dense_float8(_tensors(found[1]))
    state = _together({name: tensors[key] for _, own in found[1] for key, name in own.items() if key in tensors})
    mine = {} if head.is_rounded else head.state_dict()
    pairs = ((own.cpu().float(), state[name].float()) for name, own in mine.items() if name in state)
    same = all(torch.allclose(*pair, rtol=2**-8, atol=1e-7) for pair in pairs)  # casts that a target was given round
    return tensors if same else saved_mtp(head)


def _built(
    form: MtpForm,
    state: dict[str, Tensor],
    source: tuple[str, str | None],
    model: Any,
    adapter: Adapter,
    target: TargetParts,
) -> BoundHead:
    """The head of these tensors. Raises CheckpointError for any that are missing, unknown or of another shape."""
    where = source[0]
    head, like, embedding = fitted(form, state, where, model, adapter, target)
    head.load_state_dict(_placed(state, like, target, where), assign=True)
    head.d2t, head.source = head.d2t.to(target.device), source
    own = None if embedding is None else _embedding(embedding, target, where)
    return bind(head.requires_grad_(False).eval(), own, target)


def fitted(
    form: MtpForm, state: dict[str, Tensor], where: str, model: Any, adapter: Adapter, target: TargetParts
) -> tuple[MtpHead, nn.Module, Tensor | None]:
    """A head without values that these tensors fit, the target's layer that it is like, and the embedding that they
    bring, which is taken out, as is what the target has. Raises CheckpointError for any that are missing, unknown or of
    another shape."""
    number = _like(state, getattr(decoder_of(model), adapter.layers), adapter)
    own_lm_head = _taken(state, "lm_head.weight", target.lm_head)
    embedding = _taken(state, "embed_tokens.weight", target.embedding)
    if own_lm_head is not None:
        state["lm_head.weight"] = own_lm_head
    head, like = _blank(number, model, adapter, target, final=form.final, own_lm_head=own_lm_head is not None)
    _check_fits(state, head.state_dict(), target.name, where)
    blank = (name for name, each in (*head.named_parameters(), *head.named_buffers()) if each.is_meta)
    if left := [name for name in blank if name not in state]:
        raise CheckpointError(f"{where}: {', '.join(left)} of an MTP layer of this {target.name} are in no file")
    if embedding is not None:
        _check_embedding(embedding, target, where)
    return head, like, embedding


def _blank(
    number: int | None, model: Any, adapter: Adapter, target: TargetParts, *, final: bool, own_lm_head: bool
) -> tuple[MtpHead, nn.Module]:
    """A head without values whose layer is of the class of the target's layer of this number, and that layer."""
    if number is None:
        raise Unsupported(f"assistant 'mtp' does not run layers like those of this {target.name}")
    like = getattr(decoder_of(model), adapter.layers)[number]
    norm, config = _input_norm(like, adapter, target), _config(model, number, like, adapter, target, own_lm_head)
    with torch.device("meta"):
        layer = type(like)(deepcopy(model.config.get_text_config()), number)
        head = MtpHead(config, layer, lambda: type(norm)(config.hidden_size, eps=config.rms_norm_eps), final=final)
    return head, like


def _check_module(head: MtpHead, model: Any, adapter: Adapter, target: TargetParts) -> None:
    """Raise CheckpointError for a head that was made for another model."""
    state, own = head.state_dict(), head.lm_head is not None
    number = _like(state, getattr(decoder_of(model), adapter.layers), adapter)
    blank, like = _blank(number, model, adapter, target, final=head.norm is not None, own_lm_head=own)
    if type(head.layer) is not type(like):
        raise CheckpointError(
            f"this MtpHead has a {type(head.layer).__name__}, and {target.name} has layers of {type(like).__name__}: "
            "give the one that was made for this model"
        )
    if head.config.vocab_size != blank.config.vocab_size:
        raise CheckpointError(
            f"this MtpHead drafts {head.config.vocab_size} tokens, and {target.name} has {blank.config.vocab_size}"
        )
    if not head.is_rounded:
        _check_fits(state, blank.state_dict(), target.name, "this MtpHead")


def _input_norm(like: nn.Module, adapter: Adapter, target: TargetParts) -> Any:
    """The norm at the beginning of a layer, whose class those of an MTP layer have. Raises Unsupported for layers that
    begin with none, or with one that also takes the mean away, and for families that scale or run them otherwise."""
    norm = getattr(like, adapter.input_norm) if adapter.input_norm else None
    if adapter.embed_scale or adapter.layer_scale or adapter.parallel or not hasattr(norm, adapter.eps):
        raise Unsupported(f"assistant 'mtp' does not run layers like those of this {target.name}")
    return norm


def _check_fits(state: dict[str, Tensor], wanted: dict[str, Tensor], name: str, where: str) -> None:
    """Raise CheckpointError for tensors that are missing, unknown or of another shape than a head's."""
    faults = [f"{key} is missing" for key in wanted if key not in state]
    faults += [f"{key} is unknown" for key in state if key not in wanted]
    faults += [
        f"{key} is {list(tensor.shape)}, not {list(wanted[key].shape)}"
        for key, tensor in state.items()
        if key in wanted and tensor.shape != wanted[key].shape
    ]
    if faults:
        more = f" and {len(faults) - 4} more" if len(faults) > 4 else ""
        raise CheckpointError(f"the MTP weights of {where} do not fit this {name}: {'; '.join(faults[:4])}{more}")


def _placed(state: dict[str, Tensor], like: nn.Module, target: TargetParts, where: str) -> dict[str, Tensor]:
    """Tensors where the target is, in the dtypes of its layer `like`, some of which are kept in fp32; in the target's
    own where that has codes in their place."""
    check_range(state, target.dtype, where)
    kinds, placed = dict(like.named_parameters()) | dict(like.named_buffers()), {}
    for name, tensor in state.items():
        twin = kinds.get(name.removeprefix("layer."))
        alike = twin is not None and twin.dtype in FLOATS and twin.shape == tensor.shape
        dtype = twin.dtype if twin is not None and alike else target.dtype
        placed[name] = tensor.to(target.device, dtype if tensor.is_floating_point() else tensor.dtype)
        check_finite(name, placed[name], where)
    return placed


def _check_embedding(weight: Tensor, target: TargetParts, where: str) -> None:
    """Raise CheckpointError for an embedding of another shape than a target's."""
    rows, width = target.rows[0], target.sizes.hidden_size
    if weight.ndim != 2 or weight.shape[0] < rows or weight.shape[1] != width:
        raise CheckpointError(
            f"the MTP layer of {where} has an embedding of shape {list(weight.shape)}, and this {target.name} has "
            f"{rows} tokens and is {width} wide: take the layer of this model's own checkpoint"
        )


def _embedding(weight: Tensor, target: TargetParts, where: str) -> nn.Embedding:
    """The embedding that an MTP layer brought."""
    check_finite("embed_tokens.weight", weight, where)
    return nn.Embedding.from_pretrained(weight.to(target.device, target.dtype), freeze=True)


def _like(state: dict[str, Tensor], layers: Any, adapter: Adapter) -> int | None:
    """The number of the target's last layer with full attention whose parts have the names of the MTP layer's: mixtures
    have dense layers too. Without any the last one, whose names tell what is missing."""
    mine = {name.removeprefix("layer.").rpartition(".")[0] for name in state if name.startswith("layer.")}

    def names(layer: nn.Module) -> set[str]:
        """Modules that hold tensors, by their names without LoRA: quantised ones name their tensors otherwise."""
        modules, found = dict(layer.named_modules()), set[str]()
        for name in layer.state_dict():
            while name not in modules:
                name = name.rpartition(".")[0]
            found.add(name.removesuffix(".base_layer"))
        return {name for name in found if ".lora_" not in name}

    full = [number for number, layer in enumerate(layers) if hasattr(layer, adapter.attention)]
    same = [number for number in full if mine == names(layers[number])]
    return max(same or full, default=None)


def _taken(state: dict[str, Tensor], name: str, module: Any) -> Tensor | None:
    """A tensor, taken out, that is no copy of the target's own, as none is of one without values or of codes."""
    tensor, own = state.pop(name, None), plain_weight(module)
    return None if tensor is None or (own is not None and is_copy(tensor, own)) else tensor


def _config(
    model: Any, number: int, like: nn.Module, adapter: Adapter, target: TargetParts, own_lm_head: bool
) -> HeadConfig:
    text, sizes = model.config.get_text_config(), target.sizes
    kv_heads, size, _ = layer_shapes(model.config)[number]
    return HeadConfig(
        kind="mtp",
        hidden_size=sizes.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or text.moe_intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
        vocab_size=target.rows[1],
        draft_vocab_size=target.rows[1],
        target_hidden_size=sizes.hidden_size,
        rms_norm_eps=getattr(getattr(like, adapter.input_norm), adapter.eps),
        max_position_embeddings=text.max_position_embeddings,
        norm_output=True,
        own_lm_head=own_lm_head,
    )


PROBE_TOKENS, MARGIN = 200, 0.03
"""Tokens of the target's own answer that a probe drafts, and the share of them by which the other reading must win."""


def _before(config: HeadConfig, layers: int) -> HeadConfig:
    """The reading of a head whose hidden states, the target's and those fed back, are before a final norm."""
    return replace(config, taps=(layers,), last_tap_before_norm=True, norm_output=False)


def _probed(head: BoundHead, model: Any, where: str) -> BoundHead:
    """The head with the hidden states of the side of the target's final norm that drafts better, which is measured once
    for a checkpoint, and kept; of processes that hold the model together by the first."""
    config, layers = head.config, model.config.get_text_config().num_hidden_layers
    fusion = head.module.fc.weight.detach().float().cpu().contiguous()
    about = {"source": where, "fusion": hashlib.sha256(fusion.numpy().tobytes()).hexdigest()[:16]}
    path = files.cache_folder() / "mtp" / files.file_name(*about.values())

    def kept() -> bool | None:
        found = files.read(path) or {}
        before = found.get("before")
        return before if found.get("about") == about and isinstance(before, bool) else None

    def keep(shares: list[float]) -> bool:
        before = shares[1] >= shares[0] + MARGIN
        files.write(path, {"about": about, "before": before, "agreement": shares})
        return before

    before = by_first(model, kept)
    if before is None:
        shares = _agreements(head, model, (config, _before(config, layers)))
        before = by_first(model, partial(keep, shares))
    head.module.config = _before(config, layers) if before else config
    return head


@torch.no_grad()
def _agreements(head: BoundHead, model: Any, readings: tuple[HeadConfig, ...]) -> list[float]:
    """The share of the tokens of the target's own answer that a head drafts from its true states, by reading."""
    text = model.config.get_text_config()
    length = min(PROBE_TOKENS, text.max_position_embeddings - 1)
    ids = last = default_prompt(model)
    taking, cache = cache_argument(type(model).forward), None
    for _ in range(length):  # `generate` would heed the user's generation_config
        out = model(last, use_cache=True, **{taking: cache})
        last, cache = out.logits[:, -1:].argmax(-1), kept_cache(out)
        ids = torch.cat((ids, last), 1)
    states, picks = states_of(model, ids)
    shares = []
    for reading in readings:
        head.module.config = reading
        hidden = states[-1 if reading.last_tap_before_norm else -2]
        assert hidden is not None  # of a model with an adapter
        drafter = EagleDrafter(head, TreeShape(2, 0, 1), rows=1, capacity=ids.shape[1], ops=TORCH)
        drafts = drafter.program.logits(drafter.readouts(ids[:, 1:], hidden[:, :-1])[0]).argmax(-1)
        shares.append(float((drafts == picks[1:]).float().mean()))
    return shares
