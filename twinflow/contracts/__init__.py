"""Contracts: what crosses every boundary inside Twinflow. Pure dataclasses and functions; no torch, no I/O."""
