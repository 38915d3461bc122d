"""Traces of groups and steps, made from the log; they decide nothing of the run."""
