"""One assisted call: from `generate`'s arguments to a request, and from its outcome to transformers' output."""
