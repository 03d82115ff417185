"""The one-launch draft phase: a cooperative kernel (`draft.py`) whose programs run its phases (`phases.py`,
`attention.py`) together.

`fastspec/patches/assistants/fused.py` is the drafter that launches it, and says when that pays.
"""
