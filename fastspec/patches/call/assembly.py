"""The engine that decodes a planned call: from the pool, or made anew of a target, a drafter, and a chooser of the
sizes of trees.

The chooser goes by milliseconds of rounds: as a model's weights foretell them, and as they were measured, which a file
keeps for a device, a model's shape and the versions of torch, triton and fastspec.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastspec import files
from fastspec.default_trees import TreeShape
from fastspec.errors import Unsupported
from fastspec.generation.capture import SPENT
from fastspec.generation.drafters.base import Drafter, HostDrafter, Process, adopt
from fastspec.generation.drafters.dynamic_tree import SizedDecoding
from fastspec.generation.drafters.given_text import CHUNKS
from fastspec.generation.drafters.policy import cost_on
from fastspec.generation.drafters.tree_sizes import Milliseconds, TreeSizes
from fastspec.generation.engine.engine import Engine
from fastspec.generation.engine.rounds import TOGETHER_TOKENS
from fastspec.generation.stats import Clock
from fastspec.kernels.tuned_launches import name_of
from fastspec.patches.assistants.speculative import read_parameters
from fastspec.patches.call.plan import Plan
from fastspec.patches.hf.cache import import_past
from fastspec.patches.hf.compat import dtype_of
from fastspec.patches.hf.config_fields import recurrent_layers
from fastspec.patches.hf.factory import language_model
from fastspec.patches.hf.model import HFModel

FOLDER = "rounds"
LEVEL = {"cpu": 0.2, "cuda": 0.045}
"""Milliseconds of one level of a draft phase, by the kind of device, beside reading the head."""


def sized(plan: Plan) -> Plan:
    """The plan with trees of the depth that is left to the temperature, and of sizes that rounds choose where these are
    left to the device, and pay."""
    decoding = plan.decoding
    if not isinstance(decoding, SizedDecoding):
        return plan
    if decoding.device_steps is not None:
        whole = _chooses_sizes(plan)
        if whole or (plan.follows_load and plan.device.type != "cpu"):
            decoding = replace(decoding, steps=decoding.device_steps, chooses_fed=not whole)
    if plan.processing.sample:
        decoding = decoding.sampled(plan.processing.temperature)
    return plan if decoding is plan.decoding else replace(plan, decoding=decoding)


def _chooses_sizes(plan: Plan) -> bool:
    """True where sizes that follow a clock change no bit of an answer, in mixtures, to which a node of a large tree
    costs as much as a token, with recurrent layers, which nothing holds to bits, and in batches on the CPU, to which
    all nodes cost as much, in fp32, where they change no token that is returned alone."""
    if plan.device.type == "cpu":
        alone = plan.request.width == 1 or plan.request.keeps_logits
        return not alone and dtype_of(plan.model) == torch.float32
    return plan.ops.exact or experts_share(plan.model) < 1 or any(recurrent_layers(plan.model.config))


def engine_of(plan: Plan) -> tuple[Engine[HFModel], Hashable]:
    """The engine of the call, and the key to keep it under; None for one that is not kept."""
    engines, key = plan.session.engines, _key(plan) if plan.ops.captures else None
    engine: Engine[HFModel] | None = None if key is None else engines.held.pop(key, None)
    if engine is None:
        engine = new_engine(plan)
        if key is not None:  # making the drafter may have packed its head's weights
            plan.session.defaults.look(plan.model)
            key = _key(plan)
    else:
        engine.drafter = _opened(plan, engine.target, engine.drafter, plan.request.width)
    engine.pinned = plan.session.pinned
    if engine.sizes is not None and plan.ranks is not None:
        engine.sizes.agree(plan.ranks.first_value)
    _restore(plan, engine.target)
    engine.profile(None if plan.session.profile is None else Clock(plan.session.profile, plan.device))
    return engine, key


def new_engine(plan: Plan) -> Engine[HFModel]:
    """An engine that no other call has had."""
    plan.session.engines.make_room()
    target, drafter = _made(plan, plan.request.width, plan.processing.drawn)
    return Engine(
        target,
        drafter,
        plan.ops,
        plan.processing.rule,
        rows=plan.request.width,
        measures=plan.request.measure,
        pad_token=None if plan.steps is None else plan.steps.pad_token,
        sizes=tree_sizes(plan),
    )


def entry(plan: Plan, engine: Engine[HFModel], rows: int) -> tuple[HFModel, Drafter | None]:
    """A target and a drafter of so many rows, for prompts to begin in: the same ones for all prompts. Drafters on the
    host need none: their rows join (`HostDrafter.join`)."""
    known = engine.entries.get(rows)
    if known is None:
        with SPENT.making():  # longer prompts are not read together
            target, drafter = _made(plan, rows, plan.processing.drawn, TOGETHER_TOKENS // rows if rows > 1 else None)
        made = target, None if isinstance(drafter, HostDrafter) else drafter
    else:
        made = known[0], _opened(plan, *known, rows)
    engine.entries[rows] = target, drafter = made
    if plan.text.shift is not None:
        target.move(plan.text.shift[:1].expand(rows))
    if engine.drafter is not None and drafter is engine.drafter:
        raise Unsupported(
            f"assistant {plan.decoding.name!r} is continuous, and made one drafter twice: each must be its own"
        )
    return made


def _key(plan: Plan) -> Hashable:
    """Key that calls which can share captured rounds agree in, or None for a decoding that cannot be compared; of the
    model as it was at the call's last look."""
    request, processing = plan.request, plan.processing
    session = plan.session
    weights = session.defaults.key, *map(session.engines.key_of, plan.decoding.modules)
    chosen = processing.sample, processing.signature, processing.settings
    pad_token = None if plan.steps is None else plan.steps.pad_token
    measured = request.answers is not None, request.measure, pad_token, plan.bounded, plan.dropped, plan.likeliest
    key = plan.decoding, plan.ops.exact, request.width, *chosen, measured, weights
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _made(plan: Plan, rows: int, process: Process | None, first: int | None = None) -> tuple[HFModel, Drafter | None]:
    """A target, whose buffers have `first` slots at first, and a drafter; drafts may be drawn under `process`."""
    drafter = _drafter(plan, rows, process)
    nodes = 1 if drafter is None else max(drafter.nodes, drafter.max_path)
    nodes = max(nodes, *CHUNKS.get(plan.device.type, CHUNKS["cuda"])) if plan.request.answers is not None else nodes
    target = language_model(
        plan.model,
        plan.text.source,
        rows=rows,
        capacity=plan.capacity,
        tail=nodes,
        taps=plan.decoding.taps,
        ops=plan.ops,
        bounded=plan.bounded,
        likeliest=plan.likeliest and (drafter is None or not drafter.traits.reads_logits),
        first=first,
        dropped=plan.dropped,
        before_norm=plan.decoding.before_norm,
    )
    if drafter is not None:
        drafter.bind(target)
    return target, drafter


