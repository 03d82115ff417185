"""Launch tables for this GPU and a model's shapes: what is tried, how it is timed, what is kept."""
