"""Deterministic simulation: production state machines under virtual time and faults."""
