"""What `assistant=` names: from a name or a config to a decoding."""
