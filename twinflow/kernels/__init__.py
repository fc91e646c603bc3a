"""Kernels, one folder per operation; `reference.py` is plain torch and the oracle for every faster version."""
