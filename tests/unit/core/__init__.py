"""Tests of the loop and of what stands beside it."""
