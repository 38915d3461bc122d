"""A run's figures for experiment trackers, from its log: see docs/observe.md."""
