"""Predictors of the probabilities that a stage's and later answers are acceptable, and of the later ones' lengths."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastspec.cascade.calibration import Calibrator, Posterior
from fastspec.cascade.decisions import QualityTable, Rates, Scores
from fastspec.cascade.records import NAMES
from fastspec.errors import CheckpointError, Unsupported
from fastspec.files import parse_json

FORMAT, VERSION = "fastspec-cascade-predictor", "1"
HIDDEN = 32
FOLDS = 5
CLAMP = 5.0
"""Standardised features are held within this many standard deviations."""
LEAST_ITEMS = 20
STEPS, PATIENCE = 400, 60
LEARNING_RATE, DECAY = 1.5e-3, 1.0
LENGTHS = 0.2
"""Weight of the lengths' squared error beside the cross entropy."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The MLP of one stage, fp32: standardised features [F] to outputs [O], logits of quality, then logs of tokens,
    means of one network for each fold. mean, scale [F]; w1 [H, F], b1 [H]; w2 [O, H], b2 [O]."""

    mean: Tensor
    scale: Tensor
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    def __call__(self, features: Tensor) -> list[float]:
        with torch.inference_mode():
            x = features.sub(self.mean).div_(self.scale).clamp_(-CLAMP, CLAMP)
            return torch.addmv(self.b2, self.w2, torch.addmv(self.b1, self.w1, x).relu_()).tolist()


@dataclass(frozen=True, slots=True)
class CalibratedProbability:
    """Calibration of one stage's logit for another stage's answer, to the posterior's mean or lower quantile `risk`."""

    calibrator: Calibrator
    posterior: Posterior

    def __call__(self, logit: float, risk: float | None) -> float:
        probability = self.calibrator(logit)
        return self.posterior.mean(probability) if risk is None else self.posterior.lower(probability, risk)


