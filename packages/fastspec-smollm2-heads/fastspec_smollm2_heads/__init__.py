"""Draft heads for SmolLM2-135M-Instruct: one folder a head, of the head's name."""
