"""Which settings are the fastest for an env on this machine."""
