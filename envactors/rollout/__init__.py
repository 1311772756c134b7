"""Rollouts: the policy runs in the workers, which write whole trajectories into shared memory.

The worker's half, `envactors.rollout.policy_loop` and `envactors.rollout.trajectory_writer`, imports nothing of the
parent's.
"""
