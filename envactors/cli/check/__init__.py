"""``envactors check``: find what is wrong with an env before training does."""
