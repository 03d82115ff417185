"""Attention of tree nodes over a cache: `tree.py` in general, `few_queries.py` of few queries, `hopper.py` behind long
prefixes on Hopper; `launches.py` has their launch tables."""
