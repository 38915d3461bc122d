"""Policies and checkpoints on disk, named by digest."""
