"""Metrics of a run for experiment trackers; see docs/monitoring.md."""
