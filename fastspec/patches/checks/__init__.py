"""Every kernel against its reference: small inputs, how results are compared, what is known of this machine."""
