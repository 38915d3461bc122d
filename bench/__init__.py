"""Benchmarks of this machine and studies of whole runs."""
