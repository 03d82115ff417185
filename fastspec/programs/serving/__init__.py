"""An OpenAI-compatible server on an open batch."""
