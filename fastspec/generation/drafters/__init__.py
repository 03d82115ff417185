"""What drafts: `base.py` defines a drafter, the others are one way of drafting each."""
