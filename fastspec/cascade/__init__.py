"""What decides in an adaptive cascade; the loop over its models is `fastspec.patches.cascade`.

- `features` describe an answer, `predictor` gives the probability that it is good
- `stopping` and `deferral` are the rules made of it, `memory` what is kept of texts
- `labels`, `records`, `trial`, `unit_tests` make training data, `evaluate` and `calibration` judge what came of it
"""
