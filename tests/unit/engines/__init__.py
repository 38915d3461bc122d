"""Tests of engines; tests/contract has the shared ones."""
