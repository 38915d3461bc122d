"""The trainer as a role: it takes batches that were decided, trains and commits."""
