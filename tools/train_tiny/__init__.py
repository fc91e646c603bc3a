"""Trains the small real model in `models/twinflow-tiny`: README.md beside this file has the commands."""