@dataclass(frozen=True, slots=True, eq=False)
class Predictor:
    """Predictor of a cascade of L stages, by the features of `fastspec.cascade.records`.

    `points[k]` [n, 2 (L - k) - 1] fp32 are the outputs at stage k for the training items, each by a network that was
    not trained on it; fresh and kept [n, L] fp32 the tokens that their stages generated and took over. `rates` are the
    stages' costs where the predictor was made, `place` its device, dtype and versions.
    """

    stages: tuple[str, ...]
    heads: tuple[Head, ...]
    outlooks: tuple[tuple[CalibratedProbability, ...], ...]
    points: tuple[Tensor, ...]
    fresh: Tensor
    kept: Tensor
    names: tuple[str, ...] = NAMES
    rates: Rates | None = None
    place: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        stages: Sequence[str],
        features: Sequence[Tensor],
        labels: Tensor,
        tokens: Tensor,
        kept: Tensor,
        *,
        seed: int,
    ) -> Predictor:
        """Train on n items that every one of the L stages has answered: for each stage features [n, F]; labels [n, L],
        whether its answer is acceptable, in [0, 1]; tokens [n, L], the length of its answer; kept [n, L], those taken
        over from the stage before (column 0 zeros). Five networks are trained on four fifths of the items each, and
        calibrated on the rest. Raises `Unsupported` for shapes and values that do not fit.
        """
        _check_training(stages, features, labels, tokens, kept)
        kept, fresh = kept.float(), (tokens - kept).float()
        generator = torch.Generator().manual_seed(seed)
        folds = torch.empty(len(labels), dtype=torch.long, device="cpu")
        order = torch.randperm(len(labels), generator=generator, device="cpu")
        folds[order] = torch.arange(len(labels), device="cpu") % FOLDS
        heads, outlooks, points = [], [], []
        for stage, given in enumerate(features):
            logs = fresh[:, stage + 1 :].clamp(min=1).log()
            with _one_thread():
                head, held_out = train(given.float(), labels[:, stage:].float(), logs, folds, generator)
            heads.append(head)
            points.append(held_out)
            given_by = zip(held_out.T, labels[:, stage:].T, strict=False)
            outlooks.append(tuple(_outlook(logits, wanted, folds) for logits, wanted in given_by))
        return cls(tuple(stages), tuple(heads), tuple(outlooks), tuple(points), fresh, kept)

    def score(self, stage: int, features: Tensor, risk: float | None = None) -> Scores:
        """features [F] fp32 of the answer of `stage` -> `Scores`, whose qualities are the posterior's mean or lower
        quantile `risk`."""
        return self._scores(stage, self.heads[stage](features), risk)

    def table(self, risk: float | None = None) -> QualityTable:
        """The training items for `fastspec.cascade.decisions.Solver`, under the `risk` of its scores."""
        quality = (
            _doubles([self._scores(stage, point, risk).quality for point in points.tolist()])
            for stage, points in enumerate(self.points)
        )
        return QualityTable(tuple(quality), self.points, self.fresh, self.kept)

    def _scores(self, stage: int, point: list[float], risk: float | None) -> Scores:
        pairs = zip(self.outlooks[stage], point, strict=False)  # after the logits come the logs of lengths
        return Scores(tuple(outlook(logit, risk) for outlook, logit in pairs), tuple(point))

    def check(self, stages: Sequence[str]) -> None:
        """Raise `CheckpointError` for a predictor of other stages, by name and order, or of other features."""
        if self.stages != tuple(stages):
            own, given = (f"{len(each)} stages ({', '.join(each)})" for each in (self.stages, stages))
            raise CheckpointError(
                f"the predictor was trained for {own}, and the cascade has {given}; train one for these with "
                "`fastspec cascade train`, or name the stages as it has them"
            )
        if self.names != NAMES:
            other = sorted(set(self.names) ^ set(NAMES)) or ["another order"]
            raise CheckpointError(f"the predictor was trained on other features ({', '.join(other)}); train it anew")

    def save(self, path: str | Path) -> None:
        """Write one safetensors file. Raises `CheckpointError` when it cannot be written."""
        tensors = {"fresh": self.fresh, "kept": self.kept}
        for k, head in enumerate(self.heads):
            tensors |= {f"{k}.{each.name}": getattr(head, each.name) for each in fields(Head)}
            tensors[f"{k}.points"] = self.points[k]
            for m, outlook in enumerate(self.outlooks[k], k):
                calibrator, posterior = outlook.calibrator, outlook.posterior
                numbers = {
                    "temperature": (calibrator.temperature,),
                    "knots": calibrator.knots,
                    "values": calibrator.values,
                    "edges": posterior.edges,
                    "prior": (posterior.a, posterior.b),
                }
                tensors |= {f"{k}.{m}.{name}": _doubles(each) for name, each in numbers.items()}
                tensors[f"{k}.{m}.counts"] = torch.tensor(posterior.counts, device="cpu")
        if self.rates is not None:
            tensors["rates"] = _doubles([getattr(self.rates, each.name) for each in fields(Rates)])
        texts = {"stages": self.stages, "features": self.names, "place": dict(self.place)}
        header = {"format": FORMAT, "version": VERSION, **{name: json.dumps(text) for name, text in texts.items()}}
        try:
            save_file({name: each.contiguous() for name, each in tensors.items()}, str(path), metadata=header)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: the predictor could not be written: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Predictor:
        """Read a file of `save`. Raises `CheckpointError` for one that is missing, damaged, foreign or newer."""
        try:
            with safe_open(str(path), framework="pt") as file:
                header = file.metadata() or {}
                if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
                    found = f"format {header.get('format')!r}, version {header.get('version')!r}"
                    raise Unsupported(f"{found}; expected {FORMAT!r}, version {VERSION!r}")
                # Copies: a file's tensors lie at odd addresses, where torch may add in another order.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            stages, names = (tuple(map(str, parse_json(header[key]))) for key in ("stages", "features"))
            place = {str(name): str(value) for name, value in parse_json(header["place"]).items()}
            return replace(_read(stages, names, tensors), place=place)
        except (OSError, SafetensorError, Unsupported, KeyError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: no readable predictor of a cascade: {error}") from error


def train(x: Tensor, labels: Tensor, logs: Tensor, folds: Tensor, generator: torch.Generator) -> tuple[Head, Tensor]:
    """One network for each fold, trained on the others: cross entropy of labels, squared error of standardised logs.

    x [n, F], labels [n, M] in [0, 1], logs [n, M - 1], folds [n] int64. All networks take the number of steps that is
    best on all held-out items together -> (their mean as one `Head`, held-out outputs [n, 2 M - 1] fp32).
    """
    with torch.inference_mode(False), torch.enable_grad():
        mean, deviation = x.mean(0), x.std(0, correction=0)
        scale = torch.where(deviation > 1e-6, deviation, 1.0)
        inputs = ((x - mean) / scale).clamp(-CLAMP, CLAMP)
        centre = logs.mean(0)
        spread = (logs - centre).square().mean(0).sqrt().clamp(min=1e-3)
        wanted = (logs - centre) / spread
        items, goods, networks = torch.arange(len(x), device="cpu"), labels.shape[1], int(folds.max()) + 1
        held = torch.nn.functional.one_hot(folds, networks).T.float()
        seen = (1 - held) / (1 - held).sum(1, keepdim=True)
        bias = torch.cat((labels.mean(0).clamp(0.01, 0.99).logit(), torch.zeros(goods - 1, device="cpu")))
        weights = _initial(networks, inputs.shape[1], bias, generator)
        optimiser = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=DECAY)
        best, best_step, kept, outputs = math.inf, 0, weights, torch.empty(0, device="cpu")
        for step in range(STEPS):
            w1, b1, w2, b2 = weights
            out = torch.baddbmm(b2, torch.baddbmm(b1, inputs.expand(networks, -1, -1), w1).relu(), w2)
            logits = out[..., :goods]
            entropy = torch.nn.functional.softplus(logits) - labels * logits
            losses = entropy.sum(-1) + LENGTHS * (out[..., goods:] - wanted).square().sum(-1)
            loss = float((losses.detach() * held).sum())
            if loss < best:
                best, best_step = loss, step
                kept, outputs = [each.detach().clone() for each in weights], out.detach()[folds, items]
            if step - best_step >= PATIENCE:
                break
            optimiser.zero_grad()
            (losses * seen).sum().backward()
            optimiser.step()
    unit = torch.cat((torch.ones(goods, device="cpu"), spread))
    zero = torch.cat((torch.zeros(goods, device="cpu"), centre))
    w1, b1, w2, b2 = kept
    w1, w2 = w1.transpose(1, 2).flatten(0, 1), (w2 / networks).flatten(0, 1).T * unit[:, None]
    w1, w2 = (each.clone(memory_format=torch.contiguous_format) for each in (w1, w2))
    head = Head(mean, scale, w1, b1.flatten(), w2, b2.mean(0)[0] * unit + zero)
    return head, outputs * unit + zero


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread, on whose number the order of a sum must not depend."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _initial(networks: int, size: int, bias: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Weights of K networks at the start: w1 [K, F, H], b1 [K, 1, H], w2 [K, H, O], b2 [K, 1, O]."""
    w1 = torch.randn(networks, size, HIDDEN, generator=generator, device="cpu") * math.sqrt(2 / size)
    w2 = torch.randn(networks, HIDDEN, len(bias), generator=generator, device="cpu") * math.sqrt(0.01 / HIDDEN)
    weights = [w1, torch.zeros(networks, 1, HIDDEN, device="cpu"), w2, bias.repeat(networks, 1, 1)]
    return [each.requires_grad_() for each in weights]


