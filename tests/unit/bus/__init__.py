"""Tests of single buses; tests/contract has the shared ones."""
