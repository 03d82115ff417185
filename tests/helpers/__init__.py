"""What several test modules use: tiny models and heads, fakes, prompts, comparisons."""
