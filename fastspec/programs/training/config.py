"""Settings of a training run, of plain types: a command line or a JSON file can fill them."""

from __future__ import annotations

from dataclasses import dataclass

from fastspec.errors import accepted
from fastspec.programs.training.ttt import LOSSES
from fastspec.removed import BLOCK_HEADS, BLOCK_KINDS, BLOCK_LOSSES, BLOCK_SETTINGS

ENLARGEMENTS = ("continue_cut", "second_answers", "follow_ups")
"""The fields that add texts, in the order in which they are made."""
AT_LEAST_1 = ("batch_tokens", "length_multiple", "max_length", "ttt_steps", "new_tokens", "shard_texts")
AT_LEAST_0 = (
    *("epochs", "minutes", "enlarge_minutes", "stop_after", "checkpoint_minutes"),
    *("keep_features", "keep_features_host"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run that trains a drafting head.

    `kind` is "eagle3"; "eagle" for the original format that the assistants `eagle` and `eagle2` share: such a head
    reads the target's last hidden state and drafts with the target's LM head, so its `hidden_size` and vocabulary are
    the target's and it has no `taps`; or "mtp", which reads and drafts so too: a layer of the target's own class in the
    form of Qwen's checkpoints. `start_from` (a folder, a hub id or the name of a head that ships; for "mtp" also the
    target itself, whose own layer is tuned) goes on from a head that exists, whose sizes, taps and vocabulary may be
    left out. `share_lm_head` gives an EAGLE-3 head the target's rows of the tokens that it drafts as its LM head, after
    a learned matrix: the rows are neither trained nor written, and only fastspec reads such a head. `norms` gives an
    EAGLE-3 head those of EAGLE-3.1: each of the target's features is normed by itself before they are fused, and the
    head feeds back its states after its final norm.

    `loss` is a name of `fastspec.programs.training.ttt.LOSSES`; `decay` weighs the loss of each draft against the
    one before.

    `target` is a folder, a hub id or a .gguf file; `prompts` a jsonl file (`prompt` or `turns` in each row). `answers`
    are npz files of the target's own answers (`ids`, `lengths`, `tokens`, and `greedy` where it is known), or of whole
    texts as `Texts.save` writes them; empty means that the target answers the prompts first, up to `new_tokens` each, a
    `sampled_share` of them by sampling. `heldout` is a jsonl file of prompts, or an npz of texts, for validation; empty
    holds 1 % of the texts back. `hidden_size`, `intermediate_size` 0 and `taps` empty mean the target's;
    `draft_vocab_size` 0 means 10,240 for kind "eagle3", and the target's for the others.

    Three switches enlarge the texts, whichever way they came, within `enlarge_minutes` in all (0 means no bound):
    `continue_cut` lets the target go on, by up to `new_tokens`, where an answer stops without an end token, greedily
    where the first part is known to be greedy; `second_answers` adds a greedy answer to every prompt whose answer is
    not known to be greedy; `follow_ups` appends another prompt's first turn to finished conversations, a
    `sampled_share` of them answered by sampling.

    The run ends after `epochs` or after `minutes` of training, whichever comes first (0 means no such bound), and the
    learning rate falls along a cosine over it. `stop_after` ends one call after about so many minutes, to be taken up
    by the same call; `minutes` and `enlarge_minutes` count over all calls. Texts are saved every `shard_texts`, the
    training state every `checkpoint_minutes` (0: only at the end). `keep_features` is memory of the target's device,
    in GiB, that keeps the target's features of texts from epoch to epoch (0: none), `keep_features_host` memory of the
    host for texts that have no room there. Of several processes each takes as much, for its own share of the texts.
    """

    target: str
    output: str
    prompts: str = ""
    answers: tuple[str, ...] = ()
    heldout: str = ""

    kind: str = "eagle3"
    draft_vocab_size: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    taps: tuple[int, ...] = ()
    share_lm_head: bool = False
    norms: bool = False
    loss: str = "kl"
    start_from: str = ""

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
    keep_features: float = 0.0
    keep_features_host: float = 0.0

    new_tokens: int = 512
    sampled_share: float = 0.5
    temperature: float = 0.8
    top_p: float = 0.95
    continue_cut: bool = False
    second_answers: bool = False
    follow_ups: bool = False
    enlarge_minutes: float = 0.0
    shard_texts: int = 2048

    resume: bool = True
    stop_after: float = 0.0
    checkpoint_minutes: float = 2.0
    validate_every: int = 1000
    heldout_texts: int = 400
    progress: bool = True

    def __new__(cls, **settings: object) -> TrainConfig:
        if removed := [name for name in settings if name in BLOCK_SETTINGS]:
            raise ValueError(f"TrainConfig.{removed[0]}: {BLOCK_HEADS}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if not self.prompts and not self.answers:
            raise ValueError("give `prompts` (a jsonl file), or `answers` (npz files of whole texts), to train on")
        if self.follow_ups and not self.prompts:
            raise ValueError("`follow_ups` takes its questions from the prompts: give `prompts` (a jsonl file) too")
        if self.kind in BLOCK_KINDS:
            raise ValueError(f"TrainConfig.kind is {self.kind!r}: {BLOCK_HEADS}")
        if self.loss in BLOCK_LOSSES:
            raise ValueError(f"TrainConfig.loss is {self.loss!r}: {BLOCK_HEADS}")
        self._require(
            "kind", self.kind in ("eagle3", "eagle", "mtp"), 'accepted are "eagle3", "eagle" (for eagle2 too) and "mtp"'
        )
        given = [name for name in ("taps", "hidden_size", "draft_vocab_size") if getattr(self, name)]
        if self.kind == "mtp" and self.intermediate_size:
            given.append("intermediate_size")
        if self.kind != "eagle3" and given:
            told = f'heads of kind "{self.kind}" take taps, hidden size and vocabulary from the target'
            raise ValueError(f"{told}: leave out {', '.join(given)}")
        for name in ("share_lm_head", "norms"):
            if getattr(self, name) and self.kind != "eagle3":
                raise ValueError(f'{name} belongs to kind "eagle3": leave it out with kind {self.kind!r}')
        self._require("loss", self.loss in LOSSES, accepted(self.loss, LOSSES))
        self._require("decay", self.decay > 0, "it must be above 0")
        self._require("draft_vocab_size", self.draft_vocab_size >= 0, "it must be 0 (the default size) or more")
        for name in AT_LEAST_1:
            self._require(name, getattr(self, name) >= 1, "it must be at least 1")
        for name in AT_LEAST_0:
            self._require(name, getattr(self, name) >= 0, "it must be 0 or more")
        self._require(
            "new_tokens", self.new_tokens < self.max_length, f"no room for a prompt in max_length {self.max_length}"
        )
        if self.epochs <= 0 and self.minutes <= 0:
            raise ValueError("set `epochs` or `minutes` above 0: one of them ends the run")
        self._require(
            "mixed_precision", self.mixed_precision in ("no", "bf16", "fp16"), 'accepted are "no", "bf16" and "fp16"'
        )
        self._require("sampled_share", 0 <= self.sampled_share <= 1, "it must lie between 0 and 1")

    def _require(self, name: str, fits: bool, rule: str) -> None:
        if not fits:
            raise ValueError(f"TrainConfig.{name} is {getattr(self, name)!r}; {rule}")

    @property
    def keeps_features(self) -> bool:
        return self.keep_features > 0 or self.keep_features_host > 0
