"""Rollouts: the policy runs in the workers, which write whole trajectories into shared memory.

The worker's half is `envactors.rollout.policy_loop`, which imports nothing of the parent's.
"""
