"""Tasks: data sources, environments and rewards."""
