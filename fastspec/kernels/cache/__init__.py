"""Keys and values: their moves along the accepted path, and what a round commits and emits."""
