"""Checks of the Helm chart and the Dockerfiles: `python -m tools.chart.check`."""
