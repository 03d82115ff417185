"""Assistants, from a name or a config to a decoding."""
