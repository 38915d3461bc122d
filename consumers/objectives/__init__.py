"""Advantages and losses of a batch."""
