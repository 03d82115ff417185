"""Training an EAGLE head for any causal language model that transformers loads.

from fastspec.training import TrainConfig, train
train(TrainConfig(target="org/model", prompts="prompts.jsonl", output="head/"))
"""

from fastspec.training.config import TrainConfig
from fastspec.training.entry import train

__all__ = ["TrainConfig", "train"]
