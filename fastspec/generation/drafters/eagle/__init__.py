"""EAGLE heads: the head itself, its checkpoint formats, and the trees that are grown from it."""
