"""Training an EAGLE head for any causal language model that transformers loads.

from fastspec.programs.training import TrainConfig, train
train(TrainConfig(target="org/model", prompts="prompts.jsonl", output="head/"))
"""

from fastspec.programs.training.config import TrainConfig
from fastspec.programs.training.entry import train

__all__ = ["TrainConfig", "train"]
