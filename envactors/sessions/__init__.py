"""Sessions: actors that one user at a time leases, as language agents need for their environments.

The pool, its bookkeeping, and the outcomes of sessions live here. Actors and their processes live in `envactors.actor`.
"""
