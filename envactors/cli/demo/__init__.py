"""``envactors demo``: learn to balance CartPole on actors while real faults are injected."""
