"""Checks and queries over a finished or running log: audit, replay, why, export."""
