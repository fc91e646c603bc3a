"""Layers shared by the families: plain objects holding weights and a kernel set, called with (x, step)."""
