"""Slow tests: kill rounds, a real broker, whole runs."""
