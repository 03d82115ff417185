"""Every kernel against its reference on small inputs: which inputs, how they are compared, and what is known of this
machine."""
