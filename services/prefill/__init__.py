"""The prefill service: computes prompts for decode workers and lets them read the result. Life of a hand-off:

1. `rpc`     a decode worker opens its one session; a cache layout that is not ours is refused, with both printed.
2. `admit`   its Open is checked against what can run here, and accepted with a lease.
3. `report`  the engine computes the prompt in chunks and reports which blocks are written.
4. `offer`   each report becomes Blocks, FirstToken, Finished under the lease; the latter two are one message where they can be.
5. `offer`   Pulled names what was read; it is Confirmed only if the lease of that very session still stands. The lease ends.

A lease also ends with a release, a cancel, a failure, its age, or its session; each end gives the memory back at the engine.
"""
