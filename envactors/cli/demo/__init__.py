"""``envactors demo``: learn to balance CartPole on actors, with a live view."""
