"""Starting and ending worker processes, and the helper processes that do so: fork servers, the reaper, the keeper.

The programs of these helpers are in `envactors.worker`, and the system calls in `envactors.system`, which the mailbox
needs, too.
"""
