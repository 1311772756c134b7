"""Starting and ending worker processes: start methods, fork servers, the reaper, and the programs that they run.

The system calls are in `envactors.system`, since the mailbox needs them, too.
"""
