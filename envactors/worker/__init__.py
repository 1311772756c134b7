"""The worker: its start, its loop over requests, its envs, and the processes that start and end workers."""
