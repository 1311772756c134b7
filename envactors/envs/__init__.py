"""What the parent knows of the envs of a vector, beside their slots: results, episodes, and what is pending.

`envactors.vector` steps the envs; rollouts and snapshots change what is here, too.
"""