def _drafter(plan: Plan, rows: int, process: Process | None) -> Drafter | None:
    ops = plan.ops.drafts or plan.ops
    drafter = plan.decoding.drafter(rows=rows, capacity=plan.capacity, device=plan.device, ops=ops, process=process)
    drafter = adopt(drafter, may_draw=process is not None)
    if drafter is not None:
        _tell(plan, drafter)
    return drafter


def _tell(plan: Plan, drafter: Drafter) -> None:
    """Let a drafter know of the call."""
    drafter.ends = plan.request.ends
    if isinstance(drafter, HostDrafter):
        drafter.timed = plan.ops.exact and not plan.processing.sample and plan.ranks is None
        drafter.ends_at_once = plan.request.rows is None
        drafter.tries = plan.session.pinned is not None


def _opened(plan: Plan, target: HFModel, drafter: Drafter | None, rows: int) -> Drafter | None:
    """Begin a call on a target and a drafter that were kept -> the drafter, which may be another."""
    target.open(plan.capacity)
    if drafter is None:
        return None
    if not drafter.traits.reusable:
        drafter = _drafter(plan, rows, plan.processing.drawn)
        if drafter is not None:
            drafter.bind(target)
        return drafter
    drafter.open(plan.capacity)
    _tell(plan, drafter)
    return drafter


