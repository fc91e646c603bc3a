"""Mamba-2's selective state space (SSD) over packed sequences, its matrix state kept by row index."""
