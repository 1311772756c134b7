"""Random histories of actors and vectors in a simulated world, against the promises; see `__main__`."""
