"""Vector envs: many envs in actors, stepped as one through shared memory."""
