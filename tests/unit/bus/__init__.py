"""Tests of the buses one by one; what they share is in tests/contract."""
