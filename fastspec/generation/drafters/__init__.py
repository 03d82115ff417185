"""What drafts: `base.py` says what a drafter is, the others are one way of drafting each."""
