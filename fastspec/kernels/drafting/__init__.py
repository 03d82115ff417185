"""The draft phase: what a head reads, how its tree grows and is laid out, and all of it in one launch."""
