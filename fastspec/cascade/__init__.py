"""What decides in an adaptive cascade; the loop over its models is `fastspec.patches.cascade`.

- `features` describe an answer, `predictor` gives the probability that it is good, which `calibration` makes hold
- `decisions` are the rules made of it, `memory` what is kept of texts
- `records` are the answers that a predictor is trained on
"""
