"""The engine.

- a call: `call` (request and outcome), `loop` (from its prompt to its end), `batching` (its prompts on the host), `rounds` (a turn of
  the batch)
- a round: `round_program` (its phases), `round_state` (the tensors that rounds share), `verifier` (who chooses tokens), `schedule` (how
  it is launched)
- `engine`: a target, a drafter and the programs of their rounds; `fallback`: rounds without drafts
- open batches: `open_batch` (prompts that come and go), `row_rules` (settings of each row), `row_counts` (how many rows there are)
"""
