"""Measuring a worker's engine against what its device could do: ceilings, floors, rows, profiles."""
