"""Sums and joins over processes that hold a model together: `reference.py` by torch.distributed, `symmetric.py` for
GPUs of one host."""
