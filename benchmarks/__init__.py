"""Benchmarks: each prints what it measured and what it compares it with."""
