"""Adaptive cascades of transformers models: the loop over stages, the models behind them, and what is kept between
calls."""
