"""Objectives against the code of other packages; run by `make test-objectives`."""
