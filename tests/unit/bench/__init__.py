"""Tests of the measurements; none asserts a time."""
