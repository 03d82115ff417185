"""The engine of a call: `loop.py` is the call from its prompt to its end, `round.py` one round, `schedule.py` how rounds are launched."""
