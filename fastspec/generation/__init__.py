"""Decoding, in torch alone: no transformers, no Triton.

- `engine/`: a call from its prompts to its answers, the round, and how rounds are launched
- `drafters/`: what proposes draft tokens
- `layers/`, `state/`: a decoder layer as data, and what layers keep of a text between rounds
- `tree`, `verify`, `lockstep`: draft trees, and the tokens that are chosen in them
- `target`, `ops`: the model that is decoded, and the kernels of a backend, as the engine sees them
- `prompt_parts`, `capture`, `profile`, `stats`: how prompts are read, CUDA graphs, and what is measured of rounds
- `encoder_source`, `random_numbers`: what an encoder has read, and random numbers by their place
"""
