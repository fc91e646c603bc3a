"""Hand-off of blocks and slots: a pure plan, the lease and pull rules, and transports that only execute."""
