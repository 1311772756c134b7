"""The calls that only Linux has."""
