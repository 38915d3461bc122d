"""Tests of the simulator's checkers, one changed record at a time."""
