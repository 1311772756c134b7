"""The worker: its setup, its loop over requests, and its envs."""
