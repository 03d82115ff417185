"""The engine.

- a call: `call` (request and outcome, what its rounds share, rounds without drafts), `batching` (its prompts on the
  host), `rounds` (from its prompt to its end, a turn of the batch at a time)
- a round: `round_program` (its phases), `verifier` (who chooses tokens), `schedule` (how it is launched)
- `engine`: a target, a drafter and the programs of their rounds
- `open_batch`: prompts that come and go, each with settings of its own
"""
