"""The parent's half of an actor: handle, future, request table, supervisor, policy, the one place that waits."""
