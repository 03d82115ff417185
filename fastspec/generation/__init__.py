"""Decoding in torch alone: no transformers, no Triton."""
