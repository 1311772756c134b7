"""Drop-in replacements for the vector envs of other libraries, one package per library.

Each package imports only its own library. The modules beside the packages hold what several drop-ins share.
"""
