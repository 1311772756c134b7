"""Replacements for the calls of Linux, with nothing but the standard library of a Unix."""
