"""Causal depthwise convolution over packed sequences, its last inputs kept by row index."""
