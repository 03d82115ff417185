"""Configuration of a cascade: frozen, checked when made, free of torch; the same from YAML."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from fastspec.config import Assistant, ContinuousBatch
from fastspec.errors import Unsupported, accepted, check_whole, meant
from fastspec.files import read_yaml

MODES = ("adaptive", "token", "lossless")
RULES = ("chow", "diff", "opt", "token_v1", "token_v2", "token_v3")
EVERY = (float("-inf"), float("inf"))
RANGES = {"chow": (0, 1), "diff": (-1, 1), "opt": EVERY, "token_v1": (-1, 1), "token_v2": (-1, 1), "token_v3": (0, 1)}
"""Rule -> the values of alpha from the large model alone to the small one alone (Narasimhan et al., arXiv
2405.19261)."""
QUANTIZATIONS = (None, "4bit", "8bit")
DTYPES = ("auto", "float32", "bfloat16", "float16")
SETTINGS = "backend", "exact", "stored", "head_bits"
RESOURCES = ("eagle", "eagle2", "eagle3", "mtp", "speculative", *SETTINGS)
"""Names in a stage's `resources`: arguments of `fastspec.patch`."""
HINTS = {
    "lambda": "a cascade's `price`, what a bad answer costs in milliseconds, is the trade-off that papers call lambda",
    "head": "a stage's head is named by `resources: {eagle3: HEAD}`, beside `assistant: eagle3`",
}
"""Keys that people write and files do not have -> what to write."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the smaller models of a cascade.

    `model` is a transformers model, or a path or hub id that is loaded when a request first reaches the stage, with
    `dtype`, `device_map` (accelerate's) and `quantization` ("4bit" or "8bit", by bitsandbytes). `tokenizer`, or a path
    or hub id of one, is needed where it is not the large model's own; text is then handed from stage to stage, and
    `prompt` may rewrite the large model's prompt, as text. The stage decodes with `assistant`, for which `resources` go
    to `fastspec.patch`: {"eagle3": head, "stored": True}. `name` is for reports and predictors.

    `tensor_parallel` says over how many processes the stage is cut: all that hold the large model together, which load
    a path or hub id at the patch; or 1, which the first of them alone loads and runs. None: a loaded model as it is,
    another as by 1. Raises `Unsupported` for fields that do not fit together.
    """

    model: Any = None
    tokenizer: Any = None
    name: str | None = None
    assistant: Assistant = "nasd"
    resources: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dtype: str = "auto"
    device_map: Any = field(default=None, hash=False)
    quantization: str | None = None
    prompt: Callable[[str], str] | None = None
    tensor_parallel: int | None = None

    def __post_init__(self) -> None:
        named = isinstance(self.model, (str, Path))
        if not self.model if named else not hasattr(self.model, "config"):
            raise Unsupported(f"Stage: model={self.model!r} must be a transformers model, a path or a hub id")
        _check_shared(self, "Stage", self.name)
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        _check_choices(self, dtype=DTYPES, quantization=QUANTIZATIONS)
        if not isinstance(self.resources, Mapping) or not set(self.resources) <= set(RESOURCES):
            raise Unsupported(
                f"Stage: resources={self.resources!r} must be what fastspec.patch takes, by name, such as "
                f"{{'eagle3': head}}; accepted names are {', '.join(RESOURCES)}"
            )
        if self.prompt is not None and not callable(self.prompt):
            raise Unsupported(f"Stage: prompt={self.prompt!r} must be a function from text to text")
        placed = self.quantization or self.device_map is not None
        if not named and placed:
            raise Unsupported("Stage: quantization and device_map say how a model is loaded; this one is already")
        cut = self.tensor_parallel
        if cut is not None and (not isinstance(cut, int) or isinstance(cut, bool) or cut < 1):
            raise Unsupported(f"Stage: tensor_parallel must be a number of processes of at least 1, not {cut!r}")
        if self.is_cut and placed:
            raise Unsupported(
                f"Stage: tensor_parallel={cut} cuts the model over processes, and quantization and device_map lay it "
                "in one: leave them out, or load it whole (tensor_parallel=1)"
            )

    @property
    def is_cut(self) -> bool:
        return self.tensor_parallel is not None and self.tensor_parallel > 1

    def check_processes(self, size: int) -> None:
        """Raise `Unsupported` for a stage that is to be cut over other processes than the `size` of the large model:
        transformers cuts a model over all that there are."""
        if self.is_cut and self.tensor_parallel != size:
            told = f"{size} processes hold the large model together: give 1, whole in the first of them, or {size}"
            if size == 1:
                told = "one process holds the large model: start several by torchrun, which cuts both, or give 1"
            given = f"the cascade's stage {self.label!r} has tensor_parallel={self.tensor_parallel}"
            raise Unsupported(f"{given}, and {told}")

    @property
    def label(self) -> str:
        if self.name or isinstance(self.model, (str, Path)):
            return self.name or str(self.model)
        config = getattr(self.model, "config", None)
        return getattr(config, "_name_or_path", "") or type(self.model).__name__


