"""Layers that keep a state in place of keys and values: `reference.py` says what each kernel computes."""
