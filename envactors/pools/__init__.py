"""Pools of actors: `ActorPool` for methods of equal envs, and `Executor` for functions."""
