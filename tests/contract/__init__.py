"""Contract tests: a suite per port, run on every implementation."""