@dataclass(frozen=True, slots=True)
class Cascade:
    """Several models, and no more of them than an input needs: `fastspec.patch(large, cascade=Cascade(stages=[small,
    medium]))`.

    `stages` are the models below the patched one, the cheapest first: models, paths, hub ids or `Stage`s.

    - mode="adaptive": stage 0 answers; where the answer's expected loss, `price` times the probability that it is bad,
      exceeds what going on is expected to cost, the next stage verifies it and goes on from the part that it would have
      written too. What stage k answers is what stage k alone would have answered. `predictor` (a path or a
      `fastspec.cascade.predictor.Predictor`) gives the probabilities; `costs` are the stages' milliseconds per token,
      the large model's last (None: measured on this machine), and `price`, the cost of a bad answer, is in
      milliseconds. `thresholds`, one per stage below the last, replace the expected costs: a stage answers where its
      probability reaches its threshold. `risk` takes that lower quantile of the probability's posterior in place of its
      mean.
    - mode="token": the small model's tokens are accepted by a deferral `rule` ("chow", "diff", "opt", "token_v1",
      "token_v2", "token_v3") with its trade-off `alpha`; every token follows the rule's mixed distribution.
      alpha="lossless" is the large model's own distribution.
    - mode="lossless": each stage drafts for the next, and the output is the large model's.

    `gamma` is the number of tokens drafted a round in the last two. `assistant` is what the large model decodes with in
    adaptive mode, `label` its name in reports and predictors, `tokenizer` its tokenizer, or a path or hub id of one,
    needed where a stage has another. `memory` bounds the bytes of keys and values that are kept between calls (None
    keeps none), `host_memory` those moved to the CPU's memory. With `explain` every request's decisions are printed.

    Raises `Unsupported` for what does not fit together.
    """

    name: ClassVar[str] = "cascade"
    stages: Sequence[Any] = ()
    mode: str = "adaptive"
    tokenizer: Any = None
    label: str | None = None
    assistant: Assistant = "nasd"
    predictor: Any = None
    price: float = 1000.0
    costs: Sequence[float] | None = None
    thresholds: Sequence[float] | None = None
    risk: float | None = None
    rule: str = "token_v3"
    alpha: float | str = "lossless"
    gamma: int = 5
    memory: int | None = None
    host_memory: int = 0
    explain: bool = False

    def __post_init__(self) -> None:
        stages = self.stages
        if isinstance(stages, (str, bytes)) or not isinstance(stages, Sequence) or not stages:
            raise Unsupported(f"Cascade: stages={stages!r} must list the models below the patched one, cheapest first")
        object.__setattr__(self, "stages", tuple(each if isinstance(each, Stage) else Stage(each) for each in stages))
        _check_shared(self, "Cascade", self.label)
        for name in ("costs", "thresholds"):
            values = getattr(self, name)
            if values is not None:
                if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
                    raise Unsupported(f"Cascade: {name}={values!r} must be a list of numbers")
                object.__setattr__(self, name, tuple(_number(name, value) for value in values))
        _check_choices(self, mode=MODES, rule=RULES)
        self._check_decisions()
        self._check_rule()
        check_whole("Cascade", 1, gamma=self.gamma, memory=1 if self.memory is None else self.memory)
        check_whole("Cascade", 0, host_memory=self.host_memory)
        if self.gamma > 255:
            raise Unsupported(f"Cascade: gamma must be at most 255, not {self.gamma}")
        if not isinstance(self.explain, bool):
            raise Unsupported(f"Cascade: explain must be true or false, not {self.explain!r}")

    def _check_decisions(self) -> None:
        object.__setattr__(self, "price", _number("price", self.price))
        costs, thresholds, below, given = self.costs, self.thresholds, len(self.stages), self.predictor
        if not 0 <= self.price < math.inf:
            told = f"price={self.price} must be finite and not negative: what a bad answer costs, in milliseconds"
        elif costs is not None and (len(costs) != below + 1 or not all(0 < each < math.inf for each in costs)):
            told = f"costs={costs} must be {below + 1} positive numbers: milliseconds a token, the large model's last"
        elif thresholds is not None and (len(thresholds) != below or not all(0 <= each <= 1 for each in thresholds)):
            told = f"thresholds={thresholds} must be {below} probabilities, one for every stage below the last"
        elif self.risk is not None and not 0 < _number("risk", self.risk) < 1:
            told = f"risk={self.risk} must lie between 0 and 1: the quantile of the posterior to take"
        elif self.mode == "adaptive" and given is None:
            told = "mode='adaptive' needs a predictor: `fastspec cascade train` makes one"
        elif given is not None and not isinstance(given, (str, Path)) and not hasattr(given, "score"):
            told = f"predictor={given!r} must be a path or a fastspec.cascade.predictor.Predictor"
        else:
            return
        raise Unsupported(f"Cascade: {told}")

    def _check_rule(self) -> None:
        low, high = RANGES[self.rule]
        if isinstance(self.alpha, str):
            if self.alpha != "lossless":
                raise Unsupported(f'Cascade: alpha={self.alpha!r}; accepted are a number and "lossless"')
        elif not low <= _number("alpha", self.alpha) <= high:
            raise Unsupported(f"Cascade: alpha={self.alpha} of the rule {self.rule!r} must lie in {[low, high]}")
        if self.mode == "token" and len(self.stages) != 1:
            raise Unsupported(f"Cascade: mode='token' mixes two models: give one stage, not {len(self.stages)}")

    @classmethod
    def from_yaml(cls, path: str | Path) -> Cascade:
        """Read a cascade from a YAML file whose keys are the fields of `Cascade`, and under `stages` those of `Stage`;
        relative paths start at the working directory. Raises `Unsupported` for other files, keys and values."""
        keys = _keys(read_yaml(path), cls, str(path))
        stages = keys.get("stages")
        try:
            if isinstance(stages, list):
                keys["stages"] = [
                    Stage(**_keys(each, Stage, f"stage {index}")) if isinstance(each, dict) else each
                    for index, each in enumerate(stages)
                ]
            return cls(**keys)
        except Unsupported as error:
            raise Unsupported(f"{path}: {error}") from error

    def to_yaml(self, path: str | Path) -> None:
        """Write the fields that differ from their defaults to a YAML file, for `from_yaml`. Raises `Unsupported`, and
        writes nothing, for a field that no file can hold, such as a loaded model (name its path or hub id instead)."""
        import yaml

        stages = [_differing(stage, f"stage {at}") for at, stage in enumerate(self.stages)]
        held = _differing(self, "Cascade") | {"stages": stages}
        Path(path).write_text(yaml.safe_dump(held, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _differing(given: Any, where: str) -> dict[str, Any]:
    """The fields of a stage or a cascade that differ from their defaults, as plain data, without stages."""
    defaults = {
        each.name: each.default_factory() if callable(each.default_factory) else each.default for each in fields(given)
    }
    held = {name: getattr(given, name) for name in defaults if name != "stages"}
    return {name: _plain(value, f"{where}: {name}") for name, value in held.items() if value != defaults[name]}


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each, f"{where}: {key}") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each, where) for each in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise Unsupported(
        f"{where} holds a {type(value).__name__}, which no YAML file can: name it by its path, hub id or name, and "
        "load that"
    )


