"""Rollouts: the policy runs in the workers, which write whole trajectories into shared memory.

    caller      engine ── part, one per actor ── rollout_envs        at the end, assembly makes the result
                            │ order    ▲ reply       │ reads
    shared                  ▼          │        trajectory
    worker                policy_runner ── env_runner ┘ writes

The caller's half:
    base            Interface of the rollouts of a vector, and what those of workers and in-process have in common
    engine          Rollouts of a vector whose envs run in workers, and those in flight
    part            One actor's part of a rollout: the job that sends orders and takes replies
    rollout_envs    How far each env of an actor has got: episodes, journals, and last results
    failures        What becomes of the steps that have no results
    memory          Buffers for trajectories, and the parameters of policies
    assembly        Makes a `Rollout` from a trajectory and from everything that has no array there
    results         `Rollout` and `Evaluation`
    evaluation      Whole episodes: seeded resets with rollouts in between
    inline          The work of both halves for in-process envs

The worker's half, which imports nothing of the caller's:
    policy_runner   Carries out orders, in which the policy and the envs alternate
    env_runner      Runs the envs, and writes their results to the trajectory

Both halves and `inline` use:
    messages        Orders and replies
    env_plan        The rules of episodes: which kind of step an env takes next
    trajectory      The arrays that the caller and its workers share
    policy          The policy of one actor, and its context
    policy_output   Checks what a policy returns, and writes it to a trajectory
"""
