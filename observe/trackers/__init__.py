"""Metrics of a run for experiment trackers; see docs/observe.md."""
