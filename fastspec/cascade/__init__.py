"""Decisions of adaptive cascades; the loop over their models is `fastspec.patches.cascade`."""
