"""Prometheus metrics of a run, derived from its log."""
