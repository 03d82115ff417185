"""What the tests of the cascade share: tiny stages, and a predictor that says what it is told to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

import fastspec
from fastspec.cascade.calibration import logit
from fastspec.cascade.decisions import Scores
from fastspec.cascade.predictor import Predictor
from fastspec.cascade.records import NAMES
from helpers.models import tiny_model

NAMED = ("small", "medium", "large")


@cache
def trained(stages: tuple[str, ...] = NAMED, items: int = 120, seed: int = 0) -> Predictor:
    """A predictor for drawn items: the larger the stage the better its answers, and the better the surer. It is frozen,
    and shared."""
    generator = torch.Generator().manual_seed(seed)
    features = [torch.randn(items, len(NAMES), generator=generator) for _ in stages]
    chance = torch.stack([torch.sigmoid(2 * each[:, 0] + 2 * stage) for stage, each in enumerate(features)], 1)
    labels = (torch.rand(chance.shape, generator=generator) < chance).float()
    tokens = torch.randint(5, 30, chance.shape, generator=generator).float()
    kept = torch.cat((torch.zeros(items, 1), tokens[:, 1:] // 3), 1)
    return Predictor.fit(stages, features, labels, tokens, kept, seed=seed)


def stages(count: int = 3, **over: Any) -> list[Any]:
    """Tiny models, the smallest first; the last is the large one."""
    depths = [1, 2, 3][-count:]
    return [tiny_model(seed=index, num_hidden_layers=depth, **over) for index, depth in enumerate(depths)]


def cascaded(models: list[Any], **options: Any) -> Any:
    """The last model, patched with the others as its stages."""
    names = NAMED[-len(models) :] if len(models) < 3 else NAMED
    settings = {"predictor": trained(names), "costs": [1.0, 2.0, 4.0][: len(models)]} | options
    below = [fastspec.Stage(model, name=name) for model, name in zip(models[:-1], names, strict=False)]
    return fastspec.patch(
        models[-1], cascade=fastspec.Cascade(stages=settings.pop("stages", below), label=names[-1], **settings)
    )


def scored(quality: tuple[float, ...], tokens: tuple[float, ...]) -> Scores:
    """Scores of a request that lies where these numbers say."""
    return Scores(quality, (*map(logit, quality), *(math.log(max(each, 1.0)) for each in tokens)))


def with_saved_stage(large: Any, folder: Path, tokenizer: Any, **options: Any) -> Any:
    """A model, patched with a smaller one that is saved in a folder and loaded as the options say; its weights come in
    whole blocks."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": len(tokenizer)}
    tiny_model(seed=1, num_hidden_layers=2, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    stage = fastspec.Stage(str(folder), name="medium", **options)
    settings: dict[str, Any] = {"predictor": trained(NAMED[1:]), "costs": [1.0, 2.0], "price": 0.0}
    return fastspec.patch(
        large, cascade=fastspec.Cascade(stages=[stage], label="large", tokenizer=tokenizer, **settings)
    )


@dataclass
class Told:
    """Replaces `Predictor.score`: takes down what it was asked and answers from a script of qualities."""

    script: list[tuple[float, ...]]
    asked: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def __call__(self, predictor: Any, stage: int, features: torch.Tensor, risk: float | None = None) -> Scores:
        self.asked.append((stage, features))
        quality = self.script[len(self.asked) - 1]
        return scored(quality, (10.0,) * (len(quality) - 1))


Distribution = list[Any]  # Fractions or floats, which sum to one


def twin(
    rule: str, alpha: Any, p: Distribution, q: Distribution, p_raw: Distribution, q_raw: Distribution
) -> Distribution:
    """The formula alone, in the arithmetic of its arguments; `alpha` is a number."""
    mine, best = max(q_raw), max(p_raw)
    if rule in ("chow", "diff", "opt"):
        further = sum(max(b - a, 0) for a, b in zip(p, q, strict=True))
        small = {"chow": mine >= 1 - alpha, "diff": mine >= best - alpha, "opt": mine >= best - alpha * further}[rule]
        return list(q if small else p)
    kept = {
        "token_v1": [each >= best - alpha for each in q_raw],
        "token_v2": [each >= best - alpha for each in p_raw],
        "token_v3": [each >= (1 - alpha) * best for each in p_raw],
    }[rule]
    left = 1 - sum(each for each, keep in zip(q, kept, strict=True) if keep)
    return [left * a + (b if keep else 0) for a, b, keep in zip(p, q, kept, strict=True)]
