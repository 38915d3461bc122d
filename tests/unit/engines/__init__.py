"""Tests of the engines part by part; what all engines share is in tests/contract."""
