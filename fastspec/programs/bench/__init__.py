"""`fastspec bench`: assistants beside transformers' own ways to generate, on the same prompts, output compared."""

from fastspec.programs.bench.run import run_bench

__all__ = ["run_bench"]
