"""Actors: the parent's half of a worker process, and the handles and futures that users get."""
