"""Heads that draft a block of tokens in one pass, reading the target's features as keys and values in every layer."""