def _restore(plan: Plan, target: HFModel) -> None:
    """Begin where the caller's cache ends, and count positions as behind the prompt: the pass over images counts
    its own."""
    if plan.text.past is not None:
        import_past(target.state, plan.text.past, plan.text.past_keep)
    if plan.text.shift is not None:
        # with fewer rows than prompts these are tokens alone, all of one shift
        target.move(plan.text.shift[: len(target.lengths)])


def tree_sizes(plan: Plan) -> TreeSizes | None:
    """Chooser of the sizes of a plan's trees, one for all calls of a kind; None where their size is fixed. Over several
    processes it has no clock in a call."""
    model, decoding, ops, rows = plan.model, plan.decoding, plan.ops, plan.request.width
    if not isinstance(decoding, SizedDecoding) or decoding.steps is None:
        return None
    device, dtype, known = plan.device, dtype_of(model), plan.session.trees
    key = decoding.steps, rows, device, dtype, decoding.chooses_fed, decoding.temperature
    if key not in known:
        shapes, first = decoding.sizes(rows, ops)
        head = sum(weight.nbytes for module in decoding.modules for weight in module.parameters())
        kind = f"{model.config.to_json_string()}{shapes}"
        path = path_of(device, kind, str(dtype), ops.name, decoding.name, head, rows)
        known[key] = TreeSizes(
            shapes,
            first,
            prior_times(model, device, shapes, head, rows),
            known=read_times(path),
            captures=ops.captures,
            switch=cost_on(device).host if ops.captures else 0.0,
            timed=plan.ranks is None,
            fed=decoding.chooses_fed,
            keep=partial(keep_times, path),
        )
    return known[key]


def experts_share(model: Any) -> float:
    """Share of a layer's experts that a token chooses; 1 without a mixture."""
    config = model.config.get_text_config()
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    total = next((count for count in counts if count), 1)
    return min(1.0, (getattr(config, "num_experts_per_tok", None) or total) / total)


def expert_bytes(model: Any) -> tuple[int, int, float]:
    """Bytes that every pass reads, those of all experts, and the share of the experts that a token chooses."""
    experts = {id(weight) for name, weight in model.named_parameters() if ".experts." in name}
    weights = list(read_parameters(model))
    among = sum(weight.nbytes for weight in weights if id(weight) in experts)
    return sum(weight.nbytes for weight in weights) - among, among, experts_share(model)


def prior_times(
    model: Any, device: torch.device, shapes: Sequence[TreeShape], head_bytes: int, rows: int
) -> list[float]:
    """Milliseconds of a round without drafts and of one of each shape: of reading the weights, of which tokens choose
    experts independently, and of drafting. Asynchronous rounds do not wait for the host."""
    cost, level = cost_on(device), LEVEL.get(device.type, LEVEL["cuda"])
    whole, experts, share = expert_bytes(model)
    host = cost.host if cost.asynchronous else 0.0

    def scored(nodes: int) -> float:
        return cost.of(nodes, round(whole + experts * (1 - (1 - share) ** nodes))) - host

    drafted = [(shape.depth + 1) * (level + head_bytes / cost.bytes_per_ms) for shape in shapes]
    passes = [scored(rows * shape.total_tokens) for shape in shapes]
    return [scored(rows), *(ms + more for ms, more in zip(passes, drafted, strict=True))]


def path_of(device: torch.device, kind: str, *words: object) -> Path:
    """The file of one kind of rounds: of a model's configuration and shapes of trees, and of further words."""
    shape = hashlib.sha256(kind.encode()).hexdigest()[:16]
    name = name_of(device) if device.type == "cuda" else f"{device.type}-{torch.get_num_threads()}"
    return files.cache_folder() / FOLDER / files.file_name(name, shape, *map(str, words), *files.versions().values())


def read_times(path: Path) -> Milliseconds:
    """Times that a file has kept; none where it is missing or, with a warning, damaged."""
    found = files.read(path)
    if found is None:
        return {}
    try:
        return {
            int(length): {int(nodes): float(ms) for nodes, ms in spent.items()}
            for length, spent in found["round_ms"].items()
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        files.ignore(path, f"no times of rounds: {type(error).__name__}: {error}")
        return {}


def keep_times(path: Path, known: Milliseconds) -> None:
    """Keep what was measured."""
    files.write(path, {**files.versions(), "round_ms": known})
