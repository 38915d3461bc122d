"""Rows of data sets: files in the formats that people have, as one lazy sequence of plain JSON."""
