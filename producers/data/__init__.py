"""Rows of data sets in common formats, as one lazy sequence of plain JSON."""
