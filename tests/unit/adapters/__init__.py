"""Tests of third-party environments as tasks."""
