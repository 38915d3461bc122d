"""The HTTP endpoint that agents call, and the worker's port to it."""
