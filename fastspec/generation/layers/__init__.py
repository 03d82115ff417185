"""Decoder layers as data: `decoder.py` a layer, `mixers.py` what mixes the tokens of a text in it, `packing.py` weights side by side."""
