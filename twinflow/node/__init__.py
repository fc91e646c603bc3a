"""Node: what every Twinflow process has besides its work: who else is there (`registry`). No torch."""
