"""What a model keeps of a text between rounds: `sequence.py` of all its layers, the other files of the layers of one kind."""
