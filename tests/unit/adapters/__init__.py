"""Environments of others as tasks."""
