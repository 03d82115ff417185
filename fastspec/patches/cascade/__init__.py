"""Adaptive cascades of transformers models: the loop over stages, their models, and kept caches."""
