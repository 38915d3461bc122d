"""Tests of the simulator's checkers with changed records."""
