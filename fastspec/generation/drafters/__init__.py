"""Drafters: `base.py` defines them, the others are one way of drafting each."""
