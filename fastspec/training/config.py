"""What a training run is told. Plain types only, so that a command line or a JSON file can fill it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run that trains an EAGLE-3 head.

    `target` is a folder, a hub id or a .gguf file; `prompts` a jsonl file (`prompt` or `turns` in each row). `answers` are npz files of
    the target's own answers (`ids`, `lengths`, `tokens`), or of whole texts as `Texts.save` writes them; empty means that the target
    answers the prompts first. `heldout` is a jsonl file of prompts, or an npz of texts, for validation; empty holds 1 % of the texts
    back. The run ends after `epochs` or after `minutes` of training, whichever comes first (0 means no such bound), and the learning
    rate falls along a cosine over it. `hidden_size`, `intermediate_size` 0 and `taps` empty mean the target's.
    """

    target: str
    output: str
    prompts: str = ""
    answers: tuple[str, ...] = ()
    heldout: str = ""

    draft_vocab_size: int = 10240
    hidden_size: int = 0
    intermediate_size: int = 0
    taps: tuple[int, ...] = ()

    epochs: float = 10.0
    minutes: float = 0.0
    batch_tokens: int = 16384
    length_multiple: int = 64
    max_length: int = 2048
    ttt_steps: int = 7
    decay: float = 0.8
    learning_rate: float = 1e-3
    final_learning_rate: float = 0.02
    warmup_steps: int = 100
    clip: float = 0.5
    seed: int = 0
    mixed_precision: str = "bf16"
    compile: bool = False

    new_tokens: int = 512
    sampled_share: float = 0.5
    temperature: float = 0.8
    top_p: float = 0.95
    follow_ups: bool = False

    resume: bool = True
    checkpoint_every: int = 1000
    validate_every: int = 1000
    heldout_texts: int = 400
    progress: bool = True

    def __post_init__(self) -> None:
        if not self.prompts and not self.answers:
            raise ValueError("give `prompts` (a jsonl file), or `answers` (npz files of whole texts), to train on")
        for name in ("draft_vocab_size", "batch_tokens", "length_multiple", "max_length", "ttt_steps", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"TrainConfig.{name} is {getattr(self, name)}; it must be at least 1")
        if self.epochs <= 0 and self.minutes <= 0:
            raise ValueError("set `epochs` or `minutes` above 0: one of them ends the run")
        if self.mixed_precision not in ("no", "bf16", "fp16"):
            raise ValueError(f'TrainConfig.mixed_precision is {self.mixed_precision!r}; accepted are "no", "bf16" and "fp16"')
        if not 0 <= self.sampled_share <= 1:
            raise ValueError(f"TrainConfig.sampled_share is {self.sampled_share}; it must lie between 0 and 1")
