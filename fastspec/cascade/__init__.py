"""What decides in an adaptive cascade; the loop over its models is `fastspec.patches.cascade`.

- `records` are answers and the features that describe them, `predictor` gives the probability that it is good, which
  `calibration` makes hold
- `decisions` are the rules made of it, `memory` what is kept of texts
"""
