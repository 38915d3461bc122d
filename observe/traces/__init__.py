"""Traces of groups and steps, derived from the log."""
