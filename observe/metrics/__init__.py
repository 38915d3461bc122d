"""Metrics of a run for Prometheus, made from its log; they decide nothing of the run."""
