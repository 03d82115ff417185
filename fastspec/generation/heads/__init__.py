"""Drafting heads: `load.py` is the way of a head from its files to a bound value, `module.py` the head itself."""