def _outlook(logits: Tensor, labels: Tensor, folds: Tensor) -> CalibratedProbability:
    z, y = logits.tolist(), labels.tolist()
    calibrator = Calibrator.fit(z, y, folds.tolist())
    return CalibratedProbability(calibrator, Posterior.fit([calibrator(each) for each in z], y))


def _check_training(
    stages: Sequence[str], features: Sequence[Tensor], labels: Tensor, tokens: Tensor, kept: Tensor
) -> None:
    wide = len(stages)
    if isinstance(stages, str) or wide < 2 or len(features) != wide or labels.dim() != 2:
        shapes = f"{len(features)} features and labels {tuple(labels.shape)} for stages {stages!r}"
        raise Unsupported(f"fit: {shapes}; at least two are needed")
    items = len(labels)
    if items < LEAST_ITEMS:
        needed = f"at least {LEAST_ITEMS} are needed, and some hundreds for a useful predictor"
        raise Unsupported(f"fit: {items} training items; {needed}")
    for name, given in (("labels", labels), ("tokens", tokens), ("kept", kept)):
        if given.shape != (items, wide):
            raise Unsupported(f"fit: {name} {tuple(given.shape)} must be [{items}, {wide}], a column for each stage")
    for stage, given in enumerate(features):
        if given.shape != (items, len(NAMES)) or not bool(torch.isfinite(given).all()):
            raise Unsupported(
                f"fit: the features of stage {stage}, {tuple(given.shape)}, must be [{items}, {len(NAMES)}] and finite"
            )
    if not bool(((labels >= 0) & (labels <= 1)).all()):
        raise Unsupported("fit: labels must lie in [0, 1]: 1 where the stage's answer is acceptable")
    if not bool(((kept >= 0) & (kept <= tokens)).all()) or bool(kept[:, 0].any()):
        raise Unsupported("fit: kept must lie between 0 and tokens, and be 0 at stage 0, which takes over no answer")


