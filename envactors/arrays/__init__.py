"""Nested specs and batching, on NumPy alone."""
