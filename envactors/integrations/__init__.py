"""Drop-in classes for other libraries' vector envs; each module imports its own framework only."""
