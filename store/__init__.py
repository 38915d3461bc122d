"""Policies and checkpoints on disk, stored under the digest of their bytes."""
