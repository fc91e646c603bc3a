"""The engine process: scheduling, forward passes, sampling, and its end of every hand-off."""
