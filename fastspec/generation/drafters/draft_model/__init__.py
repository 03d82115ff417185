"""Draft models: chains of one, of several in stages, of one with another tokenizer, and mixtures of its distribution and the target's."""
