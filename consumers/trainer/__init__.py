"""Trainer role: take decided batches, train, commit."""
