"""Crash bundles: a directory for each failure, with a report and the inputs that reproduce it."""
