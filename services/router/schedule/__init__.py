"""Schedule: from a snapshot of the view to a choice of workers. Pure functions on frozen dataclasses."""
