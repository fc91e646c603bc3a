"""Dispatch: one session stream per worker, many requests inside; bounded buffers towards the clients."""
