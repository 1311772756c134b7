"""``envactors check``: find defects of an env before training does."""
