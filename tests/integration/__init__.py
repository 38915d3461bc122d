"""Several parts together on this machine."""
