"""A router in several processes on one HTTP port. One owns the registry, the view, every choice and the gate; the others have
HTTP, text and sessions of their own with the workers, and ask it.

    children   the owner's side: starts the others, answers them, starts one again that has died
    child      an HTTP process
    remote     gate and placer as an HTTP process has them
    messages   what they say to each other
    line       the socket between two of them
    merge      one page of metrics from all

They are of one installation and one user, joined by a socket pair that the child inherits, so messages are pickled dataclasses.
"""
