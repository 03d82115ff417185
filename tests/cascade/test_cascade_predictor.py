"""A predictor's file, its determinism, and what it is worth."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastspec.cascade.calibration import (
    expected_calibration_error,
)
from fastspec.cascade.decisions import Rates, Solver
from fastspec.cascade.predictor import Predictor, train
from fastspec.cascade.records import NAMES, features
from fastspec.errors import CheckpointError, Unsupported

STAGES = ("small", "medium", "large")


def drawn_items(count: int, seed: int, stages: int = len(STAGES)):
    """Items that are right the more often, the larger the stage, the easier the item, and the surer the stage's tokens
    look."""
    g = torch.Generator().manual_seed(seed)
    hard, lengths = torch.randn(count, generator=g), torch.randint(6, 60, (count,), generator=g)
    given, labels, kept = [], [], []
    for k in range(stages):
        right = (torch.rand(count, generator=g) < torch.sigmoid(2 * (1.2 * k - 0.2 - hard))).float()
        sure = 1.2 * k - hard + 0.7 * torch.randn(count, generator=g) + 0.8 * right
        rows = []
        for i in range(count):
            noise = torch.randn(2, int(lengths[i]), generator=g)
            chances = -torch.nn.functional.softplus(-sure[i] - 1 + noise[0])
            measures = torch.stack((chances, torch.nn.functional.softplus(sure[i] + noise[1]), -1.3 * chances), 1)
            rows.append(
                features(measures, range(len(chances)), prompt_tokens=30, limit=80, ended=True, stage=k, stages=stages)
            )
        given.append(torch.stack(rows))
        labels.append(right)
        kept.append((lengths * torch.rand(count, generator=g) * 0.6).floor() * (k > 0))
    return given, torch.stack(labels, 1), (lengths[:, None] * torch.arange(1, stages + 1)).float(), torch.stack(kept, 1)


@pytest.fixture(scope="module")
def fitted():
    return Predictor.fit(STAGES, *drawn_items(700, 1), seed=3)


def same(one: Predictor, other: Predictor) -> bool:
    def tensors(predictor):
        heads = [getattr(head, name) for head in predictor.heads for name in ("mean", "scale", "w1", "b1", "w2", "b2")]
        return [*heads, *predictor.points, predictor.fresh, predictor.kept]

    plain = all(getattr(one, name) == getattr(other, name) for name in ("stages", "names", "outlooks"))
    return plain and all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


@pytest.fixture
def few_steps(monkeypatch):
    """Where it does not matter how good a predictor becomes."""
    monkeypatch.setattr("fastspec.cascade.predictor.STEPS", 40)


def test_the_seed_alone_decides(fitted, few_steps):
    state, items, threads = torch.get_rng_state(), drawn_items(60, 1), torch.get_num_threads()
    torch.manual_seed(1)
    one = Predictor.fit(STAGES, *items, seed=3)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    with torch.inference_mode():
        again = Predictor.fit(STAGES, *items, seed=3)
    assert same(one, again) and torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads
    assert not same(one, Predictor.fit(STAGES, *items, seed=4)) and not same(one, fitted)
    torch.set_rng_state(state)


def test_no_item_s_own_label_reaches_its_output(monkeypatch):
    monkeypatch.setattr("fastspec.cascade.predictor.STEPS", 9)  # few enough that the last is the best in both runs
    given, labels, tokens, _ = drawn_items(100, 1)
    folds = torch.arange(100) % 5
    mine = [i for i in range(100) if folds[i] == 2]
    one, other = (next(i for i in mine if labels[i, 0] == value) for value in (0, 1))
    swapped = labels.clone()  # two labels of one fold change places, so that the rates stay
    swapped[[one, other]] = labels[[other, one]]
    logs = tokens[:, 1:].log()
    outputs = [train(given[0], each, logs, folds, torch.Generator().manual_seed(0))[1] for each in (labels, swapped)]
    same_rows = (outputs[0] == outputs[1]).all(1)
    assert bool(same_rows[mine].all()) and not bool(same_rows[folds != 2].any())


def test_a_file_says_what_the_stages_cost_and_where(fitted, tmp_path):
    path, rates = tmp_path / "predictor.safetensors", Rates((1.0, 2.5, 4.0), (0.0, 0.25, 0.5), (3.0, 2.0, 1.0))
    replace(fitted, rates=rates, place={"device": "a GPU"}).save(path)
    held = Predictor.load(path)
    assert held.rates == rates and held.place == {"device": "a GPU"}
    fitted.save(path)
    assert Predictor.load(path).rates is None


def test_a_file_gives_back_the_predictor(fitted, tmp_path):
    path = tmp_path / "predictor.safetensors"
    fitted.save(path)
    read = Predictor.load(path)
    assert same(fitted, read)
    vector = drawn_items(1, 5)[0]
    for risk in (None, 0.1):
        assert all(read.score(k, vector[k][0], risk) == fitted.score(k, vector[k][0], risk) for k in range(3))
    read.check(STAGES)
    for stages in (STAGES[:2], STAGES[::-1], (*STAGES, "huge")):
        with pytest.raises(
            CheckpointError, match=rf"trained for 3 stages \(small, medium, large\), and the cascade has {len(stages)} "
        ):
            read.check(stages)


def test_other_features_are_refused(fitted, tmp_path):
    path = tmp_path / "predictor.safetensors"
    other = replace(fitted, names=("mood", *NAMES[1:]))
    other.save(path)
    with pytest.raises(CheckpointError, match=r"other features .*mood"):
        Predictor.load(path).check(STAGES)


def spoil(tensors, header, how):
    names = {
        "shape": "0.w1",
        "missing": "1.points",
        "nan": "2.b2",
        "dtype": "fresh",
        "falling": "0.0.edges",
        "count": "1.2.counts",
    }
    first = names.get(how)
    if how == "shape":
        tensors[first] = tensors[first][:, :-1].contiguous()
    elif how == "missing":
        del tensors[first]
    elif how == "nan":
        tensors[first][0] = math.nan
    elif how == "dtype":
        tensors[first] = tensors[first].double()
    elif how == "falling":
        tensors[first] = tensors[first].flip(0).contiguous()
    elif how == "count":
        tensors[first][0] = -1
    elif how == "one item":
        rows = [name for name in tensors if name in ("fresh", "kept") or name.endswith("points")]
        tensors.update({name: tensors[name][:1].contiguous() for name in rows})
    elif how == "version":
        header["version"] = "2"
    elif how == "stages":
        header["stages"] = '["a", "b"'
    elif how == "fewer stages":
        header["stages"] = '["a", "b"]'


@pytest.mark.parametrize(
    "how", ["shape", "missing", "nan", "dtype", "falling", "count", "one item", "version", "stages", "fewer stages"]
)
def test_a_spoilt_file_is_refused(fitted, tmp_path, how):
    from safetensors import safe_open

    path = tmp_path / "predictor.safetensors"
    fitted.save(path)
    with safe_open(str(path), framework="pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    spoil(tensors, header, how)
    save_file(tensors, path, metadata=header)
    with pytest.raises(CheckpointError, match=r"predictor\.safetensors: no readable predictor"):
        Predictor.load(path)


def test_foreign_cut_and_missing_files_are_refused(fitted, tmp_path):
    whole, foreign, cut = tmp_path / "whole", tmp_path / "foreign", tmp_path / "cut"
    fitted.save(whole)
    save_file({"weight": torch.zeros(3)}, foreign)
    cut.write_bytes(whole.read_bytes()[:-100])
    for path in (foreign, cut, tmp_path / "none"):
        with pytest.raises(CheckpointError, match="no readable predictor"):
            Predictor.load(path)
    with pytest.raises(CheckpointError, match="could not be written"):
        fitted.save(tmp_path / "no folder" / "file")


@pytest.mark.parametrize("change", ["stages", "features", "labels", "tokens", "kept", "first", "items", "nan", "half"])
def test_training_data_that_do_not_fit_are_refused(change):
    given, labels, tokens, kept = drawn_items(24, 0)
    stages = STAGES
    if change == "stages":
        stages = STAGES[:2]
    elif change == "features":
        given[1] = given[1][:, 1:]
    elif change == "labels":
        labels = labels + 0.5
    elif change == "tokens":
        tokens = tokens[:, :2]
    elif change == "kept":
        kept = kept + 1000 * (torch.arange(3) == 1)
    elif change == "first":
        kept = kept + (torch.arange(3) == 0)
    elif change == "items":
        given, labels, tokens, kept = [each[:9] for each in given], labels[:9], tokens[:9], kept[:9]
    elif change == "nan":
        given[2][3, 1] = math.nan
    elif change == "half":
        labels[4, 1] = math.nan
    with pytest.raises(Unsupported, match="fit: "):
        Predictor.fit(stages, given, labels, tokens, kept, seed=0)


@pytest.mark.some("1.0")
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_labels_that_never_differ_give_probabilities_inside(rate):
    given, labels, tokens, kept = drawn_items(40, 0)
    predictor = Predictor.fit(STAGES, given, torch.full_like(labels, rate), tokens, kept, seed=0)
    quality = predictor.score(0, given[0][0]).quality
    assert all(0 < each < 1 and abs(each - rate) < 0.3 for each in quality)


def test_risk_lowers_every_quality_and_the_table_agrees(fitted):
    given = drawn_items(20, 9)[0]
    for k in range(3):
        for vector in given[k]:
            mean, low, lower = (fitted.score(k, vector, risk) for risk in (None, 0.2, 0.05))
            assert all(c < b < a for a, b, c in zip(mean.quality, low.quality, lower.quality, strict=True))
            assert mean.point == low.point and len(mean.point) == 5 - 2 * k
    plain, careful = fitted.table(), fitted.table(risk=0.1)
    assert all(bool((b < a).all()) for a, b in zip(plain.quality, careful.quality, strict=True))


def test_on_items_not_trained_on_it_is_calibrated_and_beats_random_mixing(fitted):
    given, labels, tokens, kept = drawn_items(1500, 2)
    fresh, count = tokens - kept, len(labels)
    scores = [[fitted.score(k, vector) for vector in given[k]] for k in range(3)]
    for k in range(3):
        for m in range(k, 3):
            quality = [each.quality[m - k] for each in scores[k]]
            # With 1,500 items ten exact bins would show about sqrt(2 / pi * 10 / 1500) * 0.4 = 0.03 at most by chance.
            assert expected_calibration_error(quality, labels[:, m]) <= 0.05
        for m in range(k + 1, 3):
            logs = sum(each.point[3 - k + m - k - 1] for each in scores[k]) / count
            assert logs == pytest.approx(float(fresh[:, m].clamp(min=1).log().mean()), abs=0.1)
    rates = Rates((1.0, 3.0, 9.0), (0.0, 0.1, 0.3), (5.0, 10.0, 30.0))
    solver, costs = Solver(fitted.table(), rates), rates.costs(fresh, kept).cumsum(1)
    items = range(count)
    ends = [(float(costs[:, k].mean()), float(labels[:, k].mean())) for k in (0, 2)]
    slope, inside, before = (ends[1][1] - ends[0][1]) / (ends[1][0] - ends[0][0]), 0, torch.zeros(count)
    for price in (0.0, 60.0, 120.0, 250.0, 500.0, 1000.0, 2000.0, 1e9):
        stages = torch.tensor([next(k for k in range(3) if solver.decide(k, scores[k][i], price).stop) for i in items])
        assert bool((stages >= before).all())
        before = stages
        cost, quality = float(costs[items, stages].mean()), float(labels[items, stages].mean())
        assert price > 0 or int(stages.max()) == 0
        if ends[0][0] + 1 < cost < ends[1][0] - 1 and 0.1 < float(stages.float().mean()) < 1.9:
            inside += 1
            assert quality > ends[0][1] + slope * (cost - ends[0][0]) + 0.02
    assert inside >= 4
