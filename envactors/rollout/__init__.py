"""Rollouts: the policy runs in the workers, which write whole trajectories into shared memory.

Take a rollout of 100 steps of four envs, with two envs per actor. `WorkerRolloutEngine.start` takes shared memory for
400 results, and sends an order to each of the two workers. Each worker calls its policy for its two envs, steps them,
and writes the results, 100 times. Then it replies, and `assemble` returns the memory as arrays of shape (100, 4, ...).

    caller      engine ── part, one per actor ── rollout_envs           at the end, assembly makes the result
                            │ order    ▲ reply       │ reads
    shared                  ▼          │        trajectory
    worker                policy_runner ── env_runner ┘ writes

Three words for three things: a *part* is one actor's share of a rollout, a *piece* is a frame of a reply that comes
before the rest, and a *region* is a span of the memory that a vector shares with its workers.

The caller's half:
    base            Interface of the rollouts of a vector, and the code that the engines of both kinds share
    engine          Rollouts of a vector whose envs run in workers, and those in flight
    part            One actor's part of a rollout: the job that sends orders and takes replies
    rollout_envs    How far each env of an actor has got, what it does next, its last result, and its errors
    completed_steps Records the steps that a worker has completed in episodes and journals
    memory          Buffers for trajectories, and the parameters of policies
    assembly        Makes a `Rollout` from a trajectory and from the results that have no array there
    results         `Rollout` and `Evaluation`
    evaluation      Whole episodes: seeded resets with rollouts in between
    inline          The work of both halves for in-process envs

The worker's half, which imports nothing of the caller's:
    policy_runner   Carries out orders, in which the policy and the envs alternate
    env_runner      Runs the envs, and writes their results to the trajectory

Both halves and `inline` use:
    messages        Orders and replies
    env_plan        The rules of episodes: which kind of step an env takes next, with which seed it is reset
    trajectory      The arrays that the caller and its workers share
    policy          The policy of one actor, its context, and its output, which is checked and written to a trajectory
"""
