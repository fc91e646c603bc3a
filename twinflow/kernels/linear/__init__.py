"""Projections by weight matrices as checkpoints store them: (out, in), contiguous."""
