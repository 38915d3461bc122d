"""Data sources, environments and rewards."""
