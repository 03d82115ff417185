"""Drafts read off what followed what: the drafter, how its trees grow, and its storages."""
