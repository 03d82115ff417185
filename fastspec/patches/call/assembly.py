"""The engine that decodes a planned call: from the pool, or made anew of a target and a drafter."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from fastspec.errors import Unsupported
from fastspec.generation.capture import SPENT
from fastspec.generation.drafters.base import Drafter, HostDrafter, Process, adopt
from fastspec.generation.drafters.dynamic_tree import SizedDecoding
from fastspec.generation.drafters.given_text import CHUNKS
from fastspec.generation.engine.engine import Engine
from fastspec.generation.engine.rounds import TOGETHER_TOKENS
from fastspec.generation.stats import Clock
from fastspec.patches.call.plan import Plan
from fastspec.patches.hf.cache import import_past
from fastspec.patches.hf.compat import dtype_of
from fastspec.patches.hf.factory import language_model
from fastspec.patches.hf.model import HFModel
from fastspec.patches.tuning.round_times import experts_share, tree_sizes


def sized(plan: Plan) -> Plan:
    """The plan with trees of the depth that is left to the temperature, and of sizes that rounds choose where these are
    left to the device, and pay."""
    decoding = plan.decoding
    if not isinstance(decoding, SizedDecoding):
        return plan
    if decoding.device_steps is not None and _chooses_sizes(plan):
        decoding = replace(decoding, steps=decoding.device_steps)
    if plan.processing.sample:
        decoding = decoding.sampled(plan.processing.temperature)
    return plan if decoding is plan.decoding else replace(plan, decoding=decoding)


def _chooses_sizes(plan: Plan) -> bool:
    """True where sizes that follow a clock change no bit of an answer, in mixtures, to which a node of a large tree
    costs as much as a token, and in batches on the CPU, to which all nodes do, in fp32, where they change no token that
    is returned alone."""
    if plan.device.type == "cpu":
        alone = plan.request.width == 1 or plan.request.keeps_logits
        return not alone and dtype_of(plan.model) == torch.float32
    return plan.ops.exact or experts_share(plan.model) < 1


def engine_of(plan: Plan) -> tuple[Engine[HFModel], Hashable]:
    """The engine of the call, and the key to keep it under; None for one that is not kept."""
    engines, key = plan.session.engines, _key(plan) if plan.ops.captures else None
    engine: Engine[HFModel] | None = None if key is None else engines.take(key)
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
        sizes=tree_sizes(plan.model, plan.session, plan.decoding, plan.ops, plan.request.width, plan.ranks is None),
    )


def entry(plan: Plan, engine: Engine[HFModel], rows: int) -> tuple[HFModel, Drafter | None]:
    """A target and a drafter of so many rows, for prompts to begin in: the same ones for all prompts."""
    known = engine.entries.get(rows)
    if known is None:
        with SPENT.making():  # longer prompts are not read together
            made = _made(plan, rows, plan.processing.drawn, TOGETHER_TOKENS // rows if rows > 1 else None)
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
        drafter.ends = plan.request.ends
    if isinstance(drafter, HostDrafter):
        drafter.timed = plan.ops.exact and not plan.processing.sample and plan.ranks is None
        drafter.ends_at_once = plan.request.rows is None
    return drafter


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
    drafter.ends = plan.request.ends
    return drafter


def _restore(plan: Plan, target: HFModel) -> None:
    """Begin where the caller's cache ends, and count positions as behind the prompt: the pass over images counts
    its own."""
    if plan.text.past is not None:
        import_past(target.state, plan.text.past, plan.text.past_keep)
    if plan.text.shift is not None:
        # with fewer rows than prompts these are tokens alone, all of one shift
        target.move(plan.text.shift[: len(target.lengths)])
