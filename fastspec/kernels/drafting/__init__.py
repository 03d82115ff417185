"""The draft phase: what a head reads, and how its tree grows and is laid out."""