def _read(stages: tuple[str, ...], names: tuple[str, ...], tensors: dict[str, Tensor]) -> Predictor:
    """The predictor of a file's tensors. Raises KeyError or Unsupported for what does not fit together."""
    bad = [name for name, each in tensors.items() if each.is_floating_point() and not bool(torch.isfinite(each).all())]
    if bad:
        raise Unsupported(f"{', '.join(bad)}: not finite")
    if len(tensors["fresh"]) < LEAST_ITEMS:
        raise Unsupported(f"fresh has {len(tensors['fresh'])} training items; at least {LEAST_ITEMS} are needed")
    heads, outlooks, points = [], [], []
    for k in range(len(stages)):
        head = Head(*(tensors[f"{k}.{each.name}"] for each in fields(Head)))
        width, hidden = 2 * (len(stages) - k) - 1, len(head.b1)
        shapes = [(len(names),), (len(names),), (hidden, len(names)), (hidden,), (width, hidden), (width,)]
        for each, shape in zip(fields(Head), shapes, strict=True):
            _expect(tensors, f"{k}.{each.name}", shape)
        heads.append(head)
        points.append(_expect(tensors, f"{k}.points", (len(tensors["fresh"]), width)))
        outlooks.append(tuple(_read_outlook(f"{k}.{m}.", tensors) for m in range(k, len(stages))))
    fresh, kept = (_expect(tensors, name, (len(tensors["fresh"]), len(stages))) for name in ("fresh", "kept"))
    rates = None
    if "rates" in tensors:
        columns = _expect(tensors, "rates", (len(fields(Rates)), len(stages)), torch.float64).tolist()
        rates = Rates(*(tuple(column) for column in columns))
    return Predictor(stages, tuple(heads), tuple(outlooks), tuple(points), fresh, kept, names, rates)


def _read_outlook(where: str, tensors: dict[str, Tensor]) -> CalibratedProbability:
    counts, ends = tensors[where + "counts"], len(tensors[where + "knots"])
    sizes = {"temperature": 1, "prior": 2, "edges": len(counts) - 1, "knots": ends, "values": ends}
    temperature, prior, edges, knots, values = (
        tuple(_expect(tensors, where + name, (size,), torch.float64).tolist()) for name, size in sizes.items()
    )
    ascending = all(list(each) == sorted(each) for each in (edges, knots, values))
    if not ascending or counts.dtype != torch.long or int(counts.min()) < 0 or temperature[0] <= 0 or min(prior) <= 0:
        raise Unsupported(f"{where}: a calibration that falls, or a count, temperature or prior out of range")
    posterior = Posterior(edges, tuple(counts.tolist()), *prior)
    return CalibratedProbability(Calibrator(temperature[0], knots, values), posterior)


def _doubles(numbers: Sequence[Any]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _expect(
    tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    given = tensors[name]
    if given.shape != shape or given.dtype != dtype:
        raise Unsupported(f"{name} is {given.dtype} {tuple(given.shape)}; expected {dtype} {shape}")
    return given
