"""Decoding, in torch alone: no transformers, no Triton.

- `engine/`: a call from its prompts to its answers, the round, and how rounds are launched
- `drafters/`: what proposes draft tokens; `heads/`: EAGLE heads from a file to a bound module
- `decoder_layer`, `whole_layers`: a decoder layer as data, and layers that a backend runs in one call
- `layer_state`, `sequence_state`: what layers keep of a text between rounds
- `tree`, `verify`: draft trees, and the tokens that are chosen in them
- `target`, `ops`: the model that is decoded, and the kernels of a backend, as the engine sees them
- `capture`, `stats`: CUDA graphs, and what is measured of rounds
"""
