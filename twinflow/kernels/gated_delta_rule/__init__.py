"""Gated delta rule over packed sequences, its matrix state kept by row index."""
