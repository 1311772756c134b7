"""``envactors bench``: measure an env on actors, in a loop, and with other libraries, side by side."""
