"""``envactors top``: a live table of the actors of a running program."""
