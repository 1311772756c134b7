"""Rollouts: the policy runs in the workers, which write whole trajectories into shared memory.

    caller      engine ── part, one per actor ── rollout_envs        at the end, assembly makes the result
                            │ order    ▲ reply       │ reads
    shared                  ▼          │        trajectory
    worker                policy_runner ── env_runner ┘ writes

Both halves use `messages` and `env_plan`, the rules of episodes. The worker's half imports nothing of the caller's.
In-process, `inline` does the work of both.
"""
