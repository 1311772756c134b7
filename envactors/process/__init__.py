"""Starting and ending worker processes: the helper process, start methods, and the setup of a worker.

System calls are in `envactors.system`. What a worker does once it is set up is in `envactors.worker`.
"""
