"""Chaos kit: vector envs under real faults, with every result checked; see `__main__`.

`chaos.run` has the call, and the modules beside it the parts of a run. The inventory of what a process holds is in
`leaks`.
"""
