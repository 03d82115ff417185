"""Programs around the library: they use its public names, and it imports none of them."""
