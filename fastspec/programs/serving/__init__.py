"""An OpenAI-compatible server on an open batch: transformers' own, with a manager of models and one of generation in
place of its."""
