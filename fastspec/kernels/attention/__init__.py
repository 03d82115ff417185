"""Attention of tree nodes over a cache: `tree.py` in general, `few.py` of few queries, `hopper.py` behind long prefixes on Hopper."""
