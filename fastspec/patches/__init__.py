"""transformers' side: models are patched, and their `generate` calls decoded by the engine.

- `api`, `report`, `session`: `patch`, `unpatch`, `continuous` and `report`, and the undo log behind them
- `hf/`: a transformers model as a target
- `call/`: one `generate` call, from its arguments to its output
- `assistants/`: from a name or a config to a decoding
- `cascade/`: the loop over a cascade's stages
- `continuous_batch`, `open_turns`, `open_ranks`: open batches, their thread, and those of several processes
- `backends`, `checks/`, `tuning/`, `warmup`: which kernels run, whether they are right on this device, and what is done
  once for it
"""
