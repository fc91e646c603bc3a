"""Replay of request traces against the real router in virtual time: hours of a large cluster in minutes of one core.

Real: view, index, rates, charges, policies, choice, the messages of a session. Simulated: workers (`workers`, `decode`, by
the timing model of `timing`), their caches (`cache`) and links (`links`). `twinflow bench route` is the command.
"""
