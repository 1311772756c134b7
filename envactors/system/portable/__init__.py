"""What stands in for the calls of Linux on other platforms: the standard library of a Unix alone."""