def _check_choices(given: Any, **choices: Sequence[Any]) -> None:
    for name, known in choices.items():
        value = getattr(given, name)
        if value not in known:
            rest = accepted(repr(value), map(repr, known))
            raise Unsupported(f"{type(given).__name__}: {name}={value!r}; {rest}")


def _check_shared(given: Any, kind: str, name: Any) -> None:
    if name is not None and not isinstance(name, str):
        raise Unsupported(f"{kind}: the name {name!r} must be text")
    tokenizer, assistant = given.tokenizer, given.assistant
    if tokenizer is not None and not isinstance(tokenizer, (str, Path)) and not hasattr(tokenizer, "decode"):
        raise Unsupported(f"{kind}: tokenizer={tokenizer!r} must be a tokenizer, or a path or hub id of one")
    if assistant == Cascade.name or isinstance(assistant, Cascade):
        told = f"{Cascade.name!r} is what this configures; a stage decodes with another, such as 'nasd'"
    elif isinstance(assistant, ContinuousBatch):
        told = f"{assistant!r} takes turns, and a stage answers all rows together: name its assistant itself"
    elif not isinstance(assistant, str) and not hasattr(assistant, "name"):
        told = f"{assistant!r} must be a name, such as 'nasd' or 'eagle3', or a config object"
    else:
        return
    raise Unsupported(f"{kind}: assistant={told}")


def _keys(read: Any, kind: Any, where: str) -> dict[str, Any]:
    known = [each.name for each in fields(kind)]
    if not isinstance(read, dict):
        raise Unsupported(f"{where} must hold keys and values; accepted keys are {', '.join(known)}")
    refuse_unknown([str(key) for key in read if key not in known], known, where)
    return dict(read)


def refuse_unknown(unknown: Sequence[str], known: Sequence[str], where: str) -> None:
    """Raise `Unsupported` where there are unknown keys in a file of a cascade or of its training."""
    if unknown:
        hints = "".join(f"; {hint}" for name, hint in HINTS.items() if name in unknown)
        rest = f"{meant(unknown[0], known)}accepted keys are {', '.join(known)}{hints}"
        raise Unsupported(f"{where}: unknown key {', '.join(unknown)}; {rest}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        hint = " (YAML reads 1e3 as text: write 1.0e+3 or 1000)" if isinstance(value, str) else ""
        raise Unsupported(f"Cascade: {name} must be a number, not {value!r}{hint}")
    try:
        return float(value)
    except OverflowError as error:
        raise Unsupported(f"Cascade: {name} is too large a number") from error
