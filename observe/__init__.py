"""Metrics, traces, trackers and pages of a run, derived from its log."""
