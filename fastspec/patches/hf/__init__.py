"""transformers models as targets: the families that fastspec knows, the generic mode for others, and what either cannot
do."""
