"""transformers models as targets: known families, the generic mode for others, and limits of either."""
